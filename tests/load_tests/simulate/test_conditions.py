"""What a fleet goes through: events and their lag, engines that die and join, prefill apart, tiers, states, kept sessions."""

from __future__ import annotations

from typing import Any

import pytest

from kv_index.checkpoints import Rule
from load_tests.simulate.conditions import Change, Conditions, Fate
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import Outcome, Simulation
from load_tests.workloads.catalogue import find
from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from policies.base import load

BLOCK = 128


def run(traffic: Traffic, policy: str = "cache_aware", workers: int = 4, **options: Any) -> Outcome:
    conditions = options.pop("conditions", None)
    return Simulation(
        traffic, load(policy), workers, Options(block=traffic.block, **options), conditions=conditions
    ).run()


def talk(turns: int, new: int = 4, think: float = 5.0, session: str = "s", at: float = 0.0, first: int = 0) -> Chain:
    """A conversation that grows by ``new`` blocks a turn; answers fill nothing."""
    made = [
        Turn(tuple(range(first, first + new * (at + 1))), new * (at + 1) * BLOCK + 1, 8, (), think if at else 0.0)
        for at in range(turns)
    ]
    return Chain(at, tuple(made), session)


def cached(outcome: Outcome) -> list[int]:
    return [each.cached for each in outcome.asked]


def test_with_events_what_is_predicted_is_what_engines_find() -> None:
    traffic = find("universal", workers=4).limited(600)
    outcome = run(traffic, conditions=Conditions(events=True), kv_tokens=60_000)
    assert sum(engine.cache.evicted for engine in outcome.engines) > 0
    off = [each for each in outcome.asked if each.sent.predicted is not None and each.sent.predicted > each.cached]
    assert len(off) <= 0.05 * len(outcome.asked)
    trust = outcome.routers[0].beliefs.index.trust
    assert {trust[target].rung.value for target in range(4)} == {"exact"}


def test_silent_engines_are_predicted() -> None:
    traffic = find("universal", workers=4).limited(300)
    outcome = run(traffic, conditions=Conditions(events=True, silent=2))
    trust = outcome.routers[0].beliefs.index.trust
    assert [trust[target].rung.value for target in range(4)] == ["exact", "exact", "predicted", "predicted"]
    assert all(each.ended < 1e9 for each in outcome.asked)


def test_late_events_are_late() -> None:
    chain = talk(2, think=0.5)
    prompt = Conditions(events=True, lag=5.0)
    outcome = run(Traffic("late", BLOCK, [chain]), workers=1, conditions=prompt)
    blocks = outcome.routers[0].beliefs.index.blocks
    assert blocks.blocks(0) == 8
    assert cached(outcome) == [0, 4 * BLOCK]


def test_an_engine_dies_and_its_requests_are_answered_by_others() -> None:
    chains = [talk(6, session=f"s{number}", at=number * 0.2, first=1000 * number) for number in range(8)]
    conditions = Conditions(changes=(Change(6.0, 1, Fate.DIES),))
    outcome = run(Traffic("death", BLOCK, chains), workers=4, conditions=conditions)
    assert all(each.first <= each.ended < 1e9 for each in outcome.asked)
    assert all(each.worker != 1 for each in outcome.asked if each.arrived > 6.0)
    assert any(each.worker == 1 for each in outcome.asked)
    places = outcome.routers[0].places
    assert [(place.running, place.busy, place.wait) for place in places] == [(0, 0.0, 0.0)] * 4


def test_requests_on_a_dying_engine_are_sent_again() -> None:
    chains = [Chain(0.0, (Turn(tuple(range(100 * n, 100 * n + 50)), 6500, 50),)) for n in range(8)]
    outcome = run(
        Traffic("death", BLOCK, chains), workers=2, conditions=Conditions(changes=(Change(0.3, 0, Fate.DIES),))
    )
    assert [each.again for each in outcome.asked].count(1) == 4
    assert {each.worker for each in outcome.asked} == {1}


