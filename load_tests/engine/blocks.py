"""vLLM's paged KV cache: blocks with reference counts, chained hashes, and a free list in order of last use.

A block is cached when it is full, under a hash of its tokens and of its parent's hash, so a hash names a whole
prefix. A block nobody references stays cached and waits in the free list; allocation takes the list's head and
forgets what was there. A finished sequence gives its blocks back tail first: of one prefix the end goes before the
start. A hit ends at ``(n - 1) // block_size * block_size``: the last token must be computed to get logits.
(vLLM 0.33, v1/core/block_pool.py and kv_cache_manager.py.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.hashes import Chain, quick_chain
from load_tests.engine.tiers import Block, Sources


class BlockCache(KVCache):
    """Full blocks only. One digest may live in several blocks: two equal prompts can compute the same block at once."""

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, reuse: bool = True, chain: Chain = quick_chain
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.reuse = reuse
        self._chain = chain
        self._refs = [0] * num_blocks
        self._digest: list[bytes | None] = [None] * num_blocks
        self._copies: dict[bytes, list[int]] = {}
        self._about: list[Block | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    def digest_of(self, block: int) -> bytes | None:
        """What is filed in a block; None for nothing, or not a whole block."""
        return self._digest[block]

    def untouched(self, block: int, digest: bytes | None) -> bool:
        """Whether a block, given back with ``digest``, has not been taken since, as far as can be told."""
        return self._digest[block] == digest and (digest is not None or self._refs[block] == 0)

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def cached_blocks(self) -> int:
        return sum(len(copies) for copies in self._copies.values())

    @property
    def evictable_blocks(self) -> int:
        return sum(1 for block in self._free if self._digest[block] is not None)

    def match(self, holding: Holding, tokens: Sequence[int]) -> int:
        if not self.reuse:
            return 0
        limit = (len(tokens) - 1) // self.block_size
        self._hash_upto(holding, tokens, limit)
        hit = 0
        while hit < limit and self._has(holding.digests[hit]):
            hit += 1
        return hit * self.block_size

    def _has(self, digest: bytes) -> bool:
        return digest in self._copies or (self.tiers is not None and self.tiers.find(digest) is not None)

    def open(self, holding: Holding, tokens: Sequence[int], hit: int, upto: int) -> bool:
        found = holding.digests[: hit // self.block_size]
        here = list(takewhile(self._copies.__contains__, found))
        shared = [self._copies[digest][0] for digest in here]
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if self._blocks_for(upto) - len(shared) + revived > len(self._free):
            return False
        for block in shared:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
        holding.blocks, holding.published, holding.open = shared, len(shared), True
        holding.sources = self._restore(found[len(here) :], hit)
        if holding.report_all and shared:
            self._tell(holding, tokens, 0, len(shared))
        return self.grow(holding, tokens, upto)

    def _restore(self, away: Sequence[bytes], hit: int) -> Sources:
        """Blocks that are not on the device are copied to new blocks there, which ``grow`` takes and publishes."""
        counts = [0, 0]
        for digest in away:
            tier = None if self.tiers is None or digest in self._copies else self.tiers.find(digest)
            if self.tiers is not None and tier is not None:
                counts[tier] += self.block_size
                self.tiers.use(digest)
        return Sources(hit - sum(counts), *counts)

    def grow(self, holding: Holding, tokens: Sequence[int], upto: int) -> bool:
        missing = self._blocks_for(upto) - len(holding.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            holding.blocks.append(self._take())
        if self.reuse and not holding.loading and upto // self.block_size > holding.published:
            self._publish(holding, tokens, upto // self.block_size)
        return True

    def commit(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """Nothing to do: as in vLLM, a block is published when the step that fills it is scheduled."""

    def close(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        for block in reversed(holding.blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._digest[block] is None:
                    # A block without contents is the best one to take next.
                    self._free.move_to_end(block, last=False)
        holding.blocks, holding.published, holding.open = [], 0, False

    def clear(self) -> bool:
        if self.used_blocks:
            return False
        self._copies.clear()
        self._digest = [None] * self.num_blocks
        if self.journal is not None:
            self.journal.cleared()
        return True

    def recount(self, holdings: Iterable[Holding]) -> int:
        return len({block for holding in holdings for block in holding.blocks})

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hash_upto(self, holding: Holding, tokens: Sequence[int], blocks: int) -> None:
        size, digests = self.block_size, holding.digests
        for index in range(len(digests), blocks):
            parent = digests[-1] if digests else b""
            digests.append(self._chain(parent, tokens[index * size : (index + 1) * size], holding.namespace))

    def _publish(self, holding: Holding, tokens: Sequence[int], full: int) -> None:
        self._hash_upto(holding, tokens, full)
        for index in range(holding.published, full):
            block, digest = holding.blocks[index], holding.digests[index]
            self._digest[block] = digest
            self._copies.setdefault(digest, []).append(block)
            if self.tiers is not None:
                self._about[block] = self._describe(holding, tokens, index)
        self._tell(holding, tokens, holding.published, full)
        holding.published = full

    def _describe(self, holding: Holding, tokens: Sequence[int], index: int) -> Block:
        start = index * self.block_size
        parent = holding.digests[index - 1] if index else None
        return Block(holding.namespace, parent, tokens[start : start + self.block_size], start)

    def _tell(self, holding: Holding, tokens: Sequence[int], start: int, end: int) -> None:
        """Blocks ``start:end`` of a sequence are stored."""
        if self.journal is not None:
            size, digests = self.block_size, holding.digests
            parent = digests[start - 1] if start else None
            self.journal.stored(holding, digests[start:end], parent, tokens[start * size : end * size], start * size)

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest[block]
        if digest is not None:
            copies = self._copies[digest]
            copies.remove(block)
            if not copies:
                del self._copies[digest]
            self._digest[block] = None
            self.evicted_blocks += 1
            if self.journal is not None:
                self.journal.removed([digest])
            about = self._about[block]
            if self.tiers is not None and about is not None and not copies:
                self.tiers.offload(digest, about)
        self._refs[block] = 1
        return block
