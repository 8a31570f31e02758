"""llama.cpp's cache: one sequence per slot, reused token by token by the next request in that slot.

A request takes the slot that it asks for (id_slot), or the free slot whose contents share the longest prefix with it, if
that is at least a tenth of the prompt, else the one unused for longest. What follows the shared prefix in the slot is
overwritten. Blocks here are tokens; slots are of equal size. (llama.cpp tools/server, --slot-prompt-similarity 0.10.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.nodes import common_length
from load_tests.engine.tiers import Sources

SIMILARITY = 0.10


class SlotCache(KVCache):
    """``slots`` sequences of at most ``slot_tokens`` tokens."""

    block_size = 1

    def __init__(self, slots: int, slot_tokens: int, *, reuse: bool = True) -> None:
        self.num_blocks = slots * slot_tokens
        self.slot_tokens = slot_tokens
        self.reuse = reuse
        self._contents: list[list[int]] = [[] for _ in range(slots)]
        self._namespaces = [""] * slots
        self._reserved = [0] * slots
        self._idle: dict[int, None] = dict.fromkeys(range(slots))

    @property
    def used_blocks(self) -> int:
        return sum(self._reserved)

    @property
    def cached_blocks(self) -> int:
        return sum(map(len, self._contents))

    @property
    def evictable_blocks(self) -> int:
        return sum(len(self._contents[slot]) for slot in self._idle)

    def slots(self) -> list[bool]:
        """Whether each slot is busy."""
        return [slot not in self._idle for slot in range(len(self._contents))]

    def match(self, holding: Holding, tokens: Sequence[int]) -> int:
        return self._best(holding, tokens)[1]

    def open(self, holding: Holding, tokens: Sequence[int], hit: int, upto: int) -> bool:
        slot, shared = self._best(holding, tokens)
        if slot < 0 or upto > self.slot_tokens:
            return False
        self.evicted_blocks += len(self._contents[slot]) - shared
        self._contents[slot] = list(tokens[:shared])
        self._namespaces[slot] = holding.namespace
        self._reserved[slot] = upto
        del self._idle[slot]
        holding.blocks, holding.open = [slot], True
        holding.sources = Sources(shared)
        return True

    def grow(self, holding: Holding, tokens: Sequence[int], upto: int) -> bool:
        if upto > self.slot_tokens:
            return False
        self._reserved[holding.blocks[0]] = max(self._reserved[holding.blocks[0]], upto)
        return True

    def commit(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        self._contents[holding.blocks[0]] = list(tokens[:computed])

    def close(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        if not holding.open:
            return
        slot = holding.blocks[0]
        self._contents[slot] = list(tokens[:computed])
        self._reserved[slot] = 0
        self._idle[slot] = None
        holding.blocks, holding.open = [], False

    def clear(self) -> bool:
        if len(self._idle) < len(self._contents):
            return False
        self._contents = [[] for _ in self._contents]
        return True

    def recount(self, holdings: Iterable[Holding]) -> int:
        return sum(self._reserved[holding.blocks[0]] for holding in holdings if holding.open)

    def _best(self, holding: Holding, tokens: Sequence[int]) -> tuple[int, int]:
        """(slot, shared tokens); slot -1 when all are busy, or the one that was asked for."""
        if not self._idle or (holding.slot is not None and holding.slot not in self._idle):
            return -1, 0
        if holding.slot is not None:
            same = self.reuse and self._namespaces[holding.slot] == holding.namespace
            shared = common_length(self._contents[holding.slot], list(tokens)) if same else 0
            return holding.slot, min(shared, len(tokens) - 1)
        best, longest = next(iter(self._idle)), 0
        limit = len(tokens) - 1
        for slot in self._idle if self.reuse else ():
            if self._namespaces[slot] == holding.namespace:
                shared = min(common_length(self._contents[slot], list(tokens)), limit)
                if shared > longest and shared >= SIMILARITY * len(tokens):
                    best, longest = slot, shared
        if longest == 0 and self.reuse and self._namespaces[best] == holding.namespace:
            longest = min(common_length(self._contents[best], list(tokens)), limit)
        return best, longest
