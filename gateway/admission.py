"""The queue in front of the fleet: off the path while any target can take a request.

A request whose chosen target is not full goes on at once; so does one whose policy prefers a full target to free ones (a
session that waits for its home: the policy has priced that). Only when everybody who could serve it is full, or others wait
already, or its tenant has as many running as it may, it becomes one that waits. It is routed when it leaves, by what is true
then. Who goes next, and who is turned away, is decided in `policies.admission`; how queues that wait for the same targets take
turns, in `gateway.rounds`. Who can be served by one target only (that of a stored response, or a home that drains with time)
waits for that one and for nobody else.

What leaves is looked for whenever an answer begins or ends, and every `PUMP` seconds, while anybody waits.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from gateway import wishes
from gateway.asks import BYTES_PER_TOKEN, Ask
from gateway.dialects import Usage
from gateway.errors import Fault, NoWorker, Overloaded
from gateway.rounds import LEAST, Round, computing, spare
from policies.admission import GENERATED, Bounds, Held, Priority, Queue, Shed, Waiting, full, taken
from policies.base import Choice, Target as Seen
from policies.cost import EXPECTED_OUTPUT

if TYPE_CHECKING:
    from gateway.app import Gateway
    from gateway.exchange import Exchange

PUMP = 0.02
"""Seconds between two looks at what waits."""
BATCH = 64
"""Requests that leave in one go: the loop has other things to do."""
LEARNED = 0.05
"""Weight of one answer in what a tenant's answers are expected to be."""
TENANTS = 10_000
"""Of which that is remembered."""

