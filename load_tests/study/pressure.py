"""``python -m load_tests.study.pressure``: what the queue in front of the fleet is worth, in virtual time, on the shipped core.

*Overload*: three times what the fleet can do. *Bulk*: an interactive class beside a bulk class that would fill the fleet alone.
*Flood*: one of eight tenants asks ten times its share. *Equals*: tenants with different prompts, all of them backlogged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from load_tests.simulate.admitting import Admitting, Refused, Tenant
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import quantile
from load_tests.simulate.fleet import Asked, Outcome, Simulation
from load_tests.simulate.traffic import Chain as Seen
from load_tests.workloads.chains import Chain, Naming, Traffic
from load_tests.workloads.draws import BLOCK, alone, arrivals, length
from policies.admission import Bounds, Priority, Queue
from policies.base import load

AHEAD = 0.05
"""Seconds of prefill in front of a full target, as the gateway has it by default."""
DEADLINE = 10.0
START = 2048
"""Tokens that all prompts of one tenant begin with."""
ONE = (Priority("only", deadline=DEADLINE),)
TWO = (Priority("interactive", deadline=DEADLINE), Priority("bulk", deadline=60.0))


@dataclass(frozen=True, slots=True)
class Load:
    """What one tenant asks: requests a second, and new tokens of its prompts (median and p90)."""

    rate: float
    tokens: int = 2_500
    p90: int = 9_000
    level: int = 0


@dataclass(slots=True)
class Run:
    """What came of it."""

    outcome: Outcome
    seconds: float
    """For which requests came."""
    refused: list[Refused] = field(default_factory=list)

    def of(self, *tenants: str) -> list[Asked]:
        """Their requests; all, if none is named."""
        return [asked for asked in self.outcome.asked if not tenants or _tenant(asked.chain) in tenants]

    def ttft(self, share: float, *tenants: str) -> float | None:
        """A quantile of the time to the first token, queue included."""
        return quantile(sorted([asked.first - asked.arrived for asked in self.of(*tenants)]), share)

    def computed(self, *tenants: str) -> float:
        """Tokens that engines computed of prompts a second, while requests came."""
        within = [asked for asked in self.of(*tenants) if asked.first <= self.seconds]
        return sum(asked.asks.tokens - asked.cached for asked in within) / self.seconds

    def served(self, *tenants: str) -> float:
        """Requests a second that began to be answered, while requests came."""
        return sum(asked.first <= self.seconds for asked in self.of(*tenants)) / self.seconds


def _tenant(chain: Seen) -> str:
    return (chain.session or "").partition("/")[0]


def run(
    loads: Mapping[str, Load],
    seconds: float,
    *,
    workers: int,
    seed: int = 0,
    queue: Sequence[Priority] | None = ONE,
    fair: bool = True,
) -> Run:
    """Requests of each tenant, without sessions of more than one turn, on ``workers`` engines.

    ``queue`` None: every request is sent when it comes. ``fair`` False: all tenants wait in one line.
    """
    random, naming = Random(seed), Naming()
    chains = []
    for name, load_ in loads.items():
        start = naming.fresh(START // BLOCK)
        for number, at in enumerate(arrivals(random, load_.rate, seconds)):
            turn = alone(random, naming, start, length(random, load_.tokens, load_.p90), 180, 600)
            chains.append(Chain(at, (turn,), f"{name}/{number}"))
    traffic = Traffic("pressure", BLOCK, chains)

    def tenant_of(chain: Seen) -> Tenant:
        name = _tenant(chain)
        return Tenant(name if fair else "all", loads[name].level)

    bounds = Bounds(requests=1 << 30, bytes=1 << 60, tenant_requests=1 << 30, tenant_bytes=1 << 60)
    admitting = None if queue is None else Admitting(Queue(queue, bounds), AHEAD, tenant_of)
    simulation = Simulation(traffic, load("cache_aware"), workers, Options(block=BLOCK), admitting=admitting)
    outcome = simulation.run()
    return Run(outcome, seconds, [] if admitting is None else admitting.refused)


def overload(seconds: float = 200.0, workers: int = 4, times: float = 3.0) -> dict[str, Any]:
    """Requests come at ``times`` the capacity, which is what the fleet serves without a queue while it is never idle."""
    capacity = run({"all": Load(3.0 * workers)}, seconds, workers=workers, queue=None)
    asked = run({"all": Load(times * capacity.served())}, seconds, workers=workers)
    late = [refused for refused in asked.refused if refused.at > refused.arrived]
    good = [one for one in asked.of() if one.first - one.arrived <= DEADLINE and one.first <= seconds]
    return {
        "capacity_requests_per_s": round(capacity.served(), 3),
        "capacity_tokens_per_s": round(capacity.computed(), 1),
        "goodput": round(len(good) / seconds / capacity.served(), 4),
        "computed": round(asked.computed() / capacity.computed(), 4),
        "ttft_p50_s": _rounded(asked.ttft(0.5)),
        "ttft_p99_s": _rounded(asked.ttft(0.99)),
        "deadline_s": DEADLINE,
        "shed": len(asked.refused),
        "shed_at_once": round(1 - len(late) / len(asked.refused), 4),
    }


def bulk(seconds: float = 200.0, workers: int = 4) -> dict[str, Any]:
    """Interactive requests at a third of capacity, alone and beside bulk at 2.5 times capacity, with and without a queue."""
    rate = 0.8 * workers
    both = {"interactive": Load(rate), "bulk": Load(6.5 * workers, level=1)}
    alone_ = run({"interactive": Load(rate)}, seconds, workers=workers, queue=TWO)
    beside = run(both, seconds, workers=workers, queue=TWO)
    without = run(both, seconds, workers=workers, queue=None)
    return {
        "interactive_shed": sum(refused.tenant == "interactive" for refused in beside.refused),
        "interactive_ttft_p99_s": {
            "alone": _rounded(alone_.ttft(0.99, "interactive")),
            "beside_bulk": _rounded(beside.ttft(0.99, "interactive")),
            "beside_bulk_no_queue": _rounded(without.ttft(0.99, "interactive")),
        },
        "interactive_ttft_p50_s": {
            "alone": _rounded(alone_.ttft(0.5, "interactive")),
            "beside_bulk": _rounded(beside.ttft(0.5, "interactive")),
        },
        "bulk_served_per_s": round(beside.served("bulk"), 3),
    }


def flood(seconds: float = 120.0, workers: int = 16, share: float = 0.6) -> dict[str, Any]:
    """Eight tenants with an eighth of the capacity each; seven use ``share`` of it, one asks ten times all of it."""
    eighth = 2.7 * workers / 8
    others = {f"t{number}": Load(share * eighth) for number in range(1, 8)}
    flooded = {**others, "flood": Load(10 * eighth)}
    quiet = run(others, seconds, workers=workers)
    fair = run(flooded, seconds, workers=workers)
    unfair = run(flooded, seconds, workers=workers, fair=False)
    before, after, line = (one.ttft(0.99, *others) or 0.0 for one in (quiet, fair, unfair))
    return {
        "others_ttft_p99_s": {"alone": _rounded(before), "flooded": _rounded(after), "one_line": _rounded(line)},
        "others_ttft_p99_ratio": round(after / before, 3),
        "others_ttft_p50_s": {
            "alone": _rounded(quiet.ttft(0.5, *others)),
            "flooded": _rounded(fair.ttft(0.5, *others)),
        },
        "others_shed": sum(refused.tenant != "flood" for refused in fair.refused),
        "throughput_against_one_line": round(fair.computed() / unfair.computed(), 4),
        "throughput_against_no_queue": round(
            fair.computed() / run(flooded, seconds, workers=workers, queue=None).computed(), 4
        ),
    }


def equals(seconds: float = 200.0, workers: int = 4) -> dict[str, Any]:
    """Four tenants with prompts of different lengths, each with more than the whole fleet can do: Jain's index of what is
    computed for each."""
    sizes = ((1_000, 3_000), (2_500, 9_000), (6_000, 12_000), (12_000, 20_000))
    rates = (16.0, 8.0, 4.0, 2.5)
    loads = {f"t{at}": Load(rates[at] * workers, *sizes[at]) for at in range(4)}
    asked = run(loads, seconds, workers=workers)
    got = [asked.computed(name) for name in loads]
    return {
        "computed_tokens_per_s": [round(each, 1) for each in got],
        "jain": round(sum(got) ** 2 / (len(got) * sum(each * each for each in got)), 4),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


CASES: dict[str, Callable[[], dict[str, Any]]] = {"overload": overload, "bulk": bulk, "flood": flood, "equals": equals}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every case's figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.study.pressure", description="The queue, in virtual time."
    )
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"of {', '.join(CASES)}; all, if none is named")
    chosen = parser.parse_args(arguments).cases or list(CASES)
    print(json.dumps({name: CASES[name]() for name in chosen}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
