"""A file to which whole lines are appended, and what becomes of it when it is full."""

from __future__ import annotations

import os
from contextlib import suppress


class Appended:
    """``most`` bytes; of full ones ``keep`` stay, as ``path.1`` and so on, the newest first. Whoever inherits from it opens it:
    ``_open`` sets ``_file``, open for appending, and ``size``."""

    def __init__(self, path: str, most: int, keep: int = 0) -> None:
        self.path = path
        self.most = most
        self.keep = keep
        self.size = 0
        self._file = -1
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def append(self, lines: bytes) -> None:
        """Whole lines; either all of them are there afterwards, or none and `OSError` is raised."""
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            # What is no file of a disk has no length to go back to.
            with suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size += len(lines)

    def rotate(self) -> None:
        """Begin anew. Raises what opening it does; then the old one is still there, by its new name, and open."""
        for number in range(self.keep, 1, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}.{number - 1}", f"{self.path}.{number}")
        with suppress(FileNotFoundError):
            os.replace(self.path, f"{self.path}.1")
        old, size = self._file, self.size
        try:
            self._open()
        except BaseException:
            self._file, self.size = old, size
            raise
        os.close(old)

    def close(self) -> None:
        """No more lines."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
