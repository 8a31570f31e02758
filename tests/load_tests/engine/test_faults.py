"""Faults on order, aborts, restarts: what a client meets, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from load_tests.engine.wire import GARBAGE
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import chat, events, post, until, user

CHAT = "/v1/chat/completions"


def slow(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [user("slow")], "max_tokens": 4000, "ignore_eos": True, **fields}


async def received(http: aiohttp.ClientSession, engine: Engine) -> tuple[list[bytes], BaseException | None]:
    """The events of a stream up to its end or its breaking, and what broke it."""
    data = b""
    try:
        async with http.post(engine.url + CHAT, json={**slow(max_tokens=30), "stream": True}) as answer:
            async for chunk in answer.content.iter_any():
                data += chunk
    except aiohttp.ClientError as error:
        return data.split(b"\n\n")[:-1], error
    return data.split(b"\n\n")[:-1], None


async def idle(engine: Engine) -> None:
    await until(lambda: engine.stats()["running"] + engine.stats()["waiting"] == 0)
    stats = engine.stats()
    assert (stats["kv_blocks_used"], stats["kv_blocks_leaked"]) == (0, 0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_kv(start: Start, dialect: str, stream: bool) -> None:
    engine = await start(dialect, max_running=1, time_scale=0.5)
    async with aiohttp.ClientSession() as http:
        requests = [asyncio.ensure_future(http.post(engine.url + CHAT, json=slow(stream=stream))) for _ in range(2)]
        await until(lambda: (engine.stats()["running"], engine.stats()["waiting"]) == (1, 1))
        await until(lambda: engine.stats()["generated_tokens"] > 2)
        assert engine.stats()["kv_blocks_used"] > 0
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await idle(engine)
    assert engine.stats()["aborts"] == 2
    assert engine.stats()["finished"] == 0


async def test_a_reset_after_some_events(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("reset", after_events=3)
    got, error = await received(http, engine)
    assert len(got) <= 3
    assert error is not None
    got, error = await received(http, engine)
    assert error is None
    assert got[-1] == b"data: [DONE]"
    await idle(engine)


async def test_a_reset_before_any_byte(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("reset", count=2)
    for _ in range(2):
        with pytest.raises(aiohttp.ClientConnectionError):
            await chat(http, engine, [user("hi")])
    await chat(http, engine, [user("hi")])


async def test_a_half_closed_stream_ends_early(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("half_close", after_events=4)
    got, error = await received(http, engine)
    assert len(got) == 4
    assert isinstance(error, aiohttp.ClientPayloadError)
    await idle(engine)


async def test_garbage_instead_of_an_answer_and_in_the_middle(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("garbage")
    with pytest.raises(aiohttp.ClientError):
        await chat(http, engine, [user("hi")])
    engine.faults.add("garbage", after_events=2)
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    body = json.dumps(slow(stream=True)).encode()
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    data = await asyncio.wait_for(reader.read(), 5.0)
    writer.close()
    assert data.count(b"data: {") == 2
    assert data.endswith(GARBAGE)
    await idle(engine)


async def test_stalls_before_and_during(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("stall_before", seconds=0.05)
    await chat(http, engine, [user("hi")])
    engine.faults.add("stall_during", after_events=2, seconds=0.05)
    got, error = await received(http, engine)
    assert error is None
    assert got[-1] == b"data: [DONE]"
    engine.faults.add("stall_before")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(chat(http, engine, [user("hi")]), 0.2)
    engine.faults.add("stall_during", after_events=3)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(received(http, engine), 0.3)
    await idle(engine)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_error_answers_on_order(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect)
    for kind, expected in (("error500", 500), ("error503", 503), ("queue_full", 503)):
        engine.faults.add(kind)  # type: ignore[arg-type]
        async with http.post(engine.url + CHAT, json=slow(max_tokens=3)) as answer:
            assert answer.status == expected
            assert json.loads(await answer.text())
    await chat(http, engine, [user("hi")])
    assert engine.stats()["errors"] == 3


async def test_queue_full_reaches_an_sglang_stream_as_its_first_event(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start("sglang")
    engine.faults.add("queue_full")
    found = await events(http, engine, CHAT, slow(max_tokens=3))
    assert found[0]["error"]["code"] == 503
    assert found[-1] == "[DONE]"


async def test_a_json_answer_breaks_in_its_middle(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("half_close", after_events=1)
    with pytest.raises(aiohttp.ClientPayloadError):
        await chat(http, engine, [user("hi")])


async def test_refused_until_cleared(start: Start) -> None:
    engine = await start()
    engine.faults.add("refuse", count=None)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await chat(http, engine, [user("hi")])
        engine.faults.clear()
        await until(lambda: engine.listening)
        await chat(http, engine, [user("hi")])


async def test_the_next_connections_are_refused_by_count(start: Start) -> None:
    engine = await start()
    engine.faults.add("refuse", count=2)
    for _ in range(2):
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                await chat(http, engine, [user("hi")])
    async with aiohttp.ClientSession() as http:
        await chat(http, engine, [user("hi")])


async def test_a_refusal_drops_idle_connections_and_ends_by_itself(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    await chat(http, engine, [user("hi")])
    await post(http, engine, "/sim/faults", {"kind": "refuse", "count": None, "seconds": 0.2})
    await until(lambda: not engine.listening)
    async with aiohttp.ClientSession() as other:
        with pytest.raises(aiohttp.ClientConnectorError):
            await chat(other, engine, [user("hi")])
    await until(lambda: engine.listening)
    await chat(http, engine, [user("hi")])


async def test_slow_health(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("slow_health", seconds=30.0)
    with pytest.raises(TimeoutError):
        await http.get(engine.url + "/health", timeout=aiohttp.ClientTimeout(total=0.1))
    async with http.get(engine.url + "/health") as answer:
        assert answer.status == 200


async def test_a_restart_loses_the_cache_and_keeps_the_port(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(time_scale=0.5)
    port = engine.port
    running = asyncio.ensure_future(chat(http, engine, [user("slow")], max_tokens=4000, ignore_eos=True))
    await until(lambda: engine.stats()["generated_tokens"] > 0)
    async with aiohttp.ClientSession() as other:
        await post(other, engine, "/sim/restart", {"seconds": 0.05})
    with pytest.raises(aiohttp.ClientError):
        await running
    await until(lambda: engine.stats()["restarts"] == 1)
    await until(lambda: engine.listening)
    assert engine.port == port
    assert engine.stats()["kv_blocks_cached"] == 0
    await chat(http, engine, [user("hi")], max_tokens=2)
    await idle(engine)


async def test_stop_lets_a_stream_finish_and_kill_does_not(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    task = asyncio.ensure_future(received(http, engine))
    await until(lambda: engine.stats()["running"] == 1)
    await engine.stop()
    got, error = await task
    assert error is None
    assert got[-1] == b"data: [DONE]"
    engine = await start(time_scale=1.0)
    task = asyncio.ensure_future(received(http, engine))
    await until(lambda: engine.stats()["generated_tokens"] > 1)
    await engine.kill()
    got, error = await task
    assert error is not None


async def test_bad_orders_are_refused_with_reasons(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    for body in (
        {"kind": "fire"},
        {"kind": "reset", "count": 0},
        {"kind": "reset", "after_events": -1},
        {"kind": "reset", "seconds": "long"},
        {"kind": "reset", "extra": 1},
        {"kind": "refuse", "count": None},
        {},
    ):
        async with http.post(engine.url + "/sim/faults", json=body) as answer:
            assert answer.status == 400
    await post(http, engine, "/sim/faults", {"kind": "error500", "count": None})
    async with http.delete(engine.url + "/sim/faults") as answer:
        assert await answer.json() == []
    await chat(http, engine, [user("hi")])


async def test_an_idle_connection_is_closed_after_its_time(start: Start) -> None:
    engine = await start(keep_alive=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    await asyncio.wait_for(reader.read(), 5.0)
    writer.close()


async def test_stop_does_not_wait_for_a_client_that_a_fault_holds(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    engine.faults.add("stall_before")
    held = asyncio.ensure_future(chat(http, engine, [user("hi")]))
    await until(lambda: not engine.faults.listing())
    await asyncio.wait_for(engine.stop(), 15.0)
    with pytest.raises(aiohttp.ClientError):
        await held
    assert not engine.listening
