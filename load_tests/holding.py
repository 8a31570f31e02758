"""``python -m load_tests.holding PORT SOURCE``: a process that holds many client connections and does what it is told.

A process has a bounded number of descriptors and an address a bounded number of ports, so thousands of connections take several
of these, each with an address of loopback of its own. It reads one JSON object a line and answers with one:

    {"do": "open", "count": N}      N more connections
    {"do": "ask", "count": N}       one short request on each of N connections that rest; tells how many were good
    {"do": "stream", "count": N}    a long stream on each of N connections that rest
    {"do": "close", "count": N}     closes N that rest
    {"do": "look"}                  nothing

and every answer tells what is: ``open``, ``refused`` (a polite 503 and then the end), ``cut`` (ended without a word),
``streams`` and ``events`` of all streams so far, ``silent`` streams that had none since the last look.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvloop

AT_ONCE = 200
"""Connections that are made, or asked on, at one time."""
WAIT = 60.0
"""Seconds for which anything is waited for."""


def request(tokens: int, stream: bool) -> bytes:
    """The same one for everybody, in one session: what is measured are connections."""
    body = json.dumps(
        {
            "model": "sim",
            "messages": [{"role": "user", "content": "hold"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nUser-Agent: holding/1\r\nAccept: */*\r\n"
        b"Content-Type: application/json\r\nx-session-id: holding\r\nContent-Length: %d\r\n\r\n"
    )
    return head % len(body) + body


SHORT, LONG = request(1, False), request(400, True)


class Held(asyncio.Protocol):
    """One connection."""

    def __init__(self, hold: Holding) -> None:
        self.hold = hold
        self.transport: asyncio.Transport | None = None
        self.streams = False
        self.events = 0
        self.seen = 0
        self.head = b""
        self.answered: asyncio.Future[bool] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.hold.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self in self.hold.open:
            self.hold.open.discard(self)
            if self.head.startswith(b"HTTP/1.1 503") and b"\r\nretry-after:" in self.head.lower():
                self.hold.refused += 1
            else:
                self.hold.cut += 1
        self.tell(False)

    def data_received(self, data: bytes) -> None:
        if self.streams:
            self.events += data.count(b"data: ")
            return
        # An answer to the short request comes whole, or nearly so.
        self.head += data
        end = self.head.find(b"\r\n\r\n")
        if end < 0 or self.answered is None:
            return
        at = self.head.lower().find(b"content-length:")
        if len(self.head) >= end + 4 + int(self.head[at + 15 :].split(b"\r\n", 1)[0]):
            self.tell(self.head.startswith(b"HTTP/1.1 200"))

    def tell(self, good: bool) -> None:
        """The answer that somebody waits for is there, or will not come."""
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(good)

    async def ask(self) -> bool:
        """One short request."""
        if self.transport is None:
            return False
        self.head = b""
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(SHORT)
        try:
            return await asyncio.wait_for(self.answered, WAIT)
        except TimeoutError:
            return False
        finally:
            self.answered, self.head = None, b""

    def stream(self) -> None:
        """Begin one."""
        if self.transport is not None:
            self.streams = True
            self.transport.write(LONG)

    def close(self) -> None:
        """It goes of its own will."""
        self.hold.open.discard(self)
        if self.transport is not None:
            self.transport.close()


class Holding:
    """All connections of this process."""

    def __init__(self, port: int, source: str) -> None:
        self.port = port
        self.source = source
        self.open: set[Held] = set()
        self.refused = self.cut = self.good = 0

    def resting(self, count: int) -> list[Held]:
        """So many that do nothing, or as many as there are."""
        return [each for each in self.open if not each.streams][:count]

    async def do(self, order: dict[str, Any]) -> dict[str, int]:
        """One order; what is then. Raises `ValueError` for none that is known."""
        what, count = order["do"], order.get("count", 0)
        if what == "open":
            await self._gently([self._connect() for _ in range(count)])
            # Whoever is turned away is told at once.
            await asyncio.sleep(0.5)
        elif what == "ask":
            self.good = 0
            self.good = sum(await self._gently([each.ask() for each in self.resting(count)]))
        elif what in ("stream", "close"):
            for each in self.resting(count):
                each.stream() if what == "stream" else each.close()
        elif what != "look":
            raise ValueError(what)
        return self._told()

    def _told(self) -> dict[str, int]:
        streams = [each for each in self.open if each.streams]
        silent = sum(each.events == each.seen for each in streams)
        for each in streams:
            each.seen = each.events
        return {
            "open": len(self.open),
            "refused": self.refused,
            "cut": self.cut,
            "good": self.good,
            "streams": len(streams),
            "events": sum(each.events for each in streams),
            "silent": silent,
        }

    async def _connect(self) -> bool:
        try:
            async with asyncio.timeout(WAIT):
                await asyncio.get_running_loop().create_connection(
                    lambda: Held(self), "127.0.0.1", self.port, local_addr=(self.source, 0)
                )
        except (OSError, TimeoutError):
            self.cut += 1
            return False
        return True

    async def _gently(self, work: list[Any]) -> list[bool]:
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(each: Any) -> bool:
            async with turn:
                return bool(await each)

        return list(await asyncio.gather(*(one(each) for each in work)))


async def serve(port: int, source: str) -> None:
    """Obey until there are no more orders."""
    holding = Holding(port, source)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(await holding.do(json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2]))
