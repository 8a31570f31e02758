"""The composition root: the one file that knows every part.

`Gateway` joins the data plane to routing and keeps what all exchanges share. `gateway.run` starts and stops it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from math import ceil, inf
from os import urandom
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from gateway.accounts import Accounts
from gateway.admission import Admission, Options as Queueing
from gateway.arrival import Arrival
from gateway.asks import BYTES_PER_TOKEN, Ask, Options
from gateway.canonical import canonical
from gateway.config import Disaggregation
from gateway.dialects import Dialect, Reading, Route, all_dialects
from gateway.doctor import Doctor
from gateway.errors import (
    Backpressure,
    BadRequest,
    Fault,
    Forbidden,
    Internal,
    NotFound,
    Overloaded,
    RateLimited,
    WorkerFault,
    WrongMethod,
)
from gateway.exchange import SILENT, Exchange
from gateway.fleet import Fleet
from gateway.gauges import gauges
from gateway.http import wire
from gateway.http.incoming import Incoming, Shape, is_json, shown
from gateway.http.limits import Inward, Outward
from gateway.http.server import Inbound, Server
from gateway.inserts import Inserts
from gateway.lifecycle import Lifecycle
from gateway.meters import Meter, Meters
from gateway.metrics import Metrics
from gateway.opened import CLOSE, OPEN, Opened, OpenSessions
from gateway.own import MODELS, SESSIONS, Own
from gateway.pairs import Pairs
from gateway.preparing import Mode, Preparing, Unrendered, ids_of
from gateway.pressure import Limits, Pressure, Rung, logged
from gateway.records import Recorder
from gateway.roots import Roots
from gateway.routing import Routing, draw_of
from gateway.sample import Sample
from gateway.sessions import Sessions
from gateway.tenants import Tenant, Tenants
from gateway.trials import Policies
from gateway.workers import Target, Worker
from kv_index.index import PrefixIndex
from policies.base import load as load_policy

if TYPE_CHECKING:
    from gateway.requestlog import RequestLog
    from gateway.tracing import Tracer

log = logging.getLogger("warmroute")

OPAQUE = Route("passthrough", generates=False, opaque=True, methods=())
STORED = Route("stored", generates=False, opaque=True, methods=(b"GET", b"DELETE"))
STORED_CANCEL = Route("stored", generates=False, opaque=True, methods=(b"POST",))
_STORED = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel|/input_items)?")
RESERVE = 10.0
"""Retries that are allowed before there was any traffic to take a share of."""


class Gateway:
    """Everything that serves requests. Times are seconds on the loop's clock."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        metrics: Metrics,
        tenants: Tenants,
        options: Options,
        limits_in: Inward | None = None,
        limits_out: Outward | None = None,
        attempts: int = 3,
        retry_budget: float = 0.1,
        passthrough: tuple[str, ...] = (),
        isolation_key: str | None = None,
        modes: Mapping[str, Mode] | None = None,
        pairs: Disaggregation | None = None,
        tokens: bool = True,
        labels: bool = False,
        secure: bool = False,
        queueing: Queueing | None = None,
        pressure: Pressure | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = monotonic
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.metrics = metrics
        self.tenants = tenants
        self.meters = Meters()
        self.measure(tenants)
        self.admission = Admission(self, queueing or Queueing())
        self.pressure = pressure or Pressure(Limits())
        self.pressure.moved = self._pressed
        self.options = options
        self.routing = Routing(fleet, sessions, index, metrics, options)
        self.modes = dict(modes or {})
        """Model -> how token ids of its prompts are made."""
        self.pairs = Pairs(self, pairs or Disaggregation())
        self.preparing: set[Preparing] = set()
        self._relief = Policies(load_policy("session", {"fallback": "least_load"}))
        """What routes under pressure."""
        self.limits_in = limits_in or Inward()
        self.limits_out = limits_out or Outward()
        self.attempts = attempts
        self.retry_budget = retry_budget
        self.retries_left = RESERVE
        self.exchanges: set[Exchange] = set()
        self.recorder: Recorder | None = None
        self.lifecycle: Lifecycle | None = None
        """Tells engines of the ends of sessions."""
        self.opened: OpenSessions | None = None
        """Sessions that clients open on engines, where they may."""
        self.doctor: Doctor | None = None
        self.tracer: Tracer | None = None
        self.request_log: RequestLog | None = None
        self.sample: Sample | None = None
        """Keeps some of the requests that end, while somebody watches."""
        self.roots: Roots | None = None
        """Counts the starts that sessions share."""
        self.labels = labels
        """Whether engines that label their KV events are told of sessions."""
        self.tokens = tokens
        """Whether clients that name no session are given a token that does."""
        self.ending = False
        """Readiness is off: this process is on its way out."""
        self.dialects = all_dialects()
        self.fallback = self.dialects["openai"]
        self._choose(passthrough)
        self.inserts = Inserts(self, isolation_key, secure)
        self.accounts = Accounts(self)
        self.defects = 0
        self._boot = urandom(6).hex().encode()
        self._serial = count()
        self.own = Own(self)
        self._own = {b"/healthz": self.own.healthz, b"/readyz": self.own.readyz, MODELS: self.own.models}
        self.server = Server(self.serve, self._render, self.limits_in, self._count_refusal, fleet.outbox)
        self.metrics.gauges += gauges(self)
        fleet.put_out = self._put_out

    def measure(self, tenants: Tenants) -> None:
        """Give ``tenants`` their meters: those that go by a name already go on."""
        for tenant in tenants.all():
            tenant.meter = self.meters.of(tenant.name, tenant.limits)
        self.meters.keep({tenant.name for tenant in tenants.all()})

    def _choose(self, passthrough: Sequence[str]) -> None:
        """What follows from tenants and options: policies, and the paths that there are."""
        policies = [self.routing.default, *self.options.policies.values(), *self.tenants.policies()]
        self._light = not any(policy.needs_prefix or policy.needs_session for policy in policies)
        """No policy here wants prompts."""
        self.routing.tenants = {each.name: each for each in self.tenants.all()}
        self.routes: dict[bytes, tuple[Dialect, Route]] = {
            path: (dialect, route) for dialect in self.dialects.values() for path, route in dialect.routes.items()
        }
        for path in passthrough:
            self.routes.setdefault(path.encode(), (self.fallback, OPAQUE))

    def reconfigure(
        self,
        *,
        tenants: Tenants,
        options: Options,
        limits_in: Inward,
        limits_out: Outward,
        attempts: int,
        retry_budget: float,
        passthrough: Sequence[str],
        tokens: bool,
        labels: bool,
        queueing: Queueing,
        pressure: Limits,
    ) -> None:
        """Serve otherwise from here on: each request sees all of what was, or all of this. What was learned stays."""
        self.tenants = tenants
        self.measure(tenants)
        self.admission.reconfigure(queueing)
        self.pressure.limits = pressure
        self.attempts, self.retry_budget = attempts, retry_budget
        self.tokens, self.labels = tokens, labels
        self.limits_in = self.server.limits = limits_in
        self.limits_out = self.fleet.limits = limits_out
        for worker in self.fleet.workers.values():
            worker.pool.limits = limits_out
        self.routing.reconfigure(options)
        self._choose(passthrough)

    # -- requests ---------------------------------------------------------------------------------------------------

    def serve(self, incoming: Incoming, client: Inbound) -> None:
        """Take one complete request."""
        started = self.clock()
        request_id = incoming.named.get(b"x-request-id", b"")
        if not 0 < len(request_id) <= 256:
            request_id = b"%b-%x" % (self._boot, next(self._serial))
        dialect = self.fallback
        try:
            own = self._own.get(incoming.path)
            if own is None and incoming.path.startswith(b"/v1/models/"):
                own = self.own.models
            elif own is None and incoming.path.startswith(SESSIONS):
                own = self.own.end_session
            if own is not None:
                client.send(own(incoming))
                client.done()
                return
            found = self.routes.get(incoming.path) or self._stored(incoming.path)
            if self.opened is not None and incoming.path in (OPEN, CLOSE):
                self._verb(incoming, client, request_id)
                return
            if found is None:
                raise NotFound(f"there is no {shown(incoming.path)} here")
            dialect, route = found
            if route.methods and incoming.method not in route.methods:
                raise WrongMethod(shown(incoming.path), b", ".join(route.methods).decode())
            self._exchange(incoming, client, dialect, route, request_id, started)
        except Exception as error:
            self._refuse(incoming, client, dialect, request_id, error)

    def _verb(self, incoming: Incoming, client: Inbound, request_id: bytes) -> None:
        """A client opens, or closes, a session of an engine's."""
        assert self.opened is not None
        if incoming.method != b"POST":
            raise WrongMethod(shown(incoming.path), "POST")
        refuse = partial(self._refuse, incoming, client, self.dialects["sglang"], request_id)
        tenant = self.tenants.of(incoming.named, incoming.memo, incoming.peer)
        self.opened.verb(incoming, client, tenant, refuse)

    def _refuse(
        self, incoming: Incoming, client: Inbound, dialect: Dialect, request_id: bytes, error: Exception
    ) -> None:
        """The request is not taken, by its fault or, in an except block, by a defect of ours."""
        if isinstance(error, Fault):
            fault = error
            self._count_refusal(fault)
        else:
            self.defect("taking a request")
            fault = Internal("the gateway failed; its log says why")
        if self.request_log is not None:
            self.request_log.refused(request_id, incoming.path, fault.status)
        client.send(self.fault_response(dialect, fault, incoming, request_id))
        client.done()

    def _exchange(
        self, incoming: Incoming, client: Inbound, dialect: Dialect, route: Route, request_id: bytes, started: float
    ) -> None:
        tenant = self.tenants.of(incoming.named, incoming.memo, incoming.peer)
        if self.pressure.rung >= Rung.BULK:
            self._spare(tenant)
        if tenant.meter is not None:
            tenant.meter.comes(started)
        steps: tuple[str, ...] = ()
        if tenant.canonical and route.generates and not route.opaque:
            incoming.body, steps = canonical(route.kind, incoming.body, tenant.canonical)
        reading = self._read(incoming, dialect, route)
        reading.canonical = steps
        if route.kind == "stored" and self.routing.pins.find(tenant.name, reading.previous or "")[0] is None:
            raise NotFound(f"no response {reading.previous!r} is known here")
        arrival = Arrival(incoming, client, dialect, route, request_id, started, tenant, reading, self.clock())
        if reading.stateful is not None and self.opened is not None and route.generates:
            self._turn(arrival)
            return
        ids: bytes | None = None
        mode = self._mode(tenant, reading) if self.modes else None
        if mode is not None:
            made = self._start(mode, route, incoming.body, tenant, reading)
            if isinstance(made, asyncio.Future):

                def then(ids: bytes | None, reason: str) -> None:
                    if ids is None:
                        self._by_text(tenant, reading, reason)
                    try:
                        self._route(arrival, ids)
                    except Exception as error:
                        self._refuse(incoming, client, dialect, request_id, error)

                Preparing(client, made, self.preparing, then)
                return
            ids = made
        self._route(arrival, ids)

    def _spare(self, tenant: Tenant) -> None:
        """The gateway is short of time or memory. Raises `Overloaded` for whom it has none."""
        if self.pressure.rung is Rung.ALL or self.admission.levels.get(tenant.priority or "", 0):
            self.metrics.pressure_skipped.add(("request",))
            raise Overloaded("the gateway itself is under pressure", retry_after=2, reason="pressure")

    def _pressed(self, before: Rung, after: Rung, why: str) -> None:
        """A step up or down the ladder."""
        logged(before, after, why)
        self.routing.relief = self._relief if after >= Rung.PREFIX else None

    def _turn(self, arrival: Arrival) -> None:
        """A turn of a session that its client opened on an engine: it says what is new only, and goes there or nowhere."""
        assert self.opened is not None
        reading, tenant, client = arrival.reading, arrival.tenant, arrival.client
        # What it says is no prompt that any other could be compared with.
        reading.make_prompt, reading.ids = None, None

        def go(opened: Opened) -> None:
            reading.opened = opened
            self._bind_model(reading, opened, tenant)
            self._route(arrival, None)

        refuse = partial(self._refuse, arrival.incoming, client, arrival.dialect, arrival.request_id)
        self.opened.turn(reading.stateful or "", tenant, client, go, refuse)

    def _bind_model(self, reading: Reading, opened: Opened, tenant: Tenant) -> None:
        """A turn is of the model that its session's target serves. Raises `BadRequest` for another."""
        assert self.opened is not None
        worker = opened.target.worker
        if reading.model is None:
            reading.model = worker.facts.models[0].name if worker.facts.models else None
        elif not self.fleet.serves(worker, self.options.real(tenant.called(reading.model))):
            raise BadRequest(f"session id {opened.name} is not one of the model {reading.model!r}", param="model")
        if not self.opened.allowed(tenant, opened.target):
            raise Forbidden("this key may not use the model of this session", param="session_params")

    def _route(self, arrival: Arrival, ids: bytes | None) -> None:
        incoming, route, reading, tenant = arrival.incoming, arrival.route, arrival.reading, arrival.tenant
        draw, started, begun = draw_of(arrival.request_id), arrival.started, self.clock()
        ask = self.routing.ask(
            tenant, reading, incoming.named, draw, started, memo=incoming.memo, ids=ids, salt=self.inserts.salt
        )
        if self.fleet.staged and route.generates and not reading.opaque:
            ask.takes = self.pairs.takes(route.kind, incoming.body)
        ask.returns = ask.ids is not None and b'"return_token_ids"' in incoming.body
        metered = None if tenant.meter is None else self._metered(tenant.meter, ask, incoming, started)
        exchange = Exchange(self, arrival, ask, begun)
        exchange.metered = metered
        exchange.start()

    def _metered(self, meter: Meter, ask: Ask, incoming: Incoming, started: float) -> tuple[int, int, float]:
        """Count its tokens, as far as they are known, as its tenant's. Raises `RateLimited`."""
        tokens = ask.request.tokens
        if tokens is None:
            tokens = int(len(incoming.body) / BYTES_PER_TOKEN)
        computed = max(0, tokens - max(ask.request.holdings.values(), default=0))
        now = self.clock()
        try:
            meter.asks(tokens, computed, now)
        except RateLimited:
            meter.refused(started, now)
            raise
        return tokens, computed, now

    # -- token ids --------------------------------------------------------------------------------------------------

    def _mode(self, tenant: Tenant, reading: Reading) -> Mode | None:
        """How this request's token ids are made; ``None`` where nobody needs them, or the client gave them."""
        name = self._served_name(tenant, reading)
        mode = self.modes.get(name) if name is not None else None
        if mode is None or name is None or not self.routing.policies_of(tenant, name).needs_prefix:
            return None
        if self.pressure.rung >= Rung.TOKENS:
            self._by_text(tenant, reading, "pressure")
            return None
        if reading.model is not None:
            # Before anything is done for it.
            tenant.check_model(reading.model)
        return None if reading.ids is not None and reading.ids() is not None else mode

    def _served_name(self, tenant: Tenant, reading: Reading) -> str | None:
        if reading.opaque or reading.make_prompt is None:
            return None
        if reading.model is not None:
            return self.options.real(tenant.called(reading.model))
        try:
            model = self.routing.model(None)
        except Fault:
            return None
        return None if model is None else model.name

    def _start(
        self, mode: Mode, route: Route, body: bytes, tenant: Tenant, reading: Reading
    ) -> bytes | asyncio.Future[bytes] | None:
        try:
            made = mode.start(route.kind, body)
        except Unrendered as error:
            self._by_text(tenant, reading, error.reason)
            return None
        except Exception:
            self.defect("making token ids")
            self._by_text(tenant, reading, "defect")
            return None
        if made is None:
            self._by_text(tenant, reading, "dialect")
        return made

    def _by_text(self, tenant: Tenant, reading: Reading, reason: str) -> None:
        """A request of a model with a tokenizer is routed by text after all."""
        self.metrics.token_fallbacks.add((self._served_name(tenant, reading) or "", reason))

    async def ids_for(self, path: bytes, body: bytes, named: Mapping[bytes, bytes]) -> bytes | None:
        """Token ids for a dry run, if its model has a tokenizer. Raises `Fault`."""
        found = self.routes.get(path)
        if not self.modes or found is None or found[1].opaque:
            return None
        dialect, route = found
        tenant = self.tenants.of(named)
        if tenant.canonical:
            body, _ = canonical(route.kind, body, tenant.canonical)
        reading = dialect.read(route, body)
        mode = self._mode(tenant, reading)
        try:
            made = None if mode is None else mode.start(route.kind, body)
            return await ids_of(made) if isinstance(made, asyncio.Future) else made
        except Unrendered:
            return None

    def _read(self, incoming: Incoming, dialect: Dialect, route: Route) -> Reading:
        encoding = incoming.named.get(b"content-encoding")
        # Engines read a JSON body whatever the field says of it, so it has to be read here too.
        compressed = encoding is not None and not incoming.body.lstrip(b" \t\r\n").startswith(b"{")
        if route.opaque or not incoming.body or compressed:
            reading = Reading()
            reading.opaque = True
            reading.model = _multipart_model(incoming) if route.opaque else None
            if route.kind == "stored":
                reading.previous = incoming.path.split(b"/")[3].decode()
            return reading
        # What is recorded has to be read even where no policy wants it.
        recording = self.recorder is not None and not self.recorder.over
        light = self._light or self.routing.relief is not None
        return dialect.read(route, incoming.body, light and not recording)

    def dry_run(
        self, path: bytes, body: bytes, named: Mapping[bytes, bytes], draw: int, ids: bytes | None = None
    ) -> dict[str, object]:
        """What would be chosen for this body and why. Raises `Fault`; changes nothing."""
        found = self.routes.get(path)
        if found is None or found[1].opaque:
            raise NotFound(f"{shown(path)} is not a path that is routed by what it says")
        dialect, route = found
        tenant = self.tenants.of(named)
        if tenant.canonical:
            body, _ = canonical(route.kind, body, tenant.canonical)
        reading = dialect.read(route, body)
        now = self.clock()
        ask = self.routing.ask(tenant, reading, named, draw, now, ids=ids, salt=self.inserts.salt, dry=True)
        if self.fleet.staged and route.generates:
            ask.takes = self.pairs.takes(route.kind, body)
        breaks = None if self.doctor is None else self.accounts.breaks
        return self.routing.explain(ask, now, self.routing.pinned(ask, set(), now), breaks)

    def _stored(self, path: bytes) -> tuple[Dialect, Route] | None:
        """Routes below ``/v1/responses/``."""
        found = _STORED.fullmatch(path)
        return None if found is None else (self.fallback, STORED_CANCEL if found[2] == b"/cancel" else STORED)

    # -- what exchanges tell ----------------------------------------------------------------------------------------

    def label(self, target: Target) -> str:
        """Its name for metrics; one that was removed has no series any more, and gets none anew."""
        return target.name if target.id in self.fleet.targets else "removed"

    def worker_fault(self, target: Target, fault: WorkerFault) -> None:
        """A worker did wrong."""
        now = self.clock()
        self.metrics.worker_faults.add((self.label(target), type(fault).__name__.lower()))
        if self.fleet.failed(target, now):
            self.metrics.breakers.add((self.label(target),))
            log.warning("breaker of %s opened: %s", target.name, fault.message)
        self.fleet.connection_failed(target.worker, fault)

    def _put_out(self, target: Target, reason: str, spared: bool) -> None:
        """It does far worse than its peers."""
        counter = self.metrics.spared if spared else self.metrics.put_out
        counter.add((self.label(target), reason))
        log.warning(
            "%s does far worse than its peers (%s): %s",
            target.name,
            reason,
            "it stays in use, half of them are out" if spared else "it is left alone for a while",
        )

    def worker_full(self, target: Target, fault: Backpressure, now: float) -> None:
        """A worker said it is full: leave it alone for as long as it asks, or a moment."""
        self.metrics.backpressure.add((self.label(target),))
        asked = fault.retry_after
        if fault.status == 429 or asked is None:
            # A quota may be one client's alone, and nothing said is a moment's rest: neither keeps others out for long.
            self.fleet.pause(target, now + min(asked or 0.2, 2.0), firm=False)
        else:
            self.fleet.pause(target, now + min(asked, 60.0), firm=True)

    def may_retry(self, ask: Ask, tried: set[int], fault: Fault) -> bool:
        """Whether there is another target, and the retry budget (a share of the traffic) allows an attempt; takes it if so."""
        name = ask.model.name if ask.model is not None else None
        if self.retries_left < 1 or self.fleet.view(name, tried) is None:
            return False
        self.retries_left -= 1
        self.metrics.retries.add((ask.model_name, type(fault).__name__.lower()))
        return True

    def defect(self, doing: str) -> None:
        """A bug of ours, in an except block: it is logged whole and counted, and costs one request."""
        self.defects += 1
        log.exception("defect while %s", doing)

    # -- answers of our own -----------------------------------------------------------------------------------------

    def fault_response(self, dialect: Dialect, fault: Fault, incoming: Incoming, request_id: bytes) -> bytes:
        """A whole error response in the caller's dialect."""
        extra = b"x-request-id: %b\r\n" % request_id
        if fault.retry_after is not None:
            extra += b"retry-after: %d\r\n" % max(1, ceil(fault.retry_after))
        elif fault.status in (429, 503):
            extra += b"retry-after: 1\r\n"
        if isinstance(fault, WrongMethod):
            extra += b"allow: %b\r\n" % fault.allowed.encode()
        if fault.reason is not None:
            extra += b"x-warmroute-refused: %b\r\n" % fault.reason.encode()
        if fault.status == 401:
            extra += b"www-authenticate: Bearer\r\n"
        return wire.whole(fault.status, dialect.error(fault), incoming, extra)

    def _render(self, fault: Fault, path: bytes) -> bytes:
        dialect, _ = self.routes.get(path, (self.fallback, None))
        refused = Incoming(Shape(b"POST", b"/", [], False))
        refused.close = True
        extra = b"retry-after: %d\r\n" % fault.retry_after if fault.retry_after else b""
        return wire.whole(fault.status, dialect.error(fault), refused, extra)

    def _count_refusal(self, fault: Fault) -> None:
        if isinstance(fault, RateLimited):
            self.metrics.limited.add((fault.tenant, fault.limit))
        self.metrics.refused.add((str(fault.status),))

    # -- upkeep -----------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Upkeep, twice a second: deadlines, idle sessions, breakers, slow starts."""
        now = self.clock()
        self.server.sweep(now)
        self.fleet.sweep(now)
        self.sessions.sweep(now)
        self.index.sweep(now)
        self.pairs.sweep(now)
        if self.opened is not None:
            self.opened.sweep(now)
        for exchange in [e for e in self.exchanges if e.deadline < inf]:
            try:
                exchange.overdue(now)
            except Exception:
                self.defect("ending an overdue request")

    def worker_down(self, worker: Worker) -> None:
        """A worker does not answer any more: what waits for it must not wait out its own time."""
        silent = self.clock() - SILENT
        for exchange in list(self.exchanges):
            exchange.worker_down(worker, silent)

    def forget_target(self, target: int) -> None:
        """What a target held is gone."""
        self.index.emptied(target)
        self.routing.holdings.checkpoints.clear(target)
        self.sessions.unbind_all(target)


def _multipart_model(incoming: Incoming) -> str | None:
    """The ``model`` field of a multipart form, or of a JSON body that is otherwise opaque."""
    kind = incoming.named.get(b"content-type", b"")
    if kind.startswith(b"multipart/form-data"):
        at = incoming.body.find(b'name="model"')
        start = incoming.body.find(b"\r\n\r\n", at) if at >= 0 else -1
        end = incoming.body.find(b"\r\n", start + 4) if start >= 0 else -1
        if 0 <= end - start - 4 <= 256:
            return incoming.body[start + 4 : end].decode("utf-8", "replace") or None
        return None
    if is_json(incoming):
        try:
            value = msgspec.json.decode(incoming.body, type=dict[str, msgspec.Raw]).get("model")
            name = msgspec.json.decode(value) if value is not None else None
        except msgspec.DecodeError:
            return None
        return name if isinstance(name, str) else None
    return None
