"""An engine's prefix cache: blocks with reference counts, and those nobody references in order of last use.

A running request references the blocks it found and those it fills. Blocks with an id stay when it ends, tail first, so
that of one prefix the end is forgotten before the start: with that what is cached is always closed towards the root (whoever
holds a block holds all before it), a leaf goes first, and how much of a prompt is here is found by bisection. Blocks
without an id (partly filled, or of an answer that nobody will ask for) are only counted, and gone at the end.

Below the device there may be host memory: what is evicted goes there, and stays there when it is copied back.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """What an engine's events would tell: ``ids`` were stored behind ``parent``, or dropped."""

    stored: bool
    host: bool
    parent: int | None
    ids: tuple[int, ...]


class BlockCache:
    """Room for ``capacity`` blocks, and ``host`` more below. ``told``: keep a journal of what comes and goes."""

    __slots__ = ("_writes", "below", "capacity", "evicted", "host", "idle", "journal", "private", "refs", "states")

    def __init__(self, capacity: int, host: int = 0, told: bool = False) -> None:
        self.capacity = capacity
        self.host = host
        self.evicted = 0
        self.below: OrderedDict[int, None] = OrderedDict()
        """Blocks in host memory, next to go first."""
        self.journal: list[Move] | None = [] if told else None
        self._writes = False
        self.states: set[int] = set()
        """Blocks at whose end a hybrid model's state is kept."""
        self.refs: dict[int, int] = {}
        """id -> requests that reference it, of all cached blocks."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody references, next to go first."""
        self.private = 0
        """Blocks in use that have no id."""

    def share(self, everything: OrderedDict[int, None]) -> None:
        """From now on ``everything`` that was ever filled, here or by others who share it, can be copied from below."""
        self.below = everything
        self._writes = True

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
        if over > 0:
            self._evict(over)
        return True

    def _evict(self, blocks: int) -> None:
        gone = []
        for _ in range(blocks):
            id_, _ = self.idle.popitem(last=False)
            del self.refs[id_]
            gone.append(id_)
        self.evicted += blocks
        if self.states:
            self.states.difference_update(gone)
        if self.journal is not None:
            self.journal.append(Move(False, False, None, tuple(gone)))
        if self.host:
            self._offload(gone)

    def _offload(self, ids: Sequence[int]) -> None:
        """A tail was evicted before its start, and is forgotten before it here too."""
        below = self.below
        for id_ in ids:
            below[id_] = None
            below.move_to_end(id_)
        gone = [below.popitem(last=False)[0] for _ in range(len(below) - self.host)]
        if self.journal is not None:
            kept = tuple(id_ for id_ in ids if id_ in below)
            if kept:
                self.journal.append(Move(True, True, None, kept))
            if gone:
                self.journal.append(Move(False, True, None, tuple(gone)))

    def found_below(self, ids: Sequence[int], hit: int, most: int) -> int:
        """How many blocks behind the first ``hit`` of ``ids`` are in host memory without a gap."""
        at, end = hit, min(most, len(ids))
        while at < end and ids[at] in self.below:
            at += 1
        return at - hit

    def resumable(self, ids: Sequence[int], depth: int) -> int:
        """The deepest of the first ``depth`` blocks at whose end a state is kept."""
        states = self.states
        while depth and ids[depth - 1] not in states:
            depth -= 1
        return depth

    def publish(self, ids: Sequence[int], parent: int | None = None) -> None:
        """Blocks behind ``parent`` that were taken are filled now. One that was filled by somebody else meanwhile is shared,
        not doubled: otherwise what is behind it could outlive it."""
        refs, idle = self.refs, self.idle
        if self.journal is not None:
            new = [at for at, id_ in enumerate(ids) if id_ not in refs]
            if new:
                # Whoever holds a block holds all before it: what is new is one run, up to the end.
                first = new[0]
                self.journal.append(Move(True, False, ids[first - 1] if first else parent, tuple(ids[first:])))
        if self._writes:
            self.below.update(dict.fromkeys(ids))
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
