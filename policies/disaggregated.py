"""Prefill/decode disaggregation: who computes a prompt, who generates, or one engine for both; by least expected seconds.

Three ways to serve a request are priced for every candidate, and the cheapest wins:

    pair    a prefill engine computes what it does not hold, its KV goes over, a decode engine generates:
            wait(P) + prefill(P) + transfer(tokens that D does not hold) + memory(D)
    local   a decode engine computes what it does not hold itself, behind what its session left there, while those that
            generate on it wait: wait(D) + prefill(D) + interference + memory(D)
    whole   a unified engine does it all

A prefill engine holds prompts, a decode engine prompts and answers, so a long answer that is asked about again speaks for
the decode engine, and a long new text for a prefill engine. No number of tokens decides that, for queues decide it too
(llm-d's threshold on uncached tokens sends everything to prefill, however long its queue).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, lcm
from typing import Any, NamedTuple

from policies.base import (
    BadOption,
    Candidate,
    Choice,
    Fleet,
    Policy,
    Request,
    Role,
    Target,
    Terms,
    cheapest,
    inner,
    number,
)
from policies.cache_aware import CacheAware, least_homed
from policies.cost import EXPECTED_OUTPUT, memory, terms, turn

DISTURBED = 0.2
"""`Disaggregated.disturbance` by default: answers begin as soon as under the best fixed rule, and are as steady."""

LEAST_LENT = 64
"""Tokens of a prompt below which handing KV back is not worth a transfer: engines compute them (vLLM's
``kv_recompute_threshold``)."""


class Stage(NamedTuple):
    """A prefill engine with what it costs to have the prompt computed there."""

    target: Target
    terms: Terms
    lent: bool


class Disaggregated:
    """The module's head says how. ``margin`` and ``thrift`` are those of ``cache_aware``.

    ``disturbance``: what a second counts by which a prefill on a decode engine delays each answer there, against a second of
    the request's own. The more, the steadier are answers, and the later they begin.

    ``prefill``, ``decode``: policies, by name or as a mapping, that choose each side by themselves: ``decode`` who generates,
    ``prefill`` who computes the prompt for it if it is a decode engine.
    """

    name = "disaggregated"
    needs_session = True

    def __init__(
        self,
        *,
        margin: float | None = None,
        thrift: float = 0.0,
        disturbance: float = DISTURBED,
        prefill: str | Mapping[str, Any] | None = None,
        decode: str | Mapping[str, Any] | None = None,
    ) -> None:
        self.thrift = number(self.name, "thrift", thrift, 0.0, 100.0)
        self.margin = None if margin is None else number(self.name, "margin", margin, 0.0, 3600.0)
        self.disturbance = number(self.name, "disturbance", disturbance, 0.0, 100.0)
        self._whole = CacheAware(margin=margin, thrift=thrift)
        self._sides: Sides | None = None
        if prefill is not None or decode is not None:
            for option, given in (
                ("margin", margin is not None),
                ("thrift", bool(thrift)),
                ("disturbance", disturbance != DISTURBED),
            ):
                if given:
                    raise BadOption(f"disaggregated.{option} is of no use beside prefill and decode", option)
            first = None if prefill is None else inner(self.name, "prefill", prefill)
            second = first if decode is None else inner(self.name, "decode", decode)
            assert second is not None, "one of them is given"
            self._sides = Sides(first or second, second)
        self.needs_prefix = self._sides is None or self._sides.needs_prefix

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """A pair, or one target; `Choice.prefill` tells. Costs one pass over either side."""
        if self._sides is not None:
            return self._sides.choose(request, fleet, now)
        if fleet.prefill is None:
            return self._whole.choose(request, fleet, now)
        stages = self._stages(request, fleet, fleet.prefill, now)
        rows = self._rows(request, fleet, stages, now)
        costs = [row.terms.total for row in rows]
        home = None if request.home is None else next((r for r in rows if r.target.id == request.home), None)
        best = rows[cheapest(costs, [row.target for row in rows], request.key)]
        chosen, reason = best, "load"
        if request.holdings.get(best.target.id) or (best.stage and request.holdings.get(best.stage.target.id)):
            reason = "prefix"
        if home is None:
            if request.home is not None:
                reason = "spill" if request.away else "home_gone"
        else:
            if home is best or home.terms.total - best.terms.total <= self._margin(request, home.target):
                chosen, reason = home, "home"
            else:
                reason = "spill" if request.siblings else "moved"
        others = [row for row in rows if row is not chosen]
        other = min(others, key=lambda row: row.terms.total) if others else None
        stage = chosen.stage
        return Choice(
            chosen.target,
            reason,
            reason != "spill",
            chosen.terms,
            None if other is None else other.target,
            None if other is None else other.terms,
            None if stage is None else stage.target,
            _lender(request, fleet) if stage is not None and stage.lent else None,
        )

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """Every way that was priced: of each target that generates the pair and, where it can, alone; the chosen one first."""
        if self._sides is not None:
            return self._sides.explain(request, fleet, now)
        if fleet.prefill is None:
            return self._whole.explain(request, fleet, now)
        chosen = self.choose(request, fleet, now)
        stages = self._stages(request, fleet, fleet.prefill, now)
        rows = [
            Candidate(
                row.target,
                row.terms,
                request.holdings.get(row.target.id, 0),
                None if row.stage is None else row.stage.target,
            )
            for row in self.ways(request, fleet, stages, now)
        ]
        return sorted(
            rows,
            key=lambda row: (
                not (row.target is chosen.target and row.prefill is chosen.prefill),
                row.terms.total if row.terms else inf,
            ),
        )

    def _margin(self, request: Request, bound: Target) -> float:
        """Seconds that leaving ``bound`` must save; nobody moves for one that runs beside others of its session."""
        if request.siblings:
            return 0.0
        return turn(bound.rates) if self.margin is None else self.margin

    # -- the first stage --------------------------------------------------------------------------------------------

    def _stages(self, request: Request, fleet: Fleet, prefill: Fleet, now: float) -> dict[str, Stage]:
        """Pool -> its cheapest prefill engine; the session's own unless another saves more than the margin."""
        asked = _asked_of_prefill(request)
        lender = _lender(request, fleet)
        least = least_homed(asked, prefill)
        pools: dict[str, list[Stage]] = {}
        for target in prefill.targets:
            near = lender is not None and lender.pool == target.pool
            lent = min(request.lent, (request.tokens or 1) - 1) if near else 0
            pools.setdefault(target.pool, []).append(self._stage(asked, target, lent, least, now))
        found = {}
        for pool, stages in pools.items():
            costs = [stage.terms.total for stage in stages]
            best = stages[cheapest(costs, [stage.target for stage in stages], request.key)]
            own = next((stage for stage in stages if stage.target.id == request.partner), None)
            if own is not None and own.terms.total - best.terms.total <= self._margin(request, own.target):
                best = own
            found[pool] = best
        return found

    def _stage(self, asked: Request, target: Target, lendable: int, least: float | None, now: float) -> Stage:
        own = terms(asked, target, least, now, self.thrift)
        tokens = asked.tokens or 0
        held = min(asked.holdings.get(target.id, 0), tokens)
        if lendable - held < LEAST_LENT:
            return Stage(target, own, False)
        holdings = {**asked.holdings, target.id: lendable}
        lent = terms(replace(asked, holdings=holdings), target, least, now, self.thrift)
        lent = lent._replace(transfer=target.rates.moved(lendable - held))
        return Stage(target, lent, True) if lent.total < own.total else Stage(target, own, False)

    # -- both stages ------------------------------------------------------------------------------------------------

    def _rows(self, request: Request, fleet: Fleet, stages: Mapping[str, Stage], now: float) -> list["Way"]:
        """Of each target that can generate the cheapest way."""
        best: dict[int, Way] = {}
        for row in self.ways(request, fleet, stages, now):
            before = best.get(row.target.id)
            if before is None or row.terms.total < before.terms.total:
                best[row.target.id] = row
        return list(best.values())

    def ways(self, request: Request, fleet: Fleet, stages: Mapping[str, Stage], now: float) -> list["Way"]:
        """All that are priced; of each target that can generate one or two."""
        least = least_homed(request, fleet)
        decoding = [target.busy for target in fleet.targets if target.role is Role.DECODE]
        usual = sum(decoding) / len(decoding) if decoding else 0.0
        rows = []
        for target in fleet.targets:
            alone = terms(request, target, least, now, self.thrift)
            full = memory(request, target)
            if target.role is not Role.DECODE:
                rows.append(Way(target, alone._replace(memory=full), None))
                continue
            stage = stages.get(target.pool)
            if stage is not None:
                rows.append(Way(target, _paired(request, target, alone, stage, full, now), stage))
            if target.whole:
                drag = target.busy * EXPECTED_OUTPUT * target.rates.decode
                drag += self.disturbance * disturbed(target, alone.prefill, usual)
                rows.append(Way(target, alone._replace(interference=drag, memory=full), None))
        # Who serves in pairs only, and has no partner, is still somebody.
        return rows or [Way(target, terms(request, target, least, now, self.thrift), None) for target in fleet.targets]


