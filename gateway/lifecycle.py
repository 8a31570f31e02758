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
"""Ends that wait to be told; engines forget the oldest of their own before that."""
AT_ONCE = 8
"""Calls under way to all workers."""
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
        self._ends: OrderedDict[tuple[str, str], int] = OrderedDict()
        """(worker, session as the engine knows it) -> calls that failed; the oldest first."""
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._task: asyncio.Task[None] | None = None
        self.lost = 0
        """Ends that were never told: too many, or the worker would not hear of them."""

    def __len__(self) -> int:
        return len(self._ends) + len(self._calls)

    # -- what requests do -------------------------------------------------------------------------------------------

    def sent(self, session: Session, worker: Worker) -> None:
        """A request that names ``session`` is being sent to ``worker``, which keeps a reference from then on."""
        told = session.told
        if told is None:
            told = session.told = {}
        new = worker.id not in told
        told[worker.id] = told.get(worker.id, 0) + 1
        # It comes back before its engine heard that it went.
        self._ends.pop((worker.id, session.key.hex()), None)
        if new and self.sessions.bound is not None and not session.gone:
            self.sessions.bound(session)

    def ended(self, session: Session, worker_id: str) -> None:
        """A request that was `sent` is over, however."""
        told = session.told
        if told is None or worker_id not in told:
            return
        told[worker_id] = max(0, told[worker_id] - 1)
        if not told[worker_id] and (session.gone or not self._lives_at(session, worker_id)):
            self._close(session, worker_id)

    def moved(self, session: Session) -> None:
        """Its home changed, or it was forgotten: workers where nothing of it runs any more are told."""
        for worker_id, running in list((session.told or {}).items()):
            if not running and (session.gone or not self._lives_at(session, worker_id)):
                self._close(session, worker_id)

    def _lives_at(self, session: Session, worker_id: str) -> bool:
        for id_ in (session.home, session.partner):
            target = None if id_ is None else self.fleet.targets.get(id_)
            if target is not None and target.worker.id == worker_id:
                return True
        return False

    def _close(self, session: Session, worker_id: str) -> None:
        assert session.told is not None
        del session.told[worker_id]
        if worker_id not in self.fleet.workers:
            return
        if len(self._ends) >= MOST:
            self._ends.popitem(last=False)
            self.lost += 1
        self._ends[worker_id, session.key.hex()] = 0
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
            slot = target.slots.take(session.key)
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
        if ask.slot is not None:
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

    async def stop(self, patience: float) -> None:
        """Tell the end of every session, for at most ``patience`` seconds, and stop."""
        for session in list(self.sessions.all()):
            for worker_id in list(session.told or ()):
                self._close(session, worker_id)
        try:
            async with asyncio.timeout(patience):
                while self._ends or self._calls:
                    if not any(self._hears(worker_id) for worker_id, _ in self._ends) and not self._calls:
                        break
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        if self._ends:
            log.warning("%d ends of sessions could not be told to their engines", len(self._ends))
        tasks = [*self._calls, *((self._task,) if self._task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            waits = False
            for key in list(self._ends):
                if not self._hears(key[0]):
                    waits = True
                    continue
                await self._room.acquire()
                tries = self._ends.pop(key, None)
                if tries is None:
                    self._room.release()
                    continue
                task = asyncio.get_running_loop().create_task(self._tell(key, tries))
                self._calls.add(task)
                task.add_done_callback(self._told)
            if waits or self._ends:
                await asyncio.sleep(PAUSE)
                self._wake.set()

    def _told(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._room.release()

    def _hears(self, worker_id: str) -> bool:
        worker = self.fleet.workers.get(worker_id)
        return worker is None or worker.state in (State.READY, State.DRAINING)

    async def _tell(self, key: tuple[str, str], tries: int) -> None:
        worker = self.fleet.workers.get(key[0])
        if worker is None:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await self._post(worker, "/close_session", "POST", msgspec.json.encode({"session_id": key[1]}))
            # That it does not know the session (it started anew), or has no such verb, will not change.
            done = answer.status < 500
        except (WorkerFault, GatewayFault, TimeoutError):
            done = False
        if done:
            self.metrics.session_closes.add(("told",))
        elif tries < TRIES:
            self._ends.setdefault(key, tries + 1)
        else:
            self.lost += 1
            self.metrics.session_closes.add(("lost",))
