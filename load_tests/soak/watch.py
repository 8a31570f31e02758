"""What the gateway's process takes meanwhile, and what is left at the end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from statistics import linear_regression, median
from time import monotonic

from load_tests.places import EnginePlace, GatewayPlace, PlaceError

WARMUP = 0.2
"""Of the run, in which memory may grow."""
ROOM = 8 * 2**20
"""Bytes, or ..."""
SHARE = 0.08
"""... part of what it has after its warm-up, by which it may grow over the rest of a run without being called a leak."""
FILLED = 600.0
"""Seconds after which what has a bound has reached it; until then ..."""
FILLING = 20 * 2**20
"""... so many bytes are no leak."""
DESCRIPTORS = 8
"""By which their number may differ: what the control plane has open at that moment."""
REST = 30.0
"""Seconds in which all that was under way has to end."""
EMPTY = (
    "warmroute_exchanges",
    "warmroute_preparing",
    "warmroute_target_in_flight",
    "warmroute_queue_requests",
    "warmroute_queue_bytes",
    "warmroute_tenant_running",
    "warmroute_connections",
)
"""Gauges that are zero when nobody asks for anything."""
COUNTED = (
    "warmroute_retries_total",
    "warmroute_resends_total",
    "warmroute_config_generation",
    "warmroute_workers_doubted",
)


@dataclass(slots=True)
class Watch:
    """Samples of one process."""

    gateway: GatewayPlace
    every: float = 1.0
    memory: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, bytes)"""

    async def run(self) -> None:
        """Until it is cancelled."""
        began = monotonic()
        while True:
            resident = self.gateway.resident()
            if resident is not None:
                self.memory.append((monotonic() - began, resident))
            await asyncio.sleep(self.every)

    def warm(self) -> list[tuple[float, int]]:
        """Samples after the warm-up."""
        return self.memory[int(len(self.memory) * WARMUP) :]

    def slope(self) -> float | None:
        """Bytes a minute that it grew after its warm-up; ``None`` of too few samples."""
        warm = self.warm()
        if len(warm) < 10:
            return None
        return linear_regression([at for at, _ in warm], [size for _, size in warm]).slope * 60

    def growth(self) -> tuple[int, int] | None:
        """Bytes after the warm-up, and how many more at the end; ``None`` of too few samples."""
        warm = [size for _, size in self.warm()]
        if len(warm) < 10:
            return None
        part = len(warm) // 5
        before, after = median(warm[:part]), median(warm[-part:])
        return int(before), int(after - before)

    def leaks(self) -> str | None:
        """What is to be said of its growth, if it is more than it should be."""
        grown = self.growth()
        if grown is None:
            return None
        room = ROOM if self.memory[-1][0] >= FILLED else FILLING
        if grown[1] <= max(room, SHARE * grown[0]):
            return None
        return f"memory grew by {grown[1] / 2**20:.1f} MiB after the warm-up, from {grown[0] / 2**20:.1f}"


async def own_descriptors(gateway: GatewayPlace) -> int | None:
    """Those that are neither a client's connection nor a worker's."""
    told = await gateway.ask("GET", "/workers")
    clients = (await gateway.metrics())["warmroute_connections"]
    found = gateway.descriptors()
    return None if found is None else found - int(clients) - sum(each["connections"] for each in told["workers"])


async def at_rest(
    gateway: GatewayPlace, engines: list[EnginePlace], descriptors: int | None
) -> tuple[list[str], dict[str, float]]:
    """What is not as it should be once nobody asks for anything, and the metrics of then."""
    problems: list[str] = []
    metrics: dict[str, float] = {}
    for _ in range(int(REST * 2)):
        metrics = await gateway.metrics()
        problems = [f"{name} is {metrics[name]:.0f} at the end" for name in EMPTY if metrics.get(name)]
        problems += [f"{engine.worker} still has requests" for engine in engines if await _busy(engine)]
        left = await own_descriptors(gateway)
        if left is not None and descriptors is not None and left > descriptors + DESCRIPTORS:
            problems.append(f"{left} descriptors are open, {descriptors} were at the start")
        if not problems:
            break
        await asyncio.sleep(0.5)
    if metrics.get("warmroute_defects"):
        problems.append(f"the gateway counted {metrics['warmroute_defects']:.0f} defects of its own")
    log = gateway.log.read_text(errors="replace")
    for word in ("Traceback", "never retrieved", "never awaited"):
        if word in log:
            at = log.index(word)
            problems.append(f"the gateway's log has: {log[max(0, at - 300) : at + 1500]}")
            break
    return problems, metrics


async def _busy(engine: EnginePlace) -> bool:
    try:
        return bool(await engine.busy())
    except PlaceError:
        # It left, and its successor is not there yet.
        return False
