"""Inbound connections: one `Inbound` each, from bytes to `Incoming` requests and back.

The head is found and checked as raw bytes before llhttp sees it, because a parser shows what it understood, not what was
there: bare CR or LF, NUL and folded lines are refused whatever the parser thinks of them. llhttp then checks the grammar
and cuts the fields; `incoming.frame` decides the framing from them. Whatever is refused there is 4xx and close.

    IDLE -> HEAD -> BODY -> BUSY (an exchange answers; what comes meanwhile is kept, up to a bound) -> IDLE ...
                                \\-> LINGER (refused: what still comes is dropped) -> CLOSED

A connection has at most one exchange at a time, so pipelined requests are answered in order. The exchange is told when
the client leaves and when it reads too slowly; it writes through `send`.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any, Protocol, cast

import httptools

from gateway.errors import (
    BadRequest,
    Crowded,
    Fault,
    HeadTooLarge,
    NotImplementedHere,
    TimedOut,
    TooLarge,
    WrongVersion,
)
from gateway.http.chunked import Chunked
from gateway.http.incoming import NOBODY, Incoming, Peer, Shape, frame, origin
from gateway.http.limits import Inward
from gateway.http.outbox import Outbox

IDLE, HEAD, BODY, BUSY, LINGER, CLOSED = range(6)

_EMPTY_LINES = re.compile(rb"(?:\r\n)*")
_REQUEST_LINE = re.compile(rb"[!-~]+ [!-~\x80-\xff]+ [!-~]+\r\n")
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,18})\r\n")


class Owner(Protocol):
    """Who answers a request."""

    def client_gone(self) -> None:
        """The client left; nothing can be sent any more."""

    def client_slow(self) -> None:
        """The client does not keep up: stop producing."""

    def client_ready(self) -> None:
        """The client caught up."""


class Inbound(asyncio.Protocol):
    """One client connection; see the module's head."""

    __slots__ = (
        "_chunked",
        "_counted",
        "_fields",
        "_gathered",
        "_left",
        "_parser",
        "_peer",
        "_received",
        "_shape",
        "_shape_key",
        "_since",
        "_target",
        "buffer",
        "deadline",
        "incoming",
        "loop",
        "owner",
        "phase",
        "server",
        "slow",
        "transport",
    )

    def __init__(self, server: "Server") -> None:
        self.server = server
        self.loop = server.loop
        self.transport: asyncio.Transport | None = None
        self.phase = IDLE
        self.buffer = b""
        self.deadline = inf
        self.owner: Owner | None = None
        self.incoming: Incoming | None = None
        self.slow = False
        self._fields: list[tuple[bytes, bytes, bytes]] = []
        self._target = b""
        self._shape: Shape | None = None
        self._shape_key = (b"", 0)
        self._peer: Peer | None = None
        self._chunked: Chunked | None = None
        self._left = 0
        self._gathered = bytearray()
        self._counted = 0
        self._received = 0
        self._since = 0.0

    # -- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.deadline = self.server.clock() + self.server.limits.head_seconds
        if not self.server.admit(self):
            self.refuse(self.server.full())

    def connection_lost(self, exc: Exception | None) -> None:
        self.phase = CLOSED
        self.transport = None
        self.server.connections.discard(self)
        self.body_gone()
        self.buffer = b""
        owner, self.owner = self.owner, None
        if owner is not None:
            owner.client_gone()

    def eof_received(self) -> bool | None:
        # A client that shut down its sending side is taken as gone: a killed one looks the same.
        return None

    def pause_writing(self) -> None:
        self.slow = True
        self.deadline = self.server.clock() + self.server.limits.stalled_seconds
        if self.owner is not None:
            self.owner.client_slow()

    def resume_writing(self) -> None:
        self.slow = False
        limits = self.server.limits
        if self.phase == BUSY:
            self.deadline = inf
        elif self.phase in (IDLE, HEAD):
            wait = limits.idle_seconds if self.phase == IDLE else limits.head_seconds
            self.deadline = self.server.clock() + wait
            if self.buffer and self.transport is not None:
                self.transport.resume_reading()
                self.loop.call_soon(self._resume)
        if self.owner is not None:
            self.owner.client_ready()

    def data_received(self, data: bytes) -> None:
        phase = self.phase
        if phase == BODY:
            self._body(data)
        elif phase in (IDLE, HEAD) and not self.slow:
            self._head(self.buffer + data if self.buffer else data)
        elif phase in (IDLE, HEAD, BUSY):
            # Whoever does not take the answers that there are gets no more of them.
            self.buffer += data
            if len(self.buffer) > self.server.limits.pipelined:
                # Not reading on would be kinder, but then nothing would tell that the client has left.
                self.abort_with_owner()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _head(self, data: bytes) -> None:
        if data.startswith(b"\r\n"):
            data = data[_EMPTY_LINES.match(data).end() :]  # type: ignore[union-attr]
        end = data.find(b"\r\n\r\n")
        limits = self.server.limits
        if end < 0:
            self.buffer = data
            if not data:
                return
            if len(data) > limits.head:
                self.refuse(HeadTooLarge(f"the head is over the limit of {limits.head} bytes"))
            elif data.count(b"\n") != data.count(b"\r\n"):
                self.refuse(BadRequest("a line of the head does not end in CRLF"))
            elif self.phase == IDLE:
                self.phase = HEAD
                self.deadline = self.server.clock() + limits.head_seconds
            return
        end += 4
        self.phase = HEAD
        try:
            shape = self._shape_of(data[:end])
            rest = data[end:]
            self.buffer = b""
            self._begin_body(shape, rest)
        except Fault as fault:
            self.refuse(fault)

    def _shape_of(self, head: bytes) -> Shape:
        """The head, read; not again if only its length differs from the one before."""
        found = _LENGTH.search(head)
        # The place of the digits is kept too: a head without any would else look like one whose digits were cut out.
        key = (head, 0) if found is None else (head[: found.start(1)] + head[found.end(1) :], found.start(1))
        shape = self._shape
        if shape is None or key != self._shape_key:
            shape = self._parse(head)
            frame(shape)
            self._shape, self._shape_key = shape, key
        elif found is not None:
            # A head with two lengths was never accepted, so equal keys have their one length in the same place.
            shape.length = int(found[1])
        return shape

    def _parse(self, head: bytes) -> Shape:
        limits = self.server.limits
        if len(head) > limits.head:
            raise HeadTooLarge(f"the head is over the limit of {limits.head} bytes")
        lines = head.count(b"\r\n")
        if head.count(b"\n") != lines or head.count(b"\r") != lines:
            raise BadRequest("a bare CR or LF in the head")
        if lines > limits.fields + 2:
            raise HeadTooLarge(f"more than {limits.fields} fields")
        if b"\0" in head or b"\r\n " in head or b"\r\n\t" in head:
            raise BadRequest("a NUL or a folded line in the head")
        if _REQUEST_LINE.match(head) is None:
            # llhttp takes more than one space, and a version that is not there.
            raise BadRequest("malformed request line")
        self._fields = []
        self._target = b""
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            raise NotImplementedHere("upgrades and tunnels are not supported") from None
        except httptools.HttpParserError as error:
            if "version" in str(error).lower():
                raise WrongVersion("only HTTP/1.1 and HTTP/1.0 are spoken here") from None
            raise BadRequest("malformed request head") from None
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise WrongVersion("only HTTP/1.1 and HTTP/1.0 are spoken here")
        return Shape(parser.get_method(), origin(self._target), self._fields, version == "1.0", self._who())

    def _who(self) -> Peer:
        """Once a connection: what it tells of its other end does not change."""
        if self._peer is None:
            self._peer = NOBODY if self.transport is None else peer_of(self.transport)
        return self._peer

    def on_url(self, url: bytes) -> None:
        """Callback of llhttp; may come in pieces."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Callback of llhttp."""
        self._fields.append((name.lower(), name, value.strip(b" \t")))

    def _begin_body(self, shape: Shape, rest: bytes) -> None:
        length, chunked = shape.length, shape.chunked
        incoming = self.incoming = Incoming(shape)
        limits = self.server.limits
        if length > limits.body:
            raise TooLarge(f"the body is over the limit of {limits.body} bytes")
        if not length and not chunked:
            self.buffer = rest
            self._dispatch(incoming)
            return
        self._chunked = Chunked(limits.body) if chunked else None
        self._left = length
        self._gathered = bytearray()
        if not chunked and len(rest) >= length:
            self._count(length)
            incoming.body = rest[:length]
            self.buffer = rest[length:]
            self._dispatch(incoming)
            return
        self.phase = BODY
        self._received = 0
        self._since = self.server.clock()
        self.deadline = self._since + limits.body_seconds
        if shape.expects and not rest and self.transport is not None:
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if rest:
            self._body(rest)

    def _body(self, data: bytes) -> None:
        incoming = self.incoming
        assert incoming is not None
        try:
            self._count(len(data))
            complete = self._chunked is not None and self._chunked.feed(data)
        except Fault as fault:
            self.refuse(fault)
            return
        if self._chunked is not None:
            if complete:
                incoming.body, self.buffer = self._chunked.body, self._chunked.rest
                self._chunked = None
                self._dispatch(incoming)
                return
        else:
            left = self._left
            if len(data) >= left:
                self._gathered += data if len(data) == left else data[:left]
                self.buffer = data[left:]
                incoming.body, self._gathered = bytes(self._gathered), bytearray()
                self._dispatch(incoming)
                return
            # Not a list of pieces: a client that sends them byte by byte would have them cost many times their size.
            self._gathered += data
            self._left = left - len(data)
        now = self.server.clock()
        self._received += len(data)
        limits = self.server.limits
        late = now - self._since - limits.body_seconds
        if late > 0 and self._received < late * limits.body_rate:
            self.refuse(TimedOut("the body comes too slowly"))
        else:
            self.deadline = now + limits.body_seconds

    def _dispatch(self, incoming: Incoming) -> None:
        self.phase = BUSY
        self.deadline = inf
        if self.server.parting:
            incoming.close = True
        self.server.serve(incoming, self)

    # -- answering --------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Bytes of the answer, framed by the caller. Nothing happens once the client is gone."""
        if self.transport is not None:
            self.server.outbox.write(self.transport, data)

    def done(self) -> None:
        """The answer is complete: take the next request, or close."""
        incoming, self.incoming, self.owner = self.incoming, None, None
        self.body_gone()
        if self.phase != BUSY or self.transport is None:
            return
        if incoming is None or incoming.close or self.server.closing:
            self.shut()
            return
        self.phase = IDLE
        self.deadline = self.server.clock() + (
            self.server.limits.stalled_seconds if self.slow else self.server.limits.idle_seconds
        )
        if self.buffer:
            self.transport.resume_reading()
            # Not from here: a client that pipelines a thousand requests must not recurse a thousand deep. What is read
            # before the call comes joins the buffer, so that requests stay in order.
            self.loop.call_soon(self._resume)

    def _resume(self) -> None:
        if self.phase in (IDLE, HEAD) and self.buffer and not self.slow:
            self._head(self.buffer)

    def shut(self) -> None:
        """Close when what was written has been sent."""
        self.phase = CLOSED
        # Closing waits until all is written, and a client that does not read must not keep it waiting.
        self.deadline = self.server.clock() + self.server.limits.stalled_seconds
        if self.transport is not None:
            self.server.outbox.flush()
            self.transport.close()

    def abort(self) -> None:
        """Close at once: the answer cannot be completed, and the client must not think that it was."""
        self.owner = None
        self.phase = CLOSED
        if self.transport is not None:
            self.server.outbox.flush()
            self.transport.abort()

    def abort_with_owner(self) -> None:
        """Close at once, and tell whoever answers that the client is gone."""
        owner = self.owner
        self.abort()
        if owner is not None:
            owner.client_gone()

    def body_gone(self) -> None:
        """The present request's body is needed no more."""
        self.server.body_bytes -= self._counted
        self._counted = 0

    def _count(self, size: int) -> None:
        """Bytes of a body came. Raises `Crowded` when all bodies together are over their bound."""
        self._counted += size
        self.server.body_bytes += size
        if self.server.body_bytes > self.server.limits.bodies:
            raise Crowded("too much is being received at once", retry_after=1)

    def refuse(self, fault: Fault) -> None:
        """Answer a request that could not be read, then close, reading on for a moment so that the answer arrives."""
        if self.transport is None or self.phase in (LINGER, CLOSED):
            return
        self.phase = LINGER
        self.buffer = b""
        self._gathered = bytearray()
        self._chunked = None
        self.deadline = self.server.clock() + self.server.limits.linger_seconds
        self.body_gone()
        self.server.refused(fault)
        path = self.incoming.path if self.incoming is not None else b""
        self.send(self.server.render(fault, path))
        self.server.outbox.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def overdue(self) -> None:
        """The deadline passed."""
        if self.phase == HEAD:
            self.refuse(TimedOut("the request's head did not arrive in time"))
        elif self.phase == BODY:
            self.refuse(TimedOut("the request's body did not arrive in time"))
        elif self.phase == BUSY or (self.phase == IDLE and self.slow):
            self.abort_with_owner()
        elif self.transport is not None:
            if self.phase == IDLE and not self.transport.get_write_buffer_size():
                self.transport.close()
            else:
                self.transport.abort()


