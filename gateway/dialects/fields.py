"""Fields that several dialects share, and splicing into a body without serialising it again."""

import json
import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.dialects import Reading
from gateway.errors import BadRequest
from gateway.prompt import Prompt

Field = Raw | UnsetType

GUARDED = (
    "kv_transfer_params",
    "ec_transfer_params",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
)
"""Engines trust these blindly; only the gateway may set them."""

NAMING = ("user", "safety_identifier", "metadata.user_id")
"""Fields that tell who a user is: they name a session only where the operator says so."""

_apart_values = attrgetter("extra_key", "lora_path")
_NONE_APART = (UNSET, UNSET)
_guarded_values = attrgetter(*GUARDED)
_NONE_GUARDED = (UNSET,) * len(GUARDED)


class Guarded(msgspec.Struct):
    """`GUARDED` as fields, so that any spelling of their names is found."""

    kv_transfer_params: Field = UNSET
    ec_transfer_params: Field = UNSET
    disaggregated_params: Field = UNSET
    bootstrap_host: Field = UNSET
    bootstrap_port: Field = UNSET
    bootstrap_room: Field = UNSET
    bootstrap_pair_key: Field = UNSET
    decode_tp_size: Field = UNSET
    routed_dp_rank: Field = UNSET
    data_parallel_rank: Field = UNSET
    disagg_prefill_dp_rank: Field = UNSET


class Common(Guarded):
    """Top-level fields that routing reads in every JSON dialect. What is rarely used stays raw."""

    model: str | None = None
    stream: bool | None = None
    prompt_cache_key: Field = UNSET
    session_id: Field = UNSET
    session_params: Field = UNSET
    id_slot: Field = UNSET
    priority: Field = UNSET
    litellm_session_id: Field = UNSET
    metadata: Field = UNSET
    rid: Field = UNSET
    user: Field = UNSET
    safety_identifier: Field = UNSET
    previous_response_id: Field = UNSET
    conversation: Field = UNSET
    cache_salt: Field = UNSET
    extra_key: Field = UNSET
    lora_path: Field = UNSET


class Loose(Guarded):
    """Last resort for a body whose types no dialect expects: it is still relayed, and routed by what can be read."""

    model: Field = UNSET
    stream: Field = UNSET


_loose = msgspec.json.Decoder(Loose)
_mapping = msgspec.json.Decoder(dict[str, Raw])
_any = msgspec.json.Decoder()


def value_of(field: Field | None) -> Any:
    """A raw field decoded; ``None`` when absent."""
    if field is UNSET or field is None:
        return None
    try:
        return _any.decode(field)
    except (msgspec.DecodeError, RecursionError):
        return None


def text_of(field: Field) -> str | None:
    """A raw field as a non-empty string, else ``None``."""
    value = value_of(field)
    return value if isinstance(value, str) and value else None


Typed = TypeVar("Typed", bound=Common)


def read_common(decoder: msgspec.json.Decoder[Typed], reading: Reading, body: bytes, generates: bool) -> Typed | None:
    """Decode ``body`` and fill in what all dialects read alike.

    ``None`` for a body whose types no dialect expects: it is routed by its raw bytes. Raises `BadRequest` for what is not
    JSON or not such an object.
    """
    try:
        common = decoder.decode(body)
    except msgspec.ValidationError as problem:
        _read_loose(reading, body, problem)
        if generates:
            reading.make_prompt = lambda thinking: Prompt([body], [])
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    reading.model = common.model
    reading.stream = bool(common.stream)
    reading.guarded = guarded_in(common, body)
    reading.session = lambda: session_of(common)
    reading.field = lambda name: named_in(common, name)
    reading.labelled = common.session_id is not UNSET
    if common.session_params is not UNSET and (params := value_of(common.session_params)) is not None:
        name = params.get("id") if isinstance(params, dict) else None
        reading.stateful = name if isinstance(name, str) else ""
        reading.named = text_of(common.rid)
    reading.slotted = common.id_slot is not UNSET
    reading.ranked = common.priority is not UNSET
    if common.cache_salt is not UNSET:
        salt = common.cache_salt
        reading.salt = lambda: text_of(salt)
    if _apart_values(common) != _NONE_APART:
        reading.apart = True
    return common


def _read_loose(reading: Reading, body: bytes, problem: msgspec.ValidationError) -> None:
    try:
        loose = _loose.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(f"the body is not what this path takes: {problem}") from None
    model = value_of(loose.model)
    if model is not None and not isinstance(model, str):
        raise BadRequest("model must be a string", param="model")
    reading.model = model
    reading.stream = value_of(loose.stream) in (True, 1, "true")
    reading.guarded = guarded_in(loose, body)


