"""Starting and stopping a gateway: listeners, probes, upkeep, and the order in which they end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import ssl
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any

from gateway.admin import AdminSite
from gateway.admission import Options as Queueing
from gateway.app import Gateway
from gateway.asks import Options
from gateway.config import Config
from gateway.config_reader import ConfigError, Problem
from gateway.credentials import BadKey, read_keys
from gateway.descriptors import Descriptors
from gateway.doctor import Doctor
from gateway.engines import Answer
from gateway.engines.audit import lines as audit_lines
from gateway.errors import NoWorker
from gateway.fleet import Fleet
from gateway.guesses import Guesses
from gateway.health import Health
from gateway.http.limits import Inward, Outward
from gateway.http.outbox import Outbox
from gateway.http.server import Inbound
from gateway.jwks import KeySet
from gateway.keeping import Keeper
from gateway.lifecycle import Lifecycle
from gateway.meters import Limits as TenantLimits
from gateway.metrics import Metrics
from gateway.moving import Moving
from gateway.oidc import Tokens
from gateway.opened import OpenSessions
from gateway.preparing import Engines, Mode, Pool
from gateway.pressure import BEAT, Limits, Pressure, Pulse, allowed, resident
from gateway.probe import Probe
from gateway.prompt import Thinking
from gateway.recording import File, Unrecordable
from gateway.records import Recorder
from gateway.reload import Reloading
from gateway.roots import Roots, Warming
from gateway.sessions import Session, Sessions
from gateway.source import Source
from gateway.stores import FileStore, RedisStore, Store, Unsaved
from gateway.subscribe import Subscriptions
from gateway.tenants import ANONYMOUS, Known, Tenant, Tenants
from gateway.tls import context, digest
from gateway.workers import State, Worker, WorkerSpec
from kv_index.blocks import BlockIndex
from kv_index.checkpoints import Rule
from kv_index.index import PrefixIndex, Rung
from kv_index.radix import RadixIndex
from policies.admission import Bounds, Priority

log = logging.getLogger("warmroute")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``malloc.h``."""
OBSERVE = 30.0
"""Seconds between two judgements of what traffic shows of the engines."""
CHURN = 0.5
"""Share of a cache that is evicted within that time when it is too small for its sessions."""
CLOSING = 10.0
"""Seconds that engines may take to hear of the ends of all sessions when the gateway stops."""
TICK = 0.5
"""Seconds between two rounds of upkeep; also the probe of the event loop's lag."""


