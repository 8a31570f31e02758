"""One run: everything started, driven, looked at and ended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from load_tests.places import EnginePlace, GatewayPlace
from load_tests.soak.chaos import Chaos
from load_tests.soak.plan import DIALECTS, ENGINE_FLAGS, SLOTS, Plan, Written, tenants
from load_tests.soak.traffic import Traffic
from load_tests.soak.verdict import Harm, Verdicts
from load_tests.soak.watch import COUNTED, Watch, at_rest, own_descriptors

TAIL = 4000
"""Characters of the gateway's log that are shown if it died."""


@dataclass(slots=True)
class Soaked:
    """What came of it."""

    verdicts: Verdicts
    capacity: float
    """Requests a second that the engines can serve."""
    rate: float
    """That were asked."""
    did: dict[str, int]
    memory: tuple[int, int] | None
    """Bytes after the warm-up, and how many more at the end."""
    slope: float | None
    """Bytes a minute."""
    metrics: dict[str, float]
    problems: list[str] = field(default_factory=list)
    """All that should not be; a good run has none."""

    def told(self) -> dict[str, Any]:
        """As JSON."""
        verdicts = self.verdicts
        return {
            "requests": verdicts.asked,
            "capacity_rps": round(self.capacity, 2),
            "asked_rps": round(self.rate, 2),
            "good": verdicts.good,
            "left": verdicts.left,
            "wrong": len(verdicts.wrong),
            "lost": len(verdicts.lost),
            "could_have_been_spared": dict(verdicts.spared),
            "could_not": dict(verdicts.unspared),
            "done_meanwhile": self.did,
            "memory_mib": None if self.memory is None else round(self.memory[0] / 2**20, 1),
            "memory_growth_mib": None if self.memory is None else round(self.memory[1] / 2**20, 1),
            "memory_slope_kib_a_minute": None if self.slope is None else round(self.slope / 1024, 1),
            "counted": {name: self.metrics[name] for name in COUNTED if name in self.metrics},
            "problems": self.problems,
        }


async def soak(plan: Plan) -> Soaked:
    """Run it. Raises `PlaceError` if something does not start."""
    with TemporaryDirectory(prefix="warmroute-soak-") as name:
        async with AsyncExitStack() as stack:
            return await _soak(plan, Path(name), stack)


async def _soak(plan: Plan, folder: Path, stack: AsyncExitStack) -> Soaked:
    kinds = [DIALECTS[number % len(DIALECTS)] for number in range(plan.engines)]
    engines = [
        EnginePlace(folder, f"engine{number}", ["--dialect", kind, *ENGINE_FLAGS]) for number, kind in enumerate(kinds)
    ]
    for engine in engines:
        stack.callback(engine.kill)
    await asyncio.gather(*(engine.start() for engine in engines))
    listed, guests = engines[plan.guests :], engines[: plan.guests]
    people = tenants()
    written = Written([engine.url for engine in listed], folder / "research.keys")
    written.key_file.write_text(people[0].key + "\n")
    gateway = await stack.enter_async_context(GatewayPlace(folder))
    gateway.write(written.text())
    await gateway.start(len(listed))
    for engine in guests:
        await gateway.ask("POST", "/workers", {"url": engine.url})
    await gateway.ready(len(engines))
    descriptors = await own_descriptors(gateway)
    harm = Harm()
    verdicts = Verdicts(harm)
    traffic = Traffic(gateway.url, people, plan.seed, verdicts)
    stack.push_async_callback(traffic.close)
    capacity = await traffic.most(plan.calibrate, plan.engines * SLOTS * 2)
    chaos = Chaos(plan, gateway, listed, guests, written, people[0], harm)
    watch = Watch(gateway, min(1.0, plan.seconds / 50))
    await _meanwhile(chaos, watch, traffic, plan.seconds, capacity * plan.load)
    await traffic.close()
    problems, metrics = await at_rest(gateway, engines, descriptors) if gateway.alive else ([], {})
    soaked = Soaked(
        verdicts, capacity, capacity * plan.load, dict(chaos.did), watch.growth(), watch.slope(), metrics, problems
    )
    _judge(soaked, chaos, watch, gateway)
    if gateway.alive and (status := await gateway.stop()) != 0:
        soaked.problems.append(f"the gateway did not end as it should when asked to: {status}")
    return soaked


async def _meanwhile(chaos: Chaos, watch: Watch, traffic: Traffic, seconds: float, rate: float) -> None:
    """Traffic, while things happen."""
    beside = [asyncio.create_task(chaos.run()), asyncio.create_task(watch.run())]
    try:
        # A gateway that died would be asked in vain for minutes.
        await traffic.run(seconds, rate, lambda: chaos.gateway.alive)
    finally:
        for task in beside:
            task.cancel()
        found = await asyncio.gather(*beside, return_exceptions=True)
    for error in found:
        if isinstance(error, Exception):
            raise error
    await chaos.heal()


def _judge(soaked: Soaked, chaos: Chaos, watch: Watch, gateway: GatewayPlace) -> None:
    verdicts, problems = soaked.verdicts, soaked.problems
    if not gateway.alive:
        problems.append(f"the gateway died:\n{gateway.log.read_text(errors='replace')[-TAIL:]}")
    for kind, found in (("wrong", verdicts.wrong), ("lost", verdicts.lost)):
        if found:
            problems.append(f"{len(found)} answers are {kind}: {'; '.join(found[:5])}")
    if verdicts.spared:
        problems.append(
            f"{verdicts.spared.total()} failures could have been spared: {'; '.join(verdicts.examples[:5])}"
        )
    problems += chaos.failed
    leak = watch.leaks()
    if leak is not None:
        problems.append(leak)
    if not verdicts.good:
        problems.append("nothing was answered")
