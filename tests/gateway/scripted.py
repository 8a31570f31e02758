"""A worker whose every byte a test writes. Probes are answered by itself; all else is recorded and answered by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request as it arrived, and the connection it came on."""

    head: bytes
    body: bytes
    connection: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    fields: list[tuple[str, str]] = field(default_factory=list)
    method: str = ""
    target: str = ""

    def __post_init__(self) -> None:
        first, *lines = self.head.decode("latin-1").split("\r\n")[:-2]
        self.method, self.target, _ = first.split(" ")
        self.fields = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def all(self, name: str) -> list[str]:
        """Values of a field."""
        return [value for key, value in self.fields if key.lower() == name]

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Cut the connection."""
        self.writer.transport.abort()

    async def gone(self, seconds: float = 10.0) -> None:
        """Until the gateway drops the connection."""
        try:
            while await asyncio.wait_for(self.reader.read(65536), seconds):
                pass
        except ConnectionError:
            pass


Script = Callable[[Seen], Awaitable[None]]
"""Answers one request itself; the connection is closed afterwards unless it says so by returning normally."""


def ok(body: bytes = b'{"ok":true}', *lines: bytes, status: bytes = b"200 OK") -> bytes:
    """A sized answer."""
    head = b"".join(line + b"\r\n" for line in (b"Content-Type: application/json", *lines))
    return b"HTTP/1.1 %b\r\n%bContent-Length: %d\r\n\r\n%b" % (status, head, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def events(*payloads: bytes, end: bool = True) -> bytes:
    """A stream, each event a chunk of its own."""
    return EVENTS + b"".join(map(chunk, payloads)) + (b"0\r\n\r\n" if end else b"")


class Scripted:
    """``replies``: bytes or `Script`, one a request; the last one stays. Without any, a small JSON answer."""

    def __init__(self, *replies: bytes | Script, models: tuple[str, ...] = ("sim",), port: int = 0) -> None:
        self.replies: list[bytes | Script] = list(replies)
        self.models = models
        self.seen: list[Seen] = []
        self.connections = 0
        self.probes = 0
        self.port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, backlog=2048, limit=1 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def one(self) -> Seen:
        """The only request."""
        assert len(self.seen) == 1, [seen.head for seen in self.seen]
        return self.seen[0]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self.connections = self.connections, self.connections + 1
        try:
            while await self._serve(number, reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        seen = Seen(head, b"", number, reader, writer)
        if seen.method == "GET" and seen.target == "/v1/models":
            self.probes += 1
            rows = [{"id": name, "object": "model", "created": 1, "owned_by": "test"} for name in self.models]
            writer.write(ok(json.dumps({"object": "list", "data": rows}).encode()))
            return True
        for length in seen.all("content-length"):
            seen.body = await reader.readexactly(int(length))
        self.seen.append(seen)
        reply = self.replies[0] if self.replies else ok()
        if len(self.replies) > 1:
            self.replies.pop(0)
        if isinstance(reply, bytes):
            await seen.write(reply)
        else:
            await reply(seen)
        return not writer.is_closing()