class Running:
    """One gateway with its listeners. ``await start()``, then ``await stop()``."""

    def __init__(self, config: Config, source: Source | None = None) -> None:
        self.config = config
        self.reloading = Reloading(self, source)
        self.tls: ssl.SSLContext | None = None
        """What the listener speaks."""
        self.tls_digest: bytes | None = None
        """Of the certificate's files."""
        self.ca_digest: bytes | None = None
        """Of the authorities'."""
        limits_in, limits_out = make_limits(config)
        most = config.index.max_bytes
        self.index = PrefixIndex(RadixIndex(most), BlockIndex(most), self._moved)
        self.metrics = Metrics()
        told = config.auth.jwt
        self.key_set = None if told is None else KeySet(told.jwks, told.refresh, self.metrics)
        """Of whoever issues tokens."""
        self.pool: Pool | None = None
        self._asked = 0
        self.fleet = Fleet(monotonic, limits_out, self._forget, Outbox(asyncio.get_running_loop()))
        self.keeper: Keeper | None = None
        store = _store(config)
        self.sessions = Sessions(
            most=config.sessions.max,
            idle=config.sessions.idle,
            headers=config.sessions.headers,
            fields=config.sessions.fields,
            cookie=config.sessions.cookie,
            secret=_secret(config, store),
            homes=self._homes,
            dropped=self._dropped,
        )
        self.gateway = Gateway(
            fleet=self.fleet,
            sessions=self.sessions,
            index=self.index,
            metrics=self.metrics,
            tenants=make_tenants(config, self.metrics, key_set=self.key_set),
            options=make_options(config),
            limits_in=limits_in,
            limits_out=limits_out,
            attempts=config.retries.attempts,
            retry_budget=config.retries.budget,
            passthrough=tuple(config.passthrough),
            isolation_key=config.isolation_key,
            modes=self._make_modes(),
            pairs=config.disaggregation,
            tokens=config.sessions.token,
            labels=config.sessions.labels,
            secure=config.listen.tls is not None,
            queueing=make_queueing(config),
            pressure=Pressure(make_pressure(config)),
        )
        self.pulse = Pulse()
        self.descriptors = Descriptors(lambda: self.metrics.descriptors_short.add())
        health = config.health
        self.health = None if health is None else Health(self.pulse, health.host, health.port, health.stalled)
        self.probe = Probe(
            self.fleet,
            self._described,
            self.gateway.accounts.heard,
            health_seconds=config.probes.health,
            load_seconds=config.probes.load,
            join_seconds=config.probes.join,
        )
        self.subscriptions = Subscriptions(self.index, self.metrics, self.probe.poll_events, self._by_ids)
        self.lifecycle = Lifecycle(
            self.fleet, self.sessions, self.gateway.routing.returning, self.metrics, self.probe.ask
        )
        self.gateway.lifecycle = self.lifecycle
        if config.sessions.streaming:
            self.gateway.opened = OpenSessions(self.gateway, self.probe.ask)
        self.moving = Moving(self.fleet, self.sessions, self.gateway.routing, self.metrics)
        self.sessions.bound = self._bound
        self.gateway.doctor = _doctor(config, self.gateway)
        warming = config.warming
        roots = Roots()
        self.gateway.roots = roots if warming.starts else None
        self.warming = Warming(
            self.fleet,
            self.index,
            roots,
            self.metrics,
            self.probe.ask,
            most=warming.starts,
            seconds=warming.seconds,
        )
        self.fleet.began = self.index.lost = self.warming.empty
        if store is not None:
            self.keeper = Keeper(store, self.sessions, self.fleet)
            self.sessions.turned = self.keeper.used
            self.keeper.pin = self.gateway.routing.pins.put
        self.fleet.went_down = self.gateway.worker_down
        self.gateway.pairs.doubt = self.probe.doubt
        self.admin = AdminSite(self)
        self.metrics.gauges += self.reloading.gauges()
        if self.key_set is not None:
            self.key_set.changed = lambda: self.gateway.tenants.forget()
            self.metrics.gauges += self.key_set.gauges()
        self.port = 0
        self.hurry = asyncio.Event()
        """Set to end without waiting for balancers."""
        self._listener: asyncio.Server | None = None
        self._upkeep: asyncio.Task[None] | None = None
        self._examines: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None
        self._audited: dict[str, list[str]] = {}
        self._evicted: dict[int, int] = {}
        self._observe_at = monotonic() + OBSERVE
        for worker in config.workers:
            self.add_worker(worker.spec(config.disaggregation.named), watch=False)

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen and watch. Raises `OSError` when an address cannot be had, `ConfigError` when the recording cannot."""
        listen = self.config.listen
        loop = asyncio.get_running_loop()
        await self._record()
        if listen.tls is not None:
            self.tls_digest, self.ca_digest = digest(listen.tls.files), digest(listen.tls.authorities)
            self.tls = context(listen.tls)
        self._listener = await loop.create_server(
            lambda: Inbound(self.gateway.server),
            listen.host,
            listen.port,
            ssl=self.tls,
            ssl_handshake_timeout=10.0 if self.tls is not None else None,
            backlog=2048,
            reuse_address=True,
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        await self.admin.start()
        if self.health is not None:
            self.health.start()
        self._beats = loop.create_task(self._beat(), name="beat")
        if self.keeper is not None:
            self.keeper.start()
        await self.probe.start()
        self.reloading.start()
        if self.key_set is not None:
            self.key_set.start()
        self.lifecycle.start()
        if self.gateway.doctor is not None:
            self._examines = loop.create_task(self.gateway.doctor.run(), name="doctor")
        self._upkeep = loop.create_task(self._tick(), name="upkeep")

    async def stop(self, pause: float | None = None) -> None:
        """Drain: readiness off, a pause for balancers to notice, no new connections, running requests to their end."""
        gateway = self.gateway
        gateway.ending = True
        await self.reloading.stop()
        if self.key_set is not None:
            await self.key_set.stop()
        config = self.config
        try:
            async with asyncio.timeout(config.drain if pause is None else pause):
                await self.hurry.wait()
        except TimeoutError:
            pass
        if self._listener is not None:
            self._listener.close()
        gateway.server.close_idle()
        deadline = gateway.clock() + config.drain_limit
        while (gateway.exchanges or gateway.preparing) and gateway.clock() < deadline:
            await asyncio.sleep(0.05)
        for exchange in list(gateway.exchanges):
            exchange.client.abort()
            exchange.client_gone()
        for waiting in list(gateway.preparing):
            waiting.client.abort_with_owner()
        gateway.admission.stop()
        if self.pool is not None:
            self.pool.close()
        if gateway.recorder is not None:
            recorder, gateway.recorder = gateway.recorder, None
            await recorder.stop()
        await gateway.pairs.stop()
        await self.warming.stop()
        if gateway.opened is not None:
            await gateway.opened.stop()
        await self.lifecycle.stop(CLOSING, keeps=self.keeper is not None)
        if self.keeper is not None:
            await self.keeper.stop()
        await self.probe.stop()
        await self.subscriptions.stop()
        if self.health is not None:
            # Joining the thread is a moment's wait: it has nothing to end but its listener.
            await asyncio.to_thread(self.health.stop)
        for task in (self._upkeep, self._examines, self._beats):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self.admin.stop()
        for connection in list(gateway.server.connections):
            connection.shut()
        for worker in self.fleet.workers.values():
            worker.pool.close()
        # One turn of the loop, for closed transports to say so.
        await asyncio.sleep(0)

    def make(self, config: Config) -> tuple[Tenants, Options]:
        """What is made of ``config`` to be followed; changes nothing. Raises `ConfigError`."""
        tenants = make_tenants(config, self.metrics, self.gateway.tenants, self.key_set)
        return tenants, make_options(config)

    def reconfigure(self, config: Config, tenants: Tenants, options: Options) -> None:
        """Follow ``config`` from here on, workers excepted."""
        self.config = config
        limits_in, limits_out = make_limits(config)
        tenants.guesses.a_minute = config.auth.failures_per_minute
        self.gateway.reconfigure(
            tenants=tenants,
            options=options,
            limits_in=limits_in,
            limits_out=limits_out,
            attempts=config.retries.attempts,
            retry_budget=config.retries.budget,
            passthrough=config.passthrough,
            tokens=config.sessions.token,
            labels=config.sessions.labels,
            queueing=make_queueing(config),
            pressure=make_pressure(config),
        )
        # None is made here, but of a model that is not configured any more prompts are text again.
        kept = {name for name, model in config.models.items() if model.tokenizer is not None}
        self.gateway.modes = {name: mode for name, mode in self.gateway.modes.items() if name in kept}
        told = config.sessions
        self.sessions.reconfigure(told.max, told.idle, told.headers, told.fields, told.cookie)
        self.index.radix.max_bytes = self.index.blocks.max_bytes = config.index.max_bytes
        self.gateway.pairs.lease, self.gateway.pairs.keep = config.disaggregation.lease, config.disaggregation.keep
        probes, probe = config.probes, self.probe
        probe.health_seconds, probe.load_seconds, probe.join_seconds = probes.health, probes.load, probes.join
        if self.gateway.doctor is not None:
            doctor = config.doctor
            self.gateway.doctor.reconfigure(doctor.memory, doctor.rate, doctor.share, doctor.examples)
        self.warming.most, self.warming.seconds = config.warming.starts, config.warming.seconds
        self.gateway.roots = self.warming.roots if config.warming.starts else None

    async def _record(self) -> None:
        wanted = self.config.recording
        if wanted is None:
            return
        try:
            file = File(wanted.file, wanted.max)
        except Unrecordable as error:
            raise ConfigError([Problem(None, "recording.file", str(error))]) from None
        self.gateway.recorder = Recorder(file, wanted.share, self.metrics, self.gateway.defect)
        await self.gateway.recorder.start()

    async def _beat(self) -> None:
        """Feel the event loop's pulse."""
        clock, pressure, pulse = self.gateway.clock, self.gateway.pressure, self.pulse
        memory_at = 0.0
        while True:
            expected = clock() + BEAT
            await asyncio.sleep(BEAT)
            now = pulse.at = clock()
            memory = None
            if now >= memory_at:
                memory, memory_at = resident(), now + 1.0
                pulse.ready = self.gateway.own.readiness()[0]
                pulse.told = {"pressure": pressure.told()}
            pressure.beat(max(0.0, now - expected), memory, now)

    async def _tick(self) -> None:
        clock = self.gateway.clock
        expected = clock() + TICK
        while True:
            await asyncio.sleep(max(0.0, expected - clock()))
            now = clock()
            self.metrics.lag.observe((), max(0.0, now - expected))
            expected = now + TICK
            try:
                self.descriptors.look(now)
                self.gateway.sweep()
                self.moving.sweep(now)
                self.reloading.listed.sweep(now)
                self.admin.sweep()
                self._foresee(now)
                if now >= self._observe_at:
                    self._observe_at = now + OBSERVE
                    self._observe()
            except Exception:
                self.gateway.defect("upkeep")

    def _foresee(self, now: float) -> None:
        """Say it before a cache is too small for the sessions that will return to it."""
        returning = self.gateway.routing.returning
        for worker in self.fleet.workers.values():
            crowded = any(returning.crowded(target, now) for target in worker.targets)
            if crowded != ("returning" in worker.observed):
                worker.observe("returning", crowded)
                self._warn(worker)

    def _observe(self) -> None:
        """What traffic of the last while shows of each engine."""
        for worker in self.fleet.workers.values():
            small = False
            for target in worker.targets:
                evicted, capacity = self.index.radix.evicted(target.id), self.index.radix.capacity(target.id)
                gone = evicted - self._evicted.get(target.id, 0)
                self._evicted[target.id] = evicted
                small = small or (capacity is not None and gone > capacity * CHURN)
            worker.observe("small_cache", small)
            self._warn(worker)

    # -- fleet ------------------------------------------------------------------------------------------------------

    def add_worker(self, spec: WorkerSpec, watch: bool = True) -> Worker:
        """Add a worker and watch it. One of the same address is returned as it is."""
        worker = self.fleet.add(spec)
        if watch:
            self.probe.watch(worker)
        return worker

    def resume_worker(self, worker: Worker) -> None:
        """It drains no more."""
        self.moving.resume(worker)
        # What was never read, or fails its probes, has to join again; what is healthy serves at once.
        serves = bool(worker.targets) and not worker.failures
        self.fleet.set_state(worker, State.READY if serves else State.JOINING, "resumed by the operator")

    def remove_worker(self, worker: Worker) -> None:
        """Forget a worker; what it still answers is relayed to its end."""
        self.probe.unwatch(worker)
        names = [target.name for target in worker.targets]
        self.fleet.remove(worker)
        self._audited.pop(worker.id, None)
        for target in worker.targets:
            self.subscriptions.leave(target)
            self.index.remove(target.id)
            self._evicted.pop(target.id, None)
        for name in names:
            self.metrics.drop_target(name)

    def _make_modes(self) -> dict[str, Mode]:
        """How token ids are made, for models that have a tokenizer. Raises `ConfigError` for a file that is none."""
        modes: dict[str, Mode] = {}
        tokenizers: dict[str, Any] = {}
        for name, model in self.config.models.items():
            if model.tokenizer is None:
                continue
            if self.pool is None:
                self.pool = Pool(monotonic)
            if model.tokenizer == "engine":
                modes[name] = Engines(name, self.pool, monotonic, partial(self._ask_any, name))
                continue
            from gateway.templates import Template
            from gateway.tokens import Tokenizer, TokenMode

            try:
                found = tokenizers.get(model.tokenizer)
                if found is None:
                    found = tokenizers[model.tokenizer] = Tokenizer(model.tokenizer)
                template = Template.load(model.template, model.tokenizer) if model.template else None
            except ValueError as error:
                raise ConfigError([Problem(None, f"models.{name}", str(error))]) from None
            if template is None:
                log.warning("models.%s has no template: only prompts that are plain text are routed by token ids", name)
            modes[name] = TokenMode(name, found, template, self.pool)
        return modes

    async def _ask_any(self, model: str, path: str, body: bytes) -> Answer:
        """Have some ready worker of ``model`` answer. Raises `GatewayFault` or `WorkerFault`."""
        ready = [worker for worker in self.fleet.serving(model) if worker.state is State.READY]
        if not ready:
            raise NoWorker(f"no worker serves {model!r} now")
        self._asked += 1
        return await self.probe.ask(ready[self._asked % len(ready)], path, "POST", body)

    def _described(self, worker: Worker) -> None:
        self.gateway.routing.holdings.described(worker)
        self.subscriptions.watch(worker)
        if self.keeper is not None:
            self.keeper.arrived(worker)
        self._warn(worker)

    def _warn(self, worker: Worker) -> None:
        """Log what a worker lacks, once for each change of it."""
        found = audit_lines(worker)
        if self._audited.get(worker.id) != found:
            self._audited[worker.id] = found
            for line in found:
                log.warning("%s: %s", worker.id, line)

    def _forget(self, target: int) -> None:
        self.gateway.forget_target(target)
        if target in self.fleet.targets:
            self.subscriptions.doubt(target)
        else:
            self.index.remove(target)

    def _by_ids(self, worker: Worker) -> bool:
        """Whether it serves a model whose prompts come as token ids."""
        served = worker.facts.models
        return any(model.name in self.gateway.modes for model in served) if served else bool(self.gateway.modes)

    def _moved(self, target: int, before: Rung, after: Rung, reason: str) -> None:
        found = self.fleet.targets.get(target)
        if found is None:
            return
        self.metrics.index_moves.add((found.name, after.value, reason))
        log.log(
            logging.INFO if after is Rung.EXACT else logging.WARNING,
            "what %s holds is %s now, not %s: %s",
            found.name,
            after.value,
            before.value,
            reason,
        )

    def _bound(self, session: Session) -> None:
        """Its home is another, or none."""
        if session.told is not None:
            self.lifecycle.moved(session)
        if self.keeper is not None:
            self.keeper.changed(session)

    def _dropped(self, session: Session) -> None:
        """It was forgotten."""
        if self.gateway.doctor is not None:
            self.gateway.doctor.forget(session.hash)

    def _homes(self, target: int, change: int) -> None:
        found = self.fleet.targets.get(target)
        if found is not None:
            found.homes = max(0, found.homes + change)


