"""Listening to an engine's KV events as a stranger: raw frames, msgpack, nothing of the engine's own code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from load_tests.engine import Engine

END = b"\xff" * 8
SECONDS = 10.0


class Batch(NamedTuple):
    topic: bytes
    seq: int
    payload: bytes

    @property
    def events(self) -> list[Any]:
        return msgspec.msgpack.decode(self.payload)[1]  # type: ignore[no-any-return]


async def frames_of_replay(engine: Engine, start: int = 0, rank: int = 0) -> list[list[bytes]]:
    """Every answer to a replay, up to the end marker, as a DEALER sees it."""
    return await frames_from(engine.replay_endpoints[rank], start)


async def frames_from(endpoint: str, start: int = 0) -> list[list[bytes]]:
    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        await dealer.send_multipart([b"", start.to_bytes(8, "big")])
        found: list[list[bytes]] = []
        while not found or END not in found[-1]:
            found.append(await asyncio.wait_for(dealer.recv_multipart(), SECONDS))
        return found
    finally:
        context.destroy(linger=0)


async def batches(engine: Engine, start: int = 0, rank: int = 0) -> list[Batch]:
    """What was published, by replay: unlike a subscription it cannot come too late."""
    answers = await frames_of_replay(engine, start, rank)
    return [Batch(topic, int.from_bytes(seq, "big"), payload) for _, topic, seq, payload in answers[:-1]]


async def happened(engine: Engine, rank: int = 0) -> list[Any]:
    """All events of a rank, in order."""
    return [event for batch in await batches(engine, 0, rank) for event in batch.events]


@asynccontextmanager
async def subscribed(engine: Engine, rank: int = 0, topic: bytes = b"") -> AsyncIterator[Any]:
    """A subscription that is known to be there: the publisher's last batch, sent again and again, has arrived."""
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(engine.events_endpoints[rank])
        for _ in range(1000):
            engine.events.repeat(rank)
            if await socket.poll(10):
                break
        while await socket.poll(20):
            await socket.recv_multipart()
        yield socket
    finally:
        context.destroy(linger=0)


async def heard(socket: Any, count: int) -> list[Batch]:
    """The next ``count`` batches of a subscription."""
    found: list[Batch] = []
    for _ in range(count):
        topic, seq, payload = await asyncio.wait_for(socket.recv_multipart(), SECONDS)
        assert len(seq) == 8
        found.append(Batch(topic, int.from_bytes(seq, "big"), payload))
    return found
