"""OpenAI's API as vLLM, SGLang, TensorRT-LLM and llama.cpp speak it."""

import re
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects import Prompt, Reading, Route, Usage
from gateway.dialects.fields import (
    Common,
    Field,
    digest,
    encode,
    guarded_in,
    not_json,
    read_loose,
    session_of,
    text_of,
)
from gateway.errors import Fault
from gateway.http.sse import payload


class Part(msgspec.Struct, gc=False):
    """One piece of a message's content."""

    type: str | None = None
    text: str | None = None
    image_url: Field = UNSET
    input_audio: Field = UNSET
    audio_url: Field = UNSET
    video_url: Field = UNSET
    file: Field = UNSET


class Message(msgspec.Struct, gc=False):
    """One chat message; what is not read here does not reach the prompt in any template that we know."""

    role: str | None = None
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Field = UNSET
    tool_call_id: str | None = None


class Chat(Common):
    """``/v1/chat/completions``."""

    messages: list[Message] | None = None
    tools: Field = UNSET
    chat_template: Field = UNSET
    chat_template_kwargs: Field = UNSET
    reasoning_effort: Field = UNSET
    documents: Field = UNSET


class Completions(Common):
    """``/v1/completions``."""

    prompt: Field = UNSET


class Responses(Common):
    """``/v1/responses``."""

    input: str | list[Raw] | None = None
    instructions: str | None = None
    tools: Field = UNSET


_chat = msgspec.json.Decoder(Chat)
_responses = msgspec.json.Decoder(Responses)
_completions = msgspec.json.Decoder(Completions)
_common = msgspec.json.Decoder(Common)


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
        try:
            common = decoder.decode(body)
        except msgspec.ValidationError as problem:
            read_loose(reading, body, problem)
            if route.generates:
                reading.make_prompt = lambda keeps: Prompt([body], [])
            return reading
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(error) from None
        reading.model = common.model
        reading.stream = bool(common.stream)
        reading.guarded = guarded_in(common, body)
        reading.session = lambda: session_of(common)
        if not route.generates:
            return reading
        reading.namespace = namespace_of(common)
        if late:
            reading.make_prompt = lambda keeps: _late_prompt(body, keeps)
        elif isinstance(common, Chat):
            reading.make_prompt = lambda keeps: chat_prompt(common, keeps)
        elif isinstance(common, Responses):
            reading.previous = text_of(common.previous_response_id)
            reading.conversation = _conversation(common.conversation)
            reading.make_prompt = lambda keeps: responses_prompt(common)
        else:
            reading.make_prompt = lambda keeps: completion_prompt(common.prompt)
        return reading

    def error(self, fault: Fault) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return b'{"error":' + _error(fault) + b"}"

    def error_event(self, fault: Fault) -> bytes:
        """An error event, then ``[DONE]``, as the engines do."""
        return b'data: {"error":' + _error(fault) + b"}\n\ndata: [DONE]\n\n"

    def failure(self, event: bytes) -> tuple[int, str] | None:
        """An error object in the first event."""
        _, data = payload(event)
        return error_in(data)

    def usage(self, tail: bytes, streamed: bool) -> Usage | None:
        """From the chunk before ``[DONE]``, or the whole body's ``usage``."""
        return usage_in(tail)


def _error(fault: Fault) -> bytes:
    return msgspec.json.encode(
        {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.status}
    )


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
        return None
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


def _late_prompt(body: bytes, keeps_thinking: bool) -> Prompt:
    try:
        return chat_prompt(_chat.decode(body), keeps_thinking)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt([body], [])


def chat_prompt(chat: Chat, keeps_thinking: bool) -> Prompt:
    """Template parameters, tools, then the messages, as chat templates order them."""
    parts: list[bytes | Raw] = []
    for field in (chat.chat_template, chat.chat_template_kwargs, chat.reasoning_effort, chat.documents, chat.tools):
        if not isinstance(field, UnsetType):
            parts += (b"\x00\x01", field)
    messages = chat.messages or []
    plain = _plain(parts, messages)
    if plain is not None:
        return plain
    last_user = 0
    if not keeps_thinking:
        for at in range(len(messages) - 1, 0, -1):
            if messages[at].role == "user":
                last_user = at
                break
    ends: list[int] = []
    for at, message in enumerate(messages):
        parts.append(_ROLES.get(message.role or "") or _role(message.role))
        content = message.content
        if isinstance(content, str) and _extras(message) == _NO_EXTRAS:
            parts.append(content.encode("utf-8", "surrogatepass"))
        else:
            _message(parts, message, at >= last_user)
        ends.append(len(parts))
    asks = bool(messages) and messages[-1].role == "user"
    return Prompt(parts, ends[_shared(messages) :], asks=asks, messages=len(messages))