def _connections(wanted: int) -> int:
    """As many client connections as the descriptor limit allows beside as many to workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * wanted + 256
    if soft < need:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard) if hard >= 0 else need, hard))
        except (ValueError, OSError):
            pass
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < need:
        allowed = max(64, (soft - 256) // 2)
        log.warning(
            "the descriptor limit %d allows %d client connections, not %d: raise ulimit -n", soft, allowed, wanted
        )
        return allowed
    return wanted


def make_limits(config: Config) -> tuple[Inward, Outward]:
    """Bounds of the data plane, towards clients and towards workers."""
    inward = Inward(
        body=config.listen.max_body,
        connections=_connections(config.listen.max_connections),
        idle_seconds=config.listen.idle,
        head_seconds=config.listen.head_timeout,
        body_seconds=config.listen.body_timeout,
        comment_seconds=config.listen.comment_after,
    )
    outward = Outward(
        connect_seconds=config.timeouts.connect,
        first_byte_seconds=config.timeouts.first_byte,
        idle_seconds=config.timeouts.idle,
    )
    return inward, outward


def _doctor(config: Config, gateway: Gateway) -> Doctor | None:
    told, metrics = config.doctor, gateway.metrics
    if not told.enabled:
        return None

    def counted(tenant: str, cause: str, tokens: int) -> None:
        metrics.breaks.add((tenant, cause))
        metrics.break_tokens.add((tenant, cause), tokens)

    return Doctor(
        memory=told.memory,
        rate=told.rate,
        share=told.share,
        examples=told.examples,
        shows=lambda tenant: gateway.tenants.shows_content(tenant),
        counted=counted,
    )


def _store(config: Config) -> Store | None:
    """Where sessions are kept over a restart, if anywhere. Raises `ConfigError` for a URL that is none of Redis'."""
    if config.sessions.redis is not None:
        try:
            return RedisStore(str(config.sessions.redis), config.sessions.idle)
        except ValueError:
            # What it is may have a password in it.
            problem = Problem(None, "sessions.redis", "is no URL of a Redis: redis://host:port/db")
            raise ConfigError([problem]) from None
    return None if config.sessions.state is None else FileStore(config.sessions.state)


