"""Learning what an engine costs, online.

First-byte times of requests that met an idle target are regressed on (1, u, u*(c + u/2)), u uncached tokens behind c:
the coefficients are `Rates.base`, `Rates.token` and `Rates.attention`. Old samples fade; the priors count as a few
samples, so that the coefficients stay sane while there is no variety.
"""

from dataclasses import dataclass, field, replace

from policies.base import Rates

FADE = 0.999
"""Weight that a sample loses with each later one: about a thousand count."""
PRIOR = 4.0
"""Samples that a prior counts as, at 1,000 tokens."""
SOLVE_EVERY = 8
LEARNING = 0.1
"""Weight of one sample of restoring, once there are several."""
LONGEST = 1e8
"""Tokens beyond which an observation is none."""
RECENT = 0.95
"""Weight that a sample of one target's pace loses with each later one: about twenty count."""
ENOUGH = 16
"""Samples of a target's pace before it is believed."""
APART = 1.6
"""Times that a target must be slower than its kind to be priced by itself."""
AGAIN = 1.3
"""Times within which it is priced as its kind again."""
SLOWEST = 4.0
"""Times as long as expected that one sample counts at most."""
VOID = 120.0
"""Seconds without a sample after which a target is priced as its kind, until the next one."""
DOUBT = 0.25
"""Weight that is left of the samples before."""


@dataclass(slots=True, eq=False)
class Calibration:
    """Rates of one model on one kind of engine, and the sums behind them."""

    rates: Rates = field(default_factory=Rates)
    samples: int = 0
    restores: int = 0
    """Samples of bringing KV back to the device."""
    moves: int = 0
    """Samples of bringing KV from another engine."""
    _moved: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Of those, weighted: count, tokens, tokens squared, seconds, tokens times seconds; tokens in thousands."""
    _gram: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Upper triangle of the weighted x'x: 11 12 13 22 23 33."""
    _moment: list[float] = field(default_factory=lambda: [0.0] * 3)
    _prior: Rates = field(default_factory=Rates)

    def first_byte(self, uncached: float, context: float, seconds: float) -> None:
        """One observation: ``uncached`` tokens behind ``context``, with nothing in front, took ``seconds``."""
        if not (0 < seconds <= 600 and 0 <= uncached <= LONGEST and 0 <= context <= LONGEST):
            return  # nor if one of them is no number
        x, y = uncached / 1000.0, uncached * (context + 0.5 * uncached) / 1e6
        gram, moment = self._gram, self._moment
        for at, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
            gram[at] = FADE * gram[at] + value
        for at, value in enumerate((1.0, x, y)):
            moment[at] = FADE * moment[at] + value * seconds
        self.samples += 1
        if self.samples % SOLVE_EVERY == 0:
            self._solve()

    def restored(self, tokens: tuple[int, int, int], seconds: float) -> None:
        """``tokens`` came from host, disk and shared store, and the first byte took ``seconds`` longer than their absence
        would have made it. Only what came from one of them tells its price."""
        told = [at for at, count in enumerate(tokens) if count]
        if len(told) != 1 or not 0 <= seconds <= 600:
            return
        self.restores += 1
        at = told[0]
        price = min(seconds / tokens[at], 0.01)
        weight = max(LEARNING, 1.0 / (self.restores + 1))
        prices = list(self.rates.restore)
        prices[at] += weight * (price - prices[at])
        self.rates.restore = (prices[0], prices[1], prices[2])

    def moved(self, tokens: float, seconds: float) -> None:
        """KV of ``tokens`` tokens came from another engine to an idle one ``seconds`` after it was asked for."""
        if not (0 < seconds <= 600 and 0 < tokens <= LONGEST):
            return
        self.moves += 1
        x = tokens / 1000.0
        sums = self._moved
        for at, value in enumerate((1.0, x, x * x, seconds, x * seconds)):
            sums[at] = FADE * sums[at] + value
        prior = self._prior
        # The prior counts as samples at 0 and at 1,000 tokens, so that the line is never undetermined.
        near, far = prior.handshake, prior.handshake + prior.transfer * 1e3
        n, sx, sxx = sums[0] + 2 * PRIOR, sums[1] + PRIOR, sums[2] + PRIOR
        sy, sxy = sums[3] + PRIOR * (near + far), sums[4] + PRIOR * far
        slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
        slope = min(max(slope, 0.0), 1.0)
        self.rates.transfer = slope / 1e3
        self.rates.handshake = min(max((sy - slope * sx) / n, 0.0), 10.0)

    def _solve(self) -> None:
        g11, g12, g13, g22, g23, g33 = self._gram
        prior = self._prior
        wanted = [prior.base, prior.token * 1e3, prior.attention * 1e6]
        g11, g22, g33 = g11 + PRIOR, g22 + PRIOR, g33 + PRIOR
        m = [self._moment[at] + PRIOR * wanted[at] for at in range(3)]
        solved = _cramer((g11, g12, g13, g22, g23, g33), m)
        if solved is None:
            return
        base, token, attention = solved
        self.rates.base = min(max(base, 1e-4), 10.0)
        self.rates.token = min(max(token / 1e3, 1e-7), 0.1)
        self.rates.attention = min(max(attention / 1e6, 0.0), 1e-6)