def peer_of(transport: asyncio.Transport) -> Peer:
    """What a connection tells of its other end."""
    name = transport.get_extra_info("peername")
    secured = transport.get_extra_info("ssl_object")
    # Of a certificate that nobody checked there is nothing in it.
    shown = secured.getpeercert() if secured is not None else None
    return Peer(name[0] if isinstance(name, tuple) and name else "", subjects_of(shown) if shown else ())


def subjects_of(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """URIs, DNS names and the common name of a certificate, as `ssl` tells it."""
    names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("URI", "DNS")]
    names += [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return tuple(dict.fromkeys(names))


class Server:
    """The listening side: connections, their deadlines, and what they have in common."""

    def __init__(
        self,
        serve: Callable[[Incoming, Inbound], None],
        render: Callable[[Fault, bytes], bytes],
        limits: Inward | None = None,
        refused: Callable[[Fault], None] = lambda fault: None,
        outbox: Outbox | None = None,
    ) -> None:
        self.serve = serve
        self.render = render
        """A whole response to a request for that path (empty if it is not known), head and body, ``connection: close``."""
        self.refused = refused
        self.limits = limits or Inward()
        self.loop = asyncio.get_running_loop()
        self.clock = monotonic
        self.body_bytes = 0
        """Bytes of bodies that are held now."""
        self.outbox = outbox or Outbox(self.loop)
        self.connections: set[Inbound] = set()
        self.closing = False
        self.parting = False
        """Connections end with the answer to their next request, and say so in it."""

    def admit(self, connection: Inbound) -> bool:
        """Count a new connection in; false when there are too many."""
        self.connections.add(connection)
        return len(self.connections) <= self.limits.connections

    def full(self) -> Fault:
        """What a connection over the limit is told."""
        return Crowded("too many connections", retry_after=1)

    def sweep(self, now: float) -> None:
        """End what is overdue; call it about once a second."""
        for connection in [c for c in self.connections if c.deadline <= now]:
            connection.deadline = inf
            connection.overdue()

    def close_idle(self) -> None:
        """Stop keeping connections alive: idle ones close now, busy ones after their answer."""
        self.closing = True
        for connection in list(self.connections):
            if connection.phase == IDLE:
                connection.shut()
