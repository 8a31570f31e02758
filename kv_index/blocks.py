"""BlockIndex: exact holdings, mirrored from the engines' own KV events.

Engines name their blocks by hashes that differ from process to process, so nothing here is keyed by them. A block is named
by its *prefix*: the chained symbol (`kv_index.pages.chain`) of the page of 16 tokens at which it ends. It covers everything
before it, so one name says "these tokens, from the start", whatever the size of the blocks that it was stored in: a prompt
is hashed once for all engines.

    per target:   engine hash -> prefix          to follow removals, and children stored behind a parent
    for all:      prefix -> bits of the holders  to match

Holes are kept. An engine may evict a block while what follows it stays; the target's prompt then ends before the hole, and
all of it is there again when the block returns. Whoever has no hole holds a prompt up to some depth and nothing behind it, so
that depth is found by bisection; the others are followed block by block. Links (prefix -> what was stored behind it) tell
whether a removal makes a hole.

Blocks smaller than a page (SGLang's default is one token) are mapped where they end a page; where runs of them end, and
where an engine splits one, may be inside a page, which `kv_index.slab` remembers. A hybrid model has several groups of
caches, and a prompt is reusable only as far as every group allows (`Kind`).

Forgetting a target costs nothing at once: its bit is retired, and `sweep` takes it out of the maps in small portions.
"""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct, error as StructError

from kv_index.groups import TIERS, Cache, Group, Kind, Tier
from kv_index.holders import Holders
from kv_index.matching import Held, Matcher
from kv_index.pages import PAGE_TOKENS, PREFIX_BITS, SYMBOL, prefixes
from kv_index.slab import Slab

ENTRY_BYTES = 104
"""One block of one target: the engine's hash, the prefix, and the entry that joins them."""
PREFIX_BYTES = 80
"""One prefix: who holds it, and its link."""
LARGEST = 1 << 16
"""Tokens beyond which a block's size is not believed if smaller ones come."""
PLACES = 1024
"""Bits that wait to be swept, beside some for each target, before nothing new is followed."""
GROUPS = 64
"""Cache groups of one target that are followed."""
RECALLED = 512
"""Blocks that left a device and are remembered by name."""


