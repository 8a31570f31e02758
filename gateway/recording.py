"""The file of a recording, and the key beside it.

The first line says what it is; what follows are whole lines only, whatever becomes of the disk or of the process. One process
writes it. The key, with which everything in it is hashed, is random and stays in a file of its own: whoever goes on with the
recording needs it, whoever only reads the recording does not, and cannot find a text by hashing candidates.
"""

import fcntl
import os
from hashlib import blake2b

import msgspec

KEY = ".key"
"""Ending of the key's file."""
KEY_BYTES = 32
FORMAT = 1

TAIL = 1 << 20
"""Bytes that are read at once to find the last line's end."""


class Unrecordable(ValueError):
    """The file cannot be recorded to; the message tells why and the cure."""


class Head(msgspec.Struct):
    """The first line. ``key`` tells which key was used, and nothing of it."""

    warmroute_recording: int
    key: str


class File:
    """An open recording: whole lines are appended until it has ``most`` bytes. Raises `Unrecordable`."""

    def __init__(self, path: str, most: int) -> None:
        self.path = path
        self.most = most
        self.size = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
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
        key = _new_key(self.path + KEY)
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
            with open(name, "rb") as file:
                key = bytes.fromhex(file.read(4 * KEY_BYTES).decode("ascii", "replace").strip())
        except (OSError, ValueError) as error:
            raise Unrecordable(
                f"{self.path!r} cannot be gone on with, for its key {name!r} cannot be read ({error}): name another file"
            ) from None
        if len(key) != KEY_BYTES or head.key != named(key, b"key"):
            raise Unrecordable(f"{name!r} is not the key of {self.path!r}: name another file")
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
        if end < self.size:
            os.ftruncate(self._file, end)
            self.size = end

    def append(self, lines: bytes) -> None:
        """Whole lines; either all of them are there afterwards, or none and `OSError` is raised."""
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(lines)

    def close(self) -> None:
        """No more lines."""
        os.close(self._file)


def _new_key(name: str) -> bytes:
    key = os.urandom(KEY_BYTES)
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as out:
        out.write(key.hex() + "\n")
    return key


def named(key: bytes, *parts: bytes) -> str:
    """`keyed` in 16 hex digits."""
    return keyed(key, *parts).hex()


def keyed(key: bytes, *parts: bytes) -> bytes:
    """8 bytes that stand for something, and tell nothing of it to whoever lacks the key."""
    told = b"".join([len(part).to_bytes(4, "little") + part for part in parts])
    return blake2b(told, key=key, digest_size=8).digest()
