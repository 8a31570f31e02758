"""Who can reuse how much of a prompt, out of what is held (`kv_index.holders`).

A group without holes holds a prompt up to some depth on its device and nothing behind it, so all such groups are bisected
at once. Only what that leaves open is followed block by block, for one target at a time: what lies below the device, what is
inside the next page, what other groups allow; and groups that have holes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kv_index.groups import TIERS, Cache, Group, Tier, resumable
from kv_index.holders import Holders
from kv_index.pages import PAGE_TOKENS, names

MEMBERS = 4096
"""Sets of holders whose lists are kept."""


class Held(NamedTuple):
    """What targets hold of one prompt."""

    tokens: dict[int, int]
    """target -> leading tokens that it can reuse, from any tier; who holds none is absent."""
    restored: dict[int, tuple[int, int, int]]
    """target -> how many of them must be restored from host, disk and shared store, where that is any."""


class Matcher:
    """See the module's head. ``targets`` are all caches by target, ``places`` the target of each bit."""

    def __init__(self, holders: Holders, targets: dict[int, Cache], places: list[int | None]) -> None:
        self.holders = holders
        self.targets = targets
        self.places = places
        self.stale = True
        """Groups came, went or changed their kind."""
        self._strides: dict[int, int] = {}
        """Stride -> bits of the groups that are bisected, at most one of each target."""
        self._special: list[Cache] = []
        """Targets of which bisection does not tell all."""
        self._members: dict[int, tuple[int, ...]] = {}

    def match(self, symbols: bytes, ids: bytes, start: int) -> Held:
        """See `kv_index.blocks.BlockIndex.match`."""
        tokens: dict[int, int] = {}
        restored: dict[int, tuple[int, int, int]] = {}
        chain = names(symbols)
        if self.stale or self.holders.shifted:
            self._sort()
        for stride, bits in self._strides.items():
            steps = chain if stride == 1 else chain[stride - 1 :: stride]
            if steps:
                self._bisect(steps, bits, stride * PAGE_TOKENS, tokens)
        for cache in self._special:
            depth = self._follow(cache, chain, ids, start, tokens.pop(cache.id, 0), restored)
            if depth:
                tokens[cache.id] = depth
        return Held(tokens, restored)

    def _sort(self) -> None:
        self._strides.clear()
        self._special = []
        for cache in self.targets.values():
            if len(cache.full) == 1 and not cache.full[0].holes:
                group = cache.full[0]
                self._strides[group.stride] = self._strides.get(group.stride, 0) | group.bit
            if cache.full and not cache.plain:
                self._special.append(cache)
        self._members.clear()
        self.stale = self.holders.shifted = False

    def _of(self, bits: int) -> tuple[int, ...]:
        """The targets that bits stand for."""
        found = self._members.get(bits)
        if found is None:
            if len(self._members) >= MEMBERS:
                self._members.clear()
            found = tuple([t for at, t in enumerate(self.places) if bits >> at & 1 and t is not None])
            self._members[bits] = found
        return found

    def _bisect(self, steps: Sequence[int], bits: int, tokens: int, found: dict[int, int]) -> None:
        """The depths of holders without holes, each step ``tokens`` long."""
        get = self.holders.by_tier[0].get
        bits &= get(steps[0], 0)
        if not bits:
            return
        open_ = [(bits, 1, len(steps))]
        while open_:
            # All of ``bits`` hold ``low`` steps, none more than ``high``.
            bits, low, high = open_.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                holding = get(steps[middle - 1], 0) & bits
                if holding == bits:
                    low = middle
                else:
                    if holding:
                        open_.append((holding, middle, high))
                        bits ^= holding
                    high = middle - 1
            found.update(dict.fromkeys(self._of(bits), low * tokens))

    def _follow(
        self,
        cache: Cache,
        chain: Sequence[int],
        ids: bytes,
        start: int,
        known: int,
        restored: dict[int, tuple[int, int, int]],
    ) -> int:
        """How much of a prompt one target can reuse, in tokens; ``known``: what it holds on its device, as far as bisected."""
        depth = min([self._reached(group, chain, ids, start, known) for group in cache.full])
        if cache.others:
            depth = resumable(cache.others, chain, depth)
        group = cache.full[0]
        if depth > known and group.deep:
            low = [0] * TIERS
            step = group.stride * PAGE_TOKENS
            for at in range(known // PAGE_TOKENS + group.stride - 1, depth // PAGE_TOKENS, group.stride):
                tier = next(tier for tier in Tier if self.holders.by_tier[tier].get(chain[at], 0) & group.bit)
                low[tier] += step
            if any(low[1:]):
                restored[cache.id] = (low[1], low[2], low[3])
        return depth

    def _reached(self, group: Group, chain: Sequence[int], ids: bytes, start: int, known: int) -> int:
        depth = self._closed(group, chain, known)
        if group.slab is not None and ids:
            pages = depth // PAGE_TOKENS
            before = chain[pages - 1] if pages else start
            depth += group.slab.beyond(before, ids[4 * depth : 4 * depth + group.slab.unit])
        return depth

    def _closed(self, group: Group, chain: Sequence[int], known: int) -> int:
        """Tokens up to the group's first hole, over all tiers; ``known`` of them are held."""
        if known and not group.deep:
            return known
        bit, tiers = group.bit, self.holders.by_tier[:1] if not group.deep else self.holders.by_tier
        step, depth = group.stride * PAGE_TOKENS, known
        for at in range(known // PAGE_TOKENS + group.stride - 1, len(chain), group.stride):
            name = chain[at]
            if not any([holders.get(name, 0) & bit for holders in tiers]):  # noqa: C419
                break
            depth += step
        return depth
