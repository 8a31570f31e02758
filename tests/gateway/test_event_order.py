"""The order in which KV events come, or do not come: what may be believed when."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from gateway.config import EventsConfig, WorkerConfig
from tests.gateway import test_usage_injection as usage
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import until
from tests.gateway.test_events import Cable, converse, exact, rungs, served_before, talking, words, wrong


async def test_all_is_told_when_the_last_batch_of_a_replay_was(gateway: Begin, engine: StartEngine) -> None:
    one = await engine("vllm", events=True, time_scale=0, kv_tokens=65536)
    await served_before(one, Random(7), 150)
    running = await gateway(one, policy="cache_aware")
    (listener,) = running.subscriptions.listeners.values()
    trust = running.index.of(listener.target.id)
    async with asyncio.timeout(10):
        while not trust.whole:
            await asyncio.sleep(0)
    assert listener.feed.last == 149


async def test_a_connection_that_comes_back_with_nothing_missed_is_believed_at_once(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine(events=True, time_scale=0)
    cable = Cable(one)
    await cable.plug()
    events = EventsConfig(endpoint=f"tcp://127.0.0.1:{cable.port}", replay=one.replay_endpoints[0])
    running = await gateway(WorkerConfig(one.url, events=events), policy="cache_aware")
    async with talking(running, one) as talk:
        await exact(running)
        await talk.ask(words(Random(1), 300), "s", 1)
        cable.cut()
        await until(lambda: rungs(running) == [("predicted", "disconnected")])
        await cable.plug()
        await until(lambda: rungs(running)[0][0] == "exact")
    cable.cut()


async def test_a_first_batch_that_is_lost_for_good_is_a_gap(gateway: Begin, engine: StartEngine) -> None:
    one = await engine(events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    one.events.drop(1, replayable=False)
    draws = Random(2)
    async with talking(running, one) as talk:
        await talk.ask(words(draws, 200), "a", 1, settle=False)
        await until(lambda: not one.core.busy)
        await talk.ask(words(draws, 200), "b", 1)
        await until(lambda: rungs(running) == [("predicted", "gap")])


async def test_sessions_from_before_a_gap_are_still_believed_where_they_went(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine(events=True, time_scale=0, events_replay=False)
    running = await gateway(one, policy="cache_aware")
    (listener,) = running.subscriptions.listeners.values()
    await until(lambda: listener.connected)
    # A publisher does not say when a subscription is in force.
    await asyncio.sleep(0.3)
    draws = Random(3)
    old = words(draws, 300)
    async with talking(running, one) as talk:
        await talk.ask(old, "old", 1)
        one.events.drop(1, replayable=False)
        await talk.ask(words(draws, 300), "lost", 1, settle=False)
        await until(lambda: not one.core.busy)
        await converse(talk, draws, sessions=4, turns=6)
        assert rungs(running) == [("exact", "reports_agree")]
        told = await talk.ask([*old, 1], "old", 1)
        assert told.predicted == told.cached == 288


@pytest.mark.parametrize(
    ("dialect", "options"), [("vllm", {"offload_events": "placeholder"}), ("sglang", {"block_size": 16})]
)
async def test_blocks_that_are_told_as_gone_before_they_are_told_as_stored_below_are_not_lost(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=2048, host_tokens=65536, **options)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(23)
    prompts = [words(draws, 400) for _ in range(20)]
    async with talking(running, one) as talk:
        told = [await talk.ask(prompt, f"s{at}", 1) for at, prompt in enumerate(prompts)]
        told += [await talk.ask([*prompt, 1, 2], f"s{at}", 1) for at, prompt in enumerate(prompts)]
    assert all(each.cached >= 384 for each in told[20:])
    assert wrong(told) == []


async def test_a_usage_event_written_with_spaces_is_taken_out_too(gateway: Begin, scripted: StartScripted) -> None:
    written = usage.USAGE.replace(b'":', b'": ').replace(b',"', b', "')
    worker = await usage.taking(scripted, usage.writes(*usage.SAID, written, usage.DONE))
    running = await gateway(usage.counting(worker.url), policy="cache_aware")
    got = await usage.through(running, json.dumps(usage.asked()).encode())
    assert b"prompt_tokens" not in got
