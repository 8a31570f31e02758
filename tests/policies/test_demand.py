"""What is asked of a model, and what work in front of a target is left: learned, bounded, priced."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from policies.base import Fleet, Rates, Request, load
from policies.charged import Charged
from policies.cost import terms
from policies.demand import BUSIEST, FIRST_TURNS, SHARED, WINDOW, Demand

RATES = Rates(base=0.0, token=1e-3, attention=0.0, decode=0.0)


def steady(rate: float, seconds: float, lasts: float = 10 * WINDOW) -> tuple[Demand, float]:
    """Requests of ``seconds`` of prefill, ``rate`` a second."""
    demand = Demand()
    count = int(rate * lasts)
    for number in range(count):
        demand.sent(seconds, number / rate)
    return demand, count / rate


@pytest.mark.parametrize(("rate", "seconds", "targets"), [(4.0, 0.1, 2), (1.0, 1.0, 4), (50.0, 0.01, 8)])
def test_a_crowd_is_arrivals_over_what_is_idle(rate: float, seconds: float, targets: int) -> None:
    demand, now = steady(rate, seconds)
    each = rate / targets
    assert demand.crowd(targets, now) == pytest.approx(SHARED * each / (1 - each * seconds), rel=0.05)


def test_a_fleet_that_is_full_counts_as_nearly_full() -> None:
    demand, now = steady(4.0, 10.0)
    assert demand.crowd(2, now) == pytest.approx(SHARED * 2.0 / (1 - BUSIEST), rel=0.05)


def test_nothing_asked_is_no_crowd_and_a_crowd_leaves() -> None:
    assert Demand().crowd(4, 100.0) == 0.0
    demand, now = steady(4.0, 0.01)
    assert demand.crowd(2, now + 20 * WINDOW) < 1e-6


def test_averages_are_right_from_early_on() -> None:
    demand, now = steady(4.0, 0.01, lasts=WINDOW / 2)
    assert demand.crowd(2, now) == pytest.approx(SHARED * 2.0 / (1 - 0.02), rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 100)), max_size=50), st.integers(1, 4096), st.floats(0, 2e4))
def test_a_crowd_is_never_negative_nor_without_bound(sent: list[tuple[float, float]], targets: int, now: float) -> None:
    demand = Demand()
    for at, seconds in sent:
        demand.sent(seconds, at)
    assert 0.0 <= demand.crowd(targets, now) <= len(sent) * SHARED / (WINDOW * 0.2 * targets * (1 - BUSIEST)) + 1e-9


def test_turns_of_sessions_are_learned() -> None:
    demand = Demand()
    assert demand.turns == FIRST_TURNS
    for _ in range(3000):
        for turn in range(9):
            demand.turn(new=turn == 0)
    assert demand.turns == pytest.approx(9.0, rel=0.01)


# -- what is left of the work in front --------------------------------------------------------------------------------


def test_what_passed_of_the_work_at_hand_is_no_wait() -> None:
    target = Charged(0, "t", RATES)
    target.charge("a", 2.0, 10.0)
    target.charge("b", 3.0, 10.5)
    assert [target.waits(now) for now in (10.5, 11.0, 12.0, 15.0)] == [4.5, 4.0, 3.0, 3.0]
    target.discharge("a", 13.0)
    assert [target.waits(now) for now in (13.0, 14.0, 20.0)] == [3.0, 2.0, 0.0]
    target.discharge("b", 21.0)
    assert (target.wait, target.head, target.charged) == (0.0, 0.0, 0.0)


def test_one_that_fails_behind_the_first_does_not_set_it_back() -> None:
    target = Charged(0, "t", RATES)
    target.charge("a", 2.0, 0.0)
    target.charge("b", 3.0, 0.0)
    target.discharge("b", 1.0)
    assert target.waits(1.0) == 1.0
    target.discharge("b", 1.5)
    assert target.waits(1.5) == 0.5


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.floats(0.0, 3.0), st.floats(0.0, 2.0)), max_size=40))
def test_the_wait_is_what_is_charged_less_what_passed(steps: list[tuple[bool, int, float, float]]) -> None:
    target, now = Charged(0, "t", RATES), 0.0
    model: dict[object, float] = {}
    began = 0.0
    for charges, whom, seconds, passes in steps:
        now += passes
        first = next(iter(model), None)
        if charges and whom not in model:
            if not model:
                began = now
            model[whom] = seconds
            target.charge(whom, seconds, now)
        elif not charges:
            if whom == first:
                began = now
            model.pop(whom, None)
            target.discharge(whom, now)
        head = next(iter(model.values()), 0.0)
        assert target.waits(now) == pytest.approx(sum(model.values()) - min(head, now - began), abs=1e-9)
    if not model:
        assert target.waits(now) == 0.0


# -- what that changes ------------------------------------------------------------------------------------------------


def two(**first: float) -> Fleet:
    targets = [Charged(0, "a", RATES), Charged(1, "b", RATES)]
    for name, value in first.items():
        setattr(targets[0], name, value)
    return Fleet(targets)


def test_work_that_is_nearly_done_is_waited_for() -> None:
    held = Request(tokens=2000, holdings={0: 1900})
    policy = load("cache_aware")
    assert policy.choose(held, two(wait=3.0, head=3.0, since=0.0), 0.5).target.id == 1
    assert policy.choose(held, two(wait=3.0, head=3.0, since=0.0), 2.5).target.id == 0


def test_in_a_crowd_work_is_spared() -> None:
    quiet = Request(tokens=2000, holdings={0: 1900})
    crowded = Request(tokens=2000, holdings={0: 1900}, crowd=1.0)
    policy = load("cache_aware")
    assert policy.choose(quiet, two(wait=2.5), 0.0).target.id == 1
    assert policy.choose(crowded, two(wait=2.5), 0.0).target.id == 0
    told = terms(crowded, two(wait=2.5).targets[0], None, 0.0)
    assert told.delay == pytest.approx(1.0 * 0.1 * (2.5 + 0.05))


def test_what_runs_beside_others_of_its_session_is_placed_by_its_own_cost() -> None:
    targets = two(homes=0)
    targets.targets[1].homes = 30
    policy = load("cache_aware")
    beside = Request(tokens=2000, holdings={1: 100}, session=7, home=0, siblings=1)
    choice = policy.choose(beside, targets, 0.0)
    assert (choice.target.id, choice.moves_home) == (1, False)
    alone = Request(tokens=2000, holdings={1: 100}, session=7, home=0)
    assert policy.choose(alone, targets, 0.0).target.id == 0


def test_long_sessions_are_spread_before_a_short_start_is_shared() -> None:
    targets = two(homes=2)
    policy = load("cache_aware")
    brief = Request(tokens=3000, holdings={0: 2000}, session=7, turns=1.0)
    lasting = Request(tokens=3000, holdings={0: 2000}, session=7, turns=20.0)
    assert policy.choose(brief, targets, 0.0).target.id == 0
    assert policy.choose(lasting, targets, 0.0).target.id == 1
