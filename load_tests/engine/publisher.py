"""KV events on ZMQ: for each rank a PUB socket and, if wanted, a ROUTER that replays; and the faults of such a stream.

A batch is three frames: topic, sequence number (8 bytes, big-endian, from 0), msgpack ``[seconds, events, rank]``.
Everything runs in the event loop and never waits: a subscriber that does not read loses batches, as with a real PUB.
pyzmq is imported when a publisher opens, so that engines without events need none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import zmq

END = b"\xff" * 8
HWM = 100_000
TRIES = 50


def sequence_frame(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Publisher:
    """One rank's stream. ``old_replay``: replay answers without the topic frame, as before vLLM had one there."""

    def __init__(self, rank: int, topic: str, buffer_steps: int, *, old_replay: bool = False) -> None:
        self.rank = rank
        self.next = 0
        self.sent = 0
        self.silent = False
        self.held: list[bytes] | None = None
        self._topic = topic.encode()
        self._old_replay = old_replay
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._to_drop = 0
        self._drops_replayable = True
        self._repeat_next = False
        self._socket: zmq.Socket[bytes] | None = None

    def connect(self, socket: zmq.Socket[bytes] | None) -> None:
        """Send through ``socket`` from now on, as a new process: numbers start at 0, nothing is kept."""
        self._socket = socket
        self._buffer.clear()
        self.next = 0
        if self.held is not None:
            self.held.clear()

    def publish(self, events: Sequence[Any]) -> None:
        """Send one batch."""
        self.send(msgspec.msgpack.encode([time.time(), events, self.rank]))

    def send(self, payload: bytes) -> None:
        """Give a payload the next number and send it, unless a fault has another fate for it."""
        if self.silent or self._socket is None:
            return
        if self.held is not None:
            self.held.append(payload)
            return
        number, self.next = self.next, self.next + 1
        if self._to_drop:
            self._to_drop -= 1
            if self._drops_replayable:
                self._buffer.append((number, payload))
            return
        self._write(number, payload)
        self._buffer.append((number, payload))
        if self._repeat_next:
            self._repeat_next = False
            self._write(number, payload)

    def drop(self, batches: int, replayable: bool) -> None:
        self._to_drop, self._drops_replayable = batches, replayable

    def repeat(self) -> None:
        """Send the last batch once more; before the first one, the first is sent twice."""
        if self._buffer:
            self._write(*self._buffer[-1])
        else:
            self._repeat_next = True

    def hold(self) -> None:
        if self.held is None:
            self.held = []

    def resume(self) -> None:
        self.silent = False
        held, self.held = self.held or [], None
        for payload in held:
            self.send(payload)

    def replay(self, start: int) -> Iterator[list[bytes]]:
        """The frames of an answer from number ``start`` on, each after the empty one, end marker included."""
        for number, payload in self._buffer:
            if number >= start:
                frames = [sequence_frame(number), payload]
                yield frames if self._old_replay else [self._topic, *frames]
        yield [END, b""] if self._old_replay else [b"", END, b""]

    def _write(self, number: int, payload: bytes) -> None:
        import zmq

        assert self._socket is not None
        self.sent += 1
        try:
            self._socket.send_multipart([self._topic, sequence_frame(number), payload], flags=zmq.NOBLOCK)
        except zmq.Again:
            pass


