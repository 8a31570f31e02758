"""The file of a recording, the key beside it, and its lines.

The first line says what it is; what follows are whole lines only, whatever becomes of the disk or of the process. One process
writes it. The key, with which everything in it is hashed, is random and stays in a file of its own: whoever goes on with the
recording needs it, whoever only reads the recording does not, and cannot find a text by hashing candidates.
"""

from __future__ import annotations

import fcntl
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from gateway.appended import Appended
from kv_index.pages import PAGE_TOKENS, SYMBOL

if TYPE_CHECKING:
    from gateway.records import Noted

KEY = ".key"
"""Ending of the key's file."""
KEY_BYTES = 32
FORMAT = 1

PRIVATE = 0o600
"""Mode of both files, whatever they had before."""

TAIL = 1 << 20
"""Bytes that are read at once to find the last line's end."""

SLICE = 128
"""Pages that are hashed at once: about 60 microseconds."""
KEPT = 500_000
"""Pages of sessions' last prompts whose ids are kept: a prompt that goes on from one is hashed from there."""


class Unrecordable(ValueError):
    """The file cannot be recorded to; the message tells why and the cure."""


class Head(msgspec.Struct):
    """The first line. ``key`` tells which key was used, and nothing of it."""

    warmroute_recording: int
    key: str


class File(Appended):
    """An open recording. One that is begun anew has the same key: all of them can be read together. Raises `Unrecordable`."""

    def _open(self) -> None:
        path = self.path
        self.size = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, PRIVATE)
        except ValueError:
            raise Unrecordable(f"{path!r} is no name of a file: take the NUL character out") from None
        except OSError as error:
            raise Unrecordable(
                f"{path!r} cannot be written: {error.strerror}; name a file in a folder that can"
            ) from None
        try:
            self._lock()
            self.size = os.fstat(self._file).st_size
            self.key = self._go_on() if self.size else self._begin()
        except OSError as error:
            self.close()
            raise Unrecordable(
                f"{path!r} cannot be written: {error.strerror}; name a file in a folder that can"
            ) from None
        except Unrecordable:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unrecordable(f"another gateway records to {self.path!r}: name a file of its own for each") from None

    def _begin(self) -> bytes:
        # Once the recording before was moved away, its key still is that of all its ids: both can be read together.
        name = self.path + KEY
        key = _key_in(name) if os.path.exists(name) and os.path.getsize(name) else _new_key(name)
        os.fchmod(self._file, PRIVATE)
        self.append(msgspec.json.encode(Head(FORMAT, named(key, b"key"))) + b"\n")
        return key

    def _go_on(self) -> bytes:
        """The key of the recording that is there."""
        name = self.path + KEY
        try:
            head = msgspec.json.decode(os.pread(self._file, 4096, 0).partition(b"\n")[0], type=Head)
        except msgspec.DecodeError:
            raise Unrecordable(f"{self.path!r} is there and is no recording: name another file") from None
        if head.warmroute_recording != FORMAT:
            raise Unrecordable(f"{self.path!r} is of another version's form: name another file")
        try:
            key = _key_in(name)
        except (OSError, Unrecordable) as error:
            raise Unrecordable(
                f"{self.path!r} cannot be gone on with, for its key {name!r} cannot be read ({error}): name another file"
            ) from None
        if head.key != named(key, b"key"):
            raise Unrecordable(f"{name!r} is not the key of {self.path!r}: name another file")
        os.fchmod(self._file, PRIVATE)
        self._cut()
        return key

    def _cut(self) -> None:
        """Take off a line that was not finished when the gateway before was."""
        end = self.size
        while end:
            start = max(0, end - TAIL)
            at = os.pread(self._file, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if not end:
            # The first line is whole, as was seen, but for its end.
            self.append(b"\n")
        elif end < self.size:
            os.ftruncate(self._file, end)
            self.size = end


def _key_in(name: str) -> bytes:
    """The key in that file, which is private from then on. Raises `OSError` and `Unrecordable`."""
    with open(name, "rb") as file:
        told = file.read(4 * KEY_BYTES).decode("ascii", "replace").strip()
        try:
            key = bytes.fromhex(told)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise Unrecordable(f"{name!r} is no key: move it away, or name another file")
        os.fchmod(file.fileno(), PRIVATE)
    return key


def _new_key(name: str) -> bytes:
    key = os.urandom(KEY_BYTES)
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE)
    with os.fdopen(file, "w") as out:
        os.fchmod(file, PRIVATE)
        out.write(key.hex() + "\n")
    return key


