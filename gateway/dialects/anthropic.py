"""Anthropic's Messages API, as vLLM and SGLang serve it too."""

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects import Reading, Route, Usage
from gateway.dialects.fields import (
    Common,
    Field,
    read_common,
)
from gateway.dialects.openai import object_at
from gateway.errors import Fault
from gateway.http.sse import payload
from gateway.prompt import Prompt, Thinking, digest, encode

BILLING = "x-anthropic-billing-header:"
"""A line that Claude Code puts first and changes on every request; engines strip it, so must the key."""


class Block(msgspec.Struct, gc=False):
    """One content block; ``cache_control`` is left out on purpose, for clients move it from turn to turn."""

    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Field = UNSET
    tool_use_id: str | None = None
    content: Field = UNSET
    source: Field = UNSET


class Message(msgspec.Struct, gc=False):
    """One message."""

    role: str | None = None
    content: str | list[Block] | None = None


class Messages(Common):
    """``/v1/messages`` and ``/v1/messages/count_tokens``."""

    messages: list[Message] | None = None
    system: str | list[Block] | None = None
    tools: Field = UNSET
    thinking: Field = UNSET


_messages = msgspec.json.Decoder(Messages)
_raw_blocks = msgspec.json.Decoder(list[Block])


class Anthropic:
    """Messages and token counting."""

    name = "anthropic"
    routes = {
        b"/v1/messages": Route("messages"),
        b"/v1/messages/count_tokens": Route("count_tokens", generates=False),
    }

    def read(self, route: Route, body: bytes, light: bool = False) -> Reading:
        """One typed decode; a body of unexpected types is routed by its raw bytes."""
        reading = Reading()
        request = read_common(_messages, reading, body, route.generates)
        if request is None:
            return reading
        if route.generates:
            reading.make_prompt = lambda thinking: messages_prompt(request, thinking)
            reading.tool = lambda: _tool(request)
        return reading

    def error(self, fault: Fault) -> bytes:
        """``{"type": "error", "error": {"type", "message"}}``."""
        return msgspec.json.encode({"type": "error", "error": {"type": _kind(fault), "message": fault.message}})

    def error_event(self, fault: Fault, route: Route) -> bytes:
        """``event: error``; this dialect has no ``[DONE]``."""
        return b"event: error\ndata: " + self.error(fault) + b"\n\n"

    def opens(self, event: bytes) -> bool:
        """A message, or a block of it, without content yet."""
        return payload(event)[0] in (b"message_start", b"content_block_start", b"ping")

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """``event: error`` before anything else."""
        name, data = payload(event)
        if name != b"error" and b'"error"' not in data:
            return None
        try:
            body = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return (500, "") if name == b"error" else None
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict):
            return (500, "") if name == b"error" else None
        return _STATUS.get(str(error.get("type")), 500), str(error.get("message") or "")

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """Input tokens here leave out what the cache gave: they are added up."""
        found = object_at(tail, b'"usage"')
        if found is None:
            return None
        try:
            counts = _counts.decode(found)
        except msgspec.DecodeError:
            return None
        if counts.input_tokens is None:
            return Usage(None, counts.output_tokens, None)
        prompt = counts.input_tokens + (counts.cache_read_input_tokens or 0) + (counts.cache_creation_input_tokens or 0)
        return Usage(prompt, counts.output_tokens, counts.cache_read_input_tokens)


def _tool(request: Messages) -> str | None:
    """The tool whose result ends the request; ``None`` if something else does."""
    messages = request.messages or ()
    last = messages[-1].content if messages else None
    if not isinstance(last, list) or not any(block.type == "tool_result" for block in last):
        return None
    for message in reversed(messages):
        if message.role == "assistant" and isinstance(message.content, list):
            names = [block.name for block in message.content if block.type == "tool_use"]
            return (names[-1] or "") if names else ""
    return ""


class _Counts(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


_counts = msgspec.json.Decoder(_Counts)

_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
    "api_error": 500,
}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _kind(fault: Fault) -> str:
    return _KINDS.get(fault.status) or ("invalid_request_error" if fault.status < 500 else "api_error")


def messages_prompt(request: Messages, thinking: Thinking) -> Prompt:
    """Tools, system, messages, as the engines' templates order them; the billing line is left out."""
    parts: list[bytes | Raw] = []
    for field in (request.thinking, request.tools):
        if not isinstance(field, UnsetType):
            parts += (b"\x00\x01", field)
    parts.append(b"\x00\x02system\x00\x03")
    if isinstance(request.system, str):
        parts.append(encode(_without_billing(request.system)))
    else:
        for block in request.system or []:
            # Engines leave out the whole block.
            if not (block.text or "").startswith(BILLING):
                parts.append(encode(block.text or ""))
    lead = len(parts)
    messages = request.messages or []
    last_user = 0
    if thinking is not Thinking.KEEP:
        for at, message in enumerate(messages):
            if message.role == "user" and not _only_results(message):
                last_user = at
    shown = thinking.shown_from(last_user, len(messages))
    ends: list[int] = []
    for at, message in enumerate(messages):
        parts += (b"\x00\x02", encode(message.role or ""), b"\x00\x03")
        if isinstance(message.content, str):
            parts.append(encode(message.content))
        else:
            for block in message.content or []:
                _block(parts, block, thinking=at >= shown)
        ends.append(len(parts))
    asks = bool(messages) and messages[-1].role == "user" and not _only_results(messages[-1])
    return Prompt(parts, ends, asks=asks, lead=(0, lead))


def _block(parts: list[bytes | Raw], block: Block, thinking: bool) -> None:
    if block.text is not None:
        parts.append(encode(block.text))
    elif block.thinking is not None:
        if thinking:
            parts += (encode(block.thinking), b"\x00\x04")
    elif block.tool_use_id is not None:
        parts += (b"\x00\x03", encode(block.tool_use_id))
        _result(parts, block.content)
    elif not isinstance(block.input, UnsetType):
        parts += (b"\x00\x04", encode(block.id or ""), encode(block.name or ""), block.input)
    elif not isinstance(block.source, UnsetType):
        parts.append(digest(block.source))


def _result(parts: list[bytes | Raw], content: Field) -> None:
    """A tool's result: a string, or blocks whose ``cache_control`` must not count."""
    if isinstance(content, UnsetType):
        return
    raw: Raw = content
    try:
        blocks: list[Any] = _raw_blocks.decode(raw)
    except msgspec.DecodeError:
        parts.append(raw)
        return
    for block in blocks:
        # One level is all that templates know. What stands deeper stays as it is: read level by level, a body of many
        # levels would be read as many times.
        if block.tool_use_id is not None and block.text is None and block.thinking is None:
            parts += (b"\x00\x03", encode(block.tool_use_id))
            if not isinstance(block.content, UnsetType):
                parts.append(block.content)
        else:
            _block(parts, block, thinking=False)


def _only_results(message: Message) -> bool:
    blocks = message.content
    return isinstance(blocks, list) and bool(blocks) and all(block.tool_use_id is not None for block in blocks)


def _without_billing(text: str) -> str:
    if text.startswith(BILLING):
        _, _, text = text.partition("\n")
    return text


DIALECT = Anthropic()
