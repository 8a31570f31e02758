"""What clients can make the gateway keep, and for how long: nothing without a bound."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from gateway.dialects import all_dialects
from gateway.errors import Refused
from gateway.http.server import Inbound
from gateway.http.upstream import Outbound, Pool
from gateway.http.wire import MEMO
from gateway.prompt import Thinking
from gateway.run import Running
from gateway.workers import WorkerSpec
from policies.base import load
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import EVENTS, Seen, chunk, ok
from tests.gateway.talk import CHAT, Raw, admin, chat, once, request, settled, until

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


def limit(running: Running, **limits: Any) -> None:
    running.gateway.server.limits = replace(running.gateway.server.limits, **limits)


def connection_of(running: Running) -> Inbound:
    (only,) = running.gateway.server.connections
    return only


# -- clients that do not read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [("Connection: close",), ()], ids=["close", "keep-alive"])
async def test_a_client_that_never_reads_its_last_bytes_is_let_go(
    gateway: Begin, scripted: StartScripted, lines: tuple[str, ...]
) -> None:
    async def sized(seen: Seen) -> None:
        await seen.write(ok(b"x" * int(seen.all("x-size")[0])))

    running = await gateway(await scripted(sized))
    # What is left unsent is below what makes a transport complain, and idleness alone is no reason.
    limit(running, stalled_seconds=1.0, idle_seconds=1.0 if not lines else 600.0)
    server = running.gateway.server
    clients = []
    known: set[Inbound] = set()
    for size in range(30_000, 130_000, 5_000):
        client = await Raw.connect(running.port, receive_buffer=4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        clients.append(client)
        await until(lambda: server.connections - known)
        (made,) = server.connections - known
        known.add(made)
        assert made.transport is not None
        made.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        await client.send(request(None, f"X-Size: {size}", *lines))
    await until(lambda: not running.gateway.exchanges)
    left = [c.transport.get_write_buffer_size() for c in server.connections if c.transport and not c.slow]
    assert any(0 < size < 65536 for size in left), "some have a little unsent"
    await until(lambda: not server.connections)
    for client in clients:
        client.vanish()


# -- bodies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_a_body_in_tiny_pieces_costs_about_its_size(
    gateway: Begin, scripted: StartScripted, framing: str
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = json.dumps(chat(user="u" * 300_000)).encode()
    if framing == "sized":
        field, data = f"Content-Length: {len(body)}", body
    else:
        field, data = "Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with await Raw.connect(running.port) as client:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: g\r\n{field}\r\n\r\n".encode()
        await client.send(head + data[:2])
        await until(lambda: running.gateway.server.body_bytes == 2)
        connection = connection_of(running)
        tracemalloc.start()
        try:
            for at in range(2, len(data) - 20, 2):
                connection.data_received(data[at : at + 2])
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 1_500_000
        connection.data_received(data[at + 2 :])
        assert (await client.response()).status == 200
    assert worker.one.body == body
    assert running.gateway.server.body_bytes == 0


def start_of(size: int, sent: int) -> bytes:
    """A head that announces a body, and a part of that body."""
    body = json.dumps(chat(user="u" * size)).encode()
    return b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body[:sent])


def rest_of(size: int, sent: int) -> bytes:
    return json.dumps(chat(user="u" * size)).encode()[sent:]


async def test_all_bodies_together_are_bounded_and_only_the_one_over_it_is_refused(
    gateway: Begin, scripted: StartScripted
) -> None:
    running = await gateway(await scripted())
    server = running.gateway.server
    limit(running, bodies=300_000)
    async with await Raw.connect(running.port) as first, await Raw.connect(running.port) as second:
        await first.send(start_of(200_000, 190_000))
        await until(lambda: server.body_bytes == 190_000)
        await second.send(start_of(200_000, 150_000))
        refused = await second.response()
        assert (refused.status, refused.one("connection")) == (503, "close")
        assert refused.all("retry-after")
        assert server.body_bytes == 190_000
        await first.send(rest_of(200_000, 190_000))
        assert (await first.response()).status == 200
    assert server.body_bytes == 0
    async with await Raw.connect(running.port) as third:
        await third.send(start_of(200_000, 100_000))
        await until(lambda: server.body_bytes == 100_000)
        third.vanish()
    await until(lambda: server.body_bytes == 0)
    assert (await once(running.port, start_of(200_000, 1_000_000))).status == 200
    assert server.body_bytes == 0


async def test_bodies_of_requests_that_wait_for_a_worker_count_until_they_are_answered_or_abandoned(
    gateway: Begin, scripted: StartScripted
) -> None:
    release = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await release.wait()
        await seen.write(EVENTS + chunk(EVENT))
        await seen.gone(60)

    worker = await scripted(wait)
    running = await gateway(worker)
    server = running.gateway.server
    whole = request(chat(stream=True, user="u" * 150))
    size = len(whole.partition(b"\r\n\r\n")[2])
    limit(running, bodies=3 * size + 10)
    clients = [await Raw.connect(running.port) for _ in range(4)]
    for at, client in enumerate(clients[:3]):
        await client.send(whole)
        await until(lambda at=at: len(worker.seen) == at + 1)  # type: ignore[misc]
    assert server.body_bytes == 3 * size, "also of those that came in one piece"
    assert (await clients[3].ask(whole)).status == 503
    clients[0].vanish()
    await until(lambda: server.body_bytes == 2 * size)
    release.set()
    for client in clients[1:3]:
        assert (await client.head()).status == 200
    assert server.body_bytes == 0, "a stream that has begun keeps no prompt"
    for client in clients:
        client.vanish()
    await settled(running)


# -- pipelining ---------------------------------------------------------------------------------------------------------


async def test_who_pipelines_too_much_is_let_go_and_its_running_request_aborted(
    gateway: Begin, scripted: StartScripted
) -> None:
    gone = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await seen.gone(60)
        gone.set()

    worker = await scripted(wait)
    running = await gateway(worker)
    limit(running, pipelined=20_000)
    async with await Raw.connect(running.port) as client:
        await client.send(request())
        await until(lambda: worker.seen)
        await client.send(request(chat(user="u" * 10_000)))
        await asyncio.sleep(0.05)
        assert not gone.is_set(), "a request ahead is fine"
        await client.send(request(chat(user="u" * 15_000)))
        await asyncio.wait_for(gone.wait(), 10)
        assert await client.rest() == b""
    assert len(worker.seen) == 1
    await until(lambda: not running.gateway.server.connections)
    await settled(running)


async def test_a_client_that_pipelined_and_left_is_noticed(gateway: Begin, scripted: StartScripted) -> None:
    gone = asyncio.Event()

    async def wait(seen: Seen) -> None:
        await seen.gone(60)
        gone.set()

    worker = await scripted(wait)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        await client.send(request() + request(chat(user="u" * 400_000)))
        await until(lambda: worker.seen)
        await until(lambda: len(connection_of(running).buffer) > 300_000)
    await asyncio.wait_for(gone.wait(), 10)
    await settled(running)
    assert len(worker.seen) == 1


# -- what is kept -------------------------------------------------------------------------------------------------------


async def test_names_that_clients_make_up_leave_nothing_behind(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(models=()))
    some, batch = 5_000, 250
    async with await Raw.connect(running.port) as client:
        for start in range(0, some, batch):
            await client.send(b"".join(request(chat(model=f"made-up-{at}")) for at in range(start, start + batch)))
            for _ in range(batch):
                assert (await client.response()).status == 200
    fleet, routing = running.fleet, running.gateway.routing
    assert len(fleet._views) <= 4
    assert len(fleet.calibrations) <= 4
    assert len(fleet.known_models) <= 4
    assert len(routing.models) <= routing.options.most_models
    metrics = await admin(running, "/metrics")
    assert "made-up" not in metrics
    assert metrics.count("\n") < 1000
    assert len(running.metrics._tallies) <= 4


async def test_symbols_of_all_sessions_are_bounded_and_counted_exactly(
    gateway: Begin, scripted: StartScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 12_000
    monkeypatch.setattr("gateway.sessions.MOST_SYMBOLS", most)
    running = await gateway(await scripted(), policy="cache_aware")
    sessions = running.sessions

    def exact() -> bool:
        return sessions.symbol_bytes == sum(len(session.pages.symbols) for session in sessions.recent(1000))

    async with await Raw.connect(running.port) as client:
        for at in range(40):
            body = chat(messages=[{"role": "user", "content": f"{at} " * 30_000}])
            lines = [f"X-Claude-Code-Session-Id: s{at // 2}", *(["X-Claude-Code-Agent-Id: a"] if at % 2 else [])]
            assert (await client.ask(request(body, *lines))).status == 200
            assert 0 < sessions.symbol_bytes <= most
            assert exact()
    assert 1 < len(sessions) < 40
    assert sessions.dropped > 0
    for session in sessions.recent(1000):
        sessions.drop(session)
        sessions.drop(session)
        assert exact()
    assert sessions.symbol_bytes == 0


async def test_sub_agents_that_never_end_a_request_keep_within_the_bound_of_symbols(
    gateway: Begin, scripted: StartScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 12_000
    monkeypatch.setattr("gateway.sessions.MOST_SYMBOLS", most)

    async def refuse(seen: Seen) -> None:
        await seen.write(ok(b"{}", status=b"500 Oops") if seen.all("x-claude-code-agent-id") else ok())

    running = await gateway(await scripted(refuse), policy="cache_aware")
    body = chat(messages=[{"role": "user", "content": "w " * 30_000}])
    target = next(iter(running.fleet.targets.values()))
    async with await Raw.connect(running.port) as client:
        assert (await client.ask(request(body, "X-Claude-Code-Session-Id: s"))).status == 200
        for at in range(20):
            target.breaker.succeeded()
            await client.ask(request(body, "X-Claude-Code-Session-Id: s", f"X-Claude-Code-Agent-Id: a{at}"))
            assert running.sessions.symbol_bytes <= most


@pytest.mark.parametrize("moment", ["waiting", "streaming"])
async def test_a_target_that_was_removed_gets_no_series_again(
    gateway: Begin, scripted: StartScripted, moment: str
) -> None:
    release = asyncio.Event()
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}\n\n'

    async def stream(seen: Seen) -> None:
        if moment == "waiting":
            await release.wait()
        await seen.write(EVENTS + chunk(EVENT))
        await release.wait()
        await seen.write(chunk(EVENT) + chunk(usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    removed, stays = await scripted(stream), await scripted()
    running = await gateway(removed, stays)
    name = f"127.0.0.1:{removed.port}"
    asked = [asyncio.ensure_future(once(running.port, request(chat(stream=True)))) for _ in range(4)]
    await until(lambda: len(removed.seen) == 2)
    if moment == "streaming":
        await until(lambda: all(exchange.first_at for exchange in running.gateway.exchanges))
    running.remove_worker(running.fleet.workers[name])
    assert name not in await admin(running, "/metrics")
    release.set()
    answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    metrics = await admin(running, "/metrics")
    assert name not in metrics
    assert 'target="removed"' in metrics
    await settled(running)


async def test_a_removed_worker_whose_stream_breaks_gets_no_series_again(
    gateway: Begin, scripted: StartScripted
) -> None:
    release = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(EVENT))
        await release.wait()
        seen.reset()

    removed = await scripted(stream)
    running = await gateway(removed)
    (worker,) = running.fleet.workers.values()
    asked = asyncio.ensure_future(once(running.port, request(chat(stream=True))))
    await until(lambda: any(exchange.first_at for exchange in running.gateway.exchanges))
    running.remove_worker(worker)
    release.set()
    assert b'"error"' in (await asked).body
    assert worker.id not in await admin(running, "/metrics")


async def test_what_is_kept_with_a_head_that_comes_again_and_again_is_small_with_many_workers(
    gateway: Begin, scripted: StartScripted
) -> None:
    workers = [await scripted() for _ in range(40)]
    running = await gateway(*workers)
    async with await Raw.connect(running.port) as client:
        for _ in range(120):
            assert (await client.ask(request(None, "X-Session-Id: s"))).status == 200
            shape = connection_of(running)._shape
            assert shape is not None
            assert len(shape.memo) <= MEMO + 2
    assert all(len(worker.seen) == 3 for worker in workers)


# -- nesting ------------------------------------------------------------------------------------------------------------


def nested(depth: int, size: int) -> bytes:
    """An Anthropic body whose tool result holds a result, and so on, about ``size`` bytes whatever the depth."""
    content = json.dumps("x" * (size - depth * 60))
    for _ in range(depth):
        content = '[{"type":"tool_result","tool_use_id":"t","content":' + content + "}]"
    return b'{"model":"sim","messages":[{"role":"user","content":%b}]}' % content.encode()


async def test_a_deeply_nested_tool_result_is_answered(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(), policy="cache_aware")
    answer = await once(running.port, request(nested(200, 2_000_000), path="/v1/messages"))
    assert answer.status < 500


def test_reading_a_nested_tool_result_takes_as_long_as_reading_a_flat_one() -> None:
    dialect = all_dialects()["anthropic"]
    route = dialect.routes[b"/v1/messages"]

    def seconds(body: bytes) -> float:
        found = []
        for _ in range(3):
            reading = dialect.read(route, body)
            assert reading.make_prompt is not None
            begun = time.process_time()
            reading.make_prompt(Thinking.STRIP)
            found.append(time.process_time() - begun)
        return min(found)

    flat, deep = seconds(nested(2, 2_000_000)), seconds(nested(200, 2_000_000))
    assert deep < 20 * flat


def test_a_moved_cache_mark_in_a_tool_result_changes_no_prompt_and_other_results_do() -> None:
    dialect = all_dialects()["anthropic"]
    route = dialect.routes[b"/v1/messages"]

    def prompt(*blocks: dict[str, Any]) -> bytes:
        content = [{"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}]
        body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": content}]}).encode()
        reading = dialect.read(route, body)
        assert reading.make_prompt is not None
        return reading.make_prompt(Thinking.STRIP).text

    inner = {"type": "tool_result", "tool_use_id": "u", "content": "deep"}
    plain = prompt({"type": "text", "text": "a"}, inner)
    assert prompt({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, inner) == plain
    assert prompt({"type": "text", "text": "a"}, {**inner, "content": "other"}) != plain
    assert prompt({"type": "text", "text": "a"}, {**inner, "tool_use_id": "v"}) != plain


# -- what only the garbage collector would free ---------------------------------------------------------------------------


async def test_streams_that_clients_leave_are_freed_at_once(gateway: Begin, scripted: StartScripted) -> None:
    async def endless(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(EVENT))
        await asyncio.Event().wait()

    worker = await scripted(endless)
    running = await gateway(worker)

    def kept() -> int:
        return sum(type(each) is Outbound for each in gc.get_objects())

    gc.collect()
    before = kept()
    # A gateway collects seldom: what waits for that grows by every client that leaves.
    gc.disable()
    try:
        for _ in range(20):
            async with await Raw.connect(running.port) as client:
                await client.send(request(chat(stream=True)))
                await asyncio.wait_for(client.reader.readuntil(b"\n\n"), 10)
        await settled(running)
        await until(lambda: kept() <= before)
    finally:
        gc.enable()


async def test_connections_that_are_refused_are_freed_at_once() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        pool = Pool("127.0.0.1", closed.getsockname()[1])

        def kept() -> int:
            return sum(type(each) in (Outbound, ConnectionRefusedError) for each in gc.get_objects())

        gc.collect()
        before = kept()
        gc.disable()
        try:
            for _ in range(10):
                with contextlib.suppress(Refused):
                    await pool.connect()
            await until(lambda: kept() <= before)
        finally:
            gc.enable()


async def test_probes_that_are_refused_and_policies_that_are_made_again_leave_nothing(
    gateway: Begin, scripted: StartScripted
) -> None:
    running = await gateway(await scripted())
    with socket.create_server(("127.0.0.1", 0)) as there:
        url = f"http://127.0.0.1:{there.getsockname()[1]}"
    worker = running.add_worker(WorkerSpec(url=url))

    async def refused() -> None:
        with contextlib.suppress(Refused):
            await running.probe.ask(worker, "/health")

    def errors() -> int:
        return sum(type(each) is ConnectionRefusedError for each in gc.get_objects())

    def types() -> int:
        return sum(type(each) is type for each in gc.get_objects())

    await refused()
    load("round_robin")
    gc.collect()
    gc.disable()
    try:
        before = errors(), types()
        for _ in range(5):
            await refused()
            load("round_robin")
        # One may be the gateway's own probe, on its way just now.
        assert errors() <= before[0] + 1
        assert types() == before[1]
    finally:
        gc.enable()
