"""The simulated fleet against an independent witness: the HTTP engine, asked the same over a socket."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import aiohttp
import pytest

from load_tests.engine import Engine, EngineOptions
from load_tests.simulate.engine import Options
from load_tests.simulate.fleet import Simulation
from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from policies.base import load

BLOCK = 16
KV_BLOCKS = 96


def prompts(seed: int, count: int) -> Iterator[list[int]]:
    """Names of blocks: a few starts, each gone on from in a few ways, so that little KV has to forget some."""
    random = Random(seed)
    for _ in range(count):
        start = random.randrange(4)
        yield [
            start * 1000 + random.randrange(1 + depth // 6) * 100 + depth if depth % 6 == 0 else start * 1000 + depth
            for depth in range(random.randint(2, 40))
        ]


def token_ids(names: list[int], rest: int) -> list[int]:
    return [1000 + name * BLOCK + place for name in names for place in range(BLOCK)] + list(range(10, 10 + rest))


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_sequential_requests_find_the_same_to_the_token(seed: int) -> None:
    asked = [(names, Random(number).randrange(BLOCK)) for number, names in enumerate(prompts(seed, 80))]
    naming = Naming()
    chains = [
        Chain(10.0 * number, (Turn(naming.chained(names), len(names) * BLOCK + rest, 1),))
        for number, (names, rest) in enumerate(asked)
    ]
    options = Options(kv_tokens=KV_BLOCKS * BLOCK, block=BLOCK)
    outcome = Simulation(Traffic("sequential", BLOCK, chains), load("round_robin"), 1, options).run()

    engine = await Engine.start(EngineOptions(kv_tokens=KV_BLOCKS * BLOCK, time_scale=0.0))
    found = []
    try:
        async with aiohttp.ClientSession() as http:
            for names, rest in asked:
                body = {"model": "sim", "prompt": token_ids(names, rest), "max_tokens": 1}
                async with http.post(engine.url + "/v1/completions", json=body) as answer:
                    usage = (await answer.json())["usage"]
                    assert usage["prompt_tokens"] == len(names) * BLOCK + rest
                    found.append((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        stats = engine.stats()
    finally:
        await engine.kill()
    assert [each.cached for each in outcome.asked] == found
    totals = outcome.engines[0].totals
    assert (totals.prompt, totals.cached, totals.computed) == (
        stats["prompt_tokens"],
        stats["cached_tokens"],
        stats["computed_tokens"],
    )
    assert 0 < totals.cached < totals.prompt
    assert outcome.engines[0].cache.evicted > 0
