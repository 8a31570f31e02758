"""``python -m load_tests.overload``: several times as much as the engines can serve, over HTTP.

A gateway in front of simulated engines that are slow by their physics, so that neither Python nor the machine is what is short.
What they can serve is measured first. Then ``desk``'s interactive requests come alone, at 30 % of that, and then together with
bulk of two tenants, ``desk`` and ``batch``, so that all of it is ``--times`` the capacity: at random times, whether there are
answers or not, as from people.

    goodput   requests whose answer began within their deadline, a second, against the capacity
    told      how long those that were turned away waited to hear it: at their arrival (the queue knows that it would be in
              vain), or at their deadline
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import aiohttp
import uvloop

from load_tests.client import quantile
from load_tests.places import EnginePlace, GatewayPlace, PlaceError
from load_tests.soak.answers import Answer, Manner, ask
from load_tests.soak.asked import Asking
from load_tests.soak.watch import at_rest

ENGINES = 4
SLOTS = 4
FLAGS = ("--kv-tokens", "60000", "--max-running", str(SLOTS), "--step-seconds", "0.04")
TOKENS = 24
"""Of every answer: what the engines can serve is then no matter of luck."""
INTERACTIVE = 0.3
"""Of the capacity."""
DEADLINES = {"interactive": 10.0, "bulk": 8.0}
"""Seconds. That of interactive requests is so long that a machine that is busy with something else sheds none of them."""
CALIBRATE = 20.0
WARMUP = 0.2
"""Of the run, before goodput is counted: queues fill."""
AT_ARRIVAL = 1.0
"""Seconds within which whoever is turned away was told when it came."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where requests come from."""

    tenant: str
    priority: str
    rate: float
    """Requests a second."""


@dataclass(slots=True)
class Load:
    """Everything that one part of the run asked."""

    began: float
    seconds: float
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {name: [] for name in DEADLINES})
    """By priority."""
    tenants: dict[str, int] = field(default_factory=dict)
    """Tenant -> its bulk requests that were served."""
    wrong: int = 0

    def began_in_time(self, priority: str) -> list[float]:
        """Seconds to the first token of those that had it within their deadline."""
        found = [answer.first for answer in self.answers[priority] if answer.first is not None]
        return [each for each in found if each <= DEADLINES[priority]]

    def rate(self, in_time: bool) -> float:
        """Answers that began in a second, after the warm-up; ``in_time``: only those within their deadline."""
        since, until = self.began + WARMUP * self.seconds, self.began + self.seconds
        counted = 0
        for priority, answers in self.answers.items():
            most = DEADLINES[priority] if in_time else inf
            firsts = [(each.began, each.first) for each in answers if each.first is not None]
            counted += sum(first <= most and since <= began + first < until for began, first in firsts)
        return counted / (until - since)

    def refused(self, priority: str) -> list[Answer]:
        """Those that were turned away."""
        return [each for each in self.answers[priority] if each.status not in (200, None)]

    def told(self, priority: str) -> dict[str, Any]:
        """One priority's figures. Milliseconds."""
        answers, refused = self.answers[priority], self.refused(priority)
        waits = [each.ended - each.began for each in refused]
        early = [each for each in waits if each < AT_ARRIVAL]
        firsts = [each.first for each in answers if each.first is not None]
        return {
            "asked": len(answers),
            "began": len(firsts),
            "began_in_time": len(self.began_in_time(priority)),
            "deadline_ms": DEADLINES[priority] * 1e3,
            **_quantiles("ttft", firsts),
            "refused": len(refused),
            "told_at_arrival": len(early),
            **_quantiles("told_at_arrival", early),
            "told_later": len(waits) - len(early),
            **_quantiles("told_later", [each for each in waits if each >= AT_ARRIVAL]),
        }


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    found = {f"{name}_p50_ms": quantile(values, 0.5), f"{name}_p99_ms": quantile(values, 0.99)}
    return {key: None if value is None else round(value * 1e3, 1) for key, value in found.items()}


@dataclass(slots=True)
class Overloaded:
    """What came of a run."""

    capacity: float
    times: float
    alone: Load
    together: Load
    problems: list[str]

    def told(self) -> dict[str, Any]:
        """As JSON."""
        began, goodput = self.together.rate(False), self.together.rate(True)
        return {
            "capacity_rps": round(self.capacity, 2),
            "asked_times_capacity": self.times,
            "began_rps": round(began, 2),
            "goodput_rps": round(goodput, 2),
            "goodput_of_capacity": round(goodput / self.capacity, 3) if self.capacity else None,
            "interactive_alone": self.alone.told("interactive"),
            "interactive": self.together.told("interactive"),
            "bulk": self.together.told("bulk"),
            "bulk_served_by_tenant": self.together.tenants,
            "problems": self.problems,
        }