def not_json(error: Exception) -> BadRequest:
    """What a body that is not JSON is told."""
    return BadRequest(f"the body is not valid JSON: {error}")


def guarded_in(common: Guarded, body: bytes) -> tuple[str, ...]:
    """Names of guarded fields in ``body``. Raises `BadRequest` if one appears twice or in an escaped spelling."""
    if _guarded_values(common) == _NONE_GUARDED:
        return ()
    present = [name for name in GUARDED if getattr(common, name) is not UNSET]
    top: list[tuple[str, Any]] = []

    def outermost(pairs: list[tuple[str, Any]]) -> None:
        top[:] = pairs

    try:
        json.loads(body, object_pairs_hook=outermost)
    except (ValueError, RecursionError) as error:
        raise not_json(error) from None
    names = [name for name, _ in top]
    for name in present:
        if names.count(name) > 1:
            raise BadRequest(f"{name} appears twice", param=name)
        if f'"{name}"'.encode() not in body:
            raise BadRequest(f"{name} is spelled with escapes", param=name)
    return tuple(present)


def splice(body: bytes, cut: tuple[str, ...] = (), add: dict[str, bytes] | None = None) -> bytes:
    """``body`` (a JSON object) without the members ``cut`` and with those of ``add`` (name -> JSON) at its end.

    A member of ``add`` takes the place of the client's own. Every value that stays keeps its bytes. Raises `BadRequest`
    when ``body`` is not an object.
    """
    try:
        members = _mapping.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(error) from None
    for name in (*cut, *(add or {})):
        members.pop(name, None)
    parts = [msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in members.items()]
    parts += [msgspec.json.encode(name) + b":" + raw for name, raw in (add or {}).items()]
    return b"{" + b",".join(parts) + b"}"


def append(body: bytes, members: bytes) -> bytes:
    """``body`` (a JSON object) with ``members`` (JSON, without braces) at its end."""
    inside = body.rstrip()[:-1].rstrip()
    # A comma behind nothing would make it no JSON. No value ends in an opening brace.
    return inside + (members if inside.endswith(b"{") else b"," + members) + b"}"


def named_in(common: Common, name: str) -> str | None:
    """The text of one of `NAMING`, else ``None``."""
    if name == "metadata.user_id":
        metadata = value_of(common.metadata)
        value = metadata.get("user_id") if isinstance(metadata, dict) else None
        return value if isinstance(value, str) and value else None
    return text_of(getattr(common, name, UNSET))


def session_of(common: Common) -> Iterable[tuple[str, str]]:
    """(source, value) of each session that a body names, in the field's agreed order."""
    return () if _session_values(common) == _NO_SESSION else _sessions_of(common)


def _sessions_of(common: Common) -> Iterator[tuple[str, str]]:
    for source in ("prompt_cache_key", "session_id", "litellm_session_id"):
        value = text_of(getattr(common, source))
        if value is not None:
            yield source, value
    params = value_of(common.session_params)
    if isinstance(params, dict) and isinstance(params.get("id"), str) and params["id"]:
        yield "session_params", params["id"]
    metadata = value_of(common.metadata)
    if isinstance(metadata, dict):
        value = metadata.get("session_id")
        if isinstance(value, str) and value:
            yield "metadata.session_id", value
    rid = text_of(common.rid)
    if rid is not None:
        yield "rid", _ATTEMPT.sub("", rid)
    if isinstance(metadata, dict):
        value = claude_code_session(metadata.get("user_id"))
        if value is not None:
            yield "metadata.user_id", value


_NAMES = ("prompt_cache_key", "session_id", "litellm_session_id", "session_params", "metadata", "rid")
_session_values = attrgetter(*_NAMES)
_NO_SESSION = (UNSET,) * len(_NAMES)
_ATTEMPT = re.compile(r"(?:_[tr]\d+)+\Z")
_OLD_CLAUDE = re.compile(r"user_[0-9a-fA-F]+_account_[0-9a-fA-F-]*_session_([0-9a-fA-F-]{8,})\Z")


def claude_code_session(user_id: Any) -> str | None:
    """The session inside ``metadata.user_id``, in the two forms in which Claude Code puts it there; else ``None``."""
    if not isinstance(user_id, str):
        return None
    found = _OLD_CLAUDE.match(user_id)
    if found:
        return found[1]
    if user_id.startswith("{"):
        value = value_of(Raw(user_id.encode("utf-8", "replace")))
        if isinstance(value, dict) and isinstance(value.get("session_id"), str) and value["session_id"]:
            return str(value["session_id"])
    return None
