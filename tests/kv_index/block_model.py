"""What a `BlockIndex` must say of one target, in sets and counters; and an engine that names its blocks its own way.

A block is known here by its *key*: all token ids up to its end, and what separates namespaces. The same key has the same
engine hash for as long as the engine lives, and another one in every other engine.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_128_intdigest

from kv_index.groups import TIERS
from kv_index.pages import chain

Ids = tuple[int, ...]


class Key(NamedTuple):
    ids: Ids
    start: int = 0
    variant: int = 0
    """What the engine's hash covers beside tokens and namespace: keys that differ in it name the same prefix."""


class Model:
    """One cache group of one target that holds blocks of ``size`` tokens."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count: Counter[tuple[int, Key]] = Counter()

    def known(self, key: Key) -> bool:
        return any(self.count[tier, key] for tier in range(TIERS))

    def store(self, tier: int, keys: Iterable[Key], parent: Key | None) -> None:
        if parent is not None and not self.known(parent):
            # Told by hash alone: placed where another tier has it.
            keys = [key for key in keys if self.known(key) and not self.count[tier, key]]
        for key in keys:
            self.count[tier, key] += 1

    def remove(self, tier: int, keys: Iterable[Key]) -> None:
        for key in keys:
            self.count[tier, key] -= self.count[tier, key] > 0

    def tier(self, ids: Ids, start: int) -> int | None:
        """The highest tier that holds the block at which ``ids`` end."""
        for tier in range(TIERS):
            if any(self.count[tier, Key(ids, start, v)] for v in (0, 1)):
                return tier
        return None

    def match(self, ids: Ids, start: int = 0) -> tuple[int, tuple[int, ...]]:
        """Leading tokens held, and how many of them lie on each tier."""
        at, low = self.size, [0] * TIERS
        while at <= len(ids) and (tier := self.tier(ids[:at], start)) is not None:
            low[tier] += self.size
            at += self.size
        return at - self.size, tuple(low)


def packed(ids: Sequence[int]) -> bytes:
    return Struct(f"<{len(ids)}I").pack(*ids)


def symbols(ids: Sequence[int], start: int = 0) -> bytes:
    return chain(packed(ids), start).symbols


def keys(ids: Ids, size: int, start: int = 0, variant: int = 0) -> list[Key]:
    """The keys of the whole blocks of ``ids``."""
    return [Key(ids[:at], start, variant) for at in range(size, len(ids) + 1, size)]


def hashed(seed: int, key: Key) -> int:
    """128 bits, of which the upper ones mean nothing to the index."""
    return xxh3_128_intdigest(packed(key.ids) + repr((key.start, key.variant)).encode(), seed)


def pages(*numbers: int) -> Ids:
    """16 token ids for each number."""
    return tuple(16 * number + at for number in numbers for at in range(16))
