"""A request's body, of any dialect, as the outline of its prompt.

Tools are outlined as engines list them: read into types of their own, so that the order of a tool's outer fields, and how its
JSON is spelled, reach no template, while the order of keys in a schema does.

Bodies are outlined beside requests that run. So only those members are read that are outlined, and a body of more objects or
more pieces than anybody's prompt has is not: what it costs goes by their number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from gateway.dialects.anthropic import BILLING
from gateway.prompt import Thinking
from kv_index.outlines import Message, Outline, Part, Piece, Tool

SYSTEM = ("system", "developer")
PARAMETERS = {
    "chat": ("chat_template", "chat_template_kwargs", "reasoning_effort", "documents"),
    "messages": ("thinking",),
    "responses": ("reasoning",),
}
"""Fields that change what templates render, or where."""
OBJECTS = 32 * 1024
"""Objects and lists in a body, as many as brackets open."""
PIECES = 2048
"""Tools, texts of the system, messages, and what is listed in each of these."""
PARAMETER = 16 * 1024
"""Bytes of a parameter whose keys are sorted; of a longer one the order counts."""
_HEAD = frozenset(("tools", "tool_choice", "system", "instructions", "messages", "input"))
"""Members of which the part before the messages is made."""
_FIRST = ("type", "function", "name", "description", "parameters", "input_schema", "strict")


class Unread(Exception):
    """This body has no outline; ``reason``: ``body``, ``kind``, ``ids``, ``stored``, ``deep``, ``pieces``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])


def outline(kind: str, body: bytes, thinking: Thinking, head: bool = False) -> Outline:
    """The outline of a body; ``kind`` is its route's; ``head``: only of what stands before the messages. Raises `Unread`."""
    read = _READERS.get(kind)
    if read is None:
        raise Unread("kind")
    if body.count(b"{") + body.count(b"[") > OBJECTS:
        raise Unread("pieces")
    try:
        told = _told(kind, body)
        if _pieces(told) > PIECES:
            raise Unread("pieces")
        return read(told, thinking, head)
    except RecursionError:
        raise Unread("deep") from None
    except (ValueError, UnicodeError, TypeError):
        # Not JSON, or what no dialect expects.
        raise Unread("body") from None


def _pieces(told: dict[str, Any]) -> int:
    """How many pieces there are to read, about."""
    lists = [told[name] for name in ("tools", "system", "messages", "input") if isinstance(told.get(name), list)]
    found = sum(map(len, lists))
    if found <= PIECES:
        inside = [each.values() for listed in lists for each in listed if isinstance(each, dict)]
        found += sum([len(value) for values in inside for value in values if isinstance(value, list)])
    return found


def _told(kind: str, body: bytes) -> dict[str, Any]:
    """The members that are outlined. Raises `ValueError` for a body that is no JSON object."""
    parameters = PARAMETERS.get(kind, ())
    told: dict[str, Any] = {}
    for name, raw in _members.decode(body).items():
        if name in parameters and len(memoryview(raw)) > PARAMETER:
            told[name] = bytes(raw).decode()
        elif name in parameters or name in _READ:
            told[name] = msgspec.json.decode(raw)
    return told


def head_of(kind: str, body: bytes) -> bytes:
    """The body without what stands behind the system prompt and without what is not outlined. Raises `Unread`."""
    kept = _HEAD.union(PARAMETERS.get(kind, ()))
    try:
        members = {name: raw for name, raw in _members.decode(body).items() if name in kept}
        for name in ("messages", "input"):
            if name in members:
                members[name] = Raw(b"[" + b",".join(_leading(members[name])) + b"]")
    except RecursionError:
        raise Unread("deep") from None
    except (ValueError, UnicodeError):
        raise Unread("body") from None
    return b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in members.items()]) + b"}"


def _leading(raw: Raw) -> Iterator[bytes]:
    """Those messages of a list that are the system's, in front of all others."""
    if bytes(memoryview(raw)[:1]) != b"[":
        return
    for each in _items.decode(raw):
        role = _members.decode(each).get("role")
        if role is None or msgspec.json.decode(role) not in SYSTEM:
            return
        yield bytes(each)


