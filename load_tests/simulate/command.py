"""``warmroute replay``: one traffic under several policies, each on a fresh fleet."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kv_index.checkpoints import Rule
from load_tests.engine.physics import LARGE, Rates
from load_tests.simulate.baselines import BASELINES
from load_tests.simulate.conditions import Conditions
from load_tests.simulate.curves import Curve, curve
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import Goal, mean, row
from load_tests.simulate.fleet import Outcome, Simulation, check
from load_tests.simulate.page import Page, page
from load_tests.simulate.table import tables
from load_tests.simulate.traffic import Traffic, ceiling
from policies.base import BadOption, Policy, UnknownPolicy, load

SHOWN = 50
"""Answers after which the bar moves: drawing costs more than simulating."""

WORKERS = 8
"""Engines where nothing is said."""

LAG = Conditions().lag
"""Seconds until an event arrives, where nothing is said."""

ENGINES = {"medium": (Rates(), 1), "large": (LARGE, 8)}
"""Rates, and accelerators of one engine."""


class BadRequest(ValueError):
    """What was asked for cannot be simulated; the message names the option and the cure."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated. ``engine``: one of `ENGINES`; ``options`` has the engine's size, its block is the traffic's."""

    workers: int = WORKERS
    engine: str = "medium"
    options: Options = field(default_factory=Options)
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def accelerators(self) -> int:
        """Of one engine."""
        return ENGINES[self.engine][1]


@dataclass(frozen=True, slots=True)
class Report:
    """What is shown. ``price``: of an accelerator's hour; ``html``: file of the page."""

    seeds: Sequence[int] = (0,)
    goal: Goal | None = None
    price: float | None = None
    as_json: bool = False
    html: str | None = None


def fleet(
    *,
    workers: int | None = None,
    pd: tuple[int, int] | None = None,
    engine: str = "medium",
    kv_tokens: int = 500_000,
    host_tokens: int = 0,
    reuse: Rule | None = None,
    events: bool = False,
    event_lag: float | None = None,
    silent: int | None = None,
    poll: float = 1.0,
    gateways: int = 1,
    held: bool = False,
    no_session: bool = False,
) -> Fleet:
    """The fleet that options of the command ask for. Raises `BadRequest` where they contradict each other."""
    prefill = 0
    if pd is not None:
        if workers is not None and workers != sum(pd):
            raise BadRequest(
                f"--pd {pd[0]}:{pd[1]} makes {sum(pd)} engines, not --workers {workers}; leave --workers out"
            )
        if held:
            raise BadRequest("--held keeps sessions on engines that do both; leave --held or --pd out")
        prefill, workers = pd[0], sum(pd)
    workers = WORKERS if workers is None else workers
    if not events and event_lag is not None:
        raise BadRequest("--event-lag tells how late events are; add --events")
    if not events and silent is not None:
        raise BadRequest("--silent tells how many engines publish no events; add --events")
    if silent is not None and silent > workers:
        raise BadRequest(f"--silent {silent} is more than the {workers} engines there are; give at most {workers}")
    if held and no_session:
        raise BadRequest("--held is a matter of sessions; leave --held or --no-session out")
    conditions = Conditions(
        routers=gateways,
        poll=poll,
        events=events,
        lag=LAG if event_lag is None else event_lag,
        silent=silent or 0,
        prefill=prefill,
        held=held,
        named=not no_session,
    )
    try:
        options = Options(kv_tokens=kv_tokens, rates=ENGINES[engine][0], host_tokens=host_tokens, states=reuse)
    except ValueError as error:
        raise BadRequest(f"--kv-tokens: {error}") from None
    return Fleet(workers, engine, options, conditions)


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


def replay(read: Callable[[int], Traffic], names: str, simulated: Fleet, report: Report) -> int:
    """Simulate the traffic of each seed, which ``read`` gives, under each policy; print what came of it. Returns the exit
    status.

    Raises `BadRequest`, or `ValueError` for a fleet that cannot serve the traffic.
    """
    policies(names)
    if report.html is not None:
        _writable(report.html)
    rows: dict[str, list[dict[str, Any]]] = {}
    curves: list[Curve] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for seed in report.seeds:
            traffic = read(seed)
            bound = ceiling(traffic)
            for name, policy in policies(names).items():
                label = name if len(report.seeds) == 1 else f"{name} (seed {seed})"
                outcome = _run(traffic, policy, simulated, seed, progress, label)
                price = None if report.price is None else report.price * simulated.accelerators
                rows.setdefault(name, []).append(row(outcome, bound, report.goal, price))
                if report.html is not None and seed == report.seeds[0]:
                    curves.append(curve(name, outcome))
    means = {name: mean(each) for name, each in rows.items()}
    if report.html is not None:
        shown = Page(traffic.name, said(simulated), bound, report.seeds, means, curves)
        Path(report.html).write_text(page(shown), encoding="utf-8")
    if report.as_json:
        print(json.dumps({"policies": means}), flush=True)
    else:
        console = Console()
        for each in tables(f"{traffic.name}: {said(simulated)}", means, console.width, len(report.seeds)):
            console.print(each)
    return 0


def _run(traffic: Traffic, policy: Policy, simulated: Fleet, seed: int, progress: Progress, label: str) -> Outcome:
    try:
        options = replace(simulated.options, block=traffic.block)
    except ValueError as error:
        raise BadRequest(f"--kv-tokens: {error}") from None
    check(traffic, options)
    total = sum(len(chain.turns) for chain in traffic.chains)
    task = progress.add_task(label, total=total)

    def tick(done: int) -> None:
        if done % SHOWN == 0 or done == total:
            progress.update(task, completed=done)

    simulation = Simulation(traffic, policy, simulated.workers, options, seed=seed, conditions=simulated.conditions)
    return simulation.run(tick)


def said(simulated: Fleet) -> str:
    """The fleet in words."""
    conditions, options = simulated.conditions, simulated.options
    size = "" if simulated.engine == "medium" else f"{simulated.engine} "
    roles = ""
    if conditions.prefill:
        roles = f" ({conditions.prefill} prefill, {simulated.workers - conditions.prefill} decode)"
    parts = [f"{simulated.workers} simulated {size}workers{roles} of {options.kv_tokens:,} KV tokens"]
    if options.host_tokens:
        parts.append(f"{options.host_tokens:,} in host memory")
    if options.states is not None:
        parts.append("hybrid model")
    if conditions.events:
        parts.append("events" + (f", {conditions.silent} silent" if conditions.silent else ""))
    if conditions.routers > 1:
        parts.append(f"{conditions.routers} gateways")
    if conditions.held:
        parts.append("streaming sessions")
    if not conditions.named:
        parts.append("sessions not told")
    return ", ".join(parts)


def _writable(name: str) -> None:
    path = Path(name)
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise BadRequest(
            f"--html {name} cannot be written: {error.strerror or error}; name a file in a folder that exists"
        ) from None
