"""``python -m load_tests.connections``: as many client connections as the descriptor limit allows on one gateway process.

Three scenes, each with a gateway of its own, client processes (`load_tests.holding`) and two simulated engines:

    many    idle keep-alive connections, first new ones, then each after a request; beside them slow streams. Bytes of the
            gateway's memory for each, its CPU meanwhile.
    full    more connections than `listen.max_connections`: those over it are refused politely; when others close, new ones
            are served.
    short   more connections than the process has descriptors: a flood of them, then a while in which there is not one left. It
            goes on, does not spin, and recovers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from load_tests.bench.processes import cpu_seconds
from load_tests.places import EnginePlace, GatewayPlace, PlaceError

ORDER_SECONDS = 300.0
"""That one order to a client process may take."""
SETTLE = 3.0
"""Seconds after which what was opened or closed has been seen, refusals included."""
APIECE = 6_000
"""Connections of one client process."""
ENGINES = 2
STREAM_SECONDS = 10.0
"""For which streams are watched."""
MEASURED = 5.0
"""Seconds over which idle CPU is measured."""
FEW = 512
"""Descriptors of the gateway that has too few."""
FLAGS = (
    "--kv-tokens", "100000000", "--max-running", "4000", "--context-length", "32768", "--keep-alive", "600",
    "--step-seconds", "0.01", "--decode-seconds", "0.001",
)  # fmt: skip
"""Of engines: with a thousand streams, a token a second each; alone, fast."""


class Client:
    """One client process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, port: int, number: int, stack: AsyncExitStack) -> Client:
        """With an address of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "load_tests.holding", str(port), f"127.0.0.{number + 2}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        client = cls(process)
        stack.push_async_callback(client.stop)
        return client

    async def do(self, what: str, count: int = 0) -> dict[str, int]:
        """One order and what is then. Raises `PlaceError`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            async with asyncio.timeout(ORDER_SECONDS):
                self.process.stdin.write(json.dumps({"do": what, "count": count}).encode() + b"\n")
                await self.process.stdin.drain()
                told: dict[str, int] = json.loads(await self.process.stdout.readline() or b"null") or {}
        except (OSError, TimeoutError) as error:
            raise PlaceError(f"a client process failed: {type(error).__name__}") from None
        if not told:
            raise PlaceError("a client process ended; it says why above")
        return told

    async def stop(self) -> None:
        """End it."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Crowd:
    """Several client processes as one."""

    def __init__(self, clients: list[Client]) -> None:
        self.clients = clients

    async def do(self, what: str, count: int = 0) -> dict[str, int]:
        """One order, shared out; what is then, in all."""
        share, rest = divmod(count, len(self.clients))
        counts = [share + (number < rest) for number in range(len(self.clients))]
        told = await asyncio.gather(*(client.do(what, each) for client, each in zip(self.clients, counts, strict=True)))
        return {name: sum(each[name] for each in told) for name in told[0]}


@dataclass(slots=True)
class Stage:
    """A gateway with its engines and clients."""

    gateway: GatewayPlace
    engines: list[EnginePlace]
    crowd: Crowd

    async def memory(self) -> int:
        """Bytes, when what was under way has come to rest. Raises `PlaceError`."""
        await asyncio.sleep(SETTLE)
        found = self.gateway.resident()
        if found is None:
            raise PlaceError(f"the gateway died:\n{self.gateway.log.read_text()[-2000:]}")
        return found

    async def connections(self) -> int:
        """As the gateway counts them."""
        return int((await self.gateway.metrics())["warmroute_connections"])

    async def cpu(self, seconds: float) -> float:
        """Part of a core that the gateway takes."""
        before = cpu_seconds([self.gateway.pid])
        await asyncio.sleep(seconds)
        return (cpu_seconds([self.gateway.pid]) - before) / seconds


async def stage(stack: AsyncExitStack, folder: Path, most: int, clients: int, before: Sequence[str] = ()) -> Stage:
    """A gateway that takes ``most`` connections. Raises `PlaceError`."""
    engines = [EnginePlace(folder, f"engine{number}", FLAGS) for number in range(ENGINES)]
    for engine in engines:
        stack.callback(engine.kill)
    await asyncio.gather(*(engine.start() for engine in engines))
    gateway = await stack.enter_async_context(GatewayPlace(folder))
    workers = "".join(f'  - {{url: "{engine.url}"}}\n' for engine in engines)
    gateway.write(
        f"listen: {{host: 127.0.0.1, port: 0, max_connections: {most}, idle: 20m, head_timeout: 20m}}\n"
        "admin: {host: 127.0.0.1, port: 0}\n"
        "policy: least_load\npressure: {lag: 5s}\nadmission: {ahead: 60s}\ndrain: 0s\ndrain_limit: 1s\n"
        f"workers:\n{workers}"
    )
    await gateway.start(ENGINES, before)
    crowd = Crowd([await Client.start(gateway.port, number, stack) for number in range(clients)])
    return Stage(gateway, engines, crowd)


async def many(folder: Path, stack: AsyncExitStack, idle: int, active: int) -> dict[str, Any]:
    """The scene of that name."""
    at = await stage(stack, folder, idle + active, max(1, -(-(idle + active) // APIECE)))
    # What one connection needs was made for some before, so that it is not counted again.
    await at.crowd.do("open", 200)
    await at.crowd.do("ask", 200)
    await at.crowd.do("close", 200)
    empty = await at.memory()
    told = await at.crowd.do("open", idle)
    opened = await at.memory()
    asked = await at.crowd.do("ask", idle)
    after = await at.memory()
    still = await at.cpu(MEASURED)
    streams: dict[str, Any] = {}
    if active:
        await at.crowd.do("open", active)
        await at.crowd.do("stream", active)
        await asyncio.sleep(STREAM_SECONDS / 2)
        await at.crowd.do("look")
        busy = await at.cpu(STREAM_SECONDS)
        seen = await at.crowd.do("look")
        beside = await at.crowd.do("ask", min(200, idle))
        streams = {
            "active": seen["streams"],
            "active_events": seen["events"],
            "active_silent": seen["silent"],
            "answered_beside_active": beside["good"],
            "kib_per_active_with_its_worker_connection": round((await at.memory() - after) / active / 1024, 1),
            "cpu_active": round(busy, 3),
        }
    return {
        "descriptor_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "idle": asked["open"],
        "refused": told["refused"],
        "cut": told["cut"],
        "answered": asked["good"],
        "kib_per_new_connection": round((opened - empty) / idle / 1024, 2),
        "kib_per_idle_connection": round((after - empty) / idle / 1024, 2),
        "cpu_idle": round(still, 3),
        **streams,
        "resident_mib": round(await at.memory() / 2**20, 1),
    }


async def full(folder: Path, stack: AsyncExitStack, most: int, over: int) -> dict[str, Any]:
    """The scene of that name."""
    at = await stage(stack, folder, most, 1)
    held = await at.crowd.do("open", most)
    # Over the limit: told so, then closed, and nobody else notices.
    told = await at.crowd.do("open", over)
    await asyncio.sleep(SETTLE)
    asked = await at.crowd.do("ask", most)
    await at.crowd.do("close", over)
    await asyncio.sleep(SETTLE)
    again = await at.crowd.do("open", over)
    answered = await at.crowd.do("ask", most)
    return {
        "max_connections": most,
        "held": held["open"],
        "over": over,
        "refused": told["refused"],
        "cut": again["cut"],
        "answered_at_the_limit": asked["good"],
        "answered_after_others_closed": answered["good"],
    }


async def short(folder: Path, stack: AsyncExitStack, over: int) -> dict[str, Any]:
    """The scene of that name: ``over`` connections beyond the number of descriptors, at once."""
    at = await stage(stack, folder, FEW, 1, ["prlimit", f"--nofile={FEW}:{FEW}"])
    few = 50
    await at.crowd.do("open", few)
    first = await at.crowd.do("ask", few)
    flood = Crowd([await Client.start(at.gateway.port, 1, stack)])
    flooded = await flood.do("open", FEW + over)
    during = await at.crowd.do("ask", few)
    await flood.do("close", FEW + over)
    await asyncio.sleep(SETTLE)
    turned_away, spent = await _squeezed(at, flood, over)
    after = await at.crowd.do("ask", few)
    fresh = await flood.do("open", few)
    served = await flood.do("ask", few)
    metrics = await at.gateway.metrics()
    return {
        "descriptors": FEW,
        "flood": FEW + over,
        "flood_refused": flooded["refused"],
        "flood_cut": flooded["cut"],
        "asked_without_descriptors": over,
        "cut_without_descriptors": turned_away,
        "cpu_without_descriptors": round(spent, 3),
        "answered_before": first["good"],
        "answered_in_the_flood": during["good"],
        "answered_after": after["good"],
        "new_connections_after": fresh["open"],
        "answered_on_new_connections": served["good"],
        "log_bytes": at.gateway.log.stat().st_size,
        "told_of": int(metrics["warmroute_descriptors_short_total"]),
        "defects": int(metrics["warmroute_defects"]),
    }


async def _squeezed(at: Stage, flood: Crowd, over: int) -> tuple[int, float]:
    """While the gateway has no descriptor left: how many of ``over`` new connections were cut, and its CPU."""
    before = await flood.do("look")
    resource.prlimit(at.gateway.pid, resource.RLIMIT_NOFILE, (at.gateway.descriptors() or FEW, FEW))
    try:
        # The kernel has taken them; the gateway cannot.
        trying = asyncio.create_task(flood.do("open", over))
        spent = await at.cpu(MEASURED)
        await trying
        told = await flood.do("look")
    finally:
        resource.prlimit(at.gateway.pid, resource.RLIMIT_NOFILE, (FEW, FEW))
    await flood.do("close", over)
    await asyncio.sleep(SETTLE)
    return told["cut"] - before["cut"], spent


async def everything(idle: int | None, active: int) -> dict[str, Any]:
    """All scenes, one after the other. Raises `PlaceError`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # What the gateway makes of its limit: as many to workers, and some for itself.
    most = (hard - 256) // 2 if idle is None else idle + active
    idle = max(1, most - active) if idle is None else idle
    found: dict[str, Any] = {}
    with TemporaryDirectory(prefix="warmroute-connections-") as name:
        for scene in ("many", "full", "short"):
            folder = Path(name, scene)
            os.mkdir(folder)
            async with AsyncExitStack() as stack:
                if scene == "many":
                    found[scene] = await many(folder, stack, idle, active)
                elif scene == "full":
                    found[scene] = await full(folder, stack, 500, 100)
                else:
                    found[scene] = await short(folder, stack, 200)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when it could be measured."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.connections", description="Many client connections.")
    parser.add_argument("--idle", type=int, metavar="N", help="default: as many as the descriptor limit allows")
    parser.add_argument("--active", type=int, default=2000, metavar="M", help="slow streams beside them")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = uvloop.run(everything(options.idle, options.active))
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for scene, figures in found.items():
        print(scene)
        for figure, value in figures.items():
            print(f"    {value:>10}  {figure.replace('_', ' ')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
