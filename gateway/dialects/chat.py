"""Bodies of OpenAI's generating paths, typed, and the prompts that they make."""

from operator import attrgetter
from struct import Struct, error as StructError
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects.fields import Common, Field
from gateway.prompt import Prompt, Thinking, digest, encode


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

    stream_options: Field = UNSET
    messages: list[Message] | None = None
    tools: Field = UNSET
    chat_template: Field = UNSET
    chat_template_kwargs: Field = UNSET
    reasoning_effort: Field = UNSET
    documents: Field = UNSET


class Completions(Common):
    """``/v1/completions``."""

    stream_options: Field = UNSET
    prompt: Field = UNSET


class Responses(Common):
    """``/v1/responses``."""

    input: str | list[Raw] | None = None
    instructions: str | None = None
    tools: Field = UNSET


def chat_tool(chat: Chat) -> str | None:
    """The tool whose result ends the chat; ``None`` if something else does."""
    messages = chat.messages or ()
    if not messages or messages[-1].role != "tool":
        return None
    if messages[-1].name:
        return messages[-1].name
    for message in reversed(messages):
        if message.role == "assistant":
            return last_name(message.tool_calls)
    return ""


def last_name(calls: Field) -> str:
    """The name of the last of some tool calls; empty if there is none."""
    if isinstance(calls, UnsetType):
        return ""
    try:
        found = _calls.decode(calls) or ()
    except (msgspec.DecodeError, RecursionError):
        return ""
    return found[-1].function.name or "" if found and found[-1].function is not None else ""


class _Function(msgspec.Struct):
    name: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


_calls = msgspec.json.Decoder(list[_Call] | None)


def responses_tool(request: Responses) -> str | None:
    """The same of a request for a response: items of the last answer's calls stand before their results."""
    items = request.input
    if not isinstance(items, list) or not items or _kind_of(items[-1])[0] != "function_call_output":
        return None
    for item in reversed(items):
        kind, name = _kind_of(item)
        if kind == "function_call":
            return name
    return ""


def _kind_of(item: Raw) -> tuple[str, str]:
    try:
        found = _item.decode(item)
    except (msgspec.DecodeError, RecursionError):
        return "", ""
    return found.type or "", found.name or ""


def chat_prompt(chat: Chat, thinking: Thinking) -> Prompt:
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
    if thinking is not Thinking.KEEP:
        for at in range(len(messages) - 1, 0, -1):
            if messages[at].role == "user":
                last_user = at
                break
    shown = thinking.shown_from(last_user, len(messages))
    ends: list[int] = []
    lead = len(parts)
    leading = _shared(messages)
    for at, message in enumerate(messages):
        parts.append(_ROLES.get(message.role or "") or _role(message.role))
        content = message.content
        if isinstance(content, str) and _extras(message) == _NO_EXTRAS:
            parts.append(content.encode("utf-8", "surrogatepass"))
        else:
            _message(parts, message, at >= shown)
        ends.append(len(parts))
    asks = bool(messages) and messages[-1].role == "user"
    lead = ends[leading - 1] if leading else lead
    return Prompt(parts, ends[leading:], asks=asks, messages=len(messages), lead=(0, lead))


