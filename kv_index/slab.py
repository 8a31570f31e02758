"""What is inside the pages of a target whose blocks are smaller than a page.

An engine that caches token by token names a hash for each token, and may go on from any of them: where a run ended, and
where it splits one because another prompt leaves it there. To keep a map entry for each would cost a kilobyte a page; so a
page is one slot of flat arrays: its tokens, and the low half of each block's hash. A parent that is not the end of a page
or of a run is looked for in them, once; most prompts leave each other at the same few places.

What a slot says is true whether or not its target still holds it, since an engine's hash covers all that is before it. So a
slot whose blocks are gone stays as long as there is room, and only its mark says that it is not held.
"""

from array import array
from collections import deque
from collections.abc import Sequence

SLOT_BYTES = 270
"""One page beside its tokens and hashes: its place in the tables."""
SCANNED = 32 * 1024 * 1024
"""Bytes that are searched between two sweeps, for parents that are not known: some milliseconds."""
STARTS = 4096
"""Starts of chains that are remembered."""

FREE, GONE, HELD = 0, 1, 2
HALF = (1 << 32) - 1
SPARE = 1024
"""Slots that may be gone, beside as many as are held."""
SPLITS = 4096
"""Places inside pages that are remembered."""


class Slab:
    """Slots of pages of ``unit`` tokens in blocks of ``size``; see the module's head."""

    def __init__(self, size: int, unit: int) -> None:
        self.block = 4 * size
        """Bytes of token ids in a block."""
        self.unit = 4 * unit
        """Bytes of token ids in a page."""
        self.per = unit // size
        self._tokens = bytearray()
        self._hashes = bytearray()
        self._before = array("Q")
        self._name = array("Q")
        self._count = array("H")
        self._mark = bytearray()
        self._end = array("Q")
        self.scanned = 0
        """Bytes searched since the last sweep."""
        self._starts: dict[int, None] = {}
        self._ends: dict[int, int] = {}
        """Engine hash of the last block of a page or run -> slot."""
        self._splits: dict[int, tuple[int, int]] = {}
        """Engine hash of a block inside -> (slot, blocks up to it), where one was asked for."""
        self._after: dict[int, set[int]] = {}
        """Prefix -> slots of the pages behind it."""
        self._gone: deque[int] = deque()
        self.held = 0
        """Slots whose last block is held."""

    def __len__(self) -> int:
        return len(self._mark)

    @property
    def footprint(self) -> int:
        """Estimated size."""
        return len(self._mark) * (SLOT_BYTES + self.unit + 4 * self.per)

    def begun(self, start: int) -> None:
        """A chain begins there."""
        self._starts[start] = None
        if len(self._starts) > STARTS:
            del self._starts[next(iter(self._starts))]

    def begins(self, before: int) -> bool:
        """Whether ``before`` is where a chain begins, and no page."""
        return before in self._starts

    def place(self, hash: int) -> tuple[int, bytes] | None:
        """Where the block that the engine calls ``hash`` ends: the prefix of the page before, and the tokens since."""
        end = self._ends.get(hash)
        found = self._inside(hash) if end is None else (end, self._count[end])
        if found is None:
            return None
        slot, blocks = found
        if blocks == self.per and self._name[slot]:
            return self._name[slot], b""
        at = slot * self.unit
        return self._before[slot], bytes(self._tokens[at : at + blocks * self.block])

    def put(self, before: int, page: bytes, hashes: Sequence[int], count: int, name: int) -> None:
        """A page of ``count`` blocks behind ``before``; ``hashes`` are those of its last ones. ``name`` if it is whole."""
        known = self._ends.get(hashes[-1])
        if known is not None:
            self._hold(known)
            return
        slot = self._take()
        first = count - len(hashes)
        at = slot * self.unit
        self._tokens[at : at + self.unit] = page.ljust(self.unit, b"\0")
        low = b"".join([(hash & HALF).to_bytes(4, "little") for hash in hashes])
        at = slot * self.per * 4
        self._hashes[at : at + self.per * 4] = (b"\0" * 4 * first + low).ljust(self.per * 4, b"\0")
        self._before[slot], self._name[slot], self._count[slot], self._end[slot] = before, name, count, hashes[-1]
        self._mark[slot] = HELD
        self.held += 1
        self._ends[hashes[-1]] = slot
        self._after.setdefault(before, set()).add(slot)

    def drop(self, hash: int) -> None:
        """The block called ``hash`` is gone; what matters is where one ended a page or a run."""
        slot = self._ends.get(hash)
        if slot is not None and self._mark[slot] == HELD:
            self._mark[slot] = GONE
            self.held -= 1
            self._gone.append(slot)
            if len(self._gone) > 2 * len(self._mark) + SPARE:
                self._gone = deque(dict.fromkeys(each for each in self._gone if self._mark[each] == GONE))

    def beyond(self, before: int, ids: bytes) -> int:
        """Tokens of ``ids``, in whole blocks, that some held page behind ``before`` begins with."""
        best = 0
        for slot in self._after.get(before, ()):
            if self._mark[slot] != HELD:
                continue
            at = slot * self.unit
            tokens = self._tokens[at : at + self._count[slot] * self.block]
            best = max(best, _common(tokens, ids) // self.block)
        return best * self.block // 4

    def _inside(self, hash: int) -> tuple[int, int] | None:
        found = self._splits.get(hash)
        if found is not None:
            return found
        if self.scanned > SCANNED:
            return None
        self.scanned += len(self._hashes)
        needle = (hash & HALF).to_bytes(4, "little")
        at = self._hashes.find(needle)
        while at >= 0 and at % 4:
            at = self._hashes.find(needle, at + 1)
        if at < 0:
            return None
        slot, offset = divmod(at, self.per * 4)
        if len(self._splits) >= SPLITS:
            self._splits.clear()
        found = self._splits[hash] = (slot, offset // 4 + 1)
        return found

    def _hold(self, slot: int) -> None:
        if self._mark[slot] == GONE:
            self._mark[slot] = HELD
            self.held += 1

    def _take(self) -> int:
        while len(self._gone) > SPARE + self.held:
            slot = self._gone.popleft()
            if self._mark[slot] == GONE:
                self._free(slot)
                return slot
        slot = len(self._mark)
        self._mark.append(FREE)
        self._tokens += bytes(self.unit)
        self._hashes += bytes(self.per * 4)
        self._before.append(0)
        self._name.append(0)
        self._count.append(0)
        self._end.append(0)
        return slot

    def _free(self, slot: int) -> None:
        after = self._after.get(self._before[slot])
        if after is not None:
            after.discard(slot)
            if not after:
                del self._after[self._before[slot]]
        self._mark[slot] = FREE
        if self._ends.get(self._end[slot]) == slot:
            del self._ends[self._end[slot]]
        self._splits.clear()


def _common(one: bytes | bytearray, other: bytes) -> int:
    """Bytes that both begin with."""
    end = min(len(one), len(other))
    for at in range(0, end, 4):
        if one[at : at + 4] != other[at : at + 4]:
            return at
    return end // 4 * 4
