"""``warmroute replay``: one traffic under several policies, each on a fresh fleet."""

import json
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from load_tests.simulate.baselines import BASELINES
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import row
from load_tests.simulate.fleet import Simulation, check
from load_tests.simulate.traffic import Traffic, ceiling
from policies.base import BadOption, Policy, UnknownPolicy, load

SHOWN = 50
"""Answers after which the bar moves: drawing costs more than simulating."""


class BadRequest(ValueError):
    """What was asked for cannot be simulated; the message names the option and the cure."""


def policies(names: str) -> dict[str, Policy]:
    """Of a list with commas: ours, and `BASELINES`. Raises `BadRequest`."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise BadRequest("--policy names no policy; give one or more, like --policy round_robin,cache_aware")
    try:
        return {name: BASELINES[name]() if name in BASELINES else load(name) for name in wanted}
    except UnknownPolicy as error:
        raise BadRequest(f"--policy: {error}; and to compare with: {', '.join(sorted(BASELINES))}") from None
    except BadOption as error:
        raise BadRequest(f"--policy: {error}") from None


def replay(traffic: Traffic, names: str, *, workers: int, kv_tokens: int, seed: int, as_json: bool) -> int:
    """Simulate ``traffic`` under each policy and print what came of it; returns the exit status.

    Raises `BadRequest`, or `ValueError` for a fleet that cannot serve the traffic.
    """
    chosen = policies(names)
    options = Options(kv_tokens=kv_tokens, block=traffic.block)
    check(traffic, options)
    bound = ceiling(traffic)
    total = sum(len(chain.turns) for chain in traffic.chains)
    rows: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for name, policy in chosen.items():
            task = progress.add_task(name, total=total)

            def tick(done: int, task: Any = task) -> None:
                if done % SHOWN == 0 or done == total:
                    progress.update(task, completed=done)

            outcome = Simulation(traffic, policy, workers, options, seed=seed).run(tick)
            rows[name] = row(outcome, bound)
    if as_json:
        print(json.dumps({"policies": rows}), flush=True)
    else:
        Console().print(table(traffic.name, workers, kv_tokens, rows))
    return 0


COLUMNS = (
    ("requests", "requests", "{:,}"),
    ("token_hit_rate", "hits", "{:.1%}"),
    ("ceiling", "ceiling", "{:.1%}"),
    ("ttft_mean_ms", "TTFT mean", "{:,.0f}"),
    ("ttft_p50_ms", "p50", "{:,.0f}"),
    ("ttft_p90_ms", "p90", "{:,.0f}"),
    ("ttft_p99_ms", "p99", "{:,.0f}"),
    ("tpot_p50_ms", "TPOT p50", "{:.1f}"),
    ("session_p50_s", "session p50", "{:,.1f} s"),
    ("imbalance", "imbalance", "{:.2f}"),
    ("moved_sessions", "moved", "{:,}"),
)


def table(name: str, workers: int, kv_tokens: int, rows: dict[str, dict[str, Any]]) -> Table:
    """For people; times in milliseconds unless they say otherwise."""
    shown = Table(
        title=f"{name}: {workers} simulated workers of {kv_tokens:,} KV tokens; times in ms",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("policy", no_wrap=True)
    for _, title, _ in COLUMNS:
        shown.add_column(title, justify="right")
    for policy, figures in rows.items():
        cells: Sequence[str] = ["-" if figures[key] is None else form.format(figures[key]) for key, _, form in COLUMNS]
        shown.add_row(policy, *cells)
    return shown
