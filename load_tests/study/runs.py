"""``python -m load_tests.study``: every policy on every workload, and what each ingredient of the flagship is worth.

The engine model, its rates and the workloads are what they are; policies were tuned on other seeds than those reported
here. Writes the runs as JSON (``--out``); `load_tests.study.tables` makes the report of them.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from load_tests.engine.physics import LARGE, Rates
from load_tests.simulate.baselines import BASELINES
from load_tests.simulate.conditions import Change, Conditions, Fate
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import mean, row
from load_tests.simulate.fleet import Outcome, Simulation
from load_tests.simulate.traffic import ceiling
from load_tests.study.ablation import WITHOUT, without
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Traffic
from policies.base import Policy, load

SEEDS = (1, 2, 3)
"""Those reported; tuning saw 101 to 104."""

POLICIES = (
    "random",
    "round_robin",
    "least_load",
    "least_wait",
    "session_hash",
    "consistent_hash",
    "session",
    "sglang_cache_aware",
    "dynamo_cost",
    "sticky",
    "llmd_blend",
    "mooncake",
    "lmetric",
    "preble_e2",
    "cache_aware",
    "oracle",
)

PRICE = 2.0
"""Of an accelerator's hour, in whatever money: costs are to be compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a fleet."""

    trace: str
    workers: int = 16
    kv_tokens: int = 500_000
    rates: Rates = field(default_factory=Rates)
    accelerators: int = 1


CASES = {
    "Mooncake conversation, large engines": Case("mooncake/conversation_trace.jsonl", 16, 3_000_000, LARGE, 8),
    "Mooncake conversation": Case("mooncake/conversation_trace.jsonl", 16, 3_000_000),
    "coding agents, tokens and think time halved": Case(
        "kv_cache_tester/v8_sessions.jsonl.gz?tokens=0.5&think=0.5", 8, 1_000_000
    ),
    "coding agents as recorded": Case("kv_cache_tester/v8_sessions.jsonl.gz", 8, 2_000_000),
    "universal": Case("universal"),
    "tools": Case("tools"),
    "chat": Case("chat"),
    "documents": Case("documents"),
    "hot": Case("hot", 2),
    "hot_some": Case("hot_some", 2),
    "causal": Case("causal", 4),
    "tree": Case("tree"),
    "load": Case("load"),
    "agents": Case("agents"),
    "rollouts": Case("rollouts"),
    "subagents": Case("subagents"),
}

HARSH = ("Mooncake conversation", "subagents", "tools", "load")
"""Workloads of the runs under worse conditions."""

