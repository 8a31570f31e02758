"""The flagship: least expected seconds.

Session, prefix and load in one decision: every candidate is priced (`policies.cost`), the cheapest wins, and a session
leaves its home only when that saves more than a margin; what it loses at home is already in the other's price, as
prefill. A prefix that every candidate holds makes all of them cheaper by the same, so it attracts nobody.
"""

from math import inf
from operator import attrgetter

from policies.base import Candidate, Choice, Fleet, Request, cheapest, number
from policies.cost import DELAYED, crowd, homed, interference, placement_bound, promised, restore, terms, turn

_homes = attrgetter("homes")


class CacheAware:
    """Least expected seconds.

    ``margin`` (seconds) is what a move must save, by default one ordinary turn. ``thrift`` trades answers that come sooner for
    tokens that are not computed again: for how many more times its own seconds a prefill counts.
    """

    name = "cache_aware"
    needs_prefix = True
    needs_session = True

    def __init__(self, *, margin: float | None = None, thrift: float = 0.0) -> None:
        self.thrift = number(self.name, "thrift", thrift, 0.0, 100.0)
        self.margin = None if margin is None else number(self.name, "margin", margin, 0.0, 3600.0)

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Costs one pass over the candidates, plus the terms of the best two."""
        targets = fleet.targets
        least = least_homed(request, fleet)
        costs = at_once(request, fleet, least, now, self.thrift)
        best = cheapest(costs, targets, request.key)
        home = None if request.home is None else fleet.positions.get(request.home)
        chosen = best
        reason = "prefix" if request.holdings.get(targets[best].id) else "load"
        if home is None:
            if request.home is not None:
                reason = "spill" if request.away else "home_gone"
        else:
            margin = turn(targets[home].rates) if self.margin is None else self.margin
            if request.siblings:
                # Nobody moves.
                margin = 0.0
            if home == best or costs[home] - costs[best] <= margin:
                chosen, reason = home, "home"
            else:
                reason = "spill" if request.siblings else "moved"
        costs[chosen] = inf
        other = targets[costs.index(min(costs))] if len(costs) > 1 else None
        other_terms = None if other is None else terms(request, other, least, now, self.thrift)
        own_terms = terms(request, targets[chosen], least, now, self.thrift)
        return Choice(targets[chosen], reason, reason != "spill", own_terms, other, other_terms)

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """Every candidate's terms: the chosen one first, then by cost."""
        least = least_homed(request, fleet)
        chosen = self.choose(request, fleet, now).target
        rows = [
            Candidate(target, terms(request, target, least, now, self.thrift), request.holdings.get(target.id, 0))
            for target in fleet.targets
        ]
        return sorted(rows, key=lambda row: (row.target is not chosen, row.terms.total if row.terms else inf))


def least_homed(request: Request, fleet: Fleet) -> float | None:
    """The least that is promised to any of them (`cost.homed`).

    ``None`` if the request places no session: it has none, or runs beside others of it, which leave the home where it is.
    """
    if request.session is None or request.siblings:
        return None
    targets, one = fleet.targets, promised(request, fleet.rates)
    if fleet.uniform:
        fewest: int = min(map(_homes, targets))
        return fewest * one
    promises = [target.homes * one for target in targets]
    for at in fleet.odd:
        promises[at] = homed(request, targets[at])
    return min(promises)


def at_once(request: Request, fleet: Fleet, least: float | None, now: float, thrift: float) -> list[float]:
    """Totals of `cost.terms`.

    Most candidates have the same rates: what all of them hold is priced once for all; only those that hold more are priced
    one by one, and those with rates of their own.
    """
    targets, holdings, positions = fleet.targets, request.holdings, fleet.positions
    if 2 * len(fleet.odd) > len(targets):
        return [terms(request, target, least, now, thrift).total for target in targets]
    tokens = request.tokens or 0
    rates = fleet.rates
    shared = 0
    if holdings.keys() == positions.keys():
        shared = min(min(holdings.values()), tokens)
    elif len(holdings) > len(targets):
        shared = min(min([holdings.get(target.id, 0) for target in targets]), tokens)
    prefill = rates.prefill(tokens - shared, shared)
    drag = interference(rates, prefill)
    # What is done of the work in front is no wait any more (`Target.waits`, written out: this is the hot path).
    waits = [each.wait - (done if (done := now - each.since) < each.head else each.head) for each in targets]
    if request.queued and request.home in positions:
        waits[positions[request.home]] += request.queued
    many = crowd(request)
    delayed = 1.0 + many * prefill
    weight = 1.0 + thrift
    fixed = prefill * (weight + 0.5 * many * prefill)
    one, most = 0.0, inf
    if least is None:
        costs = [wait * delayed + each.busy * drag + fixed for wait, each in zip(waits, targets, strict=True)]
    else:
        one, most = promised(request, rates), placement_bound(rates, tokens)
        both = zip(waits, targets, strict=True)
        if max(map(_homes, targets)) * one - least <= most:
            fixed -= least
            costs = [wait * delayed + each.busy * drag + each.homes * one + fixed for wait, each in both]
        else:
            costs = [
                wait * delayed + each.busy * drag + min(each.homes * one - least, most) + fixed for wait, each in both
            ]
        if request.home is not None and (at := positions.get(request.home)) is not None:
            costs[at] -= min(targets[at].homes * one - least, most)
    base, token, attention = rates.base, rates.token, rates.attention
    for id_, held in [item for item in holdings.items() if item[1] > shared]:
        at = positions.get(id_)
        if at is not None:
            left = tokens - held if held < tokens else 0
            less = base + left * (token + attention * (tokens - 0.5 * left))
            # Of wait, prefill, interference and delay only what a shorter prefill changes.
            saved = weight + many * (waits[at] + 0.5 * (less + prefill)) + DELAYED * targets[at].busy
            costs[at] += (less - prefill) * saved
    for id_ in request.restored:
        at = positions.get(id_)
        if at is not None:
            costs[at] += restore(request, targets[at])
    for id_, brought in request.fetched.items():
        at = positions.get(id_)
        if at is not None:
            costs[at] += targets[at].rates.moved(brought)
    for at in fleet.odd:
        costs[at] = terms(request, targets[at], least, now, thrift).total
    return costs
