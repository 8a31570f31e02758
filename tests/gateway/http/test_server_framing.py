"""HTTP/1.1 as clients speak it to the gateway: framing, pipelining, limits, deadlines, and how refusals look."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from gateway.config import Config
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import CHAT, Raw, Response, chat, once, request, until, until_closed

BODY = b'{"model":"sim","messages":[{"role":"user","content":"hi"}]}'


def chunked(*pieces: bytes, extension: bytes = b"", trailers: bytes = b"", fields: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    head = b"POST %b HTTP/1.1\r\nHost: g\r\n%bTransfer-Encoding: chunked\r\n\r\n" % (CHAT.encode(), fields)
    return head + body + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def error(response: Response) -> dict[str, Any]:
    """The error object of a refusal in the OpenAI shape."""
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == response.status
    return dict(body)


async def echo(seen: Seen) -> None:
    """Answers with the place of the request in the conversation, so that order shows."""
    await seen.write(ok(json.dumps({"path": seen.target, "tag": seen.all("x-tag"), "size": len(seen.body)}).encode()))


async def test_keep_alive_serves_many_requests_on_one_connection(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        for number in range(20):
            answer = await client.ask(request(None, f"X-Tag: {number}"))
            assert answer.json()["tag"] == [str(number)]
            assert answer.all("connection") == []


async def test_connection_close_is_honoured(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(None, "Connection: close"))
        assert answer.one("connection") == "close"
        assert await client.rest() == b""


async def test_after_connection_close_pipelined_requests_are_not_served(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    data = await until_closed(running.port, request(None, "Connection: close") + request())
    assert data.count(b"HTTP/1.1 ") == 1
    assert len(worker.seen) == 1


async def test_http_1_0_closes_and_gets_no_chunks(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3\r\n ho\r\n0\r\n\r\n")
    running = await gateway(worker)
    head = b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(BODY))
    data = await until_closed(running.port, head + BODY)
    head, _, body = data.partition(b"\r\n\r\n")
    assert body == b"hello ho"
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()


async def test_http_1_0_may_ask_for_keep_alive(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    head = b"POST %b HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(BODY))
    async with await Raw.connect(running.port) as client:
        for _ in range(3):
            answer = await client.ask(head + BODY)
            assert answer.status == 200
            assert answer.one("connection") == "keep-alive"
            assert answer.json()["size"] == len(BODY)


async def test_pipelined_requests_are_answered_in_order(gateway: Begin, scripted: StartScripted) -> None:
    """Mixed ones: sized, chunked, answered by the gateway itself, refused by it, and slow ones first."""

    async def slow_first(seen: Seen) -> None:
        await asyncio.sleep(0.1 if seen.all("x-tag") == ["0"] else 0)
        await echo(seen)

    running = await gateway(await scripted(slow_first))
    written = b""
    expected: list[Any] = []
    for number in range(40):
        kind = number % 4
        if kind == 0:
            written += request(None, f"X-Tag: {number}")
            expected.append(str(number))
        elif kind == 1:
            written += chunked(BODY[:7], BODY[7:], fields=b"X-Tag: %d\r\n" % number)
            expected.append(str(number))
        elif kind == 2:
            written += request(path="/v1/models", method="GET")
            expected.append("list")
        else:
            written += request(path=f"/nowhere/{number}")
            expected.append(404)
    async with await Raw.connect(running.port) as client:
        await client.send(written)
        for want in expected:
            answer = await client.response()
            got = answer.json()
            assert (got["tag"][0] if "tag" in got else got.get("object", answer.status)) == want


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
async def test_five_hundred_requests_in_one_write(gateway: Begin, scripted: StartScripted, path: str) -> None:
    running = await gateway(await scripted(echo))
    method = "GET" if path == "/v1/models" else "POST"
    async with await Raw.connect(running.port) as client:
        writing = asyncio.ensure_future(
            client.send(b"".join(request(None, f"X-Tag: {n}", path=path, method=method) for n in range(500)))
        )
        for number in range(500):
            answer = await client.response()
            assert answer.status == 200
            if path == CHAT:
                assert answer.json()["tag"] == [str(number)]
        await writing


async def test_a_pipelined_request_that_arrives_while_another_is_taken_up_keeps_its_place(
    gateway: Begin, scripted: StartScripted
) -> None:
    """The second request waits in the buffer when the first answer ends; the third comes in that very moment."""
    running = await gateway(await scripted(echo))
    for _ in range(30):
        async with await Raw.connect(running.port) as client:
            for number in range(12):
                client.writer.write(request(None, f"X-Tag: {number}"))
                await asyncio.sleep(0)
            for number in range(12):
                assert (await client.response()).json()["tag"] == [str(number)]


async def test_sized_and_chunked_bodies_cut_at_every_byte(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    wholes = [request(BODY, "X-Tag: cut"), chunked(BODY[:20], BODY[20:], extension=b";a=b", trailers=b"T: v\r\n")]
    for whole in wholes:
        async with await Raw.connect(running.port) as client:
            for cut in range(1, len(whole)):
                client.writer.write(whole[:cut])
                await asyncio.sleep(0)
                client.writer.write(whole[cut:])
                assert (await client.response()).json()["size"] == len(BODY)
    assert {seen.body for seen in worker.seen} == {BODY}


async def test_requests_cut_at_random_places_give_the_same_answers(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    dice = random.Random(7)
    whole = request(BODY, "X-Tag: 1") + chunked(BODY, extension=b"; x", trailers=b"A: b\r\nC: d\r\n")
    whole += request(path="/v1/models", method="GET") + request(BODY, "Expect: 100-continue")
    for _ in range(40):
        cuts = sorted(dice.sample(range(1, len(whole)), dice.randint(1, 25)))
        async with await Raw.connect(running.port) as client:
            for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
                client.writer.write(whole[start:end])
                await asyncio.sleep(0)
            answers = [await client.response() for _ in range(4)]
        assert [answer.status for answer in answers] == [200] * 4
        assert [answers[at].json()["size"] for at in (0, 1, 3)] == [len(BODY)] * 3
        assert answers[2].json()["object"] == "list"


async def test_byte_by_byte(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        for whole in (request(BODY), chunked(BODY[:5], BODY[5:])):
            for at in range(len(whole)):
                client.writer.write(whole[at : at + 1])
                await asyncio.sleep(0)
            assert (await client.response()).json()["size"] == len(BODY)


async def test_chunk_extensions_and_trailers_stop_here_and_the_worker_gets_a_sized_body(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    answer = await once(
        running.port,
        chunked(BODY[:9], BODY[9:], extension=b";name=value", trailers=b"X-Evil: 1\r\n", fields=b"Trailer: X-Evil\r\n"),
    )
    assert answer.status == 200
    seen = worker.one
    assert seen.body == BODY
    assert seen.all("content-length") == [str(len(BODY))]
    for name in ("transfer-encoding", "trailer", "x-evil"):
        assert seen.all(name) == []


async def test_expect_100_continue_gets_its_interim_answer_before_the_body(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    for framing in (b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"):
        async with await Raw.connect(running.port) as client:
            head = b"POST %b HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\n%b\r\n" % (CHAT.encode(), framing)
            await client.send(head)
            assert (await client.head()).status == 100
            await client.send(BODY if b"Length" in framing else b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
            assert (await client.head()).status == 200
    assert all(seen.all("expect") == [] for seen in worker.seen)


async def test_no_interim_answer_when_the_body_is_refused_or_there_already(
    gateway: Begin, scripted: StartScripted
) -> None:
    running = await gateway(await scripted(echo), change=small_body)
    head = b"POST %b HTTP/1.1\r\nHost: g\r\nExpect: 100-continue\r\nContent-Length: 2000\r\n\r\n" % CHAT.encode()
    data = await until_closed(running.port, head)
    assert data.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in data
    async with await Raw.connect(running.port) as client:
        await client.send(request(BODY, "Expect: 100-continue"))
        assert (await client.head()).status == 200


async def test_another_expectation_is_417(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    data = await until_closed(running.port, request(BODY, "Expect: a-miracle"))
    assert data.startswith(b"HTTP/1.1 417 ")
    assert worker.seen == []


async def test_head_has_the_fields_of_get_and_no_body(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        whole = await client.ask(request(path="/v1/models", method="GET"))
        bare = await client.ask(request(path="/v1/models", method="HEAD"), head_only=True)
        assert (bare.status, bare.one("content-length")) == (200, str(len(whole.body)))
        missing = await client.ask(request(path="/nowhere", method="HEAD"), head_only=True)
        assert missing.status == 404
        assert int(missing.one("content-length")) > 0
        assert (await client.ask(request(path="/v1/models", method="GET"))).body == whole.body


def passthrough(config: Config) -> None:
    config.passthrough = ["/opaque"]


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found", b"500 Oops", b"503 Full"])
async def test_head_reaches_a_worker_and_its_answer_comes_back_without_a_body(
    gateway: Begin, scripted: StartScripted, status: bytes
) -> None:
    worker = await scripted(b"HTTP/1.1 %b\r\nContent-Length: 99\r\nX-Kept: 1\r\n\r\n" % status)
    running = await gateway(worker, change=passthrough)
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            answer = await client.ask(request(path="/opaque", method="HEAD"), head_only=True)
            assert answer.status == int(status[:3])
    assert {seen.method for seen in worker.seen} == {"HEAD"}


# -- limits -----------------------------------------------------------------------------------------------------------


def small_body(config: Config) -> None:
    config.listen.max_body = 1000


async def test_a_head_of_64_kib_passes_and_a_larger_one_is_431(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    empty = len(request(BODY, "X-Fill: ")) - len(BODY)
    fits = request(BODY, "X-Fill: " + "x" * (64 * 1024 - empty))
    assert (await once(running.port, fits)).status == 200
    over = request(BODY, "X-Fill: " + "x" * (64 * 1024 - empty + 1))
    data = await until_closed(running.port, over)
    assert data.startswith(b"HTTP/1.1 431 ")
    assert len(worker.seen) == 1


async def test_a_head_without_end_is_431_before_it_is_kept(gateway: Begin) -> None:
    running = await gateway()
    async with await Raw.connect(running.port) as client:
        client.writer.write(b"GET / HTTP/1.1\r\nHost: g\r\nX: ")
        for _ in range(80):
            client.writer.write(b"y" * 1024)
            await asyncio.sleep(0)
        assert (await client.response()).status == 431
        assert await client.rest() == b""


async def test_a_hundred_fields_pass_and_more_are_431(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(echo)
    running = await gateway(worker)
    fine = request(BODY, *[f"X-{n}: v" for n in range(98)])
    assert fine.split(b"\r\n\r\n")[0].count(b"\r\n") == 100
    assert (await once(running.port, fine)).status == 200
    data = await until_closed(running.port, request(BODY, *[f"X-{n}: v" for n in range(99)]))
    assert data.startswith(b"HTTP/1.1 431 ")
    assert len(worker.seen) == 1


@pytest.mark.parametrize("framing", ["sized", "chunked"])
async def test_a_body_at_the_limit_passes_and_a_larger_one_is_413_although_it_is_still_being_sent(
    gateway: Begin, scripted: StartScripted, framing: str
) -> None:
    worker = await scripted(echo)
    running = await gateway(worker, change=small_body)
    fits = json.dumps({**chat(), "pad": ""}).encode()
    fits = fits[:-2] + b"x" * (1000 - len(fits)) + b'"}'
    assert (await once(running.port, request(fits) if framing == "sized" else chunked(fits))).json()["size"] == 1000
    async with await Raw.connect(running.port) as client:
        if framing == "sized":
            client.writer.write(b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: 20000000\r\n\r\n" % CHAT.encode())
            piece = b"x" * 65536
        else:
            client.writer.write(b"POST %b HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode())
            piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(100):
            client.writer.write(piece)
        answer = await client.response()
        assert answer.status == 413
        assert error(answer)["type"] == "request_too_large"
        assert answer.one("connection") == "close"
        assert await client.rest() == b""
    assert len(worker.seen) == 1


async def test_the_default_limit_is_64_mib(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    head = b"POST %b HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n"
    data = await until_closed(running.port, head % (CHAT.encode(), 64 * 1024 * 1024 + 1))
    assert data.startswith(b"HTTP/1.1 413 ")
    async with await Raw.connect(running.port) as client:
        await client.send(head % (CHAT.encode(), 64 * 1024 * 1024))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.1)


# -- deadlines --------------------------------------------------------------------------------------------------------


def hurried(config: Config) -> None:
    config.listen.head_timeout = config.listen.body_timeout = 0.3
    config.listen.idle = 0.3


@pytest.mark.parametrize(
    "beginning",
    [
        pytest.param(b"GET /v1/mod", id="request-line"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n", id="fields"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\n", id="no-body"),
        pytest.param(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\nabc", id="half-body"),
        pytest.param(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", id="chunk"
        ),
    ],
)
async def test_a_request_that_does_not_go_on_is_408(gateway: Begin, beginning: bytes) -> None:
    running = await gateway(change=hurried)
    data = await until_closed(running.port, beginning)
    assert data.startswith(b"HTTP/1.1 408 ")


async def test_a_head_that_drips_is_408_however_steadily(gateway: Begin) -> None:
    running = await gateway(change=hurried)
    async with await Raw.connect(running.port) as client:
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: g\r\nX: ")

        async def drip() -> None:
            while True:
                client.writer.write(b"y")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        try:
            assert (await client.response()).status == 408
        finally:
            dripping.cancel()


async def test_a_body_that_drips_is_408_however_steadily(gateway: Begin) -> None:
    running = await gateway(change=hurried)
    async with await Raw.connect(running.port) as client:
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 9999\r\n\r\n")

        async def drip() -> None:
            while True:
                client.writer.write(b"y")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        try:
            assert (await client.response()).status == 408
        finally:
            dripping.cancel()


@pytest.mark.parametrize("first", [b"", b"\r\n\r\n", request(path="/v1/models", method="GET")])
async def test_an_idle_connection_is_closed_in_silence(gateway: Begin, first: bytes) -> None:
    running = await gateway(change=hurried)
    data = await until_closed(running.port, first)
    assert b"408" not in data
    assert data.count(b"HTTP/1.1 ") == (1 if first.startswith(b"GET") else 0)
    await until(lambda: not running.gateway.server.connections)


async def test_a_long_answer_is_no_idleness(gateway: Begin, scripted: StartScripted) -> None:
    async def late(seen: Seen) -> None:
        await asyncio.sleep(1.2)
        await echo(seen)

    running = await gateway(await scripted(late), change=hurried)
    assert (await once(running.port, request())).status == 200


async def test_a_connection_too_many_is_told_503(gateway: Begin, scripted: StartScripted) -> None:
    def few(config: Config) -> None:
        config.listen.max_connections = 3

    running = await gateway(await scripted(echo), change=few)
    kept = [await Raw.connect(running.port) for _ in range(3)]
    for client in kept:
        assert (await client.ask(request())).status == 200
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request())
        assert answer.status == 503
        assert error(answer)["type"] == "overloaded_error"
        assert int(answer.one("retry-after")) >= 1
        assert answer.one("connection") == "close"
        assert await client.rest() == b""
    for client in kept:
        assert (await client.ask(request())).status == 200
    kept.pop().vanish()
    await until(lambda: len(running.gateway.server.connections) == 2)
    assert (await once(running.port, request())).status == 200
    for client in kept:
        client.vanish()


# -- forms that are fine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["http://gateway/v1/models", "HTTP://gateway:8080/v1/models", "https://g/v1/models?x=1", "/v1/models?a=b/c?d"],
)
async def test_absolute_form_is_accepted(gateway: Begin, scripted: StartScripted, target: str) -> None:
    running = await gateway(await scripted(echo))
    answer = await once(running.port, request(path=target, method="GET"))
    assert (answer.status, answer.json()["object"]) == (200, "list")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://elsewhere/opaque?x=/y", "/opaque?x=/y"),
        ("/opaque?a=%0d%0aX:+y&b=c/d?e", "/opaque?a=%0d%0aX:+y&b=c/d?e"),
        ("/opaque?", "/opaque"),
    ],
)
async def test_the_worker_gets_origin_form_with_the_query_as_it_was(
    gateway: Begin, scripted: StartScripted, target: str, expected: str
) -> None:
    worker = await scripted(echo)
    running = await gateway(worker, change=passthrough)
    assert (await once(running.port, request(b"x", path=target))).status == 200
    assert worker.one.target == expected
    assert worker.one.all("host") == [f"127.0.0.1:{worker.port}"]


async def test_empty_lines_before_a_request_are_skipped(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        for _ in range(3):
            assert (await client.ask(b"\r\n\r\n" + request())).status == 200
        await client.send(b"\r")
        await asyncio.sleep(0.02)
        assert (await client.ask(b"\n" + request())).status == 200


async def test_a_flood_of_empty_lines_costs_little(gateway: Begin) -> None:
    """Taken two bytes at a time from a long buffer they would cost quadratically: 16 MB would take minutes."""
    running = await gateway()
    async with await Raw.connect(running.port) as client:
        connection = next(iter(running.gateway.server.connections))
        connection.data_received(b"\r\n" * 8_000_000 + request(path="/healthz", method="GET"))
        assert (await client.response()).status == 200


async def test_a_fault_of_the_request_does_not_cost_the_connection(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(echo))
    async with await Raw.connect(running.port) as client:
        assert (await client.ask(request(b"{not json"))).status == 400
        assert (await client.ask(request(path="/nowhere"))).status == 404
        assert (await client.ask(request(path=CHAT, method="GET"))).status == 405
        assert (await client.ask(request())).status == 200
