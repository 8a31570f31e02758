"""The policies that price nothing, and the session wrapper."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, strategies as st

from policies.base import Fleet, Request, Target, load, names
from tests.policies.fleets import asked, bits, fleet, fleets, preferred, target


def test_round_robin_turns_evenly() -> None:
    policy, targets = load("round_robin"), fleet(7)
    chosen = [policy.choose(Request(ordinal=at), targets, 0.0).target.id for at in range(70)]
    assert chosen == [at % 7 for at in range(70)]


def test_random_is_even_over_draws() -> None:
    policy, targets, bits = load("random"), fleet(8), Random(3)
    count = Counter(policy.choose(Request(draw=bits.getrandbits(64)), targets, 0.0).target.id for _ in range(8000))
    assert len(count) == 8
    assert max(count.values()) / 1000 < 1.15
    assert min(count.values()) / 1000 > 0.85


@given(asked())
def test_least_load_picks_the_least(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    chosen = load("least_load").choose(request, targets, 0.0).target
    assert chosen.load == min(each.load for each in targets.targets)


def test_least_load_rotates_ties_and_only_those() -> None:
    policy, targets, bits = load("least_load"), fleet(6), Random(1)
    targets.targets[2].running = targets.targets[4].running = 1
    count = Counter(policy.choose(Request(draw=bits.getrandbits(64)), targets, 0.0).target.id for _ in range(4000))
    assert set(count) == {0, 1, 3, 5}
    assert max(count.values()) < 1150
    assert min(count.values()) > 850


def test_a_target_that_starts_slowly_counts_as_fuller_than_it_is() -> None:
    targets = Fleet([target(0, running=2, share=0.1), target(1, running=6)])
    for name in ("least_load", "power_of_two"):
        assert load(name).choose(Request(draw=5), targets, 0.0).target.id == 1


@given(fleets(), bits)
def test_power_of_two_never_picks_the_more_loaded_of_its_two(targets: Fleet, draw: int) -> None:
    policy = load("power_of_two")
    chosen = policy.choose(Request(draw=draw), targets, 0.0).target
    count = len(targets.targets)
    if count == 1:
        return
    # Its two are the only ones whose load can change its mind: find the other by making each in turn very light.
    others = []
    for each in targets.targets:
        if each is chosen:
            continue
        kept, each.running, each.foreign = (each.running, each.foreign), -10_000, 0.0
        if policy.choose(Request(draw=draw), targets, 0.0).target is each:
            others.append((each, kept))
        each.running, each.foreign = kept
    assert len(others) == 1, "two are drawn, and they differ"
    assert chosen.load <= others[0][0].load


def test_power_of_two_draws_every_pair() -> None:
    policy, targets, bits = load("power_of_two"), fleet(5), Random(2)
    targets.targets[3].running = 9
    count = Counter(policy.choose(Request(draw=bits.getrandbits(64)), targets, 0.0).target.id for _ in range(4000))
    assert set(count) == {0, 1, 2, 4}, "the heaviest never wins a pair"
    assert max(count.values()) < 1200


hashing = pytest.mark.parametrize(("name", "field"), [("consistent_hash", "session"), ("prefix_hash", "prefix")])


def keyed(field: str, key: int, draw: int = 0) -> Request:
    return Request(draw=draw, **{field: key})


@hashing
def test_the_same_key_goes_to_the_same_target(name: str, field: str) -> None:
    policy, targets, bits = load(name), fleet(16), Random(4)
    seen = Counter()
    for _ in range(1600):
        key = bits.getrandbits(64)
        first = policy.choose(keyed(field, key, 1), targets, 0.0)
        assert policy.choose(keyed(field, key, 2), targets, 9.0).target is first.target
        assert first.reason == "hash"
        seen[first.target.id] += 1
    assert len(seen) == 16
    assert max(seen.values()) < 145


@hashing
def test_when_a_target_leaves_only_its_own_keys_move(name: str, field: str) -> None:
    policy, bits = load(name), Random(5)
    everyone = [target(id) for id in range(9)]
    whole = Fleet(everyone)
    keys = [bits.getrandbits(64) for _ in range(900)]
    before = {key: policy.choose(keyed(field, key), whole, 0.0).target for key in keys}
    for gone in everyone:
        left = Fleet([each for each in everyone if each is not gone])
        for key in keys:
            after = policy.choose(keyed(field, key), left, 0.0).target
            assert after is before[key] or before[key] is gone


@hashing
def test_the_order_of_the_fleet_does_not_matter_to_a_key(name: str, field: str) -> None:
    policy, bits = load(name), Random(6)
    targets = [target(id, running=id % 3) for id in range(8)]
    for _ in range(200):
        key = bits.getrandbits(64)
        first = policy.choose(keyed(field, key), Fleet(targets), 0.0).target
        shuffled = targets[:]
        bits.shuffle(shuffled)
        assert policy.choose(keyed(field, key), Fleet(shuffled), 0.0).target is first


@hashing
@given(targets=fleets(slow=False), key=bits, bound=st.floats(1.0, 4.0))
def test_load_is_bounded(name: str, field: str, targets: Fleet, key: int, bound: float) -> None:
    choice = load(name, {"bound": bound}).choose(keyed(field, key), targets, 0.0)
    most = max(1.0, bound * (sum(each.load for each in targets.targets) + 1) / len(targets.targets))
    least = min(each.load for each in targets.targets)
    assert choice.target.load + 1 <= most or choice.target.load == least
    wanted = preferred(key, targets)
    if wanted.load + 1 <= most:
        assert choice.target is wanted
        assert choice.reason == "hash"


@hashing
def test_one_hot_key_is_spread_when_it_overflows(name: str, field: str) -> None:
    policy, targets = load(name, {"bound": 1.25}), fleet(8)
    for _ in range(400):
        policy.choose(keyed(field, 77), targets, 0.0).target.running += 1
    assert max(each.running for each in targets.targets) <= 1.25 * 401 / 8


def test_prefix_hash_of_a_prompt_too_short_to_hash_spreads() -> None:
    policy, targets, bits = load("prefix_hash"), fleet(4), Random(8)
    seen = Counter(policy.choose(Request(draw=bits.getrandbits(64)), targets, 0.0).target.id for _ in range(400))
    assert len(seen) == 4


# -- session ------------------------------------------------------------------------------------------------------------

every_fallback = pytest.mark.parametrize("fallback", [name for name in names() if name != "session"])


@every_fallback
@given(asked())
def test_a_session_stays_at_home_while_home_is_not_over_its_share(fallback: str, case: tuple[Fleet, Request]) -> None:
    targets, request = case
    policy = load("session", {"fallback": fallback, "spill": 1.5, "slack": 3})
    request.home = targets.targets[0].id
    home = targets.targets[0]
    mean = sum(each.load for each in targets.targets) / len(targets.targets)
    choice = policy.choose(request, targets, 0.0)
    over = home.load > 1.5 * mean and home.load >= mean + 3
    if not over:
        assert (choice.target, choice.reason) == (home, "home")
    elif choice.target is not home:
        assert choice.reason == "spill"
        assert not choice.moves_home, "a request that spills leaves the home where it is"
        assert choice.target.load < home.load


@every_fallback
def test_a_session_without_a_home_goes_where_the_fallback_says(fallback: str) -> None:
    policy, inner, targets = load("session", {"fallback": fallback}), load(fallback), fleet(5)
    targets.targets[1].running = 3
    for home, reason in ((None, "new"), (99, "home_gone")):
        request = Request(draw=11, ordinal=3, tokens=500, holdings={2: 400}, session=8, home=home, prefix=9)
        choice = policy.choose(request, targets, 0.0)
        assert choice.target is inner.choose(request, targets, 0.0).target
        assert choice.reason == reason
        assert choice.moves_home


@every_fallback
def test_what_the_fallback_needs_the_session_policy_needs(fallback: str) -> None:
    policy = load("session", {"fallback": fallback})
    assert policy.needs_session
    assert policy.needs_prefix == load(fallback).needs_prefix


def test_a_busy_session_spills_only_with_slack() -> None:
    policy = load("session", {"spill": 1.25, "slack": 4})

    def choose(*running: int) -> Target:
        targets = Fleet([target(id, running=count) for id, count in enumerate(running)])
        return policy.choose(Request(session=1, home=0), targets, 0.0).target

    assert choose(3, 0, 0, 0).id == 0, "three over an idle fleet is no reason"
    assert choose(40, 39, 38, 39).id == 0
    assert choose(12, 2, 2, 2).id != 0


# -- names --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(min_size=1, max_size=20), unique=True, min_size=2, max_size=8), bits)
def test_targets_are_told_apart_by_name_alone(called: list[str], key: int) -> None:
    """Replicas number their targets as they come; they must agree all the same."""
    one = Fleet([Target(id, name) for id, name in enumerate(called)])
    other = Fleet([Target(100 - id, name) for id, name in enumerate(reversed(called))])
    assert preferred(key, one).name == preferred(key, other).name
    for name in ("least_load", "cache_aware", "consistent_hash"):
        request = Request(draw=key, session=key)
        chosen = [load(name).choose(request, targets, 0.0).target.name for targets in (one, other)]
        assert chosen[0] == chosen[1]
