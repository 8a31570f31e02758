"""Recordings: one line a finished request, from which a workload can be replayed under other policies, without a word of it.

A line tells sizes, times, and the prompt as ids of its pages. An id stands for its page *and* all pages before it, so two
prompts share a prefix exactly as far as their ids agree. Ids, sessions and tenants are keyed hashes. The key is random and
stays in a file of its own beside the recording: with the recording alone nobody can find a text by hashing candidates,
and with the key a gateway that starts again goes on with the same ids.

While a request is answered only what is there anyway is kept. Hashing and writing come after the answer is complete, a slice
at a time between other work; what does not fit into a bounded queue is dropped and counted. The file is bounded too.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from hashlib import blake2b
from time import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.asks import Ask
from gateway.dialects import Usage
from gateway.errors import Fault
from gateway.metrics import Metrics
from gateway.recording import File, keyed, named
from kv_index.pages import PAGE_TOKENS, SYMBOL, TEXT_PAGE, chain, paginate

if TYPE_CHECKING:
    from gateway.exchange import Exchange

log = logging.getLogger("warmroute")

QUEUE = 10_000
"""Finished requests that wait to be written, at most."""
QUEUE_BYTES = 64 * 1024 * 1024
"""Bytes of their symbols, at most: of prompts, 32 times as much."""
SLICE = 256
"""Pages that are hashed at once: about a quarter of a millisecond."""
PAUSE = 0.2
"""Seconds between two looks at the queue."""
BATCH = 1 << 20
"""Bytes that are written at once."""
KEPT = 500_000
"""Pages of sessions' last prompts whose ids are kept: a prompt that goes on from one is hashed from there."""


class Noted(NamedTuple):
    """A prompt as it was sent: the key of its session, what separates its cache, its pages' symbols; and how many pages it has,
    the last one in part, by text or by token ids."""

    session: bytes | None
    namespace: bytes
    symbols: bytes
    pages: float
    by_ids: bool


class Finished(NamedTuple):
    """A request whose answer is complete. ``at``: seconds since the epoch; ``first`` and ``lasted``: seconds after that."""

    noted: Noted
    at: float
    first: float | None
    lasted: float
    model: str
    tenant: str
    target: str
    status: int
    prompt: int | None
    completion: int | None
    cached: int | None


