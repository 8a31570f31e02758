"""One request as the data plane hands it on, and what its head says about its framing.

Framing is decided from the fields alone, and anything that two servers could read differently is refused: that is all
there is to request smuggling.
"""

import re
from typing import NamedTuple

from gateway.errors import BadRequest, ExpectationFailed, NotImplementedHere

_AUTHORITY = re.compile(rb"[A-Za-z]+://[^/?]*")
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"host", b"connection", b"expect", b"upgrade"))


class Peer(NamedTuple):
    """Who is at the other end of a connection, as the connection itself tells."""

    address: str = ""
    """IP address; empty where there is none."""
    subjects: tuple[str, ...] = ()
    """Names in its certificate, which an authority that is trusted here signed."""


NOBODY = Peer()


class Shape:
    """The head of a request, read and checked; shared by all requests that differ from it in their length alone.

    Clients repeat themselves: on one connection request after request has the same head but for ``Content-Length``.
    Such a head is not read twice, and what others derive from it is kept with it (`memo`).
    """

    __slots__ = (
        "chunked",
        "close",
        "expects",
        "fields",
        "length",
        "memo",
        "method",
        "named",
        "old",
        "path",
        "peer",
        "query",
    )

    def __init__(
        self,
        method: bytes,
        target: bytes,
        fields: list[tuple[bytes, bytes, bytes]],
        old: bool,
        peer: Peer = NOBODY,
    ) -> None:
        self.method = method
        self.path, _, self.query = target.partition(b"?")
        self.fields = fields
        """(lower-case name, name as sent, value), in order, repeats included."""
        self.named = {low: value for low, _, value in reversed(fields)}
        """lower-case name -> value; of a repeated field the first. ``content-length`` is that of the first such request."""
        self.old = old
        """HTTP/1.0: no chunked answer."""
        self.close = old
        """Close after the answer."""
        self.length = 0
        self.chunked = False
        self.expects = False
        self.memo: dict[object, object] = {}
        self.peer = peer


class Incoming:
    """One request, complete with its body."""

    __slots__ = ("body", "close", "fields", "memo", "method", "named", "old", "path", "peer", "query")

    def __init__(self, shape: Shape) -> None:
        self.method = shape.method
        self.path = shape.path
        self.query = shape.query
        self.fields = shape.fields
        self.named = shape.named
        self.old = shape.old
        self.close = shape.close
        self.memo = shape.memo
        self.peer = shape.peer
        self.body = b""


def shown(path: bytes) -> str:
    """A path for people: of no more than a line."""
    return path[:200].decode("ascii", "replace")


def is_json(incoming: Incoming) -> bool:
    """Whether its fields say that its body is JSON."""
    return incoming.named.get(b"content-type", b"").lower().startswith(b"application/json")


def origin(target: bytes) -> bytes:
    """Origin form of a request target; absolute form is accepted as RFC 9112 section 3.2.2 demands."""
    if target.startswith(b"/"):
        return target
    low = target[:8].lower()
    if low.startswith((b"http://", b"https://")):
        authority = _AUTHORITY.match(target)
        rest = target[authority.end() :] if authority is not None else b""
        return rest if rest.startswith(b"/") else b"/" + rest
    if target == b"*":
        return target
    raise BadRequest("malformed request target")


def frame(shape: Shape) -> None:
    """Length, coding and expectation of a request, from its fields alone. Raises `Fault` for what could be read in two ways."""
    length = codings = host = expect = connection = None
    for low, _, value in shape.fields:
        if low not in _FRAMING:
            continue
        if low == b"content-length":
            if length is not None:
                raise BadRequest("Content-Length appears twice")
            length = value
        elif low == b"transfer-encoding":
            if codings is not None:
                raise BadRequest("Transfer-Encoding appears twice")
            codings = value
        elif low == b"host":
            if host is not None:
                raise BadRequest("Host appears twice")
            host = value
        elif low == b"upgrade":
            raise NotImplementedHere("upgrades are not supported")
        elif low == b"expect":
            expect = value
        else:
            connection = value if connection is None else connection + b"," + value
    if host is None and not shape.old:
        raise BadRequest("Host is missing")
    if connection is not None:
        options = {option.strip().lower() for option in connection.split(b",")}
        if b"close" in options:
            shape.close = True
        elif shape.old and b"keep-alive" in options:
            shape.close = False
    if codings is not None:
        if length is not None:
            raise BadRequest("both Content-Length and Transfer-Encoding")
        if shape.old:
            raise BadRequest("Transfer-Encoding in HTTP/1.0")
        if codings.lower() != b"chunked":
            raise BadRequest("the only transfer coding is chunked")
    size = 0
    if length is not None:
        if not length.isdigit() or len(length) > 18:
            raise BadRequest("malformed Content-Length")
        size = int(length)
    if expect is not None and expect.lower() != b"100-continue":
        raise ExpectationFailed("the only expectation is 100-continue")
    shape.length = size
    shape.chunked = codings is not None
    shape.expects = expect is not None and not shape.old
