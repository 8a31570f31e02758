"""Rates are learned from noisy samples and stay sane whatever comes."""

from __future__ import annotations

from math import inf, isfinite, nan
from random import Random

import pytest
from hypothesis import given, strategies as st

from load_tests.engine.physics import Rates as Physics, unloaded_prefill_seconds
from policies.base import Rates
from policies.calibrate import SLOWEST, VOID, Calibration, Pace
from policies.charged import Charged

TRUE = [
    Rates(base=0.03, token=5e-5, attention=2e-9),
    Rates(base=0.005, token=4e-4, attention=0.0),
    Rates(base=0.2, token=2e-5, attention=5e-9),
]


def sane(rates: Rates) -> bool:
    values = (rates.base, rates.token, rates.attention, rates.decode)
    return all(isfinite(value) for value in values) and (
        0 < rates.base <= 10 and 0 < rates.token <= 0.1 and 0 <= rates.attention <= 1e-6 and rates.decode > 0
    )


@pytest.mark.parametrize("true", TRUE)
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_known_rates_are_learned_within_a_tenth(true: Rates, noise: float) -> None:
    draws, learned = Random(7), Calibration()
    for _ in range(3000):
        uncached, context = draws.uniform(10, 20_000), draws.choice([0.0, draws.uniform(0, 100_000)])
        seconds = true.prefill(uncached, context) * draws.uniform(1 - noise, 1 + noise)
        learned.first_byte(uncached, context, seconds)
    # What is used is the prediction; single coefficients may trade with each other where there is noise.
    for uncached, context in ((700, 0), (700, 50_000), (5000, 0), (20_000, 0), (10_000, 90_000)):
        assert learned.rates.prefill(uncached, context) == pytest.approx(true.prefill(uncached, context), rel=0.1)
    assert learned.rates.token == pytest.approx(true.token, rel=0.1)
    if not noise:
        assert learned.rates.base == pytest.approx(true.base, rel=0.1, abs=1e-3)


def test_an_engine_that_changes_is_learned_anew() -> None:
    draws, learned = Random(3), Calibration()
    for true in TRUE[:2]:
        for _ in range(6000):
            uncached = draws.uniform(100, 20_000)
            learned.first_byte(uncached, 0, true.prefill(uncached, 0))
    assert learned.rates.prefill(5000, 0) == pytest.approx(TRUE[1].prefill(5000, 0), rel=0.1)


def test_without_variety_the_priors_keep_the_coefficients_sane() -> None:
    learned, prior = Calibration(), Rates()
    for _ in range(500):
        learned.first_byte(1000, 0, 0.25)
    assert learned.rates.prefill(1000, 0) == pytest.approx(0.25, rel=0.1), "what is seen is believed"
    assert sane(learned.rates)
    # What was never seen is still in the order of what was assumed.
    assert learned.rates.prefill(10_000, 0) < 10 * prior.prefill(10_000, 0)
    assert learned.rates.prefill(10_000, 0) > prior.prefill(10_000, 0) / 10


def test_a_few_samples_do_not_overturn_the_priors() -> None:
    learned = Calibration()
    for _ in range(8):
        learned.first_byte(50, 0, 30.0)
    assert sane(learned.rates)
    assert learned.rates.token < 1e-2


@pytest.mark.parametrize(
    "sample",
    [
        (1000, 0, 0.0),
        (1000, 0, -1.0),
        (1000, 0, 1e9),
        (1000, 0, nan),
        (1000, 0, inf),
        (nan, 0, 1.0),
        (inf, 0, 1.0),
        (-5, 0, 1.0),
        (1e300, 0, 1.0),
        (1000, nan, 1.0),
        (1000, inf, 1.0),
        (1000, -inf, 1.0),
        (1000, 1e300, 1.0),
    ],
)
def test_one_impossible_sample_changes_nothing(sample: tuple[float, float, float]) -> None:
    draws, with_it, without = Random(1), Calibration(), Calibration()
    for at in range(200):
        uncached = draws.uniform(10, 10_000)
        for each in (with_it, without):
            each.first_byte(uncached, 0, 0.1 + uncached * 1e-4)
        if at % 5 == 0:
            with_it.first_byte(*sample)
    assert with_it.rates.base == without.rates.base
    assert with_it.rates.token == without.rates.token
    assert with_it.rates.attention == without.rates.attention


anything = st.floats() | st.integers(-(10**6), 10**6).map(float) | st.sampled_from([0.0, 1.0, 1e8, 600.0, 1e-9])


