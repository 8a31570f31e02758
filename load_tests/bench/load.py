"""The load generator: ``python -m load_tests.bench.load JSON``, one closed-loop run against one address.

It takes a `Load` as JSON, drives so many connections, each sending its next request when the last was answered, and prints
one JSON object: requests, errors, events, seconds, and the CPU seconds that the processes ``pids`` used over the measured
part, which begins after ``warmup`` requests.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import cast

import msgspec
import uvloop

from load_tests.bench.mock import BYTES_PER_TOKEN
from load_tests.bench.processes import cpu_seconds

KEY = "bench-key"
LIMIT_SECONDS = 120.0


class Load(msgspec.Struct):
    """One run. Sizes in bytes."""

    port: int
    requests: int
    pids: list[int] = []
    warmup: int = 0
    connections: int = 32
    body: int = 1024
    shared: int = 256
    """Of each distinct prompt, so much at its start is the same."""
    sessions: int = 0
    """Above 0: sessions whose bodies grow by ``body`` each turn, instead of distinct prompts."""
    turns: int = 24
    stream: bool = False
    seed: int = 1


class Measured(msgspec.Struct):
    """What a run gave."""

    requests: int
    errors: int
    events: int
    seconds: float
    cpu_seconds: float


def requests(load: Load) -> Iterator[bytes]:
    """Whole requests, without end."""
    random = Random(load.seed)
    pool = bytes(random.choices(b"abcdefghijklmnopqrstuvwxyz      ", k=1 << 20))
    shared = pool[: load.shared]
    if load.sessions:
        yield from _sessions(load, pool, shared)
    number = 0
    while True:
        number += 1
        own = b"%d.%d " % (load.seed, number)
        at = random.randrange(len(pool) - load.body)
        rest = max(0, load.body - load.shared - len(own) - 80)
        text = shared + own + pool[at : at + rest]
        yield _whole(load, text, b"", load.shared)


def _sessions(load: Load, pool: bytes, shared: bytes) -> Iterator[bytes]:
    """Turns of sessions, a wave of ``load.sessions`` after the other; all sessions of a wave take turns."""
    wave = 0
    while True:
        wave += 1
        texts = [shared + b"%d.%d.%d " % (load.seed, wave, session) for session in range(load.sessions)]
        for turn in range(load.turns):
            for session in range(load.sessions):
                before = len(texts[session])
                at = (wave * 7919 + session * 6151 + turn * 4093) * 97 % (len(pool) - load.body)
                texts[session] += pool[at : at + load.body]
                name = b"x-session-id: %d-%d-%d\r\n" % (load.seed, wave, session)
                yield _whole(load, texts[session], name, before if turn else load.shared)


def _whole(load: Load, text: bytes, extra: bytes, cached: int) -> bytes:
    stream = b'"stream":true,"stream_options":{"include_usage":true},' if load.stream else b""
    body = b'{"model":"mock",%b"max_tokens":%d,"messages":[{"role":"user","content":"%b"}]}' % (
        stream,
        200 if load.stream else 4,
        text,
    )
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\nx-bench-cached: %d\r\n%bcontent-length: %d\r\n\r\n"
    ) % (load.port, KEY.encode(), cached // BYTES_PER_TOKEN, extra, len(body))
    return head + body


class Run:
    """Counts what the connections do and tells when it is over."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.source = requests(load)
        self.over = asyncio.Event()
        self.sent = self.done = self.errors = self.events = 0
        self.cpu = self.began = self.seconds = 0.0
        if not load.warmup:
            self.begin()

    def begin(self) -> None:
        """The measured part begins."""
        self.done = self.errors = self.events = 0
        self.cpu = cpu_seconds(self.load.pids)
        self.began = time.monotonic()

    def next(self) -> bytes | None:
        """The next request to send; ``None`` when there is none left."""
        if self.sent >= self.load.warmup + self.load.requests:
            return None
        self.sent += 1
        return next(self.source)

    def answered(self, good: bool, events: int) -> None:
        """One answer is complete."""
        self.done += 1
        self.errors += not good
        self.events += events
        if self.load.warmup and self.done == self.load.warmup and not self.began:
            self.begin()
        elif self.began and self.done == self.load.requests:
            self.seconds = time.monotonic() - self.began
            self.cpu = cpu_seconds(self.load.pids) - self.cpu
            self.over.set()


class Client(asyncio.Protocol):
    """One connection: sends, reads one answer, sends the next."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.buffer = bytearray()
        self.need = 0
        """Bytes of the whole answer; 0: the head is not complete; -1: chunked."""
        self.waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if self.waiting:
            self.run.answered(False, 0)

    def send(self) -> None:
        """Send the next request, or close."""
        request = self.run.next()
        self.waiting = request is not None
        if request is None:
            self.transport.close()
        else:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        buffer = self.buffer
        buffer += data
        if not self.need:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(buffer[:end]).lower()
            at = head.find(b"content-length:")
            self.need = -1 if at < 0 else end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])
        if self.need > 0:
            if len(buffer) < self.need:
                return
        elif not buffer.endswith(b"0\r\n\r\n"):
            return
        good = buffer.startswith(b"HTTP/1.1 200")
        events = buffer.count(b"data: ") if self.need < 0 else 0
        buffer.clear()
        self.need = 0
        self.run.answered(good, events)
        self.send()


async def drive(load: Load) -> Measured:
    """Run one load. Raises `TimeoutError` after `LIMIT_SECONDS`, `OSError` if nothing listens."""
    loop = asyncio.get_running_loop()
    run = Run(load)
    async with asyncio.timeout(LIMIT_SECONDS):
        for _ in range(load.connections):
            await loop.create_connection(lambda: Client(run), "127.0.0.1", load.port)
        await run.over.wait()
    return Measured(run.done, run.errors, run.events, run.seconds, run.cpu)


def main(argument: str) -> None:
    """Run one load and print what it gave."""
    measured = uvloop.run(drive(msgspec.json.decode(argument, type=Load)))
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main(sys.argv[1])
