"""What the gateway leaves out when it is itself short of time or memory, one rung after the other.

    none -> optional -> tokens -> prefix -> bulk -> all

`optional`: the doctor and the starts for warming are left out. `tokens`: prompts of models with a tokenizer are routed by text.
`prefix`: no prompt is hashed and no index asked; sessions stay at home by their names, all else goes by load. `bulk`: requests
of all but the first priority are refused. `all`: every new request is. What runs already is served to its end on every rung.

Short of time: the event loop wakes late, on average over a second. Short of memory: the process is larger than it may be. It
climbs a rung for each second in which one of them is so, and comes down a rung for each `CALM` seconds in which neither is.
What was refused gives no memory back, so for want of that alone requests are refused only where the end is near (`LAST`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import exp
from pathlib import Path
from time import monotonic

log = logging.getLogger("warmroute")

BEAT = 0.05
"""Seconds between two looks at the clock."""
CLIMB = 1.0
CALM = 5.0
STALL = 2.5
"""Times the lag that is allowed, beyond which one wake counts as no later."""
NEAR = 0.5
"""Part of the lag that is allowed, below which it is calm."""
LAST = 1.05
"""Times the memory that is allowed, beyond which requests are refused too."""
OF_MACHINE = 0.9
"""Of the memory that the process may have at most, if nothing else is said."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Rung(IntEnum):
    """See the module's head."""

    NONE = 0
    OPTIONAL = 1
    TOKENS = 2
    PREFIX = 3
    BULK = 4
    ALL = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Lag of the event loop in seconds, on average; memory in bytes, ``None``: not bounded."""

    lag: float = 0.05
    memory: int | None = None


class Pressure:
    """Where on the ladder it is. ``moved`` is told each step."""

    def __init__(
        self, limits: Limits, moved: Callable[[Rung, Rung, str], None] = lambda before, after, why: None
    ) -> None:
        self.limits = limits
        self.moved = moved
        self.rung = Rung.NONE
        self.lag = 0.0
        """Seconds by which the event loop woke too late, averaged over a second."""
        self.memory: int | None = None
        """Bytes of the process; ``None``: not known."""
        self._at: float | None = None
        self._since = 0.0
        """Of the present rung, or of when it was last not calm."""

    def beat(self, late: float, memory: int | None, now: float) -> None:
        """The loop woke ``late`` seconds after it should have; the process has so much memory."""
        passed = BEAT if self._at is None else max(1e-3, now - self._at)
        self._at = now
        # One long stall is over when it is seen: it is no reason to climb for seconds.
        self.lag += (1.0 - exp(-passed)) * (min(late, STALL * self.limits.lag) - self.lag)
        self.memory = memory if memory is not None else self.memory
        why, most = self._short()
        if why is not None:
            if now - self._since >= CLIMB and self.rung < most:
                self._step(1, why, now)
            elif self.rung > most and now - self._since >= CALM:
                self._step(-1, why, now)
        elif self.lag >= NEAR * self.limits.lag:
            # Neither up nor down; the calm has to begin anew.
            self._since = max(self._since, now - CLIMB)
        elif self.rung and now - self._since >= CALM:
            self._step(-1, "calm", now)

    def _short(self) -> tuple[str | None, Rung]:
        """What it is short of, if of anything, and the rung to which that leads at most."""
        if self.lag > self.limits.lag:
            return f"the event loop wakes {self.lag * 1e3:.0f} ms late", Rung.ALL
        memory, allows = self.memory, self.limits.memory
        if allows is not None and memory is not None and memory > allows:
            return f"the process has {memory >> 20} MiB", Rung.ALL if memory > LAST * allows else Rung.PREFIX
        return None, Rung.NONE

    def _step(self, way: int, why: str, now: float) -> None:
        before, self.rung = self.rung, Rung(self.rung + way)
        self._since = now
        self.moved(before, self.rung, why)

    def told(self) -> dict[str, object]:
        """For people."""
        return {
            "rung": self.rung.name.lower(),
            "lag_ms": round(self.lag * 1e3, 1),
            "memory_bytes": self.memory,
            "memory_limit_bytes": self.limits.memory,
        }


def logged(before: Rung, after: Rung, why: str) -> None:
    """Say it."""
    level = logging.WARNING if after > before else logging.INFO
    log.log(level, "pressure: %s now, not %s: %s", after.name.lower(), before.name.lower(), why)


def resident() -> int | None:
    """Bytes of memory that this process has; ``None`` where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def allowed() -> int | None:
    """Most of the memory that a process may have here: of its control group, or of the machine; ``None``: not known."""
    found = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    except (OSError, ValueError):
        pass
    return int(min(found) * OF_MACHINE) if found else None


class Pulse:
    """Whether the event loop still runs, for whoever asks from another thread."""

    def __init__(self) -> None:
        self.at = monotonic()
        self.ready = False
        self.told: dict[str, object] = {}
