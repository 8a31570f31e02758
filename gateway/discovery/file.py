"""Workers that a file lists, with the keys of ``workers:``, in YAML or JSON; ``[]`` is a list of none.

The file is looked at by its device, inode, size and times, so that one that is written anew, renamed into its place, or led
to by a link that was turned (as ConfigMaps are) is seen alike. It is read when it has stopped changing; what cannot be used
leaves the list as it was, and is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from gateway.config import parse_workers
from gateway.config_reader import ConfigError
from gateway.discovery.base import BadOption, Found, Lost, Source, listed, seconds, text
from gateway.source import Stat, stat_of

T = TypeVar("T")

SETTLE = 0.25
"""Seconds for which it has to be the same before it is read."""
PATIENCE = 30.0
"""Seconds that a disk may take."""
LARGEST = 16 * 1024 * 1024
"""Bytes."""


class File(Source):
    """``path`` is looked at every ``every`` seconds."""

    def __init__(self, path: Any, every: Any = 1.0) -> None:
        self.path = text("path", path)
        if "\0" in self.path:
            raise BadOption("path is no name of a file: take the NUL character out", "path")
        self.every = seconds("every", every, 0.05, 3600)

    async def watch(self) -> AsyncIterator[list[Found]]:
        """See the module's head."""
        seen: Stat | None = None
        first, lists = True, None
        while True:
            now = await _reading(stat_of, self.path)
            if first or now != seen or now is None:
                now = await self._settled(now)
                try:
                    found = await _reading(self._read)
                    self.contact.well()
                    if found != lists:
                        lists = found
                        yield found
                except Lost as lost:
                    self.contact.lost(lost)
                seen, first = now, False
            elif not self.contact.troubles:
                self.contact.well()
            await asyncio.sleep(self.every)

    async def _settled(self, now: Stat | None) -> Stat | None:
        while now is not None:
            await asyncio.sleep(SETTLE)
            before, now = now, await _reading(stat_of, self.path)
            if before == now:
                break
        return now

    def _read(self) -> list[Found]:
        """Raises `Lost`."""
        try:
            with Path(self.path).open("rb") as file:
                data = file.read(LARGEST + 1)
        except OSError as error:
            raise Lost("unreadable", f"{self.path} cannot be read: {error.strerror or error}") from None
        if len(data) > LARGEST:
            raise Lost("too_large", f"{self.path} has more than {LARGEST // 1024 // 1024} MB")
        try:
            told = parse_workers(data.decode())
            return listed([Found(self.template.spec(**worker)) for worker in told])
        except (ConfigError, UnicodeDecodeError, ValueError) as error:
            raise Lost("malformed", f"{self.path}: {error}") from None


async def _reading(work: Callable[..., T], *arguments: str) -> T:
    """Raises `Lost` for a disk that hangs."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.to_thread(work, *arguments)
    except TimeoutError:
        raise Lost("timeout", f"the file could not be looked at within {PATIENCE:.0f} s") from None


SOURCE = File
