"""Which targets do far worse than their peers: by the share of their requests that fail, or by how long they take to begin.

A target is compared with the others of its pool over the last seconds. How long an answer took to begin is told as a multiple
of what was expected of that prompt on that target, so that long prompts, queues and slower hardware are no offence; one that
hangs, throttles or swaps is. Little evidence judges nobody, and of one pool never more than half is put out.

The rule of error shares is that of Envoy's outlier detection in spirit (a host's failure percentage against the others'), with
smaller numbers: a fleet of engines answers tens of requests in ten seconds, not thousands.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EVIDENCE = 10.0
"""Requests that a target must have answered, or failed, to be judged, and the others together to be compared with."""
ERRORS = 0.25
"""Least share of failures, ..."""
TIMES_ERRORS = 3.0
"""... which must also be so many times the share of the others."""
LATE = 3.0
"""Least multiple of the expected time, ..."""
TIMES_LATE = 4.0
"""... which must also be so many times the others' median."""
FADE = 0.5
"""What is left of the counts from one judgement to the next."""
SLACK = 0.1
"""Seconds that every answer may take: without them prompts that cost next to nothing would tell next to nothing."""


@dataclass(slots=True, eq=False)
class Record:
    """What was seen of one target of late."""

    answered: float = 0.0
    faults: float = 0.0
    begun: float = 0.0
    """Streams that began, ..."""
    late: float = 0.0
    """... and the sum of their times, as multiples of what was expected."""

    def began(self, seconds: float, expected: float) -> None:
        """The first event of a stream came ``seconds`` after it was sent; ``expected`` were so many."""
        self.begun += 1.0
        self.late += (seconds + SLACK) / (expected + SLACK)

    def fade(self) -> None:
        """Time passed."""
        self.answered *= FADE
        self.faults *= FADE
        self.begun *= FADE
        self.late *= FADE

    @property
    def requests(self) -> float:
        """Of which is known how they went."""
        return self.answered + self.faults

    @property
    def lateness(self) -> float | None:
        """Mean multiple; ``None``: too few."""
        return self.late / self.begun if self.begun >= EVIDENCE else None


def outliers(pool: Mapping[int, Record], out: int) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Those of ``pool`` (target id -> its record) to put out, the worst first, and those that are spared because half of the
    pool would be out; each with its reason: ``errors`` or ``latency``. ``out`` of them are out already."""
    whole = Record(sum(each.answered for each in pool.values()), sum(each.faults for each in pool.values()))
    known = sorted(late for each in pool.values() if (late := each.lateness) is not None)
    found = [
        (score, target, reason) for target, mine in pool.items() for score, reason in _offences(mine, whole, known)
    ]
    found.sort(reverse=True)
    room = max(0, len(pool) // 2 - out)
    named: dict[int, str] = {}
    for _, target, reason in found:
        named.setdefault(target, reason)
    rows = list(named.items())
    return rows[:room], rows[room:]


def _offences(mine: Record, whole: Record, known: Sequence[float]) -> list[tuple[float, str]]:
    """How much worse than the others it is, by each measure by which it is an outlier. ``whole``: the sums of all of the pool;
    ``known``: everybody's lateness, sorted; its own is in both."""
    found = []
    peers = whole.requests - mine.requests
    if mine.requests >= EVIDENCE and peers >= EVIDENCE:
        share = mine.faults / mine.requests
        theirs = max(0.0, whole.faults - mine.faults) / peers
        if share >= ERRORS and share >= TIMES_ERRORS * theirs:
            found.append((share / max(theirs, 0.01), "errors"))
    late = mine.lateness
    if late is not None and late >= LATE and len(known) > 1:
        usual = _median_without(known, bisect_left(known, late))
        if late >= TIMES_LATE * usual:
            found.append((late / max(usual, 0.01), "latency"))
    return found


def _median_without(known: Sequence[float], place: int) -> float:
    """The median of sorted values but for the one at ``place``."""
    left = len(known) - 1

    def at(index: int) -> float:
        return known[index if index < place else index + 1]

    return (at((left - 1) // 2) + at(left // 2)) / 2