class EventBus:
    """The publishers of one engine with their sockets. Ports: ``first + rank``; a first port of 0 finds free ones."""

    def __init__(self, host: str, publishers: Sequence[Publisher], port: int, replay_port: int | None) -> None:
        self.publishers = list(publishers)
        self._host = {"localhost": "127.0.0.1", "0.0.0.0": "*"}.get(host, host)
        self._seen_at = "127.0.0.1" if self._host == "*" else self._host
        self._port = port
        self._replay_port = replay_port
        self._context: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Bind every socket; OSError if a port is taken."""
        import zmq
        import zmq.asyncio

        self._context = zmq.Context()
        ranks = range(len(self.publishers))
        out: list[zmq.Socket[bytes]] = [self._context.socket(zmq.PUB) for _ in ranks]
        for socket in out:
            socket.setsockopt(zmq.SNDHWM, HWM)
        kind = zmq.asyncio.Socket
        back = [self._context.socket(zmq.ROUTER, kind) for _ in ranks if self._replay_port is not None]
        for router in back:
            # A replay is written in one go, so the queue must have room for everything that is kept.
            router.setsockopt(zmq.SNDHWM, 0)
        try:
            self._port = self._bind(out, self._port)
            if self._replay_port is not None:
                self._replay_port = self._bind(back, self._replay_port)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"KV events: {error.strerror}") from None
        for publisher, socket in zip(self.publishers, out, strict=True):
            publisher.connect(socket)
        for publisher, router in zip(self.publishers, back, strict=False):
            self._tasks.append(asyncio.get_running_loop().create_task(_serve_replay(router, publisher)))

    def close(self) -> None:
        """Close every socket at once; what was not sent yet is lost."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for publisher in self.publishers:
            publisher.connect(None)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def endpoints(self) -> list[str]:
        """tcp:// addresses by rank."""
        return [f"tcp://{self._seen_at}:{self._port + rank}" for rank in range(len(self.publishers))]

    def replay_endpoints(self) -> list[str]:
        if self._replay_port is None:
            return []
        return [f"tcp://{self._seen_at}:{self._replay_port + rank}" for rank in range(len(self.publishers))]

    @property
    def ports(self) -> tuple[int, int | None]:
        """The first port of events and of replay."""
        return self._port, self._replay_port

    def _bind(self, sockets: Sequence[Any], first: int) -> int:
        """Bind to neighbouring ports; their first one."""
        import zmq

        for attempt in range(TRIES):
            bound: list[tuple[Any, str]] = []
            base = first
            try:
                for place, socket in enumerate(sockets):
                    socket.bind(f"tcp://{self._host}:{base + place if base else '*'}")
                    bound.append((socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)))
                    base = base or int(bound[0][1].rpartition(":")[2])
                return base
            except zmq.ZMQError:
                # With a port of our own choice, one that is taken further on only means to choose again.
                if first or attempt == TRIES - 1:
                    raise
                for socket, endpoint in bound:
                    socket.unbind(endpoint)
        raise AssertionError("unreachable")


async def _serve_replay(router: Any, publisher: Publisher) -> None:
    import zmq

    while True:
        try:
            frames = await router.recv_multipart()
        except zmq.ZMQError:
            return
        if len(frames) != 3:
            continue
        client, empty, start = frames
        for answer in publisher.replay(int.from_bytes(start, "big")):
            await router.send_multipart([client, empty, *answer])


class Events:
    """Faults on order for the KV event streams of one engine; ``rank`` None means every rank."""

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        self._publishers = list(publishers)
        self._timer: asyncio.TimerHandle | None = None

    def drop(self, batches: int = 1, rank: int | None = None, *, replayable: bool = True) -> None:
        """The next ``batches`` get a number and are not sent. Replay has them, unless not ``replayable``."""
        for publisher in self._chosen(rank):
            publisher.drop(batches, replayable)

    def repeat(self, rank: int | None = None) -> None:
        """Send the last batch once more, with its number."""
        for publisher in self._chosen(rank):
            publisher.repeat()

    def inject(self, payload: bytes, rank: int | None = None) -> None:
        """Send ``payload`` as it is, with the next number: it need not be a batch, nor msgpack."""
        for publisher in self._chosen(rank):
            publisher.send(payload)

    def hold(self, seconds: float | None = None, rank: int | None = None) -> None:
        """Keep batches back, in order and without numbers, for ``seconds`` or until ``resume``."""
        for publisher in self._chosen(rank):
            publisher.hold()
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.resume, rank)

    def stop(self, rank: int | None = None) -> None:
        """Publish nothing from now on: batches vanish without a number, until ``resume``."""
        for publisher in self._chosen(rank):
            publisher.silent = True

    def resume(self, rank: int | None = None) -> None:
        """Send what was held, and whatever comes."""
        for publisher in self._chosen(rank):
            publisher.resume()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def listing(self) -> list[dict[str, Any]]:
        """By rank: the next number, how many messages were sent, how many are held."""
        return [
            {"rank": each.rank, "next_seq": each.next, "sent": each.sent, "held": len(each.held or ())}
            for each in self._publishers
        ]

    def _chosen(self, rank: int | None) -> list[Publisher]:
        return self._publishers if rank is None else [self._publishers[rank]]
