"""Host memory and disk below the device: what goes there, what comes back, and what is told of it."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings, strategies as st

from load_tests.engine import Engine
from load_tests.engine.blocks import BlockCache
from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.hashes import sglang_chain
from load_tests.engine.physics import Rates
from load_tests.engine.radix import RadixCache
from load_tests.engine.scheduler import Scheduler, Work
from load_tests.engine.tiers import Sources, Tiers
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import cached, events as streamed, post
from tests.load_tests.engine.test_events import complete, launch
from tests.load_tests.engine.wiretap import happened

A, B, C = ([name] * 17 for name in (1, 2, 3))


def tiered(radix: bool, device: int, host: int, disk: int) -> KVCache:
    """Room in blocks of 4 tokens."""
    cache = RadixCache(device, 4, chain=sglang_chain(0)) if radix else BlockCache(device, 4)
    cache.tiers = Tiers(host, disk, None)
    return cache


def run(cache: KVCache, tokens: list[int]) -> Sources:
    holding = Holding()
    assert cache.open(holding, tokens, cache.match(holding, tokens), len(tokens))
    cache.commit(holding, tokens, len(tokens))
    sources = holding.sources
    cache.close(holding, tokens, len(tokens))
    return sources


@pytest.mark.parametrize("radix", [False, True])
def test_what_leaves_the_device_is_found_below_and_restored(radix: bool) -> None:
    cache = tiered(radix, 5, 4, 12)
    assert cache.tiers is not None
    assert [run(cache, each) for each in (A, B, C)] == [Sources()] * 3
    assert cache.tiers.used == (4, 4)
    assert run(cache, C) == Sources(device=16)
    assert run(cache, B) == Sources(host=16)
    assert run(cache, A) == Sources(disk=16)
    assert run(cache, A) == Sources(device=16)


@pytest.mark.parametrize("radix", [False, True])
def test_without_a_disk_the_oldest_is_lost(radix: bool) -> None:
    cache = tiered(radix, 5, 4, 0)
    for each in (A, B, C):
        run(cache, each)
    assert cache.match(Holding(), A) == 0
    assert cache.match(Holding(), B) == 16


@settings(max_examples=80, deadline=None)
@given(
    radix=st.booleans(),
    prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=30), min_size=1, max_size=20),
)
def test_with_room_below_nothing_is_ever_forgotten(radix: bool, prompts: list[list[int]]) -> None:
    small, large = tiered(radix, 9, 10_000, 0), tiered(radix, 10_000, 0, 0)
    for tokens in prompts:
        assert sum(run(small, tokens)) == sum(run(large, tokens))
        assert small.used_blocks == 0
        assert small.used_blocks + small.evictable_blocks <= small.num_blocks


def test_restoring_takes_time() -> None:
    rates = Rates(host=1.0, disk=100.0)
    scheduler = Scheduler(tiered(False, 5, 4, 12), rates)
    seconds = []
    for each in (A, B, C, B, A):
        scheduler.submit(Work(each, [1]))
        seconds.append(scheduler.step(0.0)[1])
    assert [round(each) for each in seconds] == [0, 0, 0, 16, 1600]
    assert (scheduler.totals.host_tokens, scheduler.totals.disk_tokens, scheduler.totals.cached_tokens) == (16, 16, 32)


async def cycle(start: Start, http: aiohttp.ClientSession, dialect: str, **options: Any) -> Engine:
    """An engine with A on disk, B in host memory and C on the device."""
    room = {"kv_tokens": 20, "context_length": 20, "host_tokens": 16, "disk_tokens": 48}
    engine = await launch(start, dialect, **room, **options)
    for each in (A, B, C):
        await complete(http, engine, each)
    return engine


def told(events: list[Any]) -> list[tuple[str, str]]:
    """(kind, medium) of the events, one for each hash."""
    return [(event["type"], event["medium"]) for event in events for _ in event["block_hashes"]]


@pytest.mark.parametrize(("dialect", "host", "disk"), [("vllm", "CPU", "STORAGE"), ("sglang", "CPU_PINNED", "DISK")])
async def test_each_tier_has_events_of_its_own(
    start: Start, http: aiohttp.ClientSession, dialect: str, host: str, disk: str
) -> None:
    engine = await cycle(start, http, dialect)
    events = told(await happened(engine))
    for medium, stored, removed in (("GPU", 12, 8), (host, 8, 4), (disk, 4, 0)):
        assert events.count(("BlockStored", medium)) == stored
        assert events.count(("BlockRemoved", medium)) == removed
    assert cached(await complete(http, engine, B)) == 16
    assert told(await happened(engine))[len(events) :].count(("BlockStored", "GPU")) == 4
    stats = engine.stats()
    assert (stats["host_blocks"], stats["disk_blocks"], stats["kv_blocks_leaked"]) == (4, 8, 0)


async def test_vllm_offloads_by_placeholder_unless_told_to_describe(start: Start, http: aiohttp.ClientSession) -> None:
    for form in ("placeholder", "full"):
        engine = await cycle(start, http, "vllm", offload_events=form)
        events = await happened(engine)
        device, below = (
            [event for event in events if event["type"] == "BlockStored" and (event["medium"] == "GPU") == where]
            for where in (True, False)
        )
        known = {each for event in device for each in event["block_hashes"]}
        assert {each for event in below for each in event["block_hashes"]} <= known
        if form == "placeholder":
            for event in below:
                assert (event["token_ids"], event["block_size"], event["parent_block_hash"]) == ([], 0, None)
        else:
            assert {len(event["token_ids"]) for event in below} == {4}
            assert {event["group_idx"] for event in below} == {0}
            first = device[0]
            last = next(event for event in below if event["block_hashes"] == first["block_hashes"][-1:])
            assert last["parent_block_hash"] == first["block_hashes"][-2]


async def test_vllm_counts_hits_by_tier(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await cycle(start, http, "vllm")
    for each in (C, B, A):
        assert cached(await complete(http, engine, each)) == 16
    async with http.get(engine.url + "/metrics") as answer:
        page = await answer.text()
    found = dict(re.findall(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)"\} (\S+)$', page, re.M))
    assert (found["device"], found["host"], found["disk"], found["p2p"]) == ("16.0", "16.0", "16.0", "0.0")
    assert re.search(r"^vllm:external_prefix_cache_hits_total\{.*\} 32.0$", page, re.M)


async def test_sglang_tells_where_a_hit_was_when_asked(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await cycle(start, http, "sglang")
    ask = {"return_cached_tokens_details": True}
    assert "sglext" not in await complete(http, engine, C)
    found = await complete(http, engine, B, **ask)
    assert found["sglext"]["cached_tokens_details"] == {"device": 0, "host": 16, "storage": 0}
    chunks = await streamed(http, engine, "/v1/completions", {"prompt": A, "max_tokens": 1, **ask})
    assert chunks[-2]["sglext"]["cached_tokens_details"] == {"device": 0, "host": 0, "storage": 16}
    native = await post(http, engine, "/generate", {"input_ids": A, "sampling_params": {"max_new_tokens": 1}})
    assert native["meta_info"]["cached_tokens_details"] == {"device": 16, "host": 0, "storage": 0}


async def test_a_reset_leaves_what_is_below_unless_told(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await cycle(start, http, "vllm")
    for query, hit in (("", 16), ("?reset_external=true", 0)):
        async with http.post(engine.url + "/reset_prefix_cache" + query) as answer:
            assert (await answer.json())["success"]
        assert cached(await complete(http, engine, B)) == hit