def test_a_newcomer_gets_nothing_before_it_joins_and_no_herd_after() -> None:
    traffic = find("load", workers=4).limited(800)
    conditions = Conditions(changes=(Change(60.0, 3, Fate.JOINS),))
    outcome = run(traffic, conditions=conditions)
    theirs = [each.arrived for each in outcome.asked if each.worker == 3]
    assert theirs and min(theirs) >= 60.0
    soon = [each.worker for each in outcome.asked if 60.0 <= each.arrived <= 75.0]
    assert soon.count(3) / len(soon) < 0.4


def test_a_slow_engine_takes_longer() -> None:
    chain = Chain(0.0, (Turn((), 1000, 1),))
    fast = run(Traffic("one", BLOCK, [chain]), workers=1)
    slow = run(Traffic("one", BLOCK, [chain]), workers=1, conditions=Conditions(speeds={0: 0.5}))
    assert slow.asked[0].first == pytest.approx(2 * fast.asked[0].first)


def test_prefill_apart_from_decode() -> None:
    naming = Naming()
    start = naming.fresh(20)
    turns = (Turn(start, 20 * BLOCK + 5, 30), Turn(start + naming.fresh(4), 24 * BLOCK + 5, 30, (), 3.0))
    chains = [Chain(0.0, turns, "s")]
    outcome = run(Traffic("pd", BLOCK, chains), "round_robin", workers=3, conditions=Conditions(prefill=1))
    first, second = outcome.asked
    assert {first.worker, second.worker} == {0}
    assert {first.decoder, second.decoder} <= {1, 2}
    assert (first.cached, second.cached) == (0, 20 * BLOCK)
    prefill, *decode = outcome.engines
    assert prefill.totals.computed == 20 * BLOCK + 5 + 4 * BLOCK + 5
    assert sum(engine.totals.computed for engine in decode) == 2, "a decode engine computes the last token only"
    assert sum(engine.totals.generated for engine in decode) == 60
    assert all(place.running == 0 and place.charged == 0.0 for place in outcome.routers[0].places)


def test_what_was_evicted_is_brought_back_from_the_host() -> None:
    chains = [talk(2, new=8, think=100.0, session="a"), talk(1, new=16, session="b", at=50.0, first=500)]
    small = {"workers": 1, "kv_tokens": 20 * BLOCK}
    assert cached(run(Traffic("tiers", BLOCK, chains), **small))[-1] < 8 * BLOCK
    outcome = run(Traffic("tiers", BLOCK, chains), host_tokens=40 * BLOCK, **small)
    assert cached(outcome)[-1] == 8 * BLOCK
    told = run(Traffic("tiers", BLOCK, chains), host_tokens=40 * BLOCK, conditions=Conditions(events=True), **small)
    assert told.asked[-1].sent.predicted == 8 * BLOCK


def test_hybrid_models_go_on_from_states_only() -> None:
    plain = cached(run(Traffic("hybrid", BLOCK, [talk(3)]), workers=1))
    assert plain == [0, 4 * BLOCK, 8 * BLOCK]
    naming = Naming()
    shared = naming.fresh(6)
    asked = [Turn(shared + naming.fresh(4), 10 * BLOCK + 1, 1, (), 5.0) for _ in range(3)]
    traffic = Traffic("hybrid", BLOCK, [Chain(0.0, tuple(asked))])
    assert cached(run(traffic, workers=1)) == [0, 6 * BLOCK, 6 * BLOCK]
    hybrid = run(traffic, workers=1, states=Rule(boundary=True))
    # The first left its state at its own end; what the second shares becomes a state when it was computed again.
    assert cached(hybrid)[:2] == [0, 0]
    every = run(traffic, workers=1, states=Rule(every=4 * BLOCK))
    assert cached(every) == [0, 4 * BLOCK, 4 * BLOCK]
    assert [each.sent.predicted for each in every.asked] == cached(every)


