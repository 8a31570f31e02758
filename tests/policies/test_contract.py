"""What every policy of the registry promises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from policies.base import BadOption, Policy, Request, UnknownPolicy, load, names
from tests.policies.fleets import asked, fleet, said, state

every_policy = pytest.mark.parametrize("name", names())


def test_the_registry_finds_the_policies_that_ship() -> None:
    assert set(names()) >= {
        "cache_aware",
        "consistent_hash",
        "least_load",
        "power_of_two",
        "prefix_hash",
        "random",
        "round_robin",
        "session",
    }
    assert names() == sorted(names())
    assert not {"base", "cost"} & set(names())


@every_policy
def test_a_policy_says_its_own_name_and_what_it_needs(name: str) -> None:
    policy = load(name)
    assert isinstance(policy, Policy)
    assert policy.name == name
    assert policy.needs_prefix in (True, False)
    assert policy.needs_session in (True, False)


@every_policy
@given(data=st.data())
@settings(max_examples=40)
def test_choosing_twice_gives_the_same_and_changes_nothing(name: str, data: st.DataObject) -> None:
    policy, (targets, request) = load(name), data.draw(asked())
    before, words = [state(each) for each in targets.targets], said(request)
    first = policy.choose(request, targets, 5.0)
    rows = policy.explain(request, targets, 5.0)
    second = policy.choose(request, targets, 5.0)
    assert first == second
    assert load(name).choose(request, targets, 5.0) == first, "nothing is remembered in the policy"
    assert [state(each) for each in targets.targets] == before
    assert said(request) == words
    assert any(first.target is each for each in targets.targets), "a candidate of the fleet"
    assert next(row.target for row in rows) is first.target, "the chosen one is explained first"
    assert sorted(row.target.id for row in rows) == sorted(each.id for each in targets.targets)
    for row in rows:
        assert row.holding == request.holdings.get(row.target.id, 0)


@every_policy
@pytest.mark.parametrize("count", [1, 2, 64])
@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(draw=2**64 - 1, ordinal=2**40),
        Request(tokens=5000),
        Request(tokens=0, holdings={0: 900}),
        Request(session=7, home=None),
        Request(session=7, home=0, tokens=5000, holdings={0: 4000}),
        Request(session=7, home=999, tokens=5000, holdings={999: 4000}),
    ],
)
def test_whatever_is_missing_a_target_is_chosen(name: str, count: int, request_: Request) -> None:
    targets = fleet(count)
    choice = load(name).choose(request_, targets, 0.0)
    assert choice.target in targets.targets
    assert choice.reason.isidentifier()
    assert len(load(name).explain(request_, targets, 0.0)) == count


@every_policy
def test_reasons_are_few_words(name: str) -> None:
    """They are metric labels."""
    policy, seen = load(name), set()
    for draw in range(200):
        targets = fleet(3)
        targets.targets[draw % 3].running = draw % 11
        targets.targets[draw % 3].wait = draw % 7
        home = draw % 5 if draw % 2 else None
        request = Request(draw * 0x9E3779B97F4A7C15 % 2**64, draw, 900, {draw % 3: 800}, draw, home, draw % 4 // 3)
        seen.add(policy.choose(request, targets, 0.0).reason)
    assert len(seen) <= 6


@every_policy
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(BadOption) as found:
        load(name, {"marginn": 3})
    assert found.value.option == "marginn"
    assert "marginn" in str(found.value)


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("cache_aware", "margin", [-1, "2", True, [1], float("nan"), float("inf"), 1e9]),
        ("consistent_hash", "bound", [0.9, "2", None, True, float("nan"), 101]),
        ("prefix_hash", "bound", [0.9, "2", None, {}, float("inf")]),
        ("session", "spill", [0.5, "2", None, False]),
        ("session", "slack", [-1, "2", None, float("nan")]),
        ("session", "fallback", ["session", "nonsense", "", 3, None, [], ["least_load"], {}, {"name": "session"}]),
    ],
)
def test_a_bad_value_is_refused_and_the_option_named(name: str, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(BadOption) as found:
            load(name, {option: value})
        assert found.value.option == option
        assert option in str(found.value)


def test_an_option_of_the_fallback_is_named_with_its_path() -> None:
    with pytest.raises(BadOption) as found:
        load("session", {"fallback": {"name": "cache_aware", "margin": -1}})
    assert found.value.option == "fallback.margin"
    with pytest.raises(BadOption) as found:
        load("session", {"fallback": {"name": "cache_aware", "margine": 1}})
    assert found.value.option == "fallback.margine"


@pytest.mark.parametrize("name", ["nonsense", "", "base", "cost", "_x", "a.b", "../base", "Session", "round-robin"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownPolicy) as found:
        load(name)
    for known in names():
        assert known in str(found.value)