WORDS = {
    "queue_full": "too many requests wait already",
    "level_full": "too many requests of this priority wait already",
    "tenant_full": "too many requests of this key wait already",
    "too_long": "the fleet is busy: it would not be served in time",
    "deadline": "the fleet is busy: it was not served in time",
    "displaced": "the fleet is busy, and requests of a higher priority came",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the queue is like. Seconds."""

    ahead: float = 0.05
    """Of prefill in front of a target, beyond which it is full."""
    hold: float = 0.0
    """For which a request waits for a worker where its model has none now, but had one or will have."""
    bounds: Bounds = field(default_factory=Bounds)
    priorities: tuple[Priority, ...] = (Priority("interactive"), Priority("bulk", deadline=600.0))


class Left(NamedTuple):
    """What a request was charged when it left its queue."""

    queue: Queue
    level: int
    generated: float
    computed: float


class Admission:
    """See the module's head."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self.gateway = gateway
        self.options = options
        self.levels = {priority.name: place for place, priority in enumerate(options.priorities)}
        self.held = Held()
        self.queues: dict[str | None, Queue] = {}
        """Model -> those that wait for it; as many as models are listed. See `_name`."""
        self._passed = 0.0
        """Of the queue that had its turn last."""
        self._pumps = False
        self._output: dict[str, float] = {}
        """Tenant -> tokens that its answers are expected to have."""
        self._timer: TimerHandle | None = None
        self._awake = False

    def reconfigure(self, options: Options) -> None:
        """Go on with other options; the levels keep their names."""
        assert [each.name for each in options.priorities] == list(self.levels)
        self.options = options
        for queue in self.queues.values():
            queue.bounds = options.bounds
            for level, priority in zip(queue.levels, options.priorities, strict=True):
                level.priority = priority

    # -- arriving ---------------------------------------------------------------------------------------------------

    def patience(self, exchange: Exchange, now: float) -> float:
        """When the time that the client gave is over; infinite if it gave none. Raises `BadRequest` for what it says of its
        time or its priority and is none."""
        named = exchange.incoming.named
        if b"x-warmroute-priority" in named:
            self.level(exchange)
        return wishes.until(named, now)

    def level(self, exchange: Exchange) -> int:
        """Place of its priority. Raises `BadRequest`."""
        place = self.levels.get(exchange.ask.tenant.priority or "", 0)
        return wishes.level(exchange.incoming.named, place, self.levels)

    def holds(self, exchange: Exchange, choice: Choice, now: float, *, bound: bool = False) -> bool:
        """Whether it has to wait, and does so now. ``bound``: nobody else can serve it. Raises `Overloaded` if it is turned
        away."""
        meter, ask = exchange.ask.tenant.meter, exchange.ask
        free = meter is None or meter.free
        if free and not self.held.requests and not self._full(choice, now):
            return False
        name = self._name(ask)
        queue = self.queues.get(name)
        view = self.gateway.fleet.view(name)
        target = choice.prefill or choice.target
        # It drains with time: who belongs to it goes nowhere else either.
        bound = bound or view is None or all(target is not each for each in computing(view))
        soon = False
        if free and bound:
            if not self._full(choice, now) and (queue is None or target.id not in queue.homes()):
                return False
        elif free and view is not None:
            if queue is not None and len(queue) and spare(view, self.options.ahead, now):
                # Who waits and can go has gone before it: the others wait for their homes, or for what their tenants may.
                self.pump()
            soon = bool(spare(view, self.options.ahead, now))
            if soon and (queue is None or not len(queue) or not self._full(choice, now)):
                return False
        held = ask.request.holdings.get(target.id, 0)
        home = target.id if bound else self._home(ask)
        self._wait(exchange, name, _prompt(exchange) - held, now, home=home, bound=bound, soon=soon)
        return True

    def awaits(self, exchange: Exchange, fault: NoWorker, now: float) -> bool:
        """Nobody can serve it now: whether it waits for somebody who will. Raises `Overloaded`."""
        if self.options.hold <= 0 or not self._hopes(exchange):
            return False
        ask = exchange.ask
        # By its own name, listed or not: that of a worker which is still to come.
        name = _model(ask)
        until = now + self.options.hold
        self._wait(exchange, name, _prompt(exchange), now, until, home=self._home(ask))
        exchange.lacks = fault
        return True

    def _hopes(self, exchange: Exchange) -> bool:
        """Whether there are workers that may serve it once they are ready again."""
        name, fleet = _model(exchange.ask), self.gateway.fleet
        return any(fleet.serves(worker, name) for worker in fleet.workers.values())

    def _wait(
        self,
        exchange: Exchange,
        name: str | None,
        computed: float,
        now: float,
        until: float = inf,
        *,
        home: int | None,
        bound: bool = False,
        soon: bool = False,
    ) -> None:
        tenant = exchange.ask.tenant
        level = self.level(exchange)
        waiting = Waiting(
            tenant.name,
            level,
            max(1.0, computed),
            self.expected(tenant.name),
            len(exchange.body),
            now,
            min(now + self.options.priorities[level].deadline, exchange.until, until),
            exchange,
            home=home,
            bound=bound,
            weight=tenant.weight,
        )
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(self.options.priorities, self.options.bounds, self.held)
        if not len(queue):
            queue.passed = max(queue.passed, self._passed)
        shed, displaced = queue.offer(waiting, now, soon=soon, others=self.queues.values())
        for each in displaced:
            self._turn_away(each, Shed("displaced", 1.0))
        if shed is not None:
            raise self._overloaded(tenant.name, level, shed)
        exchange.wait(waiting)
        self._watch()
        # It may belong to a target that is free.
        self.wake()

    def _name(self, ask: Ask) -> str | None:
        """Of its queue: its model's, or one for all that nobody lists, of which clients can make up as many as they like;
        ``None``: any model will do."""
        if ask.model is None:
            return None
        name = ask.model.name
        return name if self.gateway.fleet.lists(name) else ""

    def _home(self, ask: Ask) -> int | None:
        """Who is to compute its prompt, if it belongs to anybody."""
        request = ask.request
        return request.home if request.partner is None else request.partner

    def expected(self, tenant: str) -> float:
        """Tokens that an answer to ``tenant`` is expected to have."""
        return self._output.get(tenant, EXPECTED_OUTPUT)

    # -- who is full ------------------------------------------------------------------------------------------------

    def _full(self, choice: Choice, now: float) -> bool:
        ahead = self.options.ahead
        return full(choice.target, ahead, now) or (choice.prefill is not None and full(choice.prefill, ahead, now))

    # -- leaving ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._timer is None:
            self._timer = self.gateway.loop.call_later(PUMP, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.pump()

    def wake(self) -> None:
        """Something changed: look at what waits, once the present callback is over."""
        if self.held.requests and not self._awake:
            self._awake = True
            self.gateway.loop.call_soon(self._woken)

    def _woken(self) -> None:
        self._awake = False
        self.pump()

    def pump(self) -> None:
        """Send what can be sent, turn away what waited for too long."""
        if self._pumps:
            # What an answer of ours let a client ask next.
            return
        self._pumps = True
        try:
            self._pump(self.gateway.clock())
        except Exception:
            self.gateway.defect("sending what waits")
        finally:
            self._pumps = False
        if self.held.requests:
            self._watch()

    def _pump(self, now: float) -> None:
        fleet, ahead = self.gateway.fleet, self.options.ahead
        rounds = []
        for name, queue in list(self.queues.items()):
            for waiting, shed in queue.expired(now):
                self._turn_away(waiting, shed)
            if len(queue):
                rounds.append(Round(queue, fleet, fleet.view(name), ahead, now))
            elif name and not fleet.lists(name):
                del self.queues[name]
        for _ in range(BATCH):
            if not rounds:
                return
            turn = min(rounds, key=_passed)
            try:
                found = turn.next(self._may, self._moves, _held)
                if found is not None:
                    self._sent(turn, found, rounds, now)
                    continue
            except Exception:
                self.gateway.defect("sending what waits")
            rounds.remove(turn)

    def _sent(self, turn: Round, waiting: Waiting, rounds: list[Round], now: float) -> None:
        """It leaves, and others may find its target full."""
        self._passed = max(self._passed, turn.queue.passed)
        target = self._go(turn.queue, waiting, turn.busy, now)
        if target is None:
            return
        share = max(LEAST, self.options.priorities[waiting.level].share) if waiting.level else 1.0
        turn.queue.passed += waiting.tokens / share
        for each in rounds:
            each.sent(target)

    def _moves(self, waiting: Waiting, ahead: float) -> bool:
        """Whether its policy would have it leave its home, where so many tokens wait to be computed before it."""
        exchange, now = _exchange(waiting), self.gateway.clock()
        ask, routing = exchange.ask, self.gateway.routing
        home = self.gateway.fleet.targets.get(waiting.home if waiting.home is not None else -1)
        if home is None:
            return True
        try:
            routing.renew(ask, now)
            ask.request.queued = home.rates.prefill(ahead, 0)
            choice = routing.choose(ask, exchange.tried, now)
        except Fault:
            return True
        except Exception:
            # It fails by itself, and not all that waits with it.
            self.gateway.defect("asking whether a request waits for its home")
            return True
        if (choice.prefill or choice.target) is home:
            ask.request.queued = 0.0
            return False
        return True

    def _may(self, tenant: str) -> bool:
        meter = self.gateway.meters.get(tenant)
        return meter is None or meter.free

    def _go(self, queue: Queue, waiting: Waiting, full_ones: set[int | None], now: float) -> Seen | None:
        """It leaves for a target, which is returned; ``None`` if it found none after all."""
        exchange = _exchange(waiting)
        priority = self.options.priorities[waiting.level].name
        self.gateway.metrics.queue_seconds.observe((priority,), now - waiting.arrived)
        ask, expected = exchange.ask, self.expected(waiting.tenant)
        # Before it is sent: its engine is to tell what it did.
        exchange.queued = Left(queue, waiting.level, expected, 0.0)
        exchange.leave(now, self._shut(ask, full_ones))
        if exchange.charge is None:
            exchange.queued = None
            return None
        computed = max(0.0, _prompt(exchange) - ask.context)
        queue.charge(waiting, computed, expected, now)
        exchange.queued = Left(queue, waiting.level, expected, computed)
        choice = exchange.choice
        assert choice is not None
        return choice.prefill or choice.target

    def _shut(self, ask: Ask, full_ones: set[int | None]) -> set[int | None]:
        """Which of ``full_ones`` are not to be chosen. A policy that prices prompts prices waiting for them, but not waiting
        for a place in a batch; any other would take a full target for a free one."""
        if not ask.policy.needs_prefix:
            return full_ones - {ask.request.home}
        targets = self.gateway.fleet.targets
        return {each for each in full_ones if each is not None and each in targets and taken(targets[each])}

    def _turn_away(self, waiting: Waiting, shed: Shed) -> None:
        try:
            self._refuse(waiting, shed)
        except Exception:
            # One of several that are told now.
            self.gateway.defect("turning a request away")

    def _refuse(self, waiting: Waiting, shed: Shed) -> None:
        exchange = _exchange(waiting)
        lacks = exchange.lacks
        if lacks is None and shed.reason == "deadline" and self.gateway.fleet.view(_model(exchange.ask)) is None:
            lacks = NoWorker("no worker came in time", retry_after=5)
        fault: Fault
        if lacks is None:
            fault = self._overloaded(waiting.tenant, waiting.level, shed)
        else:
            fault = lacks
            self._count(waiting.tenant, waiting.level, "no_worker")
        exchange.turned_away(fault)

    def _overloaded(self, tenant: str, level: int, shed: Shed) -> Overloaded:
        self._count(tenant, level, shed.reason)
        return Overloaded(WORDS[shed.reason], retry_after=shed.retry_after, reason=shed.reason)

    def _count(self, tenant: str, level: int, reason: str) -> None:
        self.gateway.metrics.queue_shed.add((tenant, self.options.priorities[level].name, reason))

    def gone(self, waiting: Waiting) -> None:
        """Its client left."""
        if waiting.queue is not None:
            waiting.queue.leave(waiting, self.gateway.clock())

    # -- learning ---------------------------------------------------------------------------------------------------

    def answered(self, exchange: Exchange, usage: Usage | None) -> None:
        """A request that left the queue is over: what was charged for it is put right by what its engine did."""
        if exchange.queued is None or usage is None:
            return
        left, exchange.queued = exchange.queued, None
        tenant, generated = exchange.ask.tenant.name, usage.completion
        more = 0.0 if generated is None else GENERATED * (generated - left.generated)
        if usage.prompt is not None and usage.cached is not None:
            more += usage.prompt - usage.cached - left.computed
        left.queue.correct(tenant, left.level, more)
        if generated is not None:
            before = self.expected(tenant)
            if tenant not in self._output and len(self._output) >= TENANTS:
                self._output.pop(next(iter(self._output)))
            self._output[tenant] = before + LEARNED * (generated - before)

    def stop(self) -> None:
        """Look no more, and tell everybody who waits that there is nobody left to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for queue in self.queues.values():
            for waiting in queue.all():
                queue.leave(waiting, self.gateway.clock())
                _exchange(waiting).turned_away(NoWorker("the gateway shuts down", retry_after=1))


def _prompt(exchange: Exchange) -> float:
    """Tokens of its prompt; where its policy does not ask for that, as many as its bytes may be."""
    tokens = exchange.ask.request.tokens
    return len(exchange.body) / BYTES_PER_TOKEN if tokens is None else tokens


def _model(ask: Ask) -> str | None:
    return None if ask.model is None else ask.model.name


def _passed(turn: Round) -> float:
    return turn.queue.passed


def _held(waiting: Waiting, targets: Collection[int]) -> float:
    holdings = _exchange(waiting).ask.request.holdings
    return max([holdings.get(target, 0) for target in targets], default=0)


def _exchange(waiting: Waiting) -> Exchange:
    exchange: Exchange = waiting.owner  # type: ignore[assignment]
    return exchange