def disturbed(target: Target, prefill: float, usual: float) -> float:
    """Seconds that ``prefill`` seconds on a decode engine cost those that generate there: each that does now waits all of
    them, each that comes meanwhile half. Where ``usual`` requests generate at a time for ``answer`` seconds each,
    ``usual / answer`` come a second (Little's law)."""
    # Of a step that generates anyway only what the prompt adds to it.
    prefill = max(0.0, prefill - target.rates.base)
    answer = EXPECTED_OUTPUT * (target.rates.base + usual * target.rates.decode)
    coming = usual * prefill / answer
    return prefill * (target.busy + 0.5 * coming)


class Way(NamedTuple):
    """One way to serve a request."""

    target: Target
    terms: Terms
    stage: Stage | None


def _paired(request: Request, target: Target, alone: Terms, stage: Stage, full: float, now: float) -> Terms:
    """``stage``, then ``target``, which is busy with prompts of its own until then (``alone``: what it costs without)."""
    first = stage.terms
    tokens = request.tokens or 0
    held = min(request.holdings.get(target.id, 0), tokens)
    queue = target.waits(now)
    return Terms(
        # Who starts slowly is not in time for its share because others compute (`alone.wait`, less its queue).
        wait=max(first.wait, queue - first.prefill) + alone.wait - queue,
        prefill=first.prefill,
        interference=first.interference + target.busy * EXPECTED_OUTPUT * target.rates.decode,
        placement=first.placement + alone.placement,
        restore=first.restore + alone.restore,
        delay=first.delay,
        transfer=first.transfer + alone.transfer + target.rates.moved(tokens - held),
        memory=full,
    )


