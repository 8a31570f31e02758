"""A fleet under every policy that ships: nothing is lost, nothing is doubled, a seed tells everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from load_tests.simulate.conditions import Conditions
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import row
from load_tests.simulate.fleet import BadTraffic, Outcome, Simulation
from load_tests.simulate.traffic import ceiling
from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.generators import GENERATORS
from policies.base import load, names


def simulated(traffic: Traffic, policy: str, workers: int = 4, seed: int = 0, kv_tokens: int = 250_000) -> Outcome:
    return Simulation(
        traffic, load(policy), workers, Options(kv_tokens=kv_tokens, block=traffic.block), seed=seed
    ).run()


def figures(outcome: Outcome) -> dict[str, Any]:
    return row(outcome, 1.0)


def conserves(traffic: Traffic, outcome: Outcome) -> None:
    asked = outcome.asked
    assert len(asked) == traffic.requests == sum(engine.totals.finished for engine in outcome.engines)
    prompts = sum(turn.tokens for chain in traffic.chains for turn in chain.turns)
    outputs = sum(turn.output for chain in traffic.chains for turn in chain.turns)
    totals = [engine.totals for engine in outcome.engines]
    assert sum(each.prompt for each in totals) == prompts
    assert sum(each.cached + each.computed for each in totals) == prompts
    assert sum(each.cached for each in totals) == sum(each.cached for each in asked)
    assert sum(each.generated for each in totals) == outputs
    for engine in outcome.engines:
        assert engine.due is None and not engine.waiting and not engine.running
        assert engine.cache.used == engine.cache.private == 0
        assert len(engine.cache.refs) == len(engine.cache.idle) <= engine.cache.capacity
    for place in outcome.routers[0].places:
        assert (place.running, place.busy, place.wait, place.foreign) == (0, 0.0, 0.0, 0.0)
    for each in asked:
        assert each.arrived < each.first <= each.ended
        assert each.cached < each.chain.turns[each.turn].tokens


@pytest.mark.parametrize("policy", names())
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_policy_answers_every_shape_and_conserves(name: str, policy: str) -> None:
    traffic = GENERATORS[name](4, 3).limited(250)
    outcome = simulated(traffic, policy)
    conserves(traffic, outcome)
    reached = figures(outcome)["token_hit_rate"]
    assert reached <= ceiling(traffic) + 0.001


@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two"])
def test_a_seed_tells_everything(policy: str) -> None:
    def again(seed: int) -> Any:
        outcome = simulated(GENERATORS["universal"](4, seed).limited(300), policy, seed=seed)
        return [(each.arrived, each.first, each.ended, each.worker, each.cached) for each in outcome.asked]

    assert again(5) == again(5)
    assert again(5) != again(6)


def test_little_kv_preempts_and_still_conserves() -> None:
    traffic = GENERATORS["load"](4, 1).limited(300)
    longest = max(turn.tokens + turn.output for chain in traffic.chains for turn in chain.turns)
    crowded = replace(traffic, chains=[replace(chain, at=chain.at / 20) for chain in traffic.chains])
    outcome = simulated(crowded, "least_load", 2, kv_tokens=longest + traffic.block)
    conserves(crowded, outcome)
    assert sum(engine.totals.preemptions for engine in outcome.engines) > 0


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_turns_of_a_session_never_overlap(policy: str) -> None:
    outcome = simulated(GENERATORS["agents"](4, 2).limited(300), policy)
    last: dict[int, tuple[int, float]] = {}
    for each in outcome.asked:
        turn, ended = last.get(id(each.chain), (-1, 0.0))
        assert each.turn == turn + 1
        if each.turn:
            assert each.arrived == pytest.approx(ended + each.chain.turns[each.turn].think)
        last[id(each.chain)] = (each.turn, each.ended)


def talk(naming: Naming, at: float, session: str, turns: int, block: int = 64) -> Chain:
    """A session whose turns add 10 blocks each, half of them the answer."""
    made: list[Turn] = []
    blocks: tuple[int, ...] = ()
    for number in range(turns):
        blocks += naming.fresh(5)
        after = naming.fresh(5)
        made.append(Turn(blocks, len(blocks) * block + 1, 5 * block, after, 1.0 if number else 0.0))
        blocks += after
    return Chain(at, tuple(made), session)


def test_a_session_at_home_computes_only_what_is_new() -> None:
    naming = Naming()
    traffic = Traffic("one", 64, [talk(naming, 0.0, "a", 5)])
    outcome = simulated(traffic, "cache_aware")
    assert {each.worker for each in outcome.asked} == {outcome.asked[0].worker}
    # Of the last generated token there is no KV, so each answer's last block is not there.
    assert [each.cached for each in outcome.asked] == [0, 640, 1280, 1920, 2560]
    assert outcome.routers[0].decisions.rehomed == 0
    assert [each.sent.predicted for each in outcome.asked] == [0, 640, 1280, 1920, 2560]
    spread = simulated(traffic, "round_robin")
    assert [each.worker for each in spread.asked] == [0, 1, 2, 3, 0]
    assert [each.cached for each in spread.asked] == [0, 0, 0, 0, 640]
    assert figures(spread)["moved_sessions"] == 1
    assert figures(outcome)["moved_sessions"] == 0


def test_sessions_that_arrive_on_an_idle_fleet_spread() -> None:
    naming = Naming()
    traffic = Traffic("eight", 64, [talk(naming, 60.0 * number, f"s{number}", 1) for number in range(8)])
    outcome = simulated(traffic, "cache_aware")
    assert sorted(each.worker for each in outcome.asked) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [place.homes for place in outcome.routers[0].places] == [2, 2, 2, 2]


def test_sessions_idle_for_too_long_are_forgotten() -> None:
    naming = Naming()
    traffic = Traffic("late", 64, [talk(naming, 0.0, "early", 1), talk(naming, 4000.0, "late", 1)])
    outcome = simulated(traffic, "cache_aware")
    assert list(outcome.routers[0].sessions) == ["late"]
    assert sum(place.homes for place in outcome.routers[0].places) == 1


def test_rates_are_learned_where_the_engine_was_idle() -> None:
    naming = Naming()
    chains = [Chain(20.0 * number, (Turn((), 500 + 500 * number, 2),)) for number in range(24)]
    chains.append(talk(naming, 900.0, "a", 2))
    outcome = simulated(Traffic("calibration", 64, chains), "cache_aware", 1)
    learning = outcome.routers[0].learning
    assert learning is not None and learning.samples == 26
    # A step's base is paid once for each chunk of 2048 tokens.
    assert learning.rates.token == pytest.approx(60e-6 + 8e-3 / 2048, rel=0.15)
    assert learning.rates.base < 0.02


def test_the_ceiling_is_what_one_endless_cache_finds() -> None:
    naming = Naming()
    traffic = Traffic("two", 64, [talk(naming, 0.0, "a", 3), talk(naming, 9.0, "b", 3)])
    outcome = simulated(traffic, "round_robin", 1, kv_tokens=10_000_000)
    assert figures(outcome)["token_hit_rate"] == pytest.approx(ceiling(traffic), abs=1e-4)


def test_a_request_that_cannot_fit_is_refused_with_the_cure() -> None:
    traffic = Traffic("long", 64, [Chain(0.0, (Turn((), 6400, 10),))])
    with pytest.raises(BadTraffic, match="at least --kv-tokens 6464"):
        simulated(traffic, "random", 1, kv_tokens=6400)
    assert len(simulated(traffic, "random", 1, kv_tokens=6464).asked) == 1
    with pytest.raises(ValueError, match="workers"):
        simulated(traffic, "random", 0)
    with pytest.raises(ValueError, match="block"):
        Simulation(traffic, load("random"), 1, Options(block=16))


def test_a_thousand_engines() -> None:
    traffic = GENERATORS["load"](1000, 1).limited(3000)
    outcome = simulated(traffic, "cache_aware", 1000)
    conserves(traffic, outcome)
    assert len({each.worker for each in outcome.asked}) == 1000


def test_gateways_that_share_a_fleet_see_each_other_by_load_reports_alone() -> None:
    traffic = GENERATORS["load"](4, 1).limited(600)
    simulation = Simulation(
        traffic, load("least_load"), 4, Options(block=traffic.block), conditions=Conditions(routers=3)
    )
    seen: list[float] = []
    tick = simulation.routers[0].polled

    def polled(loads: Any, now: float) -> None:
        tick(loads, now)
        for place, (running, waiting, _) in zip(simulation.routers[0].places, loads, strict=True):
            assert place.foreign == max(0, running + waiting - place.running)
            seen.append(place.foreign)

    simulation.routers[0].polled = polled  # type: ignore[method-assign]
    outcome = simulation.run()
    assert len(outcome.asked) == 600
    assert max(seen) > 0
    assert {each.router for each in outcome.asked} == set(simulation.routers)
    for router in simulation.routers:
        assert all(place.running == 0 for place in router.places)


def test_one_gateway_alone_sees_nobody_else() -> None:
    outcome = simulated(GENERATORS["universal"](4, 1).limited(300), "least_load")
    assert all(place.foreign == 0.0 for place in outcome.routers[0].places)
