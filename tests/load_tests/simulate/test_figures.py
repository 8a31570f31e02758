"""Figures by hand."""

from __future__ import annotations

import pytest

from load_tests.engine.physics import Rates, step_seconds, unloaded_prefill_seconds
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import quantile, row
from load_tests.simulate.fleet import Simulation
from load_tests.workloads.chains import Chain, Traffic, Turn
from policies.base import load

RATES = Rates()


def test_the_figures_of_two_sessions_by_hand() -> None:
    # Under round robin: "a" on the first worker, "b" on the second, then "a" again on the first.
    chains = [
        Chain(0.0, (Turn(tuple(range(10)), 1000, 3), Turn(tuple(range(20)), 2000, 3, think=40.0)), "a"),
        Chain(20.0, (Turn((), 500, 3),), "b"),
    ]
    outcome = Simulation(Traffic("two", 100, chains), load("round_robin"), 2, Options(block=100)).run()
    figures = row(outcome, 0.25)
    # Of the first prompt's ten blocks all are found, for the second prompt goes on behind them.
    prefills = [unloaded_prefill_seconds(RATES, *each, 2048) for each in ((0, 1000), (0, 500), (1000, 2000))]
    decodes = [sum(step_seconds(RATES, (), 1, size + place) for place in (0, 1)) for size in (1000, 500, 2000)]
    assert figures["requests"] == 3
    assert figures["token_hit_rate"] == pytest.approx(1000 / 3500, abs=1e-4)
    assert figures["ceiling"] == 0.25
    assert figures["ttft_mean_ms"] == pytest.approx(1e3 * sum(prefills) / 3, abs=0.01)
    assert figures["ttft_p50_ms"] == pytest.approx(1e3 * sorted(prefills)[1], abs=0.01)
    assert figures["ttft_p99_ms"] == pytest.approx(1e3 * max(prefills), abs=0.01)
    assert figures["tpot_p50_ms"] == pytest.approx(1e3 * decodes[0] / 2, abs=0.01)
    # "a" lasts from its first arrival to its last token, thinking included; of two the longer is the median by rank.
    assert figures["session_p50_s"] == pytest.approx(prefills[0] + decodes[0] + 40 + prefills[2] + decodes[2], abs=1e-3)
    assert figures["imbalance"] == pytest.approx(2000 * 2 / 2500, abs=1e-3)
    assert figures["moved_sessions"] == 0


def test_figures_that_nothing_tells_are_none() -> None:
    chains = [Chain(0.0, (Turn((), 5, 1),))]
    figures = row(Simulation(Traffic("one", 16, chains), load("random"), 1, Options()).run(), 0.0)
    assert figures["tpot_p50_ms"] is None
    assert figures["session_p50_s"] is None
    assert quantile([], 0.5) is None


def test_quantiles_are_by_rank() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 51.0, 91.0, 100.0, 100.0]
