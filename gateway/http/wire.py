"""Heads on the wire, in both directions: what is passed on, what stops here, what is ours."""

from gateway.http.incoming import Incoming

GUARDED_HEADERS = frozenset((b"x-data-parallel-rank",))
"""Fields that only the gateway may set; so is everything that begins with ``x-override-``."""

STATUS = {
    200: b"OK",
    201: b"Created",
    202: b"Accepted",
    204: b"No Content",
    304: b"Not Modified",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    417: b"Expectation Failed",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}

HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Fields of one connection, RFC 9110 section 7.6.1."""

_REQUEST_STOPS = HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"accept-encoding",
    b"x-request-id",
    b"x-warmroute-session",
}
_RESPONSE_STOPS = HOP | {b"content-length", b"x-request-id"}
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"cookie"))


def request_head(
    incoming: Incoming,
    base: bytes,
    authority: bytes,
    length: int,
    request_id: bytes,
    worker_key: str | None,
    keyed: bool,
    rank: int | None = None,
    extra: bytes = b"",
    traced: bool = False,
) -> bytes:
    """Head of the request to a worker. ``extra``: complete lines of this request alone; ``traced``: a traceparent is among
    them, in place of the client's.

    ``keyed``: credentials are the gateway's own, so the client's stop here. A worker's key takes their place. ``rank``: the
    data-parallel rank to use, where there are several: the engine's own balancer would undo the choice.
    """
    key = (authority, base, worker_key, keyed, rank, traced)
    start = incoming.memo.get(key)
    if start is None:
        if len(incoming.memo) > MEMO:
            # One for each worker that this connection's requests went to: with many workers, not worth keeping.
            incoming.memo.clear()
        start = _request_start(incoming, base, authority, worker_key, keyed, rank, traced)
        incoming.memo[key] = start
    assert isinstance(start, bytes)
    if length or incoming.method in _WITH_BODY:
        return b"%b%b\r\n%bcontent-length: %d\r\n\r\n" % (start, request_id, extra, length)
    return b"%b%b\r\n%b\r\n" % (start, request_id, extra)


OURS = b"x-warmroute-session="
"""How the gateway's own cookie begins."""
MEMO = 16
_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))


def _request_start(
    incoming: Incoming,
    base: bytes,
    authority: bytes,
    worker_key: str | None,
    keyed: bool,
    rank: int | None,
    traced: bool,
) -> bytes:
    """The head up to the value of ``x-request-id``."""
    target = base + incoming.path
    if incoming.query:
        target += b"?" + incoming.query
    parts = [incoming.method, b" ", target, b" HTTP/1.1\r\nhost: ", authority, b"\r\naccept-encoding: identity\r\n"]
    strips = keyed or worker_key is not None
    named: set[bytes] = set()
    for low, _, value in incoming.fields:
        if low == b"connection":
            named |= {option.strip().lower() for option in value.split(b",")}
    for low, name, value in incoming.fields:
        if low in _REQUEST_STOPS or low in named or (strips and low in _CREDENTIALS):
            continue
        if traced and low == b"traceparent":
            continue
        if low in GUARDED_HEADERS or low.startswith(b"x-override-") or (b"_" in low and _guarded(low)):
            continue
        if low == b"cookie" and OURS in value:
            value = b"; ".join(part for part in map(bytes.strip, value.split(b";")) if not part.startswith(OURS))
            if not value:
                continue
        parts += (name, b": ", value, b"\r\n")
    if worker_key is not None:
        parts += (b"authorization: Bearer ", worker_key.encode(), b"\r\n")
    if rank is not None:
        parts.append(b"x-data-parallel-rank: %d\r\n" % rank)
    parts.append(b"x-request-id: ")
    return b"".join(parts)


def _guarded(low: bytes) -> bool:
    """Servers read ``_`` as ``-`` in field names: what stops here does so in that spelling too."""
    plain = low.replace(b"_", b"-")
    return plain in GUARDED_HEADERS or plain in _REQUEST_STOPS or plain.startswith(b"x-override-")


def response_head(
    status: int,
    fields: list[tuple[bytes, bytes]],
    length: bytes | None,
    sse: bool,
    incoming: Incoming,
    told: bytes,
    request_id: bytes,
) -> bytes:
    """Head of the answer to the client; ``length`` is the body's size if known, ``told`` complete extra lines."""
    parts = [b"HTTP/1.1 %d " % status, STATUS.get(status, b"Status"), b"\r\n"]
    named: set[bytes] = set()
    for name, value in fields:
        if name.lower() == b"connection":
            named |= {option.strip().lower() for option in value.split(b",")}
    unbuffered = uncached = False
    for name, value in fields:
        low = name.lower()
        if low in _RESPONSE_STOPS or low in named:
            continue
        unbuffered = unbuffered or low == b"x-accel-buffering"
        uncached = uncached or low == b"cache-control"
        parts += (name, b": ", value, b"\r\n")
    if sse:
        if not unbuffered:
            parts.append(b"x-accel-buffering: no\r\n")
        if not uncached:
            parts.append(b"cache-control: no-cache\r\n")
    if length is not None:
        parts += (b"content-length: ", length, b"\r\n")
    elif not incoming.old and status not in (204, 304):
        parts.append(b"transfer-encoding: chunked\r\n")
    parts += (b"x-request-id: ", request_id, b"\r\n", told, connection_line(incoming), b"\r\n")
    return b"".join(parts)


def connection_line(incoming: Incoming) -> bytes:
    """What the client is told about the connection's future."""
    if incoming.close:
        return b"connection: close\r\n"
    return b"connection: keep-alive\r\n" if incoming.old else b""


def whole(status: int, body: bytes, incoming: Incoming, extra: bytes = b"", kind: bytes = b"application/json") -> bytes:
    """A complete response of our own."""
    head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        status,
        STATUS.get(status, b"Status"),
        kind,
        len(body),
        extra,
        connection_line(incoming),
    )
    return head if incoming.method == b"HEAD" else head + body


def content_of(fields: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes | None]:
    """(content type in lower case, content length if the answer is framed by it)."""
    kind, length = b"", None
    for name, value in fields:
        low = name.lower()
        if low == b"content-type":
            kind = value.lower()
        elif low == b"content-length":
            length = value
        elif low == b"transfer-encoding":
            return kind or _kind(fields), None
    return kind, length


def _kind(fields: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in fields:
        if name.lower() == b"content-type":
            return value.lower()
    return b""


def retry_after(fields: list[tuple[bytes, bytes]]) -> float | None:
    """Seconds of a ``Retry-After`` field; dates are not worth reading from a worker."""
    for name, value in fields:
        if name.lower() == b"retry-after" and value.isdigit() and len(value) < 7:
            return float(value)
    return None
