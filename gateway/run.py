"""Starting and stopping a gateway: listeners, probes, upkeep, and the order in which they end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import ssl
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from threading import Thread
from time import monotonic
from typing import Any

from gateway.admin import AdminSite
from gateway.app import Gateway
from gateway.asks import Options
from gateway.config import Config
from gateway.config_reader import ConfigError, Problem
from gateway.descriptors import Descriptors
from gateway.discovered import Discovered
from gateway.engines import Answer
from gateway.engines.audit import lines as audit_lines
from gateway.errors import NoWorker
from gateway.fleet import Fleet
from gateway.health import Health
from gateway.http.outbox import Outbox
from gateway.http.server import Inbound
from gateway.inserts import SALTED
from gateway.jwks import KeySet
from gateway.keeping import Keeper
from gateway.leases import Leases
from gateway.lifecycle import Lifecycle
from gateway.making import (
    make_common,
    make_doctor,
    make_limits,
    make_options,
    make_pressure,
    make_queueing,
    make_secret,
    make_store,
    make_tenants,
)
from gateway.metrics import Metrics
from gateway.moving import Moving
from gateway.opened import OpenSessions
from gateway.preparing import Engines, Mode, Pool
from gateway.pressure import BEAT, Pressure, Pulse, resident
from gateway.probe import Probe
from gateway.recording import File, Unrecordable
from gateway.records import Recorder
from gateway.reload import Reloading
from gateway.replicas.joined import make_replicas
from gateway.requestlog import CONSOLE, RequestLog
from gateway.roots import Roots, Warming
from gateway.seat import Seat
from gateway.sessions import Session, Sessions
from gateway.source import Source
from gateway.subscribe import Subscriptions
from gateway.tenants import Tenants
from gateway.tls import context, digest
from gateway.together import Added
from gateway.workers import ADDED, LEASED, State, Worker, WorkerSpec, id_of
from kv_index.blocks import BlockIndex
from kv_index.index import PrefixIndex, Rung
from kv_index.radix import RadixIndex

log = logging.getLogger("warmroute")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Of glibc's ``malloc.h``."""
OBSERVE = 30.0
"""Seconds between two judgements of what traffic shows of the engines."""
CHURN = 0.5
"""Share of a cache that is evicted within that time when it is too small for its sessions."""
CLOSING = 10.0
"""Seconds that engines may take to hear of the ends of all sessions when the gateway stops."""
REMEMBERED = 8
"""The part of the index, one in so many, for prompts that nobody holds any more: they tell the ceiling."""
SENDING = 3.0
"""Seconds that the last traces may take to be sent."""
ANY = "any"
"""The label of requests that name no model of anybody's."""
HAND_OVER = 3.0
"""Seconds for which open connections may bring one more request when another process takes the place of this one."""
KNOWS = 8.0
"""Seconds for which one of several processes takes no connection because it does not know enough yet, at most."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""
TICK = 0.5
"""Seconds between two rounds of upkeep; also the probe of the event loop's lag."""


