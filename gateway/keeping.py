"""Homes of sessions, kept over a restart: in a file, or in Redis.

What is kept of a session is its name, its home and who was told of it; of one that is found by its content, what it is found
by. It is written behind the requests, never in front of them: changes are gathered and saved once a second. The file is a log
of JSON lines, of which the last for a session holds; it is rewritten when most of it is out of date. A store that is gone
costs nothing but the memory of what is to be saved, and is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from gateway.fleet import Fleet
from gateway.sessions import Session, Sessions
from gateway.workers import Target, Worker

log = logging.getLogger("warmroute")

SAVE = 1.0
"""Seconds between two rounds of saving."""
REFRESH = 0.25
"""Part of the idle time after which a session that goes on is saved anew, so that its age is known."""
SOME = 2000
"""Sessions that are encoded at a time."""
STALE_LINES = 10_000
"""Lines beyond twice the sessions after which the file is rewritten."""
PATIENCE = 5.0
"""Seconds that Redis may take for one round."""
PREFIX = "warmroute:session:"


class Kept(msgspec.Struct, omit_defaults=True):
    """One session as it is saved."""

    key: str
    tenant: str = ""
    model: str = ""
    source: str = ""
    home: str | None = None
    """The target's name."""
    partner: str | None = None
    why: str = ""
    parent: str | None = None
    inner: bool = False
    root: str | None = None
    pins: list[tuple[str, str]] = []
    """Stored responses and conversations of it, and the workers that have them."""
    told: list[str] = []
    turns: int = 0
    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    tail_tokens: int = 0
    ends: list[str] = []
    asked: list[str] = []
    last: str = ""
    used: float = 0.0
    """Unix seconds."""
    gone: bool = False


_decoder = msgspec.json.Decoder(Kept)


class Unsaved(Exception):
    """The store did not take, or give, what it was to; the message says why."""


class Store(Protocol):
    """Where sessions are kept."""

    async def load(self) -> list[Kept]:
        """All of them. Raises `Unsaved`."""
        ...

    async def save(self, lines: list[tuple[str, bytes | None]], live: int) -> None:
        """(key, line) of each that changed, ``None`` for one that is gone; ``live``: how many there are. Raises `Unsaved`."""
        ...

    async def close(self) -> None:
        """No more."""
        ...


