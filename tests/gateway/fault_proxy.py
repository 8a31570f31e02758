"""A TCP proxy that does to bytes what networks do, connection by connection, by a plan that a seed makes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Kind = Literal["none", "drop", "delay", "reset", "half_close", "corrupt", "slow", "cut"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Way = Literal["up", "down"]
PIECE = 16 * 1024


@dataclass(frozen=True)
class Fault:
    """What befalls one direction of one connection once ``after`` bytes have passed.

    drop        what follows is read and lost; the connection stays open
    delay       each piece comes ``seconds`` late
    reset       both ends get a reset
    half_close  the receiver sees the end of this direction; the other one goes on
    corrupt     one byte becomes another
    slow        ``rate`` bytes a second
    cut         both ends see the end
    """

    kind: Kind = "none"
    way: Way = "down"
    after: int = 0
    seconds: float = 0.05
    rate: int = 4000


class FaultProxy:
    """Between whoever connects and 127.0.0.1:``upstream``. ``up`` is towards that, ``down`` is back."""

    def __init__(self, upstream: int, seed: int = 0) -> None:
        self.upstream = upstream
        self.port = 0
        self.kind: Kind = "none"
        """What befalls new connections."""
        self.share = 0.7
        """Of new connections, how many it befalls."""
        self.reach = 2000
        """Bytes within which it happens."""
        self.faulty = 0
        """Connections that it befell."""
        self._random = Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_all(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()

    def _plan(self) -> Fault:
        random = self._random
        way: Way = "up" if random.random() < 0.5 else "down"
        fault = Fault(self.kind, way, random.randrange(self.reach))
        if fault.kind == "none" or random.random() >= self.share:
            return Fault()
        self.faulty += 1
        return fault

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = [writer]
        ways: list[asyncio.Task[None]] = []
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.upstream)
            writers.append(forth)
            fault = self._plan()
            ways = [
                asyncio.ensure_future(self._carry(reader, forth, fault if fault.way == "up" else Fault(), writers)),
                asyncio.ensure_future(self._carry(back, writer, fault if fault.way == "down" else Fault(), writers)),
            ]
            await asyncio.gather(*ways)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in writers:
                each.transport.abort()
            self._tasks.discard(task)

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault, ends: list[asyncio.StreamWriter]
    ) -> None:
        passed = 0
        while data := await reader.read(PIECE):
            before, passed = passed, passed + len(data)
            kept = max(0, fault.after - before)
            if fault.kind == "none" or passed <= fault.after:
                writer.write(data)
            elif fault.kind == "corrupt":
                # Only the byte at that place.
                if before <= fault.after:
                    data = data[:kept] + bytes([data[kept] ^ 0x15]) + data[kept + 1 :]
                writer.write(data)
            elif fault.kind == "delay":
                await asyncio.sleep(fault.seconds)
                writer.write(data)
            elif fault.kind == "slow":
                await self._drip(writer, data, fault.rate)
            else:
                writer.write(data[:kept])
                await writer.drain()
                await self._end(fault, reader, writer, ends)
                return
            await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _drip(self, writer: asyncio.StreamWriter, data: bytes, rate: int) -> None:
        for at in range(0, len(data), 200):
            writer.write(data[at : at + 200])
            await writer.drain()
            await asyncio.sleep(200 / rate)

    async def _end(
        self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ends: list[asyncio.StreamWriter]
    ) -> None:
        if fault.kind == "half_close":
            writer.write_eof()
        if fault.kind in ("drop", "half_close"):
            while await reader.read(PIECE):
                pass
            return
        for end in ends:
            if fault.kind == "cut":
                end.close()
            else:
                connected: socket.socket = end.get_extra_info("socket")
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.transport.abort()
        raise ConnectionResetError