class Running:
    """One gateway with its listeners. ``await start()``, then ``await stop()``."""

    def __init__(self, config: Config, source: Source | None = None, seat: Seat | None = None) -> None:
        self.config = config
        self.seat = seat
        """Its place among several processes; ``None``: it is the only one."""
        self.reloading = Reloading(self, source)
        self.tls: ssl.SSLContext | None = None
        """What the listener speaks."""
        self.tls_digest: bytes | None = None
        """Of the certificate's files."""
        self.ca_digest: bytes | None = None
        """Of the authorities'."""
        limits_in, limits_out = make_limits(config)
        most = config.index.max_bytes
        self.index = PrefixIndex(RadixIndex(most, remember=most // REMEMBERED), BlockIndex(most), self._moved)
        self.metrics = Metrics()
        told = config.auth.jwt
        self.key_set = None if told is None else KeySet(told.jwks, told.refresh, self.metrics)
        """Of whoever issues tokens."""
        self.pool: Pool | None = None
        self._asked = 0
        self._parting: set[str] = set()
        """Tenants that are not configured any more, some of whose requests may run."""
        self.fleet = Fleet(monotonic, limits_out, self._forget, Outbox(asyncio.get_running_loop()))
        self.keeper: Keeper | None = None
        store, common = make_store(config, seat), make_common(config, seat)
        self.sessions = Sessions(
            most=config.sessions.max,
            idle=config.sessions.idle,
            headers=config.sessions.headers,
            fields=config.sessions.fields,
            cookie=config.sessions.cookie,
            secret=make_secret(config, store, common),
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
            isolation_key=config.isolation_key or common,
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
        given = None if seat is None else seat.socket("health")
        self.health = None if health is None else Health(self.pulse, health.host, health.port, health.stalled, given)
        self.probe = Probe(
            self.fleet,
            self._described,
            self.gateway.accounts.heard,
            self._counted,
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
        self.gateway.doctor = make_doctor(config, self.gateway)
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
        self.fleet.began = self.warming.empty
        self.index.lost = self._emptied
        if store is not None:
            self.keeper = Keeper(store, self.sessions, self.fleet)
            self.keeper.pin = self.gateway.routing.pins.put
        self.replicas = make_replicas(self, config, seat)
        if self.keeper is not None or self.replicas is not None:
            self.sessions.turned = self._turned
        self.fleet.went_down = self.gateway.worker_down
        self.gateway.pairs.doubt = self.probe.doubt
        self.admin = AdminSite(self)
        self.discovered = Discovered(self)
        self.leases = Leases(self)
        self.metrics.gauges += self.reloading.gauges() + self.discovered.gauges()
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
        self._handed_over = False
        self._audited: dict[str, list[str]] = {}
        self._evicted: dict[int, int] = {}
        self._observe_at = monotonic() + OBSERVE
        for worker in config.workers:
            self.add_worker(worker.spec(config.disaggregation.named), watch=False)

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen and watch. Raises `OSError` when an address cannot be had, `ConfigError` when the recording cannot."""
        listen, loop = self.config.listen, asyncio.get_running_loop()
        await self._record()
        self._log_requests()
        self._trace()
        if listen.tls is not None:
            self.tls_digest, self.ca_digest = digest(listen.tls.files), digest(listen.tls.authorities)
            self.tls = context(listen.tls)
        if self.seat is None:
            await self._listen()
        await self.admin.start()
        if self.health is not None:
            self.health.start()
        self._beats = loop.create_task(self._beat(), name="beat")
        if self.keeper is not None:
            self.keeper.start()
        if self.replicas is not None:
            await self.replicas.start()
        await self.probe.start()
        self.reloading.start()
        self.discovered.start()
        if self.key_set is not None:
            self.key_set.start()
        self.lifecycle.start()
        if self.gateway.doctor is not None:
            self._examines = loop.create_task(self.gateway.doctor.run(), name="doctor")
        self._upkeep = loop.create_task(self._tick(), name="upkeep")
        if self.seat is not None:
            # Others serve meanwhile: a connection that is taken here should find workers, and its session.
            together = self.admin.together
            if together is not None and (told := await together.added()) is not None:
                self.follow(told)
            await self._knows()
            await self._listen()

    async def _listen(self) -> None:
        listen = self.config.listen
        given = None if self.seat is None else self.seat.socket("listen")
        told: dict[str, Any] = {"host": listen.host, "port": listen.port, "reuse_address": True}
        self._listener = await asyncio.get_running_loop().create_server(
            lambda: Inbound(self.gateway.server),
            ssl=self.tls,
            ssl_handshake_timeout=10.0 if self.tls is not None else None,
            backlog=BACKLOG,
            **(told if given is None else {"sock": given}),
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _knows(self) -> None:
        """Some worker is ready, and what other processes know is known; for some seconds at most."""
        replicas = self.replicas
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWS):
                while (self.fleet.workers or self.config.discovery) and self.fleet.view(None) is None:
                    await asyncio.sleep(TICK / 10)
                while replicas is not None and replicas.newcomer:
                    await asyncio.sleep(TICK / 10)

    async def stop(self, pause: float | None = None) -> None:
        """Drain: readiness off, a pause for balancers to notice, no new connections, running requests to their end."""
        gateway = self.gateway
        gateway.ending = True
        await self.reloading.stop()
        await self.discovered.stop()
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
        gateway.admission.stop()
        for exchange in list(gateway.exchanges):
            exchange.client.abort()
            exchange.client_gone()
        for waiting in list(gateway.preparing):
            waiting.client.abort_with_owner()
        if self.pool is not None:
            self.pool.close()
        if gateway.tracer is not None:
            tracer, gateway.tracer = gateway.tracer, None
            # A collector that does not answer keeps this thread, but not the gateway.
            sends = Thread(target=tracer.stop, name="traces", daemon=True)
            sends.start()
            await asyncio.to_thread(sends.join, SENDING)
        if gateway.request_log is not None:
            lines, gateway.request_log = gateway.request_log, None
            await lines.stop()
        if gateway.recorder is not None:
            recorder, gateway.recorder = gateway.recorder, None
            await recorder.stop()
        await gateway.pairs.stop()
        await self.warming.stop()
        if gateway.opened is not None:
            await gateway.opened.stop()
        await self.lifecycle.stop(CLOSING, keeps=self.keeper is not None or self._outlived())
        if self.keeper is not None:
            await self.keeper.stop()
        if self.replicas is not None:
            await self.replicas.stop()
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
        await self.metrics.exposition.stop()
        for connection in list(gateway.server.connections):
            connection.shut()
        for worker in self.fleet.workers.values():
            worker.pool.close()
        # One turn of the loop, for closed transports to say so.
        await asyncio.sleep(0)

    async def hand_over(self) -> None:
        """Another process takes new connections from here on: those that are open may end in peace."""
        self._handed_over = True
        if self._listener is not None:
            self._listener.close()
        self.gateway.server.parting = True
        try:
            async with asyncio.timeout(HAND_OVER):
                await self.hurry.wait()
        except TimeoutError:
            pass

    def _outlived(self) -> bool:
        """Whether sessions go on elsewhere: at the process that takes its place, or at other hosts."""
        if self._handed_over or self.replicas is None:
            return self._handed_over
        # Those of one host end together; without processes of its own a host has no name.
        return any(peer.host != self.replicas.host or not peer.host for peer in self.replicas.peers.values())

    def lives(self, what: bytes = b".") -> None:
        """Tell the supervisor."""
        if self.seat is not None and self.seat.status >= 0:
            with suppress(OSError):
                os.write(self.seat.status, what)

    def make(self, config: Config) -> tuple[Tenants, Options]:
        """What is made of ``config`` to be followed; changes nothing. Raises `ConfigError`."""
        tenants = make_tenants(config, self.metrics, self.gateway.tenants, self.key_set)
        return tenants, make_options(config)

    def reconfigure(self, config: Config, tenants: Tenants, options: Options) -> None:
        """Follow ``config`` from here on, workers excepted."""
        self.config = config
        limits_in, limits_out = make_limits(config)
        before, after = ({tenant.name for tenant in each.all()} for each in (self.gateway.tenants, tenants))
        self._parting = (self._parting | before) - after
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
        most = self.index.radix.max_bytes = self.index.blocks.max_bytes = config.index.max_bytes
        self.index.radix.remember = most // REMEMBERED
        self.gateway.pairs.lease, self.gateway.pairs.keep = config.disaggregation.lease, config.disaggregation.keep
        probes, probe = config.probes, self.probe
        probe.health_seconds, probe.load_seconds, probe.join_seconds = probes.health, probes.load, probes.join
        if self.gateway.doctor is not None:
            doctor = config.doctor
            self.gateway.doctor.reconfigure(doctor.memory, doctor.rate, doctor.share, doctor.examples)
        self.warming.most, self.warming.seconds = config.warming.starts, config.warming.seconds
        self.gateway.roots = self.warming.roots if config.warming.starts else None

    def _log_requests(self) -> None:
        wanted = self.config.request_log
        if wanted is None:
            return
        try:
            path = wanted.file if self.seat is None or wanted.file == CONSOLE else self.seat.own(wanted.file)
            opened = RequestLog(path, wanted.format == "json", wanted.max, wanted.keep, self.metrics)
        except OSError as error:
            told = f"{wanted.file!r} cannot be written: {error.strerror}"
            raise ConfigError([Problem(None, "request_log.file", told)]) from None
        opened.start()
        self.gateway.request_log = opened

    def _trace(self) -> None:
        wanted = self.config.tracing
        if wanted is not None:
            # What it imports is an extra, and takes its time.
            from gateway.tracing import Tracer

            self.gateway.tracer = Tracer(
                wanted.endpoint, wanted.share, wanted.service, version("warmroute"), wanted.trust
            )

    async def _record(self) -> None:
        wanted = self.config.recording
        if wanted is None:
            return
        try:
            file = File(wanted.file if self.seat is None else self.seat.own(wanted.file), wanted.max, wanted.keep)
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
                self.lives()
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
                self.discovered.sweep(now)
                self.leases.sweep(now)
                self.admin.sweep()
                self._foresee(now)
                self._part()
                if now >= self._observe_at:
                    self._observe_at = now + OBSERVE
                    self._observe()
                    self._part_models()
            except Exception:
                self.gateway.defect("upkeep")

    def _part(self) -> None:
        """Tenants that are not configured any more have no series, once the last of their requests ended."""
        if self._parting:
            busy = {exchange.ask.tenant.name for exchange in self.gateway.exchanges}
            for name in self._parting - busy:
                self.metrics.drop("tenant", name)
            self._parting &= busy

    def _part_models(self) -> None:
        """Models that nobody serves and no configuration names any more have no series: adapters come and go."""
        served = {model.name for worker in self.fleet.workers.values() for model in worker.facts.models}
        stays = (
            served | self.gateway.options.configured | {exchange.ask.model_name for exchange in self.gateway.exchanges}
        )
        for name in self.metrics.models() - stays - {ANY}:
            self.metrics.drop("model", name)

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

    def added(self) -> Added:
        """What of the fleet is not as configured, for a process that comes."""
        listed = {id_of(each.url) for each in self.config.workers}
        workers = self.fleet.workers
        return Added(
            [
                (worker.spec, self.leases.seconds(worker))
                for worker in workers.values()
                if worker.origin in (ADDED, LEASED)
            ],
            [id_ for id_ in listed if id_ not in workers],
            [id_ for id_, worker in workers.items() if worker.state is State.DRAINING],
        )

    def follow(self, added: Added) -> None:
        """Have the fleet as another process has it."""
        for spec, lease in added.workers:
            if lease is None:
                self.add_worker(spec)
            else:
                self.leases.grant(spec, lease)
        for id_ in added.removed:
            if (worker := self.fleet.workers.get(id_)) is not None:
                self.remove_worker(worker)
        for id_ in added.draining:
            if (worker := self.fleet.workers.get(id_)) is not None and worker.state is not State.DRAINING:
                self.moving.drain(worker)

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
            if self.replicas is not None:
                self.replicas.removed(target.id)
            self._evicted.pop(target.id, None)
        for name in names:
            self.metrics.drop("target", name)
        self.metrics.drop("worker", worker.id)

    def _counted(self, worker: Worker, prompt: int, cached: int, aborted: int) -> None:
        if worker.id in self.fleet.workers:
            self.metrics.engine_prompt_tokens.add((worker.id,), prompt)
            self.metrics.engine_cached_tokens.add((worker.id,), cached)
            self.metrics.engine_aborts.add((worker.id,), aborted)

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
        if worker.id in self.fleet.workers:
            for target in worker.targets:
                self.metrics.joined(target.name, target.id in self.subscriptions.listeners)
        if self.keeper is not None:
            self.keeper.arrived(worker)
        isolates = any(tenant.isolated for tenant in self.gateway.tenants.all())
        worker.observe("salt", isolates and worker.facts.engine not in SALTED)
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
        if self.replicas is not None:
            self.replicas.said.bound(session)

    def _turned(self, session: Session, now: float) -> None:
        """A turn of it ended."""
        if self.keeper is not None:
            self.keeper.used(session, now)
        if self.replicas is not None:
            self.replicas.said.turned(session, now)

    def _emptied(self, target: int) -> None:
        """It holds nothing."""
        if self.replicas is not None:
            self.replicas.heard.empty(target)
        self.warming.empty(target)

    def _dropped(self, session: Session) -> None:
        """It was forgotten."""
        if self.gateway.doctor is not None:
            self.gateway.doctor.forget(session.hash)

    def _homes(self, target: int, change: int) -> None:
        found = self.fleet.targets.get(target)
        if found is not None:
            found.homes = max(0, found.homes + change)


def keep_heap() -> None:
    """Have glibc keep freed memory: handing a prompt's buffers back to the kernel and faulting them in again for the next
    request costs as much as parsing it. Up to 64 MiB stay; blocks over 4 MiB still go back. Elsewhere nothing happens."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_TRIM_THRESHOLD, 64 * 1024 * 1024), (M_MMAP_THRESHOLD, 4 * 1024 * 1024)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))


async def serve(config: Config, source: Source | None = None, seat: Seat | None = None) -> None:
    """Run until SIGTERM or SIGINT; a second one ends at once. SIGHUP reloads the configuration. One of several processes also
    ends with its supervisor, and hands over to another one on SIGUSR1."""
    running = Running(config, source, seat)
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
    if seat is not None:
        loop.add_signal_handler(signal.SIGUSR1, asked, HAND_OVER)
        loop.add_reader(seat.life, asked, None)
        running.lives(b"r")
    await stop.wait()
    if seat is not None:
        loop.remove_reader(seat.life)
    log.info("draining: %d requests are running", len(running.gateway.exchanges))
    if wanted == HAND_OVER:
        await running.hand_over()
        wanted = 0.0
    await running.stop(wanted)