CONDITIONS: Mapping[str, Callable[[int], Conditions]] = {
    "as usual": lambda workers: Conditions(),
    "events": lambda workers: Conditions(events=True),
    "events 1 s late": lambda workers: Conditions(events=True, lag=1.0),
    "events, half of the engines silent": lambda workers: Conditions(events=True, silent=workers // 2),
    "4 gateways, no events, load 250 ms old": lambda workers: Conditions(routers=4, poll=0.25),
    "4 gateways, no events, load 1 s old": lambda workers: Conditions(routers=4),
    "4 gateways, events 1 s late, load 1 s old": lambda workers: Conditions(routers=4, events=True, lag=1.0),
    "one engine half as fast": lambda workers: Conditions(speeds={0: 0.5}),
    "one engine dies after 60 s": lambda workers: Conditions(changes=(Change(60.0, 0, Fate.DIES),)),
    "one engine joins after 60 s": lambda workers: Conditions(changes=(Change(60.0, 0, Fate.JOINS),)),
}

MODES: Mapping[str, Conditions] = {
    "full history resent": Conditions(named=False),
    "with session_id": Conditions(),
    "streaming session": Conditions(held=True),
}
"""How a rollout's client talks to its engine."""

THRIFT = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
CURVES = ("Mooncake conversation, large engines", "Mooncake conversation", "documents", "coding agents as recorded")


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a part of the report, its row and column there, and what to simulate."""

    part: str
    case: str
    label: str
    policy: str
    seed: int
    option: float = 0.0

    def made(self) -> Policy:
        """A fresh policy."""
        if self.part == "ablation":
            return without(self.label)
        if self.policy in BASELINES:
            return BASELINES[self.policy]()
        return load(self.policy, {"thrift": self.option} if self.part == "thrift" else None)

    def conditions(self) -> Conditions:
        """What the fleet goes through."""
        if self.part == "conditions":
            return CONDITIONS[self.label](CASES[self.case].workers)
        return MODES[self.label] if self.part == "modes" else Conditions()


def jobs(parts: set[str], seeds: tuple[int, ...]) -> Iterator[Job]:
    """All runs of ``parts``, those of one traffic one after another."""
    for case in CASES:
        for seed in seeds:
            if "policies" in parts:
                yield from (Job("policies", case, name, name, seed) for name in POLICIES)
            if "ablation" in parts:
                yield from (Job("ablation", case, name, "cache_aware", seed) for name in WITHOUT)
            if "thrift" in parts and case in CURVES:
                yield from (Job("thrift", case, f"{value:g}", "cache_aware", seed, value) for value in THRIFT)
            if "conditions" in parts and case in HARSH:
                for label in CONDITIONS:
                    yield from (Job("conditions", case, label, name, seed) for name in ("cache_aware", "least_wait"))
            if "modes" in parts and case == "rollouts":
                yield from (Job("modes", case, label, "cache_aware", seed) for label in MODES)


@lru_cache(maxsize=1)
def traffic(case: str, seed: int) -> tuple[Traffic, float]:
    """And its ceiling; the last one is kept."""
    made = find(CASES[case].trace, workers=CASES[case].workers, seed=seed)
    return made, ceiling(made)


def run(job: Job) -> dict[str, Any]:
    """One run's figures, without what is a list."""
    case = CASES[job.case]
    asked, bound = traffic(job.case, job.seed)
    options = Options(kv_tokens=case.kv_tokens, block=asked.block, rates=case.rates)
    conditions = job.conditions()
    outcome = Simulation(asked, job.made(), case.workers, options, seed=job.seed, conditions=conditions).run()
    found = row(outcome, bound, None, PRICE * case.accelerators)
    return {"job": [job.part, job.case, job.label, job.policy, job.seed], **found, **extra(job, outcome)}


def extra(job: Job, outcome: Outcome) -> dict[str, Any]:
    """What goals ask for beside the usual figures."""
    requests = Counter(each.worker for each in outcome.asked)
    computed = [engine.totals.computed for engine in outcome.engines]
    others = sum(computed[1:]) / max(1, len(computed) - 1)
    found: dict[str, Any] = {
        "most_requests": max(requests.values()) * len(outcome.engines) / len(outcome.asked),
        "fewest_requests": min(requests[at] for at in range(len(outcome.engines)))
        * len(outcome.engines)
        / len(outcome.asked),
        "first_share": computed[0] / others if others else None,
        "rehomed": outcome.routers[0].decisions.rehomed,
    }
    if job.case == "tree":
        found["node_computed"] = _node_computed(outcome)
    return found


def _node_computed(outcome: Outcome) -> float:
    """How many engines computed a search's first node, on average over searches."""
    first: dict[str | None, set[int]] = {}
    for each in outcome.asked:
        node = each.asks.tokens - len(each.asks.blocks[-1:])
        if each.arrived <= each.chain.at + 1e-9 and each.chain.follows is None and each.cached < node / 2:
            first.setdefault(each.chain.session, set()).add(each.worker)
    return sum(len(workers) for workers in first.values()) / len(first) if first else 0.0


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.study", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("study.json"), help="file of the runs (default study.json)")
    parser.add_argument("--parts", default="policies,ablation,thrift,conditions,modes", help="what to run")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="seeds, with commas")
    parser.add_argument("--only", help="runs of this policy alone, in place of those that the file has")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        for case in CASES.values():
            find(case.trace, workers=1, limit=1)
    except NoTraffic as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    todo = list(jobs(set(options.parts.split(",")), tuple(int(seed) for seed in options.seeds.split(","))))
    if options.only is not None:
        todo = [job for job in todo if job.policy == options.only]
    done = []
    with Pool(options.processes) as pool:
        for number, found in enumerate(pool.imap(run, todo, chunksize=8), 1):
            done.append(found)
            if number % 20 == 0 or number == len(todo):
                print(f"\r{number} of {len(todo)} runs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    kept = json.loads(options.out.read_text()) if options.out.exists() else []
    fresh = {tuple(each["job"]) for each in done}
    kept = [each for each in kept if tuple(each["job"]) not in fresh]
    options.out.write_text(json.dumps(kept + done))
    return 0


def grouped(runs: list[dict[str, Any]], part: str) -> dict[str, dict[str, dict[str, Any]]]:
    """case -> label (with policy, where there are several) -> means over seeds, with their ``spread``."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in runs:
        of, case, label, policy, _ = each["job"]
        if of == part:
            name = label if part != "conditions" else f"{label}|{policy}"
            rows.setdefault((case, name), []).append({key: value for key, value in each.items() if key != "job"})
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (case, name), each_seed in rows.items():
        found.setdefault(case, {})[name] = mean(each_seed)
    return found
