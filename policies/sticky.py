"""Sticky until saturated: stay with the prefix, until waiting for it costs too much.

The rule of llm-d's prefix affinity filter as it is documented: targets that hold at least a share of the prompt are
preferred, and among them the one that would answer soonest; if even that one is slower than the best of all by more than a
penalty, affinity is given up for this request.
"""

from policies.base import Candidate, Choice, Fleet, Request, Target, cheapest, number
from policies.cost import terms


class Sticky:
    """``threshold``: share of the prompt that a target must hold; ``penalty``: seconds by which it may be slower."""

    name = "sticky"
    needs_prefix = True
    needs_session = False

    def __init__(self, *, threshold: float = 0.8, penalty: float = 18.0) -> None:
        self.threshold = number(self.name, "threshold", threshold, 0.0, 1.0)
        self.penalty = number(self.name, "penalty", penalty, 0.0, 3600.0)

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Ties go by rendezvous on the request's draw."""
        costs = {target.id: terms(request, target, None, now).total for target in fleet.targets}
        best = _soonest(request, fleet.targets, costs)
        enough = max(1.0, self.threshold * (request.tokens or 0))
        holders = [target for target in fleet.targets if request.holdings.get(target.id, 0) >= enough]
        if holders:
            held = _soonest(request, tuple(holders), costs)
            if costs[held.id] - costs[best.id] <= self.penalty:
                return Choice(held, "prefix")
            return Choice(best, "saturated")
        return Choice(best, "load")

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """The chosen one, then by cost."""
        chosen = self.choose(request, fleet, now).target
        rows = [
            Candidate(target, terms(request, target, None, now), request.holdings.get(target.id, 0))
            for target in fleet.targets
        ]
        return sorted(rows, key=lambda row: (row.target is not chosen, row.terms.total if row.terms else 0.0))


def _soonest(request: Request, targets: tuple[Target, ...], costs: dict[int, float]) -> Target:
    return targets[cheapest([costs[target.id] for target in targets], targets, request.draw)]
