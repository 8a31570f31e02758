"""Data-parallel ranks: one port, several caches, and what an engine says of each."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import cached, post, until
from tests.load_tests.engine.test_events import complete, launch
from tests.load_tests.engine.wiretap import happened

PROMPT = list(range(1, 34))


async def on_rank(http: aiohttp.ClientSession, engine: Engine, rank: object, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    return await post(http, engine, "/v1/completions", body, headers={"X-Data-Parallel-Rank": str(rank)})


def requests(engine: Engine) -> list[int]:
    return [rank["requests"] for rank in engine.stats()["ranks"]]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_each_rank_has_a_cache_of_its_own(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect, ranks=2, block_size=16)
    assert cached(await on_rank(http, engine, 1)) == 0
    assert cached(await on_rank(http, engine, 0)) == 0
    assert cached(await on_rank(http, engine, 1)) == 32
    assert requests(engine) == [1, 2]
    stats = engine.stats()
    assert stats["prompt_tokens"] == sum(rank["prompt_tokens"] for rank in stats["ranks"]) == 3 * len(PROMPT)


async def test_sglang_takes_the_rank_from_the_body_and_the_header_before_it(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start("sglang", ranks=3)
    await complete(http, engine, PROMPT, routed_dp_rank=2)
    await complete(http, engine, PROMPT, data_parallel_rank=1)
    await on_rank(http, engine, 0, routed_dp_rank=2)
    assert requests(engine) == [1, 1, 1]


@pytest.mark.parametrize(("dialect", "rank", "status"), [
    ("vllm", "2", 400), ("vllm", "-1", 400), ("vllm", "x", 200), ("sglang", "2", 400), ("sglang", "x", 400),
])  # fmt: skip
async def test_a_rank_that_is_none(
    start: Start, http: aiohttp.ClientSession, dialect: str, rank: str, status: int
) -> None:
    engine = await start(dialect, ranks=2)
    body = {"prompt": PROMPT, "max_tokens": 1}
    async with http.post(engine.url + "/v1/completions", json=body, headers={"X-Data-Parallel-Rank": rank}) as answer:
        assert answer.status == status


async def test_without_a_rank_the_engine_spreads_and_knows_no_cache(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect, ranks=4)
        for _ in range(8):
            await complete(http, engine, PROMPT)
        assert requests(engine) == [2, 2, 2, 2]


async def test_vllm_takes_the_least_loaded_rank(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("vllm", ranks=2, time_scale=0.5)
    long = asyncio.ensure_future(on_rank(http, engine, 0, max_tokens=4000, ignore_eos=True))
    await until(lambda: requests(engine) == [1, 0])
    for _ in range(3):
        await complete(http, engine, PROMPT)
    assert requests(engine) == [1, 3]
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_each_rank_publishes_on_the_port_after(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await launch(start, dialect, ranks=3)
    for endpoints in (engine.events_endpoints, engine.replay_endpoints):
        ports = [int(endpoint.rpartition(":")[2]) for endpoint in endpoints]
        assert ports == [ports[0], ports[0] + 1, ports[0] + 2]
    await on_rank(http, engine, 2)
    assert [len(await happened(engine, rank)) for rank in range(3)] == [0, 0, 1]


async def test_vllm_tells_of_each_rank(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, ranks=2)
    await on_rank(http, engine, 1)
    async with http.get(engine.url + "/kv_event_sources") as answer:
        told = await answer.json()
    assert {key: source["endpoint"] for key, source in told.items()} == dict(
        zip("01", engine.events_endpoints, strict=True)
    )
    async with http.get(engine.url + "/metrics") as answer:
        page = await answer.text()
    found = re.findall(r'^vllm:prompt_tokens_total\{engine="(\d)",model_name="sim"\} (\S+)$', page, re.M)
    assert found == [("0", "0.0"), ("1", "33.0")]
    assert page.count("# TYPE vllm:prompt_tokens_total counter") == 1


async def test_sglang_tells_of_each_rank(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", ranks=2)
    await on_rank(http, engine, 1)
    async with http.get(engine.url + "/server_info") as answer:
        info = await answer.json()
    assert info["dp_size"] == info["kv_events"]["dp_size"] == 2
    async with http.get(engine.url + "/v1/loads") as answer:
        rows = (await answer.json())["loads"]
    assert [(row["dp_rank"], row["total_prefill_uncached_tokens"]) for row in rows] == [(0, 0), (1, 33)]
    async with http.get(engine.url + "/v1/loads?dp_rank=1") as answer:
        assert [row["dp_rank"] for row in (await answer.json())["loads"]] == [1]
    async with http.get(engine.url + "/metrics") as answer:
        page = await answer.text()
    assert re.findall(r'^sglang:num_running_reqs\{dp_rank="(\d)"', page, re.M) == ["0", "1"]
    assert len(re.findall(r"^sglang:prompt_tokens_total\{", page, re.M)) == 1
