"""Metrics as text, for Prometheus, without holding up the requests that are being answered.

Writing a line costs less than a microsecond because all of it but the number is kept from scrape to scrape. A small fleet's
metrics are written when they are asked for; those of a large one take longer than a request should wait, so they are written
in slices with turns of the loop between them, and again and again for as long as somebody scrapes: whoever asks gets the last
ones at once, some seconds old at most.

The format is Prometheus's text format 0.0.4. prometheus-client writes it too, at six times the cost and in one go (17 ms for
64 targets, 240 ms for 1,000).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from math import inf
from time import thread_time

Labels = tuple[str, ...]

SLICE = 0.001
"""Seconds of writing, after which others get their turn."""
QUICK = 0.004
"""Seconds up to which all is written at once."""
FRESH = 1.0
"""Seconds between two writings of what is not quick, at least, and ..."""
SHARE = 0.02
"""... of one core that they may take, but ..."""
OLD = 10.0
"""... no figure is older than so many seconds."""
WATCHED = 120.0
"""Seconds without a scrape after which nothing is written any more."""
LINES = 500
"""Lines of one piece."""


class Head:
    """One metric's lines but for their numbers: name, help and type, then what stands in front of each number."""

    __slots__ = ("_known", "intro", "labels", "name")

    def __init__(self, name: str, help: str, kind: str, labels: Sequence[str]) -> None:
        text = help.replace("\\", "\\\\").replace("\n", "\\n")
        self.name = name
        self.labels = tuple(labels)
        self.intro = f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        self._known: dict[Labels, str] = {}

    def of(self, labels: Labels) -> str:
        """What stands in front of the number of one series."""
        found = self._known.get(labels)
        if found is None:
            found = self._known[labels] = self.name + braced(self.labels, labels) + " "
        return found

    def forget(self, labels: Labels) -> None:
        """That series is gone."""
        self._known.pop(labels, None)

    def keep(self, most: int) -> None:
        """Forget all if there are more than ``most``: those of series that are not forgotten one by one."""
        if len(self._known) > most:
            self._known.clear()


def braced(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels in braces, by name; nothing if there are none."""
    if not names:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(zip(names, values, strict=True))) + "}"


def escaped(value: str) -> str:
    """A label's value."""
    if "\\" in value or '"' in value or "\n" in value:
        value = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    # What is no text in any encoding would make the whole page unreadable.
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def number(value: float) -> str:
    """As Go reads it."""
    return repr(float(value)) if -1e300 < value < 1e300 else "+Inf" if value > 0 else "-Inf" if value < 0 else "NaN"


class Exposition:
    """Whoever scrapes asks `read`; ``pieces`` begins to write. ``await stop()`` at the end."""

    def __init__(self, pieces: Callable[[], Iterator[str]]) -> None:
        self._pieces = pieces
        self._last: bytes | None = None
        self._cost = inf
        """CPU seconds of the last writing; not known before the first."""
        self._scraped = 0.0
        self._writes: asyncio.Task[None] | None = None
        self._written = asyncio.Event()

    async def read(self) -> bytes:
        """All metrics."""
        if self._cost <= QUICK:
            began = thread_time()
            text = "".join(self._pieces()).encode()
            self._cost = thread_time() - began
            return text
        self._scraped = asyncio.get_running_loop().time()
        if self._writes is None or self._writes.done():
            self._written.clear()
            self._writes = asyncio.get_running_loop().create_task(self._keep_writing(), name="metrics")
        await self._written.wait()
        if self._last is None:
            # Raises what kept it from being written.
            await self._writes
        assert self._last is not None
        return self._last

    async def stop(self) -> None:
        """Write no more."""
        if self._writes is not None:
            self._writes.cancel()
            await asyncio.gather(self._writes, return_exceptions=True)

    async def _keep_writing(self) -> None:
        clock = asyncio.get_running_loop().time
        try:
            if self._last is None:
                # The first time is dearer than any other: it tells nothing of them.
                await self._write()
            while clock() - self._scraped < WATCHED:
                self._last = await self._write()
                self._written.set()
                if self._cost <= QUICK:
                    return
                await asyncio.sleep(min(max(FRESH, self._cost / SHARE), OLD))
        except Exception:
            # Old figures would look like good ones.
            self._last = None
            raise
        finally:
            # Without somebody who writes there is nobody to wait for.
            self._written.set()

    async def _write(self) -> bytes:
        parts: list[str] = []
        # What others do in between, here or on this machine, is no cost of ours.
        cost, began = 0.0, thread_time()
        for piece in self._pieces():
            parts.append(piece)
            if (spent := thread_time() - began) > SLICE:
                cost += spent
                await asyncio.sleep(0)
                began = thread_time()
        whole = "".join(parts).encode()
        self._cost = cost + thread_time() - began
        return whole
