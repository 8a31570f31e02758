"""Recordings: one line a finished request, from which a workload can be replayed under other policies, without a word of it.

A line tells sizes, times, and the prompt as ids of its pages. An id stands for its page *and* all pages before it, so two
prompts share a prefix exactly as far as their ids agree. Ids, sessions and tenants are keyed hashes. The key is random and
stays in a file of its own beside the recording: with the recording alone nobody can find a text by hashing candidates,
and with the key a gateway that starts again goes on with the same ids.

While a request is answered only what is there anyway is kept. Reading the prompt, hashing and writing are a thread's, which
owns the file and rests between small slices, so that requests need not wait for it; what does not fit into its bounded queues
is dropped and counted. The file is bounded too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from threading import Event, Lock, Thread
from time import monotonic, sleep, time
from typing import TYPE_CHECKING

from gateway.asks import BY_IDS, Ask
from gateway.dialects import Reading, Usage
from gateway.errors import Fault
from gateway.metrics import Metrics
from gateway.prompt import Thinking
from gateway.recording import File, Finished, Ids, Unrecordable, line_of
from kv_index.pages import PAGE_TOKENS, TEXT_PAGE, chain, paginate

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger("warmroute")

QUEUE = 10_000
"""Prompts that wait to be read, and finished requests that wait to be written, at most."""
QUEUE_BYTES = 64 * 1024 * 1024
"""Bytes of either, at most."""
REST = 0.0001
"""Seconds between two slices, in which whoever waits for the interpreter gets it."""
PAUSE = 0.2
"""Seconds between two looks at the queues."""
FULL = 8 * 1024 * 1024
"""Bytes that wait from which on the next look does not wait."""
BATCH = 1 << 20
"""Bytes that are written at once."""
STOP = 2.0
"""Seconds in which what waits may still be written at the end."""
MOST = 1 << 53
"""What an engine counts beyond is no count: readers of JSON would round it."""


class Noted:
    """A prompt as it was sent: the key of its session, what separates its cache, its pages' symbols; and how many pages it has,
    the last one in part, by text or by token ids. ``read`` makes the last three of them, of ``size`` bytes, where they are not
    there yet; it raises `Fault` for what is no prompt."""

    __slots__ = ("by_ids", "namespace", "pages", "read", "session", "size", "symbols", "weight")

    def __init__(self, session: bytes | None, namespace: bytes, symbols: bytes, pages: float, by_ids: bool) -> None:
        self.session = session
        self.namespace = namespace
        self.symbols = symbols
        self.pages = pages
        self.by_ids = by_ids
        self.read: Callable[[Noted], None] | None = None
        self.size = self.weight = len(symbols)
        """Bytes that it keeps until it is read, and at most from then on."""

    @classmethod
    def later(cls, session: bytes | None, namespace: bytes, read: Callable[[Noted], None], size: int) -> Noted:
        """One that is still to be read."""
        noted = cls(session, namespace, b"", 0.0, False)
        noted.read, noted.size = read, size
        # No prompt has more symbols: a page of token ids is 64 bytes, one of text 256.
        noted.weight = size // 8 + 8
        return noted

    def settle(self) -> None:
        """Read it, if it is to be read yet."""
        read, self.read = self.read, None
        if read is not None:
            self.pages = -1.0
            read(self)

    @property
    def told(self) -> bool:
        """Whether it was read, and is a prompt."""
        return self.pages >= 0


class Recorder:
    """Records requests of one gateway. ``await start()``, then `sending` and `ended` for each, then ``await stop()``."""

    def __init__(self, file: File, share: float, metrics: Metrics, defect: Callable[[str], None]) -> None:
        self.file = file
        self.over = False
        """Nothing more is recorded: the file is full, or could not be written."""
        self._most_hash = int(share * (1 << 64))
        self._metrics = metrics
        self._defect = defect
        self._lock = Lock()
        """Of what follows, up to the thread's own, and of what is counted."""
        self._unread: deque[Noted] = deque()
        self._unread_bytes = 0
        self._waiting: deque[Finished] = deque()
        self._held = 0
        self._wake = Event()
        self._ending = False
        self._until = 0.0
        """When writing must have ended; of meaning once it is ending."""
        self._thread: Thread | None = None
        self._ids = Ids(file.key, self._rest)

    async def start(self) -> None:
        """Begin to write."""
        self._thread = Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Write what waits, for `STOP` seconds at most, and close the file. What is left is counted as dropped."""
        self._until = monotonic() + STOP
        self._ending = True
        self._wake.set()
        if self._thread is None:
            self.file.close()
            return
        # A disk that hangs keeps the thread, and the file with it, but not the gateway.
        await asyncio.to_thread(self._thread.join, STOP + 0.5)
        if self._thread.is_alive():
            self._abandon("the disk does not answer")

    # -- requests ---------------------------------------------------------------------------------------------------

    def sending(self, exchange: Exchange) -> None:
        """It is about to be sent, and its body still here: keep what stands for its prompt, if it is to be recorded."""
        if self.over or exchange.noted is not None or not exchange.route.generates:
            return
        try:
            exchange.noted = self._note(exchange)
        except Exception:
            self._defect("noting a request for the recording")

    def _note(self, exchange: Exchange) -> Noted | None:
        ask, reading = exchange.ask, exchange.reading
        model, session = ask.model, ask.session
        if model is None or reading.make_prompt is None:
            return None
        if session is None:
            sessions = exchange.gateway.sessions
            found = sessions.name(exchange.incoming.named, reading, exchange.incoming.memo, ask.tenant.seed)
            if found is not None:
                session = sessions.find(found, ask.tenant.name, model.name, exchange.started, dry=True)
        # Whole sessions, or nothing of them: a part of one would be another workload.
        if (session.hash if session is not None else ask.request.draw) >= self._most_hash:
            return None
        key = session.key if session is not None else None
        if ask.policy.needs_prefix and ask.prompt is not None:
            size, symbols, by_ids = ask.size or 0, ask.pages.symbols, ask.ids is not None
            if ask.ids is not None:
                size = len(ask.ids)
            return Noted(key, ask.namespace, symbols, size / _page(by_ids), by_ids)
        namespace = b"\x00".join((model.space, ask.tenant.space, reading.namespace))
        text = ask.prompt.text if ask.prompt is not None else None
        read = _reader(reading, model.thinking, text)
        noted = Noted.later(key, namespace, read, len(exchange.incoming.body))
        with self._lock:
            if len(self._unread) >= QUEUE or self._unread_bytes + noted.size > QUEUE_BYTES:
                self._metrics.recording_dropped.add()
                return None
            self._unread.append(noted)
            self._unread_bytes += noted.size
        if self._unread_bytes > FULL:
            self._wake.set()
        return noted

    def ended(self, exchange: Exchange, noted: Noted, outcome: str, usage: Usage | None, seconds: float) -> None:
        """Its answer is over after so many ``seconds``, in a metrics' ``outcome``; nothing waits for what is done about it."""
        if self.over:
            return
        ask: Ask = exchange.ask
        target = exchange.target
        first = exchange.first_at - exchange.started if exchange.events and exchange.first_at else None
        finished = Finished(
            noted,
            time() - seconds,
            first,
            seconds,
            ask.model_name,
            ask.tenant.name,
            target.name if target is not None else "",
            exchange.status,
            _count(usage.prompt) if usage is not None else None,
            _count(usage.completion) if usage is not None else None,
            _count(usage.cached) if usage is not None else None,
            outcome,
        )
        with self._lock:
            if len(self._waiting) >= QUEUE or self._held + noted.weight > QUEUE_BYTES:
                self._metrics.recording_dropped.add()
                return
            self._held += noted.weight
            self._waiting.append(finished)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            last = False
            while not last:
                self._wake.wait(PAUSE)
                self._wake.clear()
                # What came before the end was told is taken too.
                last = self._ending
                try:
                    self._read()
                    self._drain()
                except Exception:
                    self._defect("writing the recording")
            self._abandon("the gateway ends")
        finally:
            self.file.close()

    def _late(self) -> bool:
        return self._ending and monotonic() > self._until

    def _rest(self) -> None:
        if not self._ending:
            sleep(REST)

    def _read(self) -> None:
        """Make symbols of prompts: until then each keeps its body in memory."""
        while self._unread and not self._late():
            with self._lock:
                noted = self._unread.popleft()
            self._settle(noted)
            with self._lock:
                self._unread_bytes -= noted.size

    def _settle(self, noted: Noted) -> None:
        try:
            noted.settle()
        except Fault:
            # The engine will say what is wrong with it.
            pass
        except Exception:
            self._defect("reading a prompt for the recording")
        self._rest()

    def _drain(self) -> None:
        while self._waiting and not self.over and not self._late():
            lines: list[bytes] = []
            size = 0
            while self._waiting and size < BATCH and not self._late():
                with self._lock:
                    finished = self._waiting.popleft()
                    self._held -= finished.noted.weight
                # One that is still to be read came after the last look at those.
                self._settle(finished.noted)
                if finished.noted.told:
                    ids = self._ids.of(finished.noted.session, finished.noted.namespace, finished.noted.symbols)
                    lines.append(line_of(self.file.key, finished, ids))
                    size += len(lines[-1])
            if lines:
                self._append(lines)

    def _append(self, lines: list[bytes]) -> None:
        file, fresh = self.file, False
        while lines:
            fitting = self._fitting(lines)
            try:
                file.append(b"".join(lines[:fitting]))
            except OSError as error:
                self._dropped(len(lines))
                self._stop(f"{file.path} cannot be written: {error.strerror}")
                return
            self._metrics.recorded.add((), fitting)
            lines = lines[fitting:]
            if not lines:
                return
            if not file.keep:
                self._dropped(len(lines))
                self._stop(f"{file.path} has reached recording.max")
                return
            if fresh and not fitting:
                # It fits into no file.
                self._dropped(1)
                lines = lines[1:]
                continue
            try:
                file.rotate()
            except (OSError, Unrecordable) as error:
                self._dropped(len(lines))
                self._stop(f"{file.path} cannot be begun anew: {error}")
                return
            fresh = True

    def _fitting(self, lines: list[bytes]) -> int:
        """How many of them the file has room for."""
        room = self.file.most - self.file.size
        for number, line in enumerate(lines):
            room -= len(line)
            if room < 0:
                return number
        return len(lines)

    def _dropped(self, requests: int) -> None:
        with self._lock:
            self._metrics.recording_dropped.add((), requests)

    def _stop(self, why: str) -> None:
        self.over = True
        log.warning("recording stopped: %s", why)
        self._forget()
        self._ids.forget()

    def _abandon(self, why: str) -> None:
        """What was not written by the end never will be."""
        self.over = True
        left = self._forget()
        if left:
            log.warning("recording: %d requests were not written, for %s", left, why)

    def _forget(self) -> int:
        """Drop what waits."""
        with self._lock:
            left = len(self._waiting)
            self._metrics.recording_dropped.add((), left)
            self._waiting.clear()
            self._unread.clear()
            self._held = self._unread_bytes = 0
        return left


def _reader(reading: Reading, thinking: Thinking, text: bytes | None) -> Callable[[Noted], None]:
    """Reads a prompt, of which ``text`` may be there."""
    # The reading itself loses them once the answer begins.
    made_ids, make_prompt = reading.ids, reading.make_prompt

    def read(noted: Noted) -> None:
        ids = made_ids() if made_ids is not None else None
        if ids is not None:
            noted.namespace += BY_IDS
            noted.symbols, noted.pages, noted.by_ids = chain(ids).symbols, len(ids) / _page(True), True
            return
        assert make_prompt is not None
        said = make_prompt(thinking).text if text is None else text
        noted.symbols, noted.pages = paginate(said).symbols, len(said) / _page(False)

    return read


def _count(tokens: int | None) -> int | None:
    """What an engine told, if it can be one."""
    return tokens if tokens is not None and 0 <= tokens < MOST else None


def _page(by_ids: bool) -> int:
    """Bytes of one page."""
    return 4 * PAGE_TOKENS if by_ids else TEXT_PAGE
