"""What other gateways sent to targets, as far as they say.

Saying every page of every prompt would fill a bus, and keep those busy who listen: 30,000 tokens are 470 pages of text, and
3.7 KB. So a prompt is named at some of its lengths only, by a *mark*: a digest of all that stands before. There are two in each
doubling of length, and one at its end. A mark is said by whoever sent that much of a prompt to a target that did not have it;
what a session adds in a turn is one or two. Who has what a mark stands for has what stands before it too. So a prompt is looked
up from its start on, as far as its marks were said, and behind the last of these from the next one backwards, where a prompt
may have ended that this one goes on from.

What was heard is believed until the target has been sent as many pages since, by anybody, as its cache holds: it is the oldest
then, and gone. The same count tells which part of a cache is ours: of the rest `RadixIndex` knows nothing, and it must not
believe that all of the cache holds what was sent from here.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain, islice

from xxhash import xxh3_64_intdigest

from kv_index.pages import SYMBOL

TEXT_STEP, IDS_STEP = 8, 32
"""Pages of which the lengths with a mark are multiples: about 512 tokens."""
BACK = 8
"""Lengths that are tried between two marks."""
GRID = (1, 2, *sorted([2**power for power in range(2, 24)] + [3 * 2**power for power in range(1, 23)]))
"""Lengths with a mark, in such steps: 1, 2, 4, 6, 8, 12, 16, 24, ..."""
HOLDERS = 8
"""Targets that are known for one mark, those that were said last."""

Holders = tuple[tuple[int, int], ...]
"""(target, pages that had been sent there when it was said), the last said first."""


@lru_cache(maxsize=4096)
def seed_of(namespace: bytes) -> int:
    """Marks of different namespaces are different."""
    return xxh3_64_intdigest(namespace)


def mark(symbols: bytes, pages: int, seed: int, chained: bool) -> int:
    """64 bits for the first ``pages`` of a prompt; ``chained``: its symbols stand for all before them already."""
    end = pages * SYMBOL
    if chained:
        return int.from_bytes(symbols[end - SYMBOL : end], "little") ^ seed
    return xxh3_64_intdigest(memoryview(symbols)[:end], seed)


def marks(symbols: bytes, above: int, seed: int, chained: bool) -> list[int]:
    """Marks of a prompt whose first ``above`` pages were said."""
    step = IDS_STEP if chained else TEXT_STEP
    known, last = above // step, len(symbols) // SYMBOL // step
    if known >= last:
        return []
    lengths = [at for at in GRID[bisect_right(GRID, known) : bisect_right(GRID, last)] if at != last]
    return [mark(symbols, at * step, seed, chained) for at in (*lengths, last)]


class Heard:
    """See the module's head. At most twice ``most`` marks; ``size(target)``: pages of its cache, ``None`` if not known."""

    def __init__(self, size: Callable[[int], int | None], most: int = 100_000) -> None:
        self.most = most
        self._size = size
        self._young: dict[int, Holders] = {}
        self._old: dict[int, Holders] = {}
        """Those that were not said again since so many others were."""
        self._sent: dict[int, int] = {}
        """target -> pages that were sent there, by anybody."""
        self._since: dict[int, int] = {}
        """target -> what that was when it last held nothing."""
        self._ours: dict[int, float] = {}
        self._theirs: dict[int, float] = {}
        """Of late."""
        self._said: dict[int, int] = {}
        self._said_before: dict[int, int] = {}
        """Mark -> target, of what was sent from here: what a newcomer is told, too."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    # -- hearing ----------------------------------------------------------------------------------------------------

    def hear(self, target: int, said: Iterable[int], pages: int) -> None:
        """A prompt was sent to ``target`` by another gateway, ``pages`` of which it did not have."""
        sent = self._sent[target] = self._sent.get(target, 0) + pages
        if pages:
            self._theirs[target] = self._theirs.get(target, 0.0) + pages
        young, old = self._young, self._old
        alone: Holders = ((target, sent),)
        for each in said:
            before = young.get(each) or old.get(each)
            young[each] = alone if before is None else _first(target, sent, before)
        if len(young) > self.most:
            self._old, self._young = young, {}

    def sends(self, target: int, pages: int, heard: int) -> None:
        """A prompt is sent to ``target`` from here, of which the index had not ``pages`` there; of those ``heard`` were heard
        of."""
        if pages:
            self._sent[target] = self._sent.get(target, 0) + pages - heard
            self._ours[target] = self._ours.get(target, 0.0) + pages
            if heard:
                self._theirs[target] = max(0.0, self._theirs.get(target, 0.0) - heard)

    def says(self, target: int, said: Iterable[int]) -> None:
        """The others are told so."""
        self._said.update(dict.fromkeys(said, target))
        if len(self._said) > self.most:
            self._said_before, self._said = self._said, {}

    def empty(self, target: int) -> None:
        """It holds nothing any more."""
        self._since[target] = self._sent.get(target, 0) + 1
        self._sent[target] = self._since[target]
        self._ours.pop(target, None)
        self._theirs.pop(target, None)

    def remove(self, target: int) -> None:
        """It is gone, and its number is given to nobody else."""
        for each in (self._sent, self._since, self._ours, self._theirs):
            each.pop(target, None)

    # -- asking -----------------------------------------------------------------------------------------------------

    def match(self, symbols: bytes, seed: int, chained: bool, known: int, home: int | None) -> dict[int, int]:
        """target -> leading pages of a prompt that it was sent by others; ``known``: pages that ``home`` has anyway, below
        which nobody is looked for."""
        if not self._young and not self._old:
            return {}
        step = IDS_STEP if chained else TEXT_STEP
        last = len(symbols) // SYMBOL // step
        found: dict[int, int] = {}
        # Where the home has a part anyway, others are of less interest than how it goes on there.
        deepest = known // step if home is not None else 0
        place = bisect_right(GRID, deepest)
        while (at := GRID[place]) <= last:
            holding = self._holding(mark(symbols, at * step, seed, chained))
            if holding is None:
                break
            deepest = at
            for target in holding:
                found[target] = at * step
            place += 1
        # Whoever sent more said that of the next length too, but for where its prompt ended.
        end = min(last, GRID[place] - 1)
        for at in range(end, max(deepest, end - BACK), -1):
            holding = self._holding(mark(symbols, at * step, seed, chained))
            if holding:
                for target in holding:
                    found[target] = at * step
                break
        return found

    def _holding(self, said: int) -> list[int] | None:
        """Targets that have it still; ``None``: it was never said."""
        told = self._young.get(said) or self._old.get(said)
        return None if told is None else [target for target, sent in told if self._lasts(target, sent)]

    def _lasts(self, target: int, sent: int) -> bool:
        now = self._sent.get(target)
        if now is None or sent < self._since.get(target, 0):
            return False
        size = self._size(target)
        return size is None or now - sent <= size

    def ours(self, target: int) -> float:
        """The part of the target's cache that holds what was sent from here, by what was sent there of late."""
        ours, theirs = self._ours.get(target, 0.0), self._theirs.get(target, 0.0)
        size = self._size(target)
        if size is not None and ours + theirs > 2 * size:
            self._ours[target], self._theirs[target] = ours / 2, theirs / 2
        return 1.0 if not theirs else max(ours, 1.0) / (max(ours, 1.0) + theirs)

    def recent(self, most: int) -> Iterator[tuple[int, list[int]]]:
        """(mark, targets that have it) of those that were said last, by others and from here, ``most`` of each."""
        for said, target in islice(chain(reversed(self._said.items()), reversed(self._said_before.items())), most):
            yield said, [target]
        for said in islice(chain(reversed(self._young), reversed(self._old)), most):
            if holding := self._holding(said):
                yield said, holding


def _first(target: int, sent: int, before: Holders) -> Holders:
    others = [each for each in before if each[0] != target]
    return ((target, sent), *others[: HOLDERS - 1])
