"""The parsers of HTTP, each against h11 or a model of twenty lines, and against itself with its input in other pieces."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11

from gateway.errors import Fault, WorkerFault
from gateway.http.chunked import Chunked
from gateway.http.incoming import Incoming, origin
from gateway.http.limits import Inward
from gateway.http.server import IDLE, Inbound, Server
from gateway.http.upstream import Outbound, Pool
from tests.fuzz.targets import Target, cuts

LIMIT = 1 << 16


class Memory(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.ended = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Bench:
    """A loop of its own on which the two sides are driven without sockets."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.served: list[tuple[bytes, bytes, bytes]] = []
        self.refused: list[int] = []
        self.server, self.pool = self.loop.run_until_complete(self._make())

    async def _make(self) -> tuple[Server, Pool]:
        limits = Inward(head=8192, body=LIMIT)
        server = Server(self._serve, lambda fault, path: b"refused", limits, self._refuse)
        return server, Pool("127.0.0.1", 1)

    def turn(self) -> None:
        """Whatever is due now."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def _serve(self, incoming: Incoming, client: Inbound) -> None:
        target = incoming.path + (b"?" + incoming.query if incoming.query else b"")
        self.served.append((incoming.method, target, incoming.body))
        client.send(b"answer")
        client.done()

    def _refuse(self, fault: Fault) -> None:
        self.refused.append(fault.status)


_bench: list[Bench] = []


def bench() -> Bench:
    """The only one."""
    if not _bench:
        _bench.append(Bench())
    return _bench[0]


# -- requests -----------------------------------------------------------------------------------------------------------


def drive(pieces: list[bytes]) -> tuple[list[tuple[bytes, bytes, bytes]], bool, bool]:
    """(method, target and body of what was served, whether something was refused, whether the connection ended)."""
    here = bench()
    here.served, here.refused = [], []
    connection, transport = Inbound(here.server), Memory()
    connection.connection_made(transport)
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
        while connection.buffer and connection.phase == IDLE and not transport.closed:
            left = len(connection.buffer)
            here.turn()
            if len(connection.buffer) == left:
                break
    here.turn()
    ended = transport.closed or transport.ended
    connection.connection_lost(None)
    assert here.server.body_bytes == 0, "bytes of bodies are counted for ever"
    assert not here.server.connections
    assert len(here.refused) <= 1
    return here.served, bool(here.refused), ended


def requests_by_h11(data: bytes) -> tuple[list[tuple[bytes, bytes, bytes]], bool]:
    """What h11 reads, and whether it gave up or was asked to close."""
    http, found = h11.Connection(h11.SERVER), []
    http.receive_data(data)
    try:
        while True:
            event = http.next_event()
            if isinstance(event, h11.Request):
                head, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                found.append((bytes(head.method), bytes(head.target), body))
                http.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                http.send(h11.EndOfMessage())
                if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                    return found, True
                http.start_next_cycle()
            elif event is h11.NEED_DATA:
                return found, False
            else:
                return found, True
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        return found, True


def run_request(data: bytes) -> None:
    served, refused, ended = drive([data])
    again = drive(cuts(data))
    assert again == (served, refused, ended), (again, (served, refused, ended))
    theirs, gave_up = requests_by_h11(data)
    for mine, other in zip(served, theirs, strict=False):
        assert mine[0] == other[0]
        assert mine[1].partition(b"?") == _origin(other[1]).partition(b"?") or mine[1] + b"?" == _origin(other[1])
        assert mine[2] == other[2], "another body"
    assert len(served) <= len(theirs) or gave_up, "more requests than others see"
    assert len(served) >= len(theirs) or refused or ended, "fewer requests than others see"


def _origin(target: bytes) -> bytes:
    try:
        return origin(target)
    except Fault:
        return b"none"


# -- chunks -------------------------------------------------------------------------------------------------------------

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_TRAILERS = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")


def model(data: bytes) -> tuple[bytes, bytes] | None:
    """(body, rest) of a chunked body that is whole."""
    body, at = b"", 0
    while True:
        size = _SIZE.match(data, at)
        if size is None:
            return None
        length, at = int(size[1], 16), size.end()
        if length == 0:
            end = _TRAILERS.match(data, at)
            return None if end is None else (body, data[end.end() :])
        if length > LIMIT or data[at + length : at + length + 2] != b"\r\n":
            return None
        body += data[at : at + length]
        at += length + 2


def decode(pieces: list[bytes]) -> tuple[bytes, bytes] | str:
    """(body, rest), or what became of it."""
    chunked = Chunked(LIMIT)
    for number, piece in enumerate(pieces):
        try:
            if chunked.feed(piece):
                return chunked.body, chunked.rest + b"".join(pieces[number + 1 :])
        except Fault:
            return "refused"
    return "more"


def run_chunked(data: bytes) -> None:
    whole, again = decode([data]), decode(cuts(data))
    assert whole == again, (whole, again)
    if len(data) < 4096:
        assert (None if isinstance(whole, str) else whole) == model(data)


# -- answers ------------------------------------------------------------------------------------------------------------


class Asker:
    """A `Receiver` that remembers."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.outcome = ""

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        assert not self.status and not self.outcome
        self.status = status

    def response_data(self, data: bytes) -> None:
        assert data and self.status and not self.outcome
        self.body += data

    def response_end(self) -> None:
        assert self.status and not self.outcome
        self.outcome = "whole"

    def response_failed(self, fault: WorkerFault) -> None:
        assert not self.outcome
        self.outcome = "failed"

    def worker_slow(self) -> None:
        pass