def test_a_streaming_session_keeps_its_kv_under_pressure() -> None:
    chains = [talk(2, new=8, think=100.0, session="a"), talk(1, new=10, session="b", at=50.0, first=500)]
    small = {"workers": 1, "kv_tokens": 17 * BLOCK}
    assert cached(run(Traffic("held", BLOCK, chains), **small))[-1] < 8 * BLOCK
    kept = run(Traffic("held", BLOCK, chains), conditions=Conditions(held=True), **small)
    # Nothing but the session's own KV could give room: it is let go, and nobody waits for ever.
    assert all(each.ended < 1e9 for each in kept.asked)
    roomy = run(Traffic("held", BLOCK, chains), conditions=Conditions(held=True), workers=1, kv_tokens=30 * BLOCK)
    assert cached(roomy)[-1] == 8 * BLOCK
    assert roomy.engines[0].cache.used == 0, "sessions that are over keep nothing"


def test_chains_that_follow_and_await() -> None:
    naming = Naming()
    main = Chain(0.0, (Turn(naming.fresh(2), 257, 4), Turn(naming.fresh(3), 385, 4, (), 1.0, (1, 2))), "main")
    child = Chain(0.5, (Turn(naming.fresh(2), 257, 4), Turn(naming.fresh(2), 257, 4, (), 2.0)), "c1", "main", (0, 0))
    other = Chain(0.25, (Turn(naming.fresh(2), 257, 4),), "c2", "main", (0, 0))
    outcome = run(Traffic("calls", BLOCK, [main, child, other]))
    asked = {(each.place, each.turn): each for each in outcome.asked}
    assert len(asked) == 5
    assert asked[1, 0].arrived == pytest.approx(asked[0, 0].ended + 0.5)
    assert asked[2, 0].arrived == pytest.approx(asked[0, 0].ended + 0.25)
    assert asked[0, 1].arrived == pytest.approx(max(asked[1, 1].ended, asked[2, 0].ended) + 1.0)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"routers": 0}, "routers"),
        ({"poll": 0.0}, "poll"),
        ({"lag": -1.0}, "lag"),
        ({"speeds": {0: 0.0}}, "speeds"),
        ({"prefill": 1, "changes": (Change(1.0, 0, Fate.DIES),)}, "prefill"),
    ],
)
def test_impossible_conditions_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Conditions(**given)


def test_a_moved_request_that_loses_its_kv_is_computed_where_it_is() -> None:
    chains = [Chain(0.0, (Turn((), 6 * BLOCK, 6 * BLOCK),)) for _ in range(3)]
    tight = run(
        Traffic("pd", BLOCK, chains), "round_robin", workers=2, kv_tokens=24 * BLOCK, conditions=Conditions(prefill=1)
    )
    decode = tight.engines[1].totals
    assert decode.preemptions > 0
    assert decode.recomputed >= 6 * BLOCK
    assert all(each.first <= each.ended < 1e9 for each in tight.asked)


def test_what_ended_sessions_kept_is_let_go_wherever_they_were() -> None:
    traffic = find("causal", workers=2).limited(60)
    outcome = run(traffic, "round_robin", workers=2, conditions=Conditions(held=True))
    assert [engine.cache.used for engine in outcome.engines] == [0, 0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"changes": (Change(1.0, 5, Fate.DIES),)}, "engine 5"),
        ({"speeds": {9: 2.0}}, "engine 9"),
        ({"changes": (Change(1.0, 0, Fate.DIES), Change(2.0, 0, Fate.JOINS))}, "once"),
        ({"changes": (Change(1.0, 0, Fate.DIES), Change(2.0, 1, Fate.DIES))}, "all the time"),
        ({"events": True, "silent": 3}, "silent"),
    ],
)
def test_what_cannot_happen_to_a_fleet_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run(Traffic("none", BLOCK, [talk(1)]), workers=2, conditions=Conditions(**given))
