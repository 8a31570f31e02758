"""What the simulated gateway learns is what the real one would: its regression is written anew, so the two are compared."""

from __future__ import annotations

from random import Random

import pytest

from gateway.calibrate import Calibration
from load_tests.engine.physics import Rates, unloaded_prefill_seconds
from load_tests.simulate.learning import Learning, solved


def test_it_learns_what_the_gateway_learns() -> None:
    random = Random(1)
    ours, theirs = Learning(), Calibration()
    for number in range(400):
        context, uncached = random.randrange(0, 50_000), random.randrange(1, 20_000)
        seconds = unloaded_prefill_seconds(Rates(), context, context + uncached, 2048) * random.uniform(0.9, 1.3)
        if number % 50 == 7:
            seconds = random.choice([0.0, -1.0, 700.0])
        ours.first_byte(uncached, context, seconds)
        theirs.first_byte(uncached, context, seconds)
        assert ours.samples == theirs.samples
        assert (ours.rates.base, ours.rates.token, ours.rates.attention) == (
            pytest.approx(theirs.rates.base),
            pytest.approx(theirs.rates.token),
            pytest.approx(theirs.rates.attention),
        )
    assert ours.rates.token == pytest.approx(60e-6 + 8e-3 / 2048, rel=0.25)


def test_equations_without_a_solution_have_none() -> None:
    assert solved([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0]) is None
    assert solved([[0.0, 2.0], [4.0, 0.0]], [2.0, 8.0]) == [2.0, 1.0]
