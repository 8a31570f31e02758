"""Making token ids for requests that wait for them: where, for how long, and what if it fails.

A request of a model with a tokenizer becomes `Preparing` until its ids are there; then it is routed as any other. What can
not be told in time, or at all, is `Unrendered`, and that request is routed by text.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from threading import get_ident
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_128_digest

from gateway.breaker import Breaker
from gateway.engines import Answer
from gateway.http.server import Inbound

log = logging.getLogger("warmroute")

THREADS = 2
PENDING = 64
"""Prompts that wait for the pool; further ones are routed by text."""
PATIENCE = 2.0
"""Seconds that a request waits for its ids."""
INLINE = 2048
"""Bytes of a body that is read at once: a millisecond at most."""
LARGEST = 4 * 1024 * 1024
"""Bytes of a body that is read at all: a tokenizer takes some hundred times as many for a while."""
FAILED = 1024
"""Bodies that failed, and are not tried again, ..."""
FAILED_FOR = 60.0
"""... for so many seconds."""
SWITCH = 0.001
"""Seconds after which the interpreter lets another thread run: a pool at work must not hold up the event loop."""


class Unrendered(Exception):
    """This request's prompt cannot be told; ``reason`` is one of a few words."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Mode(Protocol):
    """How token ids of one model's prompts are made."""

    def start(self, kind: str, body: bytes) -> bytes | asyncio.Future[bytes] | None:
        """The ids (little-endian u32 each) of a request of that kind, at once or in a while; ``None`` for a kind without any.

        Raises `Unrendered`; so does the future.
        """
        ...


class Pool:
    """Where prompts are made: a few threads, equal work once, failed work not at once again."""

    def __init__(self, clock: Callable[[], float], threads: int = THREADS) -> None:
        self.clock = clock
        self.running = 0
        self.threads = threads
        self.closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokens")
        self._busy: dict[int, float] = {}
        """Thread -> when it began what it does now."""
        self._flights: dict[bytes, asyncio.Future[bytes]] = {}
        self._failed: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        sys.setswitchinterval(min(SWITCH, sys.getswitchinterval()))

    def start(self, key: bytes, size: int, work: Callable[[], bytes]) -> bytes | asyncio.Future[bytes]:
        """The result of ``work``, at once where it is small. Raises `Unrendered`; so does the future."""
        flight = self.shared(key)
        if flight is not None:
            return flight
        if size <= INLINE:
            try:
                return work()
            except Unrendered as error:
                self._note(key, error.reason)
                raise
        self.admit(size)
        busy = list(self._busy.values())
        if len(busy) >= self.threads and self.clock() - max(busy) > PATIENCE / 4:
            # All are at work that takes long: whoever waited now would wait in vain.
            raise Unrendered("saturated")
        if self.closed:
            raise Unrendered("closed")
        return self.share(key, asyncio.get_running_loop().run_in_executor(self._pool, self._timed, work))

    def admit(self, size: int) -> None:
        """Raises `Unrendered` for a body of ``size`` bytes that is too much, by itself or beside the others."""
        if size > LARGEST:
            raise Unrendered("too_long")
        if self.running >= PENDING:
            raise Unrendered("saturated")

    def _timed(self, work: Callable[[], bytes]) -> bytes:
        """In one of the threads."""
        self._busy[get_ident()] = self.clock()
        try:
            return work()
        finally:
            del self._busy[get_ident()]

    def shared(self, key: bytes) -> asyncio.Future[bytes] | None:
        """The same work, if it is under way. Raises `Unrendered` if it failed a moment ago."""
        failed = self._failed.get(key)
        if failed is not None:
            if self.clock() < failed[0]:
                raise Unrendered(failed[1])
            del self._failed[key]
        return self._flights.get(key)

    def share(self, key: bytes, work: Awaitable[bytes]) -> asyncio.Future[bytes]:
        """``work`` that is under way, for all who want it."""
        self.running += 1
        flight: asyncio.Future[bytes] = asyncio.ensure_future(work)
        self._flights[key] = flight
        flight.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def _landed(self, key: bytes, done: asyncio.Future[bytes]) -> None:
        self.running -= 1
        self._flights.pop(key, None)
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, Unrendered):
            self._note(key, error.reason)

    def _note(self, key: bytes, reason: str) -> None:
        self._failed[key] = (self.clock() + FAILED_FOR, reason)
        if len(self._failed) > FAILED:
            self._failed.popitem(last=False)

    def close(self) -> None:
        """End the threads; what they do now is not waited for."""
        self.closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


