"""Numbers add up: what the gateway counts is what the engines count themselves, to the token, whatever became of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.run import Running
from load_tests.client import Client, Results
from load_tests.engine import Engine
from load_tests.workloads.agents import agent_sessions
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import StartRig, story
from tests.gateway.talk import Raw, long_chat, once, request, settled, until

Counted = dict[tuple[str, str], float]


async def counted(running: Running) -> Counted:
    """(name, target or worker) -> sum over all other labels."""
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"http://127.0.0.1:{running.admin.port}/metrics")).text
    found: Counted = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            at = sample.name, sample.labels.get("target") or sample.labels.get("worker") or ""
            found[at] = found.get(at, 0.0) + sample.value
    return found


def at(engine: Engine) -> str:
    return f"127.0.0.1:{engine.port}"


async def leave(running: Running, number: int) -> None:
    """A client that goes in the middle of a long stream."""
    async with await Raw.connect(running.port) as client:
        body = long_chat(stream=True)
        body["messages"] = [{"role": "user", "content": f"number {number} " + "tells a long story " * 100}]
        await client.send(request(body))
        await client.head()
        await client.reader.readuntil(b"data: ")


async def quiet(running: Running, engines: Sequence[Engine], aborts: int) -> None:
    await settled(running)
    await until(lambda: sum(each.stats()["aborts"] for each in engines) == aborts)
    await until(lambda: not any(each.stats()["running"] or each.stats()["waiting"] for each in engines))


async def agree(running: Running, engines: Sequence[Engine]) -> None:
    """What answers told, less nothing, is what engines count less what was aborted; engines' own counts are theirs."""
    found = await counted(running)
    for each in engines:
        stats, target = each.stats(), at(each)
        for name, metric in (
            ("prompt", "prompt_tokens"),
            ("cached", "cached_tokens"),
            ("generated", "completion_tokens"),
        ):
            told = stats[f"{name}_tokens"] - stats[f"aborted_{name}_tokens"]
            assert found.get((f"warmroute_{metric}_total", target), 0.0) == told, (metric, target)
        assert (
            found[("warmroute_cache_reported_prompt_tokens_total", target)]
            == found[("warmroute_prompt_tokens_total", target)]
        )
    # The engines' own counts come with the next look.
    for _ in range(200):
        found = await counted(running)
        if all(
            found[(f"warmroute_engine_{metric}_total", at(each))] == each.stats()[name]
            for each in engines
            for metric, name in (
                ("prompt_tokens", "prompt_tokens"),
                ("cached_tokens", "cached_tokens"),
                ("aborts", "aborts"),
            )
        ):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("what engines count themselves is not what they export")


async def looked(running: Running, engines: Sequence[Engine]) -> None:
    """The gateway looked at what engines count, before anything was asked."""
    for _ in range(200):
        found = await counted(running)
        if all(("warmroute_engine_prompt_tokens_total", at(each)) in found for each in engines):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("engines' counts were not read")


async def test_answered_retried_and_aborted_requests_add_up_to_the_token(gateway: Begin, engine: StartEngine) -> None:
    engines = [
        await engine(dialect, kv_tokens=24_000, seed=seed) for seed, dialect in enumerate(("vllm", "sglang", "vllm"))
    ]

    def often(config) -> None:
        config.probes.load = 0.05
        config.retries.budget = 1.0

    running = await gateway(*engines, policy="cache_aware", change=often)
    await looked(running, engines)
    for each in engines:
        each.faults.add("error500", count=2)
    sessions = agent_sessions(sessions=10, turns=4, seed=5, think=0.2, spread=0.5)
    async with Client(f"http://127.0.0.1:{running.port}", "sim") as client:
        results, *_ = await asyncio.gather(
            client.run(sessions, Results()), *[leave(running, number) for number in range(5)]
        )
    assert results.errors == []
    await quiet(running, engines, 5)
    found = await counted(running)
    assert found[("warmroute_client_aborts_total", "")] == 5
    assert found[("warmroute_retries_total", "")] >= 1
    assert sum(each.stats()["cached_tokens"] for each in engines) > 0
    await agree(running, engines)


async def test_unstreamed_requests_and_streams_that_ask_for_no_usage_are_counted_too(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine(), await engine("sglang")]
    running = await gateway(*engines, policy="cache_aware", change=lambda config: setattr(config.probes, "load", 0.05))
    await looked(running, engines)
    for number in range(6):
        for stream in (False, True):
            answer = await once(running.port, request(story(number % 3, stream=stream)))
            assert answer.status == 200
            assert b'"usage":{' not in answer.body or not stream
    await quiet(running, engines, 0)
    await agree(running, engines)


async def test_pairs_add_up_prompts_where_they_were_computed(rig: StartRig) -> None:
    pair = await rig(2, 2)
    for number in range(8):
        # Round robin has no use for what a stream's client does not ask for.
        told = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 == 0 else {}
        assert (await once(pair.running.port, request(story(number % 3, **told)))).status == 200
    await settled(pair.running)
    found = await counted(pair.running)
    for each in pair.prefills:
        stats = each.stats()
        assert found[("warmroute_prompt_tokens_total", at(each))] == stats["prompt_tokens"]
        assert found[("warmroute_cached_tokens_total", at(each))] == stats["cached_tokens"]
    for each in pair.decodes:
        assert found[("warmroute_completion_tokens_total", at(each))] == each.stats()["generated_tokens"]
        assert found.get(("warmroute_prompt_tokens_total", at(each)), 0.0) == 0.0
    assert sum(each.stats()["cached_tokens"] for each in pair.prefills) > 0
