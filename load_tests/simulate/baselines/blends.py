"""llm-d's default scorers, blended by their weights."""

from load_tests.simulate.places import known
from policies.base import ByLoad, Choice, Fleet, Request, cheapest

PREFIX = 3.0
QUEUE = 2.0
USED = 2.0


class LlmdBlend(ByLoad):
    """Highest sum of three scores between 0 and 1: the share of the prompt that is held, how short the queue is between the
    shortest and the longest, how much of the KV cache is free; weights 3, 2, 2 as its default profile has them.

    Queue and used KV are what engines report, one report old.
    """

    name = "llmd_blend"
    needs_prefix = True

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads holdings, queues, used KV."""
        tokens = max(1, request.tokens or 0)
        places = [known(target) for target in fleet.targets]
        queues = [float(place.reported.waiting) for place in places]
        used = [place.reported.used for place in places]
        low, high = min(queues), max(queues)
        scores = [
            PREFIX * min(request.holdings.get(target.id, 0), tokens) / tokens
            + QUEUE * ((high - queue) / (high - low) if high > low else 1.0)
            + USED * (1.0 - filled)
            for target, queue, filled in zip(fleet.targets, queues, used, strict=True)
        ]
        return Choice(fleet.targets[cheapest([-score for score in scores], fleet.targets, request.draw)], "score")
