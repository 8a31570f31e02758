"""Nothing that two servers could read differently gets past the gateway.

Each case is refused with its status and the connection closed; the complete request that follows it in the same write is
never served, and no worker hears of either.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.run import Running
from tests.gateway.conftest import start_gateway
from tests.gateway.http.corpus import BODY, CASES, CHUNKED, CHUNKS, REFUSED, SERVED, SIZED, Case, length, post
from tests.gateway.scripted import Scripted
from tests.gateway.talk import Raw, once, request, until_closed

module_loop = pytest.mark.asyncio(loop_scope="module")


def answers(data: bytes) -> int:
    """How many responses are in ``data``."""
    return len(re.findall(rb"(?:^|\}|\n)HTTP/1\.1 \d{3} ", data))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[tuple[Running, Scripted]]:
    """One gateway and one worker for all cases."""
    worker = Scripted()
    await worker.start()
    running = await start_gateway(worker)
    yield running, worker
    await running.stop()
    assert running.gateway.defects == 0
    await worker.stop()


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


@module_loop
@pytest.mark.parametrize("case", REFUSED, ids=[case.name.replace(" ", "-") for case in REFUSED])
async def test_refused_and_closed(fleet: tuple[Running, Scripted], case: Case) -> None:
    running, worker = fleet
    worker.seen.clear()
    behind = request(path="/v1/chat/completions") + request(path="/v1/models", method="GET")
    data = await until_closed(running.port, case.data + behind)
    status = int(data[9:12])
    assert status in case.statuses, data
    assert answers(data) == 1
    head = data.partition(b"\r\n\r\n")[0].lower()
    assert b"\r\nconnection: close" in head
    assert b'"error"' in data
    assert worker.seen == []


@module_loop
@pytest.mark.parametrize("case", REFUSED[:8] + REFUSED[29:33], ids=lambda case: case.name.replace(" ", "-"))
async def test_refused_byte_by_byte(fleet: tuple[Running, Scripted], case: Case) -> None:
    running, worker = fleet
    worker.seen.clear()
    async with await Raw.connect(running.port) as client:
        for at in range(len(case.data)):
            client.writer.write(case.data[at : at + 1])
            await asyncio.sleep(0)
        assert (await client.response()).status in case.statuses
        assert await client.rest() == b""
    assert worker.seen == []


LENGTHS = [case.data for case in REFUSED if case.name.startswith("length ") and case.data.count(b"Content-Length") == 1]
LENGTHS += [
    length(value) for value in (b" ", b"\t", b" \x00", b"\x00", b"-", b" +", b" x", b" 15 15", b" " + b"9" * 19)
]


@module_loop
@pytest.mark.parametrize("before", [b" 15", b"15", b"\t15", b" 15 "])
async def test_a_bad_length_behind_a_good_request_of_the_same_head(
    fleet: tuple[Running, Scripted], before: bytes
) -> None:
    """What was learned of one head on a connection is not believed of the next, which differs in its length alone."""
    running, worker = fleet
    for bad in LENGTHS:
        worker.seen.clear()
        async with await Raw.connect(running.port) as client:
            for _ in range(2):
                assert (await client.ask(length(before))).status == 200
            await client.send(bad + request())
            assert (await client.response()).status == 400, bad
            assert await client.rest() == b""
        assert len(worker.seen) == 2


@module_loop
async def test_heads_that_differ_in_one_place_are_told_apart(fleet: tuple[Running, Scripted]) -> None:
    running, worker = fleet
    worker.seen.clear()
    async with await Raw.connect(running.port) as client:
        for number in range(12):
            body = BODY[:-1] + b" " * number + b"}"
            fields = [b"Content-Length: %d\r\n" % len(body), b"X-Tag: %d\r\n" % (number // 3)]
            assert (await client.ask(post(*fields[:: 1 if number % 2 else -1], body=body))).status == 200
            assert worker.seen[-1].body == body
            assert worker.seen[-1].all("x-tag") == [str(number // 3)]
            assert worker.seen[-1].all("content-length") == [str(len(body))]
            if number % 4 == 0:
                expecting = post(b"Content-Length: %d\r\n" % len(body), b"Expect: 100-continue\r\n", body=b"")
                await client.send(expecting)
                assert (await client.head()).status == 100
                assert (await client.ask(body)).status == 200
        closing = post(SIZED, b"Connection: close\r\n")
        assert (await client.ask(closing)).one("connection") == "close"
        assert await client.rest() == b""


@module_loop
async def test_a_refused_request_behind_a_good_one_is_refused_in_its_turn(fleet: tuple[Running, Scripted]) -> None:
    running, worker = fleet
    worker.seen.clear()
    bad = post(SIZED, CHUNKED, body=CHUNKS)
    data = await until_closed(running.port, request() + bad + request() * 3)
    assert answers(data) == 2
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 400 " in data
    assert len(worker.seen) == 1


@module_loop
async def test_what_looks_like_a_request_inside_a_body_is_a_body(fleet: tuple[Running, Scripted]) -> None:
    running, worker = fleet
    worker.seen.clear()
    inner = b'{"model":"sim","x":"\\r\\n\\r\\nPOST /v1/completions HTTP/1.1"}'
    async with await Raw.connect(running.port) as client:
        assert (await client.ask(request(inner))).status == 200
        assert (await client.ask(request(b"POST /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n"))).status == 400
        assert (await client.ask(request(method="GET", path="/v1/models"))).status == 200
    assert worker.one.body == inner


@module_loop
async def test_a_get_may_have_a_body_and_it_is_no_request(fleet: tuple[Running, Scripted]) -> None:
    running, _ = fleet
    async with await Raw.connect(running.port) as client:
        inner = request(path="/nowhere", method="GET")
        answer = await client.ask(request(inner, path="/v1/models", method="GET"))
        assert answer.json()["object"] == "list"
        assert (await client.ask(request(path="/nowhere", method="GET"))).status == 404


@module_loop
@pytest.mark.parametrize("case", SERVED, ids=[case.name.replace(" ", "-") for case in SERVED])
async def test_odd_forms_have_one_meaning(fleet: tuple[Running, Scripted], case: Case) -> None:
    """Its answer, what the worker gets, and whether the next request on the connection is read as one."""
    running, worker = fleet
    worker.seen.clear()
    async with await Raw.connect(running.port) as client:
        await client.send(case.data)
        for _ in range(max(1, len(case.reaches))):
            assert (await client.response()).status in case.statuses
        if not case.closes:
            answer = await client.ask(request(path="/v1/models", method="GET"))
            assert answer.json()["object"] == "list"
        else:
            assert await client.rest() == b""
    assert tuple(seen.body for seen in worker.seen) == case.reaches
    for seen in worker.seen:
        assert seen.all("host") == [f"127.0.0.1:{worker.port}"]
        assert seen.all("content-length") == [str(len(seen.body))]
        names = {name.lower().replace("_", "-") for name, _ in seen.fields if name.lower() != "content-length"}
        assert not names & {"content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade"}


@module_loop
async def test_the_connection_limit_and_the_corpus_leave_nothing_behind(fleet: tuple[Running, Scripted]) -> None:
    running, _ = fleet
    for _ in range(600):
        if not running.gateway.server.connections:
            break
        await asyncio.sleep(0.01)
    assert not running.gateway.server.connections
    assert (await once(running.port, request())).status == 200
