"""Who may be used now, and one accounting of what is in flight that every path passes.

A target may be used if its worker is ready, its breaker allows it and it did not ask for a pause.

In flight: `Charge` is made when a request is sent and ends exactly once, whatever happens. Its first part, the prefill,
is over at the first body event; where an answer is not streamed nothing tells that moment, so it is over when its own
estimate says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count

from gateway.errors import Refused, WorkerFault
from gateway.http.limits import Outward
from gateway.http.outbox import Outbox
from gateway.slots import Slots
from gateway.workers import ADDED, CONFIGURED, Charge, Facts, Load, ServedModel, State, Target, Worker, WorkerSpec
from policies.base import Fleet as View, Rates, Role, Target as Seen
from policies.calibrate import Calibration
from policies.cost import EXPECTED_OUTPUT
from policies.outliers import Record, outliers

SLOW_START = 30.0
"""Seconds in which a cold worker works its way up to its fair share."""
FIRST_SHARE = 0.1
FALL = 3
"""Failures in a row after which a worker is down."""
KNOWN = 3600.0
"""Seconds for which a model that nobody serves any more is known: it may be between two engines."""
WHEEL = 20
"""Slots a second in which estimates end."""
RISE = 2
"""Probes in a row after which it is ready again; twice as many for each time that it went down of late."""
MOST_RISE = 32
FORGOTTEN = 300.0
"""Seconds after which having gone down counts for half."""
JUDGE = 5.0
"""Seconds between two comparisons of targets with their peers."""
OUT, LONGEST_OUT = 30.0, 300.0
"""Seconds for which one that does far worse is put out, doubled each time, and the most of that."""


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
        self.went_down: Callable[[Worker], None] = lambda worker: None
        """Told when a worker does not answer any more."""
        self.began: Callable[[int], None] = lambda target: None
        """Told when a target begins to serve with an empty cache, or with one that is not known."""
        self.outbox = outbox
        self.forget = forget
        """Told when what a target held is gone: removal, restart."""
        self.workers: dict[str, Worker] = {}
        self.targets: dict[int, Target] = {}
        self.calibrations: dict[tuple[str, str], Calibration] = {}
        self.known_models: dict[str, float] = {}
        """Model -> when a ready worker last listed it: tells 404 from 503."""
        self.staged = False
        """Whether some workers do a part of requests only."""
        self.touched: set[int] = set()
        """Targets on which a request began, or ended, for whoever looks, and clears it."""
        self._ids = count()
        self._views: dict[str | None, View | None] = {}
        self._listed: set[str] = set()
        self._due: dict[int, list[Charge]] = {}
        """Slot of `WHEEL` -> unstreamed requests whose prefill is over by then, as far as can be estimated."""
        self._settled = 0
        self._started = clock()
        self._judge_at = self._started + JUDGE
        self.put_out: Callable[[Target, str, bool], None] = lambda target, reason, spared: None
        """Told of each target that does far worse than its peers, whether it is put out or ``spared``."""

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
            self.touched.discard(target.id)
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
            facts.events = facts.events or worker.facts.events
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
            target.role, target.whole, target.pool = worker.role, worker.whole, worker.pool_name
            target.room = facts.kv_tokens
            target.most_running = worker.spec.max_running or facts.max_running
            if facts.engine != "llamacpp" or not worker.spec.slots:
                target.slots = None
            elif facts.slots is not None and (target.slots is None or target.slots.count != facts.slots):
                target.slots = Slots(facts.slots)
            kind = self.calibration(model, facts.engine)
            if kind is not target.calibration:
                target.calibration = kind
                target.forgive(kind, self.clock(), always=True)
        if restarted:
            self.restarted(worker)
        self.changed()

    def restarted(self, worker: Worker) -> None:
        """The engine's process is a new one: its cache is empty, its connections are gone."""
        for target in worker.targets:
            target.epoch += 1
            if target.slots is not None:
                target.slots.forget()
            target.forgive(target.calibration, self.clock(), always=True)
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

    def learn(self, target: Target, uncached: float, context: float, seconds: float) -> None:
        """A prompt that met an idle ``target`` took ``seconds`` to its first byte."""
        if target.learn(target.calibration, uncached, context, seconds, self.clock()):
            self._views.clear()

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
        self.changed()
        if state is State.DOWN:
            now = self.clock()
            worker.falls = 1.0 + worker.falls * 0.5 ** ((now - worker.fell) / FORGOTTEN)
            worker.fell = now
            # What it holds is not forgotten yet: the same process may come back with it.
            worker.pool.close_idle()
            self.went_down(worker)
        return True

    def _begin(self, worker: Worker) -> None:
        """It serves with an empty cache from now on."""
        worker.ready_since = now = self.clock()
        for target in worker.targets:
            target.share = self._share(worker, now)
            target.forgive(target.calibration, now, always=True)
            self.began(target.id)

    def _share(self, worker: Worker, now: float) -> float:
        """Slow start of whoever joins a fleet at work; those that start together with the gateway share evenly."""
        since = worker.ready_since
        if since is None or since <= self._started + SLOW_START:
            return 1.0
        return min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * (now - since) / SLOW_START)

    def changed(self) -> None:
        """Who may be used changed: views are made anew when next asked for."""
        self._views.clear()
        self.staged = any(target.role is not Role.UNIFIED for target in self.targets.values())
        self._listed = {model.name for worker in self.workers.values() for model in worker.facts.models}
        now = self.clock()
        for worker in self.workers.values():
            if worker.state is State.READY:
                for model in worker.facts.models:
                    self.known_models[model.name] = now
        for name in [
            name for name, seen in self.known_models.items() if now - seen > KNOWN and name not in self._listed
        ]:
            del self.known_models[name]

    def usable(self, target: Target, now: float) -> bool:
        """Whether a request may be sent to it."""
        return target.worker.state is State.READY and target.paused_until <= now and target.breaker.allows(now)

    def lingering(self, target: int, now: float) -> Target | None:
        """``target``, if it gets nothing new but goes on with its own sessions."""
        found = self.targets.get(target)
        if found is None or not found.worker.lingers or found.worker.state is not State.DRAINING:
            return None
        if found.worker.failures >= FALL:
            # It does not answer: there is nothing to go on with.
            return None
        return found if found.paused_until <= now and found.breaker.allows(now) else None

    def rests(self, target: int, now: float) -> bool:
        """Whether ``target`` serves but asked for a pause."""
        found = self.targets.get(target)
        return found is not None and found.worker.state is State.READY and found.paused_until > now

    def view(self, model: str | None, tried: Iterable[int] = ()) -> View | None:
        """The targets that may take a request for ``model`` (``None``: any), without those ``tried``."""
        # Names that nobody lists share one view: clients can make up as many as they like.
        key = model if model is None or model in self._listed else ""
        try:
            view = self._views[key]
        except KeyError:
            view = self._views[key] = self._make_view(model)
        if view is None or not tried:
            return view
        first = view.prefill
        stages = [] if first is None else [target for target in first.targets if target.id not in tried]
        left = [target for target in view.targets if target.id not in tried]
        # Those that rest are better than nobody.
        return _staged(left, stages) or self._make_view(model, tried)

    def _make_view(self, model: str | None, tried: Iterable[int] = ()) -> View | None:
        now = self.clock()
        ready = [
            target
            for worker in self.workers.values()
            if worker.state is State.READY and _serves(worker, model)
            for target in worker.targets
            if target.id not in tried
        ]
        able = [target for target in ready if target.breaker.allows(now)]
        if not able and len(ready) > 1:
            # That all of several fail at once is more likely due to what they were asked: the next request may be another.
            able = ready
        rests = [target for target in able if target.role is not Role.PREFILL]
        if len(rests) == len(able):
            return _staged(_awake(able, now), [])
        return _staged(_awake(rests, now), _awake([t for t in able if t.role is Role.PREFILL], now))

    def lacks(self, model: str | None, tried: Iterable[int] = ()) -> Role | None:
        """Which stage no worker can do now, where ``model`` is served by pairs; ``None`` if it is not that."""
        staged = [worker for worker in self.workers.values() if _serves(worker, model) and not worker.whole]
        if not staged:
            return None
        now = self.clock()
        able = {
            target.role
            for worker in staged
            if worker.state is State.READY
            for target in worker.targets
            if target.id not in tried and self.usable(target, now)
        }
        return Role.DECODE if Role.DECODE not in able else Role.PREFILL if Role.PREFILL not in able else None

    def serves(self, worker: Worker, model: str | None) -> bool:
        """Whether it lists ``model``, or lists nothing and takes any; ``None``: any will do."""
        return _serves(worker, model)

    def lists(self, model: str) -> bool:
        """Whether some worker lists ``model``, whatever its state."""
        return model in self._listed

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

    def dispatch(
        self, target: Target, uncached: float, context: float, streamed: bool, computes: bool = True
    ) -> Charge:
        """A request with ``uncached`` tokens behind ``context`` is being sent. Without ``computes`` another target computes
        them, and is charged for that."""
        trial = target.breaker.sent()
        if trial:
            self._views.clear()
        seconds = target.rates.prefill(uncached, context) if computes else 0.0
        now = self.clock()
        active, expected = uncached + context + EXPECTED_OUTPUT, target.waits(now) + seconds
        charge = Charge(target, seconds, uncached, context, trial, active, expected)
        charge.alone = not target.running and not target.foreign
        self.touched.add(target.id)
        target.running += 1
        target.active += charge.active
        if not computes:
            return charge
        target.charge(charge, seconds, now)
        if not streamed:
            due = int((now + target.waits(now)) * WHEEL) + 1
            self._due.setdefault(due, []).append(charge)
        return charge

    def first_byte(self, charge: Charge) -> None:
        """The prefill part is over."""
        if charge.prefilled or charge.ended:
            return
        charge.prefilled = True
        target = charge.target
        charge.alone = charge.alone and target.running == 1
        self.touched.add(target.id)
        target.busy += 1
        target.discharge(charge, self.clock())

    def release(self, charge: Charge) -> None:
        """The request ended, however; safe to call again."""
        if charge.ended:
            return
        charge.ended = True
        target = charge.target
        self.touched.add(target.id)
        target.running -= 1
        target.active = target.active - charge.active if target.running else 0.0
        if charge.prefilled:
            target.busy -= 1
        else:
            target.discharge(charge, self.clock())
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

    def succeeded(self, target: Target, charge: Charge | None = None) -> None:
        """A request was answered as it should be; ``charge``: its own."""
        target.worker.failures = 0
        target.worker.answered += 1
        target.record.answered += 1.0
        breaker = target.breaker
        trial = charge is not None and charge.trial
        if breaker.judged and not trial:
            # It was sent before, and is a part of what the target was put out for.
            breaker.faults = 0
            return
        if trial and charge is not None:
            charge.trial = False
        if (breaker.faults or breaker.open_until is not None) and breaker.succeeded():
            self._views.clear()

    def failed(self, target: Target, now: float) -> bool:
        """A worker's fault; true if it opened the breaker."""
        target.record.faults += 1.0
        if target.breaker.failed(now):
            self._views.clear()
            return True
        return False

    def connection_failed(self, worker: Worker, fault: WorkerFault) -> None:
        """Traffic is a probe too: a worker that refuses connections is down before the next probe says so.

        Once is enough, since probes bring back who was out by mistake. One whose address an operator gave, and that nobody
        stands in for, is tried more often: it is about to be restarted at most, while at an address that was found there may
        be somebody else by now.
        """
        if not isinstance(fault, Refused):
            return
        worker.failures += 1
        most = FALL if worker.origin in (CONFIGURED, ADDED) and not self._stood_in_for(worker) else 1
        if worker.failures >= most and worker.state is State.READY:
            worker.silenced = False
            self.set_state(worker, State.DOWN, "connections refused")
        elif worker.failures == FALL and worker.state is State.DRAINING:
            self.went_down(worker)

    def _stood_in_for(self, worker: Worker) -> bool:
        """Whether another one that is ready does what it does."""
        served = {model.name for model in worker.facts.models}
        return any(
            each is not worker and each.role is worker.role and served == {model.name for model in each.facts.models}
            for each in self.ready()
        )

    def pause(self, target: Target, until: float, firm: bool = True) -> None:
        """The worker asked to be left alone until then; ``firm``: even if nobody else is left."""
        target.paused_until = max(target.paused_until, until)
        target.paused_firmly = firm
        self._views.clear()

    def report(self, target: Target, load: Load, waiting_ours: int, running_ours: int | None = None) -> None:
        """A load report; ours is taken out of it, what remains are other people's requests.

        ``waiting_ours``: our requests on the target that had not begun to answer when the report was taken;
        ``running_ours``: how many it may count of ours, by default those in flight now.
        """
        ours = target.running if running_ours is None else running_ours
        target.load_report = load
        foreign = 0.0
        queued = 0.0
        if load.running is not None:
            foreign = float(max(0, load.running + (load.waiting or 0) - ours))
        if load.waiting is not None:
            others = max(0, load.waiting - waiting_ours)
            queued = min(others, foreign) * target.rates.prefill(1000, 0)
        target.reported = foreign, queued
        target.others()

    def forget_report(self, target: Target) -> None:
        """The report is too old to be believed: unknown is unknown."""
        target.load_report = None
        target.reported = 0.0, 0.0
        target.others()

    def sweep(self, now: float) -> None:
        """Once a second: breakers that may be tried, pauses that end, slow starts, idle connections."""
        self.settle_estimates(now)
        if now >= self._judge_at:
            self._judge_at = now + JUDGE
            self._judge(now)
        stale = False
        for worker in self.workers.values():
            worker.pool.sweep(now)
            share = self._share(worker, now)
            for target in worker.targets:
                if target.share != share:
                    target.share = share
                    stale = True
                if target.forgive(target.calibration, now):
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

    def _judge(self, now: float) -> None:
        """Compare targets with those that do the same: who does far worse is put out for a while."""
        pools: dict[tuple[object, ...], list[Target]] = {}
        for worker in self.ready():
            served = tuple(sorted(model.name for model in worker.facts.models))
            for target in worker.targets:
                pools.setdefault((target.role, served), []).append(target)
        for pool in pools.values():
            judged = {target.id: target.record for target in pool}
            out = sum(target.breaker.open_until is not None for target in pool)
            worse, spared = outliers(judged, out)
            for id_, reason in worse:
                target = self.targets[id_]
                if target.breaker.open_until is None:
                    target.breaker.put_out(now, OUT, LONGEST_OUT, reason)
                    # It comes back with a clean record, or it would never.
                    target.record = Record()
                    self._views.clear()
                    self.put_out(target, reason, False)
            for id_, reason in spared:
                self.put_out(self.targets[id_], reason, True)
            for target in pool:
                target.record.fade()

    def doubts(self, worker: Worker) -> bool:
        """Whether probes that ``worker`` does not answer are to be doubted: they would take out more than half of those that
        do what it does, which is more likely to be our network, or our probes, than all of them."""
        served = {model.name for model in worker.facts.models}
        peers = [
            each
            for each in self.workers.values()
            if each.role is worker.role and served == {model.name for model in each.facts.models}
        ]
        silent = sum(each.state is State.DOWN and each.silenced for each in peers if each is not worker)
        return len(peers) > 2 and 2 * (silent + 1) > len(peers)

    def rise(self, worker: Worker) -> int:
        """Probes in a row after which it is ready again."""
        falls = float(worker.falls * 0.5 ** ((self.clock() - worker.fell) / FORGOTTEN))
        return min(MOST_RISE, RISE << max(0, round(falls) - 1))


def _awake(able: list[Target], now: float) -> list[Target]:
    """Those that did not ask for a pause."""
    targets = [target for target in able if target.paused_until <= now]
    # It knows best, and may say no again.
    return targets or [target for target in able if not target.paused_firmly]


def _staged(targets: Sequence[Seen], prefill: Sequence[Seen]) -> View | None:
    """The view of targets that may generate, and of prefill engines that have a partner among them."""
    if prefill:
        pools = {target.pool for target in targets if target.role is Role.DECODE}
        if not targets:
            # Nobody else is left: those of them that can do it all.
            targets = [target for target in prefill if target.whole]
        prefill = [target for target in prefill if target.pool in pools]
    if not prefill and any(not target.whole for target in targets):
        targets = [target for target in targets if target.whole]
    elif prefill:
        served = {target.pool for target in prefill}
        targets = [target for target in targets if target.whole or target.pool in served]
    return View(targets, View(prefill) if prefill else None) if targets else None


def _serves(worker: Worker, model: str | None) -> bool:
    if model is None:
        return True
    models = worker.facts.models
    return not models or any(served.name == model for served in models)
