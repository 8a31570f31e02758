"""Nothing that two servers could read differently gets past the gateway.

Each case is refused with its status and the connection closed; the complete request that follows it in the same write is
never served, and no worker hears of either.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
import pytest_asyncio

from gateway.run import Running
from tests.gateway.conftest import start_gateway
from tests.gateway.scripted import Scripted
from tests.gateway.talk import Raw, once, request, until_closed

module_loop = pytest.mark.asyncio(loop_scope="module")

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: g\r\n"
BODY = b'{"model":"sim"}'
SIZED = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


class Case(NamedTuple):
    name: str
    data: bytes
    statuses: tuple[int, ...] = (400,)


def post(*fields: bytes, body: bytes = BODY, host: bytes = HOST) -> bytes:
    return LINE + host + b"".join(fields) + b"\r\n" + body


def length(value: bytes) -> bytes:
    return post(b"Content-Length:" + value + b"\r\n")


def coding(value: bytes) -> bytes:
    return post(b"Transfer-Encoding:" + value + b"\r\n", body=CHUNKS)


def chunks(body: bytes) -> bytes:
    return post(CHUNKED, body=body)


CASES = [
    # Two ways to tell the body's length.
    Case("length and coding", post(SIZED, CHUNKED, body=CHUNKS)),
    Case("coding and length", post(CHUNKED, SIZED, body=CHUNKS)),
    Case("coding and length of zero", post(CHUNKED, b"Content-Length: 0\r\n", body=CHUNKS)),
    Case("length twice, equal", post(SIZED, SIZED)),
    Case("length twice, different", post(SIZED, b"Content-Length: 4\r\n")),
    Case("length twice, other case", post(SIZED, b"content-length: 4\r\n")),
    Case("coding twice", post(CHUNKED, CHUNKED, body=CHUNKS)),
    Case("coding twice, identity first", post(b"Transfer-Encoding: identity\r\n", CHUNKED, body=CHUNKS)),
    # Lengths.
    Case("length +", length(b" +15")),
    Case("length -", length(b" -1")),
    Case("length hex", length(b" 0x5")),
    Case("length list", length(b" 15, 15")),
    Case("length list without space", length(b" 15,15")),
    Case("length with a space inside", length(b" 1 5")),
    Case("length empty", length(b"")),
    Case("length blank", length(b"   ")),
    Case("length of 20 digits", length(b" 18446744073709551616")),
    Case("length of 20 digits that wraps to 15", length(b" 18446744073709551631")),
    Case("length of 100 zeros and 15", length(b" " + b"0" * 100 + b"15")),
    Case("length in Arabic digits", length(" \u0661\u0665".encode())),
    Case("length in full-width digits", length(" \uff11\uff15".encode())),
    Case("length as a float", length(b" 15.0")),
    Case("length in exponents", length(b" 1e1")),
    Case("length with an underscore", length(b" 1_5")),
    Case("length with a semicolon", length(b" 15;a")),
    Case("length with a vertical tab", length(b" \x0b15")),
    Case("length with a form feed", length(b" 15\x0c")),
    Case("length in quotes", length(b' "15"')),
    Case("length with a no-break space", length(b" \xa015")),
    # Codings.
    Case("gzip", coding(b" gzip")),
    Case("gzip, chunked", coding(b" gzip, chunked")),
    Case("chunked, gzip", coding(b" chunked, gzip")),
    Case("chunked twice in a list", coding(b" chunked, chunked")),
    Case("xchunked", coding(b" xchunked")),
    Case("chunkedx", coding(b" chunkedx")),
    Case("chunked with weight", coding(b" chunked;q=1")),
    Case("identity", coding(b" identity")),
    Case("identity, chunked", coding(b" identity, chunked")),
    Case("coding empty", coding(b"")),
    Case("coding of a comma", coding(b" ,chunked")),
    Case("coding with trailing comma", coding(b" chunked,")),
    Case("coding in quotes", coding(b' "chunked"')),
    Case("coding behind a vertical tab", coding(b" \x0bchunked")),
    Case("coding behind NUL", coding(b" \x00chunked")),
    Case("coding with a space inside", coding(b" chun ked")),
    Case("coding in HTTP/1.0", b"POST /v1/chat/completions HTTP/1.0\r\n" + HOST + CHUNKED + b"\r\n" + CHUNKS),
    # Field lines.
    Case("space before the colon of a coding", post(b"Transfer-Encoding : chunked\r\n", body=CHUNKS)),
    Case("space before the colon of a length", post(b"Content-Length : 15\r\n")),
    Case("tab before the colon", post(SIZED, b"X-A\t: b\r\n")),
    Case("space before the first field", LINE + b" Host: g\r\n" + SIZED + b"\r\n" + BODY),
    Case("folded with a space", post(SIZED, b"X-A: b\r\n c\r\n")),
    Case("folded with a tab", post(SIZED, b"X-A: b\r\n\tc\r\n")),
    Case("folded coding", post(b"Transfer-Encoding:\r\n chunked\r\n", body=CHUNKS)),
    Case("folded blank line", post(SIZED, b"X-A: b\r\n \r\n")),
    Case("bare LF ends a field", post(SIZED, b"X-A: b\n")),
    Case("bare LF ends the request line", LINE[:-2] + b"\n" + HOST + SIZED + b"\r\n" + BODY),
    Case("bare LF everywhere", post(SIZED).replace(b"\r\n", b"\n")),
    Case("bare LF ends the head", LINE + HOST + SIZED[:-2] + b"\n\n" + BODY),
    Case("bare CR hides a coding", post(SIZED, b"X-A: b\rTransfer-Encoding: chunked\r\n")),
    Case("bare CR in a value", post(SIZED, b"X-A: b\rc\r\n")),
    Case("bare CR before CRLF", post(SIZED, b"X-A: b\r\r\n")),
    Case("bare CR in the request line", LINE[:-2] + b"\r" + LINE[-2:] + HOST + SIZED + b"\r\n" + BODY),
    Case("NUL in a value", post(SIZED, b"X-A: b\x00c\r\n")),
    Case("NUL in a name", post(SIZED, b"X\x00A: b\r\n")),
    Case("NUL in the target", LINE.replace(b"chat", b"ch\x00at") + HOST + SIZED + b"\r\n" + BODY),
    Case("control character in a value", post(SIZED, b"X-A: b\x01c\r\n")),
    Case("DEL in a value", post(SIZED, b"X-A: b\x7fc\r\n")),
    Case("field without a colon", post(SIZED, b"X-A\r\n")),
    Case("field without a name", post(SIZED, b": b\r\n")),
    Case("name with a space", post(SIZED, b"X A: b\r\n")),
    Case("name in brackets", post(SIZED, b"[X]: b\r\n")),
    Case("name with a slash", post(SIZED, b"X/A: b\r\n")),
    Case("name with a quote", post(SIZED, b'X"A: b\r\n')),
    Case("name with a comma", post(SIZED, b"X,A: b\r\n")),
    Case("name with a high byte", post(SIZED, b"X\xe9: b\r\n")),
    Case("name with a vertical tab", post(SIZED, b"\x0bContent-Length: 4\r\n")),
    # Host.
    Case("no host", post(SIZED, host=b"")),
    Case("host twice, equal", post(HOST, SIZED)),
    Case("host twice, different", post(b"Host: other\r\n", SIZED)),
    Case("host twice, other case", post(b"HOST: g\r\n", SIZED)),
    # Request lines.
    Case("method in lower case", b"post" + post(SIZED)[4:]),
    Case("method that nobody has", b"FROB" + post(SIZED)[4:]),
    Case("method with a brace", b"PO{T" + post(SIZED)[4:]),
    Case("method with a control character", b"PO\x01T" + post(SIZED)[4:]),
    Case("method alone", b"POST\r\n" + HOST + b"\r\n"),
    Case("space before the method", b" " + post(SIZED)),
    Case("target with a space", LINE.replace(b"/chat", b"/ch at") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("two spaces before the version", LINE.replace(b" HTTP", b"  HTTP") + HOST + SIZED + b"\r\n" + BODY),
    Case("tab for a space", LINE.replace(b" HTTP", b"\tHTTP") + HOST + SIZED + b"\r\n" + BODY),
    Case("space after the version", LINE[:-2] + b" \r\n" + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("target without a slash", LINE.replace(b"/v1/chat", b"v1/chat") + HOST + SIZED + b"\r\n" + BODY),
    Case("target of another scheme", LINE.replace(b"/v1/", b"ftp://g/v1/") + HOST + SIZED + b"\r\n" + BODY),
    Case("target in authority form", LINE.replace(b"/v1/chat/completions", b"g:80") + HOST + SIZED + b"\r\n" + BODY),
    Case("no version", b"POST /v1/chat/completions\r\n" + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/0.9", LINE.replace(b"1.1", b"0.9") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/2.0", LINE.replace(b"1.1", b"2.0") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/1.2", LINE.replace(b"1.1", b"1.2") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/1.10", LINE.replace(b"1.1", b"1.10") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/11", LINE.replace(b"1.1", b"11") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("http in lower case", LINE.replace(b"HTTP", b"http") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("ICY", LINE.replace(b"HTTP/1.1", b"ICE/1.0") + HOST + SIZED + b"\r\n" + BODY, (400, 505)),
    Case("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    Case("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
    # Tunnels.
    Case("upgrade to websocket", post(b"Upgrade: websocket\r\n", b"Connection: Upgrade\r\n", SIZED), (501,)),
    Case("upgrade to h2c", post(b"Upgrade: h2c\r\n", b"Connection: Upgrade, HTTP2-Settings\r\n", SIZED), (501,)),
    Case("upgrade without connection", post(b"Upgrade: websocket\r\n", SIZED), (501,)),
    Case("CONNECT", b"CONNECT g:443 HTTP/1.1\r\n" + HOST + b"\r\n", (501,)),
    Case("CONNECT to a path", b"CONNECT /v1/models HTTP/1.1\r\n" + HOST + b"\r\n", (400, 501)),
    # Chunks.
    Case("chunk size not hex", chunks(b"zz\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size negative", chunks(b"-f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with plus", chunks(b"+f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with 0x", chunks(b"0xf\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size behind a space", chunks(b" f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size with an underscore", chunks(b"0_f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size empty", chunks(b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size of 16 digits", chunks(b"000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size overflows", chunks(b"1000000000000000f\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk size beyond the limit", chunks(b"fffffffffffffff\r\n" + BODY + b"\r\n0\r\n\r\n"), (413,)),
    Case("chunk header ends in LF", chunks(b"f\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk header ends in CR", chunks(b"f\r" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides LF", chunks(b"f;\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides CR", chunks(b"f;a\rb\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension hides NUL", chunks(b"f;a\x00b\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk extension too long", chunks(b"f;" + b"a" * 5000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("chunk data without CRLF", chunks(b"f\r\n" + BODY + b"0\r\n\r\n")),
    Case("chunk data ends in LF", chunks(b"f\r\n" + BODY + b"\n0\r\n\r\n")),
    Case("chunk data ends in CR", chunks(b"f\r\n" + BODY + b"\rX0\r\n\r\n")),
    Case("chunk data longer than it says", chunks(b"e\r\n" + BODY + b"\r\n0\r\n\r\n")),
    Case("trailer without a colon", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX\r\n\r\n")),
    Case("trailer ends in LF", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\n\r\n")),
    Case("trailer folded", chunks(b"f\r\n" + BODY + b"\r\n0\r\nX: y\r\n z\r\n\r\n")),
    Case("last chunk ends in LF", chunks(b"f\r\n" + BODY + b"\r\n0\n\n")),
    # Limits.
    Case("too many fields", post(SIZED, b"X-A: b\r\n" * 101), (431,)),
    Case("head too large", post(SIZED, b"X-A: " + b"b" * 70_000 + b"\r\n"), (431,)),
    Case("body too large", post(b"Content-Length: 99999999999\r\n"), (413,)),
    Case("expectation", post(SIZED, b"Expect: 200-ok\r\n"), (417,)),
    Case("expectation twice", post(SIZED, b"Expect: 100-continue\r\n", b"Expect: 200-ok\r\n"), (417,)),
]


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
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@module_loop
@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
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
@pytest.mark.parametrize("case", CASES[:8] + CASES[29:33], ids=lambda case: case.name.replace(" ", "-"))
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


LENGTHS = [case.data for case in CASES if case.name.startswith("length ") and case.data.count(b"Content-Length") == 1]
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
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(length(b"15"), id="no-space-before-the-value"),
        pytest.param(length(b"\t 15 \t"), id="blanks-round-the-value"),
        pytest.param(length(b" 0015"), id="leading-zeros"),
        pytest.param(coding(b" CHUNKED"), id="coding-in-capitals"),
        pytest.param(post(SIZED, b"X-A:\r\n"), id="empty-value"),
        pytest.param(post(SIZED, "X-A: \u4e2d\u6587 \xe9\r\n".encode()), id="high-bytes-in-a-value"),
        pytest.param(post(SIZED, b"!#$%&'*+-.^_`|~9: b\r\n"), id="odd-but-legal-name"),
        pytest.param(post(SIZED, b"Connection: , ,\r\n"), id="empty-connection-options"),
        pytest.param(post(SIZED, host=b"Host:\r\n"), id="empty-host"),
        pytest.param(chunks(b"F\r\n" + BODY + b"\r\n000\r\n\r\n"), id="upper-case-and-many-zeros"),
    ],
)
async def test_odd_forms_that_have_one_meaning_are_served(fleet: tuple[Running, Scripted], data: bytes) -> None:
    running, worker = fleet
    worker.seen.clear()
    assert (await once(running.port, data)).status == 200
    assert worker.one.body == BODY


@module_loop
async def test_the_connection_limit_and_the_corpus_leave_nothing_behind(fleet: tuple[Running, Scripted]) -> None:
    running, _ = fleet
    for _ in range(600):
        if not running.gateway.server.connections:
            break
        await asyncio.sleep(0.01)
    assert not running.gateway.server.connections
    assert (await once(running.port, request())).status == 200
