"""Each target in turn."""

from policies.base import ByLoad, Choice, Fleet, Request


class RoundRobin(ByLoad):
    """The n-th request goes to the n-th target, modulo how many there are."""

    name = "round_robin"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Pure: the turn is the request's ordinal."""
        return Choice(fleet.targets[request.ordinal % len(fleet.targets)], "turn")
