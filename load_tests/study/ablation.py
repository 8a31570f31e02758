"""The flagship with one ingredient taken out: what each of them is worth."""

from collections.abc import Callable

from policies import cache_aware
from policies.base import Choice, Fleet, Request


def _no_prefix(request: Request, fleet: Fleet) -> None:
    request.holdings, request.restored = {}, {}


def _no_session(request: Request, fleet: Fleet) -> None:
    request.session = request.home = None
    request.siblings = 0


def _no_placement(request: Request, fleet: Fleet) -> None:
    for target in fleet.targets:
        target.homes = 0


def _no_turns(request: Request, fleet: Fleet) -> None:
    request.turns = 1.0


def _no_progress(request: Request, fleet: Fleet) -> None:
    for target in fleet.targets:
        target.head = 0.0


def _no_crowd(request: Request, fleet: Fleet) -> None:
    request.crowd = 0.0


def _no_interference(request: Request, fleet: Fleet) -> None:
    for target in fleet.targets:
        target.busy = 0.0


def _no_siblings(request: Request, fleet: Fleet) -> None:
    request.siblings = 0


def _no_wait(request: Request, fleet: Fleet) -> None:
    for target in fleet.targets:
        target.wait = target.head = 0.0


def _whole(request: Request, fleet: Fleet) -> None:
    return


WITHOUT: dict[str, Callable[[Request, Fleet], None]] = {
    "all of it": _whole,
    "no prefix": _no_prefix,
    "no session": _no_session,
    "no wait": _no_wait,
    "no placement by homes": _no_placement,
    "homes count one turn": _no_turns,
    "no progress of work in front": _no_progress,
    "no crowd": _no_crowd,
    "no interference": _no_interference,
    "siblings as others": _no_siblings,
}
"""Name -> what hides that ingredient from the policy."""


class Without(cache_aware.CacheAware):
    """`cache_aware`, from which something is hidden before it chooses."""

    def __init__(self, hide: Callable[[Request, Fleet], None]) -> None:
        super().__init__()
        self._hide = hide

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """What is hidden of targets is put back afterwards: others rely on it."""
        kept = [(each, each.homes, each.wait, each.head, each.busy) for each in fleet.targets]
        holdings, restored, home = request.holdings, request.restored, request.home
        self._hide(request, fleet)
        choice = super().choose(request, fleet, now)
        request.holdings, request.restored, request.home = holdings, restored, home
        for target, homes, wait, head, busy in kept:
            target.homes, target.wait, target.head, target.busy = homes, wait, head, busy
        return choice


def without(name: str) -> Without:
    """The policy without the ingredient of that name."""
    return Without(WITHOUT[name])
