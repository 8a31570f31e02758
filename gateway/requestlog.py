"""The log of requests: one line each, when it is over, as JSON or as ``key=value``.

What is told of a request is gathered when it is over. Lines are made of many at a time: code that runs once between two
requests finds nothing of it in the processor's caches, and takes more than twice as long. The file is a thread's, for a disk
may hang; what does not fit into its bounded queue is dropped and counted.
The file is rotated by size, and so many old ones are kept. It tells sizes, times, places and reasons; of what was said nothing,
and of a session the hash that stands for it everywhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache
from re import compile as pattern
from threading import Event, Lock, Thread
from time import monotonic, time
from typing import TYPE_CHECKING

import msgspec

from gateway.appended import Appended
from gateway.dialects import Usage
from gateway.metrics import Metrics

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger("warmroute")

QUEUE = 20_000
"""Lines that wait to be written, at most."""
PAUSE = 0.5
"""Seconds between two looks at the queue."""
BATCH = 100
"""Lines that are made in one go: a quarter of a millisecond at most, for that long nothing else runs."""
STOP = 2.0
"""Seconds in which what waits may still be written at the end."""
CONSOLE = "-"
"""Instead of a file: standard output."""
LONGEST, SHORT = 2048, 200
"""Characters of a path that are told, and of one that is refused: anybody may send those."""

_PLAIN = pattern(r"[!#-<>-\[\]-~]+")
"""What needs no quotes in ``key=value``: visible ASCII but for quotes, equals signs and backslashes."""


class Ended(msgspec.Struct, omit_defaults=True, gc=False):
    """What is told of a request. Times are seconds, sizes tokens; ``None``: not known, or it did not come so far."""

    time: float | str
    """When it was over, since the epoch; as it is told, once it is."""
    id: str
    status: int | None
    outcome: str
    """As metrics tell it; ``refused`` before it was routed."""
    path: str
    tenant: str | None = None
    model: str | None = None
    kind: str | None = None
    policy: str | None = None
    reason: str | None = None
    target: str | None = None
    prefill_target: str | None = None
    session: str | None = None
    session_source: str | None = None
    turn: int | None = None
    attempts: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    completion_tokens: int | None = None
    queued_seconds: float | None = None
    overhead_seconds: float | None = None
    ttft_seconds: float | None = None
    seconds: float | None = None
    trace: str | None = None


_ENCODER = msgspec.json.Encoder()


def encode(of: list[Ended], as_json: bool) -> bytes:
    """A line for each, its end included. In ASCII: no terminal and no reader of lines takes a part of it for something else."""
    for ended in of:
        if isinstance(ended.time, float):
            ended.time = _told(ended.time)
    if not as_json:
        return b"".join([_text(ended) for ended in of])
    data = _ENCODER.encode_lines(of)
    if not data.isascii() or b"\x7f" in data:
        told = [json.dumps(msgspec.to_builtins(ended), separators=(",", ":")) + "\n" for ended in of]
        data = "".join(told).encode().replace(b"\x7f", b"\\u007f")
    return data


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _told(at: float) -> str:
    second = int(at)
    return f"{_second(second)}.{int((at - second) * 1000):03d}Z"


def _text(ended: Ended) -> bytes:
    parts = []
    for name in Ended.__struct_fields__:
        value = getattr(ended, name)
        if value is not None:
            text = f"{value}"
            parts.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
    return " ".join(parts).replace("\x7f", "\\u007f").encode() + b"\n"


class Console:
    """Standard output."""

    def append(self, lines: bytes) -> None:
        """Raises `OSError`."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(1, rest) :]

    def close(self) -> None:
        """It stays open."""


class File(Appended):
    """Raises `OSError`. One that cannot be rotated goes on up to twice its size."""

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self.size = os.fstat(self._file).st_size

    def append(self, lines: bytes) -> None:
        """Whole lines, all of them or none; a full file is rotated first."""
        if self.size >= self.most:
            try:
                self.rotate()
            except OSError:
                if self.size >= 2 * self.most:
                    raise
        super().append(lines)


class RequestLog:
    """Lines of one gateway. ``start()``, then `ended` and `refused`, then ``await stop()``. Raises `OSError` for a file that
    cannot be opened."""

    def __init__(self, file: str, as_json: bool, most: int, keep: int, metrics: Metrics) -> None:
        self._json = as_json
        self._metrics = metrics
        self._file = Console() if file == CONSOLE else File(file, most, keep)
        self._queue: deque[Ended] = deque()
        self._wake = Event()
        self._ending = False
        self._thread = Thread(target=self._run, name="request log", daemon=True)
        self._failed = False
        self._lock = Lock()

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    async def stop(self) -> None:
        """Write what waits, for some seconds at most."""
        self._ending = True
        self._wake.set()
        # A disk that hangs keeps the thread, but not the gateway.
        await asyncio.to_thread(self._thread.join, STOP)

    def refused(self, request_id: bytes, path: bytes, status: int) -> None:
        """A request was refused before it was routed."""
        self._put(Ended(time(), _latin(request_id), status, "refused", _latin(path[:SHORT])))

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None, seconds: float) -> None:
        """A request is over after so many seconds."""
        ask, target, choice = exchange.ask, exchange.target, exchange.choice
        session = ask.session
        self._put(
            Ended(
                time(),
                _latin(exchange.request_id),
                exchange.status or None,
                outcome,
                _latin(exchange.incoming.path[:LONGEST]),
                ask.tenant.name,
                ask.model_name,
                exchange.route.kind,
                ask.policy.name,
                None if choice is None else choice.reason,
                None if target is None else target.name,
                None if exchange.legs is None else exchange.legs.prefill.name,
                None if session is None else session.key.hex(),
                ask.found,
                ask.turn or None,
                exchange.attempts,
                None if usage is None else usage.prompt,
                None if usage is None else usage.cached,
                ask.predicted,
                None if usage is None else usage.completion,
                round(exchange.turn_at - exchange.asked_at, 6) if exchange.turn_at else None,
                round(exchange.written_at - exchange.started, 6) if exchange.written_at else None,
                round(exchange.first_at - exchange.started, 6) if exchange.events and exchange.first_at else None,
                round(seconds, 6),
                None if exchange.trace is None else exchange.trace.id,
            )
        )

    def _put(self, ended: Ended) -> None:
        if len(self._queue) >= QUEUE:
            self._dropped(1)
        else:
            self._queue.append(ended)

    def _dropped(self, lines: int) -> None:
        with self._lock:
            self._metrics.request_log_dropped.add((), lines)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last, until = False, 0.0
        while not last:
            self._wake.wait(PAUSE)
            last = self._ending
            until = monotonic() + STOP if last else until
            while self._queue and not (last and monotonic() > until):
                taken = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
                self._write(encode(taken, self._json), len(taken))
        self._file.close()

    def _write(self, text: bytes, count: int) -> None:
        try:
            self._file.append(text)
        except OSError as error:
            self._dropped(count)
            if not self._failed:
                log.warning("the request log cannot be written: %s", error)
            self._failed = True
        else:
            self._failed = False


def _latin(text: bytes) -> str:
    return text.decode("latin-1")
