"""One client request from first byte to last: choose, send, relay, settle. Retries live here.

    CHOOSING -> WAITING (sent, or connecting) -> PEEKING (a stream's head came, its first event did not) -> RELAYING -> ENDED
     |    ^      ^             |     \\-> REFUSED (an error answer is kept while others are tried)            |
     v    |      '-- retry ----+-------------------'                                                   (no way back)
    QUEUED (everybody is full)

Until RELAYING no content was written to the client, so a failure goes to another target; from then on it becomes an error
event in the client's dialect, or a cut connection where there are no events. A client that waits long for a stream may
have been sent comments before: its answer has begun (`early`), but nothing of the content, so that only the form of a
refusal changes. Everything runs in callbacks of the two connections; a task exists only while a connection is being made.

Whatever happens, `_end` runs exactly once: it releases the charge, the pin and the session, and counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from gateway.addresses import hidden, hidden_in_events
from gateway.arrival import Arrival
from gateway.asks import Ask, never
from gateway.dialects import broken
from gateway.dialects.openai import error_in
from gateway.errors import (
    Backpressure,
    Fault,
    GatewayFault,
    Internal,
    NoWorker,
    OutOfTime,
    Reset,
    ServerError,
    Stalled,
    WorkerFault,
)
from gateway.http import wire
from gateway.http.relay import Relay
from gateway.http.sse import first_event
from gateway.http.upstream import Outbound
from gateway.leg import STALE
from gateway.legs import Handed, Legs, stalled
from gateway.meters import Meter
from gateway.opened import Opened
from gateway.retold import Hiding, Tape
from gateway.workers import Charge, State, Target, Worker
from policies.admission import Waiting
from policies.base import Choice

if TYPE_CHECKING:
    from gateway.admission import Left
    from gateway.app import Gateway
    from gateway.records import Noted
    from gateway.tracing import Trace, Tracer

CHOOSING, QUEUED, WAITING, PEEKING, MERGING, REFUSED, RELAYING, ENDED = range(8)
PHASES = ("choosing", "queued", "waiting", "first_event", "waiting", "waiting", "streaming", "ended")

SILENT = 5.0
"""Seconds without a byte after which a stream of a worker that is down is given up."""
MERGED = 4 * 1024 * 1024
"""Bytes of an answer that are held to be changed as a whole."""

LAST = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")
"""What streams end with."""

UNANSWERED = frozenset((WAITING, PEEKING, MERGING, REFUSED))
"""Phases in which a worker's failure is an attempt's."""

RETRIED = frozenset((429, 500, 502, 503, 504))
"""Statuses that another worker may do better than."""


class Exchange:
    """See the module's head. Is the `Owner` of its client connection and the `Receiver` of its worker connection."""

    __slots__ = (
        "admitted",
        "alone",
        "ask",
        "asked_at",
        "attempts",
        "begun_at",
        "body",
        "bytes_in",
        "charge",
        "choice",
        "chosen_at",
        "client",
        "commented",
        "connection",
        "counted",
        "deadline",
        "dialect",
        "early",
        "events",
        "fields",
        "first_at",
        "gateway",
        "handed",
        "held",
        "incoming",
        "injected",
        "lacks",
        "last_at",
        "legs",
        "meter",
        "metered",
        "noted",
        "paused",
        "phase",
        "queued",
        "read_at",
        "reading",
        "relay",
        "request_id",
        "resent",
        "route",
        "sent_at",
        "settles",
        "started",
        "status",
        "target",
        "task",
        "trace",
        "tried",
        "turn_at",
        "until",
        "waits",
        "written_at",
    )

    def __init__(self, gateway: Gateway, arrival: Arrival, ask: Ask, begun: float) -> None:
        """``begun``: when its session and its prompt were first looked for."""
        client, incoming = arrival.client, arrival.incoming
        self.gateway = gateway
        self.client = client
        self.incoming = incoming
        self.dialect = arrival.dialect
        self.route = arrival.route
        self.reading = arrival.reading
        self.ask = ask
        self.request_id = arrival.request_id
        self.started = arrival.started
        self.read_at = arrival.read_at
        self.begun_at = begun
        self.asked_at = gateway.clock()
        """When session and prompt were found in what is known."""
        self.turn_at = self.chosen_at = self.written_at = 0.0
        """Of the first attempt: when it was its turn, when its target was chosen, when it was sent."""
        self.phase = CHOOSING
        self.tried: set[int] = set()
        self.attempts = 0
        self.resent = False
        self.trace: Trace | None = None
        """Its span, if it is traced."""
        self.settles = False
        """Its client left, and its engine is to end what it does before the session's next turn."""
        self.counted = False
        self.target: Target | None = None
        self.choice: Choice | None = None
        self.charge: Charge | None = None
        self.connection: Outbound | None = None
        self.task: asyncio.Task[None] | None = None
        self.body = incoming.body
        self.relay: Relay | None = None
        self.early: Relay | None = None
        """Made before the worker answered, to send comments."""
        self.held = b""
        """What came of an answer that is not passed on yet: a first event, an error."""
        self.fields: list[tuple[bytes, bytes]] = []
        self.status = 0
        self.events = False
        self.injected = False
        """Usage was asked for that the client did not ask for."""
        self.alone = False
        """Its time to the first event tells what its prefill costs."""
        self.paused = client.slow
        """The client does not take what there is; it may still be at the answer before this one."""
        self.bytes_in = 0
        self.sent_at = 0.0
        self.first_at = 0.0
        self.last_at = 0.0
        self.deadline = inf
        self.commented = 0.0
        self.noted: Noted | None = None
        """What will be recorded of its prompt."""
        self.legs: Legs | None = None
        """The pair that serves it, if one does."""
        self.handed: Handed | None = None
        """What a pair that failed left for the next one."""
        self.admitted = False
        """It was let in: what is sent again does not wait again."""
        self.waits: Waiting | None = None
        """Its place in the queue, while it has one."""
        self.queued: Left | None = None
        """What it was charged when it left the queue, until that is put right."""
        self.lacks: NoWorker | None = None
        """What it waits for: a worker of its model."""
        self.meter: Meter | None = None
        """Of its tenant, where it counts as running."""
        self.metered: tuple[int, int, float] | None = None
        """Prompt tokens and tokens to compute that its tenant was counted for it, where it has a limit, and when."""
        self.until = inf
        """When the time that its client gave is over."""
        client.owner = self
        ask.over = self._over
        gateway.exchanges.add(self)

    @property
    def tail(self) -> bytes:
        """The last bytes that were passed on."""
        return b"".join(self.relay.tail) if self.relay is not None else b""

    def _over(self) -> bool:
        """Whether the last event of the stream has come, though not the end of its framing."""
        relay = self.relay
        if relay is None or not self.events or not relay.tail:
            return False
        last = relay.tail[-1]
        return any(mark in last for mark in LAST)

    @property
    def first(self) -> bytes:
        """How the answer began."""
        return self.relay.first if self.relay is not None else b""

    # -- choosing and sending ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Choose and send; answers the client itself when that is not possible."""
        try:
            self.until = self.gateway.admission.patience(self, self.started)
            self._attempt()
        except Exception as error:
            self._not_sent(error)

    def wait(self, waiting: Waiting) -> None:
        """It has to wait until it is told to `leave`, or `turned_away`."""
        self.phase, self.waits = QUEUED, waiting
        # For `overdue` to come by; the deadline itself is the queue's business.
        self.deadline = waiting.deadline + SILENT

    def leave(self, now: float, full: Collection[int | None]) -> None:
        """It was its turn: choose by what is true now, none of ``full`` (ids of targets), and send."""
        self.phase, self.waits = CHOOSING, None
        self.admitted = True
        try:
            self.gateway.routing.renew(self.ask, now)
            self._attempt(full)
        except Exception as error:
            self._not_sent(error)

    def _not_sent(self, error: Exception) -> None:
        """In an except block: it was to be sent, and was not."""
        if isinstance(error, Fault):
            self._answer_fault(error)
        else:
            self._lost("choosing a target")

    def turned_away(self, fault: Fault) -> None:
        """It waited in vain."""
        self.phase, self.waits = CHOOSING, None
        self._answer_fault(fault)

    def _choose(self, now: float, full: Collection[int | None]) -> tuple[Choice, Handed | None] | None:
        """Where to send it, and what a pair that failed left for that; ``None``: it waits."""
        gateway, ask = self.gateway, self.ask
        handed, self.handed = self.handed, None
        choice = gateway.routing.pinned(ask, self.tried, now)
        if choice is not None and self.route.generates and not self.admitted:
            return None if gateway.admission.holds(self, choice, now, bound=True) else (choice, handed)
        if handed is not None:
            choice = choice or gateway.routing.other(ask, handed.prefill, self.tried, now)
        if choice is not None:
            return choice, handed
        try:
            tried = self.tried if not full else {*self.tried, *[each for each in full if each is not None]}
            choice = gateway.routing.choose(ask, tried, now)
        except NoWorker as fault:
            if self.admitted or not gateway.admission.awaits(self, fault, now):
                raise
            return None
        if not self.admitted and gateway.admission.holds(self, choice, now):
            return None
        return choice, None

    def _compare(self, choice: Choice, now: float) -> None:
        """Have the shadow asked; whatever it does, this request goes on."""
        try:
            self.gateway.routing.compare(self.ask, choice, self.tried, now)
        except NoWorker:
            pass
        except Exception:
            self.gateway.defect("asking a shadow policy")

    def _trace(self, tracer: Tracer) -> None:
        """Begin its span, if it is to have one; whatever becomes of that, this request goes on."""
        try:
            self.trace = tracer.begin(self)
        except Exception:
            self.gateway.defect("beginning a trace")

    def _admit(self) -> None:
        """It is let in."""
        self.admitted = True
        meter = self.ask.tenant.meter
        if meter is not None:
            meter.running += 1
            self.meter = meter

    def _attempt(self, full: Collection[int | None] = ()) -> None:
        gateway, ask = self.gateway, self.ask
        now = gateway.clock()
        found = self._choose(now, full)
        if found is None:
            return
        choice, handed = found
        if not self.attempts:
            self._admit()
            if ask.shadowed is not None:
                self._compare(choice, now)
        ask.request.queued = 0.0
        target = choice.target
        assert isinstance(target, Target)
        gateway.routing.commit(ask, target, choice, now)
        self.choice, self.target = choice, target
        tokens = ask.request.tokens or 0
        held = ask.context
        paired = choice.prefill is not None
        self.charge = gateway.fleet.dispatch(target, tokens - held, held, self.reading.stream, not paired)
        self.attempts += 1
        if self.attempts == 1:
            self.turn_at, self.chosen_at = now, gateway.clock()
            if gateway.tracer is not None and not gateway.pressure.rung:
                self._trace(gateway.tracer)
        self.sent_at = now
        self.phase = WAITING
        self.deadline = min(now + gateway.limits_out.first_byte_seconds, self.until)
        self.fields, self.status, self.first_at = [], 0, 0.0
        if not paired:
            self.open()
            return
        self.legs = legs = gateway.pairs.legs(self, choice, handed)
        try:
            legs.begin(tokens)
        except WorkerFault as fault:
            # Its prefill engine lacks what the protocol needs of it.
            self._failed(fault, legs.prefill)

    def open(self) -> None:
        """Send it to its target, over a connection that is there or is made."""
        target = self.target
        assert target is not None
        if self.legs is not None:
            self.deadline = min(self.gateway.clock() + self.gateway.limits_out.first_byte_seconds, self.until)
            if self.charge is not None and not self.reading.stream:
                # Nothing will tell when it begins to generate.
                self.gateway.fleet.first_byte(self.charge)
        connection = target.worker.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self.task = self.gateway.loop.create_task(self._connect())

    async def _connect(self) -> None:
        target = self.target
        assert target is not None
        try:
            connection = await target.worker.pool.connect()
        except (WorkerFault, GatewayFault) as fault:
            self.task = None
            if self.phase == WAITING:
                self._failed(fault)
            return
        except Exception:
            self.task = None
            self.gateway.defect("connecting to a worker")
            if self.phase == WAITING:
                self._failed(Internal("the gateway failed; its log says why"))
            return
        self.task = None
        if self.phase != WAITING:
            connection.close()
            return
        if target.worker.state is State.DOWN:
            connection.close()
            self._failed(Reset("the worker went down"))
            return
        try:
            self._send(connection)
        except Fault as fault:
            self._answer_fault(fault)
        except Exception:
            self.gateway.defect("sending a request")
            self._answer_fault(Internal("the gateway failed; its log says why"))

    def _send(self, connection: Outbound) -> None:
        target = self.target
        assert target is not None
        self.connection = connection
        self.sent_at = self.gateway.clock()
        if self.paused:
            connection.slow()
        if self.legs is None:
            body = self.gateway.inserts.body_for(self, target)
        else:
            body = self.legs.decode_body
            self.legs.decode_sent = True
        head = wire.request_head(
            self.incoming,
            target.worker.base,
            target.worker.authority.encode(),
            len(body),
            self.request_id,
            target.worker.spec.api_key,
            self.gateway.tenants.keyed,
            target.rank if len(target.worker.targets) > 1 else None,
            self.gateway.inserts.lines(self, target),
            self.trace is not None,
        )
        try:
            connection.request(self, head, body)
        except Exception:
            connection.close()
            raise
        if not self.counted:
            self.counted = True
            self.gateway.accounts.sent(self)

    # -- what the worker says ---------------------------------------------------------------------------------------

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Final status and fields of the worker's answer."""
        self.status, self.fields = status, fields
        self.last_at = self.gateway.clock()
        target = self.target
        assert target is not None
        hides = status >= 400 and self.ask.tenant.hides_addresses
        if hides or status in RETRIED or (status in (401, 403) and target.worker.spec.api_key is not None):
            self.phase = REFUSED
            if self.incoming.method == b"HEAD" and self.connection is not None:
                self.connection.finish_bodyless()
            return
        kind, length = wire.content_of(fields)
        self.events = kind.startswith(b"text/event-stream") and status < 300 and status != 204
        if self.events and self.incoming.method != b"HEAD":
            self.phase = PEEKING
        elif self.early is not None:
            # The client has the head of a stream already: this can only be told as an event.
            self.phase = REFUSED
        elif self.legs is not None and self.legs.rewrites and status < 300:
            self.phase = MERGING
        else:
            self._begin_answer(length)
            if self.incoming.method == b"HEAD" and self.connection is not None:
                self.connection.finish_bodyless()

    def _begin_answer(self, length: bytes | None) -> Relay:
        """From here on the client has an answer: there is no other attempt."""
        self.phase = RELAYING
        self.gateway.accounts.examining(self)
        # Nothing is sent again from here on: a long stream does not keep its prompt in memory.
        self.body = self.incoming.body = b""
        self.client.body_gone()
        self.gateway.accounts.begun(self)
        if self.legs is not None:
            self.legs.begun()
        if self.early is None:
            self.relay = self._make_relay(self.status, self.fields, length, self.events)
        elif self.legs is None and type(self.early) is Relay:
            self.relay = self.early
        else:
            # Comments were sent for another attempt, whose answer would have been passed on otherwise.
            self.relay = self._make_relay(self.status, self.fields, length, self.events)
            self.relay.follow(self.early)
            self.early = self.relay
        self.relay.unasked = self.injected and self.events
        if isinstance(self.relay, Hiding):
            self.relay.unasked = True
            if self.legs is not None and self.legs.tells_ids:
                self.relay.tail = Tape()
        if self.events and self.ask.tenant.hides_addresses:
            self.relay.usage = self.relay.usage and self.relay.unasked
            self.relay.unasked = True
            self.relay.veil = partial(hidden_in_events, workers=self.gateway.fleet.workers.values())
        self.fields = []
        if self.charge is not None and not self.events:
            self.first_at = self.last_at
            self.gateway.fleet.first_byte(self.charge)
            took = self.first_at - self.sent_at
            if took < self.charge.expected:
                # All of it took less than its prompt alone was expected to.
                self.charge.target.began(took, self.charge.expected)
        return self.relay

    def _make_relay(self, status: int, fields: list[tuple[bytes, bytes]], length: bytes | None, events: bool) -> Relay:
        incoming = self.incoming
        sized = length is not None or status in (204, 304)
        if incoming.old and not sized:
            incoming.close = True
        told = self.gateway.inserts.told(self)
        head = wire.response_head(status, fields, length, events, incoming, told, self.request_id)
        most = self.gateway.limits_out.held
        kind = Relay if self.legs is None or not events else self.legs.relay()
        return kind(self.client, incoming, head, events=events, sized=sized, most=most)

    def response_data(self, data: bytes) -> None:
        """Payload of the worker's answer."""
        self.last_at = self.gateway.clock()
        if self.relay is not None:
            self.relay.data(data)
        elif self.phase == PEEKING:
            self._peek(data)
        elif self.phase == MERGING:
            self.held += data
            if len(self.held) > MERGED:
                # Too much to be kept for that: it is passed on as it is.
                held, self.held = self.held, b""
                self._begin_answer(wire.content_of(self.fields)[1]).data(held)
        elif self.phase == REFUSED:
            self.bytes_in += len(data)
            if self.bytes_in <= self.gateway.limits_out.error_body:
                self.held += data

    def _peek(self, data: bytes) -> None:
        """Hold a stream until its first event shows whether the engine has begun."""
        self.held += data
        # An engine that gets KV from another opens its stream before it has it.
        brought = self.legs is not None or bool(self.ask.request.fetched)
        event = first_event(self.held, self.dialect.opens if brought else None)
        if event is None and len(self.held) <= self.gateway.limits_out.held:
            return
        failure = self.dialect.failure(event) if event is not None else None
        if failure is not None and (failure[0] >= 500 or failure[0] == 429):
            status, message = failure[0], self._veiled(failure[1])
            fault: Fault
            if status in (429, 503):
                fault = Backpressure(message or "the worker is full", retry_after=1)
            else:
                fault = ServerError(message or "the worker failed before it began")
            self._drop_connection()
            self._failed(fault)
            return
        if not self.first_at:
            self.first_at = self.last_at
            if self.charge is not None:
                self.gateway.accounts.first_event(self, self.charge)
        if self.legs is not None and self.legs.merges and self.legs.waits:
            # What it lacks comes from the prefill engine, which is about to end; see `prefill_answered`.
            if self.connection is not None:
                self.connection.slow()
            return
        held, self.held = self.held, b""
        self._begin_answer(None).data(held)

    def prefill_answered(self) -> None:
        """The prefill engine's answer is complete, for one that waits for what it says."""
        if self.phase == PEEKING and self.held:
            if self.connection is not None and not self.paused:
                self.connection.ready()
            self._peek(b"")
            if self.relay is not None and self.connection is None:
                self.relay.finish()
                self._complete()
        elif self.phase == MERGING and self.connection is None:
            self._merge()

    def _merge(self) -> None:
        """All that the client's answer is made of is complete."""
        legs = self.legs
        assert legs is not None
        body, self.held = legs.rewritten(self.held), b""
        self.fields = [(name, value) for name, value in self.fields if name.lower() != b"content-length"]
        relay = self._begin_answer(b"%d" % len(body))
        relay.data(body)
        relay.finish()
        self._complete()

    def response_end(self) -> None:
        """The worker's answer is complete."""
        connection, self.connection = self.connection, None
        if self.paused and connection is not None:
            # It goes back to the pool, where it must see the worker close, and then the next answer.
            connection.ready()
        if self.phase == REFUSED:
            self._refused()
        elif self.phase == PEEKING:
            if not (self.first_at and self.legs is not None and self.legs.merges and self.legs.waits):
                self._failed(ServerError("the worker ended its stream before the first event"))
        elif self.phase == MERGING:
            if self.legs is None or not (self.legs.merges and self.legs.waits):
                self._merge()
        elif self.relay is not None:
            self.relay.finish()
            self._complete()
        elif connection is not None:
            connection.close()

    def _complete(self) -> None:
        target = self.target
        assert target is not None
        ended = broken(self.dialect, self.tail) if self.events else None
        broke = None if ended is None else ended[0]
        if broke is not None and broke >= 500 and broke != 503:
            self.gateway.worker_fault(target, ServerError("error event in a stream"))
        elif broke is None and self.status < 400:
            self.gateway.fleet.succeeded(target, self.charge)
        outcome = "stream_error" if broke is not None else "ok" if self.status < 400 else "client_error"
        client = self.client
        self._end(outcome)
        client.done()

    def response_failed(self, fault: WorkerFault) -> None:
        """The worker's answer will not be completed."""
        connection, self.connection = self.connection, None
        stale = connection is not None and not connection.fresh and not connection.answered
        soon = self.gateway.clock() - self.sent_at < STALE
        once = self.legs is not None and self.legs.sequential
        if self.phase == WAITING and stale and soon and not self.resent and not once:
            # Closed by the worker while idle, before it saw our request: that is no attempt.
            self.resent = True
            assert self.target is not None
            self.gateway.metrics.resends.add((self.gateway.label(self.target),))
            self.task = self.gateway.loop.create_task(self._connect())
            return
        self._failed(fault)

    def worker_slow(self) -> None:
        """The worker takes our request slowly: it is bounded and in memory already, nothing to hold back."""

    def _withdraw(self) -> bool:
        """The attempt under way did not come to anything: give back what it took. False if there is none."""
        legs, self.legs = self.legs, None
        if legs is not None:
            legs.end()
        charge, self.charge = self.charge, None
        if charge is None:
            return False
        self.gateway.fleet.release(charge)
        self.gateway.routing.undo(self.ask, charge.target)
        return True

    # -- failing ----------------------------------------------------------------------------------------------------

    def _refused(self, by: Target | None = None) -> None:
        """A complete error answer: try elsewhere, or pass it on as it is. ``by``: whose, if not the target's."""
        retry_after = wire.retry_after(self.fields)
        whose = by or self.target
        credential = self.status in (401, 403) and whose is not None and whose.worker.spec.api_key is not None
        if self.status not in RETRIED and not credential:
            self._pass_on_error()
        elif self.status in (429, 503):
            full = Backpressure("the worker is full", retry_after=retry_after)
            full.status = self.status
            self._failed(full, by)
        elif credential:
            self._failed(ServerError("the worker refused the gateway's credential"), by)
        else:
            self._failed(ServerError(f"the worker answered {self.status}"), by)

    def _failed(self, fault: Fault, by: Target | None = None) -> None:
        """An attempt failed, or a stream broke. ``by``: whose failure it is, if not the target's."""
        gateway, target = self.gateway, by or self.target
        assert target is not None
        now = gateway.clock()
        guilty: Target | None = target
        legs, phase = self.legs, self.phase
        if legs is not None and phase != RELAYING:
            guilty = self._pair_failed(legs, fault, target, now)
        # The worker may be down now, which is told to all that wait for it: this one does not any more.
        self.phase = CHOOSING
        if guilty is None:
            pass
        elif isinstance(fault, WorkerFault):
            gateway.worker_fault(guilty, fault)
        elif isinstance(fault, Backpressure):
            gateway.worker_full(guilty, fault, now)
        if phase == RELAYING:
            self.phase = phase
            self._break(fault)
            return
        # An error answer that broke off is none to pass on.
        refused = phase == REFUSED and isinstance(fault, (Backpressure, ServerError))
        if self.trace is not None:
            self.trace.failed(target, fault)
        self._withdraw()
        self.ask.request.fetched = {}
        if legs is None:
            self.tried.add(target.id)
        if self.attempts < gateway.attempts and gateway.may_retry(self.ask, self.tried, fault):
            held, fields, status = self.held, self.fields, self.status
            self.held, self.bytes_in = b"", 0
            try:
                self._attempt()
                return
            except NoWorker:
                self.held, self.fields, self.status = held, fields, status
            except Fault as other:
                fault = other
                self.held, self.fields, self.status = held, fields, status
                self._withdraw()
            except Exception:
                gateway.defect("choosing another target")
                self.held, self.fields, self.status = held, fields, status
                self._withdraw()
        if self.bytes_in > gateway.limits_out.error_body:
            # Too much to keep, and part of an answer is no answer.
            refused = False
        if (refused and target.worker.spec.api_key is None) or (refused and self.status not in (401, 403)):
            self._pass_on_error()
        else:
            self._answer_fault(fault)

    def _pass_on_error(self) -> None:
        """The worker's own error answer, unchanged unless addresses are hidden."""
        hides = self.ask.tenant.hides_addresses
        if self.early is not None or (hides and self._unreadable()):
            told = error_in(self.held)
            fault = Fault(self._veiled(told[1]) if told else f"the worker answered {self.status}")
            fault.status = self.status
            self._answer_fault(fault)
            return
        body = self.held
        if hides:
            body = hidden(body, self.gateway.fleet.workers.values())
        length = b"%d" % len(body)
        head = wire.response_head(
            self.status, self.fields, length, False, self.incoming, self.gateway.inserts.told(self), self.request_id
        )
        self.client.send(head + (b"" if self.incoming.method == b"HEAD" else body))
        client = self.client
        self._end("worker_error" if self.status in RETRIED or self.status in (401, 403) else "client_error")
        client.done()

    def _unreadable(self) -> bool:
        """Whether what it says of an error is compressed, or not all there."""
        coded = any(name.lower() == b"content-encoding" and value != b"identity" for name, value in self.fields)
        return coded or self.bytes_in > self.gateway.limits_out.error_body

    def _veiled(self, message: str) -> str:
        """What an engine said of an error, as this tenant may read it."""
        if not self.ask.tenant.hides_addresses:
            return message
        return hidden(message.encode("utf-8", "replace"), self.gateway.fleet.workers.values()).decode()

    def _break(self, fault: Fault) -> None:
        """The client has part of an answer: tell it that there will be no rest."""
        client, relay = self.client, self.relay
        assert relay is not None
        if relay.events:
            relay.fail(self.dialect.error_event(fault, self.route))
            self._end("stream_error")
            client.done()
        elif relay.untouched:
            self._answer_fault(fault)
        else:
            self._end("stream_error")
            client.abort()

    def _answer_fault(self, fault: Fault) -> None:
        client = self.client
        self._drop_connection()
        if self.phase < RELAYING:
            self._withdraw()
        if self.early is not None:
            self.early.fail(self.dialect.error_event(fault, self.route))
        else:
            client.send(self.gateway.fault_response(self.dialect, fault, self.incoming, self.request_id))
        self._end(
            "timeout"
            if isinstance(fault, OutOfTime)
            else "refused"
            if fault.status < 500
            else "no_worker"
            if isinstance(fault, GatewayFault)
            else "worker_error"
        )
        client.done()

    # -- a pair -----------------------------------------------------------------------------------------------------

    def _pair_failed(self, legs: Legs, fault: Fault, by: Target, now: float) -> Target | None:
        """One of a pair failed, ``by`` as it seems: what the next attempt does without, and what it need not do again.

        Returns whose fault it is; ``None`` if that cannot be told yet.
        """
        gateway = self.gateway
        told = error_in(self.held) if self.phase == REFUSED else None
        guilty = gateway.pairs.failed(legs, fault, by, told[1] if told else fault.message)
        if guilty is legs.decode:
            self.handed = legs.handed(now)
        if guilty is not None:
            self.tried.add(guilty.id)
            return guilty
        if legs.pair.lent is not None and by is legs.prefill:
            # What it was to fetch cannot be had, and is not asked for again: it may well compute the prompt.
            self.ask.request.lent = 0
            return None
        # It failed between the two. With another decode engine the prompt need not be computed again, and what comes of that
        # tells whose fault it was; where there is none, it is done without the prefill engine.
        partner = gateway.routing.other(self.ask, legs.prefill, {*self.tried, legs.decode.id}, now)
        self.tried.add(legs.prefill.id if partner is None else legs.decode.id)
        return None

    def prefill_refused(self, status: int, fields: list[tuple[bytes, bytes]], body: bytes) -> None:
        """The prefill engine answered with an error: that is the answer, unless another pair does better."""
        legs = self.legs
        if legs is None:
            return
        if self.phase not in UNANSWERED:
            legs.release()
            return
        self._drop_connection()
        self.phase, self.status, self.fields = REFUSED, status, fields
        self.held, self.bytes_in = body, len(body)
        try:
            if status in (401, 403) and legs.prefill.worker.spec.api_key is None:
                # The credential was the client's.
                self._pass_on_error()
            else:
                self._refused(legs.prefill)
        except Exception:
            self._lost("a prefill worker's refusal")

    def prefill_failed(self, fault: Fault) -> None:
        """The prefill engine will not answer."""
        legs = self.legs
        if legs is None:
            return
        if self.phase not in UNANSWERED:
            # The decode engine has what it needs, or fails by itself.
            legs.release()
            return
        self._drop_connection()
        self.held, self.bytes_in = b"", 0
        self.phase = WAITING
        try:
            self._failed(fault, legs.prefill)
        except Exception:
            self._lost("a prefill worker's failure")

    def _lost(self, doing: str) -> None:
        """In an except block."""
        self.gateway.defect(doing)
        if self.phase != ENDED:
            self._answer_fault(Internal("the gateway failed; its log says why"))

    # -- what the client does ---------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client left: the worker's work for it is aborted."""
        if self.phase == ENDED:
            return
        self.gateway.metrics.aborts.add((PHASES[self.phase],))
        self._settle()
        self._drop_connection()
        if self.phase < RELAYING and self._withdraw():
            self.target = None
        self._end("client_gone")

    def _settle(self) -> None:
        """A turn of a session that takes one at a time: see `gateway.opened`."""
        opened, connection = self.reading.opened, self.connection
        if isinstance(opened, Opened) and opened.streaming and connection is not None and connection.reusable:
            assert self.gateway.opened is not None
            self.connection, self.settles = None, True
            self.gateway.opened.settle(opened, connection, self.reading.named or self.request_name)

    @property
    def request_name(self) -> str:
        """By which its engine knows it, where the client gave it no name."""
        return f"wr-{self.ask.request.draw:016x}-{self.attempts}"

    def worker_down(self, worker: Worker, silent: float) -> None:
        """``worker`` is down: give up on it, unless a byte came after ``silent``."""
        if self.legs is not None:
            self.legs.worker_down(worker)
        if self.target is None or self.target.worker is not worker:
            return
        if self.legs is not None and self.legs.before_decode:
            if self.legs.pair.lent is not None:
                # The other waits for what it was to hand back.
                self.prefill_failed(Stalled("the worker that was to hand KV back went down"))
            # Else it has no part in it yet: what the other computes goes to somebody else then.
            return
        if self.phase in UNANSWERED or (self.phase == RELAYING and self.last_at < silent):
            self._drop_connection()
            self._failed(Reset("the worker went down"))

    def client_slow(self) -> None:
        """Stop the worker."""
        self.paused = True
        if self.connection is not None:
            self.connection.slow()

    def client_ready(self) -> None:
        """Go on."""
        self.paused = False
        self.last_at = self.gateway.clock()
        if self.connection is not None:
            self.connection.ready()

    # -- time -------------------------------------------------------------------------------------------------------

    def overdue(self, now: float) -> None:
        """Called by the sweep: give up on a worker that does not answer, or stopped."""
        if self.phase == RELAYING:
            # A client that does not read has its own limit.
            patience = self.gateway.limits_out.idle_seconds
            if self.target is not None and self.target.worker.state is State.DOWN:
                patience = min(patience, SILENT)
            if self.paused or now - self.last_at < patience:
                return
            fault: Fault = Stalled("the worker stopped answering")
        elif self.legs is not None and self.legs.overdue(now) and self.phase < RELAYING:
            self.prefill_failed(stalled())
            return
        elif self.phase == QUEUED and now > self.deadline and self.waits is not None:
            self.gateway.admission.gone(self.waits)
            self.turned_away(OutOfTime("the gateway did not come round to it in time"))
            return
        elif self.phase in UNANSWERED and now > self.until:
            self._answer_fault(OutOfTime("no answer had begun within the time that x-request-timeout gives"))
            return
        elif self.phase in UNANSWERED and now > self.deadline:
            fault = Stalled("the worker did not answer in time")
        else:
            self._keep_waiting(now)
            return
        self._drop_connection()
        self._failed(fault)

    def _keep_waiting(self, now: float) -> None:
        """Send a comment to a client that has waited for its stream for long, if that is configured."""
        pause = self.gateway.limits_in.comment_seconds
        if pause is None or not self.reading.stream or self.phase not in (QUEUED, WAITING, PEEKING) or self.paused:
            return
        if now - max(self.commented, self.started) < pause:
            return
        self.commented = now
        if self.early is None:
            kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
            self.early = self._make_relay(200, kind, None, True)
        self.early.comment()

    # -- ending -----------------------------------------------------------------------------------------------------

    def _drop_connection(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        task, self.task = self.task, None
        if task is not None:
            task.cancel()

    def _end(self, outcome: str) -> None:
        if self.phase == ENDED:
            return
        streaming = self.phase == RELAYING
        self.phase = ENDED
        # Each would keep the other until garbage is collected.
        self.ask.over = never
        self.gateway.exchanges.discard(self)
        if self.waits is not None:
            self.gateway.admission.gone(self.waits)
            self.waits = None
        if self.meter is not None:
            self.meter.running -= 1
        if not streaming:
            # Whatever was committed for it did not come to an answer.
            self._withdraw()
        if self.charge is not None:
            self.gateway.fleet.release(self.charge)
            self.charge = None
        legs = self.legs
        if legs is not None:
            legs.end(outcome == "ok")
        usage = None
        if streaming and outcome in ("ok", "stream_error") and self.route.generates:
            usage = self.dialect.usage(self.tail, self.events)
        try:
            self.gateway.accounts.ended(self, outcome, usage, streaming)
        except Exception:
            self.gateway.defect("accounting for a request")
        self.gateway.admission.wake()
        self.relay = self.early = None
        self.body = b""
        self.incoming.body = b""