def receive(pieces: list[bytes]) -> tuple[Asker, bool]:
    """What the asker gets until the worker closes, and whether the connection would be used again before that."""
    here = bench()
    pool, asker = here.pool, Asker()
    connection, transport = Outbound(pool), Memory()
    pool.open += 1
    pool._busy.add(connection)
    connection.connection_made(transport)
    connection.request(asker, b"GET / HTTP/1.1\r\nHost: g\r\n\r\n", b"")
    pool.outbox.flush()
    for piece in pieces:
        if transport.closed:
            break
        connection.data_received(piece)
    kept = pool.idle == 1 and not transport.closed
    connection.connection_lost(None)
    here.turn()
    assert (pool.open, pool.idle, len(pool._busy)) == (0, 0, 0)
    assert asker.outcome
    return asker, kept


def answer_by_h11(data: bytes) -> tuple[int, bytes, str]:
    """(status, body, outcome) as h11 reads it; the outcome is whole, refused, or cut where the end of the data is too early."""
    http, status, body = h11.Connection(h11.CLIENT), 0, b""
    http.send(h11.Request(method="GET", target="/", headers=[("host", "g")]))
    http.send(h11.EndOfMessage())
    ending = False
    http.receive_data(data)
    try:
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                ending = True
                http.receive_data(b"")
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return status, body, "whole"
            elif not isinstance(event, h11.InformationalResponse):
                return status, body, "refused"
    except h11.RemoteProtocolError:
        return status, body, "cut" if ending else "refused"


def run_response(data: bytes) -> None:
    (mine, kept), (again, _) = receive([data]), receive(cuts(data))
    if mine.outcome == "whole":
        assert (mine.status, mine.body, mine.outcome) == (again.status, again.body, again.outcome)
    else:
        assert again.outcome == "failed"
    status, body, outcome = answer_by_h11(data)
    if mine.outcome == "whole":
        assert outcome != "cut", "others see that there is more to come"
        if outcome == "whole":
            assert (mine.status, mine.body) == (status, body)
    assert not kept or mine.outcome == "whole"


HEADS = [
    b"Host: g\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Expect: 100-continue\r\n",
    b"POST /a HTTP/1.1\r\n",
    b"GET http://h/b?c HTTP/1.1\r\n",
    b"HTTP/1.0",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 100 Go\r\n\r\n",
    b"HTTP/1.1 204 No\r\n",
    b"hello",
    b"5\r\nhello\r\n",
    b"0\r\n\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"5;a=b\r\n",
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b"\r\n\r\n", b"\r\n ", b"chunked", b"\x80", b"\x0b"),
]
POSTS = [
    b"POST /a HTTP/1.1\r\nHost: g\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /a HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    b"GET /b HTTP/1.1\r\nHost: g\r\n\r\n",
    b"GET /a?b=c HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET http://g/b HTTP/1.1\r\nHost: g\r\nConnection: close\r\n\r\n",
]
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Go\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;a\r\nhello\r\n0\r\nX: y\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nhello",
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 304 No\r\nContent-Length: 5\r\nConnection: close\r\n\r\n",
]
TARGETS = {
    "request": Target(run_request, POSTS, HEADS),
    "chunked": Target(
        run_chunked, [b"5\r\nhello\r\n0\r\n\r\nrest", b"a;b=c\r\n0123456789\r\n0\r\nX: y\r\n\r\n"], HEADS
    ),
    "response": Target(run_response, ANSWERS, HEADS),
}