class Clients:
    """Against one gateway."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = Random(seed)
        self.asking = Asking(seed)
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Its connections."""
        await self.http.close()

    async def one(self, tenant: str, priority: str, load: Load) -> None:
        """One request, into ``load``."""
        asked = replace(self.asking.first(stream=True), tokens=TOKENS)
        headers = {"authorization": f"Bearer {tenant}-key", "x-warmroute-priority": priority}
        answer = await ask(self.http, self.url, asked, Manner(headers))
        load.answers[priority].append(answer)
        if answer.status == 200:
            load.wrong += answer.text != asked.answer()
            if priority == "bulk":
                load.tenants[tenant] = load.tenants.get(tenant, 0) + 1

    async def most(self, seconds: float) -> float:
        """Answers that begin in a second while every engine has as much as it takes, after a third of ``seconds``."""
        load = Load(monotonic(), seconds)

        async def client() -> None:
            while monotonic() < load.began + seconds:
                await self.one("batch", "bulk", load)

        async with asyncio.TaskGroup() as group:
            for _ in range(ENGINES * SLOTS * 2):
                group.create_task(client())
        since, until = load.began + seconds / 3, load.began + seconds
        begun = [each.began + each.first for each in load.answers["bulk"] if each.first is not None]
        return sum(since <= at < until for at in begun) / (until - since)

    async def open(self, sources: Sequence[Source], seconds: float) -> Load:
        """Arrivals at random times from all of ``sources``; then their last answers are waited for."""
        load = Load(monotonic(), seconds)
        async with asyncio.TaskGroup() as group:

            async def source(of: Source) -> None:
                due = load.began
                while True:
                    due += self.random.expovariate(of.rate)
                    if due > load.began + seconds:
                        return
                    await asyncio.sleep(max(0.0, due - monotonic()))
                    group.create_task(self.one(of.tenant, of.priority, load))

            for each in sources:
                group.create_task(source(each))
        return load


def configuration(engines: Sequence[EnginePlace]) -> str:
    """Of the gateway."""
    workers = "".join(f'  - {{url: "{engine.url}", max_running: {SLOTS}}}\n' for engine in engines)
    priorities = ", ".join(f"{name}: {{deadline: {seconds}s}}" for name, seconds in DEADLINES.items())
    return (
        "listen: {host: 127.0.0.1, port: 0}\nadmin: {host: 127.0.0.1, port: 0}\n"
        "pressure: {lag: 5s}\ndrain: 0s\ndrain_limit: 5s\n"
        f"admission: {{priorities: {{{priorities}}}}}\n"
        "tenants:\n  - {name: desk, keys: [desk-key]}\n  - {name: batch, keys: [batch-key]}\n"
        f"workers:\n{workers}"
    )


async def overload(times: float, seconds: float, calibrate: float = CALIBRATE, seed: int = 1) -> Overloaded:
    """Run it. Raises `PlaceError` if something does not start."""
    with TemporaryDirectory(prefix="warmroute-overload-") as name:
        async with AsyncExitStack() as stack:
            folder = Path(name)
            engines = [EnginePlace(folder, f"engine{number}", FLAGS) for number in range(ENGINES)]
            for engine in engines:
                stack.callback(engine.kill)
            await asyncio.gather(*(engine.start() for engine in engines))
            gateway = await stack.enter_async_context(GatewayPlace(folder))
            gateway.write(configuration(engines))
            await gateway.start(ENGINES)
            clients = Clients(gateway.url, seed)
            stack.push_async_callback(clients.close)
            capacity = await clients.most(calibrate)
            interactive = Source("desk", "interactive", INTERACTIVE * capacity)
            bulk = (times - INTERACTIVE) * capacity / 2
            alone = await clients.open([interactive], seconds)
            together = await clients.open(
                [interactive, Source("desk", "bulk", bulk), Source("batch", "bulk", bulk)], seconds
            )
            await clients.close()
            problems, _ = await at_rest(gateway, engines, None)
            return Overloaded(capacity, times, alone, together, problems + _judged(alone, together))


def _judged(alone: Load, together: Load) -> list[str]:
    problems = []
    if wrong := alone.wrong + together.wrong:
        problems.append(f"{wrong} answers are not what they have to be")
    hung = [each for load in (alone, together) for found in load.answers.values() for each in found if not each.whole]
    if hung:
        problems.append(f"{len(hung)} requests had no whole answer: {hung[0].error}")
    for priority in DEADLINES:
        for each in together.refused(priority) + alone.refused(priority):
            if each.status != 429 or not each.refused or each.retry_after is None:
                problems.append(f"a refusal says {each.status}, {each.refused}, retry after {each.retry_after}")
                break
    shed = len(together.refused("interactive"))
    if shed and together.tenants:
        problems.append(f"{shed} interactive requests were turned away while bulk was served")
    return problems


def _show(told: dict[str, Any], indent: str = "") -> None:
    for name, value in told.items():
        if isinstance(value, dict):
            print(f"{indent}{name.replace('_', ' ')}")
            _show(value, indent + "    ")
        else:
            print(f"{indent}{name.replace('_', ' ')}: {value}")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all was as it should be, 1 if not, 2 if it could not be run."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.overload", description="More than can be served.")
    parser.add_argument("--times", type=float, default=3.0, metavar="X", help="of the capacity, more than 0.3")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="of each of the two parts")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    if options.times <= INTERACTIVE:
        parser.error(f"--times must be more than {INTERACTIVE}: interactive requests alone are as much")
    if options.seconds <= 0:
        parser.error("--seconds must be more than 0")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = uvloop.run(overload(options.times, options.seconds))
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    told = found.told()
    if options.json:
        print(json.dumps(told, indent=2))
    else:
        _show(told)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