class Finished(NamedTuple):
    """A request whose answer is over. ``at``: seconds since the epoch; ``first`` and ``lasted``: seconds after that."""

    noted: Noted
    at: float
    first: float | None
    lasted: float
    model: str
    tenant: str
    target: str
    status: int
    prompt: int | None
    completion: int | None
    cached: int | None
    outcome: str
    """As metrics tell it: ``ok``, ``client_error``, ``stream_error``, ``client_gone``."""


def line_of(key: bytes, finished: Finished, ids: array[int]) -> bytes:
    """One line, whose prompt's pages have ``ids``."""
    noted, prompt = finished.noted, finished.prompt
    if prompt is None and noted.by_ids:
        prompt = round(noted.pages * PAGE_TOKENS)
    tokens = PAGE_TOKENS if noted.by_ids else None
    if tokens is None and prompt is not None and noted.pages:
        tokens = max(1, round(prompt / noted.pages))
    row = {
        "timestamp": round(finished.at * 1e3),
        "model": finished.model,
        "tenant": named(key, b"tenant", finished.tenant.encode()),
        "session_id": None if noted.session is None else named(key, b"session", noted.session),
        "input_length": prompt,
        "output_length": finished.completion,
        "cached_tokens": finished.cached,
        "ttft_ms": None if finished.first is None else round(finished.first * 1e3, 3),
        "duration_ms": round(finished.lasted * 1e3, 3),
        "status": finished.status,
        "outcome": finished.outcome,
        "target": finished.target,
        "page": "ids" if noted.by_ids else "text",
        "pages": round(noted.pages, 3),
        "block_size": tokens,
        "hash_ids": ids.tolist(),
    }
    return msgspec.json.encode(row) + b"\n"


class Ids:
    """Chained ids of prompts' pages, under ``key``; bounded by `KEPT`. ``rest`` is called between two slices of hashing."""

    def __init__(self, key: bytes, rest: Callable[[], None]) -> None:
        self._key = key
        self._rest = rest
        # A copy of what has taken the key costs two thirds of making it anew.
        self._keyed = blake2b(key=key, digest_size=SYMBOL)
        self._last: OrderedDict[tuple[bytes, bytes], tuple[bytes, array[int]]] = OrderedDict()
        self._kept = 0

    def of(self, session: bytes | None, namespace: bytes, symbols: bytes) -> array[int]:
        """One id for each page in ``symbols``. A session's prompt is hashed from where its last one ended."""
        ids: array[int] = array("Q")
        before = keyed(self._key, b"namespace", namespace)
        place = (session, namespace) if session is not None else None
        known = self._last.pop(place, None) if place is not None else None
        if known is not None:
            self._kept -= len(known[1])
            if symbols.startswith(known[0]):
                ids = known[1][:]
                before = ids[-1].to_bytes(SYMBOL, "little") if ids else before
        copy, number = self._keyed.copy, int.from_bytes
        for start in range(len(ids) * SYMBOL, len(symbols), SLICE * SYMBOL):
            for at in range(start, min(start + SLICE * SYMBOL, len(symbols)), SYMBOL):
                page = copy()
                page.update(before + symbols[at : at + SYMBOL])
                before = page.digest()
                ids.append(number(before, "little"))
            self._rest()
        if place is not None:
            self._last[place] = (symbols, ids)
            self._kept += len(ids)
            while self._kept > KEPT:
                _, (_, gone) = self._last.popitem(last=False)
                self._kept -= len(gone)
        return ids

    def forget(self) -> None:
        """Keep nothing of any session."""
        self._last.clear()
        self._kept = 0


def named(key: bytes, *parts: bytes) -> str:
    """`keyed` in 16 hex digits."""
    return keyed(key, *parts).hex()


def keyed(key: bytes, *parts: bytes) -> bytes:
    """8 bytes that stand for something, and tell nothing of it to whoever lacks the key."""
    told = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return blake2b(told, key=key, digest_size=8).digest()
