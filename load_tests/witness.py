"""The simulation held against HTTP: ``python -m load_tests.witness TRACE``.

The same traffic goes through real gateways to simulated engines behind sockets, and through the simulation: SGLang's router
with its cache_aware where it is installed (see `load_tests.bench.contenders`), ours under each policy. What is compared is the
engines' own accounting, so no gateway is asked how good it was.

Both see the same seconds: where the traffic is too long for real time, its pauses and the engines' rates are made shorter
before either begins. Answers are not carried on: over HTTP the next prompt has words of ours where the answer was
(`load_tests.workloads.text`), and so has the simulated one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.table import Table

from load_tests.bench.contenders import OURS, Address, Contender, ours, peers
from load_tests.bench.load import KEY
from load_tests.bench.processes import Started, cores, free_ports, start
from load_tests.client import Client
from load_tests.engine.physics import Rates
from load_tests.replay_http import Replay
from load_tests.simulate.baselines import BASELINES
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import BadTraffic, Simulation, check
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Traffic, scaled
from policies.base import load

MODEL = "sim"
ROUTER = "sglang-router"
"""The peer whose rule the simulation has."""

SIMULATED = {(ROUTER, "cache_aware"): "sglang_cache_aware"}
"""What a peer's policy is called in the simulation; ours are called the same."""

START_SECONDS = 60.0
LIMIT = 2.0
"""Times as long as the simulation took, and half a minute, after which a run over HTTP is given up."""


class WitnessError(RuntimeError):
    """A process did not start, or a run did not end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run came to, by the engines' accounting. ``hit_rate`` and ``imbalance``: ``None`` where nothing was
    computed; ``failed``: requests without an answer; ``late``: ms by which the load generator sent too late (p99), ``None`` in
    the simulation."""

    requests: int
    failed: int
    hit_rate: float | None
    imbalance: float | None
    computed: list[int]
    seconds: float
    late: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """The traffic and the engines, the same for both."""

    traffic: Traffic
    workers: int
    options: Options

    @classmethod
    def of(cls, traffic: Traffic, workers: int, kv_tokens: int, speed: float) -> Setting:
        """``speed`` times as fast. Raises `BadTraffic` for a request that fits into no engine."""
        chains = [
            replace(chain, turns=tuple(replace(turn, after=(), output=max(1, turn.output)) for turn in chain.turns))
            for chain in traffic.chains
        ]
        told = scaled(replace(traffic, chains=chains), think=1 / speed, rate=speed)
        options = Options(kv_tokens=kv_tokens, block=traffic.block, rates=Rates().scaled(1 / speed))
        check(told, options)
        return cls(told, workers, options)


class _Replay(Replay):
    def __init__(self, traffic: Traffic, url: str, model: str, *, api_key: str | None) -> None:
        super().__init__(traffic, url, model, api_key=api_key)
        self._client = Client(url, model, timeout=900.0)


def figures(prompt: int, computed: list[int], **more: Any) -> Figures:
    """Figures of engines that were asked ``prompt`` tokens and ``computed`` so many each."""
    total = sum(computed)
    return Figures(
        hit_rate=1 - total / prompt if prompt else None,
        imbalance=max(computed) * len(computed) / total if total else None,
        computed=computed,
        **more,
    )


def simulated(setting: Setting, policy: str, seed: int = 0) -> Figures:
    """In virtual time."""
    made = BASELINES[policy]() if policy in BASELINES else load(policy)
    outcome = Simulation(setting.traffic, made, setting.workers, setting.options, seed=seed).run()
    totals = [engine.totals for engine in outcome.engines]
    computed = [each.computed for each in totals]
    requests = len(outcome.asked)
    return figures(sum(each.prompt for each in totals), computed, requests=requests, failed=0, seconds=outcome.seconds)