def _secret(config: Config, store: Store | None) -> bytes | None:
    """What session tokens are sealed with; ``None``: a random one. Raises `ConfigError` for a state file that is none."""
    kept = None
    if isinstance(store, FileStore):
        try:
            kept = store.secret_of()
        except Unsaved as error:
            raise ConfigError([Problem(None, "sessions.state", str(error))]) from None
    told = config.sessions.token_key or config.isolation_key
    return kept if told is None else str(told).encode()


def make_tenants(
    config: Config, metrics: Metrics | None = None, before: Tenants | None = None, key_set: KeySet | None = None
) -> Tenants:
    """Tenants with their policies and keys; of those ``before`` them only what they saw of credentials stays.

    ``key_set``: that of tokens' issuer. Raises `ConfigError` for keys that are none.
    """
    claims: dict[str, Tenant] = {}
    subjects: dict[str, Tenant] = {}
    pairs: list[tuple[str, Tenant]] = []
    filed: list[bytes] = []
    for number, each in enumerate(config.tenants):
        tenant = Tenant(
            each.name,
            policy=config.make_policy(each.policy) if each.policy else None,
            models=frozenset(each.models) if each.models is not None else None,
            aliases=dict(each.aliases),
            shows_routing=each.show_routing,
            isolated=each.isolation == "isolated",
            canonical=frozenset(each.canonical),
            priority=each.priority,
            weight=each.weight,
            limits=TenantLimits(**asdict(each.limits)),
            log_content=each.log_content,
        )
        pairs += [(str(key), tenant) for key in each.keys]
        claims |= dict.fromkeys([each.name] if each.claims is None else each.claims, tenant)
        subjects |= dict.fromkeys(each.subjects, tenant)
        try:
            found = [str(key) for path in each.key_files for key in read_keys(path)]
            pairs += [(key, tenant) for key in found]
            filed += [each.name.encode(), *map(str.encode, found)]
        except BadKey as error:
            raise ConfigError([Problem(None, f"tenants[{number}].key_files", str(error))]) from None
    return Tenants(
        pairs,
        Tenant(ANONYMOUS, log_content=not config.tenants) if config.anonymous or not config.tenants else None,
        keyed=bool(config.tenants),
        tokens=None if key_set is None else _tokens(config, key_set),
        claims=claims if key_set is not None else None,
        subjects=subjects,
        guesses=Guesses[Known](config.auth.failures_per_minute) if before is None else before.guesses,
        filed=blake2b(b"\n".join(filed)).digest(),
        counted=(lambda reason: None) if metrics is None else lambda reason: metrics.auth_failures.add((reason,)),
    )