async def ids_of(flight: asyncio.Future[bytes]) -> bytes:
    """What a flight brings, for one of those who want it. Raises `Unrendered`."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.shield(flight)
    except TimeoutError:
        raise Unrendered("late") from None


class Engines:
    """Has the workers tokenise (vLLM's ``/tokenize``). ``ask(path, body)`` raises for what a worker does not answer."""

    def __init__(
        self, name: str, pool: Pool, clock: Callable[[], float], ask: Callable[[str, bytes], Awaitable[Answer]]
    ) -> None:
        self.name = name
        self.pool = pool
        self.clock = clock
        self.ask = ask
        self.breaker = Breaker(pause=30.0)

    def start(self, kind: str, body: bytes) -> bytes | asyncio.Future[bytes] | None:
        """See `Mode`."""
        if kind not in ("chat", "completions"):
            return None
        if not self.breaker.allows(self.clock()):
            raise Unrendered("engine")
        self.pool.admit(len(body))
        key = xxh3_128_digest(body) + self.name.encode()
        return self.pool.shared(key) or self.pool.share(key, self._tokenise(_question(self.name, kind, body)))

    async def _tokenise(self, question: bytes) -> bytes:
        self.breaker.sent()
        try:
            async with asyncio.timeout(PATIENCE):
                answer = await self.ask("/tokenize", question)
            if answer.status in (400, 413, 422):
                # The client's fault, and no reason not to ask again for others.
                self.breaker.undecided()
                raise Unrendered("refused")
            ids = answer.json()["tokens"]
            found = Struct(f"<{len(ids)}I").pack(*ids)
        except Unrendered:
            raise
        except asyncio.CancelledError:
            self.breaker.undecided()
            raise
        except Exception as error:
            # Whatever it was, it must not keep a request from being served.
            if self.breaker.failed(self.clock()):
                log.warning("the workers of %s do not tokenise: %s", self.name, str(error) or type(error).__name__)
            raise Unrendered("engine") from None
        self.breaker.succeeded()
        return found


ASKED = ("tools", "chat_template_kwargs", "add_special_tokens", "prompt")


def object_in(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object. Raises `Unrendered`."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Unrendered("body") from None
    if not isinstance(told, dict):
        raise Unrendered("body")
    return told


def _question(model: str, kind: str, body: bytes) -> bytes:
    told = object_in(body)
    question = {"model": model, **{name: told[name] for name in ASKED if told.get(name) is not None}}
    if kind == "chat":
        messages = told.get("messages")
        if not isinstance(messages, list):
            raise Unrendered("messages")
        question |= {"messages": [_named(message) for message in messages], "add_generation_prompt": True}
    elif not isinstance(question.get("prompt"), str):
        raise Unrendered("prompt")
    return msgspec.json.encode(question)


def _named(message: Any) -> Any:
    """Thinking under the name that is not dropped on this path."""
    if isinstance(message, dict) and message.get("reasoning_content") is not None:
        return {"reasoning": message["reasoning_content"], **message}
    return message


class Preparing:
    """One request that waits for its token ids, as the `Owner` of its client's connection.

    ``then(ids, reason)`` is called once unless the client leaves before: with the ids, or with why there are none.
    """

    def __init__(
        self,
        client: Inbound,
        flight: asyncio.Future[bytes],
        among: set[Preparing],
        then: Callable[[bytes | None, str], None],
    ) -> None:
        self.client = client
        self.among = among
        among.add(self)
        client.owner = self
        self._then = then
        self._task = asyncio.get_running_loop().create_task(self._wait(flight))

    async def _wait(self, flight: asyncio.Future[bytes]) -> None:
        ids, reason = None, ""
        try:
            ids = await ids_of(flight)
        except Unrendered as error:
            reason = error.reason
        except asyncio.CancelledError:
            if self not in self.among:
                raise
            # The pool was closed, not this request.
            reason = "closed"
        except Exception:
            log.exception("making token ids failed")
            reason = "defect"
        self.among.discard(self)
        self.client.owner = None
        self._then(ids, reason)

    def client_gone(self) -> None:
        """Nobody waits for it any more."""
        self.among.discard(self)
        self._task.cancel()

    def client_slow(self) -> None:
        """Nothing is sent yet."""

    def client_ready(self) -> None:
        """Nothing is held back."""
