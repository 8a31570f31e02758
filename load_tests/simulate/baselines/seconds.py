"""Rules that add up work: Dynamo's cost function, Mooncake's Algorithm 1, and the oracle that bounds all of them."""

from load_tests.simulate.places import known
from policies.base import ByLoad, Choice, Fleet, Request, Target, cheapest


def _least(request: Request, fleet: Fleet, costs: list[float]) -> Target:
    return fleet.targets[cheapest(costs, fleet.targets, request.draw)]


class DynamoCost(ByLoad):
    """Least ``weight * prefill blocks + decode blocks``, weight 1, temperature 0: the blocks that a worker would have to
    compute, those of prompts that wait there among them, and the blocks that its requests in flight occupy."""

    name = "dynamo_cost"
    needs_prefix = True

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads holdings, and prompts in flight."""
        tokens = request.tokens or 0
        costs = []
        for target in fleet.targets:
            place = known(target)
            new = tokens - min(request.holdings.get(target.id, 0), tokens)
            costs.append(float(place.pending + new + place.active + tokens))
        return Choice(_least(request, fleet, costs), "cost")


class MooncakeLeast(ByLoad):
    """Least expected time to the first token: queue and prefill behind the local prefix (Qin et al., "Mooncake", FAST 2025,
    Algorithm 1, without the branch that fetches KV from another instance, which is no choice of a router's)."""

    name = "mooncake"
    needs_prefix = True

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads holdings and the prefill work in front."""
        tokens = request.tokens or 0
        costs = []
        for target in fleet.targets:
            held = min(request.holdings.get(target.id, 0), tokens)
            costs.append(target.waits(now) + target.rates.prefill(tokens - held, held))
        return Choice(_least(request, fleet, costs), "soonest")


class LeastWait(ByLoad):
    """Least prefill work in front; reads no cache."""

    name = "least_wait"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Ties go by rendezvous on the request's draw."""
        return Choice(_least(request, fleet, [target.waits(now) for target in fleet.targets]), "soonest")


class Oracle(ByLoad):
    """Least wait, on engines that all share one cache without bounds and copy from it for nothing: no router can be better
    placed. The simulation gives it such engines."""

    name = "oracle"
    shares_everything = True

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads prompts in flight, and requests."""
        costs = [target.waits(now) + 1e-3 * target.running for target in fleet.targets]
        return Choice(_least(request, fleet, costs), "soonest")
