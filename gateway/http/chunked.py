"""A strict decoder of chunked request bodies.

llhttp could do it, but accepts what a smuggler needs accepted somewhere (it knows no limit on extensions, and its
callbacks do not show them). Here everything but the grammar's plain case is an error: RFC 9112, section 7.1. Extensions
are well-formed and dropped; trailers are read and dropped.
"""

import re

from gateway.errors import BadRequest, HeadTooLarge, TooLarge

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_LINE = 4096
"""Longest size line, extensions included; also the longest line of a trailer."""
_TRAILERS = 64 * 1024
"""Bytes of all trailers together."""
_PIECES = 512
"""Pieces after which they are joined: a body of tiny chunks must not cost many times its size."""
_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")

_READ_SIZE, _READ_DATA, _READ_CRLF, _READ_TRAILER, DONE = range(5)


class Chunked:
    """Feed it bytes; ``body`` grows; ``phase`` is `DONE` at the end and `rest` is what followed."""

    __slots__ = ("_buffer", "_left", "_limit", "_pieces", "_size", "_trailed", "_whole", "phase")

    def __init__(self, limit: int) -> None:
        self.phase = _READ_SIZE
        self._limit = limit
        self._buffer = b""
        self._left = 0
        self._size = 0
        self._trailed = 0
        self._whole = bytearray()
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        """What was decoded so far."""
        if not self._whole:
            return b"".join(self._pieces)
        return b"".join((self._whole, *self._pieces))

    @property
    def rest(self) -> bytes:
        """Bytes after the body's end."""
        return self._buffer

    def feed(self, data: bytes) -> bool:
        """Take ``data``; true when the body is complete. Raises `BadRequest`, `HeadTooLarge` or `TooLarge`."""
        data = self._buffer + data if self._buffer else data
        at = 0
        while self.phase != DONE:
            step = self._step(data, at)
            if step < 0:
                break
            at = step
        self._buffer = data[at:]
        return self.phase == DONE

    def _step(self, data: bytes, at: int) -> int:
        """Consume one element; the new offset, or -1 when more is needed."""
        if self.phase == _READ_SIZE:
            return self._read_size(data, at)
        if self.phase == _READ_DATA:
            piece = data[at : at + self._left]
            if not piece:
                return -1
            self._pieces.append(piece)
            if len(self._pieces) >= _PIECES:
                self._whole += b"".join(self._pieces)
                self._pieces.clear()
            self._left -= len(piece)
            if not self._left:
                self.phase = _READ_CRLF
            return at + len(piece)
        if self.phase == _READ_CRLF:
            end = data[at : at + 2]
            if end == b"\r\n":
                self.phase = _READ_SIZE
                return at + 2
            if end in (b"", b"\r"):
                return -1
            raise BadRequest("a chunk is longer than its size says")
        return self._read_trailer(data, at)

    def _read_size(self, data: bytes, at: int) -> int:
        found = _SIZE.match(data, at)
        if found is None:
            if b"\n" in data[at:] or len(data) - at > _LINE:
                raise BadRequest("malformed chunk size")
            return -1
        if found.end() - at > _LINE:
            raise BadRequest("a chunk's extensions are too long")
        size = int(found[1], 16)
        self._size += size
        if self._size > self._limit:
            raise TooLarge(f"the body is over the limit of {self._limit} bytes")
        self._left = size
        self.phase = _READ_DATA if size else _READ_TRAILER
        return found.end()

    def _read_trailer(self, data: bytes, at: int) -> int:
        end = data.find(b"\r\n", at)
        if end < 0:
            if len(data) - at > _LINE:
                raise HeadTooLarge("the trailer is too long")
            if b"\n" in data[at:]:
                raise BadRequest("malformed trailer")
            return -1
        if end == at:
            self.phase = DONE
            return end + 2
        self._trailed += end + 2 - at
        if self._trailed > _TRAILERS:
            raise HeadTooLarge("the trailers are too long")
        if end - at > _LINE or not _FIELD.fullmatch(data, at, end):
            raise BadRequest("malformed trailer")
        return end + 2
