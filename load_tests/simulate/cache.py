"""An engine's prefix cache: blocks with reference counts, and those nobody references in order of last use.

A running request references the blocks it found and those it fills. Blocks with an id stay when it ends, tail first, so
that of one prefix the end is forgotten before the start: with that what is cached is always closed towards the root (whoever
holds a block holds all before it), a leaf goes first, and how much of a prompt is here is found by bisection. Blocks
without an id (partly filled, or of an answer that nobody will ask for) are only counted, and gone at the end.
"""

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """Room for ``capacity`` blocks."""

    __slots__ = ("capacity", "evicted", "idle", "private", "refs")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.evicted = 0
        self.refs: dict[int, int] = {}
        """id -> requests that reference it, of all cached blocks."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody references, next to go first."""
        self.private = 0
        """Blocks in use that have no id."""

    @property
    def used(self) -> int:
        """Blocks that running requests reference."""
        return len(self.refs) - len(self.idle) + self.private

    @property
    def room(self) -> int:
        """Blocks that could be taken now, cached ones that nobody references among them."""
        return self.capacity - self.used

    def match(self, ids: Sequence[int], most: int) -> int:
        """How many leading blocks of ``ids`` are here, at most ``most``. Changes nothing."""
        refs = self.refs
        low, high = 0, min(most, len(ids))
        if high and ids[high - 1] in refs:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if ids[middle - 1] in refs:
                low = middle
            else:
                high = middle - 1
        return low

    def open(self, ids: Sequence[int], hit: int, blocks: int) -> bool:
        """Reference the first ``hit`` of ``ids`` and take what is missing to ``blocks``; False, unchanged, if no room."""
        refs, idle = self.refs, self.idle
        found = ids[:hit]
        revived = sum(1 for id_ in found if not refs[id_])
        if blocks - hit + revived > self.room:
            return False
        for id_ in found:
            if not refs[id_]:
                del idle[id_]
            refs[id_] += 1
        return self.take(blocks - hit)

    def take(self, blocks: int) -> bool:
        """Take blocks without contents; False, unchanged, if there is no room for all."""
        if blocks > self.room:
            return False
        self.private += blocks
        over = len(self.refs) + self.private - self.capacity
        for _ in range(over):
            id_, _ = self.idle.popitem(last=False)
            del self.refs[id_]
        self.evicted += max(0, over)
        return True

    def publish(self, ids: Sequence[int]) -> None:
        """Blocks that were taken are filled now. One that was filled by somebody else meanwhile is shared, not doubled:
        otherwise what is behind it could outlive it."""
        refs, idle = self.refs, self.idle
        for id_ in ids:
            count = refs.get(id_)
            if count is None:
                refs[id_] = 1
            else:
                if not count:
                    del idle[id_]
                refs[id_] = count + 1
        self.private -= len(ids)

    def close(self, ids: Sequence[int], private: int) -> None:
        """Give back references to ``ids`` and ``private`` blocks without one."""
        refs, idle = self.refs, self.idle
        for id_ in reversed(ids):
            count = refs[id_] = refs[id_] - 1
            if not count:
                idle[id_] = None
        self.private -= private
