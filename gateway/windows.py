"""What happened in the last minute: differences of what is counted, never averages over a lifetime.

Somebody looks at the counters now and then (`Windows.look`); a *mark* keeps what they said. A rate is the difference between
now and the oldest mark that is needed for a minute. Where nobody looked for a while that is longer ago: then the window is
longer, and says so, and where nobody looked for `STALE` seconds it begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.exposition import Labels
from gateway.metrics import Metrics
from gateway.series import Counter, Histogram

WINDOW = 60.0
"""Seconds that a rate is told of."""
STEP = 2.0
"""Seconds between two marks."""
STALE = 600.0
"""Seconds after which a mark is of another time."""
FINE = frozenset(("ok", "client_error", "client_gone", "refused"))
"""Outcomes that are nobody's failure but the client's."""
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Mark:
    """What the counters said at one time, seconds on the gateway's clock."""

    at: float
    tokens: Mapping[str, float]
    ttft: Mapping[str, Sequence[float]]
    """Hit bucket -> counts of each bucket of time, the last for all above, then the sum."""
    tenants: Mapping[str, Sequence[float]]
    """Tenant -> requests that ended, that failed, that were refused."""
    reasons: Mapping[str, float]
    """Reason of a choice -> how often it was one."""


class Total:
    """The sum of a counter, which does not fall when series of targets that left go."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen: dict[Labels, float] = {}
        self._sum = 0.0

    def read(self) -> float:
        """As it is now."""
        before, get = self._seen, self._seen.get
        self._seen = {labels: cell[0] for labels, cell in self._counter.values.items()}
        if self._seen != before:
            self._sum += sum([max(0.0, value - get(labels, 0.0)) for labels, value in self._seen.items()])
        return self._sum


class Windows:
    """Rates of one gateway; see the module's head."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._totals = {
            "prompt": Total(metrics.reported_prompt_tokens),
            "cached": Total(metrics.cached_tokens),
            "expected_prompt": Total(metrics.predicted_prompt_tokens),
            "expected": Total(metrics.predicted_tokens),
            "best": Total(metrics.best_tokens),
            "ceiling": Total(metrics.ceiling_tokens),
            "completion": Total(metrics.completion_tokens),
        }
        self._marks: deque[Mark] = deque()
        self._now: Mark | None = None

    def look(self, now: float) -> None:
        """Read the counters."""
        self._now = mark = Mark(
            now,
            {name: total.read() for name, total in self._totals.items()},
            _by_hit(self._metrics.ttft),
            _by_tenant(self._metrics),
            _by_reason(self._metrics.decisions),
        )
        marks = self._marks
        if marks and now - marks[-1].at > STALE:
            marks.clear()
        if not marks or now - marks[-1].at >= STEP:
            marks.append(mark)
        # One of a minute ago or more is the base.
        while len(marks) > 2 and now - marks[1].at >= WINDOW:
            marks.popleft()

    def _ends(self) -> tuple[Mark, Mark]:
        assert self._now is not None, "nobody looked yet"
        return self._marks[0], self._now

    @property
    def seconds(self) -> float:
        """Of the window."""
        before, now = self._ends()
        return now.at - before.at

    def hits(self) -> dict[str, Any]:
        """Shares of the prompts' tokens: found in caches, by report and as predicted; what the target had that held most, and
        what a cache without bounds would have had. ``None``: nothing is known of that."""
        before, now = self._ends()
        moved = {name: value - before.tokens[name] for name, value in now.tokens.items()}
        prompt, expected = moved["prompt"], moved["expected_prompt"]
        return {
            "prompt_tokens": round(prompt),
            "cached_tokens": round(moved["cached"]),
            "completion_tokens": round(moved["completion"]),
            "rate": _share(moved["cached"], prompt),
            "predicted": _share(moved["expected"], expected),
            "best": _share(moved["best"], expected),
            "ceiling": _share(moved["ceiling"], expected),
        }

    def ttft(self) -> dict[str, Any]:
        """How many first tokens came, and quantiles of their times in milliseconds: of all, and by the part of the prompt that
        was found in a cache. ``None``, or absent: none came."""
        before, now = self._ends()
        bounds = self._metrics.ttft.bounds
        every = [0.0] * (len(bounds) + 1)
        by_hit = {}
        for hit, row in now.ttft.items():
            base = before.ttft.get(hit)
            # Series of tenants that left are gone, and what they counted with them.
            counts = [max(0.0, row[at] - (base[at] if base is not None else 0.0)) for at in range(len(bounds) + 1)]
            every = [one + other for one, other in zip(every, counts, strict=True)]
            if sum(counts) > 0:
                by_hit[hit] = _quantiles(bounds, counts)
        return {"all": _quantiles(bounds, every) if sum(every) > 0 else None, "by_hit": by_hit}

    def reasons(self) -> dict[str, int]:
        """Reason of a choice -> how often it was one, the most frequent first."""
        before, now = self._ends()
        counts = {reason: round(count - before.reasons.get(reason, 0.0)) for reason, count in now.reasons.items()}
        return {reason: count for reason, count in sorted(counts.items(), key=lambda item: -item[1]) if count > 0}

    def tenants(self) -> dict[str, dict[str, int]]:
        """Tenant -> its requests that ended, that failed and that were refused."""
        before, now = self._ends()
        found = {}
        for name, counts in now.tenants.items():
            base = before.tenants.get(name, (0.0, 0.0, 0.0))
            requests, failed, refused = (max(0, round(one - other)) for one, other in zip(counts, base, strict=True))
            found[name] = {"requests": requests, "failed": failed, "refused": refused}
        return found


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float:
    """The value below which ``share`` of what a histogram counted is, taken as even within a bucket. What is above its last
    bound counts as that. ``counts``: of each bucket, not cumulative; not all nothing."""
    wanted, below = share * sum(counts), 0.0
    lower = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (bound - lower) * (wanted - below) / count
        below += count
        lower = bound
    return bounds[-1]


def _quantiles(bounds: Sequence[float], counts: Sequence[float]) -> dict[str, Any]:
    told = {f"p{round(share * 100)}": _ms(quantile(bounds, counts, share)) for share in QUANTILES}
    return {"requests": round(sum(counts)), **told}


def _by_reason(decisions: Counter) -> dict[str, float]:
    found: dict[str, float] = {}
    for labels, cell in decisions.values.items():
        found[labels[-1]] = found.get(labels[-1], 0.0) + cell[0]
    return found


def _by_hit(histogram: Histogram) -> dict[str, list[float]]:
    """Its rows, summed for each part of the prompt that was found."""
    place = histogram.labels.index("hit")
    found: dict[str, list[float]] = {}
    for labels, row in histogram.values.items():
        hit = labels[place]
        sums = found.get(hit)
        found[hit] = list(row) if sums is None else [one + other for one, other in zip(sums, row, strict=True)]
    return found


def _by_tenant(metrics: Metrics) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for labels, cell in metrics.requests.values.items():
        row = found.setdefault(labels[0], [0.0, 0.0, 0.0])
        row[0] += cell[0]
        if labels[-1] not in FINE:
            row[1] += cell[0]
    for counter in (metrics.queue_shed, metrics.limited):
        for labels, cell in counter.values.items():
            found.setdefault(labels[0], [0.0, 0.0, 0.0])[2] += cell[0]
    return found


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole > 0 else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
