"""One answer on its way to a client: framing of our own round a worker's bytes, which stay as they are.

A stream of events is passed on as it comes, each read as one chunk, but only up to the end of the last whole event: an
error event must be able to follow when the worker dies inside one. The unfinished rest waits for the next read, up to a
bound. The head goes out with the first bytes of the body, in one write.
"""

import re
from collections import deque
from collections.abc import Callable

from gateway.http.incoming import Incoming
from gateway.http.server import Inbound
from gateway.http.sse import boundary, spans

FIRST = 2048
COMMENT = b": keep-alive\n\n"

USAGE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
"""What the last event before the end has, and no other, when usage was asked for."""
_COUNTS = re.compile(rb'"usage"\s*:\s*\{')


def without_usage(data: bytes) -> bytes:
    """Whole events without the one that only tells usage."""
    kept, past = [], 0
    for start, end, past in spans(data):
        event = data[start:end]
        if not (USAGE.search(event) and _COUNTS.search(event)):
            kept.append(data[start:past])
    return b"".join(kept) + data[past:]


class Relay:
    """See the module's head.

    ``head``: complete head of the answer; ``events``: whether the body is a stream of events; ``sized``: whether its length
    is in the head; ``most``: bytes of an unfinished event that are held back.
    """

    __slots__ = (
        "_chunked",
        "_held",
        "_most",
        "client",
        "events",
        "first",
        "head",
        "incoming",
        "tail",
        "unasked",
        "usage",
        "veil",
    )

    def __init__(
        self, client: Inbound, incoming: Incoming, head: bytes, *, events: bool, sized: bool, most: int
    ) -> None:
        self.client = client
        self.incoming = incoming
        self.head = head
        self.events = events
        self._chunked = not (sized or incoming.old or incoming.method == b"HEAD")
        self._held = b""
        self._most = most
        self.tail: deque[bytes] = deque(maxlen=4)
        """The last pieces that were passed on: of a stream, whole events."""
        self.unasked = False
        """There will be events that the client does not get as they are."""
        self.usage = True
        """Of those: what only tells usage is left out."""
        self.veil: Callable[[bytes], bytes] | None = None
        """Of those: how errors are told."""
        self.first = b""
        """How the answer begins: up to `FIRST` bytes of its first piece."""

    @property
    def untouched(self) -> bool:
        """Nothing was written yet."""
        return bool(self.head)

    def data(self, data: bytes) -> None:
        """Payload of the worker's answer."""
        if self.events:
            if self._held:
                data = self._held + data
                self._held = b""
            if not data.endswith(b"\n\n"):
                cut = boundary(data)
                if cut == 0 and len(data) <= self._most:
                    self._held = data
                    return
                if 0 < cut < len(data) and len(data) - cut <= self._most:
                    self._held = data[cut:]
                    data = data[:cut]
        self._send(data)

    def _send(self, data: bytes) -> None:
        if not self.tail:
            self.first = data[:FIRST]
        self.tail.append(data)
        if self.unasked:
            data = self.shown(data)
            if not data:
                return
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self.head:
            framed = self.head + framed
            self.head = b""
        self.client.send(framed)

    def follow(self, early: "Relay") -> None:
        """Go on where ``early`` left off, which has sent a head and nothing of the answer."""
        self.head, self._chunked = early.head, early._chunked

    def shown(self, data: bytes) -> bytes:
        """What the client gets of whole events, some of which it does not get as they are."""
        if self.veil is not None:
            data = self.veil(data)
        return without_usage(data) if self.usage and USAGE.search(data) else data

    def comment(self) -> None:
        """A comment that tells the client, and whatever stands between, that the answer is still to come."""
        framed = b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if self._chunked else COMMENT
        self.client.send(self.head + framed)
        self.head = b""

    def finish(self) -> None:
        """The answer is complete."""
        if self._held:
            held, self._held = self._held, b""
            self._send(held)
        head, self.head = self.head, b""
        if head or self._chunked:
            self.client.send(head + (b"0\r\n\r\n" if self._chunked else b""))

    def fail(self, event: bytes) -> None:
        """End a stream of events with an error event; the connection is closed after it."""
        self._held = b""
        if self.tail and boundary(self.tail[-1]) != len(self.tail[-1]):
            # An event too large to be held was cut: ours must not become its last line.
            event = b"\n\n" + event
        self.incoming.close = True
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if self._chunked else event
        self.client.send(self.head + framed)
        self.head = b""
