"""The queue in front of a simulated fleet: `gateway.admission` without HTTP, on the core that ships.

A request goes on at once while its policy's choice, or any other target, is not full and nobody waits; otherwise it waits,
and is routed anew when it leaves.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from load_tests.simulate.places import Sent
from load_tests.simulate.router import Looked, Router
from load_tests.simulate.traffic import Chain, Turn
from policies.admission import GENERATED, Queue, Waiting, full

EXPECTED = 128.0
"""Tokens that a request is expected to generate, until its tenant's answers tell."""
LEARNED = 0.05
"""Weight of one answer in that."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose a chain is, and what it is granted."""

    name: str
    level: int = 0
    weight: float = 1.0
    concurrency: int | None = None


@dataclass(slots=True, eq=False)
class Owner:
    """A request that waits, by its place in the traffic."""

    place: int
    number: int
    router: Router
    turn: Turn
    session: str | None
    arrived: float
    tenant: Tenant
    looked: Looked
    queued: float = 0.0
    """Seconds of prefill that wait for its home, where it leaves that for them."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that was turned away. Seconds; ``at`` is when it was told."""

    place: int
    number: int
    tenant: str
    arrived: float
    at: float
    reason: str
    retry_after: float


class Admitting:
    """``ahead``: seconds of prefill in front of a target beyond which it is full; ``tenant_of`` a chain; ``patience`` of a
    request in seconds, if it is not its level's."""

    def __init__(
        self,
        queue: Queue,
        ahead: float,
        tenant_of: Callable[[Chain], Tenant],
        patience: Callable[[Chain], float | None] = lambda chain: None,
    ) -> None:
        self.queue = queue
        self.ahead = ahead
        self.tenant_of = tenant_of
        self.patience = patience
        self.refused: list[Refused] = []
        self.waited: list[float] = []
        """Seconds of those that left the queue for a target."""
        self._running: Counter[str] = Counter()
        self._sent: dict[int, tuple[Tenant, float, bool]] = {}
        """Request in flight, by identity -> its tenant, what it was expected to generate, whether it was charged."""
        self._output: dict[str, float] = {}

    def arrives(
        self, router: Router, place: int, number: int, chain: Chain, name: str | None, now: float
    ) -> Sent | None:
        """Sent at once, or ``None``: it waits, or was refused."""
        tenant = self.tenant_of(chain)
        turn = chain.turns[number]
        looked = router.look(turn, name, now)
        if not len(self.queue) and self._may(tenant) and not self._pressed(router, looked, now):
            return self._commit(router, looked, tenant, now, False)
        choice = looked.choice
        computed = turn.tokens - min(looked.request.holdings.get(choice.target.id, 0), turn.tokens)
        deadline = now + (self.patience(chain) or self.queue.levels[tenant.level].priority.deadline)
        owner = Owner(place, number, router, turn, name, now, tenant, looked)
        waiting = Waiting(
            tenant.name,
            tenant.level,
            computed,
            self._expected(tenant),
            turn.tokens,
            now,
            deadline,
            owner,
            home=looked.request.home,
            weight=tenant.weight,
        )
        shed, displaced = self.queue.offer(waiting, now)
        if shed is not None:
            self._refuse(owner, shed.reason, shed.retry_after, now)
        for each in displaced:
            assert isinstance(each.owner, Owner)
            self._refuse(each.owner, "displaced", 1.0, now)
        return None

    def leaves(self, now: float) -> tuple[Owner, Sent] | None:
        """The next one that waited and can be sent."""
        for waiting, shed in self.queue.expired(now):
            assert isinstance(waiting.owner, Owner)
            self._refuse(waiting.owner, shed.reason, shed.retry_after, now)
        if not len(self.queue):
            return None
        first = self.queue.all()[0].owner
        assert isinstance(first, Owner)
        router = first.router
        free = {each.id for each in router.fleet.targets if not full(each, self.ahead, now)}

        def score(waiting: Waiting) -> float:
            assert isinstance(waiting.owner, Owner)
            holdings = waiting.owner.looked.request.holdings
            return max([held for target, held in holdings.items() if target in free], default=0)

        def may(name: str) -> bool:
            return name not in capped

        def moves(waiting: Waiting, ahead: float) -> bool:
            assert isinstance(waiting.owner, Owner)
            assert waiting.home is not None
            queued = router.places[waiting.home].rates.prefill(ahead, 0)
            looked = router.look(waiting.owner.turn, waiting.owner.session, now, queued)
            waiting.owner.queued = queued
            return looked.choice.target.id != waiting.home

        capped = self._capped()
        found = self.queue.take(now, free, router.fleet.positions, may=may, score=score, moves=moves)
        if found is None:
            return None
        owner = found.owner
        assert isinstance(owner, Owner)
        looked = owner.router.look(owner.turn, owner.session, now, owner.queued)
        self.waited.append(now - owner.arrived)
        sent = self._commit(owner.router, looked, owner.tenant, now, True)
        self.queue.charge(found, sent.uncached, self._expected(owner.tenant), now)
        return owner, sent

    def ended(self, sent: Sent, generated: int) -> None:
        """An answer is complete."""
        tenant, expected, charged = self._sent.pop(id(sent), (None, 0.0, False))
        if tenant is None:
            return
        self._running[tenant.name] -= 1
        before = self._expected(tenant)
        self._output[tenant.name] = before + LEARNED * (generated - before)
        if charged:
            self.queue.correct(tenant.name, tenant.level, GENERATED * (generated - expected))

    def _pressed(self, router: Router, looked: Looked, now: float) -> bool:
        """Whether its choice is full, and everybody else."""
        choice = looked.choice
        if not full(choice.target, self.ahead, now) and (
            choice.prefill is None or not full(choice.prefill, self.ahead, now)
        ):
            return False
        return all(full(each, self.ahead, now) for each in router.fleet.targets)

    def _commit(self, router: Router, looked: Looked, tenant: Tenant, now: float, charged: bool) -> Sent:
        sent = router.commit(looked, now)
        self._running[tenant.name] += 1
        self._sent[id(sent)] = (tenant, self._expected(tenant), charged)
        return sent

    def _may(self, tenant: Tenant) -> bool:
        return tenant.concurrency is None or self._running[tenant.name] < tenant.concurrency

    def _capped(self) -> set[str]:
        owners = [line for level in self.queue.levels for line in level.lines.values()]
        found = set()
        for line in owners:
            owner = next(iter(next(iter(line.groups.values())).waiting)).owner
            assert isinstance(owner, Owner)
            if not self._may(owner.tenant):
                found.add(line.tenant)
        return found

    def _expected(self, tenant: Tenant) -> float:
        return self._output.get(tenant.name, EXPECTED)

    def _refuse(self, owner: Owner, reason: str, retry_after: float, now: float) -> None:
        self.refused.append(
            Refused(owner.place, owner.number, owner.tenant.name, owner.arrived, now, reason, retry_after)
        )
