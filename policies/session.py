"""Affinity as a wrapper round any policy."""

from collections.abc import Mapping
from typing import Any

from policies.base import Candidate, Choice, Fleet, Request, Target, inner, number


class Session:
    """A session stays at its home while that may take it and is not over its share; otherwise the fallback chooses.

    Over its share means more than ``spill`` times the mean load of the candidates and at least ``slack`` requests above
    it. A request that spills leaves the home where it is, so a burst cannot make a session wander; the home changes only
    when it may not be used at all.
    """

    name = "session"
    needs_session = True

    def __init__(
        self, *, fallback: str | Mapping[str, Any] = "least_load", spill: float = 1.25, slack: float = 4
    ) -> None:
        self.spill = number(self.name, "spill", spill, 1.0, 100.0)
        self.slack = number(self.name, "slack", slack, 0, 1e6)
        self.fallback = inner(self.name, "fallback", fallback)
        self.needs_prefix = self.fallback.needs_prefix

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Home, or what the fallback says."""
        home = _find(fleet, request.home)
        if home is None:
            choice = self.fallback.choose(request, fleet, now)
            if request.away:
                return choice._replace(reason="spill", moves_home=False)
            return choice._replace(reason="new" if request.home is None else "home_gone", moves_home=True)
        if len(fleet.targets) == 1 or not self._over(home, fleet):
            return Choice(home, "home")
        choice = self.fallback.choose(request, fleet, now)
        if choice.target.load >= home.load:
            return Choice(home, "home")
        return choice._replace(reason="spill", moves_home=False)

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """The fallback's view with the home first, if it would be kept."""
        rows = self.fallback.explain(request, fleet, now)
        chosen = self.choose(request, fleet, now).target
        return sorted(rows, key=lambda row: row.target is not chosen)

    def _over(self, home: Target, fleet: Fleet) -> bool:
        mean = sum(target.load for target in fleet.targets) / len(fleet.targets)
        return home.load > self.spill * mean and home.load >= mean + self.slack


def _find(fleet: Fleet, home: int | None) -> Target | None:
    at = None if home is None else fleet.positions.get(home)
    return None if at is None else fleet.targets[at]
