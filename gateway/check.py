"""``warmroute check --fleet``: what every worker is, and what it lacks."""

import json

from rich.console import Console
from rich.markup import escape

from gateway.config import Config
from gateway.config_check import check
from gateway.config_reader import ConfigError
from gateway.engines.audit import lacks
from gateway.errors import NoConnection, WorkerFault
from gateway.fleet import Fleet
from gateway.probe import Probe
from gateway.workers import Worker


async def check_fleet(config: Config, as_json: bool) -> int:
    """Ask all configured workers once; 0 if all answer, else 1. Raises `ConfigError`."""
    problems = check(config)
    if problems:
        raise ConfigError(problems)
    fleet = Fleet(lambda: 0.0)
    probe = Probe(fleet)
    await probe.start()
    rows: list[tuple[Worker, str | None]] = []
    try:
        for each in config.workers:
            worker = fleet.add(each.spec(config.disaggregation.named))
            problem = None
            try:
                fleet.describe(worker, await probe.read(worker))
                if await probe.tells_cached(worker) is False:
                    worker.observe("usage_details", True)
            except (WorkerFault, NoConnection) as fault:
                problem = fault.message
            rows.append((worker, problem))
    finally:
        await probe.stop()
    if as_json:
        print(json.dumps({"workers": [_row(worker, problem) for worker, problem in rows]}))
    else:
        _show(rows)
    return 1 if any(problem for _, problem in rows) else 0


def _row(worker: Worker, problem: str | None) -> dict[str, object]:
    facts = worker.facts
    return {
        "url": worker.url,
        "problem": problem,
        "engine": None if problem else facts.engine,
        "version": facts.version,
        "models": [model.name for model in facts.models],
        "kv_tokens": facts.kv_tokens,
        "block_size": facts.block_size,
        "lacks": [] if problem else lacks(worker),
    }


def _show(rows: list[tuple[Worker, str | None]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for worker, problem in rows:
        facts = worker.facts
        if problem:
            console.print(f"[bold]{escape(worker.url)}[/]\n  does not answer: {escape(problem)}")
            continue
        models = ", ".join(model.name for model in facts.models) or "none listed"
        tokens = "unknown" if facts.kv_tokens is None else f"{facts.kv_tokens:,} tokens"
        block = "unknown" if facts.block_size is None else str(facts.block_size)
        kind = f"{facts.engine} {facts.version or ''}".strip()
        console.print(f"[bold]{escape(worker.url)}[/]  {escape(kind)}")
        console.print(f"  models: {escape(models)}; KV cache: {tokens}; block size: {block}")
        for row in lacks(worker):
            console.print(f"  missing: {escape(row['what'])}")
            console.print(f"    costs: {escape(row['costs'])}\n    cure:  {escape(row['cure'])}")
