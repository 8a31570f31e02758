"""Other routers' rules: each does what its description says, and all of them answer every request."""

from __future__ import annotations

from typing import Any

import pytest

from load_tests.simulate.baselines import BASELINES
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import Simulation
from load_tests.simulate.places import Asking, Place, Reported
from load_tests.workloads.catalogue import find
from load_tests.workloads.chains import Turn
from policies.base import Fleet, Policy, Rates

RATES = Rates(base=0.0, token=1e-3, attention=0.0, decode=0.0)


def fleet(*running: int, **fields: Any) -> Fleet:
    places = [Place(at, RATES) for at in range(len(running))]
    for place, count in zip(places, running, strict=True):
        place.running = count
        for field, values in fields.items():
            setattr(place, field, values[place.id])
    return Fleet(places)


def asking(blocks: int = 10, first: int = 0, held: dict[int, int] | None = None, **more: Any) -> Asking:
    turn = Turn(tuple(range(first, first + blocks)), blocks * 100, 50)
    return Asking(tokens=turn.tokens, turn=turn, holdings=held or {}, **more)


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_answers_everything(name: str) -> None:
    traffic = find("tools", workers=4).limited(400)
    outcome = Simulation(traffic, BASELINES[name](), 4, Options(block=traffic.block)).run()
    assert len(outcome.asked) == 400
    assert isinstance(BASELINES[name](), Policy)
    assert sum(engine.totals.finished for engine in outcome.engines) == 400


def test_the_oracle_finds_everything_that_was_ever_computed() -> None:
    traffic = find("universal", workers=4).limited(400)
    from load_tests.simulate.traffic import ceiling

    outcome = Simulation(traffic, BASELINES["oracle"](), 4, Options(block=traffic.block)).run()
    prompt = sum(engine.totals.prompt for engine in outcome.engines)
    cached = sum(engine.totals.cached for engine in outcome.engines)
    assert cached / prompt == pytest.approx(ceiling(traffic), abs=0.01)


def test_sglang_follows_the_tree_above_its_threshold() -> None:
    policy = BASELINES["sglang_cache_aware"]()
    four = fleet(3, 0, 5, 1)
    first = policy.choose(asking(), four, 0.0)
    assert (first.target.id, first.reason) == (1, "load")
    policy.committed(asking(), first._replace(target=four.targets[2]))  # type: ignore[attr-defined]
    same = asking(blocks=3)
    assert policy.choose(same, four, 0.0)[1] == "prefix"
    turn = Turn((*range(3), *range(500, 507)), 1000, 1)
    little = Asking(tokens=1000, turn=turn)
    assert policy.choose(little, four, 0.0)[1] == "load", "three of ten blocks are not more than 0.3"
    more = Asking(tokens=1000, turn=Turn((*range(4), *range(500, 506)), 1000, 1))
    assert policy.choose(more, four, 0.0).target.id == 2


def test_sglang_leads_to_who_brought_a_text_first_and_to_the_first_of_equals() -> None:
    policy = BASELINES["sglang_cache_aware"]()
    three = fleet(2, 1, 1)
    first = policy.choose(asking(), three, 0.0)
    assert first.target.id == 1, "not by lot"
    policy.committed(asking(), first)  # type: ignore[attr-defined]
    policy.committed(asking(), first._replace(target=three.targets[2]))  # type: ignore[attr-defined]
    assert policy.choose(asking(), fleet(0, 9, 0), 0.0).target.id == 1


def test_sglang_drops_affinity_when_the_fleet_is_imbalanced() -> None:
    policy = BASELINES["sglang_cache_aware"]()
    loaded = fleet(70, 2)
    policy.committed(asking(), policy.choose(asking(), fleet(0, 5), 0.0))  # type: ignore[attr-defined]
    choice = policy.choose(asking(), loaded, 0.0)
    assert (choice.target.id, choice.reason) == (1, "imbalanced")


def test_dynamo_adds_what_is_to_be_computed_and_what_is_occupied() -> None:
    policy = BASELINES["dynamo_cost"]()
    assert policy.choose(asking(held={0: 900}), fleet(0, 0), 0.0).target.id == 0
    busy = fleet(1, 0, active=[1000, 0], pending=[0, 0])
    assert policy.choose(asking(held={0: 900}), busy, 0.0).target.id == 1
    waiting = fleet(1, 0, active=[500, 0], pending=[500, 0])
    assert policy.choose(asking(held={0: 900}), waiting, 0.0).target.id == 1


def test_mooncake_takes_the_soonest_first_token() -> None:
    policy = BASELINES["mooncake"]()
    assert policy.choose(asking(held={0: 900}), fleet(1, 0, wait=[0.8, 0.0]), 0.0).target.id == 0
    assert policy.choose(asking(held={0: 900}), fleet(1, 0, wait=[1.0, 0.0]), 0.0).target.id == 1


def test_the_blend_weighs_prefix_queue_and_room() -> None:
    policy = BASELINES["llmd_blend"]()
    even = fleet(0, 0, reported=[Reported(0, 0, 0.0), Reported(0, 0, 0.0)])
    assert policy.choose(asking(held={1: 500}), even, 0.0).target.id == 1
    full = fleet(0, 0, reported=[Reported(0, 0, 0.0), Reported(9, 0, 0.9)])
    assert policy.choose(asking(held={1: 500}), full, 0.0).target.id == 0
    queued = fleet(0, 0, reported=[Reported(0, 0, 0.0), Reported(9, 5, 0.0)])
    assert policy.choose(asking(held={1: 500}), queued, 0.0).target.id == 0


def test_preble_exploits_a_long_match_and_explores_a_short_one() -> None:
    policy = BASELINES["preble_e2"]()
    assert policy.choose(asking(held={1: 600}), fleet(0, 0), 0.0)[1] == "exploit"
    short = policy.choose(asking(held={1: 400}), fleet(0, 0), 0.0)
    assert (short.target.id, short.reason) == (1, "explore")
    for at in range(4):
        two = fleet(0, 0)
        policy.committed(asking(100, 1000 * at), policy.choose(asking(100), two, 0.0)._replace(target=two.targets[1]))  # type: ignore[attr-defined]
    assert policy.choose(asking(held={1: 600}), fleet(0, 0), 1.0)[1] == "rebalance"
    assert policy.choose(asking(held={1: 600}), fleet(0, 0), 500.0)[1] == "exploit", "work is forgotten"


def test_session_hash_reads_no_load() -> None:
    policy = BASELINES["session_hash"]()
    chosen = {
        policy.choose(asking(session=7), fleet(*loads), 0.0).target.id for loads in [(0, 9, 9), (9, 0, 9), (9, 9, 0)]
    }
    assert len(chosen) == 1
