"""Homes of sessions, kept over a restart: in a file, or in Redis (`gateway.stores`).

What is kept of a session is its name, its home and who was told of it; of one that is found by its content, what it is found
by. It is written behind the requests, never in front of them: changes are gathered and saved once a second. Nothing waits for
what is restored either: it comes in slices while requests run, and a session that began meanwhile takes its saved home in its
first turn, or goes on without. A store that is gone costs nothing but the memory of what is to be saved, and is tried again.

Several gateways may keep their sessions in one store. What one of them restores is a copy until a turn of it ran there: until
then it is not saved, and when it is forgotten nothing is deleted and no engine hears of its end, for another gateway may be
using it. So engines hear of ends from gateways that served the session, and a session that no gateway serves again after a
restart stays theirs to forget.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from operator import attrgetter
from time import time
from typing import NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from gateway.fleet import Fleet
from gateway.sessions import Session, Sessions
from gateway.stores import PATIENCE, Kept, Store, Unsaved
from gateway.workers import Target, Worker

log = logging.getLogger("warmroute")

SAVE = 1.0
"""Seconds between two rounds of saving."""
REFRESH = 0.25
"""Part of the idle time after which a session that goes on is saved anew, so that its age is known."""
SOME = 500
"""Sessions that are encoded at a time, ..."""
SLICE = 200
"""... and restored at a time."""
LOADING = 60.0
"""Seconds that the store may take to tell all sessions."""


class _Copy(NamedTuple):
    """A session that another gateway may be using; ``turns``: that it had."""

    session: Session
    turns: int
    told: list[str]


class Keeper:
    """Saves what changes and restores it; see the module's head."""

    def __init__(self, store: Store, sessions: Sessions, fleet: Fleet) -> None:
        self.store = store
        self.sessions = sessions
        self.fleet = fleet
        self._changed: dict[bytes, Session] = {}
        self._waiting: dict[str, dict[bytes, Session]] = {}
        """Names of targets that did not join yet -> sessions at home there."""
        self._copies: dict[bytes, _Copy] = {}
        self._joined: dict[str, Target] = {}
        """Targets of workers that joined, by name."""
        self._ended: set[bytes] = set()
        """Sessions that ended while others were restored."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self.restoring = False
        self._forget_at: float | None = None
        self.unsaved: str | None = None
        """Why the last round failed; ``None`` if it did not."""
        self.restored = 0
        self.pin: Callable[[str, str, str, bytes], None] = lambda tenant, name, worker, session: None
        """Told which worker has a stored response of a session."""

    def __len__(self) -> int:
        return len(self._changed)

    # -- saving -----------------------------------------------------------------------------------------------------

    def changed(self, session: Session) -> None:
        """It is to be saved; one that is gone is to be deleted, unless it has a successor of its key."""
        if session.awaited is not None:
            self._wait_less(session)
        if self._elsewhere(session):
            if session.gone:
                del self._copies[session.key]
            return
        if session.gone:
            if self.restoring:
                self._ended.add(session.key)
            if self.sessions.get(session.key) is not None:
                return
        self._changed[session.key] = session

    def used(self, session: Session, now: float) -> None:
        """A turn of it ended."""
        if session.gone:
            return
        first = session.key in self._copies
        if self._elsewhere(session):
            return
        if first or session.ends or session.asked or now - session.saved > REFRESH * self.sessions.idle:
            self._changed[session.key] = session

    def _elsewhere(self, session: Session) -> bool:
        """Whether no turn of it ran here: it is another gateway's, maybe."""
        copy = self._copies.get(session.key)
        if copy is None or copy.session is not session:
            return False
        if session.turns == copy.turns and not session.running:
            return True
        del self._copies[session.key]
        if copy.told and not session.gone:
            session.told = dict.fromkeys(copy.told, 0) | (session.told or {})
        return False

    def start(self) -> None:
        """Restore, then save what changes, beside what runs. A store that cannot be read is said and gone without."""
        self.restoring = True
        self._task = asyncio.get_running_loop().create_task(self._run(), name="keeper")

    async def stop(self) -> None:
        """Save what is left. A round that is under way is let end."""
        self._stopping.set()
        if self._task is not None:
            if self.restoring:
                self._task.cancel()
            await asyncio.wait((self._task,), timeout=2 * PATIENCE)
            for task in (self._task, *self._tasks):
                task.cancel()
            await asyncio.gather(self._task, *self._tasks, return_exceptions=True)
        await self._round()
        if self._changed:
            log.warning("homes of %d sessions are not saved", len(self._changed))
        await self.store.close()

    async def _run(self) -> None:
        await self._load()
        pause = SAVE
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                return
            except TimeoutError:
                pass
            # What fails is tried again, ever less often.
            pause = SAVE if await self._round() else min(30.0, pause * 2)
            if self._forget_at is not None and self.fleet.clock() > self._forget_at:
                self._forget_at = None
                self._waiting.clear()

    async def _round(self) -> bool:
        """Save what changed; whether that worked. What is not saved, also by one that is cancelled, is left to the next."""
        changed, self._changed = self._changed, {}
        keys = list(changed)
        saved = 0
        try:
            while saved < len(keys):
                some = keys[saved : saved + SOME]
                lines = [(key.hex(), self._line(changed[key])) for key in some]
                await self.store.save(lines, len(self.sessions))
                saved += len(some)
        except (Unsaved, OSError) as error:
            if self.unsaved is None:
                log.error("homes of sessions are not saved: %s", error)
            self.unsaved = str(error)
            return False
        finally:
            for key in keys[saved:]:
                self._changed.setdefault(key, changed[key])
            self._forget_gone()
        if self.unsaved is not None:
            log.warning("homes of sessions are saved again")
        self.unsaved = None
        return True

    def _forget_gone(self) -> None:
        """While nothing can be saved, what is gone and was never saved needs no memory; the rest is bounded by its store."""
        if len(self._changed) > 2 * self.sessions.most:
            self._changed = {key: session for key, session in self._changed.items() if not session.gone}

    def _line(self, session: Session) -> bytes | None:
        if session.gone:
            return None
        session.saved = self.fleet.clock()
        return msgspec.json.encode(
            Kept(
                session.key.hex(),
                session.tenant,
                session.model,
                session.source,
                self._name(session.home),
                self._name(session.partner),
                session.why,
                None if session.parent is None else session.parent.hex(),
                session.inner,
                None if session.root is None else session.root.hex(),
                list(session.pins),
                list(session.told or ()),
                session.turns,
                session.prompt_bytes,
                session.prompt_tokens,
                session.tail_tokens,
                [end.hex() for end in session.ends],
                [end.hex() for end in session.asked],
                session.last.hex(),
                round(time() - (self.fleet.clock() - session.used), 3),
                by=self.store.me or "",
            )
        )

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name

    # -- restoring --------------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        try:
            async with asyncio.timeout(LOADING):
                kept = await self.store.load()
                await self._restore(kept)
        except (Unsaved, TimeoutError) as error:
            log.error("sessions are not restored: %s", error or "it took too long")
        except Exception:
            # What is new is to be saved all the same.
            log.exception("restoring sessions failed")
        finally:
            self.restoring = False
            self._ended.clear()
        log.info("%d sessions are restored", self.restored)
        self._forget_at = self.fleet.clock() + self.sessions.idle

    async def _restore(self, kept: Iterable[Kept]) -> None:
        # The last one used first: each stands before those that were restored before it, and behind none that came meanwhile.
        ordered = await asyncio.to_thread(sorted, kept, key=attrgetter("used"), reverse=True)
        now, wall = self.fleet.clock(), time()
        for at in range(0, len(ordered), SLICE):
            for each in ordered[at : at + SLICE]:
                idle = max(0.0, wall - each.used)
                if idle <= self.sessions.idle:
                    self._take(each, now - idle)
            await asyncio.sleep(0)

    def _take(self, each: Kept, used: float) -> None:
        """Take one back, as it was; one that is not what this wrote is left out."""
        try:
            session = _session_of(each)
        except ValueError:
            return
        if session.key in self._ended:
            return
        session.saved = self.fleet.clock()
        began = self.sessions.get(session.key)
        if began is not None:
            if began.turns > 1 or self._name(began.home) == each.home:
                return
            began.told = dict.fromkeys(each.told, 0) | (began.told or {}) or None
            session = began
        elif self.sessions.restore(session, used):
            self.restored += 1
            if self.store.me is None:
                session.told = dict.fromkeys(each.told, 0) or None
            else:
                self._copies[session.key] = _Copy(session, session.turns, each.told)
        else:
            return
        for name, worker in each.pins:
            self.pin(session.tenant, name, worker, session.key)
        self._await(session, each.home, each.partner)

    def _await(self, session: Session, home: str | None, partner: str | None) -> None:
        session.awaited = (home, partner)
        for name in {home, partner}:
            if name is None:
                continue
            here = self._joined.get(name)
            if here is not None and self.fleet.targets.get(here.id) is here:
                self._come_home(session, here)
            else:
                self._waiting.setdefault(name, {})[session.key] = session

    def _wait_less(self, session: Session) -> None:
        """It waits no more for a home that it has, or for any when it is gone."""
        home, partner = session.awaited or (None, None)
        for name, has in ((home, session.home), (partner, session.partner)):
            if name is None or (not session.gone and (has is None or session.turns <= 1)):
                continue
            waiting = self._waiting.get(name, {})
            if waiting.get(session.key) is session:
                del waiting[session.key]
                if not waiting:
                    del self._waiting[name]

    def arrived(self, worker: Worker) -> None:
        """Its targets are known: sessions that were at home there are so again, unless they found another home meanwhile."""
        known = {name: target for name, target in self._joined.items() if target.id in self.fleet.targets}
        self._joined = known | {target.name: target for target in worker.targets}
        for target in worker.targets:
            waiting = list(self._waiting.pop(target.name, {}).values())
            if len(waiting) <= SLICE:
                for session in waiting:
                    self._come_home(session, target)
                continue
            task = asyncio.get_running_loop().create_task(self._all_come_home(waiting, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _all_come_home(self, waiting: list[Session], target: Target) -> None:
        for at in range(0, len(waiting), SLICE):
            if self.fleet.targets.get(target.id) is not target:
                return
            for session in waiting[at : at + SLICE]:
                self._come_home(session, target)
            await asyncio.sleep(0)

    def _come_home(self, session: Session, target: Target) -> None:
        home, partner = session.awaited or (None, None)
        if session.gone:
            return
        # The store has it so already.
        known = session.key not in self._changed and session.home is None and session.partner is None
        if home == target.name and (session.home is None or session.turns <= 1):
            self.sessions.bind(session, target.id, session.why or "restored")
        if partner == target.name and (session.partner is None or session.turns <= 1):
            self.sessions.bind_partner(session, target.id)
        if known:
            self._changed.pop(session.key, None)


def _session_of(each: Kept) -> Session:
    """As it was, without its home. Raises `ValueError` where one of its keys is none."""
    key = bytes.fromhex(each.key)
    parent = None if each.parent is None else bytes.fromhex(each.parent)
    session = Session(key, each.source, each.tenant, each.model, xxh3_64_intdigest(key), parent=parent)
    session.root = None if each.root is None else bytes.fromhex(each.root)
    session.ends = tuple([bytes.fromhex(end) for end in each.ends])
    session.asked = tuple([bytes.fromhex(end) for end in each.asked])
    session.last = bytes.fromhex(each.last)
    session.turns, session.why, session.inner = each.turns, each.why, each.inner
    session.pins = tuple(each.pins)
    session.prompt_bytes, session.prompt_tokens = each.prompt_bytes, each.prompt_tokens
    session.tail_tokens = each.tail_tokens
    return session
