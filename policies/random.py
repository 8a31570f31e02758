"""Any target, evenly."""

from policies.base import ByLoad, Choice, Fleet, Request


class Random(ByLoad):
    """Uniform by the request's own random bits."""

    name = "random"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Pure: the draw comes with the request."""
        return Choice(fleet.targets[request.draw % len(fleet.targets)], "draw")
