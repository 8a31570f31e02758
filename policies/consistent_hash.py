"""Sessions by hash, with bounded load."""

from policies.base import ByLoad, Choice, Fleet, Request, Target, affinities, number


def bounded(key: int, fleet: Fleet, factor: float) -> tuple[Target, bool]:
    """The target of highest rendezvous score whose load would stay within ``factor`` of the mean.

    Returns it and whether it is the first choice. Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded
    loads", 2018.
    """
    targets = fleet.targets
    bound = factor * (sum(target.load for target in targets) + 1) / len(targets)
    scores = affinities(key, targets)
    ranked = [targets[at] for at in sorted(range(len(targets)), key=scores.__getitem__, reverse=True)]
    for target in ranked:
        if target.load + 1 <= max(bound, 1):
            return target, target is ranked[0]
    return min(ranked, key=lambda target: target.load), False


class ConsistentHash(ByLoad):
    """Rendezvous hashing of the session (of the request's own draw where there is none), load bounded by a factor."""

    name = "consistent_hash"
    needs_session = True

    def __init__(self, *, bound: float = 1.25) -> None:
        self.bound = number(self.name, "bound", bound, 1.0, 100.0)

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Never moves a home: the hash is the home."""
        target, first = bounded(request.key, fleet, self.bound)
        return Choice(target, "hash" if first else "overflow", moves_home=first)
