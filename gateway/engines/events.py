"""KV events: what engines publish of their caches, decoded, and told to the index.

One payload is a batch of events in msgpack, in either of two forms: maps with a ``type``, or arrays that begin with the
name, as older vLLM wrote them. Fields that are missing take their defaults, further ones are passed over; hashes are signed
or unsigned integers, or digests of which the last eight bytes count. An event that cannot be read costs itself alone.

vLLM (``vllm/distributed/kv_events.py`` as of 0.33), SGLang (``disaggregation/kv_events.py`` as of 0.5.23) and TensorRT-LLM's
publisher share this schema; TensorRT-LLM's polled events are `polled`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kv_index.blocks import BlockIndex
from kv_index.groups import Kind, Tier
from kv_index.pages import root

Hash = int | bytes

TIERS = {
    None: Tier.DEVICE,
    "gpu": Tier.DEVICE,
    "cpu": Tier.HOST,
    "cpu_pinned": Tier.HOST,
    "disk": Tier.DISK,
    "storage": Tier.DISK,
}
"""Medium in lower case -> tier; any other is shared storage."""

KINDS = {"mamba": Kind.STATE, "sliding_window": Kind.WINDOW, "sliding_window_mla": Kind.WINDOW}
OTHER = frozenset(("encoder_only_attention", "cross_attention"))
"""Kinds of cache that prefixes do not live in."""


class _Stored(msgspec.Struct, gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Stored(_Stored, tag="BlockStored", tag_field="type", gc=False):
    """Blocks that follow each other were stored."""

    cache_salt: str | None = None
    locality: str | None = None


class Removed(_Removed, tag="BlockRemoved", tag_field="type", gc=False):
    """Blocks were dropped, each hash one copy."""

    locality: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    """Nothing is held any more."""


class StoredRow(_Stored, tag="BlockStored", array_like=True, gc=False):
    """`Stored` as an array."""


class RemovedRow(_Removed, tag="BlockRemoved", array_like=True, gc=False):
    """`Removed` as an array."""


class ClearedRow(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    """`Cleared` as an array."""


Event = Stored | Removed | Cleared | StoredRow | RemovedRow | ClearedRow


class Batch(NamedTuple):
    """What one payload says."""

    events: Sequence[Event]
    unread: int
    """Events that could not be read."""
    lost: bool = False
    """Whether blocks may be gone that one of those told of."""


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


class _Row(msgspec.Struct, array_like=True, gc=False):
    ts: Any
    events: list[msgspec.Raw]


class _Map(msgspec.Struct, gc=False):
    events: list[msgspec.Raw]


_maps = msgspec.msgpack.Decoder(_Maps)
_row = msgspec.msgpack.Decoder(_Row)
_map = msgspec.msgpack.Decoder(_Map)
_as_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
_as_row = msgspec.msgpack.Decoder(StoredRow | RemovedRow | ClearedRow)
_any = msgspec.msgpack.Decoder()


def decode(payload: bytes) -> Batch:
    """The events of one payload. Raises `ValueError` if it is no batch at all."""
    try:
        batch = _maps.decode(payload)
        return Batch(batch.events, 0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _one_by_one(payload)


def _one_by_one(payload: bytes) -> Batch:
    """Events of the older form, or a batch with one that cannot be read."""
    try:
        if (payload[:1] and 0x80 <= payload[0] <= 0x8F) or payload[:1] in (b"\xde", b"\xdf"):
            raws = _map.decode(payload).events
        else:
            raws = _row.decode(payload).events
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    found: list[Event] = []
    lost = False
    for raw in map(bytes, raws):
        event = _read(raw)
        if event is not None:
            found.append(event)
        else:
            lost = lost or b"BlockRemoved" in raw or b"AllBlocksCleared" in raw
    return Batch(found, len(raws) - len(found), lost)


def _read(raw: bytes) -> Event | None:
    mapped = 0x80 <= raw[0] <= 0x8F or raw[0] in (0xDE, 0xDF)
    decoder: msgspec.msgpack.Decoder[Any] = _as_map if mapped else _as_row
    try:
        event: Event = decoder.decode(raw)
        return event
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _of_pairs(raw)


def _of_pairs(raw: bytes) -> Stored | None:
    """Speculative decoding in SGLang: a token is told with the one after it."""
    try:
        told = _any.decode(raw)
        if not isinstance(told, dict):
            return None
        told["token_ids"] = [pair[0] for pair in told["token_ids"]]
        return msgspec.convert(told, Stored)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return None


# -- to the index -----------------------------------------------------------------------------------------------------


class Applied(NamedTuple):
    """What became of a batch."""

    stored: int
    """Blocks stored."""
    removed: int
    unplaced: int
    """Events about blocks whose place in a prompt could not be told."""
    cleared: bool


def apply(events: Sequence[Event], index: BlockIndex, target: int) -> Applied:
    """Tell ``index`` what ``target`` said of its cache."""
    stored = removed = unplaced = 0
    cleared = False
    for event in events:
        if isinstance(event, Stored | StoredRow):
            if event.kv_cache_spec_kind in OTHER or not (event.block_hashes or event.token_ids):
                continue
            try:
                placed = _store(event, index, target)
            except ValueError:
                placed = False
            if placed:
                stored += len(event.block_hashes)
            else:
                unplaced += 1
        elif isinstance(event, Removed | RemovedRow):
            index.remove(target, [_hash(each) for each in event.block_hashes], _tier(event), event.group_idx or 0)
            removed += len(event.block_hashes)
        else:
            index.clear(target)
            cleared = True
    return Applied(stored, removed, unplaced, cleared)


def _store(event: Stored | StoredRow, index: BlockIndex, target: int) -> bool:
    parent = event.parent_block_hash
    kind = KINDS.get(event.kv_cache_spec_kind or "", Kind.FULL)
    window = event.kv_cache_spec_sliding_window or 0
    hashes: list[Any] = event.block_hashes
    if not all(type(each) is int for each in hashes):
        hashes = [_hash(each) for each in hashes]
    if parent is None and index.holds_all(target, hashes, _tier(event), event.group_idx or 0):
        # What a request found, told again as it wished (vLLM's ``kv_cache_report_mode``): no copies, for none will be removed.
        return True
    return index.store(
        target,
        hashes,
        parent if parent is None or type(parent) is int else _hash(parent),
        event.token_ids,
        event.block_size,
        tier=_tier(event),
        group=event.group_idx or 0,
        kind=kind if window or kind is not Kind.WINDOW else Kind.FULL,
        window=window,
        start=0 if parent is not None else _start(event),
    )


def namespace(adapter: str | None = None, salt: str | None = None) -> int:
    """Where the chain of prompts begins that share an adapter and a cache salt, for `kv_index.pages.chain`."""
    return root((adapter or "").encode("utf-8", "surrogatepass"), (salt or "").encode("utf-8", "surrogatepass"))


def _start(event: Stored | StoredRow) -> int:
    adapter = event.lora_name
    if adapter is None and event.lora_id is not None:
        adapter = str(event.lora_id)
    salt = event.cache_salt if isinstance(event, Stored) else None
    if salt is None and event.extra_keys and isinstance(event.extra_keys[0], list):
        # vLLM tells the salt in the first block's keys, beside the adapter and the digests of media.
        told = [key for key in event.extra_keys[0] if isinstance(key, str) and key != adapter]
        salt = told[-1] if told else None
    return namespace(adapter, salt)


def _tier(event: Stored | StoredRow | Removed | RemovedRow) -> Tier:
    medium = event.medium
    if medium == "GPU" or medium is None:
        return Tier.DEVICE
    if isinstance(event, Stored | Removed) and event.locality == "REMOTE":
        return Tier.SHARED
    return TIERS.get(medium.lower(), Tier.SHARED)


def _hash(told: Hash) -> int:
    return int.from_bytes(told[-8:], "big") if isinstance(told, bytes) else told


# -- TensorRT-LLM's polled events ------------------------------------------------------------------------------------


def polled(rows: Any) -> tuple[list[Event], list[int]]:
    """Events as TensorRT-LLM's ``/kv_cache_events`` answers them, and their ids. What cannot be read is passed over."""
    found: list[Event] = []
    ids: list[int] = []
    for row in rows if isinstance(rows, list) else []:
        data = row.get("data") if isinstance(row, dict) else None
        if not isinstance(data, dict):
            continue
        if isinstance(row.get("event_id"), int):
            ids.append(row["event_id"])
        try:
            found += _POLLED.get(data.get("type"), lambda data: [])(data)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return found, ids


