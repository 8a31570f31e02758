"""The flagship: least expected seconds.

Session, prefix and load in one decision: every candidate is priced (`policies.cost`), the cheapest wins, and a session
leaves its home only when that saves more than a margin; what it loses at home is already in the other's price, as
prefill. A prefix that every candidate holds makes all of them cheaper by the same, so it attracts nobody.
"""

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from policies.base import Candidate, Choice, Fleet, Request, Target, affinities, number
from policies.cost import homed, interference, placement_bound, restore, terms, turn

_homes = attrgetter("homes")


class CacheAware:
    """Least expected seconds; ``margin`` (seconds) is what a move must save, by default one ordinary turn."""

    name = "cache_aware"
    needs_prefix = True
    needs_session = True

    def __init__(self, *, margin: float | None = None) -> None:
        self.margin = None if margin is None else number(self.name, "margin", margin, 0.0, 3600.0)

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Costs one pass over the candidates, plus the terms of the best two."""
        targets = fleet.targets
        least = _least_homed(fleet) if request.session is not None else None
        costs = _at_once(request, fleet, least) if fleet.uniform else [terms(request, t, least).total for t in targets]
        best = _cheapest(costs, targets, request.key)
        home = None if request.home is None else fleet.positions.get(request.home)
        chosen = best
        reason = "prefix" if request.holdings.get(targets[best].id) else "load"
        if home is None:
            if request.home is not None:
                reason = "spill" if request.away else "home_gone"
        else:
            margin = turn(targets[home].rates) if self.margin is None else self.margin
            if home == best or costs[home] - costs[best] <= margin:
                chosen, reason = home, "home"
            else:
                reason = "spill" if request.siblings else "moved"
        costs[chosen] = inf
        other = targets[costs.index(min(costs))] if len(costs) > 1 else None
        other_terms = None if other is None else terms(request, other, least)
        return Choice(
            targets[chosen], reason, reason != "spill", terms(request, targets[chosen], least), other, other_terms
        )

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """Every candidate's terms: the chosen one first, then by cost."""
        least = _least_homed(fleet) if request.session is not None else None
        chosen = self.choose(request, fleet, now).target
        rows = [
            Candidate(target, terms(request, target, least), request.holdings.get(target.id, 0))
            for target in fleet.targets
        ]
        return sorted(rows, key=lambda row: (row.target is not chosen, row.terms.total if row.terms else inf))


def _least_homed(fleet: Fleet) -> float:
    targets = fleet.targets
    if fleet.uniform:
        fewest: int = min(map(_homes, targets))
        return fewest * turn(targets[0].rates)
    return min([homed(target) for target in targets])


def _at_once(request: Request, fleet: Fleet, least_homed: float | None) -> list[float]:
    """Totals of `cost.terms` for candidates of equal rates.

    What every candidate holds is priced once for all; only those that hold more are priced one by one.
    """
    targets, holdings, positions = fleet.targets, request.holdings, fleet.positions
    tokens = request.tokens or 0
    rates = targets[0].rates
    shared = 0
    if holdings.keys() == positions.keys():
        shared = min(min(holdings.values()), tokens)
    elif len(holdings) > len(targets):
        shared = min(min([holdings.get(target.id, 0) for target in targets]), tokens)
    prefill = rates.prefill(tokens - shared, shared)
    drag = interference(rates, prefill)
    if least_homed is None:
        costs = [target.wait + target.busy * drag + prefill for target in targets]
        one_turn = 0.0
    else:
        one_turn = turn(rates)
        most = placement_bound(rates, tokens) + least_homed
        fixed = prefill - least_homed
        costs = [target.wait + target.busy * drag + target.homes * one_turn + fixed for target in targets]
        # A cost far over the least may hide a promise over its bound; nearly always there is none.
        if max(costs) - fixed > most:
            costs = [
                target.wait + target.busy * drag + min(target.homes * one_turn, most) + fixed for target in targets
            ]
    for id_, held in [item for item in holdings.items() if item[1] > shared]:
        at = positions.get(id_)
        if at is not None:
            target, held = targets[at], min(held, tokens)
            more = rates.prefill(tokens - held, held)
            costs[at] += more - prefill + target.busy * (interference(rates, more) - drag)
    for id_ in request.restored:
        at = positions.get(id_)
        if at is not None:
            costs[at] += restore(request, targets[at])
    if one_turn and request.home is not None and (at := positions.get(request.home)) is not None:
        costs[at] -= min(targets[at].homes * one_turn - (least_homed or 0.0), placement_bound(rates, tokens))
    return costs


def _cheapest(costs: list[float], targets: Sequence[Target], key: int) -> int:
    least = min(costs)
    at = costs.index(least)
    if costs.count(least) == 1:
        return at
    tied = [at for at, cost in enumerate(costs) if cost == least]
    scores = affinities(key, [targets[at] for at in tied])
    return tied[scores.index(max(scores))]
