"""Other policies in a fleet with prefill engines: each side by itself, or as options of ``disaggregated``."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from policies.base import BadOption, Choice, Fleet, Policy, Request, Role, load, names
from policies.disaggregated import Disaggregated, Sides, paired
from tests.policies.fleets import asked, decoder, everyone, prefiller, said, split, split_asked, state, target

every_policy = pytest.mark.parametrize("name", names())
PRICED = ("cache_aware", "disaggregated")
"""Those that price pairs."""


def ids(choice: Choice) -> tuple[int, int | None]:
    return choice.target.id, None if choice.prefill is None else choice.prefill.id


def pairs(decode: int, prefill: int) -> Fleet:
    return split([decoder(at) for at in range(decode)], [prefiller(100 + at) for at in range(prefill)])


@every_policy
@given(case=split_asked())
@settings(max_examples=60)
def test_every_policy_takes_pairs_of_one_pool_and_changes_nothing(name: str, case: tuple[Fleet, Request]) -> None:
    targets, request = case
    assert targets.prefill is not None
    policy = paired(load(name))
    assert isinstance(policy, Policy)
    before, words = [state(each) for each in everyone(targets)], said(request)
    choice, rows = policy.choose(request, targets, 5.0), policy.explain(request, targets, 5.0)
    assert policy.choose(request, targets, 5.0) == choice
    assert [state(each) for each in everyone(targets)] == before
    assert said(request) == words
    assert any(choice.target is each for each in targets.targets)
    assert (rows[0].target, rows[0].prefill) == (choice.target, choice.prefill)
    shared = {each.pool for each in targets.prefill.targets}
    shared &= {each.pool for each in targets.targets if each.role is Role.DECODE}
    if choice.prefill is not None:
        assert any(choice.prefill is each for each in targets.prefill.targets)
        assert choice.prefill.pool == choice.target.pool
        assert choice.target.role is Role.DECODE
    elif choice.target.role is Role.DECODE and choice.target.pool in shared:
        assert choice.target.whole
    if name not in PRICED:
        split = choice.target.role is Role.DECODE and choice.target.pool in shared
        assert (choice.prefill is not None) is split, "a pair wherever there is one"


@every_policy
@given(case=asked())
@settings(max_examples=30)
def test_without_prefill_engines_a_policy_is_what_it_was(name: str, case: tuple[Fleet, Request]) -> None:
    targets, request = case
    one, other = paired(load(name)), load(name)
    assert one.choose(request, targets, 5.0) == other.choose(request, targets, 5.0)
    assert one.explain(request, targets, 5.0) == other.explain(request, targets, 5.0)


@every_policy
def test_a_paired_policy_keeps_its_needs_and_pairs_once(name: str) -> None:
    policy = load(name)
    once = paired(policy)
    assert (once.needs_prefix, once.needs_session) == (policy.needs_prefix, policy.needs_session)
    assert once.name == ("disaggregated" if name in PRICED else name)
    if name == "disaggregated":
        assert once is policy


def test_cache_aware_keeps_its_options() -> None:
    found = paired(load("cache_aware", {"margin": 3.0, "thrift": 2.0}))
    assert isinstance(found, Disaggregated)
    assert (found.margin, found.thrift) == (3.0, 2.0)
    request = Request(7, tokens=2_000, session=5, home=0, holdings={0: 1_000})
    targets = split([decoder(0, whole=False, wait=2.5), decoder(1, whole=False)], [prefiller(100)])
    assert found.choose(request, targets, 0.0).target.id == 0
    assert paired(load("cache_aware")).choose(request, targets, 0.0).target.id == 1
    assert (
        paired(load("cache_aware", {"thrift": 1.0})).choose(request, targets, 0.0).terms
        != paired(load("cache_aware")).choose(request, targets, 0.0).terms
    )


@given(st.integers(0, 10_000))
def test_round_robin_turns_on_either_side(ordinal: int) -> None:
    # So that each of one side meets each of the other, one side skips a turn when both are round.
    assert ids(paired(load("round_robin")).choose(Request(ordinal=ordinal), pairs(3, 2), 0.0)) == (
        ordinal % 3,
        100 + (ordinal + ordinal // 6) % 2,
    )


def test_in_turns_each_of_one_side_meets_each_of_the_other() -> None:
    policy, targets = paired(load("round_robin")), pairs(2, 2)
    seen = Counter(ids(policy.choose(Request(ordinal=ordinal), targets, 0.0)) for ordinal in range(40))
    assert seen == {(0, 100): 10, (0, 101): 10, (1, 100): 10, (1, 101): 10}


@pytest.mark.parametrize("name", ["round_robin", "random", "power_of_two"])
def test_in_two_pools_every_engine_of_either_side_is_used(name: str) -> None:
    targets = split(
        [decoder(0), decoder(1), decoder(2, pool="b"), decoder(3, pool="b")],
        [prefiller(100), prefiller(101, pool="b")],
    )
    policy, draws, seen = paired(load(name)), Random(5), Counter[int]()
    for ordinal in range(400):
        seen[policy.choose(Request(draws.getrandbits(64), ordinal), targets, 0.0).target.id] += 1
    assert min(seen[at] for at in range(4)) > 60


def test_a_session_does_not_leave_its_home_for_a_partner_elsewhere() -> None:
    targets = split([decoder(0), decoder(1, pool="b")], [prefiller(100), prefiller(101, pool="b")])
    policy, draws = paired(load("session")), Random(6)
    for _ in range(50):
        request = Request(draws.getrandbits(64), session=draws.getrandbits(64), home=0)
        choice = policy.choose(request, targets, 0.0)
        assert (ids(choice), choice.reason) == ((0, 100), "home")


@pytest.mark.parametrize("name", ["random", "power_of_two", "least_load", "prefix_hash", "consistent_hash", "session"])
def test_either_side_is_used_evenly(name: str) -> None:
    policy, targets, draws = paired(load(name)), pairs(4, 3), Random(8)
    second, first = Counter[int](), Counter[int]()
    for at in range(1200):
        key = draws.getrandbits(64)
        choice = policy.choose(Request(draws.getrandbits(64), at, 900, session=key, prefix=key), targets, 0.0)
        assert choice.prefill is not None
        second[choice.target.id] += 1
        first[choice.prefill.id] += 1
    assert max(second.values()) < 1.3 * 300
    assert max(first.values()) < 1.3 * 400
    assert (len(second), len(first)) == (4, 3)


def test_least_load_takes_the_least_of_each_side() -> None:
    prefill = [prefiller(100, running=9), prefiller(101, running=8), prefiller(102, pool="b")]
    decode = [decoder(0, running=4), decoder(1, running=3)]
    policy = paired(load("least_load"))
    busy, idle = target(50, running=9), target(50)
    assert ids(policy.choose(Request(draw=5), split([*decode, busy], prefill), 0.0)) == (1, 101)
    assert ids(policy.choose(Request(draw=5), split([*decode, idle], prefill), 0.0)) == (50, None), "it needs no pair"


def test_prefix_hash_sends_one_start_to_one_pair() -> None:
    policy, targets = paired(load("prefix_hash")), pairs(5, 4)
    seen = {ids(policy.choose(Request(draw, prefix=77), targets, 0.0)) for draw in range(50)}
    assert len(seen) == 1


def test_a_session_keeps_home_and_partner() -> None:
    policy, targets = paired(load("session")), pairs(4, 3)
    for home in range(4):
        for partner in (100, 101, 102):
            choice = policy.choose(Request(9, session=5, home=home, partner=partner), targets, 0.0)
            assert (ids(choice), choice.reason) == ((home, partner), "home")
    assert targets.prefill is not None
    targets.prefill.targets[0].running = 50
    spilled = policy.choose(Request(9, session=5, home=3, partner=100), targets, 0.0)
    assert spilled.target.id == 3
    assert spilled.prefill is not None
    assert spilled.prefill.id in (101, 102), "a partner over its share is spared, the home is kept"


def test_the_pool_of_the_prefill_engine_is_that_of_the_decode_engine() -> None:
    targets = split(
        [decoder(0, pool="b", running=1), decoder(1, running=90)],
        [prefiller(100), prefiller(101, pool="b", running=5), prefiller(102, pool="c")],
    )
    assert ids(paired(load("least_load")).choose(Request(draw=5), targets, 0.0)) == (0, 101)
    only_whole = split([target(50), target(51)], [prefiller(100)])
    assert ids(paired(load("round_robin")).choose(Request(ordinal=3), only_whole, 0.0)) == (51, None)


# -- options ------------------------------------------------------------------------------------------------------------


def test_either_side_is_chosen_by_the_policy_that_is_named_for_it() -> None:
    targets = split([decoder(0, running=4), decoder(1)], [prefiller(100, running=4), prefiller(101)])
    request = Request(ordinal=0, draw=5)
    for options, expected in (
        ({"prefill": "round_robin", "decode": "least_load"}, (1, 100)),
        ({"prefill": "least_load", "decode": "round_robin"}, (0, 101)),
        ({"prefill": "least_load"}, (1, 101)),
        ({"decode": "round_robin"}, (0, 100)),
        ({"prefill": {"name": "round_robin"}, "decode": {"name": "session", "fallback": "least_load"}}, (1, 100)),
    ):
        policy = load("disaggregated", options)
        assert policy.name == "disaggregated"
        choice = policy.choose(request, targets, 0.0)
        assert ids(choice) == expected
        rows = policy.explain(request, targets, 0.0)
        assert (rows[0].target, rows[0].prefill) == (choice.target, choice.prefill)


def test_options_of_a_side_reach_its_policy() -> None:
    targets = split([decoder(0, wait=2.5), decoder(1)], [prefiller(100)])
    request = Request(7, tokens=2_000, session=5, home=0, holdings={0: 1_900})
    for margin, chosen in ((3.0, 0), (0.1, 1)):
        side = {"name": "cache_aware", "margin": margin}
        policy = load("disaggregated", {"prefill": "round_robin", "decode": side})
        assert policy.choose(request, targets, 0.0).target.id == chosen
        assert side == {"name": "cache_aware", "margin": margin}, "what was told is not changed"


@pytest.mark.parametrize(
    ("prefill", "decode", "prefix", "session"),
    [
        ("round_robin", "random", False, False),
        ("lmetric", "random", True, False),
        ("random", "lmetric", True, False),
        ("session", "random", False, True),
        ("random", "consistent_hash", False, True),
    ],
)
def test_sides_need_what_either_needs(prefill: str, decode: str, prefix: bool, session: bool) -> None:
    sides = Sides(load(prefill), load(decode))
    assert (sides.needs_prefix, sides.needs_session) == (prefix, session)
    assert sides.name == "disaggregated"
    assert load("disaggregated", {"prefill": prefill, "decode": decode}).needs_prefix is prefix


@pytest.mark.parametrize("option", ["prefill", "decode"])
@pytest.mark.parametrize(
    "value",
    ["disaggregated", "nonsense", "", 3, True, [], ["least_load"], {}, {"nam": "random"}, {"name": 3}, {"name": "x"}],
)
def test_a_bad_side_is_refused_and_named(option: str, value: Any) -> None:
    with pytest.raises(BadOption) as found:
        load("disaggregated", {"prefill": "random", "decode": "random", option: value})
    assert found.value.option == option
    assert option in str(found.value)


@pytest.mark.parametrize("option", ["prefill", "decode"])
def test_a_bad_option_of_a_side_is_named_with_its_path(option: str) -> None:
    for told, path in (
        ({"name": "cache_aware", "margin": -1}, "margin"),
        ({"name": "cache_aware", "margine": 1}, "margine"),
        ({"name": "session", "fallback": {"name": "prefix_hash", "bound": 0}}, "fallback.bound"),
    ):
        with pytest.raises(BadOption) as found:
            load("disaggregated", {"prefill": "random", option: told})
        assert found.value.option == f"{option}.{path}"


@pytest.mark.parametrize("option", ["margin", "thrift"])
def test_bad_numbers_are_refused_and_named(option: str) -> None:
    for value in (-1, "2", True, [1], float("nan"), float("inf"), 1e9):
        with pytest.raises(BadOption) as found:
            load("disaggregated", {option: value})
        assert found.value.option == option
        assert option in str(found.value)


@pytest.mark.parametrize("option", ["margin", "thrift"])
def test_a_bad_option_is_named_as_it_was_given(option: str) -> None:
    with pytest.raises(BadOption, match=f"disaggregated.{option}") as found:
        load("disaggregated", {option: -1})
    assert found.value.option == option
    with pytest.raises(BadOption, match="no use") as beside:
        load("disaggregated", {option: 1.0, "decode": "random"})
    assert beside.value.option == option


def test_one_bad_side_is_named() -> None:
    with pytest.raises(BadOption, match=r"disaggregated\.decode"):
        load("disaggregated", {"decode": "nonsense"})
