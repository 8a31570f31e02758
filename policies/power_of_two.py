"""The less loaded of two drawn at random."""

from policies.base import ByLoad, Choice, Fleet, Request


class PowerOfTwo(ByLoad):
    """Mitzenmacher, "The power of two choices in randomized load balancing", 2001."""

    name = "power_of_two"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Two different targets from the request's draw; a tie goes to the first."""
        targets = fleet.targets
        count = len(targets)
        if count == 1:
            return Choice(targets[0], "only")
        first = (request.draw & 0xFFFFFFFF) % count
        second = (request.draw >> 32) % (count - 1)
        second += second >= first
        one, other = targets[first], targets[second]
        return Choice(other if other.load < one.load else one, "less_of_two")
