"""Outbound connections: a `Pool` for each worker, and `Outbound`, one connection that carries one exchange at a time.

Idle connections are taken last in, first out, so that a quiet pool shrinks. A connection that the worker closed while it
was idle is noticed when that happens; one that dies between our request and the first byte of the answer is told apart
(`Outbound.fresh`, `Outbound.answered`), because only then may the request be sent again to the same worker.

The answer reaches the exchange in at most three calls a read: head, joined data, end. Payload bytes are llhttp's, the
framing of the worker is gone.
"""

import asyncio
import errno
import socket
import ssl
from time import monotonic
from typing import Protocol, cast

import httptools

from gateway.errors import Malformed, NoConnection, Refused, Reset, Stalled, Unresolved, WorkerFault
from gateway.http.limits import Outward
from gateway.http.outbox import Outbox

_LENGTHS = (b"content-length", b"transfer-encoding")


class Receiver(Protocol):
    """Who sent the request."""

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Final status and fields (names as sent, repeats included)."""

    def response_data(self, data: bytes) -> None:
        """Payload bytes, at least one."""

    def response_end(self) -> None:
        """The answer is complete."""

    def response_failed(self, fault: WorkerFault) -> None:
        """The answer will not be completed; nothing else is called after it."""

    def worker_slow(self) -> None:
        """The worker does not take our request as fast as we send it."""


class Outbound(asyncio.Protocol):
    """One connection to a worker."""

    __slots__ = (
        "_complete",
        "_doubt",
        "_fields",
        "_head_bytes",
        "_headed",
        "_keep",
        "_parser",
        "_pieces",
        "_sized",
        "_started",
        "_status",
        "answered",
        "counted",
        "fresh",
        "idle_since",
        "pool",
        "receiver",
        "transport",
    )

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.receiver: Receiver | None = None
        self.fresh = True
        """Whether the present request is the first on this connection."""
        self.answered = False
        """Whether a byte of the present answer has come."""
        self.idle_since = 0.0
        self.counted = True
        """Whether `Pool.open` counts it."""
        self._parser: httptools.HttpResponseParser | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._status = 0
        self._head_bytes = 0
        self._doubt = ""
        self._headed = False
        self._keep = False
        self._started = False
        self._complete = False
        self._sized = False

    # -- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _watch(transport)
        if not self.counted:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        # It has callbacks of ours: each would keep the other until garbage is collected, which is seldom.
        self._parser = None
        self.pool.lost(self)
        receiver, self.receiver = self.receiver, None
        if receiver is None:
            return
        if self._started and not self._sized and exc is None:
            receiver.response_end()
        else:
            receiver.response_failed(Reset("the worker closed the connection before its answer was complete"))

    def pause_writing(self) -> None:
        if self.receiver is not None:
            self.receiver.worker_slow()

    def data_received(self, data: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            # Nothing was asked: whatever this is, the next answer must not begin with it.
            self.close()
            return
        self.answered = True
        begun = self._started
        if not begun and self._grows(data):
            return
        parser = self._parser
        assert parser is not None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._complete:
                self._fail(Malformed("the worker's answer is not HTTP"))
                return
            self._sized = False
        if self._doubt:
            self._fail(Malformed(f"the worker's answer has {self._doubt}"))
            return
        if self._headed:
            # Not from inside the parser, which would take a defect of ours for a malformed answer.
            self._headed = False
            receiver.response_head(self._status, self._fields)
        pieces = self._pieces
        if pieces and self.receiver is receiver:
            self._pieces = []
            self._head_bytes = 0
            receiver.response_data(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        elif begun and not self._complete and self._grows(data):
            # Extensions and trailers without end.
            return
        if self._complete and self.receiver is receiver:
            self._release(receiver)

    def _grows(self, data: bytes) -> bool:
        """Count what is no payload; true if it is too much, which is told to the receiver."""
        self._head_bytes += len(data)
        if self._head_bytes <= self.pool.limits.head:
            return False
        self._fail(Malformed("the head of the worker's answer is too large"))
        return True

    # -- llhttp -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Callback of llhttp."""
        if self._complete:
            # More than one answer to one request: finish ours, do not keep the connection.
            self._sized = False
        else:
            self._fields = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """Callback of llhttp; also called for trailers, which stop here."""
        if not self._started:
            self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        """Callback of llhttp."""
        assert self._parser is not None
        if self._complete or self.receiver is None:
            return
        self._status = status = self._parser.get_status_code()
        if not 100 <= status <= 599:
            self._doubt = "a status that does not exist"
        if 100 <= status < 200:
            if any(name.lower() in _LENGTHS for name, _ in self._fields):
                # It has none; llhttp would read it for some of these statuses.
                self._doubt = "an interim answer with a length"
            return
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            self._doubt = "a version that is not spoken here"
        self._started = True
        framed = 0
        for name, value in self._fields:
            low = name.lower()
            if low in _LENGTHS:
                framed += 1
                if low == b"transfer-encoding" and value.strip().lower() != b"chunked":
                    self._doubt = "a transfer coding that was not asked for"
        if framed > 1:
            self._doubt = "more than one length"
        self._sized = framed > 0 or status in (204, 304)
        # Asked here and not at the end: llhttp forgets it with the message.
        self._keep = self._parser.should_keep_alive()
        self._headed = True

    def on_body(self, data: bytes) -> None:
        """Callback of llhttp."""
        if not self._complete:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Callback of llhttp; also called after an interim answer."""
        if self._status >= 200:
            self._complete = True

    # -- for the exchange -------------------------------------------------------------------------------------------

    def request(self, receiver: Receiver, head: bytes, body: bytes) -> None:
        """Send one request."""
        assert self.transport is not None
        self.receiver = receiver
        self.answered = False
        self._head_bytes = 0
        self._doubt = ""
        self._headed = self._started = self._complete = self._sized = False
        self._pieces = []
        self._status = 0
        self._parser = httptools.HttpResponseParser(self)
        # One buffer is cheaper than two until copying it costs more than a second write.
        if len(body) <= 32768:
            self.pool.outbox.write(self.transport, head + body)
        else:
            self.transport.writelines((head, body))

    def finish_bodyless(self) -> None:
        """The answer to HEAD has its fields: that is all of it. The connection is not used again."""
        receiver, self.receiver = self.receiver, None
        self.close()
        if receiver is not None:
            receiver.response_end()

    def slow(self) -> None:
        """Stop reading: the client does not keep up."""
        if self.transport is not None:
            self.transport.pause_reading()

    def ready(self) -> None:
        """Read again."""
        if self.transport is not None:
            self.transport.resume_reading()

    def close(self) -> None:
        """Drop the connection and whoever waits on it, without telling them. For the worker this is an abort."""
        self.receiver = None
        if self.transport is not None:
            self.transport.abort()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return self.transport is not None and not self.transport.is_closing()

    def _release(self, receiver: Receiver) -> None:
        self.receiver = None
        self.fresh = False
        self._parser = None
        if self._keep and self._sized and self.reusable:
            self.pool.put(self)
        else:
            self.close()
        receiver.response_end()

    def _fail(self, fault: WorkerFault) -> None:
        receiver = self.receiver
        self.close()
        if receiver is not None:
            receiver.response_failed(fault)


OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
"""What this machine lacks: no worker's fault."""


