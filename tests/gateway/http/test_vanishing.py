"""Clients that leave, in every phase and in every manner: the worker's work is aborted and nothing stays in flight."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.run import Running
from gateway.workers import Facts, ServedModel, State
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import EVENTS, Seen, chunk, ok
from tests.gateway.talk import CHAT, Raw, admin, chat, long_chat, once, request, settled, until

MANNERS = ["reset", "close", "half-close"]


def leave(client: Raw, manner: str) -> None:
    """As a killed process, as a polite one, and as one that only shuts down its sending side."""
    if manner == "reset":
        plain = client.writer.get_extra_info("socket")
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.vanish()
    elif manner == "close":
        client.writer.close()
    else:
        client.writer.write_eof()


async def calm(running: Running, *engines: Engine) -> None:
    """Nothing in flight on either side, nothing leaked."""
    await settled(running)
    for engine in engines:
        await until(lambda engine=engine: engine.stats()["running"] + engine.stats()["waiting"] == 0)  # type: ignore[misc]
        stats = engine.stats()
        assert (stats["kv_blocks_used"], stats["kv_blocks_leaked"]) == (0, 0)


@contextmanager
def deaf() -> Iterator[int]:
    """A port whose queue is full: connecting to it neither succeeds nor fails."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    try:
        yield port
    finally:
        for each in (listener, *fillers):
            each.close()


async def never_connects(gateway: Begin, port: int) -> Running:
    running = await gateway(f"http://127.0.0.1:{port}", ready=False)
    (worker,) = running.fleet.workers.values()
    running.probe.unwatch(worker)
    running.fleet.describe(worker, Facts(models=[ServedModel("sim")]))
    running.fleet.set_state(worker, State.READY, "a test says so")
    return running


@pytest.mark.parametrize("manner", MANNERS)
async def test_while_connecting(gateway: Begin, manner: str) -> None:
    with deaf() as port:
        running = await never_connects(gateway, port)
        clients = [await Raw.connect(running.port) for _ in range(20)]
        for client in clients:
            await client.send(request(chat(stream=True)))
        await until(lambda: len(running.gateway.exchanges) == 20)
        for client in clients:
            leave(client, manner)
        await settled(running)
        (worker,) = running.fleet.workers.values()
        assert worker.pool.open == 0
        assert worker.state is State.READY, "that clients leave is not the worker's fault"
        for client in clients:
            client.vanish()


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("stream", [True, False])
async def test_while_waiting_for_the_first_byte(
    gateway: Begin, scripted: StartScripted, manner: str, stream: bool
) -> None:
    gone = 0

    async def wait(seen: Seen) -> None:
        nonlocal gone
        await seen.gone()
        gone += 1

    worker = await scripted(wait)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=stream)))
        await until(lambda: worker.seen)
        leave(client, manner)
        await until(lambda: gone == 1)
        await settled(running)
    assert 'warmroute_client_aborts_total{phase="waiting"} 1' in (await admin(running, "/metrics")).replace(".0", "")
    assert len(worker.seen) == 1, "it is not tried again for nobody"


@pytest.mark.parametrize("manner", MANNERS)
async def test_between_head_and_first_event(gateway: Begin, scripted: StartScripted, manner: str) -> None:
    left = asyncio.Event()

    async def head_only(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(b": ping\n\n"))
        await seen.gone()
        left.set()

    worker = await scripted(head_only)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True)))
        await until(lambda: worker.seen)
        await asyncio.sleep(0.02)
        leave(client, manner)
        await asyncio.wait_for(left.wait(), 10)
        await settled(running)


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize(
    "head",
    [
        EVENTS + chunk(b"data: 1\n\n"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
    ],
)
async def test_in_the_middle_of_an_answer(gateway: Begin, scripted: StartScripted, manner: str, head: bytes) -> None:
    left = asyncio.Event()

    async def begin(seen: Seen) -> None:
        await seen.write(head)
        await seen.gone()
        left.set()

    running = await gateway(await scripted(begin))
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True)))
        await client.head()
        leave(client, manner)
        await asyncio.wait_for(left.wait(), 10)
        await settled(running)


@pytest.mark.parametrize("manner", MANNERS)
async def test_while_an_error_answer_is_being_collected(gateway: Begin, scripted: StartScripted, manner: str) -> None:
    left = asyncio.Event()

    async def half_an_error(seen: Seen) -> None:
        await seen.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 100\r\n\r\nhalf")
        await seen.gone()
        left.set()

    worker = await scripted(half_an_error)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request())
        await until(lambda: worker.seen)
        await asyncio.sleep(0.02)
        leave(client, manner)
        await asyncio.wait_for(left.wait(), 10)
        await settled(running)


