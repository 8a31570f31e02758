"""Models with recurrent layers: KV alone is no hit, the state at that very position must have been kept as well.

A state is as large as many blocks, so an engine keeps few of them, at positions that a rule chooses:

    boundary   the last block boundary of each prompt, ``(n - 1) // block_size * block_size``, and where a prompt left
               what the attention layers had cached; nothing while decoding (vLLM's mamba_cache_mode align)
    ends       the exact end of each prompt and of what was generated
    every:N    every N tokens, of prompts and of what is generated

A hit is the deepest kept state at or below what the KV alone would give. States have a pool of their own, from which
the one unused for longest goes.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.journal import Event, VllmJournal

# As the smallest hybrid models publish: three groups of recurrent layers before the one of attention.
STATE_GROUPS = 3
Marks = Callable[[Holding, int, int], list[int]]


def interval_of(rule: str) -> int:
    """N of ``every:N``; 0 for the other rules, ValueError for what is no rule."""
    if rule in ("boundary", "ends"):
        return 0
    name, _, number = rule.partition(":")
    if name != "every" or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"hybrid must be boundary, ends or every:N, not {rule!r}")
    return int(number)


class StatePool:
    """Which prefixes have a state, by length and digest. ``dropped`` hears of the block hash of one that goes."""

    def __init__(self, room: int, dropped: Callable[[bytes], None]) -> None:
        self.room = room
        self._dropped = dropped
        self._kept: OrderedDict[tuple[int, bytes], bytes | None] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def deepest(self, namespace: str, tokens: Sequence[int], limit: int) -> int:
        """The longest prefix of at most ``limit`` tokens that has a state; 0 for none."""
        digest, done, best = blake2b(namespace.encode(), digest_size=16), 0, 0
        for length in sorted(self._lengths):
            if length > limit:
                break
            digest.update(array("Q", tokens[done:length]).tobytes())
            done = length
            if (length, digest.copy().digest()) in self._kept:
                best = length
        return best

    def keep(self, namespace: str, tokens: Sequence[int], block_hash: bytes | None) -> None:
        """A state after all of ``tokens``; a second one for the same prefix takes the place of the first."""
        key = self._key(namespace, tokens)
        if key in self._kept:
            self._forget(key)
        self._kept[key] = block_hash
        self._lengths[key[0]] += 1
        while len(self._kept) > self.room:
            self._forget(next(iter(self._kept)))

    def touch(self, namespace: str, tokens: Sequence[int]) -> None:
        if tokens:
            self._kept.move_to_end(self._key(namespace, tokens))

    def clear(self) -> None:
        self._kept.clear()
        self._lengths.clear()

    def _key(self, namespace: str, tokens: Sequence[int]) -> tuple[int, bytes]:
        digest = blake2b(namespace.encode() + array("Q", tokens).tobytes(), digest_size=16)
        return len(tokens), digest.digest()

    def _forget(self, key: tuple[int, bytes]) -> None:
        block_hash = self._kept.pop(key)
        self._lengths[key[0]] -= 1
        if not self._lengths[key[0]]:
            del self._lengths[key[0]]
        if block_hash is not None:
            self._dropped(block_hash)


class HybridCache(KVCache):
    """``inner`` holds the KV of the attention layers; this one adds the states."""

    def __init__(self, inner: KVCache, rule: str, room: int) -> None:
        self.inner = inner
        self.block_size = inner.block_size
        self.num_blocks = inner.num_blocks
        self.states = StatePool(room, self._state_dropped)
        self._rule = rule
        self._interval = interval_of(rule)

    @property
    def used_blocks(self) -> int:
        return self.inner.used_blocks

    @property
    def cached_blocks(self) -> int:
        return self.inner.cached_blocks

    @property
    def evictable_blocks(self) -> int:
        return self.inner.evictable_blocks

    @property
    def evicted_blocks(self) -> int:  # type: ignore[override]
        return self.inner.evicted_blocks

    def match(self, holding: Holding, tokens: Sequence[int]) -> int:
        return self.states.deepest(holding.namespace, tokens, self.inner.match(holding, tokens))

    def open(self, holding: Holding, tokens: Sequence[int], hit: int, upto: int) -> bool:
        size, length = self.block_size, len(tokens)
        if self._rule == "boundary":
            holding.marks = sorted({self.inner.match(holding, tokens), (length - 1) // size * size})
        elif self._rule == "ends":
            holding.marks = [length]
        # The rest of a block that a state lies in is copied, so the block is a new one.
        if not self.inner.open(holding, tokens, hit // size * size, upto):
            return False
        self.states.touch(holding.namespace, tokens[:hit])
        holding.stated = hit
        self._keep(holding, tokens, upto)
        return True

    def grow(self, holding: Holding, tokens: Sequence[int], upto: int) -> bool:
        if not self.inner.grow(holding, tokens, upto):
            return False
        self._keep(holding, tokens, upto)
        return True

    def commit(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        self.inner.commit(holding, tokens, computed)

    def close(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        if holding.open and self._rule == "ends" and computed > holding.marks[0]:
            holding.marks = [computed]
            holding.stated = computed - 1
            self._keep(holding, tokens, computed)
        self.inner.close(holding, tokens, computed)

    def clear(self) -> bool:
        if not self.inner.clear():
            return False
        self.states.clear()
        return True

    def recount(self, holdings: Iterable[Holding]) -> int:
        return self.inner.recount(holdings)

    def marks(self, holding: Holding, start: int, end: int) -> list[int]:
        """Positions after ``start`` and up to ``end`` whose state is kept."""
        if self._interval:
            return list(range((start // self._interval + 1) * self._interval, end + 1, self._interval))
        return [mark for mark in holding.marks if start < mark <= end]

    def _keep(self, holding: Holding, tokens: Sequence[int], upto: int) -> None:
        if holding.loading:
            return
        for mark in self.marks(holding, holding.stated, upto):
            whole, rest = divmod(mark, self.block_size)
            known = not rest and whole <= len(holding.digests)
            self.states.keep(holding.namespace, tokens[:mark], holding.digests[whole - 1] if known else None)
        holding.stated = max(holding.stated, upto)

    def _state_dropped(self, block_hash: bytes) -> None:
        if isinstance(self.inner.journal, HybridJournal):
            self.inner.journal.state_removed(block_hash)


class HybridJournal(VllmJournal):
    """vLLM's events of a hybrid model: the groups of recurrent layers, then that of attention.

    A recurrent group covers all the tokens with one hash, that of the block at whose end the state is kept, or with
    none where none is.
    """

    group = STATE_GROUPS
    marks: Marks

    def stored(
        self, holding: Holding, hashes: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], start: int
    ) -> None:
        size, end = self.block_size, start + len(tokens)
        cuts = [mark for mark in self.marks(holding, start, end) if mark % size == 0]
        place = start
        for cut in [*cuts, end] if end not in cuts else cuts:
            first, last = (place - start) // size, (cut - start) // size
            before = hashes[first - 1] if first else parent
            part = tokens[place - start : cut - start]
            kept = [hashes[last - 1]] if cut in cuts else []
            for group in range(STATE_GROUPS):
                self._add(self._stored(holding, kept, before, part, place, group, "mamba"))
            super().stored(holding, hashes[first:last], before, part, place)
            place = cut

    def state_removed(self, block_hash: bytes) -> None:
        for group in range(STATE_GROUPS):
            event: Event = {"type": "BlockRemoved", "block_hashes": [self.wire_hash(block_hash)]}
            self._add({**event, "medium": self.device, "group_idx": group})