class Recorder:
    """Records requests of one gateway. ``await start()``, then `sent` and `ended` for each, then ``await stop()``."""

    def __init__(self, file: File, share: float, metrics: Metrics, defect: Callable[[str], None]) -> None:
        self.file = file
        self.over = False
        """Nothing more is recorded: the file is full, or could not be written."""
        self._most_hash = int(share * (1 << 64))
        self._metrics = metrics
        self._defect = defect
        self._waiting: deque[Finished] = deque()
        self._held = 0
        self._last: OrderedDict[tuple[bytes, bytes], tuple[bytes, array[int]]] = OrderedDict()
        self._kept = 0
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="recording")

    async def stop(self) -> None:
        """Write what waits, and close the file."""
        self._ending.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self.file.close()

    # -- requests ---------------------------------------------------------------------------------------------------

    def sent(self, exchange: Exchange) -> None:
        """Its request is with a worker, and its body still here: keep what stands for its prompt, if it is to be recorded."""
        if self.over or not exchange.route.generates:
            return
        try:
            exchange.noted = self._note(exchange)
        except Fault:
            # The engine will say what is wrong with it.
            pass
        except Exception:
            self._defect("noting a request for the recording")

    def _note(self, exchange: Exchange) -> Noted | None:
        ask, reading = exchange.ask, exchange.reading
        model, session = ask.model, ask.session
        if model is None or reading.make_prompt is None:
            return None
        if session is None:
            sessions = exchange.gateway.sessions
            found = sessions.name(exchange.incoming.named, reading, exchange.incoming.memo)
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
        ids = reading.ids() if reading.ids is not None else None
        if ids is not None:
            return Noted(key, namespace + b"\x00ids", chain(ids).symbols, len(ids) / _page(True), True)
        text = (ask.prompt or reading.make_prompt(model.thinking)).text
        return Noted(key, namespace, paginate(text).symbols, len(text) / _page(False), False)

    def ended(self, exchange: Exchange, noted: Noted, usage: Usage | None, seconds: float) -> None:
        """Its answer is over after so many ``seconds``; nothing waits for what is done about it here."""
        size = len(noted.symbols)
        if self.over:
            return
        if len(self._waiting) >= QUEUE or self._held + size > QUEUE_BYTES:
            self._metrics.recording_dropped.add()
            return
        ask: Ask = exchange.ask
        target = exchange.target
        first = exchange.first_at - exchange.started if exchange.events and exchange.first_at else None
        prompt = usage.prompt if usage is not None else None
        if prompt is None and noted.by_ids:
            prompt = round(noted.pages * PAGE_TOKENS)
        self._held += size
        self._waiting.append(
            Finished(
                noted,
                time() - seconds,
                first,
                seconds,
                ask.model_name,
                ask.tenant.name,
                target.name if target is not None else "",
                exchange.status,
                prompt,
                usage.completion if usage is not None else None,
                usage.cached if usage is not None else None,
            )
        )

    # -- writing ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._ending.is_set():
            try:
                async with asyncio.timeout(PAUSE):
                    await self._ending.wait()
            except TimeoutError:
                pass
            try:
                await self._drain()
            except Exception:
                self._defect("writing the recording")

    async def _drain(self) -> None:
        while self._waiting and not self.over:
            lines: list[bytes] = []
            size = 0
            while self._waiting and size < BATCH:
                finished = self._waiting.popleft()
                self._held -= len(finished.noted.symbols)
                lines.append(self._line(finished, await self._ids(finished.noted)))
                size += len(lines[-1])
                await asyncio.sleep(0)
            await self._append(lines)

    async def _append(self, lines: list[bytes]) -> None:
        file = self.file
        room = file.most - file.size
        fitting, size = 0, 0
        for line in lines:
            if size + len(line) > room:
                break
            fitting, size = fitting + 1, size + len(line)
        try:
            await asyncio.to_thread(file.append, b"".join(lines[:fitting]))
        except OSError as error:
            self._metrics.recording_dropped.add((), len(lines))
            self._stop(f"{file.path} cannot be written: {error.strerror}")
            return
        self._metrics.recorded.add((), fitting)
        if fitting < len(lines):
            self._metrics.recording_dropped.add((), len(lines) - fitting)
            self._stop(f"{file.path} has reached recording.max")

    def _stop(self, why: str) -> None:
        self.over = True
        log.warning("recording stopped: %s", why)
        self._metrics.recording_dropped.add((), len(self._waiting))
        self._waiting.clear()
        self._last.clear()
        self._held = self._kept = 0

    async def _ids(self, noted: Noted) -> array[int]:
        """Chained ids of its pages."""
        key, symbols = self.file.key, noted.symbols
        ids: array[int] = array("Q")
        before = keyed(key, b"namespace", noted.namespace)
        place = (noted.session, noted.namespace) if noted.session is not None else None
        known = self._last.pop(place, None) if place is not None else None
        if known is not None:
            self._kept -= len(known[1])
            if symbols.startswith(known[0]):
                ids = known[1][:]
                before = ids[-1].to_bytes(SYMBOL, "little") if ids else before
        for start in range(len(ids) * SYMBOL, len(symbols), SLICE * SYMBOL):
            for at in range(start, min(start + SLICE * SYMBOL, len(symbols)), SYMBOL):
                before = blake2b(before + symbols[at : at + SYMBOL], key=key, digest_size=SYMBOL).digest()
                ids.append(int.from_bytes(before, "little"))
            await asyncio.sleep(0)
        if place is not None:
            self._last[place] = (symbols, ids)
            self._kept += len(ids)
            while self._kept > KEPT:
                _, (_, gone) = self._last.popitem(last=False)
                self._kept -= len(gone)
        return ids

    def _line(self, finished: Finished, ids: array[int]) -> bytes:
        key, noted = self.file.key, finished.noted
        tokens = PAGE_TOKENS if noted.by_ids else None
        if tokens is None and finished.prompt is not None and noted.pages:
            tokens = max(1, round(finished.prompt / noted.pages))
        row = {
            "timestamp": round(finished.at * 1e3),
            "model": finished.model,
            "tenant": named(key, b"tenant", finished.tenant.encode()),
            "session_id": None if noted.session is None else named(key, b"session", noted.session),
            "input_length": finished.prompt,
            "output_length": finished.completion,
            "cached_tokens": finished.cached,
            "ttft_ms": None if finished.first is None else round(finished.first * 1e3, 3),
            "duration_ms": round(finished.lasted * 1e3, 3),
            "status": finished.status,
            "target": finished.target,
            "page": "ids" if noted.by_ids else "text",
            "pages": round(noted.pages, 3),
            "block_size": tokens,
            "hash_ids": ids.tolist(),
        }
        return msgspec.json.encode(row) + b"\n"


def _page(by_ids: bool) -> int:
    """Bytes of one page."""
    return 4 * PAGE_TOKENS if by_ids else TEXT_PAGE
