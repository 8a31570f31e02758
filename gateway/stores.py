"""Where homes of sessions are kept over a restart: a file, or Redis.

The file is a log of JSON lines, of which the last for a session holds; it is rewritten when most of it is out of date. It is
one gateway's. In Redis several may keep theirs: each line says who wrote it, and is deleted by that one only.
"""

from __future__ import annotations

import asyncio
import os
from base64 import b64decode, b64encode
from pathlib import Path
from threading import Lock
from typing import IO, Any, Protocol

import msgspec

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
    by: str = ""
    """The gateway that served it last, where several keep theirs in one store."""


_decoder = msgspec.json.Decoder(Kept)


class Unsaved(Exception):
    """The store did not take, or give, what it was to; the message says why."""


class Store(Protocol):
    """Where sessions are kept."""

    @property
    def me(self) -> str | None:
        """What this gateway signs what it saves with (`Kept.by`); ``None``: no other one keeps sessions there."""
        ...

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

    me = None

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.secret: bytes | None = None
        self._lines = 0
        self._whole = False
        """Its last line is known to be a whole one."""
        self._writing = Lock()

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
        # A round that nobody waits for any more may still be writing.
        with self._writing:
            try:
                with self.path.open("a+b") as file:
                    if not self._whole:
                        self._end_line(file)
                    # Until all of it is written.
                    self._whole = False
                    for key, line in lines:
                        file.write((line or msgspec.json.encode(Kept(key, gone=True))) + b"\n")
                self._whole = True
            except OSError as error:
                raise Unsaved(f"{self.path} cannot be written: {error.strerror or error}") from None
            self._lines += len(lines)
            if self._lines > 2 * live + STALE_LINES:
                self._rewrite()

    def _end_line(self, file: IO[bytes]) -> None:
        """End a line that was being written when the machine died, or it would swallow the next one."""
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")

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


_FORGET = """
local kept = redis.call('get', KEYS[1])
if kept and string.find(kept, ARGV[1], 1, true) then return redis.call('del', KEYS[1]) end
return 0
"""
"""Delete a key that this gateway wrote last."""


class RedisStore:
    """A key for each session, which expires when the session does; several gateways may keep theirs there. ``idle``: seconds.

    Raises `ValueError` for a URL that is none of Redis'.
    """

    def __init__(self, url: str, idle: float) -> None:
        from redis.asyncio import Redis

        self.me = os.urandom(8).hex()
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
                pipe.eval(_FORGET, 1, PREFIX + key, f'"by":"{self.me}"')
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