class BlockIndex:
    """See the module's head. Targets are small integers; of hashes the low 60 bits count, signed or not."""

    def __init__(self, max_bytes: int = 512 * 1024 * 1024) -> None:
        if max_bytes <= 0:
            raise ValueError("max_bytes must be positive")
        self.max_bytes = max_bytes
        self.entries = 0
        """Blocks of all targets, on all tiers and in all groups, and those not swept out yet."""
        self._holders = Holders()
        self._targets: dict[int, Cache] = {}
        self._places: list[int | None] = []
        """Number of a bit -> its target."""
        self._matcher = Matcher(self._holders, self._targets, self._places)
        self._retired: list[Group] = []
        self._slot_bytes = 0

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def footprint(self) -> int:
        """Estimated size."""
        return self.entries * ENTRY_BYTES + len(self._holders) * PREFIX_BYTES + self._slot_bytes

    @property
    def full(self) -> bool:
        """Whether nothing more can be stored."""
        return self.footprint > self.max_bytes

    def __contains__(self, target: int) -> bool:
        return target in self._targets

    def blocks(self, target: int, tier: Tier = Tier.DEVICE) -> int:
        """Blocks of its first full group that ``target`` holds on ``tier``; pages, where its blocks are smaller."""
        state = self._targets.get(target)
        return len(state.full[0].own[tier]) if state is not None and state.full else 0

    def tokens(self, target: int, tier: Tier = Tier.DEVICE) -> int:
        """Tokens in those."""
        state = self._targets.get(target)
        if state is None or not state.full:
            return 0
        group = state.full[0]
        return len(group.own[tier]) * (group.size if group.slab is None else group.stride * PAGE_TOKENS)

    def block_size(self, target: int) -> int | None:
        """Tokens in one block of its first full group; ``None`` while that is not known."""
        state = self._targets.get(target)
        if state is None:
            return None
        return state.full[0].size if state.full else next(iter(state.sizes.values()), None)

    def holds(self, target: int, symbols: bytes) -> bool:
        """Whether ``target`` holds the last whole block of the prompt with these chained symbols, on whatever tier."""
        state = self._targets.get(target)
        if state is None or not state.full:
            return False
        group = state.full[0]
        end = len(symbols) // SYMBOL // group.stride * group.stride * SYMBOL
        name = int.from_bytes(symbols[end - SYMBOL : end], "little") if end else None
        return name is None or any(holders.get(name, 0) & group.bit for holders in self._holders.by_tier)

    def grouped(self, target: int) -> bool:
        """Whether ``target`` tells of caches that are reusable at some tokens only."""
        state = self._targets.get(target)
        return state is not None and bool(state.others)

    def match(self, symbols: bytes, ids: bytes = b"", start: int = 0) -> Held:
        """Who can reuse how much of the prompt with these chained symbols. Changes nothing.

        ``ids`` and ``start``: its token ids and the start of its chain, by which targets with blocks smaller than a page are
        matched to the block; without them to the page.
        """
        return self._matcher.match(symbols, ids, start)

    def holds_all(self, target: int, hashes: Sequence[int], tier: Tier = Tier.DEVICE, group: int = 0) -> bool:
        """Whether ``target`` has all these blocks, by its engine's hashes, on that tier."""
        state = self._targets.get(target)
        into = None if state is None else state.groups.get(group)
        return into is not None and bool(hashes) and all(hash & PREFIX_BITS in into.own[tier] for hash in hashes)

    # -- writing ----------------------------------------------------------------------------------------------------

    def add(self, target: int, size: int | None = None) -> None:
        """Expect events of ``target``, whose first group's blocks have ``size`` tokens (``None``: as its first event says)."""
        if target not in self._targets:
            self._targets[target] = Cache(target, {} if size is None else {0: size})

    def store(
        self,
        target: int,
        hashes: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        size: int,
        *,
        tier: Tier = Tier.DEVICE,
        group: int = 0,
        kind: Kind = Kind.FULL,
        window: int = 0,
        start: int = 0,
    ) -> bool:
        """``target`` stored blocks of ``size`` tokens behind ``parent`` (an engine hash, or ``None`` at the start).

        Where there are fewer hashes than blocks in ``tokens``, they are those of the last ones. ``start`` is where the chain
        of its namespace begins. False: they cannot be placed, for the parent is not known, there is no room, or their tokens
        are not told and the blocks lie nowhere else. Raises `ValueError` for what cannot be a block.
        """
        state = self._targets.get(target)
        if state is None:
            state = self._targets[target] = Cache(target, {})
        hashes = [hash & PREFIX_BITS for hash in hashes]
        if not tokens:
            return self._copy(state, hashes, tier, group)
        if size <= 0 or len(tokens) // size < len(hashes):
            raise ValueError(f"{len(hashes)} blocks of {size} tokens in {len(tokens)} tokens")
        if len(set(hashes)) < len(hashes):
            raise ValueError("a block twice in one run")
        try:
            ids = Struct(f"<{len(tokens)}I").pack(*tokens)
        except StructError:
            raise ValueError("token ids must be integers from 0 to 2**32 - 1") from None
        if self.full:
            return False
        into = self._into(state, group, kind, size, window, tier)
        if isinstance(into, bool) or not hashes:
            return into is not False
        parent = None if parent is None else parent & PREFIX_BITS
        if into.slab is not None:
            return self._store_fine(into, hashes, parent, ids, tier, start)
        before = start if parent is None else self._find(state, into, parent, tier)
        if before is None:
            return self._copy(state, hashes, tier, group)
        if into.stride * PAGE_TOKENS == size:
            self._store_whole(into, hashes, ids, before, tier, parent is not None)
        return True

    def _store_whole(
        self, into: Group, hashes: Sequence[int], ids: bytes, before: int, tier: Tier, behind: bool
    ) -> None:
        """Blocks of whole pages, behind the prefix ``before``; ``behind``: that is a block, and not where a chain begins."""
        size = into.size
        found = prefixes(ids[: len(ids) // (4 * size) * 4 * size], before)
        if into.stride > 1:
            found = found[into.stride - 1 :: into.stride]
        if len(found) > len(hashes):
            before = found[-len(hashes) - 1]
            found = found[-len(hashes) :]
            behind = True
        self.apply(into, hashes, found, before, tier)
        full = not tier and into.kind is Kind.FULL
        if behind and full and not self._holders.by_tier[0].get(before, 0) & into.bit:
            # What was stored lies behind a hole.
            self._holders.hole(into, before)

    def apply(
        self, group: Group, hashes: Sequence[int], found: Sequence[int], before: int, tier: Tier = Tier.DEVICE
    ) -> None:
        """Blocks that ``group`` stored one behind the other, by engine hash (60 bits) and by prefix; ``before``: the prefix
        in front of the first."""
        own = group.own[tier]
        if tier and not group.deep:
            group.deep = True
            self._matcher.stale = True
        if not own.keys().isdisjoint(hashes):
            self._apply_each(group, hashes, found, before, tier)
            return
        if group.kind is Kind.FULL:
            found = self._holders.hold(group, found, before, tier)
        else:
            for name in found:
                group.there[name] = group.there.get(name, 0) + 1
        had = len(own)
        own.update(zip(hashes, found, strict=True))
        self.entries += len(own) - had

    def remove(self, target: int, hashes: Iterable[int], tier: Tier = Tier.DEVICE, group: int = 0) -> None:
        """``target`` dropped these blocks from ``tier``; those that are not known are passed over."""
        state = self._targets.get(target)
        at = state.groups.get(group) if state is not None else None
        if at is None:
            return
        own, copies, slab = at.own[tier], at.copies, at.slab
        for each in hashes:
            hash = each & PREFIX_BITS
            if copies and (more := copies.get((tier, hash))):
                if more == 1:
                    del copies[tier, hash]
                else:
                    copies[tier, hash] = more - 1
                continue
            name = own.pop(hash, None)
            if slab is not None and not tier:
                slab.drop(hash)
            if name is None:
                continue
            if not tier:
                at.recalled[hash] = name
                if len(at.recalled) > RECALLED:
                    del at.recalled[next(iter(at.recalled))]
            self.entries -= 1
            if at.kind is not Kind.FULL:
                at.there[name] -= 1
                if not at.there[name]:
                    del at.there[name]
            elif at.twins and (more := at.twins.pop((tier, name), 0)):
                if more > 1:
                    at.twins[tier, name] = more - 1
            else:
                self._holders.let_go(at, name, tier)

    def clear(self, target: int) -> None:
        """``target`` holds nothing any more."""
        state = self._targets.get(target)
        if state is None:
            return
        sizes = state.sizes | {at: group.size for at, group in state.groups.items() if group.kind is Kind.FULL}
        self.drop(target)
        self._targets[target] = Cache(target, sizes)

    def drop(self, target: int) -> None:
        """``target`` is gone."""
        state = self._targets.pop(target, None)
        if state is None:
            return
        for group in state.groups.values():
            self._retire(group)
        self._matcher.stale = True

    def sweep(self, most: int = 2000) -> bool:
        """Upkeep, some times a second: take out up to ``most`` blocks of those that are gone, and what they have made of
        others. False when none of them are left."""
        for state in self._targets.values():
            for group in state.full:
                if group.holes:
                    self._holders.recount(group)
                if group.slab is not None:
                    group.slab.scanned = 0
                if group.slab is not None and not group.slab.held and len(group.slab) and self.full:
                    # What blocks inside its pages are still there for is lost, but so is what there is no room for.
                    self._slot_bytes -= group.slab.footprint
                    group.slab = Slab(group.size, group.stride * PAGE_TOKENS)
        while self._retired and most > 0:
            group = self._retired[-1]
            for tier in Tier:
                own = group.own[tier]
                while own and most > 0:
                    _, name = own.popitem()
                    self.entries -= 1
                    most -= 1
                    if self._holders.by_tier[tier].get(name, 0) & group.bit:
                        self._holders.let_go(group, name, tier)
            if not any(group.own):
                self._retired.pop()
                self._places[group.bit.bit_length() - 1] = None
        return bool(self._retired)

    # -- groups and their bits --------------------------------------------------------------------------------------

    def _group(self, state: Cache, group: int, kind: Kind, size: int, window: int) -> Group | None:
        """A new group of ``state``; ``None`` where the first thing heard of it is a block that is too short."""
        if kind is Kind.FULL and size < state.sizes.get(group, 0):
            return None
        bit = 0
        if kind is Kind.FULL:
            at = self._places.index(None) if None in self._places else len(self._places)
            if at == len(self._places):
                self._places.append(None)
            self._places[at] = state.id
            bit = 1 << at
        made = state.groups[group] = Group(kind, size, window, bit)
        (state.full if kind is Kind.FULL else state.others).append(made)
        self._matcher.stale = True
        return made

    def _into(self, state: Cache, group: int, kind: Kind, size: int, window: int, tier: Tier) -> Group | bool:
        """The group that takes blocks of ``size``; false: none does, true: they are of no use and nothing is lost."""
        into = state.groups.get(group)
        if into is None:
            if tier and size != state.sizes.get(group, size):
                return False
            if len(state.groups) >= GROUPS or len(self._places) > PLACES + 8 * len(self._targets):
                return False
            into = self._group(state, group, kind, size, window)
        elif size < into.size and not tier and not into.own[0] and (into.deep or into.size > LARGEST):
            # The device says what a block is, not who was heard first.
            into = self._regroup(state, group, kind, size, window)
        if into is None or size < into.size:
            # The last, short page of a sequence: never reused.
            return True
        if size > into.size:
            if tier:
                # A lower tier in chunks of its own: what a chunk holds cannot be told block by block.
                return False
            into = self._regroup(state, group, kind, size, window)
        return into

    def _regroup(self, state: Cache, group: int, kind: Kind, size: int, window: int) -> Group:
        """The blocks heard of so far were short ones: the group's are larger."""
        old = state.groups.pop(group)
        (state.full if old.kind is Kind.FULL else state.others).remove(old)
        self._retire(old)
        state.sizes.pop(group, None)
        made = self._group(state, group, kind, size, window)
        assert made is not None
        return made

    def _retire(self, group: Group) -> None:
        group.gone = True
        if group.slab is not None:
            self._slot_bytes -= group.slab.footprint
        if group.kind is Kind.FULL:
            self._retired.append(group)
        else:
            self.entries -= sum(map(len, group.own))

    # -- placing ----------------------------------------------------------------------------------------------------

    def _find(self, state: Cache, group: Group, hash: int, tier: Tier) -> int | None:
        """The prefix of the block that the engine calls ``hash``, in any group: a block has one hash in all of them."""
        found = group.name(hash)
        if found is None:
            for other in state.groups.values():
                if other is not group and other.slab is None and (found := other.name(hash)) is not None:
                    break
        if found is None and tier:
            # It moves down: it may be told as gone from above before it is told as stored below.
            found = group.recalled.get(hash)
        return found

    def _copy(self, state: Cache, hashes: Sequence[int], tier: Tier, group: int) -> bool:
        """Blocks that are told by hash alone: they are placed where they are known from another tier or group."""
        into = state.groups.get(group)
        if into is None or into.kind is not Kind.FULL:
            return False
        placed = bool(hashes)
        for hash in hashes:
            name = self._find(state, into, hash, tier)
            if name is None:
                placed = False
            elif hash not in into.own[tier]:
                self.apply(into, [hash], [name], name, tier)
        return placed

    def _store_fine(
        self, group: Group, hashes: Sequence[int], parent: int | None, ids: bytes, tier: Tier, start: int
    ) -> bool:
        slab = group.slab
        assert slab is not None
        if tier and self._moved(group, hashes, tier, len(ids) < slab.unit):
            return True
        place = (start, b"") if parent is None else slab.place(parent)
        if place is None and parent is not None and (known := group.name(parent)) is not None:
            place = known, b""
        size = 4 * group.size
        blocks = len(ids) // size
        if place is None or len(hashes) < blocks:
            return False
        before, rest = place
        had = slab.footprint
        pages: list[tuple[int, int]] = []
        first = before
        run = rest + ids[: blocks * size]
        done = len(rest) // size
        """Blocks of the first page that an earlier run stored."""
        per = slab.per
        for at in range(0, len(run), slab.unit):
            page = run[at : at + slab.unit]
            count = len(page) // size
            low = max(0, at // size - done)
            own = hashes[low : at // size - done + count]
            name = prefixes(page, before)[-1] if count == per else 0
            if not tier:
                slab.put(before, page, own, count, name)
            if name:
                pages.append((own[-1], name))
                before = name
        self._slot_bytes += slab.footprint - had
        if parent is None:
            slab.begun(start)
        if pages:
            self.apply(group, [hash for hash, _ in pages], [name for _, name in pages], first, tier)
            behind = not tier and parent is not None and not slab.begins(first)
            if behind and not self._holders.by_tier[0].get(first, 0) & group.bit:
                self._holders.hole(group, first)
        return True

    def _moved(self, group: Group, hashes: Sequence[int], tier: Tier, short: bool) -> bool:
        """Blocks inside pages come down from the device, one event each: the ends of pages are known by their hashes, and
        nothing else counts. False if they have to be placed."""
        known = False
        for hash in hashes:
            name = group.name(hash)
            if name is None:
                name = group.recalled.get(hash)
            if name is not None:
                known = True
                self.apply(group, [hash], [name], name, tier)
        return known or short

    def _apply_each(self, group: Group, hashes: Sequence[int], found: Sequence[int], before: int, tier: Tier) -> None:
        """`apply` where some are known already: each is one more copy, which is removed by itself."""
        own = group.own[tier]
        for hash, name in zip(hashes, found, strict=True):
            if hash not in own:
                self.apply(group, [hash], [name], before, tier)
            else:
                name = own[hash]
                group.copies[tier, hash] = group.copies.get((tier, hash), 0) + 1
            before = name

    # -- the invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `AssertionError` if the maps disagree with each other. Costs everything that is held."""
        entries = 0
        wanted: list[dict[int, int]] = [{} for _ in range(TIERS)]
        for group in self._all_groups():
            for tier in Tier:
                entries += len(group.own[tier])
                if group.kind is Kind.FULL:
                    for name in group.own[tier].values():
                        wanted[tier][name] = wanted[tier].get(name, 0) | group.bit
        assert entries == self.entries, f"{entries} blocks, {self.entries} counted"
        for tier in Tier:
            for name, held in self._holders.by_tier[tier].items():
                assert held, "a prefix that nobody holds is kept"
                assert held & ~wanted[tier].get(name, 0) == 0, "somebody is said to hold what it never stored"
        strides = {group.stride for group in self._all_groups()}
        for state in self._targets.values():
            for group in state.full:
                followed = (
                    group.deep or group.slab is not None or len(state.full) > 1 or state.others or len(strides) > 1
                )
                assert self._places[group.bit.bit_length() - 1] == state.id, "a bit stands for another target"
                for name, held in self._holders.by_tier[0].items():
                    if followed or held & group.bit:
                        continue
                    behind = [
                        each for each in self._holders.behind(name) if self._holders.by_tier[0].get(each, 0) & group.bit
                    ]
                    assert not behind or name in group.holes, "a hole is not known"

    def _all_groups(self) -> Iterator[Group]:
        yield from self._retired
        for state in self._targets.values():
            yield from state.groups.values()