async def over_http(setting: Setting, contender: Contender, folder: Path, limit: float) -> Figures:
    """The same over sockets of loopback, given up after ``limit`` seconds; all processes are ended. Raises `WitnessError`."""
    ports = free_ports(setting.workers)
    own, others = cores()
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)))
        for number, port in enumerate(ports):
            log = folder / f"engine-{port}.log"
            stack.callback(start(engine_command(setting, port), (own, others)[number % 2], log).stop)
        for port in ports:
            await _until(lambda port=port: _answers(http, f"http://127.0.0.1:{port}/health"), f"engine {port}")  # type: ignore[misc]
        address = Address(*free_ports(2))
        log = folder / f"{contender.name}-{contender.policy}.log"
        gateway = start(contender.command(address, ports, folder), own, log)
        stack.callback(gateway.stop)
        await _until(lambda: _ready(http, contender, address), f"{contender.name} (see {log})", gateway)
        url = f"http://127.0.0.1:{address.port}"
        key = KEY if contender.name == OURS else None
        try:
            async with asyncio.timeout(limit):
                replayed = await _Replay(setting.traffic, url, MODEL, api_key=key).run()
        except TimeoutError:
            raise WitnessError(f"{contender.name} {contender.policy} was not done after {limit:.0f} s") from None
        stats = [await _json(http, f"http://127.0.0.1:{port}/sim/stats") for port in ports]
        row = replayed.row()
        return figures(
            sum(each["prompt_tokens"] for each in stats),
            [each["computed_tokens"] for each in stats],
            requests=row["requests"],
            failed=row["errors"] + row["unsent"],
            seconds=replayed.seconds,
            late=row["late_p99_ms"],
        )


def engine_command(setting: Setting, port: int) -> list[str]:
    """An engine of the simulation's size, block and rates."""
    options, rates = setting.options, setting.options.rates
    sizes = {
        "--port": port,
        "--kv-tokens": options.kv_tokens,
        "--context-length": options.kv_tokens // options.block * options.block,
        "--block-size": options.block,
        "--max-running": options.max_running,
        "--chunk-tokens": options.chunk_tokens,
        "--step-seconds": rates.base,
        "--token-seconds": rates.token,
        "--decode-seconds": rates.decode,
        "--attention-seconds": rates.attention,
    }
    named = [each for name, value in sizes.items() for each in (name, str(value))]
    return [sys.executable, "-m", "load_tests.engine", "--dialect", "vllm", "--model", MODEL, *named]


async def _until(ready: Callable[[], Awaitable[bool]], what: str, started: Started | None = None) -> None:
    end = time.monotonic() + START_SECONDS
    while not await ready():
        if started is not None and not started.alive:
            raise WitnessError(f"{what} ended with status {started.process.returncode}")
        if time.monotonic() > end:
            raise WitnessError(f"{what} did not become ready in {START_SECONDS:.0f} s")
        await asyncio.sleep(0.1)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as response:
            return bool(response.status == 200)
    except (aiohttp.ClientError, OSError):
        return False


async def _json(http: aiohttp.ClientSession, url: str) -> Any:
    async with http.get(url) as response:
        return await response.json()


async def _ready(http: aiohttp.ClientSession, contender: Contender, address: Address) -> bool:
    """Whether it has all workers: one that joins late would be spared at first."""
    mine = contender.name == OURS
    try:
        told = await _json(http, f"http://127.0.0.1:{address.admin if mine else address.port}/workers")
        listed: list[bool] = [each["state"] == "ready" if mine else each["is_healthy"] for each in told["workers"]]
    except (aiohttp.ClientError, OSError, ValueError, KeyError):
        return False
    return listed.count(True) == contender.targets


def contenders(workers: int, policies: Sequence[str]) -> tuple[list[Contender], list[str]]:
    """Who is run, and the names of those that are not installed."""
    found = [
        Contender(each.name, each.policy, workers, each.command)
        for each in peers()
        if (each.name, each.policy) in SIMULATED
    ]
    missing = [] if found else [ROUTER]
    return found + [ours(policy, workers) for policy in policies], missing


