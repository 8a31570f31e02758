"""Chat templates, run as engines run them: jinja2 in its sandbox, with the functions that engines give templates.

What a template does with thinking, tools and system prompts need not be known, since the template itself is run. Engines
prepare messages before (vLLM's ``entrypoints/chat_utils.py``, SGLang's ``serving_chat.py``): arguments of tool calls become
objects, lists of text parts one text, and thinking has two names. Needs the extra ``warmroute[tokens]``.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.preparing import Unrendered

REFUSED = (
    "chat_template",
    "documents",
    "continue_final_message",
    "add_generation_prompt",
    "echo",
    "mm_processor_kwargs",
    "truncate_prompt_tokens",
    "add_special_tokens",
)
"""Fields that change what is rendered in ways that differ from engine to engine, ..."""
USUAL = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "echo": False}
"""... unless they say what holds without them."""
OWN = ("messages", "tools", "chat_template", "tokenize", "documents")
"""Arguments of templates that a request may not name itself."""

NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Generation(Extension):
    """``{% generation %}``: marks what a model said, for training; the text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # What is set inside is not set behind it.
        return [nodes.Scope(body)]


class Template:
    """A compiled chat template."""

    def __init__(self, source: str, names: dict[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._names = names or {}
        self._developers = '"developer"' in source or "'developer'" in source
        """Whether it knows the role; vLLM makes such messages the system's otherwise."""
        self.parts = _reads_parts(environment.parse(source))
        """Whether it reads contents part by part: all are lists of parts then, and one text otherwise."""

    @classmethod
    def load(cls, path: str, tokenizer: str | None = None) -> Template:
        """From a file of its own, or the ``chat_template`` of a ``tokenizer_config.json``; names of special tokens come from
        that file, or from one beside it or beside ``tokenizer``. Raises `ValueError`."""
        try:
            source = Path(path).read_text(encoding="utf-8")
            config: dict[str, Any] = {}
            if path.endswith(".json"):
                config = _mapping(json.loads(source))
                source = _chosen(config.get("chat_template"))
            for near in (path, tokenizer) if not config else ():
                beside = Path(near).with_name("tokenizer_config.json") if near else None
                if beside is not None and beside.is_file():
                    config = _mapping(json.loads(beside.read_text(encoding="utf-8")))
                    break
            return cls(source, _special(config))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, jinja2.TemplateError) as error:
            raise ValueError(f"{path} is no chat template: {error}") from None

    def render(self, body: dict[str, Any]) -> str:
        """The prompt of a chat completion's body. Raises `Unrendered`."""
        for name in REFUSED:
            if body.get(name) is not None and body[name] is not USUAL.get(name):
                raise Unrendered("parameter", f"{name} changes the prompt")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Unrendered("messages")
        more = body.get("chat_template_kwargs")
        told = dict(more) if isinstance(more, dict) else {}
        if not told.keys().isdisjoint(OWN):
            raise Unrendered("parameter", "chat_template_kwargs has what is the request's own")
        effort = body.get("reasoning_effort")
        if effort is not None:
            told["reasoning_effort"] = effort
            told.setdefault("enable_thinking", effort != "none")
        try:
            return self._template.render(
                {
                    **self._names,
                    **told,
                    "messages": self._messages(messages),
                    "tools": _tools(body.get("tools")),
                    "documents": None,
                    "add_generation_prompt": True,
                    "continue_final_message": False,
                }
            )
        except Unrendered:
            raise
        except Exception as error:
            # A template is a program of somebody else's.
            raise Unrendered("template", f"{type(error).__name__}: {error}") from None

    def _messages(self, messages: list[Any]) -> list[dict[str, Any]]:
        told = [self._message(message) for message in messages]
        if self._developers or not any(message["role"] == "developer" for message in told):
            return told
        rest = [message for message in told if message["role"] not in ("developer", "system")]
        system = [message for message in told if message["role"] in ("developer", "system")]
        if len(system) == 1 and system[0] is told[0]:
            first = {name: value for name, value in system[0].items() if name != "tools"}
            return [{**first, "role": "system"}, *rest]
        # One message of the system, in front.
        texts = [_text(message["content"]) for message in system]
        return [{"role": "system", "content": "\n\n".join([text for text in texts if text])}, *rest]

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Unrendered("messages")
        role = message["role"]
        told: dict[str, Any] = {"role": role, "content": self._content(message.get("content"), role)}
        if role == "assistant":
            calls, thinking = message.get("tool_calls"), message.get("reasoning")
            if thinking is None:
                thinking = message.get("reasoning_content")
            if isinstance(calls, list) and calls:
                told["tool_calls"] = [_call(call) for call in calls]
            if thinking is not None:
                told["reasoning"] = told["reasoning_content"] = thinking
        elif role == "tool" and "tool_call_id" in message:
            told["tool_call_id"] = message["tool_call_id"]
        for name in ("name", "task"):
            if isinstance(message.get(name), str):
                told[name] = message[name]
        if role == "developer":
            told["tools"] = message.get("tools")
        return told

    def _content(self, content: Any, role: Any) -> str | list[Any]:
        if content is None:
            content = []
        elif isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, list):
            raise Unrendered("messages")
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise Unrendered("media")
        if role == "system":
            content = [part for part in map(_without_billing, content) if part is not None]
        if not self.parts:
            content = [part for part in content if part["text"]]
        # What tools say is one text for all templates.
        return content if self.parts and role != "tool" else "\n".join([part["text"] for part in content])


