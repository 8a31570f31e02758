"""What the queue promises, in virtual time, where figures are the same on every machine."""

from __future__ import annotations

import pytest

from load_tests.simulate.admitting import Admitting, Tenant
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import Simulation
from load_tests.study.pressure import DEADLINE, bulk, equals, flood, main, overload
from load_tests.workloads.catalogue import find
from policies.admission import Priority, Queue
from policies.base import load


def test_at_three_times_the_capacity_the_fleet_does_what_it_can_and_nobody_waits_in_vain() -> None:
    told = overload()
    assert told["goodput"] >= 0.95
    assert told["computed"] >= 0.95
    assert told["ttft_p99_s"] <= DEADLINE
    assert told["shed"] > 1_000
    assert told["shed_at_once"] >= 0.98


def test_interactive_requests_hardly_notice_bulk() -> None:
    told = bulk()
    assert told["interactive_shed"] == 0
    p99 = told["interactive_ttft_p99_s"]
    assert p99["beside_bulk"] <= 1.2 * p99["alone"]
    assert p99["beside_bulk_no_queue"] > 100 * p99["alone"]
    assert told["bulk_served_per_s"] > 5, "bulk has the rest"


def test_a_tenant_that_floods_is_its_own_loss() -> None:
    told = flood()
    assert told["others_ttft_p99_ratio"] <= 1.2
    assert told["others_shed"] == 0
    assert told["others_ttft_p99_s"]["one_line"] > 4 * told["others_ttft_p99_s"]["flooded"]
    assert told["throughput_against_one_line"] >= 0.97
    assert told["throughput_against_no_queue"] >= 0.97


def test_backlogged_equals_have_equal_shares_of_what_is_computed() -> None:
    assert equals()["jain"] > 0.98


@pytest.mark.parametrize("spec", ["agents", "universal?rate=2", "documents?rate=2", "subagents"])
def test_nobody_loses_its_home_to_the_queue(spec: str) -> None:
    traffic = find(spec, workers=4, seed=0, limit=None)
    found = []
    for queued in (False, True):
        levels = (Priority("only", deadline=1e9),)
        admitting = Admitting(Queue(levels), 0.05, lambda chain: Tenant("one")) if queued else None
        outcome = Simulation(traffic, load("cache_aware"), 4, Options(block=traffic.block), admitting=admitting).run()
        totals = [engine.totals for engine in outcome.engines]
        waits = sorted(asked.first - asked.arrived for asked in outcome.asked)
        hits = sum(each.cached for each in totals) / sum(each.prompt for each in totals)
        found.append((len(outcome.asked), hits, sum(waits) / len(waits)))
    (requests, hits, wait), (requests_queued, hits_queued, wait_queued) = found
    assert requests_queued == requests
    assert hits_queued >= hits - 0.002
    assert wait_queued <= 1.02 * wait


def test_its_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["equals"]) == 0
    assert '"jain"' in capsys.readouterr().out