def compare(setting: Setting, who: Sequence[Contender], seed: int = 0) -> list[dict[str, Any]]:
    """A row each: over HTTP, simulated, and the difference of hit rates in points. A run that fails is told in ``error``."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="witness-") as folder:
        for contender in who:
            policy = SIMULATED.get((contender.name, contender.policy), contender.policy)
            expected = simulated(setting, policy, seed)
            row: dict[str, Any] = {"gateway": contender.name, "policy": contender.policy, "simulated": asdict(expected)}
            limit = LIMIT * expected.seconds + 30.0
            try:
                found = uvloop.run(over_http(setting, contender, Path(folder), limit))
            except WitnessError as error:
                rows.append({**row, "http": None, "points": None, "error": str(error)})
                continue
            points = None
            if found.hit_rate is not None and expected.hit_rate is not None:
                points = round(100 * (found.hit_rate - expected.hit_rate), 2)
            rows.append({**row, "http": asdict(found), "points": points, "error": None})
    return rows


def show(console: Console, name: str, speed: float, rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """A table for people."""
    table = Table(title=f"{name} over HTTP and in the simulation, {speed:.3g} times as fast")
    table.add_column("gateway and policy", no_wrap=True)
    for head in ("hits HTTP", "sim.", "points", "imb. HTTP", "sim.", "failed", "late p99"):
        table.add_column(head, justify="right")
    for row in rows:
        http, virtual = row["http"], row["simulated"]
        label = f"{row['gateway']} {row['policy']}"
        if http is None:
            table.add_row(label, row["error"])
            continue
        rates = ["-" if each["hit_rate"] is None else f"{each['hit_rate']:.1%}" for each in (http, virtual)]
        spread = ["-" if each["imbalance"] is None else f"{each['imbalance']:.2f}" for each in (http, virtual)]
        points = "-" if row["points"] is None else f"{row['points']:+.1f}"
        late = "-" if http["late"] is None else f"{http['late']:.0f} ms"
        table.add_row(label, *rates, points, *spread, str(http["failed"]), late)
    console.print(table)
    for each in missing:
        console.print(f"not run: {each} is not installed; WARMROUTE_PEERS names the folder it is looked for in")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load_tests.witness", description="The simulation against HTTP.")
    parser.add_argument("trace", nargs="?", default="tools", metavar="TRACE", help="as for warmroute replay (tools)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="engines (default 4)")
    parser.add_argument("--limit", type=int, default=600, metavar="N", help="only the first N requests (default 600)")
    parser.add_argument("--kv-tokens", type=int, default=120_000, metavar="N", help="of one engine (default 120,000)")
    parser.add_argument("--policy", default="cache_aware,round_robin", help="ours, with commas")
    parser.add_argument(
        "--seconds", type=float, default=170.0, metavar="S", help="a run's, about; shortens pauses and work"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is generated or drawn (default 0)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0: everything installed ran and was answered; 1: something failed; 2: the traffic cannot be had."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    for name in ("workers", "limit", "kv_tokens", "seconds"):
        if getattr(asked, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {getattr(asked, name)}")
    policies = [name.strip() for name in asked.policy.split(",") if name.strip()]
    try:
        for name in policies:
            load(name)
        traffic = find(asked.trace, workers=asked.workers, seed=asked.seed, limit=asked.limit)
        setting = Setting.of(traffic, asked.workers, asked.kv_tokens, 1.0)
        longest = max(simulated(setting, policy).seconds for policy in policies or ["round_robin"])
        speed = max(1.0, longest / asked.seconds)
        setting = Setting.of(traffic, asked.workers, asked.kv_tokens, speed)
    except (NoTraffic, BadTraffic, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    who, missing = contenders(asked.workers, policies)
    rows = compare(setting, who, asked.seed)
    if asked.json:
        print(json.dumps({"traffic": traffic.name, "speed": speed, "rows": rows, "not_run": missing}))
    else:
        show(Console(), traffic.name, speed, rows, missing)
    return 1 if any(row["error"] or row["http"]["failed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