class FileStore:
    """A log of lines. Raises `Unsaved` where it cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.secret: bytes | None = None
        self._lines = 0

    def secret_of(self) -> bytes:
        """The secret of tokens that is kept with it; a new one for a new file. Raises `Unsaved`."""
        try:
            with self.path.open("rb") as file:
                head = msgspec.json.decode(file.readline())
            self.secret = b64decode(head["secret"])
        except FileNotFoundError:
            self.secret = os.urandom(32)
            self._begin()
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise Unsaved(
                f"{self.path} is no state of a gateway ({error}): name another file, or move it away"
            ) from None
        return self.secret

    def _begin(self) -> None:
        try:
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(self._head())
        except OSError as error:
            raise Unsaved(f"{self.path} cannot be written: {error.strerror or error}") from None

    def _head(self) -> bytes:
        return msgspec.json.encode({"state": 1, "secret": b64encode(self.secret or b"").decode()}) + b"\n"

    async def load(self) -> list[Kept]:
        """The last line for each session that is not gone; lines that cannot be read are left out."""
        return [kept for kept, _ in (await asyncio.to_thread(self._read)).values()]

    def _read(self) -> dict[str, tuple[Kept, bytes]]:
        found: dict[str, tuple[Kept, bytes]] = {}
        self._lines = 0
        try:
            with self.path.open("rb") as file:
                file.readline()
                for line in file:
                    self._lines += 1
                    try:
                        kept = _decoder.decode(line)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        # The end of a line that was being written when the machine died.
                        continue
                    found.pop(kept.key, None)
                    if not kept.gone:
                        found[kept.key] = kept, line
        except OSError as error:
            raise Unsaved(f"{self.path} cannot be read: {error.strerror or error}") from None
        return found

    async def save(self, lines: list[tuple[str, bytes | None]], live: int) -> None:
        """Appended; the file is rewritten when most of it is out of date."""
        await asyncio.to_thread(self._save, lines, live)

    def _save(self, lines: list[tuple[str, bytes | None]], live: int) -> None:
        try:
            with self.path.open("ab") as file:
                for key, line in lines:
                    file.write((line or msgspec.json.encode(Kept(key, gone=True))) + b"\n")
        except OSError as error:
            raise Unsaved(f"{self.path} cannot be written: {error.strerror or error}") from None
        self._lines += len(lines)
        if self._lines > 2 * live + STALE_LINES:
            self._rewrite()

    def _rewrite(self) -> None:
        found = self._read()
        beside = self.path.with_name(self.path.name + ".new")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(self._head())
                file.writelines(line if line.endswith(b"\n") else line + b"\n" for _, line in found.values())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except OSError as error:
            raise Unsaved(f"{self.path} cannot be rewritten: {error.strerror or error}") from None
        self._lines = len(found)

    async def close(self) -> None:
        """Nothing is open between two rounds."""


class RedisStore:
    """A key for each session, which expires when the session does. ``idle``: seconds."""

    def __init__(self, url: str, idle: float) -> None:
        from redis.asyncio import Redis

        self._redis: Any = Redis.from_url(url, socket_timeout=PATIENCE, socket_connect_timeout=PATIENCE)
        self._idle = max(1, round(idle))

    async def load(self) -> list[Kept]:
        """Those that did not expire."""
        from redis.exceptions import RedisError

        found: list[Kept] = []
        names: list[bytes] = []
        try:
            async for name in self._redis.scan_iter(match=PREFIX + "*", count=1000):
                names.append(name)
                if len(names) >= 500:
                    found += await self._some(names)
                    names = []
            found += await self._some(names)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unsaved(f"Redis cannot be read: {error}") from None
        return found

    async def _some(self, names: list[bytes]) -> list[Kept]:
        found = []
        for line in await self._redis.mget(names) if names else ():
            try:
                found.append(_decoder.decode(line or b""))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
        return found

    async def save(self, lines: list[tuple[str, bytes | None]], live: int) -> None:
        """In one round trip."""
        from redis.exceptions import RedisError

        pipe = self._redis.pipeline(transaction=False)
        for key, line in lines:
            if line is None:
                pipe.delete(PREFIX + key)
            else:
                pipe.set(PREFIX + key, line, ex=self._idle)
        try:
            async with asyncio.timeout(PATIENCE):
                await pipe.execute()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unsaved(f"Redis does not take sessions: {error or type(error).__name__}") from None

    async def close(self) -> None:
        """Give the connections back."""
        await self._redis.aclose()


class Keeper:
    """Saves what changes and restores it; see the module's head."""

    def __init__(self, store: Store, sessions: Sessions, fleet: Fleet) -> None:
        self.store = store
        self.sessions = sessions
        self.fleet = fleet
        self._changed: dict[bytes, Session] = {}
        self._waiting: dict[str, list[Session]] = {}
        """Names of targets that did not join yet -> sessions at home there."""
        self._task: asyncio.Task[None] | None = None
        self.unsaved: str | None = None
        """Why the last round failed; ``None`` if it did not."""
        self.restored = 0
        self.pin: Callable[[str, str, str, bytes], None] = lambda tenant, name, worker, session: None
        """Told which worker has a stored response of a session."""

    def __len__(self) -> int:
        return len(self._changed)

    # -- saving -----------------------------------------------------------------------------------------------------

    def changed(self, session: Session) -> None:
        """It is to be saved."""
        self._changed[session.key] = session

    def used(self, session: Session, now: float) -> None:
        """A turn of it ended."""
        if session.ends or session.asked or now - session.saved > REFRESH * self.sessions.idle:
            self._changed[session.key] = session

    async def start(self) -> None:
        """Restore, then save what changes. A store that cannot be read is said and gone without."""
        try:
            async with asyncio.timeout(2 * PATIENCE):
                kept = await self.store.load()
            self._restore(kept)
        except (Unsaved, TimeoutError) as error:
            log.error("sessions are not restored: %s", error or "it took too long")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="keeper")

    async def stop(self) -> None:
        """Save what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._round()
        await self.store.close()

    async def _run(self) -> None:
        pause = SAVE
        while True:
            await asyncio.sleep(pause)
            # What fails is tried again, ever less often.
            pause = SAVE if await self._round() else min(30.0, pause * 2)

    async def _round(self) -> bool:
        """Save what changed; whether that worked."""
        changed, self._changed = self._changed, {}
        keys = list(changed)
        for at in range(0, len(keys), SOME):
            some = keys[at : at + SOME]
            lines = [(key.hex(), self._line(changed[key])) for key in some]
            try:
                await self.store.save(lines, len(self.sessions))
            except (Unsaved, OSError) as error:
                if self.unsaved is None:
                    log.error("homes of sessions are not saved: %s", error)
                self.unsaved = str(error)
                for key in keys[at:]:
                    self._changed.setdefault(key, changed[key])
                self._forget_gone()
                return False
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
            )
        )

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name

    # -- restoring --------------------------------------------------------------------------------------------------

    def _restore(self, kept: Iterable[Kept]) -> None:
        now, wall = self.fleet.clock(), time()
        # The last one used first: each stands before those that were restored before it, and behind none that came meanwhile.
        for each in sorted(kept, key=lambda each: -each.used):
            idle = max(0.0, wall - each.used)
            if idle > self.sessions.idle:
                continue
            try:
                key = bytes.fromhex(each.key)
                parent = None if each.parent is None else bytes.fromhex(each.parent)
                session = Session(key, each.source, each.tenant, each.model, xxh3_64_intdigest(key), parent=parent)
                session.root = None if each.root is None else bytes.fromhex(each.root)
                session.ends = [bytes.fromhex(end) for end in each.ends]
                session.asked = [bytes.fromhex(end) for end in each.asked]
                session.last = bytes.fromhex(each.last)
            except ValueError:
                continue
            session.turns, session.why, session.inner = each.turns, each.why, each.inner
            session.pins = tuple(each.pins)
            for name, worker in session.pins:
                self.pin(session.tenant, name, worker, key)
            session.prompt_bytes, session.prompt_tokens = each.prompt_bytes, each.prompt_tokens
            session.tail_tokens = each.tail_tokens
            session.told = dict.fromkeys(each.told, 0) or None
            session.saved = now
            if self.sessions.restore(session, now - idle):
                self.restored += 1
                self._await(session, each.home, each.partner)
        if self.restored:
            log.info("%d sessions are restored", self.restored)

    def _await(self, session: Session, home: str | None, partner: str | None) -> None:
        for name in {home, partner}:
            if name is not None:
                self._waiting.setdefault(name, []).append(session)
        session.awaited = (home, partner)

    def arrived(self, worker: Worker) -> None:
        """Its targets are known: sessions that were at home there are so again, unless they found another home meanwhile."""
        for target in worker.targets:
            for session in self._waiting.pop(target.name, ()):
                self._come_home(session, target)

    def _come_home(self, session: Session, target: Target) -> None:
        home, partner = session.awaited or (None, None)
        if session.gone:
            return
        if home == target.name and session.home is None:
            self.sessions.bind(session, target.id, session.why or "restored")
        if partner == target.name and session.partner is None:
            self.sessions.bind_partner(session, target.id)