def _chat(told: dict[str, Any], thinking: Thinking, head: bool) -> Outline:
    listed = _list(told.get("messages"))
    first = next((at for at, each in enumerate(listed) if _object(each).get("role") not in SYSTEM), len(listed))
    system = [text for each in listed[:first] for text in _texts(_object(each).get("content"))]
    messages = [] if head else [_chat_message(_object(each)) for each in listed[first:]]
    last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), 0)
    return Outline(
        parameters=_parameters("chat", told),
        tools=_tools(told.get("tools")),
        system=system,
        messages=messages,
        shown=thinking.shown_from(last, len(messages)),
        first=first,
    )


def _chat_message(told: dict[str, Any]) -> Message:
    pieces = []
    thought = told.get("reasoning") or told.get("reasoning_content")
    if isinstance(thought, str) and thought:
        pieces.append(Piece(Part.THINKING, thought))
    role = _text(told.get("role"))
    pieces += _content(told.get("content"), Part.RESULT if role == "tool" else Part.TEXT)
    pieces += [Piece(Part.CALL, _call(_object(call))) for call in _list(told.get("tool_calls"))]
    if isinstance(told.get("tool_call_id"), str):
        pieces.append(Piece(Part.RESULT, told["tool_call_id"]))
    if isinstance(told.get("name"), str):
        pieces.insert(0, Piece(Part.TEXT, told["name"]))
    return Message(role, tuple(pieces))


def _call(call: dict[str, Any]) -> str:
    """The name, the arguments as templates are given them, the id."""
    function = _object(call.get("function"))
    return " ".join((_text(function.get("name")), _arguments(function.get("arguments")), _text(call.get("id"))))


def _arguments(told: Any) -> str:
    """As an object, written out again, where it is one: so do engines."""
    if isinstance(told, str):
        try:
            found = msgspec.json.decode(told)
        except (ValueError, UnicodeError):
            return told
        return _json(found) if isinstance(found, dict) else told
    return "" if told is None else _json(told)


def _messages(told: dict[str, Any], thinking: Thinking, head: bool) -> Outline:
    listed = [_object(each) for each in _list(told.get("messages"))]
    given = told.get("system")
    if isinstance(given, str) and given.startswith(BILLING):
        given = given.partition("\n")[2]
    # Of blocks engines leave out the whole.
    system = [text for text in _texts(given) if text and not text.startswith(BILLING)]
    if head:
        listed = []
    messages = [Message(_text(each.get("role")), tuple(_blocks(each.get("content")))) for each in listed]
    last = 0
    for at, message in enumerate(listed):
        if message.get("role") == "user" and not _only_results(message.get("content")):
            last = at
    return Outline(
        parameters=_parameters("messages", told),
        tools=_tools(told.get("tools")),
        system=system,
        messages=messages,
        shown=thinking.shown_from(last, len(messages)),
    )


def _only_results(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all("tool_use_id" in _object(block) for block in content)


def _blocks(content: Any) -> Iterator[Piece]:
    """Pieces of Anthropic's content; ``cache_control`` is no part of a prompt."""
    if isinstance(content, str):
        yield Piece(Part.TEXT, content)
        return
    for each in _list(content):
        block = _object(each)
        if isinstance(block.get("text"), str):
            yield Piece(Part.TEXT, block["text"])
        elif isinstance(block.get("thinking"), str):
            yield Piece(Part.THINKING, block["thinking"])
        elif "tool_use_id" in block:
            yield from _content(block.get("content"), Part.RESULT)
            yield Piece(Part.RESULT, _text(block["tool_use_id"]))
        elif "input" in block:
            yield Piece(Part.CALL, " ".join((_text(block.get("name")), _json(block["input"]), _text(block.get("id")))))
        elif "source" in block:
            yield Piece(Part.MEDIA, _json(block["source"]))


def _responses(told: dict[str, Any], thinking: Thinking, head: bool) -> Outline:
    if told.get("previous_response_id") is not None or told.get("conversation") is not None:
        # What came before is stored by the engine, and not in the body.
        raise Unread("stored")
    listed = told.get("input")
    if isinstance(listed, str):
        listed = [{"role": "user", "content": listed}]
    items = [_object(each) for each in _list(listed)]
    first = next((at for at, item in enumerate(items) if item.get("role") not in SYSTEM), len(items))
    system = [told["instructions"]] if isinstance(told.get("instructions"), str) and told["instructions"] else []
    system += [text for item in items[:first] for text in _texts(item.get("content"))]
    messages = [] if head else [_item(item) for item in items[first:]]
    last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), 0)
    return Outline(
        parameters=_parameters("responses", told),
        tools=_tools(told.get("tools")),
        system=system,
        messages=messages,
        shown=thinking.shown_from(last, len(messages)),
        first=first,
        where="input",
    )


