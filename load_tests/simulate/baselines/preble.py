"""Preble's E2: exploit a prefix, or explore (Srivatsa et al., "Preble: efficient distributed prompt scheduling", 2024).

If more of the prompt is cached somewhere than is left to compute, the request goes to the longest match (of several, the least
loaded); but the most loaded target gives up requests to the least loaded one while it has over `IMBALANCE` times its work.
Otherwise the least cost of three: the work of the last `WINDOW` seconds, what must be evicted times how often it is asked for,
and the prompt's own prefill.
"""

from collections import deque

from load_tests.simulate.places import Asking, known
from policies.base import ByLoad, Choice, Fleet, Request, Target, cheapest

WINDOW = 180.0
IMBALANCE = 2.0
OUTPUT = 0.01
"""Seconds that a generated token is counted with, about: a step."""


class Preble(ByLoad):
    """See the module's head."""

    name = "preble_e2"
    needs_prefix = True

    def __init__(self) -> None:
        self._work: dict[int, deque[tuple[float, float]]] = {}
        self._sums: dict[int, float] = {}
        self._mean_output = 128.0
        self._now = 0.0

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads holdings, room, and what it sent in the last `WINDOW` seconds."""
        self._now = now
        loads = [self._load(target.id, now) for target in fleet.targets]
        tokens = request.tokens or 0
        held = [min(request.holdings.get(target.id, 0), tokens) for target in fleet.targets]
        best = max(held)
        if best > tokens - best:
            longest = [at for at, each in enumerate(held) if each == best]
            at = min(longest, key=loads.__getitem__)
            lightest = min(range(len(loads)), key=loads.__getitem__)
            if loads[at] == max(loads) and loads[at] > IMBALANCE * max(loads[lightest], 1.0):
                return Choice(fleet.targets[lightest], "rebalance")
            return Choice(fleet.targets[at], "exploit")
        costs = [
            load + target.rates.prefill(tokens - has, has) + _eviction(target, tokens - has)
            for load, target, has in zip(loads, fleet.targets, held, strict=True)
        ]
        return Choice(fleet.targets[cheapest(costs, fleet.targets, request.draw)], "explore")

    def committed(self, request: Request, choice: Choice) -> None:
        """Its work counts for a while."""
        assert isinstance(request, Asking) and request.turn is not None, "a policy of the simulation"
        target, tokens = choice.target, request.tokens or 0
        held = min(request.holdings.get(target.id, 0), tokens)
        self._mean_output += 0.01 * (request.turn.output - self._mean_output)
        work = target.rates.prefill(tokens - held, held) + OUTPUT * self._mean_output
        self._work.setdefault(target.id, deque()).append((self._now, work))
        self._sums[target.id] = self._sums.get(target.id, 0.0) + work

    def _load(self, target: int, now: float) -> float:
        work = self._work.get(target)
        while work and work[0][0] < now - WINDOW:
            self._sums[target] -= work.popleft()[1]
        return self._sums.get(target, 0.0)


def _eviction(target: Target, new: int) -> float:
    """What computing again costs that must go for it: a cached token is asked for as often as the mean one."""
    place = known(target)
    return place.reused * place.rates.token * new if place.filled > 0.95 else 0.0
