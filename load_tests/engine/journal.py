"""What a cache did, as the KV events that each engine publishes. Nothing here sends: see ``publisher.py``.

A cache that has a journal tells it of every block stored and removed; ``take`` hands over what has gathered, in order
and in the wire's form, for one batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from load_tests.engine.cache import Holding
from load_tests.engine.hashes import namespace_parts, signed, unsigned
from load_tests.engine.tiers import Block

Event = dict[str, Any]

# The order of fields in the array form of older vLLM builds; what they have no field for is left out.
STORED_ORDER = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
REMOVED_ORDER = ("block_hashes", "medium", "group_idx")
ORDERS: dict[str, tuple[str, ...]] = {
    "BlockStored": STORED_ORDER,
    "BlockRemoved": REMOVED_ORDER,
    "AllBlocksCleared": (),
}


def positional(event: Event) -> list[Any]:
    """An event as older vLLM builds wrote it: an array that begins with the event's name."""
    return [event["type"], *(event.get(name) for name in ORDERS[event["type"]])]


class Journal(ABC):
    """``wire_hash`` makes a digest what subscribers see of it."""

    device = "GPU"
    host = "CPU"
    disk = "STORAGE"

    def __init__(self, block_size: int, wire_hash: Callable[[bytes], int | bytes]) -> None:
        self.block_size = block_size
        self.wire_hash = wire_hash
        self._events: list[Event] = []

    @abstractmethod
    def stored(
        self, holding: Holding, hashes: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], start: int
    ) -> None:
        """Whole blocks of ``tokens``, which begin at position ``start`` of the sequence, are on the device now."""

    @abstractmethod
    def removed(self, hashes: Sequence[bytes], medium: str | None = None) -> None:
        """These blocks left one tier, the device's unless told otherwise."""

    @abstractmethod
    def offloaded(self, digest: bytes, block: Block, tier: int) -> None:
        """A block is on a tier below now: 0 is host memory, 1 disk."""

    def dropped(self, digest: bytes, tier: int) -> None:
        """A block left a tier below."""
        self.removed([digest], self.medium_of(tier))

    def medium_of(self, tier: int) -> str:
        return self.disk if tier else self.host

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def _add(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> list[Any]:
        """Everything since the last call."""
        events, self._events = self._events, []
        return events


class VllmJournal(Journal):
    """One BlockStored for the blocks that a step fills in a sequence, one BlockRemoved for each physical block."""

    # The KV cache group of the attention layers.
    group = 0

    def __init__(self, block_size: int, *, hashes: str = "int", form: str = "map", placeholders: bool = True) -> None:
        super().__init__(block_size, unsigned if hashes == "int" else bytes)
        self._positional = form == "positional"
        self._placeholders = placeholders

    def stored(
        self, holding: Holding, hashes: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], start: int
    ) -> None:
        self._add(self._stored(holding, hashes, parent, tokens, start, self.group, "full_attention"))

    def _stored(
        self,
        holding: Holding,
        hashes: Sequence[bytes],
        parent: bytes | None,
        tokens: Sequence[int],
        start: int,
        group: int,
        kind: str,
    ) -> Event:
        adapter, salt = namespace_parts(holding.namespace)
        keys: list[list[str] | None] = [[adapter] if adapter else None for _ in hashes]
        if keys and start == 0 and salt:
            keys[0] = [*(keys[0] or []), salt]
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [self.wire_hash(digest) for digest in hashes],
            "parent_block_hash": None if parent is None else self.wire_hash(parent),
            "token_ids": list(tokens),
            "block_size": self.block_size,
            "lora_id": None,
            "medium": self.device,
            "lora_name": adapter or None,
        }
        if keys:
            event["extra_keys"] = keys
        event |= {"group_idx": group, "kv_cache_spec_kind": kind}
        if holding.session:
            event["session_id"] = holding.session
        return event

    def offloaded(self, digest: bytes, block: Block, tier: int) -> None:
        holding = Holding(block.namespace)
        hashes, kind = [digest], "full_attention"
        event = self._stored(holding, hashes, block.parent, block.tokens, block.start, self.group, kind)
        event["medium"] = self.medium_of(tier)
        if self._placeholders:
            event |= {"parent_block_hash": None, "token_ids": [], "block_size": 0, "lora_name": None}
            for name in ("extra_keys", "group_idx", "kv_cache_spec_kind"):
                del event[name]
        self._add(event)

    def dropped(self, digest: bytes, tier: int) -> None:
        super().dropped(digest, tier)
        if self._placeholders:
            del self._events[-1]["group_idx"]

    def removed(self, hashes: Sequence[bytes], medium: str | None = None) -> None:
        for digest in hashes:
            event = {"type": "BlockRemoved", "block_hashes": [self.wire_hash(digest)], "medium": medium or self.device}
            self._add({**event, "group_idx": self.group})

    def take(self) -> list[Any]:
        events = super().take()
        return [positional(event) for event in events] if self._positional else events


class SglangJournal(Journal):
    """Chained pages are one event; what is removed one after the other is one event as well."""

    host = "CPU_PINNED"
    disk = "DISK"

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, signed)

    def stored(
        self, holding: Holding, hashes: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], start: int
    ) -> None:
        adapter, salt = namespace_parts(holding.namespace)
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [signed(digest) for digest in hashes],
            "parent_block_hash": None if parent is None else signed(parent),
            "token_ids": list(tokens),
            # A page that is not full says so.
            "block_size": min(self.block_size, len(tokens)),
            "lora_id": None,
            "medium": self.device,
        }
        told = {"cache_salt": salt, "session_id": holding.session, "lora_name": adapter}
        self._events.append(event | {key: value for key, value in told.items() if value})

    def offloaded(self, digest: bytes, block: Block, tier: int) -> None:
        self.stored(Holding(block.namespace), [digest], block.parent, block.tokens, block.start)
        self._events[-1]["medium"] = self.medium_of(tier)

    def removed(self, hashes: Sequence[bytes], medium: str | None = None) -> None:
        medium = medium or self.device
        last = self._events[-1] if self._events else None
        if last is None or last["type"] != "BlockRemoved" or last["medium"] != medium:
            last = {"type": "BlockRemoved", "block_hashes": [], "medium": medium}
            self._events.append(last)
        last["block_hashes"] += map(signed, hashes)
