"""The bus of several hosts: a stream in Redis, into which each gateway writes its batches and which each reads.

Beside it stand the homes of sessions, in hashes of a length of time each, of which the old ones expire: they outlive all
gateways. Nothing waits for Redis. What cannot be written waits, some thousand batches of it, and is written when it can be;
what was let go others see missing, and ask for. A gateway reads its own words too: that they come back shows that others are
heard. Where they do not, because the stream was flushed, or is on another server whose clock is behind, it reads on from its
own last word.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from time import monotonic, time
from typing import Any

from gateway.replicas.redis_url import connect
from gateway.replicas.words import Batch

log = logging.getLogger("warmroute")

PATIENCE = 2.0
"""Seconds that Redis may take for one answer."""
BLOCK = 500
"""Milliseconds for which it may hold back an answer while there is nothing to read."""
LENGTH = 10_000
"""Batches that the stream keeps, about."""
WAITING = 4000
"""Batches that wait to be written."""
SOME = 200
"""That are written in one round trip, and read."""
RECENT = 60.0
"""Seconds of the stream that a newcomer reads."""
SILENT = 3.0
"""Seconds without a word of its own after which it says that it does not hear."""
AGAIN = (0.2, 2.0)
"""Seconds between two attempts, the first and the longest."""


class Shared:
    """``heard`` is told every batch of another host; ``remembered`` the homes of sessions that are kept, by key. ``idle``:
    seconds for which they are. Raises `ValueError` for a URL that is none of Redis'."""

    name = "redis"

    def __init__(
        self,
        url: str,
        scope: str,
        who: bytes,
        host: bytes,
        idle: float,
        heard: Callable[[bytes], None],
        remembered: Callable[[dict[bytes, bytes]], None],
    ) -> None:
        # One slot of a cluster has them all: they are written together.
        self._stream = f"warmroute:{{{scope}}}:log"
        self._homes = f"warmroute:{{{scope}}}:homes:"
        self._who, self._host = who, host
        self._idle = max(60.0, idle)
        self._heard, self._remembered = heard, remembered
        self._writer, self._reader = connect(url, PATIENCE), connect(url, PATIENCE)
        self._waiting: deque[tuple[dict[str, bytes], dict[bytes, bytes]]] = deque(maxlen=WAITING)
        self._there = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._echo_at = monotonic()
        self._own: bytes | None = None
        """Place in the stream of its own last word."""
        self._failed: str | None = None
        self._ending = False

    async def start(self) -> None:
        """Write and read from now on; whether Redis is there or not."""
        self._echo_at = monotonic()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._always(self._write), name="redis writer"),
            loop.create_task(self._always(self._read), name="redis reader"),
        ]

    async def stop(self) -> None:
        """What was said last is still written, for a moment."""
        self._ending = True
        try:
            async with asyncio.timeout(1.0):
                while self._waiting and self._failed is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client in (self._writer, self._reader):
            try:
                async with asyncio.timeout(1.0):
                    await client.aclose()
            except Exception:
                log.debug("closing a connection to Redis failed", exc_info=True)

    def say(self, data: bytes, to: bytes | None, batch: Batch) -> None:
        """To one, or to all."""
        fields = {"w": self._who, "h": self._host, "b": data}
        if to is not None:
            fields["t"] = to
        self._waiting.append((fields, {told.key: told.home for told in batch.homes if told.home} if to is None else {}))
        self._there.set()

    @property
    def troubled(self) -> str | None:
        """Why others cannot be heard, or do not hear."""
        if self._failed is not None:
            return self._failed
        return "its words do not come back" if monotonic() - self._echo_at > SILENT else None

    # -- tasks ------------------------------------------------------------------------------------------------------

    async def _always(self, work: Callable[[], Any]) -> None:
        """Until it is cancelled: what fails is tried again, less often."""
        pause = AGAIN[0]
        while True:
            began = monotonic()
            try:
                await work()
            except Exception as error:
                # Whatever a client of Redis raises; and none of it may end this.
                self._failed = f"{type(error).__name__}: {error}"[:200]
            pause = AGAIN[0] if monotonic() - began > 5.0 else min(AGAIN[1], pause * 2)
            await asyncio.sleep(pause)

    async def _write(self) -> None:
        while True:
            await self._there.wait()
            some = [self._waiting[at] for at in range(min(SOME, len(self._waiting)))]
            if not some:
                self._there.clear()
                continue
            homes: dict[bytes, bytes] = {}
            pipe = self._writer.pipeline(transaction=False)
            for fields, told in some:
                pipe.xadd(self._stream, fields, maxlen=LENGTH, approximate=True)
                homes |= told
            if homes:
                name = self._homes + str(int(time() / self._idle))
                pipe.hset(name, mapping=homes)
                pipe.expire(name, int(2 * self._idle))
            async with asyncio.timeout(2 * PATIENCE):
                answers = await pipe.execute()
            self._own = answers[len(some) - 1]
            self._failed = None
            # What came meanwhile stands behind them, unless there was no room: then some of these are gone already.
            for fields in [each[0] for each in some]:
                if self._waiting and self._waiting[0][0] is fields:
                    self._waiting.popleft()

    async def _read(self) -> None:
        await self._remember()
        at: bytes = f"{int((time() - RECENT) * 1000)}-0".encode()
        while True:
            async with asyncio.timeout(2 * PATIENCE):
                found = await self._reader.xread({self._stream: at}, count=SOME, block=BLOCK)
            for number, fields in _entries(found):
                at = number
                self._entry(fields)
            if self._own is not None and monotonic() - self._echo_at > SILENT:
                at, self._own = self._own, None
            await asyncio.sleep(0)

    def _entry(self, fields: dict[bytes, bytes]) -> None:
        if fields.get(b"w") == self._who:
            self._echo_at = monotonic()
            return
        # Those of this host are heard without Redis.
        to = fields.get(b"t")
        if (self._host and fields.get(b"h") == self._host) or (to is not None and to != self._who):
            return
        self._heard(fields.get(b"b", b""))

    async def _remember(self) -> None:
        """Homes that were said before, by whomever."""
        now = int(time() / self._idle)
        for part in (now - 1, now):
            cursor = 0
            while True:
                async with asyncio.timeout(2 * PATIENCE):
                    cursor, found = await self._reader.hscan(self._homes + str(part), cursor, count=500)
                self._remembered(found)
                if not int(cursor):
                    break
                await asyncio.sleep(0)


def _entries(found: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Of a stream's answer, in either form of it."""
    if not found:
        return []
    if isinstance(found, dict):
        return [entry for batches in found.values() for batch in batches for entry in batch]
    return [entry for _, entries in found for entry in entries]


def shared_secret(url: str, scope: str) -> str | None:
    """What all gateways of a scope make tokens and salts with: the first that asks makes it. ``None``: Redis does not say."""
    from redis.exceptions import RedisError

    name = f"warmroute:{{{scope}}}:secret"
    try:
        client = connect(url, PATIENCE, blocking=True)
        client.set(name, os.urandom(32).hex(), nx=True)
        found = client.get(name)
        client.close()
    except (RedisError, OSError) as error:
        log.warning("Redis does not tell the secret of tokens (%s): those of other gateways are not read here", error)
        return None
    return None if found is None else found.decode()
