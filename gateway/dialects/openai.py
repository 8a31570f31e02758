"""OpenAI's API as vLLM, SGLang, TensorRT-LLM and llama.cpp speak it."""

import re
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.dialects import Reading, Route, Usage
from gateway.dialects.chat import (
    Chat,
    Completions,
    Responses,
    chat_prompt,
    chat_tool,
    completion_prompt,
    responses_prompt,
    responses_tool,
    token_ids,
)
from gateway.dialects.fields import (
    Common,
    Field,
    read_common,
    text_of,
)
from gateway.errors import Fault
from gateway.http.sse import payload
from gateway.prompt import Prompt, Thinking

_chat = msgspec.json.Decoder(Chat)
_responses = msgspec.json.Decoder(Responses)
_completions = msgspec.json.Decoder(Completions)
_common = msgspec.json.Decoder(Common)


class _Begun(msgspec.Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None

    @property
    def tells(self) -> bool:
        """Something was generated."""
        return self.finish_reason is not None or any(value for key, value in self.delta.items() if key != "role")


class _Opening(msgspec.Struct):
    choices: list[_Begun]


_opening = msgspec.json.Decoder(_Opening)


class OpenAI:
    """Chat, completions, responses, embeddings and their like."""

    name = "openai"
    routes = {
        b"/v1/chat/completions": Route("chat"),
        b"/v1/completions": Route("completions"),
        b"/v1/responses": Route("responses"),
        b"/v1/embeddings": Route("embeddings", generates=False),
        b"/v1/rerank": Route("rerank", generates=False),
        b"/rerank": Route("rerank", generates=False),
        b"/v2/rerank": Route("rerank", generates=False),
        b"/v1/score": Route("score", generates=False),
        b"/score": Route("score", generates=False),
        b"/pooling": Route("pooling", generates=False),
        b"/classify": Route("classify", generates=False),
        b"/v1/moderations": Route("moderations", generates=False),
        b"/tokenize": Route("tokenize", generates=False),
        b"/v1/tokenize": Route("tokenize", generates=False),
        b"/detokenize": Route("tokenize", generates=False),
        b"/v1/detokenize": Route("tokenize", generates=False),
        b"/v1/audio/transcriptions": Route("audio", generates=False, opaque=True),
        b"/v1/audio/translations": Route("audio", generates=False, opaque=True),
        b"/v1/audio/speech": Route("audio", generates=False, opaque=True),
        b"/v1/images/generations": Route("images", generates=False, opaque=True),
        b"/v1/images/edits": Route("images", generates=False, opaque=True),
        b"/v1/files": Route("files", generates=False, opaque=True, methods=(b"POST", b"GET")),
    }

    def read(self, route: Route, body: bytes, light: bool = False) -> Reading:
        """One typed decode; a body of unexpected types is routed by its raw messages."""
        reading = Reading()
        late = light and route.kind == "chat"
        decoder: msgspec.json.Decoder[Any] = _common if late else _DECODERS.get(route.kind, _common)
        common = read_common(decoder, reading, body, route.generates)
        if common is None:
            return reading
        if not route.generates:
            return reading
        reading.namespace = namespace_of(common)
        if reading.stream and route.kind in ("chat", "completions"):
            reading.untold = getattr(common, "stream_options", UNSET) is UNSET and not late
        if late:
            reading.make_prompt = lambda thinking: _late_prompt(body, thinking)
        elif isinstance(common, Chat):
            reading.make_prompt = lambda thinking: chat_prompt(common, thinking)
            reading.tool = lambda: chat_tool(common)
        elif isinstance(common, Responses):
            reading.previous = text_of(common.previous_response_id)
            reading.conversation = _conversation(common.conversation)
            reading.make_prompt = lambda thinking: responses_prompt(common)
            reading.tool = lambda: responses_tool(common)
        else:
            reading.ids = cache(lambda: token_ids(common.prompt))
            reading.make_prompt = lambda thinking: completion_prompt(common.prompt)
        return reading

    def error(self, fault: Fault) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return b'{"error":' + _error(fault) + b"}"

    def error_event(self, fault: Fault, route: Route) -> bytes:
        """An error event and no ``[DONE]``: whoever looks for that alone must not take the answer for whole."""
        if route.kind == "responses":
            event = {"type": "error", "sequence_number": 0, "code": fault.kind, "message": fault.message, "param": None}
            return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
        return b'data: {"error":' + _error(fault) + b"}\n\n"

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """An error object in the first event."""
        name, data = payload(event)
        if b'"finish_reason":"abort"' in data:
            # What vLLM ends a stream with when it shuts down: the answer is cut, though it looks complete.
            return 503, "the engine gave the answer up"
        return error_in(data) or (_responses_error(data) if name == b"error" else None)

    def opens(self, event: bytes) -> bool:
        """A role and nothing else; of responses, that there is one."""
        name, data = payload(event)
        if name in (b"response.created", b"response.queued", b"response.in_progress"):
            return True
        if b'"role"' not in data:
            return False
        try:
            choices = _opening.decode(data).choices
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        return bool(choices) and not any(choice.tells for choice in choices)

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """From the chunk before ``[DONE]``, or the whole body's ``usage``."""
        return usage_in(tail)


def _error(fault: Fault) -> bytes:
    return msgspec.json.encode(
        {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.status}
    )


def _responses_error(data: bytes) -> tuple[int, str]:
    """(status, message) of an error event of ``/v1/responses``, whose fields stand at the top."""
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        body = None
    if not isinstance(body, dict):
        return 500, ""
    code = body.get("code")
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else 500, str(body.get("message") or "")


def error_in(data: bytes) -> tuple[int, str] | None:
    """(status, message) of an error object: ``{"error": {...}}``, ``{"error": "..."}`` or SGLang's flat form."""
    if b'"error"' not in data:
        return None
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if error is None and body.get("object") == "error":
        error = body
    if error is None:
        return None
    if not isinstance(error, dict):
        return 500, str(error)
    code = error.get("code")
    if isinstance(code, str) and code.isdigit():
        code = int(code)
    return code if isinstance(code, int) and 400 <= code <= 599 else 500, str(error.get("message") or "")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


_counts = msgspec.json.Decoder(_Counts)


_OBJECT = re.compile(rb"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})")
"""The value after a key: an object with at most one level of objects in it, as all usage objects are."""


def object_at(data: bytes, key: bytes) -> bytes | None:
    """The JSON object that is the value of the last ``key`` in ``data`` that has one; ``None`` if there is none."""
    at = data.rfind(key)
    while at >= 0:
        found = _OBJECT.match(data, at + len(key))
        if found is not None:
            return found[1]
        at = data.rfind(key, 0, at)
    return None


def usage_in(tail: bytes) -> Usage | None:
    """Counts of the last ``usage`` object in ``tail``."""
    found = object_at(tail, b'"usage"')
    if found is None:
        return _timings(tail)
    try:
        counts = _counts.decode(found)
    except msgspec.DecodeError:
        return None
    details = counts.prompt_tokens_details or counts.input_tokens_details
    prompt = counts.prompt_tokens if counts.prompt_tokens is not None else counts.input_tokens
    completion = counts.completion_tokens if counts.completion_tokens is not None else counts.output_tokens
    if prompt is None and completion is None:
        return None
    return Usage(prompt, completion, details.cached_tokens if details else None)


class _Timings(msgspec.Struct):
    cache_n: int
    prompt_n: int
    predicted_n: int | None = None


_timings_of = msgspec.json.Decoder(_Timings)


def _timings(tail: bytes) -> Usage | None:
    """What llama.cpp ends every stream with."""
    found = object_at(tail, b'"timings"')
    if found is None:
        return None
    try:
        told = _timings_of.decode(found)
    except msgspec.DecodeError:
        return None
    return Usage(told.cache_n + told.prompt_n, told.predicted_n, told.cache_n)


def namespace_of(common: Common) -> bytes:
    """What keeps caches of one model apart: salt, extra key, adapter."""
    parts = []
    for field in (common.cache_salt, common.extra_key, common.lora_path):
        if not isinstance(field, UnsetType):
            parts.append(bytes(field))
    return b"\x00".join(parts)


def _conversation(field: Field) -> str | None:
    if field is UNSET:
        return None
    text = text_of(field)
    if text is not None:
        return text
    try:
        value = msgspec.json.decode(bytes(field))
    except msgspec.DecodeError:
        return None
    return value.get("id") if isinstance(value, dict) and isinstance(value.get("id"), str) else None


def _late_prompt(body: bytes, thinking: Thinking) -> Prompt:
    try:
        return chat_prompt(_chat.decode(body), thinking)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt([body], [])


_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
}

DIALECT = OpenAI()