@dataclass(slots=True, eq=False)
class Pace:
    """How much slower one target is than others of its kind: another clock, a neighbour, a worse link.

    Only slower ones are priced by themselves: who seems faster is one of a kind that others keep busy unseen. It is learned
    from the target's own requests, of which a slow one gets few or none: after a while without any it is tried again.
    """

    own: Rates | None = None
    """Its own rates, while it differs."""
    samples: int = 0
    learned: float = 0.0
    """When the last sample came."""
    _expected: float = 0.0
    _taken: float = 0.0

    @property
    def factor(self) -> float:
        """Times as long as its kind that it takes; 1 while that is not known."""
        if self.samples < ENOUGH or not self._expected:
            return 1.0
        return max(1.0, self._taken / self._expected)

    def first_byte(self, kind: Rates, uncached: float, context: float, seconds: float, now: float) -> Rates:
        """One observation as those of `Calibration.first_byte`; returns the rates to price it by: ``kind``, or its own."""
        if not (0 < seconds <= 600 and 0 <= uncached <= LONGEST and 0 <= context <= LONGEST):
            return self.own or kind
        self.samples += 1
        self.learned = now
        expected = kind.prefill(uncached, context)
        self._expected = RECENT * self._expected + expected
        # One odd answer is no pace.
        self._taken = RECENT * self._taken + min(seconds, SLOWEST * expected)
        factor = self.factor
        if factor < (AGAIN if self.own is not None else APART):
            self.own = None
            return kind
        if self.own is None:
            self.own = replace(kind)
        self.own.base, self.own.token = kind.base * factor, kind.token * factor
        self.own.attention, self.own.decode = kind.attention * factor, kind.decode * factor
        self.own.restore = kind.restore
        self.own.handshake, self.own.transfer = kind.handshake, kind.transfer
        return self.own

    def doubted(self, now: float) -> bool:
        """Whether what was learned is too old to keep requests away. It counts for less then: a few samples decide anew."""
        if self.own is None or now - self.learned <= VOID:
            return False
        self.own = None
        self._expected *= DOUBT
        self._taken *= DOUBT
        return True


def _cramer(gram: tuple[float, ...], m: list[float]) -> tuple[float, float, float] | None:
    a, b, c, d, e, f = gram
    minor_a, minor_b, minor_c = d * f - e * e, b * f - c * e, b * e - c * d
    determinant = a * minor_a - b * minor_b + c * minor_c
    if abs(determinant) < 1e-12:
        return None
    x = m[0] * minor_a - b * (m[1] * f - e * m[2]) + c * (m[1] * e - d * m[2])
    y = a * (m[1] * f - m[2] * e) - m[0] * minor_b + c * (b * m[2] - m[1] * c)
    z = a * (d * m[2] - e * m[1]) - b * (b * m[2] - m[1] * c) + m[0] * minor_c
    return x / determinant, y / determinant, z / determinant
