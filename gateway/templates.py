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
import msgspec
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
)
"""Fields that change what is rendered in ways that differ from engine to engine."""

NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Generation(Extension):
    """``{% generation %}``: marks what a model said, for training; the text stays as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body alone."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        self.parts = ("content is" in source and "is iterable" in source) or "for content in" in source
        """Whether it reads contents that are lists itself; they are joined otherwise."""

    @classmethod
    def load(cls, path: str, tokenizer: str | None = None) -> Template:
        """From a file of its own, or the ``chat_template`` of a ``tokenizer_config.json``; names of special tokens come from
        that file, or from one beside it or beside ``tokenizer``. Raises `ValueError`."""
        try:
            source = Path(path).read_text(encoding="utf-8")
            config: dict[str, Any] = {}
            if path.endswith(".json"):
                config = json.loads(source)
                source = _chosen(config.get("chat_template"))
            for near in (path, tokenizer) if not config else ():
                beside = Path(near).with_name("tokenizer_config.json") if near else None
                if beside is not None and beside.is_file():
                    config = json.loads(beside.read_text(encoding="utf-8"))
                    break
            return cls(source, _special(config))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, jinja2.TemplateError) as error:
            raise ValueError(f"{path} is no chat template: {error}") from None

    def render(self, body: dict[str, Any]) -> str:
        """The prompt of a chat completion's body. Raises `Unrendered`."""
        for name in REFUSED:
            if body.get(name) not in (None, True if name == "add_generation_prompt" else None):
                raise Unrendered("parameter", f"{name} changes the prompt")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Unrendered("messages")
        more = body.get("chat_template_kwargs")
        told = dict(more) if isinstance(more, dict) else {}
        if body.get("reasoning_effort") is not None:
            told.setdefault("reasoning_effort", body["reasoning_effort"])
        try:
            return self._template.render(
                **self._names,
                **{
                    "messages": [self._message(message) for message in messages],
                    "tools": _tools(body.get("tools")),
                    "add_generation_prompt": True,
                    **told,
                },
            )
        except Unrendered:
            raise
        except Exception as error:
            # A template is a program of somebody else's.
            raise Unrendered("template", f"{type(error).__name__}: {error}") from None

    def _message(self, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise Unrendered("messages")
        told = dict(message)
        content = told.get("content")
        if isinstance(content, list):
            told["content"] = self._content(content)
        elif content is None:
            told["content"] = ""
        thinking = told.get("reasoning") or told.get("reasoning_content")
        if thinking is not None:
            told["reasoning"] = told["reasoning_content"] = thinking
        calls = told.get("tool_calls")
        if isinstance(calls, list):
            told["tool_calls"] = [_call(call) for call in calls]
        elif "tool_calls" in told:
            del told["tool_calls"]
        return told

    def _content(self, content: list[Any]) -> str | list[Any]:
        texts = []
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise Unrendered("media")
            texts.append(part["text"])
        return [{"type": "text", "text": text} for text in texts] if self.parts else "\n".join(texts)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"]) if function["arguments"] else {}
    except msgspec.DecodeError:
        raise Unrendered("arguments") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> list[Any] | None:
    """As engines list them: read into their own types and written out again, so in the order of those."""
    if not isinstance(tools, list) or not tools:
        return None
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise Unrendered("tools")
        ordered = {name: function[name] for name in ("name", "description", "parameters") if name in function}
        rest = {name: value for name, value in function.items() if name not in ordered}
        found.append({"type": tool.get("type", "function"), "function": {**ordered, **rest}})
    return found


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
