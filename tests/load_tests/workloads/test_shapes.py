"""The shapes that are generated, and what may be done to any traffic: a limit, and scaling."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings, strategies as st

from load_tests.workloads.bursts import BRANCHES, DEPTH, SAMPLES, STEPS
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import BadScale, Chain, Traffic, Turn, begun, scaled
from load_tests.workloads.generators import BLOCK, GENERATORS

SOME = settings(max_examples=4, deadline=None)


def sound(traffic: Traffic) -> None:
    """Ids have one parent each, counts fit, and what hangs on other chains can begin."""
    parents: dict[int, int] = {}
    for chain in traffic.chains:
        assert chain.turns and chain.at >= 0
        for turn in chain.turns:
            assert turn.tokens >= 1 and turn.output >= 0 and turn.think >= 0
            assert len(turn.blocks) == turn.tokens // traffic.block
            ids = (*turn.blocks, *turn.after)
            assert len(ids) * traffic.block <= turn.tokens + turn.output
            for before, id_ in zip((-1, *ids), ids, strict=False):
                assert parents.setdefault(id_, before) == before
            assert all(0 <= place < len(traffic.chains) for place in turn.awaits)
        if chain.follows is not None:
            assert chain.follows[1] < len(traffic.chains[chain.follows[0]].turns)
    assert sorted(begun(traffic.chains)) == list(range(len(traffic.chains)))


@pytest.mark.parametrize("name", sorted(GENERATORS))
@SOME
@given(workers=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_ids_have_one_parent_whatever_is_drawn(name: str, workers: int, seed: int) -> None:
    traffic = GENERATORS[name](workers, seed)
    sound(traffic)
    assert traffic == GENERATORS[name](workers, seed)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@SOME
@given(seed=st.integers(0, 9), tokens=st.floats(0.05, 3), think=st.floats(0.01, 4), rate=st.floats(0.1, 9))
def test_scaled_traffic_is_sound_too(name: str, seed: int, tokens: float, think: float, rate: float) -> None:
    sound(scaled(GENERATORS[name](1, seed), tokens=tokens, think=think, rate=rate))


@pytest.mark.parametrize("name", sorted(GENERATORS))
@SOME
@given(seed=st.integers(0, 9), share=st.floats(0, 1))
def test_limited_traffic_is_sound_too(name: str, seed: int, share: float) -> None:
    traffic = GENERATORS[name](1, seed)
    limit = max(1, int(share * traffic.requests))
    some = traffic.limited(limit)
    assert 0 < some.requests <= limit
    sound(some)


def test_chats_have_one_start_and_people() -> None:
    traffic = GENERATORS["chat"](4, 1)
    start = traffic.chains[0].turns[0].blocks[: 1_000 // BLOCK]
    assert all(turn.blocks[: len(start)] == start for chain in traffic.chains for turn in chain.turns)
    assert {len(chain.turns) for chain in traffic.chains} == set(range(2, 13))
    assert all(5 <= turn.think <= 120 for chain in traffic.chains for turn in chain.turns[1:])


def test_tool_prompts_are_few_large_and_of_uneven_popularity() -> None:
    traffic = GENERATORS["tools"](16, 1)
    users: dict[int, int] = defaultdict(int)
    for chain in traffic.chains:
        assert 2 <= len(chain.turns) <= 5
        assert chain.turns[0].tokens > 5_900
        users[chain.turns[0].blocks[40]] += 1
    counts = sorted(users.values())
    assert len(counts) == 6
    assert counts[-1] > 3 * counts[0]


def test_a_hot_prefix_is_a_quarter_of_the_tokens_or_of_the_requests() -> None:
    every, some = GENERATORS["hot"](16, 1), GENERATORS["hot_some"](16, 1)
    assert not any(chain.session or chain.turns[1:] for chain in (*every.chains, *some.chains))
    start = every.chains[0].turns[0].blocks[: 2_048 // BLOCK]
    assert all(chain.turns[0].blocks[: len(start)] == start for chain in every.chains)
    assert 2_048 / mean(chain.turns[0].tokens for chain in every.chains) == pytest.approx(0.26, abs=0.02)
    firsts: dict[int, int] = defaultdict(int)
    for chain in some.chains:
        if chain.turns[0].blocks:
            firsts[chain.turns[0].blocks[0]] += 1
    *others, most = sorted(firsts.values())
    assert most / len(some.chains) == pytest.approx(0.26, abs=0.03)
    assert set(others) == {1}


def test_causal_sessions_come_one_by_one() -> None:
    traffic = GENERATORS["causal"](4, 1)
    assert (len(traffic.chains), traffic.requests) == (40, 240)
    ats = [chain.at for chain in traffic.chains]
    assert ats == sorted(ats) and 100 < ats[-1] < 120
    assert len({chain.turns[0].blocks[0] for chain in traffic.chains}) == 2
    thinks = [turn.think for chain in GENERATORS["causal"](32, 1).chains for turn in chain.turns[1:]]
    assert mean(thinks) == pytest.approx(8, rel=0.1)


def test_a_search_goes_on_from_the_best_of_all() -> None:
    traffic = GENERATORS["tree"](8, 1)
    searches: dict[str | None, list[int]] = defaultdict(list)
    for place, chain in enumerate(traffic.chains):
        searches[chain.session].append(place)
    assert len(searches) == 2
    for places in searches.values():
        assert len(places) == BRANCHES * DEPTH
        bursts = [places[at : at + BRANCHES] for at in range(0, len(places), BRANCHES)]
        for before, burst in pairwise(bursts):
            turns = [traffic.chains[place].turns[0] for place in burst]
            assert all(set(turn.awaits) == set(before) for turn in turns)
            nodes = [
                place
                for place in before
                if all(
                    turn.blocks[: len(node := (*best.blocks, *best.after))] == node
                    for best in traffic.chains[place].turns
                    for turn in turns
                )
            ]
            assert len(nodes) == 1
            best = traffic.chains[nodes[0]].turns[0]
            assert all(50 <= turn.tokens - best.tokens - best.output <= 400 for turn in turns)


def test_rollouts_wait_for_the_step_before_them() -> None:
    traffic = GENERATORS["rollouts"](3, 1)
    size = len(traffic.chains) // STEPS
    assert size == 3 * SAMPLES
    assert len({chain.session for chain in traffic.chains}) == len(traffic.chains)
    for place, chain in enumerate(traffic.chains):
        step = place // size
        assert chain.turns[0].awaits == (tuple(range((step - 1) * size, step * size)) if step else ())
        assert (chain.follows is None) == (step == 0)
        assert 4 <= len(chain.turns) <= 12
        group = traffic.chains[place - place % SAMPLES]
        assert chain.at == group.at
        assert chain.turns[0].tokens == group.turns[0].tokens
        assert chain.turns[0].blocks == group.turns[0].blocks


def test_callers_await_their_sub_agents() -> None:
    traffic = GENERATORS["subagents"](3, 1)
    subs = [chain for chain in traffic.chains if chain.parent]
    awaited = [place for chain in traffic.chains for turn in chain.turns for place in turn.awaits]
    assert sorted(awaited) == [place for place, chain in enumerate(traffic.chains) if chain.parent]
    assert len({chain.turns[0].blocks[: 6_000 // BLOCK] for chain in subs}) == 1
    assert all(3 <= len(chain.turns) <= 15 for chain in subs)
    for main, chain in enumerate(traffic.chains):
        for number, turn in enumerate(chain.turns):
            for place in turn.awaits:
                assert traffic.chains[place].follows == (main, number - 1)
                assert traffic.chains[place].parent == chain.session


def asked(tokens: int, *blocks: int, awaits: tuple[int, ...] = (), think: float = 0.0) -> Turn:
    return Turn(blocks, tokens, 1, (), think, awaits)


def test_a_limit_keeps_what_hangs_together() -> None:
    sub, late = Chain(1, (asked(9),), "sub", "main", (1, 0)), Chain(1, (asked(9),), "late", "main", (1, 1))
    main = Chain(5, (asked(9), asked(9, awaits=(0,), think=2), asked(9, awaits=(2,))), "main")
    traffic = Traffic("t", 16, [sub, main, late])
    assert begun(traffic.chains) == [1, 0, 2]
    four = traffic.limited(4)
    assert [chain.session for chain in four.chains] == ["main", "sub"]
    assert four.chains[1].follows == (0, 0)
    assert [turn.awaits for turn in four.chains[0].turns] == [(), (1,), ()]
    # Cut inside of the caller: whom it would have called is not called.
    first = Chain(0, (asked(9),) * 3, "first")
    one = Traffic("t", 16, [sub, main, late, first]).limited(4)
    assert [(chain.session, len(chain.turns)) for chain in one.chains] == [("first", 3), ("main", 1)]


def test_what_waits_for_itself_never_begins() -> None:
    knot = Chain(0, (asked(9, awaits=(1,)),)), Chain(0, (asked(9),), follows=(0, 0))
    assert begun([*knot, Chain(1, (asked(9),))]) == [2]
    assert begun([Chain(0, (asked(9),), follows=(7, 0))]) == []


def test_scaling_keeps_prefixes_and_moves_time() -> None:
    one = Turn((0, 1, 2, 3, 4), 5 * 16 + 3, 40, (5, 6))
    two = Turn((0, 1, 2, 7, 8, 9), 6 * 16, 10, (), 4.0)
    traffic = Traffic("t", 16, [Chain(10, (one, two), "s"), Chain(6, (two,), "x", "s", (0, 0))])
    half = scaled(traffic, tokens=0.5, think=0.25, rate=2)
    assert half.chains[0].turns[0] == Turn((1, 3), 41, 20, (5,))
    assert half.chains[0].turns[1] == Turn((1, 7, 9), 48, 5, (), 1.0)
    assert [chain.at for chain in half.chains] == [5.0, 1.5]
    double = scaled(traffic, tokens=2).chains[0].turns
    assert len(double[0].blocks) == 10
    assert double[0].blocks[:6] == double[1].blocks[:6]
    assert not set(double[0].blocks[6:]) & set(double[1].blocks[6:])
    assert scaled(traffic) is traffic
    assert scaled(Traffic("t", 16, [replace(traffic.chains[0])]), think=2).chains[0].at == 10


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agents?tokens=1e9", "tokens=1e.09: give a number above 0, like tokens=0.5, from 0.001 to 1000"),
        ("agents?tokens=0", "tokens=0: give a number above 0, like tokens=0.5"),
        ("agents?think=-1", "think=-1: give a number above 0"),
        ("agents?rate=inf", "rate=inf: give a number above 0"),
        ("agents?rate=nan", "rate=nan: give a number above 0"),
        ("agents?rate", "rate=: give a number above 0, like rate=0.5"),
        ("agents?rate=x", "rate=x: give a number above 0"),
        ("agents?sessions=3", "no option 'sessions'; after the \\? give tokens, think, rate"),
        ("agents?", "no option ''; after the \\? give tokens"),
        ("agents?rate=1&rate=2", "rate is given twice"),
        ("no-such?rate=2", "TRACE 'no-such' is no file here"),
    ],
)
def test_errors_of_options_name_option_and_cure(name: str, message: str) -> None:
    with pytest.raises(NoTraffic, match=message):
        find(name, workers=1)


def test_names_may_carry_options() -> None:
    plain = find("causal", workers=1, limit=20)
    half = find("causal?tokens=0.5&rate=4", workers=1, limit=20)
    assert half == scaled(plain, tokens=0.5, rate=4)
    assert half.chains[0].at == plain.chains[0].at / 4
    with pytest.raises(BadScale, match="think=0"):
        scaled(plain, think=0)