def _tokens(config: Config, keys: KeySet) -> Tokens:
    told = config.auth.jwt
    assert told is not None
    return Tokens(
        keys,
        issuer=told.issuer,
        audience=told.audience,
        claim=told.claim,
        algorithms=told.algorithms,
        leeway=told.leeway,
    )


def make_queueing(config: Config) -> Queueing:
    """The queue in front of the fleet."""
    told = config.admission
    unbounded = 1 << 62
    priorities = tuple(
        Priority(name, level.share, level.deadline or told.deadline, level.queue or unbounded, unbounded)
        for name, level in told.priorities.items()
    )
    # Where there are several, none of them fills it.
    part = 2 if config.tenants else 1
    bounds = Bounds(
        told.queue,
        told.bytes,
        told.tenant_queue or max(1, told.queue // part),
        told.tenant_bytes or max(1, told.bytes // part),
    )
    return Queueing(told.ahead, told.hold, bounds, priorities)


def make_pressure(config: Config) -> Limits:
    """When the gateway itself is short of time or memory."""
    return Limits(config.pressure.lag, config.pressure.memory or allowed())


def make_options(config: Config) -> Options:
    """How models are named and routed."""
    return Options(
        default=lambda: config.make_policy(config.policy),
        policies={name: config.make_policy(model.policy) for name, model in config.models.items() if model.policy},
        aliases={alias: name for name, model in config.models.items() for alias in model.aliases},
        configured=frozenset(config.models),
        thinking={name: Thinking(model.thinking) for name, model in config.models.items() if model.thinking != "auto"},
        hybrid=frozenset(name for name, model in config.models.items() if model.reuse == "checkpoints"),
        rules={
            name: Rule.of(model.checkpoints) for name, model in config.models.items() if model.checkpoints != "auto"
        },
        anywhere=frozenset(name for name, model in config.models.items() if model.reuse == "any"),
        by_ids=frozenset(name for name, model in config.models.items() if model.tokenizer is not None),
        kv_bytes={name: model.kv_bytes for name, model in config.models.items() if model.kv_bytes},
        restore={
            name: (model.restore.host / 1e3, model.restore.disk / 1e3, model.restore.shared / 1e3)
            for name, model in config.models.items()
        },
    )


def keep_heap() -> None:
    """Have glibc keep freed memory: handing a prompt's buffers back to the kernel and faulting them in again for the next
    request costs as much as parsing it. Up to 64 MiB stay; blocks over 4 MiB still go back. Elsewhere nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_TRIM_THRESHOLD, 64 * 1024 * 1024), (M_MMAP_THRESHOLD, 4 * 1024 * 1024)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))


async def serve(config: Config, source: Source | None = None) -> None:
    """Run until SIGTERM or SIGINT; a second one ends at once. SIGHUP reloads the configuration."""
    running = Running(config, source)
    # Before all else: it would end a process that does not expect it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, running.reloading.ask)
    await running.start()
    # What is alive now stays; what requests make is freed by reference counts. A collector that walks a million nodes of
    # the index for every few hundred requests would be the dearest part of the gateway.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    keep_heap()
    log.info(
        "listening on %s:%d, admin on %s:%d", config.listen.host, running.port, config.admin.host, running.admin.port
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = 0
    wanted: float | None = None

    def asked(pause: float | None) -> None:
        nonlocal signals, wanted
        signals += 1
        wanted = pause
        stop.set()
        if signals > 1:
            running.hurry.set()
            for exchange in list(running.gateway.exchanges):
                exchange.client.abort()
                exchange.client_gone()

    loop.add_signal_handler(signal.SIGTERM, asked, None)
    # Somebody at a terminal has no balancer that must notice first.
    loop.add_signal_handler(signal.SIGINT, asked, 0.0)
    await stop.wait()
    log.info("draining: %d requests are running", len(running.gateway.exchanges))
    await running.stop(wanted)
