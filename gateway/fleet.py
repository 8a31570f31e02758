"""Workers and targets: states, who may be used now, and one accounting of what is in flight that every path passes.

A worker is ``joining`` until its engine was read, ``ready`` while probes and traffic agree that it serves, ``draining``
when it shall get nothing new, ``down`` when it does not answer. A target may be used if its worker is ready, its breaker
allows it and it did not ask for a pause.

In flight: `Charge` is made when a request is sent and ends exactly once, whatever happens. Its first part, the prefill,
is over at the first body event; where an answer is not streamed nothing tells that moment, so it is over when its own
estimate says so.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from gateway.breaker import Breaker
from gateway.calibrate import Calibration
from gateway.errors import Refused, WorkerFault
from gateway.http.limits import Outward
from gateway.http.outbox import Outbox
from gateway.http.upstream import Pool
from policies.base import Fleet as View, Rates, Target as TargetView

SLOW_START = 30.0
"""Seconds in which a cold worker works its way up to its fair share."""
FIRST_SHARE = 0.1
FALL = 3
"""Failures in a row after which a worker is down."""
WHEEL = 20
"""Slots a second in which estimates end."""
UNTOLD = 20
"""Answers whose usage leaves cached tokens out, after which the engine is said not to report them."""
RISE = 2
"""Probes in a row after which it is ready again."""


_BLANK = re.compile(r"[\x00-\x20\x7f]")


class State(StrEnum):
    """States of a worker."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(slots=True)
class ServedModel:
    """One model as a worker lists it."""

    name: str
    parent: str | None = None
    """The base model, if this is an adapter."""
    max_length: int | None = None
    listing: dict[str, Any] = field(default_factory=dict)
    """The worker's own entry of ``/v1/models``."""


@dataclass(slots=True)
class Facts:
    """What an engine says of itself; ``None`` where it does not."""

    engine: str = "generic"
    version: str | None = None
    models: list[ServedModel] = field(default_factory=list)
    role: str | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    context_length: int | None = None
    ranks: int = 1
    max_running: int | None = None
    started: float | None = None
    """The engine's start, Unix seconds: a change is a restart."""
    missing: list[str] = field(default_factory=list)
    """Codes of `engines.audit`: what the engine does not offer."""


@dataclass(slots=True)
class Load:
    """One report of one rank's load; ``None`` where the engine does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    taken: float = 0.0
    """When, on the gateway's clock."""


@dataclass(slots=True)
class WorkerSpec:
    """A worker as configured; ``None`` means: detect."""

    url: str
    engine: str | None = None
    role: str | None = None
    models: list[str] | None = None
    api_key: str | None = None
    kv_tokens: int | None = None
    verify_tls: bool = True
    ca: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("a worker's url takes no user and no password: give the key as api_key")
        if parts.scheme not in ("http", "https") or not parts.hostname or _BLANK.search(self.url):
            raise ValueError(f"a worker's url must look like http://host:port, not {self.url!r}")
        if parts.query or parts.fragment:
            raise ValueError(f"a worker's url takes no query and no fragment: {self.url!r}")
        try:
            parts.port  # noqa: B018
        except ValueError:
            raise ValueError(f"a worker's url needs a port from 1 to 65535: {self.url!r}") from None
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError("a worker's api_key holds a line break or a control character")


class Target(TargetView):
    """One (worker, rank) with what only the gateway knows of it."""

    __slots__ = ("breaker", "charged", "load_report", "paused_until", "queued", "rank", "worker")

    def __init__(self, id: int, worker: Worker, rank: int) -> None:
        super().__init__(id=id, name=worker.id if rank == 0 else f"{worker.id}#{rank}")
        self.worker = worker
        self.rank = rank
        self.breaker = Breaker()
        self.charged = 0.0
        """Seconds of our own prefills in front."""
        self.queued = 0.0
        """Seconds that others' waiting requests put in front, as the engine reported."""
        self.paused_until = 0.0
        """It asked for a pause (Retry-After)."""
        self.load_report: Load | None = None

    def recount(self) -> None:
        """Bring what policies see in line with the accounting."""
        if not self.running:
            # Sums of floats drift; an idle target is exactly idle, so that idle targets tie.
            self.charged = 0.0
            self.busy = self.foreign
        self.wait = self.charged + self.queued


class Charge:
    """One request in flight on one target."""

    __slots__ = ("context", "ended", "prefilled", "seconds", "target", "trial", "uncached")

    def __init__(self, target: Target, seconds: float, uncached: float, context: float, trial: bool) -> None:
        self.target = target
        self.seconds = seconds
        self.uncached = uncached
        self.context = context
        self.prefilled = False
        self.ended = False
        self.trial = trial


