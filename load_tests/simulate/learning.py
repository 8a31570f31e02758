"""What the gateway would learn of its engines' speed: a regression like its own, written anew.

First-byte times of requests that met an idle target, on (1, u, u*(c + u/2)) for u computed tokens behind c; a thousand
samples count, and the priors as four.
"""

from dataclasses import dataclass, field

from policies.base import Rates

FADE = 0.999
PRIOR = 4.0
SOLVE_EVERY = 8


@dataclass(slots=True, eq=False)
class Learning:
    """``rates`` are changed in place, for policies hold them."""

    rates: Rates = field(default_factory=Rates)
    samples: int = 0
    _square: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _moment: list[float] = field(default_factory=lambda: [0.0] * 3)
    _prior: Rates = field(default_factory=Rates)

    def first_byte(self, uncached: float, context: float, seconds: float) -> None:
        """``uncached`` tokens behind ``context``, with nothing in front, took ``seconds``."""
        if not 0 < seconds <= 600:
            return
        row = (1.0, uncached / 1e3, uncached * (context + 0.5 * uncached) / 1e6)
        for at, left in enumerate(row):
            self._moment[at] = FADE * self._moment[at] + left * seconds
            for other, right in enumerate(row):
                self._square[at][other] = FADE * self._square[at][other] + left * right
        self.samples += 1
        if self.samples % SOLVE_EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        prior = (self._prior.base, self._prior.token * 1e3, self._prior.attention * 1e6)
        square = [
            [value + PRIOR * (at == other) for other, value in enumerate(row)] for at, row in enumerate(self._square)
        ]
        found = solved(square, [value + PRIOR * prior[at] for at, value in enumerate(self._moment)])
        if found is None:
            return
        self.rates.base = min(max(found[0], 1e-4), 10.0)
        self.rates.token = min(max(found[1] / 1e3, 1e-7), 0.1)
        self.rates.attention = min(max(found[2] / 1e6, 0.0), 1e-6)


def solved(square: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of ``square x = right`` by elimination; ``None`` where there is none. Takes its arguments apart."""
    size = len(right)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(square[row][at]))
        if abs(square[pivot][at]) < 1e-12:
            return None
        square[at], square[pivot] = square[pivot], square[at]
        right[at], right[pivot] = right[pivot], right[at]
        for row in range(at + 1, size):
            factor = square[row][at] / square[at][at]
            right[row] -= factor * right[at]
            for column in range(at, size):
                square[row][column] -= factor * square[at][column]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = sum(square[at][other] * found[other] for other in range(at + 1, size))
        found[at] = (right[at] - rest) / square[at][at]
    return found