def _plain(head: list[bytes | Raw], messages: list[Message]) -> Prompt | None:
    """The prompt when every message is a known role and a text, as most are: no step for each message but a join's."""
    if [*map(_extras, messages)].count(_NO_EXTRAS) != len(messages):
        return None
    try:
        parts = [part for message in messages for part in (_PLAIN_ROLES[message.role], message.content)]
        text = "".join(parts)  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
    whole = b"".join(head) + text.encode("utf-8", "surrogatepass")
    # The head counts as part of the first message.
    ends = range(2 * _shared(messages) + 2, len(parts) + 1, 2)
    asks = bool(messages) and messages[-1].role == "user"
    return Prompt(parts, ends, whole, asks, len(messages))  # type: ignore[arg-type]


def _shared(messages: list[Message]) -> int:
    """How many leading messages are the system's."""
    for at, message in enumerate(messages):
        if message.role not in ("system", "developer"):
            return at
    return len(messages)


def _role(role: str | None) -> bytes:
    return b"\x00\x02" + encode(role or "") + b"\x00\x03"


_ROLES = {role: _role(role) for role in ("system", "developer", "user", "assistant", "tool")}
_PLAIN_ROLES: dict[str | None, str] = {role: start.decode() for role, start in _ROLES.items()}
_extras = attrgetter("name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")
_NO_EXTRAS = (None, None, None, UNSET, None)


def _message(parts: list[bytes | Raw], message: Message, thinks: bool) -> None:
    """A message that is more than a role and a text; ``thinks``: the template still shows its thinking."""
    if message.name is not None:
        parts += (encode(message.name), b"\x00\x03")
    thinking = message.reasoning or message.reasoning_content
    if thinking and thinks:
        parts += (encode(thinking), b"\x00\x04")
    content = message.content
    if isinstance(content, str):
        parts.append(encode(content))
    elif content:
        _content(parts, content)
    if not isinstance(message.tool_calls, UnsetType) and bytes(message.tool_calls) != b"null":
        parts += (b"\x00\x04", message.tool_calls)
    if message.tool_call_id is not None:
        parts += (b"\x00\x03", encode(message.tool_call_id))


def _content(parts: list[bytes | Raw], content: list[Part]) -> None:
    for part in content:
        if part.text is not None:
            parts.append(encode(part.text))
            continue
        for field in (part.image_url, part.input_audio, part.audio_url, part.video_url, part.file):
            if not isinstance(field, UnsetType):
                parts.append(digest(field))


def responses_prompt(request: Responses) -> Prompt:
    """Tools, instructions, then the input items as they are: clients resend them verbatim."""
    parts: list[bytes | Raw] = []
    if not isinstance(request.tools, UnsetType):
        parts += (b"\x00\x01", request.tools)
    if request.instructions:
        parts += (b"\x00\x02system\x00\x03", encode(request.instructions))
    ends: list[int] = []
    if isinstance(request.input, str):
        parts += (b"\x00\x02user\x00\x03", encode(request.input))
        ends.append(len(parts))
    else:
        shared = True
        for item in request.input or []:
            parts += (b"\x00\x02", item)
            shared = shared and _item_role(item) in ("system", "developer")
            if not shared:
                ends.append(len(parts))
    return Prompt(parts, ends, asks=True, messages=1 if parts else 0)


class _Item(msgspec.Struct):
    role: str | None = None


_item = msgspec.json.Decoder(_Item)


def _item_role(item: Raw) -> str | None:
    try:
        return _item.decode(item).role
    except (msgspec.DecodeError, RecursionError):
        return None


def completion_prompt(prompt: Field) -> Prompt:
    """The text itself; of several prompts the first, for they go to one worker together."""
    if isinstance(prompt, UnsetType):
        return Prompt([], [])
    try:
        value = msgspec.json.decode(prompt)
    except (msgspec.DecodeError, RecursionError):
        return Prompt([bytes(prompt)], [])
    return Prompt([text_or_tokens(value)], [])


def text_or_tokens(value: Any) -> bytes:
    """Bytes of a prompt given as text, as token ids (u32 each), or as a list of either."""
    if isinstance(value, str):
        return encode(value)
    if isinstance(value, list) and value:
        first = value[0]
        if isinstance(first, int):
            return b"".join(
                [token.to_bytes(4, "little") for token in value if isinstance(token, int) and 0 <= token < 2**32]
            )
        return text_or_tokens(first)
    return b""


_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "chat": _chat,
    "completions": _completions,
    "responses": _responses,
}

DIALECT = OpenAI()
