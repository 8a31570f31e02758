"""The side channel between engines: small messages over TCP, each a JSON object behind its length in four bytes.

It stands for what real engines do over NIXL, Mooncake or RDMA. What is read is the tokens that KV was computed from; the
time that the bytes would take is waited for by the side that gives. A process that dies resets what is under way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

JSON = dict[str, Any]
MAX_MESSAGE = 64 * 1024 * 1024


class SideError(Exception):
    """The other engine is not there, went away, or does not have what was asked for."""


class ConnectionLost(SideError):
    """Nobody is there, or not any more."""


async def _write(writer: asyncio.StreamWriter, message: JSON) -> None:
    data = msgspec.json.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> JSON:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_MESSAGE:
        raise SideError(f"a message of {size} bytes is too long")
    message = msgspec.json.decode(await reader.readexactly(size))
    if not isinstance(message, dict):
        raise SideError("a message must be an object")
    return message


class Talk:
    """A connection to another engine. Each question waits for its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, verb: str, **fields: Any) -> JSON:
        """The answer; SideError if there is none, or if it is an error."""
        try:
            await _write(self._writer, {"verb": verb, **fields})
            answer = await _read(self._reader)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            raise ConnectionLost(f"the connection was lost: {error}") from None
        if "error" in answer:
            raise SideError(str(answer["error"]))
        return answer


@asynccontextmanager
async def connect(host: str, port: int) -> AsyncIterator[Talk]:
    """SideError if nobody listens there."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except (OSError, ValueError, OverflowError) as error:
        raise ConnectionLost(f"cannot reach {host}:{port}: {error}") from None
    try:
        yield Talk(reader, writer)
    finally:
        writer.close()


class SideServer:
    """Answers questions with ``answer``; what that raises as SideError is told to the one who asked."""

    def __init__(self, host: str, port: int, answer: Callable[[JSON], Awaitable[JSON]]) -> None:
        self.host = host
        self.port = port
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}

    async def open(self) -> None:
        """Listen; ``port`` is the real one afterwards. OSError if it is taken."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port, reuse_address=True)
        bound: socket.socket = self._server.sockets[0]
        self.port = bound.getsockname()[1]

    async def close(self) -> None:
        """Reset every connection, as a process that ends."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._open.values())
        for writer, task in list(self._open.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open[writer] = task
        try:
            while True:
                question = await _read(reader)
                try:
                    answer = await self._until_gone(reader, self._answer(question))
                except SideError as error:
                    answer = {"error": str(error)}
                await _write(writer, answer)
        except (OSError, EOFError, msgspec.DecodeError, SideError, asyncio.CancelledError):
            pass
        finally:
            del self._open[writer]
            writer.close()

    async def _until_gone(self, reader: asyncio.StreamReader, work: Awaitable[JSON]) -> JSON:
        """The answer, unless the one who asked leaves first: nobody asks twice at a time, so input means that."""
        answering = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EOFError
            return answering.result()
        finally:
            for future in (answering, leaving):
                future.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
