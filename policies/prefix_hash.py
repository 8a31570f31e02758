"""Prompts by the hash of their start, with bounded load."""

from policies.base import ByLoad, Choice, Fleet, Request, number as checked
from policies.consistent_hash import bounded


class PrefixHash(ByLoad):
    """Rendezvous hashing of the prompt's first pages: no state at all, good where prompts share a few long starts."""

    name = "prefix_hash"
    needs_prefix = True

    def __init__(self, *, bound: float = 1.25) -> None:
        self.bound = checked(self.name, "bound", bound, 1.0, 100.0)

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """A prompt shorter than the hashed start goes by the request's draw."""
        key = request.draw if request.prefix is None else request.prefix
        target, first = bounded(key, fleet, self.bound)
        return Choice(target, "hash" if first else "overflow", moves_home=first)