def _why(error: OSError | UnicodeError) -> WorkerFault | NoConnection:
    """What a connection that could not be made says, and of whom."""
    if isinstance(error, ssl.SSLError):
        return Refused("TLS with the worker failed")
    if isinstance(error, socket.gaierror | UnicodeError):
        return Unresolved("the worker's name could not be resolved")
    if error.errno in OURS:
        return NoConnection("no more connections can be made from here", retry_after=1)
    return Refused("the worker refused the connection")


def _watch(transport: asyncio.BaseTransport) -> None:
    """Have the kernel notice a peer that is gone without a word: power loss, a partition."""
    connected = transport.get_extra_info("socket")
    if connected is None:
        return
    try:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    except OSError:
        pass


class Pool:
    """Connections to one worker."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: ssl.SSLContext | None = None,
        limits: Outward | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.tls = tls
        self.limits = limits or Outward()
        self.open = 0
        """Connections that exist, idle ones and those being made included."""
        self.closed = False
        self._addresses: list[str] = []
        self._idle: list[Outbound] = []
        self._busy: set[Outbound] = set()
        self._loop = asyncio.get_running_loop()
        self.outbox = outbox or Outbox(self._loop)

    @property
    def idle(self) -> int:
        """Idle connections."""
        return len(self._idle)

    def take(self) -> Outbound | None:
        """An idle connection, the one used last; ``None`` if there is none."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.reusable:
                self._busy.add(connection)
                return connection
        return None

    async def connect(self) -> Outbound:
        """A new connection. Raises `NoConnection` at the bound, `Refused` or `Stalled` (a `WorkerFault`)."""
        if self.open >= self.limits.connections or self.closed:
            raise NoConnection("all connections to the worker are in use", retry_after=1)
        self.open += 1
        connection = Outbound(self)
        try:
            async with asyncio.timeout(self.limits.connect_seconds):
                await self._open(connection)
        except TimeoutError:
            self._give_up(connection)
            raise Stalled("the worker did not accept a connection in time") from None
        except (OSError, UnicodeError) as error:
            self._give_up(connection)
            raise _why(error) from None
        except BaseException:
            self._give_up(connection)
            raise
        self._busy.add(connection)
        return connection

    async def _open(self, connection: Outbound) -> None:
        """Connect to one of the addresses that were found last; they are looked up only when there are none."""
        addresses = self._addresses or await self.resolve()
        # A variable that kept the error would keep, with its traceback, this frame and so itself, until garbage is collected.
        for left, address in zip(reversed(range(len(addresses))), addresses, strict=True):
            try:
                await self._loop.create_connection(
                    lambda: connection,
                    address,
                    self.port,
                    ssl=self.tls,
                    server_hostname=self.host if self.tls is not None else None,
                )
                return
            except OSError:
                if not left:
                    raise
        raise OSError("no address")

    async def resolve(self) -> list[str]:
        """Look the worker's addresses up and keep them; called from time to time, so that no request has to wait for it.

        Raises `OSError`; what was known before stays then.
        """
        found = await self._loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        self._addresses = list(dict.fromkeys(str(row[4][0]) for row in found))
        return self._addresses

    def _give_up(self, connection: Outbound) -> None:
        """Nobody wants it any more. The loop may make it all the same; it closes itself then."""
        self._discount(connection)
        connection.close()

    def _discount(self, connection: Outbound) -> None:
        if connection.counted:
            connection.counted = False
            self.open -= 1

    def put(self, connection: Outbound) -> None:
        """Take back a connection whose answer is complete."""
        self._busy.discard(connection)
        if self.closed or len(self._idle) >= self.limits.keep_idle:
            connection.close()
            return
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def lost(self, connection: Outbound) -> None:
        """A connection ended."""
        self._discount(connection)
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        """Close connections that were idle for too long; the oldest stand first."""
        until = now - self.limits.keep_seconds
        while self._idle and self._idle[0].idle_since < until:
            self._idle.pop(0).close()

    def close_idle(self) -> None:
        """Forget idle connections: the worker restarted."""
        for connection in self._idle[:]:
            connection.close()
        self._idle.clear()

    def close(self) -> None:
        """Use no more; running exchanges end by themselves."""
        self.closed = True
        self.close_idle()
