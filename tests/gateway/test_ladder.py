"""What is believed of engines over time: events that stop, engines without events, caches smaller than assumed, bursts."""

from __future__ import annotations

import asyncio
from random import Random
from statistics import median
from typing import Any

import pytest

from gateway.config import Config, ModelConfig, WorkerConfig
from kv_index import index
from load_tests.engine.physics import Rates
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import once, request, until
from tests.gateway.test_events import COMPLETIONS, Told, converse, counted, exact, rungs, talking, words, wrong

# -- events that stop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_prompts_that_make_no_events_are_noticed(
    gateway: Begin, engine: StartEngine, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "PATIENCE", 0.05)
    one = await engine(dialect, events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(1)
    async with talking(running, one) as talk:
        for at in range(3):
            await talk.ask(words(draws, 300), f"a{at}", 1)
        one.events.stop()
        for at in range(20):
            await talk.ask(words(draws, 300), f"b{at}", 1)
            await asyncio.sleep(0.06)
            running.gateway.sweep()
            if rungs(running) == [("predicted", "no_events")]:
                break
        assert at >= 4, "one or two that are late are no silence"
        assert rungs(running) == [("predicted", "no_events")]
        # What was computed meanwhile is known by what was sent.
        prompt = words(draws, 300)
        await talk.ask(prompt, "c", 1)
        told = await talk.ask([*prompt, 1], "c", 1)
        assert 0 < told.predicted <= told.cached
        one.events.resume()
        await talk.ask(words(draws, 300), "d", 1)
        assert rungs(running) == [("exact", "events")]
        assert await counted(running, "warmroute_index_moves_total", rung="predicted", reason="no_events") == 1


async def test_prompts_that_are_found_whole_need_no_events(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "PATIENCE", 0.02)
    one = await engine(events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    prompt = words(Random(2), 300)
    async with talking(running, one) as talk:
        for _ in range(20):
            await talk.ask(prompt, "s", 1)
            await asyncio.sleep(0.03)
            running.gateway.sweep()
    assert rungs(running) == [("exact", "events")]


# -- engines without events -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_without_events_sessions_of_ids_are_predicted_to_a_block(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    one = await engine(dialect, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    async with talking(running) as talk:
        told = await converse(talk, Random(3), sessions=6, turns=6)
    assert rungs(running) == [("predicted", "start")]
    for each in told:
        assert each.predicted <= each.cached + 16
        assert each.cached - each.predicted <= 32, each


async def test_a_cache_is_counted_in_pages_of_ids_where_prompts_are_ids(gateway: Begin, engine: StartEngine) -> None:
    one = await engine(time_scale=0, kv_tokens=32_768)
    running = await gateway(one, policy="cache_aware")
    draws = Random(4)
    prompts = [words(draws, 400) for _ in range(60)]
    async with talking(running) as talk:
        # That they are ids is believed after some of them.
        for _ in range(4):
            told = [await talk.ask(prompt, f"s{at}", 1) for at, prompt in enumerate(prompts)]
    assert all(each.cached >= 384 for each in told), "all of them fit"
    assert all(each.predicted >= 384 for each in told), "and are believed to"


# A state inside a block is of use to engines that cache token by token.
RULES = [
    pytest.param("sglang", "ends", id="sglang ends"),
    pytest.param("sglang", "every:64", id="sglang every 64"),
    pytest.param("vllm", "boundary", id="vllm boundary"),
    pytest.param("vllm", "every:64", id="vllm every 64"),
]


def hybrid(rule: str) -> Any:
    def change(config: Config) -> None:
        config.models["sim"] = ModelConfig(reuse="checkpoints", checkpoints=rule)

    return change


@pytest.mark.parametrize(("dialect", "rule"), RULES)
async def test_without_events_hybrid_models_are_predicted_by_their_rule(
    gateway: Begin, engine: StartEngine, dialect: str, rule: str
) -> None:
    one = await engine(dialect, hybrid=rule, time_scale=0)
    running = await gateway(one, policy="cache_aware", change=hybrid(rule))
    block = one.options.block_size
    async with talking(running) as talk:
        told = await converse(talk, Random(5), sessions=6, turns=6, shared=203)
    for each in told:
        assert each.predicted <= each.cached + block, each
    assert sum(each.predicted for each in told) > 0.5 * sum(each.cached for each in told) > 0


@pytest.mark.parametrize(("dialect", "rule"), RULES)
async def test_without_events_a_session_that_only_grows_is_predicted_to_the_token(
    gateway: Begin, engine: StartEngine, dialect: str, rule: str
) -> None:
    one = await engine(dialect, hybrid=rule, time_scale=0)
    running = await gateway(one, policy="cache_aware", change=hybrid(rule))
    draws, told = Random(6), list[Told]()
    async with talking(running) as talk:
        prompt = words(draws, 213)
        for _ in range(12):
            answer = await talk.ask(prompt, "s", draws.randrange(2, 60))
            told.append(answer)
            prompt = prompt + answer.reply + words(draws, draws.randrange(3, 90))
    assert wrong(told[1:]) == []
    assert all(each.cached for each in told[1:])


@pytest.mark.parametrize(("dialect", "rule"), RULES)
async def test_without_events_a_branch_of_a_hybrid_session_is_not_believed_in(
    gateway: Begin, engine: StartEngine, dialect: str, rule: str
) -> None:
    one = await engine(dialect, hybrid=rule, time_scale=0)
    running = await gateway(one, policy="cache_aware", change=hybrid(rule))
    draws = Random(7)
    async with talking(running) as talk:
        long = words(draws, 600)
        await talk.ask(long, "long", 1)
        branch = await talk.ask(long[:420] + words(draws, 100), "branch", 1)
    assert branch.predicted <= branch.cached
    assert branch.cached == (384 if rule == "every:64" else 0)
    assert branch.predicted == branch.cached


# -- caches smaller than assumed --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_fleet_with_a_quarter_of_the_assumed_caches_is_soon_predicted_well(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine(kv_tokens=8192, time_scale=0) for _ in range(2)]
    running = await gateway(*[WorkerConfig(each.url, kv_tokens=32_768) for each in engines], policy="cache_aware")
    draws = Random(8)
    prompts = [words(draws, 300) for _ in range(80)]
    errors, seen = [], []
    async with talking(running) as talk:
        for _ in range(2500):
            at = min(int(draws.expovariate(1 / 18)), len(prompts) - 1)
            told = await talk.ask(prompts[at], f"s{at}", 1)
            errors.append(abs(told.cached - told.predicted) / told.prompt)
            seen.append(told.cached > 0)
    late = errors[2000:]
    assert 0.2 < sum(seen[2000:]) / 500 < 0.98, "some are found and some are not"
    assert median(late) < 0.05
    assert median(errors[1500:2000]) < 0.05
    assert sum(late) / len(late) < 0.2


# -- bursts -----------------------------------------------------------------------------------------------------------


async def test_of_a_burst_with_a_start_that_nobody_has_no_engine_computes_it_twice(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine(events=True, hash_seed=at, time_scale=0.2, rates=Rates()) for at in range(4)]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    draws = Random(9)
    start = words(draws, 4000)

    async def one(at: int) -> Any:
        body = {"model": "sim", "prompt": start + words(draws, 40), "max_tokens": 2}
        return await once(running.port, request(body, f"X-Session-Id: b{at}", path=COMPLETIONS))

    answers = await asyncio.gather(*[one(at) for at in range(16)])
    assert [answer.status for answer in answers] == [200] * 16
    computed = sum(each.stats()["computed_tokens"] for each in engines)
    assert computed <= 4 * 4000 + 16 * 60, "no engine computes the start twice"
    assert all(each.stats()["computed_tokens"] <= 4000 + 16 * 60 for each in engines)


async def test_bursts_with_different_starts_use_the_whole_fleet(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(events=True, hash_seed=at, time_scale=0.2) for at in range(4)]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    draws = Random(10)
    starts = [words(draws, 4000) for _ in range(4)]

    async def one(at: int) -> Any:
        body = {"model": "sim", "prompt": starts[at % 4] + words(draws, 40), "max_tokens": 2}
        return await once(running.port, request(body, f"X-Session-Id: b{at}", path=COMPLETIONS))

    answers = await asyncio.gather(*[one(at) for at in range(16)])
    assert [answer.status for answer in answers] == [200] * 16
    assert all(each.stats()["requests"] > 0 for each in engines)
    await until(lambda: not running.gateway.exchanges)
