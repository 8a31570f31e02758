"""``warmroute demo``: the same agent sessions under several policies, each on fresh simulated engines."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvloop
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from load_tests.client import Client, Results, quantile
from load_tests.engine import Engine, EngineOptions
from load_tests.workloads.agents import AgentSession, agent_sessions

POLICIES = ("round_robin", "least_load", "cache_aware")
ENGINES = 4
MODEL = "sim"
SEED = 7


@dataclass(slots=True)
class Fleet:
    """Simulated engines with a gateway in front."""

    engines: list[Engine]
    running: Running

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://127.0.0.1:{self.running.port}"


async def start_fleet(stack: AsyncExitStack, policy: str, port: int = 0, admin_port: int = 0) -> Fleet:
    """Fresh engines and a fresh gateway, stopped by ``stack``; returns when all workers are ready."""
    engines = []
    for number in range(ENGINES):
        engine = await Engine.start(EngineOptions(models=[MODEL], kv_tokens=48_000, seed=number))
        stack.push_async_callback(engine.kill)
        engines.append(engine)
    config = Config()
    config.policy = policy
    config.listen.host = "127.0.0.1"
    config.listen.port = port
    config.admin.port = admin_port
    config.drain = 0.0
    config.drain_limit = 5.0
    config.workers = [WorkerConfig(engine.url) for engine in engines]
    running = Running(config)
    await running.start()
    stack.push_async_callback(running.stop)
    async with asyncio.timeout(30):
        while sum(1 for _ in running.fleet.ready()) < ENGINES:
            await asyncio.sleep(0.02)
    return Fleet(engines, running)


def workload(seconds: float) -> list[AgentSession]:
    """The fixed list of sessions: about ``seconds`` long."""
    turns = 6
    think = max(0.1, 0.4 * seconds / turns)
    return agent_sessions(
        sessions=40, turns=turns, seed=SEED, shared_tokens=800, result_tokens=500, think=think, spread=0.25 * seconds
    )


def measured(results: Results, engines: list[Engine]) -> dict[str, Any]:
    """One policy's row; hit rate and imbalance are the engines' own accounting."""
    stats = [engine.stats() for engine in engines]
    prompt = sum(each["prompt_tokens"] for each in stats)
    computed = [each["computed_tokens"] for each in stats]
    p50, p99 = quantile(results.ttft, 0.5), quantile(results.ttft, 0.99)
    return {
        "requests": results.requests,
        "errors": len(results.errors),
        "token_hit_rate": round(sum(each["cached_tokens"] for each in stats) / prompt, 4) if prompt else None,
        "ttft_p50_ms": None if p50 is None else round(p50 * 1e3, 1),
        "ttft_p99_ms": None if p99 is None else round(p99 * 1e3, 1),
        "imbalance": round(max(computed) * len(computed) / sum(computed), 3) if sum(computed) else None,
        "moved_sessions": len(results.moved),
    }


async def compare(seconds: float, tick: Callable[[str, int, int], None]) -> dict[str, dict[str, Any]]:
    """Every policy on the same sessions; ``tick`` gets (policy, requests done, requests in all)."""
    sessions = workload(seconds)
    total = sum(len(session.turns) for session in sessions)
    rows: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        results = Results()
        async with AsyncExitStack() as stack:
            fleet = await start_fleet(stack, policy)
            async with Client(fleet.url, MODEL) as client:
                await client.run(sessions, results, partial(_tick, tick, policy, results, total))
            rows[policy] = measured(results, fleet.engines)
        for error in dict.fromkeys(results.errors):
            logging.getLogger("warmroute").error("%s: a request failed: %s", policy, error)
    return rows


def _tick(tick: Callable[[str, int, int], None], policy: str, results: Results, total: int) -> None:
    tick(policy, results.requests, total)


def show(console: Console, rows: dict[str, dict[str, Any]]) -> None:
    """The closing table."""
    table = Table(
        title=f"{ENGINES} simulated engines, the same agent sessions under each policy",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("policy", "requests", "errors", "hits", "TTFT p50", "p99", "imbalance", "moved"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for policy, row in rows.items():
        table.add_row(
            policy,
            str(row["requests"]),
            str(row["errors"]),
            "-" if row["token_hit_rate"] is None else f"{row['token_hit_rate']:.1%}",
            "-" if row["ttft_p50_ms"] is None else f"{row['ttft_p50_ms']:.0f} ms",
            "-" if row["ttft_p99_ms"] is None else f"{row['ttft_p99_ms']:.0f} ms",
            "-" if row["imbalance"] is None else f"{row['imbalance']:.2f}",
            str(row["moved_sessions"]),
        )
    console.print(table)


async def _compare_shown(seconds: float, console: Console) -> dict[str, dict[str, Any]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {policy: progress.add_task(policy, total=None, start=False) for policy in POLICIES}

        def tick(policy: str, done: int, total: int) -> None:
            if not progress.tasks[tasks[policy]].started:
                progress.start_task(tasks[policy])
            progress.update(tasks[policy], completed=done, total=total)

        return await compare(seconds, tick)


async def _keep(console: Console) -> None:
    async with AsyncExitStack() as stack:
        try:
            fleet = await start_fleet(stack, "cache_aware", 8080, 8081)
        except OSError:
            fleet = await start_fleet(stack, "cache_aware")
        admin = f"http://127.0.0.1:{fleet.running.admin.port}"
        console.print(f"Still up. Clients: {fleet.url}  Control plane: {admin}  End with Ctrl-C. Try:\n")
        chat = '{"model": "sim", "max_tokens": 20, "messages": [{"role": "user", "content": "Hello"}]}'
        console.print(f"  curl -i {fleet.url}/v1/chat/completions -d '{chat}'", soft_wrap=True, highlight=False)
        console.print(f"  curl {admin}/route -d '{chat}'", soft_wrap=True, highlight=False)
        console.print(f"  curl {admin}/workers", highlight=False)
        console.print(f"  curl {admin}/metrics", highlight=False)
        await asyncio.Event().wait()


def run(*, seconds: float, keep: bool, as_json: bool) -> int:
    """Run the demo; 0 when every request of every policy was answered."""
    logging.getLogger("warmroute").setLevel(logging.ERROR)
    console = Console(stderr=as_json)

    async def everything() -> dict[str, dict[str, Any]]:
        rows = await _compare_shown(seconds, console)
        if as_json:
            print(json.dumps({"policies": rows}), flush=True)
        else:
            show(console, rows)
        if keep:
            await _keep(console)
        return rows

    rows = uvloop.run(everything())
    return 1 if any(row["errors"] or not row["requests"] for row in rows.values()) else 0