def _polled_stored(data: dict[str, Any]) -> list[Event]:
    events: list[Event] = []
    parent = data["parent_hash"]
    size = max(len(block["tokens"]) for block in data["blocks"])
    for block in data["blocks"]:
        tokens = [int(token["token_id"]) for token in block["tokens"]]
        if len(tokens) == size:
            medium = None if not block.get("cache_level") else "CPU"
            events.append(Stored([int(block["block_hash"])], parent, tokens, size, medium=medium))
        parent = int(block["block_hash"])
    return events


def _polled_updated(data: dict[str, Any]) -> list[Event]:
    """A block moved from one level to another."""
    change = data.get("cache_level")
    if not isinstance(change, dict):
        return []
    media = [None if not change[which] else "CPU" for which in ("new_value", "old_value")]
    hashes: list[Hash] = [int(data["block_hash"])]
    return [Stored(hashes, None, [], 0, medium=media[0]), Removed(list(hashes), medium=media[1])]


def _polled_removed(data: dict[str, Any]) -> list[Event]:
    hashes: list[Hash] = [int(each) for each in data["block_hashes"]]
    return [Removed(hashes, medium=medium) for medium in (None, "CPU")]


_POLLED: dict[Any, Any] = {
    "created": lambda data: [Cleared()],
    "stored": _polled_stored,
    "removed": _polled_removed,
    "updated": _polled_updated,
}