def _plain(head: list[bytes | Raw], messages: list[Message]) -> Prompt | None:
    """The prompt when every message is a known role and a text, as most are: no step for each message but a join's."""
    if [*map(_extras, messages)].count(_NO_EXTRAS) != len(messages):
        return None
    try:
        parts = [part for message in messages for part in (_PLAIN_ROLES[message.role], message.content)]
        text = "".join(parts)  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return None
    start = b"".join(head)
    whole = start + text.encode("utf-8", "surrogatepass")
    leading = 2 * _shared(messages)
    # The head counts as part of the first message.
    ends = range(leading + 2, len(parts) + 1, 2)
    asks = bool(messages) and messages[-1].role == "user"
    return Prompt(parts, ends, whole, asks, len(messages), (len(start), leading))  # type: ignore[arg-type]


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
    """Tools, instructions, then the input: messages by role and text, in whichever form they come; other items as they are,
    for clients resend those verbatim.
    """
    parts: list[bytes | Raw] = []
    if not isinstance(request.tools, UnsetType):
        parts += (b"\x00\x01", request.tools)
    if request.instructions:
        parts += (b"\x00\x02system\x00\x03", encode(request.instructions))
    ends: list[int] = []
    lead = len(parts)
    if isinstance(request.input, str):
        parts += (b"\x00\x02user\x00\x03", encode(request.input))
        ends.append(len(parts))
    else:
        shared = True
        for item in request.input or []:
            role = _said(parts, item)
            shared = shared and role in ("system", "developer")
            if not shared:
                ends.append(len(parts))
    return Prompt(parts, ends, asks=True, messages=1 if parts else 0, lead=(0, lead))


class _Item(msgspec.Struct):
    role: str | None = None
    type: str | None = None
    name: str | None = None
    content: Field = UNSET


_item = msgspec.json.Decoder(_Item)


class _Piece(msgspec.Struct):
    type: str | None = None
    text: str | None = None


_content_of = msgspec.json.Decoder(str | list[_Piece])
_TEXTS = ("input_text", "output_text", "text")


def _said(parts: list[bytes | Raw], item: Raw) -> str | None:
    """Add what an item says to a prompt's parts; its role, if it has one."""
    try:
        found = _item.decode(item)
    except (msgspec.DecodeError, RecursionError):
        parts += (b"\x00\x02", item)
        return None
    role = found.role
    if role is not None and found.type in (None, "message") and not isinstance(found.content, UnsetType):
        try:
            content = _content_of.decode(found.content)
        except (msgspec.DecodeError, RecursionError):
            content = []
        texts = [content] if isinstance(content, str) else [each.text for each in content if each.type in _TEXTS]
        if texts and (isinstance(content, str) or len(texts) == len(content)) and None not in texts:
            parts.append(_ROLES.get(role) or _role(role))
            parts += [encode(text) for text in texts if text is not None]
            return role
    parts += (b"\x00\x02", item)
    return role


def completion_prompt(prompt: Field) -> Prompt:
    """The text itself; of several prompts the first, for they go to one worker together."""
    if isinstance(prompt, UnsetType):
        return Prompt([], [])
    try:
        value = msgspec.json.decode(prompt)
    except (msgspec.DecodeError, RecursionError):
        return Prompt([bytes(prompt)], [])
    return Prompt([text_or_tokens(value)], [])


def token_ids(field: Field) -> bytes | None:
    """Token ids of a prompt that is given as such, u32 each; ``None`` for text, and for several prompts."""
    if isinstance(field, UnsetType) or bytes(memoryview(field)[:1]) != b"[":
        return None
    try:
        ids = _ids.decode(field)
        if ids and isinstance(ids[0], list):
            if len(ids) > 1:
                return None
            ids = ids[0]
        return Struct(f"<{len(ids)}I").pack(*ids)
    except (msgspec.DecodeError, StructError):
        return None


_ids: msgspec.json.Decoder[Any] = msgspec.json.Decoder(list[int | list[int]])


class _Told(msgspec.Struct):
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Told]


_answer = msgspec.json.Decoder(_Answer)


def answered_ids(body: bytes) -> bytes | None:
    """Token ids of a whole answer of one choice, u32 each, where the engine tells them (vLLM's ``return_token_ids``)."""
    if b'"token_ids"' not in body:
        return None
    try:
        choices = _answer.decode(body).choices
        ids = choices[0].token_ids if len(choices) == 1 else None
        return Struct(f"<{len(ids)}I").pack(*ids) if ids else None
    except (msgspec.DecodeError, UnicodeDecodeError, StructError):
        return None


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
