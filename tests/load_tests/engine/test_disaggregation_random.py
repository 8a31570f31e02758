"""Two hundred random requests with random faults, clients that leave and engines that restart: nothing is left behind,
and whatever is answered with 200 is what one engine alone would say."""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from load_tests.engine.faults import Kind
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.pairs import CHAT, PREFILL, STORY, chat, nothing_left, pair, text, told, user

FAULTS: tuple[Kind, ...] = (
    "transfer_stall",
    "transfer_fail",
    "notify_lost",
    "forget",
    "lost_answer",
    "out_of_memory",
    "queue_full",
    "error500",
    "reset",
    "stall_before",
)
REQUESTS = 200
ROOMS = count(1)


def order(random: Random, engine: Engine) -> None:
    kind = random.choice(FAULTS)
    seconds = random.choice((0.0, 0.02, 0.1)) if "stall" in kind else None
    engine.faults.add(kind, seconds=seconds)


async def nixl(http: aiohttp.ClientSession, p: Engine, d: Engine, body: dict[str, Any]) -> str | None:
    """The text, None if one of the two did not do its part."""
    first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL}
    async with http.post(p.url + CHAT, json=first) as answer:
        if answer.status != 200:
            return None
        params = (await answer.json())["kv_transfer_params"]
    async with http.post(d.url + CHAT, json={**body, "kv_transfer_params": params}) as answer:
        return text(await answer.json()) if answer.status == 200 else None


async def rooms(http: aiohttp.ClientSession, p: Engine, d: Engine, body: dict[str, Any]) -> str | None:
    """Likewise; when one side fails the other is left at once, as a gateway does it."""
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": p.side_port, "bootstrap_room": next(ROOMS)}

    async def half(engine: Engine) -> dict[str, Any]:
        async with http.post(engine.url + CHAT, json={**body, **where}) as answer:
            answer.raise_for_status()
            return dict(await answer.json())

    both = [asyncio.ensure_future(half(engine)) for engine in (p, d)]
    try:
        return text((await asyncio.gather(*both))[1])
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def mooncake(http: aiohttp.ClientSession, p: Engine, d: Engine, body: dict[str, Any]) -> str | None:
    """Likewise, under a transfer's id."""
    name, base = f"xfer-{next(ROOMS)}", f"http://127.0.0.1:{p.side_port}"
    ours = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    theirs = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name}
    theirs |= {"remote_bootstrap_addr": base, "remote_engine_id": p.engine_id}

    async def half(engine: Engine, params: dict[str, Any], **fields: Any) -> dict[str, Any]:
        async with http.post(engine.url + CHAT, json={**body, "kv_transfer_params": params, **fields}) as answer:
            answer.raise_for_status()
            return dict(await answer.json())

    both = [asyncio.ensure_future(half(p, ours, max_tokens=1)), asyncio.ensure_future(half(d, theirs))]
    try:
        return text((await asyncio.gather(*both))[1])
    finally:
        for one in both:
            one.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def transceiver(http: aiohttp.ClientSession, p: Engine, d: Engine, body: dict[str, Any]) -> str | None:
    """One after the other, with the first one's parameters."""
    first = {**body, "disaggregated_params": {"request_type": "context_only"}}
    async with http.post(p.url + CHAT, json=first) as answer:
        if answer.status != 200:
            return None
        params = (await answer.json())["choices"][0]["disaggregated_params"]
    params["request_type"] = "generation_only"
    async with http.post(d.url + CHAT, json={**body, "disaggregated_params": params}) as answer:
        return text(await answer.json()) if answer.status == 200 else None


SERVE = {"nixl": nixl, "bootstrap": rooms, "mooncake": mooncake, "transceiver": transceiver}
DIALECTS = {"bootstrap": "sglang", "transceiver": "tensorrt_llm"}


@pytest.mark.parametrize(
    ("connector", "seed"),
    [("nixl", 1), ("nixl", 2), ("bootstrap", 3), ("bootstrap", 4), ("mooncake", 5), ("transceiver", 6)],
)
async def test_nothing_is_left_behind(start: Start, http: aiohttp.ClientSession, connector: Any, seed: int) -> None:
    random = Random(seed)
    times = {"lease": 0.4, "bootstrap_timeout": 0.4, "waiting_timeout": 0.4, "heartbeat": 0.05, "time_scale": 0.005}
    dialect, serve = DIALECTS.get(connector, "vllm"), SERVE[connector]
    p, d = await pair(
        start,
        dialect,
        connector=connector,
        kv_tokens=8192,
        max_running=8,
        bidirectional=seed == 2,
        blocks_ttl=0.3,
        **times,
    )
    alone = await start(dialect, time_scale=0)
    prompts = [[user(f"{STORY[: 90 * random.randint(1, 12)]} {number}")] for number in range(12)]
    right = [text(await chat(http, alone, messages)) for messages in prompts]
    served = 0

    async def one(number: int) -> None:
        nonlocal served
        which = random.randrange(len(prompts))
        patience = random.choice((0.01, 0.05, 5.0, 5.0))
        try:
            async with asyncio.timeout(patience):
                answer = await serve(http, p, d, {"model": "sim", "messages": prompts[which]})
        except (aiohttp.ClientError, TimeoutError):
            return
        if answer is not None:
            assert answer == right[which]
            served += 1

    running: set[asyncio.Task[None]] = set()
    for number in range(REQUESTS):
        if random.random() < 0.2:
            order(random, random.choice((p, d)))
        if number in (70, 140):
            await (p if number == 70 else d).restart(0.02)
        running.add(asyncio.ensure_future(one(number)))
        if len(running) >= 8:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    await asyncio.gather(*running)
    for engine in (p, d):
        engine.faults.clear()
    await nothing_left(p, d, seconds=15)
    assert served > REQUESTS // 4
    assert told(d)["transfers_in"]["count"] > REQUESTS // 8
    messages = prompts[0]
    assert await serve(http, p, d, {"model": "sim", "messages": messages}) == right[0]
    await nothing_left(p, d)
