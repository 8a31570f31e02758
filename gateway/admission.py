"""The queue in front of the fleet: off the path while any target can take a request.

A request whose chosen target is not full goes on at once; so does one whose policy prefers a full target to free ones (a
session that waits for its home: the policy has priced that). Only when everybody who could serve it is full, or others wait
already, or its tenant has as many running as it may, it becomes one that waits. It is routed when it leaves, by what is true
then. Who goes next, and who is turned away, is decided in `policies.admission`.

What leaves is looked for whenever an answer begins or ends, and every `PUMP` seconds, while anybody waits.
"""

from __future__ import annotations

import re
from asyncio import TimerHandle
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from gateway.asks import Ask
from gateway.dialects import Usage
from gateway.errors import BadRequest, Fault, NoWorker, Overloaded
from policies.admission import GENERATED, Bounds, Held, Priority, Queue, Shed, Waiting, full, taken
from policies.base import Choice, Fleet as View, Target as Seen
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
LONGEST = 86_400.0
"""Seconds that a client may give."""
_TIMEOUT = re.compile(rb"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h)?")
_UNITS = {b"ms": 1e-3, b"s": 1.0, b"m": 60.0, b"h": 3600.0, None: 1.0}

WORDS = {
    "queue_full": "too many requests wait already",
    "level_full": "too many requests of this priority wait already",
    "tenant_full": "too many requests of this key wait already",
    "too_long": "the fleet is busy: it would not be served in time",
    "deadline": "the fleet is busy: it was not served in time",
    "displaced": "the fleet is busy, and requests of a higher priority came",
    "pressure": "the gateway itself is under pressure",
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


class Admission:
    """See the module's head."""

    def __init__(self, gateway: Gateway, options: Options) -> None:
        self.gateway = gateway
        self.options = options
        self.levels = {priority.name: place for place, priority in enumerate(options.priorities)}
        self.held = Held()
        self.queues: dict[str, Queue] = {}
        """Model -> those that wait for it; as many as there are models."""
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
        told = named.get(b"x-request-timeout")
        if told is None:
            return inf
        found = _TIMEOUT.fullmatch(told.strip())
        seconds = float(found[1]) * _UNITS[found[2]] if found is not None else 0.0
        if not 0 < seconds <= LONGEST:
            raise BadRequest(
                f"x-request-timeout must be seconds above 0, at most {LONGEST:.0f}, like 30, 2.5s or 500ms",
                param="x-request-timeout",
            )
        return now + seconds

    def level(self, exchange: Exchange) -> int:
        """Place of its priority: its tenant's, or a lower one that it names itself. Raises `BadRequest`."""
        place = self.levels.get(exchange.ask.tenant.priority or "", 0)
        told = exchange.incoming.named.get(b"x-warmroute-priority")
        if told is None:
            return place
        named = self.levels.get(told.decode("latin-1"))
        if named is None:
            raise BadRequest(
                f"x-warmroute-priority must be one of {', '.join(self.levels)}", param="x-warmroute-priority"
            )
        return max(place, named)

    def holds(self, exchange: Exchange, choice: Choice, now: float) -> bool:
        """Whether it has to wait, and does so now. Raises `Overloaded` if it is turned away."""
        meter = exchange.ask.tenant.meter
        free = meter is None or meter.free
        if free and not self.held.requests and not self._full(choice, now):
            return False
        name = _name(exchange.ask)
        queue = self.queues.get(name)
        if free and not (queue is not None and len(queue)):
            view = self.gateway.fleet.view(name or None)
            if view is None or self._free(view, now):
                return False
        self._wait(exchange, _computed(exchange.ask, choice), now, inf)
        return True

    def caps(self, exchange: Exchange, choice: Choice, now: float) -> bool:
        """Whether one that can go to ``choice`` only has to wait because its tenant has as many running as it may, and does so
        now. Raises `Overloaded`."""
        meter = exchange.ask.tenant.meter
        if meter is None or meter.free:
            return False
        self._wait(exchange, _computed(exchange.ask, choice), now, inf)
        return True

    def awaits(self, exchange: Exchange, fault: NoWorker, now: float) -> bool:
        """Nobody can serve it now: whether it waits for somebody who will. Raises `Overloaded`."""
        if self.options.hold <= 0 or not self._hopes(exchange):
            return False
        self._wait(exchange, exchange.ask.request.tokens or 0, now, now + self.options.hold)
        exchange.lacks = fault
        return True

    def _hopes(self, exchange: Exchange) -> bool:
        """Whether there are workers that may serve it once they are ready again."""
        model = exchange.ask.model
        fleet = self.gateway.fleet
        return any(fleet.serves(worker, None if model is None else model.name) for worker in fleet.workers.values())

    def _wait(self, exchange: Exchange, computed: float, now: float, until: float) -> None:
        tenant = exchange.ask.tenant
        level = self.level(exchange)
        priority = self.options.priorities[level]
        deadline = min(now + priority.deadline, exchange.until, until)
        waiting = Waiting(
            tenant.name,
            level,
            max(1.0, computed),
            self.expected(tenant.name),
            len(exchange.body),
            now,
            deadline,
            exchange,
            home=self._home(exchange.ask),
            weight=tenant.weight,
        )
        name = _name(exchange.ask)
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = Queue(self.options.priorities, self.options.bounds, self.held)
        shed, displaced = queue.offer(waiting, now)
        for each in displaced:
            self._turn_away(each, Shed("displaced", 1.0), now)
        if shed is not None:
            raise self._overloaded(tenant.name, level, shed)
        exchange.wait(waiting)
        self._watch()
        # It may belong to a target that is free.
        self.wake()

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

    def _free(self, view: View, now: float) -> list[Seen]:
        """Targets that can take a prompt now; none where those that would go on from it are all full."""
        ahead = self.options.ahead
        free = [target for target in view.targets if not full(target, ahead, now)]
        if view.prefill is None or not free:
            return free
        return [target for target in view.prefill.targets if not full(target, ahead, now)]

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
        try:
            now = self.gateway.clock()
            for name, queue in list(self.queues.items()):
                if len(queue):
                    for waiting, shed in queue.expired(now):
                        self._turn_away(waiting, shed, now)
                    self._send(name, queue, now)
        except Exception:
            self.gateway.defect("sending what waits")
        if self.held.requests:
            self._watch()

    def _send(self, name: str, queue: Queue, now: float) -> None:
        view = self.gateway.fleet.view(name or None)
        if view is None:
            return
        free = {target.id: target for target in self._free(view, now)}

        def score(waiting: Waiting) -> float:
            holdings = _exchange(waiting).ask.request.holdings
            return max([holdings.get(target, 0) for target in free], default=0)

        def moves(waiting: Waiting, ahead: float) -> bool:
            return self._moves(waiting, ahead, now)

        known = (view.prefill or view).positions
        busy: set[int | None] = {target for target in known if target not in free}
        for _ in range(BATCH):
            waiting = queue.take(now, free, known, may=self._may, score=score, moves=moves)
            if waiting is None:
                return
            target = self._go(queue, waiting, busy, now)
            if target is not None and full(target, self.options.ahead, now):
                free.pop(target.id, None)
                busy.add(target.id)

    def _moves(self, waiting: Waiting, ahead: float, now: float) -> bool:
        """Whether its policy would have it leave its home, where so many tokens wait to be computed before it."""
        exchange = _exchange(waiting)
        ask, routing = exchange.ask, self.gateway.routing
        home = self.gateway.fleet.targets.get(waiting.home if waiting.home is not None else -1)
        if home is None:
            return True
        routing.renew(ask, now)
        ask.request.queued = home.rates.prefill(ahead, 0)
        try:
            choice = routing.choose(ask, exchange.tried, now)
        except Fault:
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
        ask = exchange.ask
        exchange.leave(now, self._shut(ask, full_ones))
        if exchange.charge is None:
            return None
        expected = self.expected(waiting.tenant)
        queue.charge(waiting, max(0, (ask.request.tokens or 0) - ask.context), expected, now)
        exchange.queued = (queue, waiting.level, expected)
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

    def _turn_away(self, waiting: Waiting, shed: Shed, now: float) -> None:
        exchange = _exchange(waiting)
        lacks = exchange.lacks
        if lacks is None and shed.reason == "deadline" and self.gateway.fleet.view(_name(exchange.ask) or None) is None:
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

    def gone(self, waiting: Waiting, ask: Ask) -> None:
        """Its client left."""
        queue = self.queues.get(_name(ask))
        if queue is not None:
            queue.leave(waiting, self.gateway.clock())

    # -- learning ---------------------------------------------------------------------------------------------------

    def answered(self, exchange: Exchange, usage: Usage | None) -> None:
        """A request that left the queue is over: what was charged for it is put right by what its engine did."""
        if exchange.queued is None or usage is None:
            return
        (queue, level, expected), exchange.queued = exchange.queued, None
        ask, tenant, generated = exchange.ask, exchange.ask.tenant.name, usage.completion
        more = 0.0 if generated is None else GENERATED * (generated - expected)
        if usage.prompt is not None and usage.cached is not None:
            more += usage.prompt - usage.cached - max(0, (ask.request.tokens or 0) - ask.context)
        queue.correct(tenant, level, more)
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


def _name(ask: Ask) -> str:
    """Of its queue."""
    return "" if ask.model is None else ask.model.name


def _computed(ask: Ask, choice: Choice) -> float:
    """Prompt tokens that would be computed where it would go now."""
    return (ask.request.tokens or 0) - ask.request.holdings.get((choice.prefill or choice.target).id, 0)


def _exchange(waiting: Waiting) -> Exchange:
    exchange: Exchange = waiting.owner  # type: ignore[assignment]
    return exchange
