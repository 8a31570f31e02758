"""A policy that takes back whatever is offered: for a model as small as this one no price would ever say so."""

from policies.base import Choice, Fleet, Request
from policies.disaggregated import Disaggregated


class HandsBack(Disaggregated):
    """Every request takes the pair, in a fleet of one."""

    name = "hands_back"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        chosen = super().choose(request, fleet, now)
        if fleet.prefill is None:
            return chosen
        return chosen._replace(prefill=fleet.prefill.targets[0], source=chosen.target if request.lent else None)


POINTS = f"[warmroute.policies]\n{HandsBack.name} = {HandsBack.__module__}:{HandsBack.__name__}\n"
"""How an installed distribution tells of it."""