@given(st.lists(st.tuples(anything, anything, anything), max_size=60))
def test_whatever_comes_the_rates_stay_within_bounds(samples: list[tuple[float, float, float]]) -> None:
    learned = Calibration()
    for sample in samples:
        learned.first_byte(*sample)
        assert sane(learned.rates)
    assert isfinite(learned.rates.prefill(100_000, 100_000))


def test_what_an_engine_s_physics_cost_is_learned() -> None:
    random, learned = Random(1), Calibration()
    for number in range(400):
        context, uncached = random.randrange(0, 50_000), random.randrange(1, 20_000)
        seconds = unloaded_prefill_seconds(Physics(), context, context + uncached, 2048) * random.uniform(0.9, 1.3)
        if number % 50 == 7:
            seconds = random.choice([0.0, -1.0, 700.0])
        learned.first_byte(uncached, context, seconds)
    assert learned.rates.token == pytest.approx(60e-6 + 8e-3 / 2048, rel=0.25)


# -- one target beside its kind ----------------------------------------------------------------------------------------


def test_a_target_half_as_fast_is_priced_by_itself_and_by_its_kind_again() -> None:
    kind, slow, fast = Calibration(), Charged(0, "slow"), Charged(1, "fast")
    slow.rates = fast.rates = kind.rates
    changes = []
    for number in range(40):
        uncached = 500 + 700 * (number % 7)
        seconds = Rates().prefill(uncached, 0)
        for _ in range(8):
            fast.learn(kind, uncached, 0, seconds, number)
        changes.append(slow.learn(kind, uncached, 0, 2 * seconds, number))
    assert changes.count(True) == 1
    assert slow.rates is not kind.rates
    assert fast.rates is kind.rates
    assert slow.rates.prefill(2000, 0) / fast.rates.prefill(2000, 0) == pytest.approx(slow.pace.factor, rel=1e-6)
    assert 1.6 < slow.pace.factor < 2.1
    for number in range(80):
        uncached = 500 + 700 * (number % 7)
        slow.learn(kind, uncached, 0, kind.rates.prefill(uncached, 0), 40 + number)
    assert slow.rates is kind.rates, "what passed is forgotten"


def test_a_few_odd_samples_are_no_pace() -> None:
    kind, one = Calibration(), Charged(0, "t")
    one.rates = kind.rates
    for _ in range(15):
        assert not one.learn(kind, 1000, 0, 5.0, 0.0)
    assert one.rates is kind.rates


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 0.0, 1e9])
def test_what_is_no_observation_changes_no_pace(bad: float) -> None:
    pace, kind = Pace(), Rates()
    for _ in range(20):
        assert pace.first_byte(kind, 1000, 0, bad, 0.0) is kind
    assert (pace.samples, pace.factor) == (0, 1.0)


def test_one_odd_answer_is_no_pace_and_a_pace_has_a_bound() -> None:
    pace, kind = Pace(), Rates()
    usual = kind.prefill(1000, 0)
    for number in range(40):
        assert pace.first_byte(kind, 1000, 0, 60.0 if number == 20 else usual, number) is kind
    for number in range(100):
        pace.first_byte(kind, 1, 0, 599.0, number)
    assert 3.5 < pace.factor <= SLOWEST


def test_who_is_faster_than_its_kind_is_of_its_kind() -> None:
    pace, kind = Pace(), Rates()
    for number in range(100):
        assert pace.first_byte(kind, 1000, 0, 0.3 * kind.prefill(1000, 0), number) is kind


def test_a_slow_target_that_gets_nothing_is_tried_again() -> None:
    kind, one = Calibration(), Charged(0, "t")
    one.rates = kind.rates
    usual = Rates().prefill(1000, 0)
    for number in range(20):
        one.learn(kind, 1000, 0, 3 * usual, number)
        for _ in range(20):
            kind.first_byte(1000, 0, usual)
    assert one.rates is not kind.rates
    assert not one.forgive(kind, 19 + VOID)
    assert one.forgive(kind, 20 + VOID)
    assert one.rates is kind.rates
    assert one.learn(kind, 1000, 0, 3 * usual, 21 + VOID), "still slow: one sample is enough"
    now = 21 + VOID
    for _ in range(4):
        now += 1 + VOID
        one.forgive(kind, now)
        one.learn(kind, 1000, 0, usual, now)
    assert one.rates is kind.rates, "well again: a few are"
    one.forgive(kind, now, always=True)
    assert one.pace.samples == 0