class Worker:
    """One engine process behind one URL."""

    def __init__(self, spec: WorkerSpec, limits: Outward, outbox: Outbox | None = None) -> None:
        self.spec = spec
        parts = urlsplit(spec.url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = _tls(spec) if parts.scheme == "https" else None
        self.base = parts.path.rstrip("/").encode()
        self.id = f"{self.host}:{self.port}{parts.path.rstrip('/')}"
        self.authority = (f"[{self.host}]" if ":" in self.host else self.host) + f":{self.port}"
        self.state = State.JOINING
        self.reason = "not read yet"
        """Why it is in this state, for people."""
        self.facts = Facts(engine=spec.engine or "generic")
        self.targets: list[Target] = []
        self.pool = Pool(self.host, self.port, tls=self.tls, limits=limits, outbox=outbox)
        self.failures = 0
        """Probes and connections that failed in a row."""
        self.successes = 0
        self.answered = 0
        """Requests that it answered as it should."""
        self.ready_since: float | None = None
        self.untold = 0
        """Answers in a row whose usage left cached tokens out."""
        self.observed: list[str] = []
        """Codes of `engines.audit` that traffic showed."""

    def told_cached(self, told: bool) -> None:
        """An answer with usage came, with or without cached tokens: engines do not say otherwise that they leave them out."""
        if told:
            if self.untold:
                self.untold = 0
                self.observe("usage_details", False)
        elif self.untold < UNTOLD:
            self.untold += 1
            if self.untold == UNTOLD:
                self.observe("usage_details", True)

    def observe(self, code: str, lacks: bool) -> None:
        """Traffic shows that it lacks ``code`` of `engines.audit`, or that it does not."""
        if lacks and code not in self.observed:
            self.observed.append(code)
        elif not lacks and code in self.observed:
            self.observed.remove(code)

    @property
    def role(self) -> str:
        """``unified``, ``prefill`` or ``decode``."""
        return self.spec.role or self.facts.role or "unified"

    @property
    def url(self) -> str:
        """As configured."""
        return self.spec.url

    @property
    def running(self) -> int:
        """Our requests in flight."""
        return sum(target.running for target in self.targets)


class Fleet:
    """All workers; see the module's head. ``now`` is always seconds on the loop's clock."""

    def __init__(
        self,
        clock: Callable[[], float],
        limits: Outward | None = None,
        forget: Callable[[int], None] = lambda target: None,
        outbox: Outbox | None = None,
    ) -> None:
        self.clock = clock
        self.limits = limits or Outward()
        self.outbox = outbox
        self.forget = forget
        """Told when what a target held is gone: removal, restart."""
        self.workers: dict[str, Worker] = {}
        self.targets: dict[int, Target] = {}
        self.calibrations: dict[tuple[str, str], Calibration] = {}
        self.known_models: dict[str, float] = {}
        """Model -> when a ready worker last listed it: tells 404 from 503."""
        self._ids = count()
        self._views: dict[str | None, View | None] = {}
        self._due: dict[int, list[Charge]] = {}
        """Slot of `WHEEL` -> unstreamed requests whose prefill is over by then, as far as can be estimated."""
        self._settled = 0
        self._started = clock()

    # -- membership -------------------------------------------------------------------------------------------------

    def add(self, spec: WorkerSpec) -> Worker:
        """Add a worker in state ``joining``; an existing one of the same address is returned as it is."""
        worker = Worker(spec, self.limits, self.outbox)
        if worker.id in self.workers:
            return self.workers[worker.id]
        self.workers[worker.id] = worker
        return worker

    def remove(self, worker: Worker) -> None:
        """Forget a worker; what it still answers is relayed to its end."""
        self.workers.pop(worker.id, None)
        worker.state = State.DOWN
        worker.reason = "removed"
        worker.pool.close()
        for target in worker.targets:
            self.targets.pop(target.id, None)
            self.forget(target.id)
        self.changed()

    def describe(self, worker: Worker, facts: Facts) -> None:
        """What the engine of ``worker`` says of itself; makes its targets. Configuration wins over detection."""
        restarted = (
            worker.facts.started is not None and facts.started is not None and facts.started != worker.facts.started
        )
        if worker.spec.models is not None:
            listed = {model.name: model for model in facts.models}
            facts.models = [listed.get(name) or ServedModel(name) for name in worker.spec.models]
        if worker.spec.kv_tokens is not None:
            facts.kv_tokens = worker.spec.kv_tokens
        if facts.started is None:
            facts.started = worker.facts.started
        if not restarted and facts.engine == worker.facts.engine:
            # A page that was not there just now does not make a known size unknown.
            facts.kv_tokens = facts.kv_tokens or worker.facts.kv_tokens
            facts.block_size = facts.block_size or worker.facts.block_size
        worker.facts = facts
        while len(worker.targets) < max(1, facts.ranks):
            target = Target(next(self._ids), worker, len(worker.targets))
            worker.targets.append(target)
            self.targets[target.id] = target
        # While it serves it cannot lose a rank; a page that was not there just now tells fewer.
        while len(worker.targets) > max(1, facts.ranks) and (restarted or worker.state in (State.JOINING, State.DOWN)):
            gone = worker.targets.pop()
            self.targets.pop(gone.id, None)
            self.forget(gone.id)
        model = facts.models[0].name if facts.models else ""
        for target in worker.targets:
            target.rates = self.calibration(model, facts.engine).rates
        if restarted:
            self.restarted(worker)
        self.changed()

    def restarted(self, worker: Worker) -> None:
        """The engine's process is a new one: its cache is empty, its connections are gone."""
        for target in worker.targets:
            self.forget(target.id)
        worker.pool.close_idle()
        if worker.state is State.READY:
            self._begin(worker)
            self.changed()

    def calibration(self, model: str, engine: str) -> Calibration:
        """Learned rates of ``model`` on ``engine``; made when first asked for."""
        key = (model, engine)
        found = self.calibrations.get(key)
        if found is None:
            found = self.calibrations[key] = Calibration(Rates())
        return found

    # -- states -----------------------------------------------------------------------------------------------------

    def set_state(self, worker: Worker, state: State, reason: str) -> bool:
        """Change the state; true if it changed."""
        worker.reason = reason
        if worker.state is state:
            return False
        cold = worker.ready_since is None or worker.state is State.DOWN
        worker.state = state
        if state is State.READY:
            if cold:
                self._begin(worker)
            for target in worker.targets:
                target.breaker.succeeded()
        if state is State.DOWN:
            for target in worker.targets:
                self.forget(target.id)
            worker.pool.close_idle()
        self.changed()
        return True

    def _begin(self, worker: Worker) -> None:
        """It serves with an empty cache from now on."""
        worker.ready_since = now = self.clock()
        for target in worker.targets:
            target.share = self._share(worker, now)

    def _share(self, worker: Worker, now: float) -> float:
        """Slow start of whoever joins a fleet at work; those that start together with the gateway share evenly."""
        since = worker.ready_since
        if since is None or since <= self._started + SLOW_START:
            return 1.0
        return min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * (now - since) / SLOW_START)

    def changed(self) -> None:
        """Who may be used changed: views are made anew when next asked for."""
        self._views.clear()
        now = self.clock()
        for worker in self.workers.values():
            if worker.state is State.READY:
                for model in worker.facts.models:
                    self.known_models[model.name] = now

    def usable(self, target: Target, now: float) -> bool:
        """Whether a request may be sent to it."""
        return target.worker.state is State.READY and target.paused_until <= now and target.breaker.allows(now)

    def view(self, model: str | None, tried: Iterable[int] = ()) -> View | None:
        """The targets that may take a request for ``model`` (``None``: any), without those ``tried``."""
        try:
            view = self._views[model]
        except KeyError:
            view = self._views[model] = self._make_view(model)
        if view is None or not tried:
            return view
        left = [target for target in view.targets if target.id not in tried]
        return View(left) if left else None

    def _make_view(self, model: str | None) -> View | None:
        now = self.clock()
        targets = [
            target
            for worker in self.workers.values()
            if worker.state is State.READY and worker.role == "unified" and _serves(worker, model)
            for target in worker.targets
            if self.usable(target, now)
        ]
        return View(targets) if targets else None

    def serving(self, model: str) -> list[Worker]:
        """Workers that list ``model``, whatever their state."""
        return [worker for worker in self.workers.values() if _serves(worker, model)]

    def retry_after(self, model: str | None, now: float) -> float:
        """Seconds until a target of ``model`` may be usable again, as far as is known; at least 1."""
        waits = []
        for worker in self.workers.values():
            if worker.state is State.READY and _serves(worker, model):
                for target in worker.targets:
                    until = max(target.paused_until, target.breaker.open_until or 0.0)
                    waits.append(until - now)
        return max(1.0, min(waits, default=5.0))

    def ready(self) -> Iterator[Worker]:
        """Workers that are ready."""
        return (worker for worker in self.workers.values() if worker.state is State.READY)

    # -- in flight --------------------------------------------------------------------------------------------------

    def dispatch(self, target: Target, uncached: float, context: float, streamed: bool) -> Charge:
        """A request with ``uncached`` tokens behind ``context`` is being sent."""
        trial = target.breaker.sent()
        if trial:
            self._views.clear()
        seconds = target.rates.prefill(uncached, context)
        charge = Charge(target, seconds, uncached, context, trial)
        target.running += 1
        target.charged += seconds
        target.wait = target.charged + target.queued
        if not streamed:
            due = int((self.clock() + target.wait) * WHEEL) + 1
            self._due.setdefault(due, []).append(charge)
        return charge

    def first_byte(self, charge: Charge) -> None:
        """The prefill part is over."""
        if charge.prefilled or charge.ended:
            return
        charge.prefilled = True
        target = charge.target
        target.charged -= charge.seconds
        target.busy += 1
        target.wait = target.charged + target.queued

    def release(self, charge: Charge) -> None:
        """The request ended, however; safe to call again."""
        if charge.ended:
            return
        charge.ended = True
        target = charge.target
        target.running -= 1
        if charge.prefilled:
            target.busy -= 1
        else:
            target.charged -= charge.seconds
        if charge.trial:
            target.breaker.undecided()
            self._views.clear()
        target.recount()

    def settle_estimates(self, now: float) -> None:
        """End the prefill part of unstreamed requests whose estimate has passed."""
        slot = int(now * WHEEL)
        if slot == self._settled:
            return
        self._settled = slot
        for passed in [at for at in self._due if at <= slot]:
            for charge in self._due.pop(passed):
                if not charge.ended:
                    self.first_byte(charge)

    # -- what requests and probes show ------------------------------------------------------------------------------

    def succeeded(self, target: Target) -> None:
        """A request was answered as it should be."""
        target.worker.failures = 0
        target.worker.answered += 1
        if (target.breaker.faults or target.breaker.open_until is not None) and target.breaker.succeeded():
            self._views.clear()

    def failed(self, target: Target, now: float) -> bool:
        """A worker's fault; true if it opened the breaker."""
        if target.breaker.failed(now):
            self._views.clear()
            return True
        return False

    def connection_failed(self, worker: Worker, fault: WorkerFault) -> None:
        """Traffic is a probe too: a worker that refuses connections is down before the next probe says so."""
        if not isinstance(fault, Refused):
            return
        worker.failures += 1
        if worker.failures >= FALL and worker.state is State.READY:
            self.set_state(worker, State.DOWN, "connections refused")

    def pause(self, target: Target, until: float) -> None:
        """The worker asked to be left alone until then."""
        target.paused_until = max(target.paused_until, until)
        self._views.clear()

    def report(self, target: Target, load: Load, waiting_ours: int) -> None:
        """A load report; ours is taken out of it, what remains are other people's requests.

        ``waiting_ours``: our requests on the target that had not begun to answer when the report was taken.
        """
        target.load_report = load
        foreign = 0.0
        queued = 0.0
        if load.running is not None:
            foreign = float(max(0, load.running + (load.waiting or 0) - target.running))
        if load.waiting is not None:
            others = max(0, load.waiting - waiting_ours)
            queued = min(others, foreign) * target.rates.prefill(1000, 0)
        target.busy += foreign - target.foreign
        target.foreign, target.queued = foreign, queued
        target.recount()

    def forget_report(self, target: Target) -> None:
        """The report is too old to be believed: unknown is unknown."""
        target.load_report = None
        target.busy -= target.foreign
        target.foreign = target.queued = 0.0
        target.recount()

    def sweep(self, now: float) -> None:
        """Once a second: breakers that may be tried, pauses that end, slow starts, idle connections."""
        self.settle_estimates(now)
        stale = False
        for worker in self.workers.values():
            worker.pool.sweep(now)
            share = self._share(worker, now)
            for target in worker.targets:
                if target.share != share:
                    target.share = share
                    stale = True
                report = target.load_report
                if report is not None and now - report.taken > 15.0:
                    self.forget_report(target)
                if target.paused_until or target.breaker.open_until is not None:
                    stale = True
                    if target.paused_until <= now:
                        target.paused_until = 0.0
        if stale:
            self._views.clear()


def _serves(worker: Worker, model: str | None) -> bool:
    if model is None:
        return True
    models = worker.facts.models
    return not models or any(served.name == model for served in models)


def _tls(spec: WorkerSpec) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=spec.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not spec.verify_tls:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
