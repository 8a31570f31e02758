"""The published alternatives that ship: a product of work and batch, and a prefix that is kept until it costs too much."""

from __future__ import annotations

import pytest

from policies.base import BadOption, Fleet, Rates, Request, Target, load

RATES = Rates(base=0.0, token=1e-3, attention=0.0, decode=0.0)


def fleet(*loads: tuple[float, int]) -> Fleet:
    """Targets by (seconds of prefill in front, requests in flight)."""
    return Fleet(
        [
            Target(id=at, name=f"t{at}", rates=RATES, wait=wait, running=running)
            for at, (wait, running) in enumerate(loads)
        ]
    )


def test_lmetric_takes_the_least_product() -> None:
    policy = load("lmetric")
    # (400 + 1000) x 2, (0 + 1000) x 3, (0 + 1000) x 4
    assert policy.choose(Request(tokens=1000), fleet((0.4, 1), (0.0, 2), (0.0, 3)), 0.0).target.id == 0
    assert policy.choose(Request(tokens=1000), fleet((0.6, 1), (0.0, 2), (0.0, 3)), 0.0).target.id == 1
    held = Request(tokens=1000, holdings={2: 900})
    assert policy.choose(held, fleet((0.5, 1), (0.0, 2), (0.0, 3)), 0.0).target.id == 2


def test_lmetric_weighs_a_prefix_by_the_batch_that_it_meets() -> None:
    policy = load("lmetric")
    held = Request(tokens=1000, holdings={0: 500})
    assert policy.choose(held, fleet((0.0, 2), (0.0, 0)), 0.0).target.id == 1
    assert policy.choose(held, fleet((0.0, 0), (0.0, 0)), 0.0).target.id == 0


def test_lmetric_of_a_prompt_that_all_hold_whole_goes_by_load() -> None:
    held = Request(tokens=1000, holdings={0: 1000, 1: 1000})
    assert load("lmetric").choose(held, fleet((0.0, 3), (0.0, 1)), 0.0).target.id == 1


def test_sticky_stays_with_who_holds_enough_until_it_costs_too_much() -> None:
    policy = load("sticky", {"penalty": 5.0})
    held = Request(tokens=10_000, holdings={0: 8_000})
    assert policy.choose(held, fleet((12.0, 9), (0.0, 0)), 0.0)[1] == "prefix"
    choice = policy.choose(held, fleet((13.1, 9), (0.0, 0)), 0.0)
    assert (choice.target.id, choice.reason) == (1, "saturated")


def test_sticky_does_not_care_for_a_small_share() -> None:
    held = Request(tokens=10_000, holdings={0: 7_999})
    choice = load("sticky").choose(held, fleet((3.0, 1), (0.0, 0)), 0.0)
    assert (choice.target.id, choice.reason) == (0, "load"), "soonest: it computes 2,001 instead of 10,000"
    assert load("sticky").choose(held, fleet((9.0, 1), (0.0, 0)), 0.0).target.id == 1


def test_sticky_chooses_the_soonest_of_those_that_hold_enough() -> None:
    held = Request(tokens=10_000, holdings={0: 9_000, 1: 8_500})
    assert load("sticky").choose(held, fleet((4.0, 2), (0.0, 0), (0.0, 0)), 0.0).target.id == 1


@pytest.mark.parametrize(("option", "value"), [("threshold", 1.1), ("threshold", "x"), ("penalty", -1)])
def test_options_are_checked(option: str, value: object) -> None:
    with pytest.raises(BadOption, match=f"sticky.{option}"):
        load("sticky", {option: value})