@pytest.mark.parametrize("manner", MANNERS)
async def test_with_pipelined_requests_behind(gateway: Begin, scripted: StartScripted, manner: str) -> None:
    left = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await seen.gone()
        left.set()

    worker = await scripted(wait)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request() * 50)
        await until(lambda: worker.seen)
        leave(client, manner)
        await asyncio.wait_for(left.wait(), 10)
        await settled(running)
    assert len(worker.seen) == 1


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("cut", [5, 30, 90, 120])
async def test_in_the_middle_of_a_request(gateway: Begin, scripted: StartScripted, manner: str, cut: int) -> None:
    worker = await scripted()
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request()[:cut])
        leave(client, manner)
        await until(lambda: not running.gateway.server.connections)
    assert worker.seen == []
    assert (await once(running.port, request())).status == 200


async def test_while_the_gateway_holds_the_worker_back(gateway: Begin, scripted: StartScripted) -> None:
    """Nothing is read from the worker then; leaving must be noticed all the same."""
    left = asyncio.Event()

    async def flood(seen: Seen) -> None:
        piece = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
        try:
            await seen.write(EVENTS)
            for _ in range(1000):
                await seen.write(piece)
        finally:
            left.set()

    running = await gateway(await scripted(flood))
    async with await Raw.connect(running.port, receive_buffer=65536) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(request(chat(stream=True)))
        await until(lambda: any(exchange.paused for exchange in running.gateway.exchanges))
        client.vanish()
        await asyncio.wait_for(left.wait(), 10)
        await settled(running)


async def test_right_after_the_answer(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(ok()))
    for _ in range(100):
        client = await Raw.connect(running.port)
        await client.ask(request())
        client.vanish()
    await settled(running)
    await until(lambda: not running.gateway.server.connections)


async def test_an_engine_that_still_computes_the_prompt_is_aborted(gateway: Begin, engine: StartEngine) -> None:
    busy = await engine(time_scale=5.0, max_running=1)
    running = await gateway(busy)
    clients = [await Raw.connect(running.port) for _ in range(3)]
    for client in clients:
        await client.send(request(long_chat()))
    await until(lambda: busy.stats()["running"] == 1 and busy.stats()["waiting"] == 2)
    for client in clients:
        client.vanish()
    await calm(running, busy)
    assert busy.stats()["aborts"] == 3
    assert busy.stats()["finished"] == 0


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_thousand_that_vanish_in_every_phase_leave_nothing(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    """Each leaves after a delay of its own: some before their request is whole, some in mid-stream, some after the end."""
    engines = [await engine(dialect, time_scale=0.2, max_running=32) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    dice = random.Random(11)
    bodies = [
        chat(stream=True, max_tokens=8),
        chat(max_tokens=8),
        long_chat(stream=True),
        long_chat(),
        {"model": "sim", "messages": [{"role": "user", "content": "long " * 2000}], "max_tokens": 5, "stream": True},
    ]

    async def vanish(number: int) -> None:
        await asyncio.sleep(dice.random() * 2)
        client = await Raw.connect(running.port)
        whole = request(dice.choice(bodies), f"X-Session-Id: s{number % 50}", path=dice.choice([CHAT, "/v1/messages"]))
        way = dice.randrange(6)
        if way == 0:
            whole = whole[: dice.randrange(1, len(whole))]
        elif way == 1:
            whole *= 3
        client.writer.write(whole)
        if way == 2:
            try:
                await asyncio.wait_for(client.reader.read(500), 1)
            except TimeoutError:
                pass
        else:
            await asyncio.sleep(dice.random() * dice.choice([0.001, 0.02, 0.5]))
        leave(client, dice.choice(MANNERS))
        await asyncio.sleep(0.05)
        client.vanish()

    await asyncio.gather(*[vanish(number) for number in range(1000)])
    await calm(running, *engines)
    # On a busy machine most leave before anybody has read what they sent.
    assert sum(started.stats()["requests"] for started in engines) > 30
    assert sum(started.stats()["aborts"] for started in engines) > 5
    assert all(session.running == 0 for session in running.sessions.recent(1000))
    assert (await once(running.port, request(chat(max_tokens=4)))).status == 200