BILLING = "x-anthropic-billing-header"
"""How a line begins that Claude Code puts before its system prompt; it changes from request to request, and engines cut it."""


def _without_billing(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content])


def _call(call: Any) -> Any:
    """As engines read it into their own types and write it out again, so in the order of those."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    # What is no object cannot be written by templates.
    arguments = arguments if isinstance(arguments, dict) else {}
    ordered = {name: call[name] for name in ("id", "function", "type") if name in call}
    names = {"arguments": arguments, **{name: value for name, value in function.items() if name == "name"}}
    return {**ordered, "function": names, **{name: value for name, value in call.items() if name not in ordered}}


def _tools(tools: Any) -> list[Any] | None:
    """As engines list them: read into their own types and written out again, so in the order of those."""
    if not isinstance(tools, list) or not tools:
        return None
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise Unrendered("tools")
        deferred = tool.get("defer_loading")
        told = {name: function.get(name) for name in ("name", "description", "parameters")}
        more = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
        told |= {name: value for name, value in more.items() if value is not None}
        whole = {"type": tool.get("type", "function"), "function": told}
        found.append(whole if deferred is None else {**whole, "defer_loading": deferred})
    return found


def _mapping(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise jinja2.TemplateError("a configuration is an object")
    return told


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether it has a loop over a message's content, by that name or as what a macro is given."""

    def is_content(node: nodes.Node | None) -> bool:
        while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            node = node.node
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    handed = set()
    inside = set()
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        calls = [call for call in tree.find_all(nodes.Call) if getattr(call.node, "name", None) == macro.name]
        given = {name for call in calls for name, value in zip(names, call.args, strict=False) if is_content(value)}
        given |= {keyword.key for call in calls for keyword in call.kwargs if is_content(keyword.value)}
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if getattr(loop.iter, "name", None) in given:
                handed.add(id(loop))
    return any(
        is_content(loop.iter)
        or id(loop) in handed
        or (id(loop) not in inside and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content")
        for loop in tree.find_all(nodes.For)
    )


def _chosen(told: Any) -> str:
    if isinstance(told, list):
        named = {each.get("name"): each.get("template") for each in told if isinstance(each, dict)}
        told = named.get("default")
    if not isinstance(told, str):
        raise jinja2.TemplateError("it has no chat_template")
    return told


def _special(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in NAMES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that jinja2's own makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
