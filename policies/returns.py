"""When sessions come back, and whether their KV is still there then; learned online.

Between two turns of an agent a tool runs, and its engine serves others. An engine evicts what was unused for longest, so KV
that rests for g seconds survives if what the others bring in within g fits beside it:

    inflow * g < room,

inflow being the tokens a second that are computed or generated anew there, and room the tokens that its cache holds. Sessions
that all return after g seconds thus need ``inflow * g`` tokens between their turns, whatever the policy.

Gaps are kept as logarithmic histograms that fade: a median of what was seen, not a mean that one lunch break moves.
"""

from bisect import bisect_right
from collections import OrderedDict
from math import exp, inf

FIRST_GAP = 5.0
"""Seconds until a session's next turn, as long as that is not known."""
ENOUGH = 8
"""Gaps after which what was seen is believed."""
FADE = 0.99
"""Weight that a gap loses with each later one: about a hundred count."""
BOUNDS = tuple(0.05 * 2 ** (at / 2) for at in range(34))
"""Seconds; the last is more than an hour."""
WINDOW = 20.0
"""Seconds over which inflow is averaged."""
SOONEST = 1.0
"""Seconds after which the average of what was seen is taken as it is."""
MOST_KINDS = 1024
"""Kinds of gaps that a book holds."""


class Gaps:
    """Seconds between the end of an answer and the next turn, of one kind of turn."""

    __slots__ = ("_counts", "_weight", "seen")

    def __init__(self) -> None:
        self._counts = [0.0] * (len(BOUNDS) + 1)
        self._weight = 1.0
        self.seen = 0

    def add(self, seconds: float) -> None:
        """One more was seen."""
        self.seen += 1
        # Later ones weigh more, instead of all others less; scaled back before floats overflow.
        self._weight /= FADE
        if self._weight > 1e12:
            self._counts = [count / self._weight for count in self._counts]
            self._weight = 1.0
        self._counts[bisect_right(BOUNDS, seconds)] += self._weight

    @property
    def known(self) -> bool:
        """Whether enough were seen."""
        return self.seen >= ENOUGH

    def quantile(self, share: float) -> float:
        """Seconds within which that share of them end; `FIRST_GAP` until enough were seen."""
        if not self.known:
            return FIRST_GAP
        left = share * sum(self._counts)
        for at, count in enumerate(self._counts):
            if count and left <= count:
                low = BOUNDS[at - 1] if at else 0.0
                high = BOUNDS[at] if at < len(BOUNDS) else 2 * low
                return low + (high - low) * left / count
            left -= count
        return 2 * BOUNDS[-1]

    def within(self, seconds: float) -> float:
        """The share of them that end within ``seconds``."""
        if not self.known:
            return 1.0 if seconds >= FIRST_GAP else 0.0
        if seconds >= 2 * BOUNDS[-1]:
            return 1.0
        at = bisect_right(BOUNDS, seconds)
        low = BOUNDS[at - 1] if at else 0.0
        high = BOUNDS[at] if at < len(BOUNDS) else 2 * low
        inside = self._counts[at] * (seconds - low) / (high - low)
        return (sum(self._counts[:at]) + inside) / sum(self._counts)


class GapBook:
    """`Gaps` by tenant and tool; those of the tenant as a whole where the tool is not known well. Bounded."""

    def __init__(self, most: int = MOST_KINDS) -> None:
        self._most = most
        self._kinds: OrderedDict[tuple[str, str | None], Gaps] = OrderedDict()
        self.all = Gaps()
        """Of everybody."""

    def __len__(self) -> int:
        return len(self._kinds)

    def add(self, tenant: str, tool: str, seconds: float) -> None:
        """A session of ``tenant`` came back after that, with a result of ``tool`` (empty: with words of a user)."""
        self.all.add(seconds)
        self._kind(tenant, None).add(seconds)
        self._kind(tenant, tool).add(seconds)

    def expected(self, tenant: str, tool: str) -> Gaps:
        """The gaps by which to expect such a session back."""
        for kind in ((tenant, tool), (tenant, None)):
            found = self._kinds.get(kind)
            if found is not None and found.known:
                return found
        return self.all

    def _kind(self, tenant: str, tool: str | None) -> Gaps:
        kind = (tenant, tool)
        found = self._kinds.get(kind)
        if found is None:
            if len(self._kinds) >= self._most:
                self._kinds.popitem(last=False)
            found = self._kinds[kind] = Gaps()
        else:
            self._kinds.move_to_end(kind)
        return found


class Inflow:
    """Tokens a second that are new to one cache."""

    __slots__ = ("_at", "_began", "_sum")

    def __init__(self) -> None:
        self._sum = 0.0
        self._at = 0.0
        self._began: float | None = None

    def add(self, tokens: float, now: float) -> None:
        """So many more were computed or generated there."""
        if self._began is None:
            self._began = self._at = now
        elif now > self._at:
            self._sum *= exp((self._at - now) / WINDOW)
            self._at = now
        self._sum += tokens

    def rate(self, now: float) -> float:
        """Tokens a second; 0 before there were any."""
        if self._began is None:
            return 0.0
        passed = max(SOONEST, now - self._began)
        seen = 1.0 - exp(-passed / WINDOW)
        faded = exp((self._at - now) / WINDOW) if now > self._at else 1.0
        return self._sum * faded / (WINDOW * seen)


def horizon(room: float, inflow: float) -> float:
    """Seconds that KV survives unused in a cache of ``room`` tokens; infinite where nothing comes in."""
    return room / inflow if inflow > 0.0 else inf
