"""The composition root: the one file that knows every part.

`Gateway` joins the data plane to routing and keeps what all exchanges share. `gateway.run` starts and stops it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from hashlib import blake2b
from itertools import count
from math import inf
from os import urandom
from time import monotonic
from urllib.parse import unquote, unquote_to_bytes

import msgspec
from xxhash import xxh3_128_digest

from gateway.asks import Ask, Options
from gateway.canonical import canonical
from gateway.config import Disaggregation
from gateway.dialects import Dialect, Reading, Route, Usage, all_dialects
from gateway.dialects.chat import answered_ids
from gateway.dialects.fields import append, splice
from gateway.doctor import Doctor, Note
from gateway.errors import (
    Backpressure,
    BadRequest,
    Fault,
    Internal,
    NotFound,
    NoWorker,
    WorkerFault,
    WrongMethod,
)
from gateway.exchange import SILENT, Exchange
from gateway.fleet import Fleet
from gateway.gauges import gauges
from gateway.hints import able
from gateway.http import wire
from gateway.http.incoming import Incoming, Shape
from gateway.http.limits import Inward, Outward
from gateway.http.server import Inbound, Server
from gateway.lifecycle import Lifecycle
from gateway.listing import models, models_body
from gateway.metrics import Metrics, Tally
from gateway.naming import LONGEST, clean
from gateway.opened import CLOSE, OPEN, Opened, OpenSessions
from gateway.pairs import Pairs
from gateway.preparing import Mode, Preparing, Unrendered, ids_of
from gateway.records import Recorder
from gateway.roots import Roots
from gateway.routing import Routing, draw_of
from gateway.sessions import Session, Sessions
from gateway.tenants import Tenant, Tenants
from gateway.workers import Charge, State, Target, Worker
from kv_index.index import PrefixIndex
from policies.base import Choice, Role

log = logging.getLogger("warmroute")

OPAQUE = Route("passthrough", generates=False, opaque=True, methods=())
STORED = Route("stored", generates=False, opaque=True, methods=(b"GET", b"DELETE"))
STORED_CANCEL = Route("stored", generates=False, opaque=True, methods=(b"POST",))
_STORED = re.compile(rb"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel|/input_items)?")
MODELS = b"/v1/models"
SESSIONS = b"/v1/sessions/"
FINAL = frozenset((b"1", b"true", b"yes", b"on"))
"""Values of ``x-session-final`` that say so."""
SALTED = frozenset(("vllm", "sglang", "tensorrt_llm"))
"""Engines that keep caches of different ``cache_salt`` apart."""
USAGE = b',"stream_options":{"include_usage":true}}'
RESERVE = 10.0
"""Retries that are allowed before there was any traffic to take a share of."""
CONVERSATION = "conversation "
"""Before the names of conversations, among those of responses."""


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
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = monotonic
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.metrics = metrics
        self.tenants = tenants
        self.options = options
        self.routing = Routing(fleet, sessions, index, metrics, options)
        policies = [options.default(), *options.policies.values(), *tenants.policies()]
        self.modes = dict(modes or {})
        """Model -> how token ids of its prompts are made."""
        self.pairs = Pairs(self, pairs or Disaggregation())
        self.preparing: set[Preparing] = set()
        self._default = options.default()
        self._light = not any(policy.needs_prefix or policy.needs_session for policy in policies)
        """No policy here wants prompts."""
        self.limits_in = limits_in or Inward()
        self.limits_out = limits_out or Outward()
        self.attempts = attempts
        self.retry_budget = retry_budget
        self._retries_left = RESERVE
        self.exchanges: set[Exchange] = set()
        self.recorder: Recorder | None = None
        self.lifecycle: Lifecycle | None = None
        """Tells engines of the ends of sessions."""
        self.opened: OpenSessions | None = None
        """Sessions that clients open on engines, where they may."""
        self.doctor: Doctor | None = None
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
        self.routes: dict[bytes, tuple[Dialect, Route]] = {
            path: (dialect, route) for dialect in self.dialects.values() for path, route in dialect.routes.items()
        }
        for path in passthrough:
            self.routes.setdefault(path.encode(), (self.fallback, OPAQUE))
        self._secret = blake2b(isolation_key.encode() if isolation_key else urandom(32)).digest()
        self.defects = 0
        self._boot = urandom(6).hex().encode()
        self._serial = count()
        self._own = {b"/healthz": self._healthz, b"/readyz": self._readyz, MODELS: self._models}
        self.server = Server(self.serve, self._render, self.limits_in, self._count_refusal, fleet.outbox)
        self.metrics.gauges += gauges(self)

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
                own = self._models
            elif own is None and incoming.path.startswith(SESSIONS):
                own = self._end_session
            if own is not None:
                client.send(own(incoming))
                client.done()
                return
            found = self.routes.get(incoming.path) or self._stored(incoming.path)
            if self.opened is not None and incoming.path in (OPEN, CLOSE):
                self._verb(incoming, client, request_id)
                return
            if found is None:
                raise NotFound(f"there is no {_show(incoming.path)} here")
            dialect, route = found
            if route.methods and incoming.method not in route.methods:
                raise WrongMethod(_show(incoming.path), b", ".join(route.methods).decode())
            self._exchange(incoming, client, dialect, route, request_id, started)
        except Exception as error:
            self._refuse(incoming, client, dialect, request_id, error)

    def _verb(self, incoming: Incoming, client: Inbound, request_id: bytes) -> None:
        """A client opens, or closes, a session of an engine's."""
        assert self.opened is not None
        if incoming.method != b"POST":
            raise WrongMethod(_show(incoming.path), "POST")
        dialect = self.dialects["sglang"]

        def refuse(error: Exception) -> None:
            try:
                raise error
            except Exception as raised:
                self._refuse(incoming, client, dialect, request_id, raised)

        self.opened.verb(incoming, client, self.tenants.of(incoming.named), refuse)

    def _refuse(
        self, incoming: Incoming, client: Inbound, dialect: Dialect, request_id: bytes, error: Exception
    ) -> None:
        """In an except block: the request is not taken, by its fault or by ours."""
        if isinstance(error, Fault):
            fault = error
            self._count_refusal(fault)
        else:
            self.defect("taking a request")
            fault = Internal("the gateway failed; its log says why")
        client.send(self.fault_response(dialect, fault, incoming, request_id))
        client.done()

    def _exchange(
        self, incoming: Incoming, client: Inbound, dialect: Dialect, route: Route, request_id: bytes, started: float
    ) -> None:
        tenant = self.tenants.of(incoming.named)
        steps: tuple[str, ...] = ()
        if tenant.canonical and route.generates and not route.opaque:
            incoming.body, steps = canonical(route.kind, incoming.body, tenant.canonical)
        reading = self._read(incoming, dialect, route)
        reading.canonical = steps
        if route.kind == "stored" and (tenant.name, reading.previous or "") not in self.routing.pins:
            raise NotFound(f"no response {reading.previous!r} is known here")
        if reading.stateful is not None and self.opened is not None and route.kind == "generate":
            self._turn(incoming, client, dialect, route, request_id, started, tenant, reading)
            return
        ids: bytes | None = None
        mode = self._mode(tenant, reading) if self.modes else None
        if mode is not None:
            made = self._start(mode, route, incoming.body, reading)
            if isinstance(made, asyncio.Future):

                def then(ids: bytes | None, reason: str) -> None:
                    if ids is None:
                        self._by_text(reading, reason)
                    try:
                        self._route(incoming, client, dialect, route, request_id, started, tenant, reading, ids)
                    except Exception as error:
                        self._refuse(incoming, client, dialect, request_id, error)

                Preparing(client, made, self.preparing, then)
                return
            ids = made
        self._route(incoming, client, dialect, route, request_id, started, tenant, reading, ids)

    def _turn(
        self,
        incoming: Incoming,
        client: Inbound,
        dialect: Dialect,
        route: Route,
        request_id: bytes,
        started: float,
        tenant: Tenant,
        reading: Reading,
    ) -> None:
        """A turn of a session that its client opened on an engine: it says what is new only, and goes there or nowhere."""
        assert self.opened is not None
        # What it says is no prompt that any other could be compared with.
        reading.make_prompt, reading.ids = None, None

        def go(opened: Opened) -> None:
            reading.opened = opened
            self._route(incoming, client, dialect, route, request_id, started, tenant, reading, None)

        def refuse(fault: Fault) -> None:
            self._count_refusal(fault)
            client.send(self.fault_response(dialect, fault, incoming, request_id))
            client.done()

        self.opened.turn(reading.stateful or "", tenant, client, go, refuse)

    def _route(
        self,
        incoming: Incoming,
        client: Inbound,
        dialect: Dialect,
        route: Route,
        request_id: bytes,
        started: float,
        tenant: Tenant,
        reading: Reading,
        ids: bytes | None,
    ) -> None:
        draw = draw_of(request_id)
        ask = self.routing.ask(
            tenant, reading, incoming.named, draw, started, memo=incoming.memo, ids=ids, salt=self.salt
        )
        if self.fleet.staged and route.generates and not reading.opaque:
            ask.takes = self.pairs.takes(route.kind, incoming.body)
        ask.returns = ask.ids is not None and b'"return_token_ids"' in incoming.body
        if ask.new_session and ask.prompt is not None and self.roots is not None:
            salt = self.salt(ask) if tenant.isolated else None
            self.roots.saw(ask, ask.prompt, incoming.path, incoming.body, salt, started)
        exchange = Exchange(self, client, incoming, dialect, route, reading, ask, request_id, started)
        exchange.start()

    # -- token ids --------------------------------------------------------------------------------------------------

    def _mode(self, tenant: Tenant, reading: Reading) -> Mode | None:
        """How this request's token ids are made; ``None`` where nobody needs them, or the client gave them."""
        name = self._served_name(reading)
        mode = self.modes.get(name) if name is not None else None
        policy = tenant.policy or self.options.policies.get(name or "") or self._default
        if mode is None or not policy.needs_prefix:
            return None
        if reading.model is not None:
            # Before anything is done for it.
            tenant.check_model(reading.model)
        return None if reading.ids is not None and reading.ids() is not None else mode

    def _served_name(self, reading: Reading) -> str | None:
        if reading.opaque or reading.make_prompt is None:
            return None
        if reading.model is not None:
            return self.options.aliases.get(reading.model, reading.model)
        try:
            model = self.routing.model(None)
        except Fault:
            return None
        return None if model is None else model.name

    def _start(self, mode: Mode, route: Route, body: bytes, reading: Reading) -> bytes | asyncio.Future[bytes] | None:
        try:
            made = mode.start(route.kind, body)
        except Unrendered as error:
            self._by_text(reading, error.reason)
            return None
        except Exception:
            self.defect("making token ids")
            self._by_text(reading, "defect")
            return None
        if made is None:
            self._by_text(reading, "dialect")
        return made

    def _by_text(self, reading: Reading, reason: str) -> None:
        """A request of a model with a tokenizer is routed by text after all."""
        self.metrics.token_fallbacks.add((self._served_name(reading) or "", reason))

    async def ids_for(self, path: bytes, body: bytes, named: Mapping[bytes, bytes]) -> bytes | None:
        """Token ids for a dry run, if its model has a tokenizer. Raises `Fault`."""
        found = self.routes.get(path)
        if not self.modes or found is None or found[1].opaque:
            return None
        dialect, route = found
        reading = dialect.read(route, body)
        mode = self._mode(self.tenants.of(named), reading)
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
        return dialect.read(route, incoming.body, self._light and not recording)

    def dry_run(
        self, path: bytes, body: bytes, named: Mapping[bytes, bytes], draw: int, ids: bytes | None = None
    ) -> dict[str, object]:
        """What would be chosen for this body and why. Raises `Fault`; changes nothing."""
        found = self.routes.get(path)
        if found is None or found[1].opaque:
            raise NotFound(f"{_show(path)} is not a path that is routed by what it says")
        dialect, route = found
        tenant = self.tenants.of(named)
        if tenant.canonical:
            body, _ = canonical(route.kind, body, tenant.canonical)
        reading = dialect.read(route, body)
        now = self.clock()
        ask = self.routing.ask(tenant, reading, named, draw, now, ids=ids, salt=self.salt, dry=True)
        if self.fleet.staged and route.generates:
            ask.takes = self.pairs.takes(route.kind, body)
        return self.routing.explain(ask, now, self.pinned(ask, set(), now))

    def _stored(self, path: bytes) -> tuple[Dialect, Route] | None:
        """Routes below ``/v1/responses/``."""
        found = _STORED.fullmatch(path)
        return None if found is None else (self.fallback, STORED_CANCEL if found[2] == b"/cancel" else STORED)

    def pinned(self, ask: Ask, tried: set[int], now: float) -> Choice | None:
        """The choice where state lives on one worker: a stored response that this request goes on from or names."""
        opened = ask.reading.opened
        if isinstance(opened, Opened):
            return self._at_opened(opened, tried, now)
        reading = ask.reading
        previous = reading.previous or (None if reading.conversation is None else CONVERSATION + reading.conversation)
        if previous is None:
            return None
        worker_id, _ = self.routing.pins.get((ask.tenant.name, previous), (None, None))
        if worker_id is None:
            return None
        worker = self.fleet.workers.get(worker_id)
        for target in worker.targets if worker is not None else ():
            if target.id not in tried and self.fleet.usable(target, now):
                return Choice(target, "pinned", prefill=self.routing.partner_of(target, ask, tried, now))
        told = reading.previous or reading.conversation
        raise NoWorker(f"the worker that holds {told!r} is gone or cannot be used now: its state cannot be reached")

    def _at_opened(self, opened: Opened, tried: set[int], now: float) -> Choice:
        """The one target on which a client's session was opened."""
        target = opened.target
        gone = self.fleet.targets.get(target.id) is not target
        serves = target.worker.state is State.DRAINING or self.fleet.usable(target, now)
        if gone or target.id in tried or not serves:
            raise NoWorker(
                "the worker on which this session was opened is gone or cannot be used now: open another one"
            )
        return Choice(target, "pinned")

    def body_for(self, exchange: Exchange, target: Target) -> bytes:
        """The body to send: the client's bytes, but for what must be cut out or rewritten."""
        reading, model = exchange.reading, exchange.ask.model
        body = exchange.body
        renamed = model is not None and reading.model is not None and reading.model != model.name
        salted = exchange.ask.tenant.isolated and exchange.route.generates and not reading.opaque
        if self.recorder is not None and not exchange.counted:
            self.recorder.sending(exchange)
        wanted = exchange.ask.predicted is not None or exchange.noted is not None
        exchange.injected = reading.untold and wanted and target.worker.facts.injects_usage
        if exchange.injected:
            # Without usage a stream tells nothing of its cache. It has no such member yet, and ends with a brace.
            body = body.rstrip()[:-1] + USAGE
        if isinstance(reading.opened, Opened) and not reading.named:
            # By this it can be aborted.
            body = append(body, b'"rid":"%b"' % exchange.request_name.encode())
        fetches = bool(exchange.ask.request.fetched) and target.id in exchange.ask.request.fetched
        members: dict[str, bytes] = {}
        if exchange.ask.session is not None and exchange.route.generates and self.lifecycle is not None:
            facts = target.worker.facts
            first = None if exchange.choice is None else exchange.choice.prefill
            if facts.refers or facts.slots is not None or first is not None or able(target.worker):
                assert first is None or isinstance(first, Target)
                members = self.lifecycle.members(exchange.ask, target, first)
        if not (renamed or reading.guarded or salted or fetches):
            if not members:
                return body
            if not reading.labelled:
                return append(body, b",".join([b'"%b":%b' % (name.encode(), value) for name, value in members.items()]))
        if reading.opaque and model is not None and not _is_json(exchange.incoming):
            raise BadRequest(
                f"the alias {reading.model!r} cannot be used here: name the model {model.name!r}", param="model"
            )
        add = {"model": msgspec.json.encode(model.name)} if renamed and model is not None else {}
        add |= members
        if fetches and exchange.route.generates and exchange.choice is not None and exchange.choice.prefill is None:
            source = self.pairs.source(exchange)
            if source is not None:
                add["kv_transfer_params"] = source
        if salted and target.worker.facts.engine in SALTED:
            add["cache_salt"] = msgspec.json.encode(self.salt(exchange.ask))
        return splice(body, reading.guarded, add)

    def label_of(self, exchange: Exchange, target: Target) -> bytes:
        """The header line by which vLLM labels its KV events; none where the client sends one, or a ``session_id``."""
        session = exchange.ask.session
        told = exchange.reading.labelled or b"x-session-id" in exchange.incoming.named
        if session is None or told or target.worker.facts.engine != "vllm":
            return b""
        return b"x-session-id: %b\r\n" % session.key.hex().encode()

    def salt(self, ask: Ask) -> str:
        """What keeps an isolated tenant's cache apart in the engine; made with the client's own salt, and tells nothing."""
        told = ask.tenant.name.encode() + b"\x00" + ask.reading.namespace
        return blake2b(told, key=self._secret, digest_size=16).hexdigest()

    # -- what exchanges tell ----------------------------------------------------------------------------------------

    def sent(self, exchange: Exchange) -> None:
        """The first attempt was sent."""
        self._retries_left = min(self._retries_left + self.retry_budget, 1000.0)
        ask, choice, target = exchange.ask, exchange.choice, exchange.target
        assert choice is not None
        assert target is not None
        tally = self.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, self.label(target))
        tally.sent(choice.reason, self.clock() - exchange.started)
        if choice.prefill is not None or target.role is not Role.UNIFIED:
            way = "pair" if choice.prefill is not None else "local"
            self.metrics.pair_decisions.add((ask.model_name, way, choice.reason))
        if ask.found is not None:
            self.metrics.session_sources.add((ask.found,))

    def begun(self, exchange: Exchange) -> None:
        """The client's answer begins: the worker serves, and the request will not be sent again."""
        target = exchange.target
        if target is not None and exchange.status < 500 and target.breaker.open_until is not None:
            self.fleet.succeeded(target)
        self.routing.begun(exchange.ask)

    def heard(self, worker: Worker) -> float:
        """When a byte of any running answer last came from ``worker``."""
        return max(
            (e.last_at for e in self.exchanges if e.target is not None and e.target.worker is worker), default=0.0
        )

    def first_event(self, exchange: Exchange, charge: Charge) -> None:
        """The first event of a stream came: its prefill is over."""
        target = charge.target
        self.fleet.first_byte(charge)
        ask = exchange.ask
        legs = exchange.legs
        if legs is not None:
            self.pairs.begun(exchange, legs)
        tally = self.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, self.label(target))
        tally.first_token(_turn(ask.turn), exchange.first_at - exchange.started)
        if charge.alone and legs is None and ask.request.tokens is not None:
            exchange.alone = True

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None, streaming: bool) -> None:
        """An exchange is over, whatever the outcome."""
        ask, target = exchange.ask, exchange.target
        seconds = self.clock() - exchange.started
        opened = exchange.reading.opened
        if isinstance(opened, Opened) and not exchange.settles:
            assert self.opened is not None
            self.opened.over(opened)
        if ask.told or ask.slot is not None:
            assert self.lifecycle is not None
            self.lifecycle.over(ask)
        if target is None:
            who = (ask.tenant.name, ask.model_name, ask.policy.name)
            self.metrics.requests.add((who[0], who[1], exchange.route.kind, who[2], outcome))
            self.metrics.duration.observe(who, seconds)
            return
        tally = self.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, self.label(target))
        tally.ended(exchange.route.kind, outcome, seconds)
        if not streaming:
            return
        if self.recorder is not None and exchange.noted is not None:
            self.recorder.ended(exchange, exchange.noted, outcome, usage, seconds)
        said = answered_ids(exchange.tail) if ask.returns and not exchange.events else None
        legs = exchange.legs
        computes = target
        if legs is not None:
            computes, usage = legs.prefill, self.pairs.usage(legs, usage)
        self.routing.settle(ask, target, usage, self.clock(), said, computes)
        if ask.body is not None:
            self._examine(ask, exchange, usage)
        if legs is not None and outcome == "ok":
            self.pairs.ended(exchange, legs)
        if exchange.alone:
            self._calibrate(exchange, target, usage)
        if computes is not target:
            # Its prompt is counted where it was computed.
            first = self.metrics.tally(ask.tenant.name, ask.model_name, ask.policy.name, self.label(computes))
        else:
            first = tally
        if ask.predicted is not None and ask.request.tokens is not None:
            first.predicted[0] += ask.predicted
            first.predicted_prompt[0] += ask.request.tokens
        if usage is not None:
            self._count_usage(exchange, usage, tally, first, computes)
        if exchange.route.kind == "responses" and outcome == "ok":
            self._remember_response(exchange, target)
        if outcome == "ok" and ask.session is not None:
            final = exchange.incoming.named.get(b"x-session-final")
            if final is not None and final.strip().lower() in FINAL:
                self.sessions.drop(ask.session)

    def _calibrate(self, exchange: Exchange, target: Target, usage: Usage | None) -> None:
        """Learn from a first event that nothing else delayed."""
        seconds = exchange.first_at - exchange.sent_at
        brought = exchange.ask.request.fetched.get(target.id)
        if brought:
            held = brought if usage is None or usage.cached is None else usage.cached
            rest = target.rates.prefill(max(0, (exchange.ask.request.tokens or held) - held), held)
            target.calibration.moved(brought, max(1e-4, seconds - rest))
            return
        back = exchange.ask.request.restored.get(target.id)
        if back is not None:
            if usage is not None and usage.prompt is not None and usage.cached is not None:
                rest = target.rates.prefill(usage.prompt - usage.cached, usage.cached)
                target.calibration.restored(back, max(0.0, seconds - rest))
            return
        if usage is not None and usage.prompt is not None and usage.cached is not None:
            # What the engine says was computed, not what was believed: a wrong belief must not become a rate.
            self.fleet.learn(target, usage.prompt - usage.cached, usage.cached, seconds)
        elif exchange.ask.request.tokens is not None:
            context = exchange.ask.context
            self.fleet.learn(target, exchange.ask.request.tokens - context, context, seconds)

    def _count_usage(self, exchange: Exchange, usage: Usage, tally: Tally, first: Tally, computes: Target) -> None:
        """``first``: of ``computes``, the target that computed the prompt."""
        ask = exchange.ask
        if usage.prompt is not None:
            first.prompt[0] += usage.prompt
            computes.worker.told_cached(usage.cached is not None)
            if usage.cached is not None:
                first.cached[0] += usage.cached
                first.reported[0] += usage.prompt
                if ask.predicted is not None and usage.prompt:
                    error = (usage.cached - ask.predicted) / usage.prompt
                    self.metrics.prediction_error.observe((ask.model_name,), error)
        if usage.completion is not None:
            tally.completion[0] += usage.completion
            if exchange.events and usage.completion > 1 and exchange.last_at > exchange.first_at:
                between = (exchange.last_at - exchange.first_at) / (usage.completion - 1)
                self.metrics.inter_token.observe_in(tally.inter_token, between)

    def _remember_response(self, exchange: Exchange, target: Target) -> None:
        ask = exchange.ask
        found = _response_id(exchange.first) or _response_id(exchange.tail)
        if found is not None:
            self.routing.pin(ask.tenant, found, target.worker.id, ask.session)
        conversation = exchange.reading.conversation
        if conversation is not None and len(conversation) <= LONGEST:
            self.routing.pin(ask.tenant, CONVERSATION + conversation, target.worker.id, ask.session)

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
        if self._retries_left < 1 or self.fleet.view(name, tried) is None:
            return False
        self._retries_left -= 1
        self.metrics.retries.add((ask.model_name, type(fault).__name__.lower()))
        return True

    def defect(self, doing: str) -> None:
        """A bug of ours, in an except block: it is logged whole and counted, and costs one request."""
        self.defects += 1
        log.exception("defect while %s", doing)

    def breaks(self, session: Session) -> list[dict[str, object]]:
        """Where the session's prompts broke from those before, as far as it was examined."""
        return [] if self.doctor is None else self.doctor.breaks(session.hash)

    def examining(self, exchange: Exchange) -> None:
        """Its answer begins, and its body would go: the doctor may want to see it."""
        doctor, ask, reading = self.doctor, exchange.ask, exchange.reading
        session = ask.session
        if doctor is None or session is None or exchange.status >= 300 or ask.model is None:
            return
        # What goes on from state of an engine's says a part of its prompt only.
        if reading.previous is None and reading.opened is None and doctor.wants(session.hash):
            ask.body = exchange.incoming.body

    def _examine(self, ask: Ask, exchange: Exchange, usage: Usage | None) -> None:
        """Give the doctor what it wanted."""
        assert self.doctor is not None
        assert ask.body is not None
        assert ask.session is not None
        assert ask.model is not None
        self.doctor.seen(
            Note(
                ask.tenant.name,
                ask.model.label,
                ask.session.hash,
                exchange.route.kind,
                ask.body,
                ask.model.thinking,
                None if usage is None else usage.prompt,
                None if usage is None else usage.cached,
                ask.before,
                ask.shared,
                ask.new_session,
                self.clock(),
            )
        )
        ask.body = None

    # -- answers of our own -----------------------------------------------------------------------------------------

    def told(self, exchange: Exchange) -> bytes:
        """Response header lines that say where and why, if the tenant may see them."""
        ask, target, choice = exchange.ask, exchange.target, exchange.choice
        if target is None or choice is None:
            return b""
        token = self._token(exchange, target) if self.tokens else b""
        if exchange.reading.canonical:
            token += b"x-warmroute-canonical: %b\r\n" % ",".join(exchange.reading.canonical).encode()
        if not ask.tenant.shows_routing:
            return token
        parts = [b"x-warmroute-worker: ", target.name.encode(), b"\r\nx-warmroute-decision: "]
        parts += (ask.policy.name.encode(), b"/", choice.reason.encode(), b"\r\n")
        if choice.prefill is not None:
            parts += (b"x-warmroute-prefill-worker: ", choice.prefill.name.encode(), b"\r\n")
        if ask.found is not None:
            parts += (b"x-warmroute-session-source: ", ask.found.encode(), b"\r\n")
        if ask.predicted is not None:
            parts.append(b"x-warmroute-predicted-cached-tokens: %d\r\n" % ask.predicted)
        parts.append(token)
        return b"".join(parts)

    def _token(self, exchange: Exchange, target: Target) -> bytes:
        """Header lines with a token, for a client that names no session by itself."""
        ask = exchange.ask
        session = ask.session
        if session is None:
            if not (ask.policy.needs_session and exchange.route.generates) or exchange.reading.opaque:
                return b""
            # Nothing is kept of it unless it comes back.
            key = xxh3_128_digest(exchange.request_id, ask.request.draw)
            token = self.sessions.sticky.seal(ask.tenant.seed, key, target.seed)
        elif ask.found in ("content", "sticky"):
            home = None if session.home is None else self.fleet.targets.get(session.home)
            token = self.sessions.token(session, ask.tenant.seed, 0 if home is None else home.seed)
        else:
            return b""
        if not self.sessions.naming.cookie:
            return b"x-warmroute-session: %b\r\n" % token
        cookie = b"set-cookie: x-warmroute-session=%b; Path=/; HttpOnly; SameSite=Lax\r\n"
        return b"x-warmroute-session: %b\r\n" % token + cookie % token

    def fault_response(self, dialect: Dialect, fault: Fault, incoming: Incoming, request_id: bytes) -> bytes:
        """A whole error response in the caller's dialect."""
        extra = b"x-request-id: %b\r\n" % request_id
        if fault.retry_after is not None:
            extra += b"retry-after: %d\r\n" % max(1, round(fault.retry_after))
        elif fault.status in (429, 503):
            extra += b"retry-after: 1\r\n"
        if isinstance(fault, WrongMethod):
            extra += b"allow: %b\r\n" % fault.allowed.encode()
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
        self.metrics.refused.add((str(fault.status),))

    def _healthz(self, incoming: Incoming) -> bytes:
        return wire.whole(200, b'{"status":"ok"}', incoming)

    def _readyz(self, incoming: Incoming) -> bytes:
        ready, body = self.readiness()
        return wire.whole(200 if ready else 503, msgspec.json.encode(body), incoming)

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether every configured model has a ready worker (any worker, if no model is configured)."""
        configured = sorted(self.options.configured)
        lacking = [name for name in configured if self.fleet.view(name) is None]
        ready = not self.ending and not lacking and self.fleet.view(None) is not None
        reason = (
            "shutting down" if self.ending else "no ready worker" if not lacking else "models without a ready worker"
        )
        return ready, {"ready": ready, **({} if ready else {"reason": reason, "models": lacking})}

    def _models(self, incoming: Incoming) -> bytes:
        if incoming.method not in (b"GET", b"HEAD"):
            raise WrongMethod("/v1/models", "GET, HEAD")
        tenant = self.tenants.of(incoming.named)
        entries = models(self.fleet, self.options.aliases, tenant.models)
        if incoming.path == MODELS:
            return wire.whole(200, models_body(entries), incoming)
        name = unquote(incoming.path[len(MODELS) + 1 :])
        if name not in entries:
            raise NotFound(f"the model {name!r} does not exist here", param="model")
        return wire.whole(200, msgspec.json.encode(entries[name]), incoming)

    def _end_session(self, incoming: Incoming) -> bytes:
        """Its owner ends a session, by the name that its requests gave it, by its token or by its id."""
        if incoming.method != b"DELETE":
            raise WrongMethod(_show(incoming.path), "DELETE")
        tenant = self.tenants.of(incoming.named)
        told = unquote_to_bytes(incoming.path[len(SESSIONS) :])
        found = self._sessions_called(told, tenant)
        if not found:
            raise NotFound(f"no session of yours is called {told.decode('utf-8', 'replace')[:100]!r}")
        for session in found:
            self.sessions.drop(session)
        body = {"id": told.decode("utf-8", "replace"), "object": "session.deleted", "deleted": True}
        return wire.whole(200, msgspec.json.encode(body), incoming)

    def _sessions_called(self, told: bytes, tenant: Tenant) -> list[Session]:
        value = clean(told)
        if value is None:
            return []
        carried = self.sessions.sticky.open(tenant.seed, value)
        key = carried.key if carried is not None else None
        if key is None and len(value) == 32:
            try:
                key = bytes.fromhex(value.decode("ascii", "replace"))
            except ValueError:
                key = None
        session = None if key is None else self.sessions.get(key)
        if session is not None:
            return [session] if session.tenant == tenant.name else []
        models = {*self.routing.models, *self.fleet.known_models, *self.options.configured}
        named = [self.sessions.named(value, tenant.name, model) for model in models]
        return [session for session in named if session is not None]

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


def _turn(turn: int) -> str:
    if turn <= 0:
        return "none"
    return "1" if turn == 1 else "2-5" if turn <= 5 else "6-20" if turn <= 20 else "21+"


def _show(path: bytes) -> str:
    return path[:200].decode("ascii", "replace")


def _is_json(incoming: Incoming) -> bool:
    return incoming.named.get(b"content-type", b"").lower().startswith(b"application/json")


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
    if _is_json(incoming):
        try:
            value = msgspec.json.decode(incoming.body, type=dict[str, msgspec.Raw]).get("model")
            name = msgspec.json.decode(value) if value is not None else None
        except msgspec.DecodeError:
            return None
        return name if isinstance(name, str) else None
    return None


_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')


def _response_id(part: bytes) -> str | None:
    """The id of a response in the part of its answer that has it."""
    found = _RESPONSE_ID.search(part)
    return found[1].decode() if found is not None else None
