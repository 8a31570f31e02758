"""Telling engines that sessions ended.

SGLang, started with ``--enable-session-radix-cache``, evicts what no session refers to first. A reference begins with the first
request that names the session and has no end of its own: what is not closed outlives its use and competes with what lives. So
every worker that was told of a session hears of its end: when its client ends it, when it was idle for too long or the store
was full, when it moved, and when the gateway stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from gateway.asks import Ask
from gateway.engines import Answer
from gateway.errors import GatewayFault, WorkerFault
from gateway.fleet import Fleet
from gateway.hints import able, hint
from gateway.metrics import Metrics
from gateway.returning import Returning
from gateway.sessions import Session, Sessions
from gateway.workers import State, Target, Worker

log = logging.getLogger("warmroute")

MOST = 200_000
"""Ends that wait to be told to one worker."""
AT_ONCE = 2
"""Calls under way to one worker: its probes need some of its connections."""
PATIENCE = 5.0
"""Seconds for one call."""
PAUSE = 1.0
"""Seconds before a worker that failed is told again."""
TRIES = 30
"""Calls about one session to one worker that may fail: SGLang's references do not harm beyond memory."""

Post = Callable[[Worker, str, str, bytes], Awaitable[Answer]]


class Lifecycle:
    """See the module's head. ``post`` calls a worker's control surface and raises `WorkerFault` or `GatewayFault`."""

    def __init__(self, fleet: Fleet, sessions: Sessions, returning: Returning, metrics: Metrics, post: Post) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.metrics = metrics
        self._returning = returning
        self._post = post
        self._ends: dict[str, OrderedDict[str, int]] = {}
        """Worker -> session as the engine knows it -> calls that failed; the oldest first."""
        self._calling: dict[str, int] = {}
        """Worker -> calls under way."""
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.lost = 0
        """Ends that were never told: too many, or the worker would not hear of them."""

    def __len__(self) -> int:
        return sum(map(len, self._ends.values())) + len(self._calls)

    # -- what requests do -------------------------------------------------------------------------------------------

    def sent(self, session: Session, worker: Worker) -> None:
        """A request that names ``session`` is being sent to ``worker``, which keeps a reference from then on."""
        told = session.told
        if told is None:
            told = session.told = {}
        new = worker.id not in told
        told[worker.id] = told.get(worker.id, 0) + 1
        # It comes back before its engine heard that it went.
        self._recall(worker.id, session)
        if new and self.sessions.bound is not None and not session.gone:
            self.sessions.bound(session)

    def ended(self, session: Session, worker_id: str) -> None:
        """A request that was `sent` is over, however."""
        told = session.told
        if told is None or worker_id not in told:
            return
        told[worker_id] = max(0, told[worker_id] - 1)
        if not told[worker_id] and worker_id not in self._homes(session):
            self._close(session, worker_id)

    def moved(self, session: Session) -> None:
        """Its home changed, or it was forgotten: workers where nothing of it runs any more are told."""
        told = session.told
        if told is None:
            return
        for worker_id, running in list(told.items()):
            if not running and worker_id not in self._homes(session):
                self._close(session, worker_id)
        for worker_id in self._homes(session):
            if self._recall(worker_id, session):
                # It moved, and moved back before its engine heard of it.
                told[worker_id] = 0

    def _homes(self, session: Session) -> list[str]:
        """Workers of its home and its partner: of one that was forgotten none."""
        targets = [self.fleet.targets.get(id_) for id_ in (session.home, session.partner) if id_ is not None]
        return [target.worker.id for target in targets if target is not None]

    def _recall(self, worker_id: str, session: Session) -> bool:
        """Do not tell its end there after all; whether it was to be told."""
        ends = self._ends.get(worker_id)
        return ends is not None and ends.pop(session.key.hex(), None) is not None

    def _refers(self, worker_id: str, key: str) -> bool:
        """Whether a living session of that key has a reference there."""
        session = self.sessions.get(bytes.fromhex(key))
        return session is not None and session.told is not None and worker_id in session.told

    def _close(self, session: Session, worker_id: str) -> None:
        assert session.told is not None
        del session.told[worker_id]
        if worker_id not in self.fleet.workers or self._refers(worker_id, session.key.hex()):
            # To an engine a session of the same name that came after it is the same.
            return
        ends = self._ends.setdefault(worker_id, OrderedDict())
        if len(ends) >= MOST:
            ends.popitem(last=False)
            self.lost += 1
        ends[session.key.hex()] = 0
        self._wake.set()

    def members(self, ask: Ask, target: Target, prefill: Target | None) -> dict[str, bytes]:
        """What to tell the engines of a request about its session: member of the body -> JSON. Counts as `sent`."""
        session, reading = ask.session, ask.reading
        if session is None:
            return {}
        found: dict[str, bytes] = {}
        # A client that drives sessions of the engine by itself is not interfered with.
        if reading.stateful is None:
            for each in (target, prefill):
                if each is not None and each.worker.facts.refers:
                    ask.told.append(each.worker.id)
                    self.sent(session, each.worker)
                    found["session_id"] = b'"%b"' % session.key.hex().encode()
        if able(target.worker) and not reading.ranked and session.turns:
            found |= self._hint(session, target)
        if target.slots is not None and not reading.slotted:
            self._leave(ask)
            # Who names no slot is given one by the server: it may be any.
            others = target.running - 1 - target.slots.busy
            slot = target.slots.take(session.key) if others <= 0 else None
            if slot is not None:
                ask.slot = (target.slots, slot)
                found["id_slot"] = b"%d" % slot
        return found

    def _hint(self, session: Session, target: Target) -> dict[str, bytes]:
        """Where its KV would not survive until its next turn."""
        gap = self._returning.in_danger(session, target, self.fleet.clock())
        if gap is None:
            return {}
        self.metrics.hints.add((target.name,))
        return hint(target.worker, gap)

    def over(self, ask: Ask) -> None:
        """A request is over, however."""
        self._leave(ask)
        if ask.told and ask.session is not None:
            for worker_id in ask.told:
                self.ended(ask.session, worker_id)
            ask.told = []

    def _leave(self, ask: Ask) -> None:
        if ask.slot is not None:
            slots, slot = ask.slot
            slots.done(slot)
            ask.slot = None

    # -- telling ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to tell."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="lifecycle")

    async def stop(self, patience: float, keeps: bool = False) -> None:
        """Stop, after at most ``patience`` seconds of telling: the end of every session, or, where they are kept over a restart
        (``keeps``), of those only that ended."""
        for session in [] if keeps else list(self.sessions.all()):
            for worker_id in list(session.told or ()):
                self._close(session, worker_id)
        try:
            async with asyncio.timeout(patience):
                while self._calls or any(ends and self._hears(worker_id) for worker_id, ends in self._ends.items()):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        left = sum(map(len, self._ends.values()))
        if left:
            log.warning("%d ends of sessions could not be told to their engines", left)
        tasks = [*self._calls, *((self._task,) if self._task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waits = False
            for worker_id in list(self._ends):
                waits = self._tell_some(worker_id) or waits
            if waits:
                # It does not hear now, or failed: another look a little later.
                await asyncio.sleep(PAUSE)
                self._wake.set()

    def _tell_some(self, worker_id: str) -> bool:
        """Begin as many calls to one worker as it may have; whether it has to be looked at again by itself."""
        ends = self._ends[worker_id]
        if not ends or worker_id not in self.fleet.workers:
            del self._ends[worker_id]
            return False
        if not self._hears(worker_id):
            return True
        while ends and self._calling.get(worker_id, 0) < AT_ONCE:
            key, tries = ends.popitem(last=False)
            self._calling[worker_id] = self._calling.get(worker_id, 0) + 1
            task = asyncio.get_running_loop().create_task(self._tell(worker_id, key, tries))
            self._calls.add(task)
            task.add_done_callback(partial(self._told, worker_id))
        return False

    def _told(self, worker_id: str, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._calling[worker_id] -= 1
        if not self._calling[worker_id]:
            del self._calling[worker_id]
        if worker_id in self._ends:
            self._wake.set()

    def _hears(self, worker_id: str) -> bool:
        worker = self.fleet.workers.get(worker_id)
        return worker is not None and worker.state in (State.READY, State.DRAINING)

    async def _tell(self, worker_id: str, key: str, tries: int) -> None:
        worker = self.fleet.workers.get(worker_id)
        if worker is None:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await self._post(worker, "/close_session", "POST", msgspec.json.encode({"session_id": key}))
            # That it does not know the session (it started anew), or has no such verb, will not change.
            done = answer.status < 500
        except (WorkerFault, GatewayFault, TimeoutError):
            done = False
        if done:
            self.metrics.session_closes.add(("told",))
        elif self._refers(worker_id, key):
            # It came back meanwhile.
            return
        elif tries < TRIES:
            # One that fails is not asked again at once.
            await asyncio.sleep(PAUSE)
            self._ends.setdefault(worker_id, OrderedDict()).setdefault(key, tries + 1)
        else:
            self.lost += 1
            self.metrics.session_closes.add(("lost",))