def _item(item: dict[str, Any]) -> Message:
    kind = item.get("type")
    if kind == "reasoning":
        texts = [*_texts(item.get("summary")), *_texts(item.get("content"))]
        return Message("assistant", tuple([Piece(Part.THINKING, text) for text in texts]))
    if kind == "function_call":
        told = (_text(item.get("name")), _arguments(item.get("arguments")), _text(item.get("call_id")))
        return Message("assistant", (Piece(Part.CALL, " ".join(told)),))
    if kind == "function_call_output":
        output = item.get("output")
        pieces = [*_content(output, Part.RESULT), Piece(Part.RESULT, _text(item.get("call_id")))]
        return Message("tool", tuple(pieces))
    if kind not in (None, "message"):
        return Message("assistant" if _text(kind).endswith("_call") else "tool", (Piece(Part.CALL, _json(item)),))
    return Message(_text(item.get("role")), tuple(_content(item.get("content"), Part.TEXT)))


def _prompt(told: dict[str, Any], thinking: Thinking, head: bool) -> Outline:
    text = told.get("prompt", told.get("text"))
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str):
        raise Unread("ids" if "input_ids" in told or isinstance(text, list) else "body")
    return Outline(text=text)


_READ = _HEAD | {"previous_response_id", "conversation", "prompt", "text", "input_ids"}
_READERS = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "completions": _prompt,
    "generate": _prompt,
}


def _object(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise Unread("body")
    return told


def _list(told: Any) -> list[Any]:
    if told is None:
        return []
    if not isinstance(told, list):
        raise Unread("body")
    return told


def _text(told: Any) -> str:
    return told if isinstance(told, str) else ""


def _json(told: Any) -> str:
    return msgspec.json.encode(told).decode()


def _texts(content: Any) -> list[str]:
    """Texts of a content, given as one or as parts."""
    if isinstance(content, str):
        return [content] if content else []
    return [part["text"] for part in map(_object, _list(content)) if isinstance(part.get("text"), str)]


def _content(content: Any, part: Part) -> Iterator[Piece]:
    if isinstance(content, str):
        if content:
            yield Piece(part, content)
        return
    for each in _list(content):
        told = _object(each)
        if isinstance(told.get("text"), str):
            yield Piece(part, told["text"])
        elif isinstance(told.get("refusal"), str):
            yield Piece(part, told["refusal"])
        else:
            yield Piece(Part.MEDIA, _json({name: value for name, value in told.items() if name != "cache_control"}))


def _parameters(kind: str, told: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in PARAMETERS[kind]:
        value = told.get(name)
        if kind == "responses" and isinstance(value, dict):
            value = value.get("effort")
        if value is not None:
            found[name] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return found


def _tools(listed: Any) -> list[Tool]:
    return [_tool(_object(each)) for each in _list(listed)]


def _tool(tool: dict[str, Any]) -> Tool:
    told = _ordered(tool)
    function = told.get("function")
    if isinstance(function, dict):
        told["function"] = function = _ordered(function)
    named = function if isinstance(function, dict) else told
    return Tool(_text(named.get("name")) or _text(named.get("type")), _json(told), told)


def _ordered(tool: dict[str, Any]) -> dict[str, Any]:
    known = {name: tool[name] for name in _FIRST if tool.get(name) is not None}
    return known | {name: tool[name] for name in sorted(tool.keys() - set(_FIRST)) if name != "cache_control"}