def _asked_of_prefill(request: Request) -> Request:
    """``request`` as a prefill engine sees it: at home at its session's partner."""
    return replace(request, home=request.partner)


def _lender(request: Request, fleet: Fleet) -> Target | None:
    at = None if request.home is None else fleet.positions.get(request.home)
    return None if at is None else fleet.targets[at]


class Sides:
    """Two policies that choose who generates, and who computes the prompt for a decode engine, without regard to each other.

    It is what policies that price nothing are in a disaggregated fleet.
    """

    def __init__(self, prefill: Policy, decode: Policy) -> None:
        self.name = prefill.name if prefill is decode else Disaggregated.name
        self.prefill = prefill
        self.decode = decode
        self.needs_prefix = prefill.needs_prefix or decode.needs_prefix
        self.needs_session = prefill.needs_session or decode.needs_session

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """Who generates, and for a decode engine a prefill engine of its pool, if there is one."""
        second = self.decode.choose(request, fleet, now)
        first = self._first(request, fleet, second.target, now)
        if first is None:
            return second
        lender, at = _lender(request, fleet), first.target
        gained = min(request.lent, (request.tokens or 1) - 1) - request.holdings.get(at.id, 0)
        lends = lender is not None and lender.pool == at.pool and gained >= LEAST_LENT
        return second._replace(prefill=at, source=lender if lends else None)

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """The decode policy's view, each with the prefill engine that it would have."""
        rows = self.decode.explain(request, fleet, now)
        pools: dict[str, Choice | None] = {}
        found = []
        for row in rows:
            if row.target.role is Role.DECODE and row.target.pool not in pools:
                pools[row.target.pool] = self._first(request, fleet, row.target, now)
            first = pools.get(row.target.pool) if row.target.role is Role.DECODE else None
            found.append(row if first is None else row._replace(prefill=first.target))
        return found

    def _first(self, request: Request, fleet: Fleet, decode: Target, now: float) -> Choice | None:
        """Who computes the prompt for ``decode``, if not itself."""
        if fleet.prefill is None or decode.role is not Role.DECODE:
            return None
        able = _within(fleet.prefill.targets, {decode.pool})
        if able is None:
            return None
        return self.prefill.choose(_turned(request, len(fleet.targets), len(able.targets)), able, now)


def _turned(request: Request, generating: int, computing: int) -> Request:
    """``request`` as the second policy sees it: turns and draws go with the other side's no longer than until all of both had
    their turn, so that each of one side meets each of the other."""
    turns, draw = request.ordinal + request.ordinal // lcm(generating, computing), request.draw
    return replace(_asked_of_prefill(request), ordinal=turns, draw=(draw >> 32 | draw << 32) & (1 << 64) - 1)


def _within(targets: Sequence[Target], pools: set[str]) -> Fleet | None:
    able = [target for target in targets if target.pool in pools]
    return Fleet(able) if able else None


def paired(policy: Policy) -> Policy:
    """What ``policy`` does in a fleet with prefill engines."""
    if isinstance(policy, Disaggregated):
        return policy
    if isinstance(policy, CacheAware):
        return Disaggregated(margin=policy.margin, thrift=policy.thrift)
    return Sides(policy, policy)
