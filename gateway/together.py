"""The control plane of several gateway processes as one: whichever of them is asked, it asks the others.

Each process answers for itself on a Unix socket in the folder that they share. What is read is put together here: counts of
requests are summed, sessions are listed once. What is changed is changed everywhere: first here, and if it is refused, nowhere.
Homes of sessions are told by other ways (`gateway.replicas`), so of those only the process that knows the session is asked.

Metrics stay those of each process, told apart by the label ``process``: sums of counters of processes that come and go would
fall, and look like restarts of all of them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from gateway.access import LARGE, in_json, read
from gateway.workers import WorkerSpec

if TYPE_CHECKING:
    from gateway.run import Running

log = logging.getLogger("warmroute")

PATIENCE = 3.0
"""Seconds that another process may take to answer."""
LARGEST = 256 * 1024 * 1024
"""Bytes of an answer that is read."""
END = ".admin"
ADDED = "/inside/added"
SPREAD = frozenset({"/workers", "/config/reload"})
"""Paths, with all below them, at which changes are made in every process."""

Serve = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answer(NamedTuple):
    """Of another process."""

    process: int
    status: int
    body: bytes

    def json(self) -> Any:
        """Raises `msgspec.DecodeError`."""
        return msgspec.json.decode(self.body)


class Added(msgspec.Struct):
    """What operators changed of the fleet that is configured."""

    workers: list[tuple[WorkerSpec, float | None]] = []
    """With the seconds of their leases."""
    removed: list[str] = []
    """Ids of workers that are configured, and were taken out."""
    draining: list[str] = []


class Together:
    """See the module's head; of one process among several. ``await stop()`` at the end."""

    def __init__(self, running: Running, folder: str, number: int) -> None:
        self.running = running
        self.number = number
        self.folder = Path(folder)
        self.path = self.folder / f"{number}-{os.getpid()}{END}"
        self._open: dict[Path, aiohttp.ClientSession] = {}
        self._merges: dict[str, Callable[[Any, list[Answer]], Any]] = {
            "/workers": _workers,
            "/sessions": _sessions,
            "/tenants": _tenants,
        }

    async def stop(self) -> None:
        """Close what is open."""
        for session in self._open.values():
            await session.close()
        self._open.clear()
        with suppress(OSError):
            self.path.unlink()

    # -- asking -----------------------------------------------------------------------------------------------------

    def peers(self) -> list[Path]:
        """Sockets of the others, in the order of their numbers."""
        found = [path for path in self.folder.glob("*" + END) if path != self.path]
        return sorted(path for path in found if _lives(path))

    async def ask(self, method: str, path: str, body: bytes = b"") -> list[Answer]:
        """The answers of all others that answer in time."""
        peers = self.peers()
        for gone in self._open.keys() - set(peers):
            await self._open.pop(gone).close()
        answers = await asyncio.gather(*[self._ask(peer, method, path, body) for peer in peers])
        return [answer for answer in answers if answer is not None]

    async def _ask(self, peer: Path, method: str, path: str, body: bytes) -> Answer | None:
        session = self._open.get(peer)
        if session is None:
            connector = aiohttp.UnixConnector(path=str(peer), limit=8)
            session = self._open[peer] = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE)
            )
        headers = {"content-type": "application/json"} if body else {}
        try:
            async with session.request(method, "http://localhost" + path, data=body, headers=headers) as answer:
                return Answer(_number(peer), answer.status, await answer.content.read(LARGEST))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.warning("process %d does not answer %s %s: %s", _number(peer), method, path, error or "in time")
            return None

    async def added(self) -> Added | None:
        """As the first process that answers has it; ``None``: nobody else is there."""
        for peer in self.peers():
            answer = await self._ask(peer, "GET", ADDED, b"")
            if answer is not None and answer.status == 200:
                return msgspec.json.decode(answer.body, type=Added)
        return None

    async def tell_added(self, request: web.Request) -> web.Response:
        """For a process that comes. It has workers' keys in it: it is told on the inside only."""
        return in_json(self.running.added())

    # -- answering --------------------------------------------------------------------------------------------------

    @web.middleware
    async def gathered(self, request: web.Request, handler: Serve) -> web.StreamResponse:
        """Answer for all."""
        path, target = request.path, request.rel_url.raw_path_qs
        if request.method in ("GET", "HEAD"):
            if path == "/metrics":
                return await self._metrics()
            response = await handler(request)
            if path in self._merges and response.status == 200:
                return await self._merged(path, target, response)
            if path.startswith("/sessions/") and response.status == 404:
                return await self._elsewhere("GET", target, b"") or response
            return response
        body = await read(request, LARGE)
        response = await handler(request)
        if path.startswith("/sessions/"):
            return (
                response if response.status != 404 else await self._elsewhere(request.method, target, body) or response
            )
        if response.status < 400 and any(path == each or path.startswith(each + "/") for each in SPREAD):
            await self._spread(request.method, target, body)
        return response

    async def _merged(self, path: str, target: str, response: web.StreamResponse) -> web.Response:
        assert isinstance(response, web.Response)
        own = msgspec.json.decode(response.body if isinstance(response.body, bytes) else b"{}")
        others = [answer for answer in await self.ask("GET", target) if answer.status == 200]
        return in_json(self._merges[path](own, others))

    async def _elsewhere(self, method: str, target: str, body: bytes) -> web.Response | None:
        """The answer of the first process that has the session."""
        for peer in self.peers():
            answer = await self._ask(peer, method, target, body)
            if answer is not None and answer.status != 404:
                return web.Response(body=answer.body, status=answer.status, content_type="application/json")
        return None

    async def _spread(self, method: str, target: str, body: bytes) -> None:
        for answer in await self.ask(method, target, body):
            # What is done already there is as it should be.
            if answer.status >= 400 and answer.status != 404:
                log.error(
                    "process %d does not follow %s %s: %s", answer.process, method, target, answer.body[:200].decode()
                )

    async def _metrics(self) -> web.Response:
        others = [(answer.process, answer.body) for answer in await self.ask("GET", "/metrics") if answer.status == 200]
        own = await self.running.metrics.exposition.read()
        text = await joined(sorted([(self.number, own), *others]))
        return web.Response(body=text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


# -- putting together ---------------------------------------------------------------------------------------------------

_BRACED, _BARE = re.compile(rb"(?m)^([a-zA-Z_:][\w:]*)\{"), re.compile(rb"(?m)^([a-zA-Z_:][\w:]*) ")
FAMILY = b"# HELP "


async def joined(texts: list[tuple[int, bytes]]) -> bytes:
    """Metrics of several processes, each line with the label ``process``; lines of one metric stand together. Others get
    their turn in between."""
    families: dict[bytes, list[bytes]] = {}
    for process, text in texts:
        label = b'process="%d"' % process
        for family in text.split(FAMILY)[1:]:
            intro, lines = _intro(family)
            lines = _BRACED.sub(rb"\1{" + label + b",", lines)
            lines = _BARE.sub(rb"\1{" + label + b"} ", lines)
            families.setdefault(intro, []).append(lines)
            if len(lines) > 20_000:
                await asyncio.sleep(0)
    return b"".join([part for intro, lines in families.items() for part in (FAMILY, intro, *lines)])


def _intro(family: bytes) -> tuple[bytes, bytes]:
    """The lines of help and type, and the rest."""
    end = family.index(b"\n", family.index(b"\n") + 1) + 1
    return family[:end], family[end:]


def _workers(own: Any, others: list[Answer]) -> Any:
    """Requests and connections of all."""
    rows = {row["id"]: row for row in own["workers"]}
    for answer in others:
        for row in answer.json()["workers"]:
            here = rows.get(row["id"])
            if here is None:
                continue
            for name in ("running", "connections", "idle_connections"):
                here[name] += row[name]
            for target, there in zip(here["targets"], row["targets"], strict=False):
                target["running"] += there["running"]
    return own


def _sessions(own: Any, others: list[Answer]) -> Any:
    """Each once, as whoever served it last has it."""
    found: dict[str, Any] = {}
    total = own["total"]
    for told in (own, *[answer.json() for answer in others]):
        total = max(total, told["total"])
        for row in told["sessions"]:
            before = found.get(row["id"])
            if before is None or row["turns"] > before["turns"]:
                found[row["id"]] = row
    rows = sorted(found.values(), key=lambda row: row["idle_seconds"])
    return {"total": max(total, len(rows)), "sessions": rows[: max(len(own["sessions"]), len(rows))]}


def _tenants(own: Any, others: list[Answer]) -> Any:
    """What they use is known to all; what runs is each one's own."""
    rows = {row["name"]: row for row in own["tenants"]}
    for answer in others:
        for row in answer.json()["tenants"]:
            here = rows.get(row["name"])
            if here is not None:
                for name in ("running", "queued"):
                    here[name] += row[name]
    for row in rows.values():
        if "concurrency" in row["limits"]:
            row["limits"]["concurrency"]["used"] = row["running"]
    return own


def _number(path: Path) -> int:
    return int(path.name.split("-", 1)[0])


def _lives(path: Path) -> bool:
    """Whether the process that listens there does; if not, its socket goes."""
    try:
        os.kill(int(path.name.removesuffix(END).split("-", 1)[1]), 0)
    except ProcessLookupError:
        with suppress(OSError):
            path.unlink()
        return False
    except (PermissionError, ValueError, IndexError):
        pass
    return True
