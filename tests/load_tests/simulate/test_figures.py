"""Figures by hand."""

from __future__ import annotations

import pytest

from load_tests.engine.physics import Rates, step_seconds, unloaded_prefill_seconds
from load_tests.simulate.conditions import Conditions
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import Goal, mean, quantile, row
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


def test_goodput_is_the_share_that_keeps_the_goal() -> None:
    # One behind the other on one engine: the first waits for nobody, of the others each for those before it.
    chains = [Chain(0.0, (Turn((), 2000, 11),)) for _ in range(4)]
    outcome = Simulation(Traffic("four", 16, chains), load("random"), 1, Options()).run()
    ttft = sorted((each.first - each.arrived) * 1e3 for each in outcome.asked)
    assert row(outcome, 0.0)["goodput"] is None
    assert row(outcome, 0.0, Goal(ttft[1]))["goodput"] == 0.5
    assert row(outcome, 0.0, Goal(ttft[-1]))["goodput"] == 1.0
    paces = sorted((each.ended - each.first) / 10 * 1e3 for each in outcome.asked)
    assert row(outcome, 0.0, Goal(ttft[-1], paces[0]))["goodput"] == 0.25
    assert row(outcome, 0.0, Goal(ttft[-1], paces[-1]))["goodput"] == 1.0
    assert row(outcome, 0.0)["tpot_p99_ms"] == pytest.approx(paces[-1], abs=0.01)


def test_an_answer_of_one_token_has_no_pace_to_keep() -> None:
    outcome = Simulation(Traffic("one", 16, [Chain(0.0, (Turn((), 50, 1),))]), load("random"), 1, Options()).run()
    assert row(outcome, 0.0, Goal(1e4, 1e-6))["goodput"] == 1.0


def test_costs_are_engine_hours_by_session_and_by_request() -> None:
    chains = [
        Chain(0.0, (Turn((), 100, 2), Turn((), 100, 2, think=3600.0)), "a"),
        Chain(0.0, (Turn((), 100, 2),), "b"),
    ]
    outcome = Simulation(Traffic("two", 16, chains), load("round_robin"), 2, Options()).run()
    figures = row(outcome, 0.0, price=3.0)
    hours = outcome.seconds / 3600
    assert hours > 1.0
    assert figures["cost_per_session"] == pytest.approx(3.0 * 2 * hours / 2, abs=1e-6)
    assert figures["cost_per_request"] == pytest.approx(3.0 * 2 * hours / 3, abs=1e-6)
    assert row(outcome, 0.0)["cost_per_session"] is None


def test_first_tokens_are_told_by_turn_within_the_session() -> None:
    turns = tuple(Turn((), 100 * number, 2, think=1.0) for number in range(1, 36))
    # The second chain is of the same session: its request is the session's last.
    chains = [Chain(0.0, turns, "a"), Chain(1000.0, (Turn((), 9000, 2),), "a"), Chain(2000.0, (Turn((), 500, 2),), "b")]
    outcome = Simulation(Traffic("one", 16, chains), load("round_robin"), 1, Options()).run()
    table = row(outcome, 0.0)["ttft_by_turn"]
    assert [each["turn"] for each in table] == ["1", "2", "3", "4-8", "9-16", "17-32", "33+"]
    assert [each["requests"] for each in table] == [2, 1, 1, 5, 8, 16, 4]

    def alone(*prompts: int) -> float:
        return 1e3 * sum(unloaded_prefill_seconds(RATES, 0, prompt, 2048) for prompt in prompts) / len(prompts)

    assert table[0]["ttft_mean_ms"] == pytest.approx(alone(100, 500), abs=0.01)
    assert table[3]["ttft_mean_ms"] == pytest.approx(alone(400, 500, 600, 700, 800), abs=0.01)
    assert table[6]["ttft_mean_ms"] == pytest.approx(alone(3300, 3400, 3500, 9000), abs=0.01)


def test_turns_that_nobody_reached_have_no_mean_and_no_sessions_no_turns() -> None:
    chains = [Chain(0.0, (Turn((), 100, 2),), "a")]
    table = row(Simulation(Traffic("one", 16, chains), load("random"), 1, Options()).run(), 0.0)["ttft_by_turn"]
    assert [(each["requests"], each["ttft_mean_ms"] is None) for each in table] == [(1, False)] + [(0, True)] * 6
    chains = [Chain(0.0, (Turn((), 100, 2),))]
    assert row(Simulation(Traffic("one", 16, chains), load("random"), 1, Options()).run(), 0.0)["ttft_by_turn"] is None


def test_engines_that_only_generate_count_neither_for_hits_nor_for_imbalance() -> None:
    chains = [Chain(float(at), (Turn((1, 2, 3), 350, 4),)) for at in range(4)]
    outcome = Simulation(
        Traffic("pd", 100, chains), load("round_robin"), 5, Options(block=100), conditions=Conditions(prefill=2)
    ).run()
    figures = row(outcome, 0.5, price=1.0)
    # Each prefill engine computes all of its first prompt, and of its second what stands behind three blocks.
    assert figures["token_hit_rate"] == pytest.approx(1 - 2 * (350 + 50) / 1400, abs=1e-4)
    assert figures["imbalance"] == 1.0
    assert figures["cost_per_request"] == pytest.approx(5 * outcome.seconds / 3600 / 4, abs=1e-6)


def test_means_over_seeds_have_their_deviation() -> None:
    def of(hit: float, pace: float | None, turn: float | None) -> dict[str, object]:
        table = [{"turn": "1", "requests": 2, "ttft_mean_ms": turn}]
        return {"requests": 7, "token_hit_rate": hit, "tpot_p50_ms": pace, "goodput": None, "ttft_by_turn": table}

    assert mean([of(0.5, 1.0, 3.0)]) == of(0.5, 1.0, 3.0)
    found = mean([of(0.5, 1.0, 3.0), of(0.7, None, None)])
    assert found["requests"] == 7
    assert found["token_hit_rate"] == 0.6
    assert found["tpot_p50_ms"] == 1.0
    assert found["goodput"] is None
    assert found["ttft_by_turn"] == [{"turn": "1", "requests": 2.0, "ttft_mean_ms": 3.0}]
    assert found["spread"]["token_hit_rate"] == pytest.approx(0.1 * 2**0.5, abs=1e-6)
    assert found["spread"]["tpot_p50_ms"] is None


def test_quantiles_are_by_rank() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [quantile(ordered, share) for share in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 51.0, 91.0, 100.0, 100.0]
