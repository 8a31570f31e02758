"""Which targets do far worse than their peers: by the share of their requests that fail, or by how long they take to begin.

A target is compared with the others of its pool over the last seconds. How long an answer took to begin is told as a multiple
of what was expected of that prompt on that target, so that long prompts, queues and slower hardware are no offence; one that
hangs, throttles or swaps is. Little evidence judges nobody, and of one pool never more than half is put out.

The rule of error shares is that of Envoy's outlier detection in spirit (a host's failure percentage against the others'), with
smaller numbers: a fleet of engines answers tens of requests in ten seconds, not thousands.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

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
    found = [(score, target, reason) for target in pool for score, reason in _offences(target, pool)]
    found.sort(reverse=True)
    room = max(0, len(pool) // 2 - out)
    named: dict[int, str] = {}
    for _, target, reason in found:
        named.setdefault(target, reason)
    rows = list(named.items())
    return rows[:room], rows[room:]


def _offences(target: int, pool: Mapping[int, Record]) -> list[tuple[float, str]]:
    """How much worse than the others it is, by each measure by which it is an outlier."""
    mine = pool[target]
    others = [record for id_, record in pool.items() if id_ != target]
    found = []
    peers = sum(record.requests for record in others)
    if mine.requests >= EVIDENCE and peers >= EVIDENCE:
        share = mine.faults / mine.requests
        theirs = sum(record.faults for record in others) / peers
        if share >= ERRORS and share >= TIMES_ERRORS * theirs:
            found.append((share / max(theirs, 0.01), "errors"))
    late = mine.lateness
    known = [told for record in others if (told := record.lateness) is not None]
    if late is not None and known:
        usual = median(known)
        if late >= LATE and late >= TIMES_LATE * usual:
            found.append((late / max(usual, 0.01), "latency"))
    return found
