"""An engine that was taken over, or is only broken, harms nobody but the request that it answers.

Each case is what an engine writes for one request. Its client gets an answer that is whole and has one meaning, or one that is
cut, or a 502; its connection is not used again where its end is in doubt; and the next request gets the answer to itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import NamedTuple

import pytest

from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import Raw, Response, chat, request, settled

START = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODY = b'{"n":1}'
SIZED = b"Content-Length: 7\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"7\r\n" + BODY + b"\r\n0\r\n\r\n"
EVIL = b"HTTP/1.1 200 OK\r\nX-Evil: 1\r\nContent-Length: 4\r\n\r\nevil"


class Case(NamedTuple):
    name: str
    data: bytes
    status: int | None
    """What the client gets; ``None``: an answer that begins and is cut, or 502 if it had not begun."""
    kept: bool | None = False
    """Whether the connection carries the next request; ``None``: it may."""
    ends: bool = False
    """Whether the engine closes it behind what it wrote."""


def answer(*fields: bytes, body: bytes = BODY, start: bytes = START) -> bytes:
    return start + b"".join(fields) + b"\r\n" + body


def chunks(body: bytes) -> bytes:
    return answer(CHUNKED, body=body)


def sized(*fields: bytes) -> bytes:
    return answer(SIZED, *fields)


CASES = [
    # Two ways to tell the length.
    Case("two lengths", sized(b"Content-Length: 4\r\n"), 502),
    Case("two equal lengths", sized(SIZED), 502),
    Case("length and coding", answer(SIZED, CHUNKED, body=CHUNKS), 502),
    Case("coding and length", answer(CHUNKED, SIZED, body=CHUNKS), 502),
    Case("list of lengths", answer(b"Content-Length: 7, 7\r\n"), 502),
    Case("length with a sign", answer(b"Content-Length: +7\r\n"), 502),
    Case("length below zero", answer(b"Content-Length: -1\r\n"), 502),
    Case("length in hex", answer(b"Content-Length: 0x7\r\n"), 502),
    Case("length that overflows", answer(b"Content-Length: 99999999999999999999999\r\n"), 502),
    Case("length that is empty", answer(b"Content-Length:\r\n"), 502),
    Case("length with a space inside", answer(b"Content-Length: 7 7\r\n"), 502),
    Case("length behind a space in its name", answer(b"Content-Length : 7\r\n"), 502),
    Case("coding that nobody asked for", answer(b"Transfer-Encoding: gzip\r\n"), 502),
    Case("coding list", answer(b"Transfer-Encoding: gzip, chunked\r\n", body=CHUNKS), 502),
    Case("coding twice", answer(CHUNKED, CHUNKED, body=CHUNKS), 502),
    Case("coding identity", answer(b"Transfer-Encoding: identity\r\n"), 502),
    Case("coding with a vertical tab", answer(b"Transfer-Encoding: \x0bchunked\r\n", body=CHUNKS), 502),
    Case("coding in HTTP/1.0", answer(CHUNKED, body=CHUNKS).replace(b"1.1", b"1.0"), 200),
    Case("empty coding", answer(b"Transfer-Encoding:\r\n", SIZED), 502),
    # Chunks.
    Case("chunk size not hex", chunks(b"zz\r\n"), 502),
    Case("chunk size below zero", chunks(b"-7\r\n" + BODY + b"\r\n0\r\n\r\n"), 502),
    Case("chunk size with 0x", chunks(b"0x7\r\n" + BODY + b"\r\n0\r\n\r\n"), 502),
    Case("chunk size that overflows", chunks(b"10000000000000007\r\n" + BODY + b"\r\n0\r\n\r\n"), 502),
    Case("chunk size behind a space", chunks(b" 7\r\n" + BODY + b"\r\n0\r\n\r\n"), 502),
    Case("chunk extension", chunks(b'7;a="b"\r\n' + BODY + b"\r\n0;c\r\n\r\n"), 200, True),
    Case("chunk extension without end", chunks(b"7;" + b"a" * 2_000_000), None),
    Case("chunk data longer than its size", chunks(b"6\r\n" + BODY + b"\r\n0\r\n\r\n"), None),
    Case("chunk data with a bare LF behind", chunks(b"7\r\n" + BODY + b"\n0\r\n\r\n"), None),
    Case("chunk size line ends in LF", chunks(b"7\n" + BODY + b"\r\n0\r\n\r\n"), 502),
    Case("last chunk missing", chunks(b"7\r\n" + BODY + b"\r\n"), None, ends=True),
    Case("last CRLF missing", chunks(b"7\r\n" + BODY + b"\r\n0\r\n"), None, ends=True),
    Case("trailers", chunks(b"7\r\n" + BODY + b"\r\n0\r\nX-Evil: 1\r\n\r\n"), 200, True),
    Case("length in the trailers", chunks(b"7\r\n" + BODY + b"\r\n0\r\nContent-Length: 4\r\n\r\n"), None),
    Case("trailers without end", chunks(b"7\r\n" + BODY + b"\r\n0\r\n" + b"X-Evil: 1\r\n" * 200_000), None),
    # Lines.
    Case("bare LF ends a field", answer(b"X-A: b\n", SIZED), 502),
    Case("bare LF everywhere", sized().replace(b"\r\n", b"\n"), 502),
    Case("bare CR in a value", sized(b"X-A: b\rX-Evil: 1\r\n"), 502),
    Case("NUL in a value", sized(b"X-A: b\x00c\r\n"), 502),
    Case("NUL in a name", sized(b"X\x00A: b\r\n"), 502),
    Case("folded field", sized(b"X-A: b\r\n X-Evil: 1\r\n"), 502),
    Case("folded length", answer(b"Content-Length:\r\n 7\r\n"), 502),
    Case("field without a colon", sized(b"X-Evil\r\n"), 502),
    Case("name with a space", sized(b"X Evil: 1\r\n"), 502),
    Case("name of nothing", sized(b": 1\r\n"), 502),
    Case("escape sequence in a value", sized(b"X-A: \x1b[2J\r\n"), 502),
    Case("delete character in a value", sized(b"X-A: a\x7fb\r\n"), 502),
    Case("head without end", START + b"X-A: b\r\n" * 300_000, 502),
    Case("field without end", START + b"X-A: " + b"b" * 2_000_000, 502),
    Case("many fields", sized(b"X-A: b\r\n" * 5_000), 200, True),
    # Status lines.
    Case("HTTP/0.9", BODY, 502, ends=True),
    Case("status of two digits", answer(SIZED, start=b"HTTP/1.1 20 OK\r\n"), 502),
    Case("status of four digits", answer(SIZED, start=b"HTTP/1.1 2000 OK\r\n"), 502),
    Case("status of letters", answer(SIZED, start=b"HTTP/1.1 OK\r\n"), 502),
    Case("status below 100", answer(SIZED, start=b"HTTP/1.1 042 OK\r\n"), 502),
    Case("status of 999", answer(SIZED, start=b"HTTP/1.1 999 OK\r\n"), 502),
    Case("version 2.0", sized().replace(b"1.1", b"2.0", 1), 502),
    Case("version 0.9", sized().replace(b"1.1", b"0.9", 1), 502),
    Case("version 1.10", sized().replace(b"1.1", b"1.10", 1), 502),
    Case("another protocol", sized().replace(b"HTTP", b"ICY ", 1), 502),
    Case("a request", b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 7\r\n\r\n" + BODY, 502),
    Case("reason with CR", answer(SIZED, start=b"HTTP/1.1 200 O\rX-Evil: 1\r\n"), 502),
    Case("reason with NUL", answer(SIZED, start=b"HTTP/1.1 200 O\x00K\r\n"), 200, True),
    Case("reason that is long", answer(SIZED, start=b"HTTP/1.1 200 " + b"O" * 3000 + b"\r\n"), 200, True),
    # Interim answers and protocols.
    Case("protocol switched", b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n" + sized(), 502),
    Case("protocol switched without a word", b"HTTP/1.1 101 Switching\r\n\r\n" + sized(), 502),
    Case("upgrade beside an answer", sized(b"Upgrade: h2c\r\n", b"Connection: upgrade\r\n"), 200, True),
    Case("early hints", b"HTTP/1.1 103 Hints\r\nX-Evil: 1\r\nLink: </a>\r\n\r\n" + sized(), 200, True),
    Case("interim with a length", b"HTTP/1.1 100 Go\r\nContent-Length: 4\r\n\r\n" + sized(), 502),
    Case("interim that nobody knows with a length", b"HTTP/1.1 199 Go\r\nContent-Length: 4\r\n\r\nevil" + sized(), 502),
    Case("interim with chunks", b"HTTP/1.1 103 Go\r\n" + CHUNKED + b"\r\n" + CHUNKS + sized(), 502),
    Case("interim answers without end", b"HTTP/1.1 102 Wait\r\n\r\n" * 100_000, 502),
    # More than was asked for.
    Case("another answer behind", sized() + EVIL, 200),
    Case("another answer behind chunks", chunks(CHUNKS) + EVIL, 200),
    Case("half an answer behind", sized() + EVIL[:20], 200),
    Case("more body than length", sized() + b"evil", 200),
    Case("a line behind", sized() + b"\r\n", 200, None),
    Case("body behind no content", answer(start=b"HTTP/1.1 204 No\r\n"), 204),
    Case("body behind not modified", answer(start=b"HTTP/1.1 304 No\r\n"), 304),
    Case("length of no content", answer(SIZED, body=b"", start=b"HTTP/1.1 204 No\r\n"), 204, True),
    Case("keep-alive for ever", sized(b"Keep-Alive: timeout=99999999\r\nConnection: keep-alive\r\n"), 200, True),
    Case("close that does not close", sized(b"Connection: close\r\n"), 200),
    Case("close beside keep-alive", sized(b"Connection: keep-alive, close\r\n"), 200),
    # What is ours to say.
    Case("fields of one connection", sized(b"X-Evil: 1\r\nConnection: x-evil\r\n"), 200, True),
    Case("a request id of its own", sized(b"X-Request-Id: evil\r\n"), 200, True),
]


async def ask(client: Raw, tag: str) -> Response:
    return await client.ask(request(chat(), f"X-Request-Id: {tag}"))


def honest(found: Response) -> None:
    """Nothing in the head that the gateway did not mean to be there."""
    for name, value in found.fields:
        assert re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name)
        assert re.fullmatch(r"[\t\x20-\x7e\x80-\xff]*", value)
        assert name.lower() != "x-evil"
    assert found.one("x-request-id") == "first"
    assert len(found.all("content-length")) + len(found.all("transfer-encoding")) <= 1


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("step", [0, 7], ids=["in-one-write", "in-pieces"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_it_harms_nobody_else(gateway: Begin, scripted: StartScripted, case: Case, step: int) -> None:
    async def hostile(seen: Seen) -> None:
        if step and len(case.data) < 2000:
            for at in range(0, len(case.data), step):
                await seen.write(case.data[at : at + step])
                await asyncio.sleep(0)
        else:
            await seen.write(case.data)
        if case.ends:
            seen.writer.close()

    async def own(seen: Seen) -> None:
        await seen.write(ok(json.dumps({"for": seen.all("x-request-id")}).encode()))

    worker = await scripted(hostile, own)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        found = await ask(client, "first")
        honest(found)
        if case.status is None:
            assert not found.whole or found.status == 502
        else:
            assert (found.status, found.whole) == (case.status, True)
        if case.status == 200:
            assert found.body == BODY
    await settled(running)
    async with await Raw.connect(running.port) as client:
        for tag in ("second", "third"):
            after = await ask(client, tag)
            assert (after.status, after.json()) == (200, {"for": [tag]})
    first, second, third = worker.seen
    assert case.kept in (None, second.connection == first.connection)
    assert third.connection == second.connection
