"""Listening to the engines' KV events: one task for each rank of each worker that publishes them.

ZeroMQ's sockets have bounds of their own; a subscriber that is too slow loses batches, notices the gap and asks for them
again, and if that does not help its rank is not believed until it has caught up. Batches are applied on the event loop, a
few at a time: what one costs is a few microseconds a block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from time import monotonic
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gateway.engines.events import Event, apply, decode, polled
from gateway.engines.feed import Feed, Step
from gateway.errors import GatewayFault, WorkerFault
from gateway.metrics import Metrics
from gateway.workers import EventSource, State, Target, Worker
from kv_index.index import PrefixIndex

log = logging.getLogger("warmroute")

QUEUED = 1000
"""Batches that wait in a socket; further ones are lost, and asked for again."""
LARGEST = 64 * 1024 * 1024
"""Bytes of a batch that are read."""
SLICE = 0.002
"""Seconds of applying after which others get their turn."""
REPLAY = 5.0
"""Seconds without a word after which a replay has failed."""
BEHIND = 10.0
"""Seconds of never catching up after which a rank is not believed."""
AGAIN = 5.0
"""Seconds until a socket that failed is opened again."""
SOCKETS = 65536
"""Sockets of all listeners: three each, and one while it asks for what is missing."""
JOIN = 0.5
"""Seconds after which a subscription is in force."""
POLL = 0.5
"""Seconds between two questions for events that are not published."""
END = (1 << 64) - 1


class Listener:
    """What one rank publishes, told to the index."""

    def __init__(self, target: Target, source: EventSource, index: PrefixIndex, metrics: Metrics) -> None:
        self.target = target
        self.source = source
        self.index = index
        self.metrics = metrics
        self.feed = Feed()
        self.connected = False
        self.doubted = False
        """What is known is to be had anew."""
        self._behind: float | None = None
        self._flooded = False
        self._replaying = False
        """What comes now is not all yet."""
        self._renewed = False
        """A new process was told of since the connection was lost: what was sent since then is its own."""
        self._joined: float | None = None
        self._live_at: int | None = None
        """Number of the last batch that came as it was published, on this connection."""
        self._full = False
        self._trouble = ""
        self._context: zmq.asyncio.Context | None = None

    def doubt(self) -> None:
        """Its process may be another one. While events flow in order they say so themselves."""
        self._renewed = True
        if not (self.connected and self.index.of(self.target.id).whole):
            self._lost("restarted")
            self.doubted = True

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Listen until cancelled."""
        self._context = context
        while True:
            try:
                await self._listen(context)
            except Exception as error:
                # Whatever a worker sends or says, its rank is listened to again.
                told = f"{type(error).__name__}: {error}"
                if told != self._trouble:
                    self._trouble = told
                    log.warning("the KV events of %s cannot be listened to: %s", self.target.name, told)
                self._lost("failed")
            await asyncio.sleep(AGAIN)

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        socket = context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = QUEUED
        socket.maxmsgsize = LARGEST
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            socket.subscribe(self.source.topic.encode())
            (socket.bind if self.source.bind else socket.connect)(self.source.endpoint)
            poller = zmq.asyncio.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor, zmq.POLLIN)
            while True:
                ready = dict(await poller.poll(1000 if self._joined is None else int(JOIN * 1000)))
                if monitor in ready:
                    await self._watch(monitor)
                if self._joined is not None and monotonic() > self._joined + JOIN:
                    self._joined = None
                    await self._replay()
                if self.doubted and self.connected:
                    self.doubted = False
                    await self._replay()
                if socket in ready:
                    await self._drain(socket)
                else:
                    self._behind, self._flooded = None, False
        finally:
            socket.disable_monitor()
            monitor.close(0)
            socket.close(0)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """The connection came or went. Who answers after it came may be another process."""
        try:
            event = parse_monitor_message(await monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return
        if event == zmq.EVENT_DISCONNECTED:
            self.connected = self._renewed = False
            self._live_at = None
            self._silenced("disconnected")
        elif not self.connected:
            self.connected = True
            # A publisher sends nothing to who has only just subscribed: what it does not send now is asked for a little later.
            self._joined = monotonic()
            await self._replay()

    async def _drain(self, socket: zmq.asyncio.Socket) -> None:
        """Apply what waits, for a moment."""
        until = monotonic() + SLICE
        while monotonic() < until:
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._behind, self._flooded = None, False
                return
            if len(frames) != 3 or len(frames[1]) != 8:
                self.metrics.kv_unread.add((self.target.name,))
                continue
            await self._live(int.from_bytes(frames[1], "big"), bytes(frames[2]))
        now = monotonic()
        if self._behind is None:
            self._behind = now
        elif now - self._behind > BEHIND:
            self._flooded = True
            self._silenced("flooded")
        await asyncio.sleep(0)

    async def _live(self, number: int, payload: bytes) -> None:
        before, self._live_at = self._live_at, number
        feed = self.feed
        if number <= feed.last and (before is None or number > before) and not feed.remembers(number):
            # Published before the replay that told of it was over: within one connection another process would count anew.
            return
        if self._take(number, payload) is Step.REPLAY:
            if self.feed.last >= 0 or self.feed.complete:
                self.metrics.kv_gaps.add((self.target.name,))
            await self._replay()
            if self._take(number, payload) is Step.REPLAY:
                self._lost("gap")
                self.feed.skip_to(number)
                self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> Step:
        step = self.feed.show(number, payload)
        if step is Step.RESTARTED:
            self._lost("restarted")
            step = self.feed.show(number, payload)
        if step is Step.APPLY:
            self._apply(payload)
        return step

    def _apply(self, payload: bytes) -> None:
        name = self.target.name
        self.metrics.kv_batches.add((name,))
        try:
            batch = decode(payload)
        except ValueError:
            self.metrics.kv_unread.add((name,))
            self._missed_some()
            return
        if batch.unread:
            self.metrics.kv_unread.add((name,), batch.unread)
        if batch.lost:
            self._missed_some()
        self._tell(batch.events)

    def _missed_some(self) -> None:
        """What could not be read may have told of blocks that are gone."""
        self.feed.complete = False
        self._silenced("unread")

    def _tell(self, events: Sequence[Event]) -> None:
        """Have events change the index."""
        name = self.target.name
        told = apply(events, self.index.blocks, self.target.id)
        if told.cleared:
            self.feed.cleared()
        if told.stored:
            self.metrics.kv_stored.add((name,), told.stored)
        if told.removed:
            self.metrics.kv_removed.add((name,), told.removed)
        if told.unplaced:
            self.metrics.kv_unplaced.add((name,), told.unplaced)
            if self.index.blocks.full:
                self._full = True
                self.feed.complete = False
                self._silenced("index_full")
        if self._full and not self.index.blocks.full:
            self._full = False
            self._lost("index_full")
            self.doubted = True
            return
        whole = self.feed.complete and not self._flooded and not self._replaying
        self.index.heard(self.target.id, whole, told.cleared, told.stored)

    # -- replay -----------------------------------------------------------------------------------------------------

    async def _replay(self) -> None:
        """Ask for what is missing: all of it, or from the last batch on, which shows whether it is still the same process."""
        if self.source.replay is None:
            return
        self.metrics.kv_replays.add((self.target.name,))
        feed = self.feed
        self._replaying = True
        try:
            went_on = feed.last >= 0 and await self._ask(feed.last)
            if not went_on:
                if feed.last >= 0:
                    self._lost("missed")
                if not await self._ask(0) and feed.last < 0:
                    # It answered, and has published nothing yet.
                    feed.complete = True
            if feed.complete and not self._flooded:
                self.index.heard(self.target.id, True, False)
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("%s does not repeat its KV events: %s", self.target.name, error or "no answer in time")
        finally:
            self._replaying = False

    async def _ask(self, first: int) -> bool:
        """Batches from ``first`` on are applied. False if none came, or if they do not go on from what is known."""
        came = False
        async for number, payload in self._batches(first):
            if not came:
                came = True
                if first and (number != first or self.feed.show(number, payload) is not Step.SKIP):
                    return False
                if not first and number > self.feed.wanted:
                    self._lost("gap")
                    self.feed.skip_to(number)
            if self._take(number, payload) is Step.REPLAY:
                return False
        return came

    async def _batches(self, first: int) -> AsyncIterator[tuple[int, bytes]]:
        """Raises `TimeoutError`."""
        assert self.source.replay is not None
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.maxmsgsize = LARGEST
        try:
            socket.connect(self.source.replay)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            until = monotonic() + SLICE
            while True:
                async with asyncio.timeout(REPLAY):
                    frames = await socket.recv_multipart()
                numbers = [frame for frame in frames[1:-1] if len(frame) == 8]
                if not numbers:
                    continue
                number = int.from_bytes(numbers[-1], "big")
                if number == END:
                    return
                yield number, bytes(frames[-1])
                if monotonic() > until:
                    await asyncio.sleep(0)
                    until = monotonic() + SLICE
        finally:
            socket.close(0)

    # -- trouble ----------------------------------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        """What was known is void."""
        self.feed.restart()
        self.index.silenced(self.target.id, reason, True)
        if reason == "restarted" and not self._renewed:
            self.index.emptied(self.target.id)

    def _silenced(self, reason: str) -> None:
        self.index.silenced(self.target.id, reason, False)


class Poller(Listener):
    """TensorRT-LLM's events, which are asked for; whoever asks takes them from all others."""

    def __init__(
        self,
        target: Target,
        index: PrefixIndex,
        metrics: Metrics,
        ask: Callable[[Worker], Awaitable[object]],
    ) -> None:
        super().__init__(target, EventSource("", poll=True), index, metrics)
        self.ask = ask

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        expected: int | None = None
        while True:
            await asyncio.sleep(POLL)
            worker = self.target.worker
            if worker.state is not State.READY:
                continue
            try:
                rows = await self.ask(worker)
            except (WorkerFault, GatewayFault):
                self._silenced("disconnected")
                continue
            events, ids = polled(rows)
            if not ids:
                continue
            if ids[0] != (expected or 0):
                self._lost("gap" if ids[0] else "restarted")
            self.feed.complete = self.feed.complete or ids[0] == 0
            expected = ids[-1] + 1
            self.metrics.kv_batches.add((self.target.name,))
            self._tell(events)


class Subscriptions:
    """The tasks of all listeners. ``poll`` asks a worker for events that are not published."""

    def __init__(
        self,
        index: PrefixIndex,
        metrics: Metrics,
        poll: Callable[[Worker], Awaitable[object]],
        compared: Callable[[Worker], bool] = lambda worker: True,
    ) -> None:
        self.index = index
        self.metrics = metrics
        self.poll = poll
        self.compared = compared
        """Whether prompts of a worker's models come as token ids, so that its events can be compared with them."""
        self.listeners: dict[int, Listener] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._context: zmq.asyncio.Context | None = None

    def watch(self, worker: Worker) -> None:
        """Listen to what ``worker`` publishes now, and no more to what it does not."""
        sources = sources_of(worker)
        for listener in list(self.listeners.values()):
            if listener.target.worker is worker and listener.target not in worker.targets:
                self.leave(listener.target)
                self.index.remove(listener.target.id)
        for at, target in enumerate(worker.targets):
            source = sources[at] if at < len(sources) else None
            known = self.listeners.get(target.id)
            if known is not None and (source is None or known.source != source):
                self.leave(target)
                known = None
            if source is not None and known is None:
                listener = (
                    Poller(target, self.index, self.metrics, self.poll)
                    if source.poll
                    else Listener(target, source, self.index, self.metrics)
                )
                self.listeners[target.id] = listener
                self.index.fed(target.id, worker.facts.block_size, self.compared(worker))
                self._tasks[target.id] = asyncio.get_running_loop().create_task(
                    self._run(listener), name=f"events {target.name}"
                )

    def leave(self, target: Target) -> None:
        """Listen to ``target`` no more."""
        if self.listeners.pop(target.id, None) is not None:
            self._tasks.pop(target.id).cancel()
            self.index.deaf(target.id)

    def doubt(self, target: int) -> None:
        """What ``target`` held may be gone: a new process, as far as can be told from outside."""
        listener = self.listeners.get(target)
        if listener is not None:
            listener.doubt()
        else:
            self.index.blocks.clear(target)

    async def stop(self) -> None:
        """End all tasks."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self.listeners.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(0)

    async def _run(self, listener: Listener) -> None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, SOCKETS)
        try:
            await listener.run(self._context)
        except Exception:
            log.exception("listening to the KV events of %s failed", listener.target.name)


def sources_of(worker: Worker) -> list[EventSource]:
    """Where the ranks of ``worker`` publish: as configured, else as its engine says."""
    told = worker.spec.events
    if not worker.spec.listens:
        return []
    if told is None:
        return [
            EventSource(
                reachable(each.endpoint, worker.url), each.replay and reachable(each.replay, worker.url), each.topic
            )
            for each in worker.facts.events
        ]
    if told.poll:
        return [EventSource("", poll=True)]
    return [
        EventSource(_shifted(told.endpoint, rank), told.replay and _shifted(told.replay, rank), told.topic, told.bind)
        for rank in range(len(worker.targets))
    ]


def _shifted(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: engines count ports up."""
    if not rank:
        return endpoint
    head, _, port = endpoint.rpartition(":")
    return f"{head}:{int(port) + rank}" if port.isdigit() else endpoint


def reachable(endpoint: str, url: str) -> str:
    """An endpoint as its engine binds it, as it can be reached from here: a wildcard or loopback is the worker's own host."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if host.strip("[]") in ("*", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1"):
        told = urlsplit(url).hostname or host
        host = f"[{told}]" if ":" in told else told
    return f"tcp://{host}:{port}"
