"""Fewest requests in flight."""

from policies.base import ByLoad, Choice, Fleet, Request, rendezvous


class LeastLoad(ByLoad):
    """The target with the fewest requests in flight; ties go by rendezvous on the request's draw, so they rotate."""

    name = "least_load"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Reads load only."""
        least = min(target.load for target in fleet.targets)
        tied = [target for target in fleet.targets if target.load == least]
        return Choice(tied[0] if len(tied) == 1 else rendezvous(request.draw, tied), "least")
