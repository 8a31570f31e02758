"""LMetric: the product of new work and batch size.

A score without weights, as published ("Simple is better: multiplication may be all you need for LLM request scheduling",
2026): prompt tokens that wait to be computed on a target, this request's uncached ones among them, times the requests that
run there. The least wins.
"""

from policies.base import Candidate, Choice, Fleet, Request, Target, cheapest


class LMetric:
    """Least product of uncached prompt tokens and running requests; reads no session."""

    name = "lmetric"
    needs_prefix = True
    needs_session = False

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Ties go by rendezvous on the request's draw."""
        scores = [_score(request, target, now) for target in fleet.targets]
        chosen = fleet.targets[cheapest(scores, fleet.targets, request.draw)]
        return Choice(chosen, "prefix" if request.holdings.get(chosen.id) else "load")

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """The chosen one, then by score; a product of tokens and requests is no cost in seconds."""
        chosen = self.choose(request, fleet, now).target
        ranked = sorted(fleet.targets, key=lambda target: (target is not chosen, _score(request, target, now)))
        return [Candidate(target, None, request.holdings.get(target.id, 0)) for target in ranked]


def _score(request: Request, target: Target, now: float) -> float:
    tokens = request.tokens or 0
    uncached = tokens - min(request.holdings.get(target.id, 0), tokens)
    # What waits is known in seconds; an engine's own price of a token turns it back.
    waiting = target.waits(now) / target.rates.token
    return (waiting + max(1, uncached)) * (target.load + 1.0)
