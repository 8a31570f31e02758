"""KV that is kept for another engine after its request has ended, each with a moment at which it is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from load_tests.engine.cache import Holding
from load_tests.engine.driver import Driver
from load_tests.engine.work import Work

# A timer that is this much late, in seconds, has been lost.
LATE = 1.0


@dataclass(eq=False, slots=True)
class Pin:
    """``seen``: what the KV was computed from. ``deadline``: seconds of the loop's clock."""

    name: str
    work: Work
    driver: Driver
    seen: list[int]
    deadline: float
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Pins:
    """Bounded by the KV itself. ``expired`` is told of each that nobody came for."""

    def __init__(self, expired: Callable[[Pin], None]) -> None:
        self._pins: dict[str, Pin] = {}
        self._expired = expired

    def __len__(self) -> int:
        return len(self._pins)

    def keep(self, name: str, work: Work, driver: Driver, seconds: float) -> None:
        """Keep ``work``'s KV under ``name`` for ``seconds`` from now."""
        deadline = asyncio.get_running_loop().time() + seconds
        pin = Pin(name, work, driver, driver.scheduler.seen_of(work)[: work.computed], deadline)
        self._pins[name] = pin
        self._arm(pin)

    def get(self, name: str) -> Pin | None:
        return self._pins.get(name)

    def extend(self, name: str, seconds: float) -> None:
        """Keep it for at least ``seconds`` from now; nothing if it is not here."""
        pin = self._pins.get(name)
        if pin is not None:
            pin.deadline = max(pin.deadline, asyncio.get_running_loop().time() + seconds)

    def release(self, name: str) -> bool:
        """Give it back; False if it is not here (any more)."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        if pin.timer is not None:
            pin.timer.cancel()
        pin.driver.release(pin.work)
        return True

    def clear(self) -> None:
        for name in list(self._pins):
            self.release(name)

    def blocks(self, late: bool = False) -> int:
        """Blocks that are kept; ``late``: those whose time is over."""
        now = asyncio.get_running_loop().time()
        by_cache: dict[Driver, list[Holding]] = {}
        for pin in self._pins.values():
            if not late or now > pin.deadline + LATE:
                by_cache.setdefault(pin.driver, []).append(pin.work.holding)
        return sum(driver.scheduler.cache.recount(holdings) for driver, holdings in by_cache.items())

    def _arm(self, pin: Pin) -> None:
        pin.timer = asyncio.get_running_loop().call_at(pin.deadline, self._due, pin)

    def _due(self, pin: Pin) -> None:
        if self._pins.get(pin.name) is not pin:
            return
        # Heartbeats move the deadline without touching the timer.
        if asyncio.get_running_loop().time() < pin.deadline:
            self._arm(pin)
            return
        self.release(pin.name)
        self._expired(pin)
