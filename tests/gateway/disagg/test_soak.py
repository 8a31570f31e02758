"""Three hundred requests through two pairs, with faults at every phase and clients that leave."""

from __future__ import annotations

import asyncio
import os
from random import Random
from typing import Any

import pytest

from gateway.config import Config
from load_tests.engine.faults import Kind
from tests.gateway.disagg.rig import Rig, StartRig, story, text_of
from tests.gateway.talk import Raw, request

FAULTS: tuple[Kind, ...] = (
    "transfer_stall",
    "transfer_fail",
    "notify_lost",
    "forget",
    "lost_answer",
    "out_of_memory",
    "queue_full",
    "error500",
    "error503",
    "reset",
    "half_close",
    "garbage",
    "stall_before",
    "stall_during",
    "refuse",
)
REQUESTS = int(os.environ.get("WARMROUTE_SOAK", "300"))
"""More of them, with another seed (``WARMROUTE_SEED``), are for a person to ask for."""
LIMIT = 14.0
"""Seconds: three attempts of two parts, each within two."""


def impatient(config: Config) -> None:
    config.timeouts.first_byte = config.timeouts.idle = 2.0
    config.probes.health = 0.2


async def one(r: Rig, random: Random, number: int, counted: dict[str, int]) -> None:
    body = story(number % 30, stream=random.random() < 0.5, max_tokens=random.choice((1, 8, 40)))
    lines = [f"X-Session-Id: s{number % 7}"] if random.random() < 0.5 else []
    patience = random.choice((0.01, 0.03, 0.1, LIMIT, LIMIT, LIMIT))
    right = await r.right(body)
    async with await Raw.connect(r.running.port) as client:
        try:
            async with asyncio.timeout(patience):
                answer = await client.ask(request(body, *lines))
        except TimeoutError:
            assert patience < LIMIT, "a client waited for too long"
            counted["left"] += 1
            return
    stream = bool(body.get("stream"))
    if answer.status != 200:
        assert answer.status in (429, 500, 502, 503, 504), (answer.status, answer.body)
        told = answer.json()
        assert told.get("error", told)["message"], told
        counted["refused"] += 1
        await asyncio.sleep(0.05)
    elif not answer.whole or (stream and b'"error"' in answer.body):
        counted["broke"] += 1
    else:
        assert text_of(answer, stream) == right
        counted["served"] += 1


@pytest.mark.parametrize(
    ("dialect", "policy"), [("vllm", "cache_aware"), ("vllm", "round_robin"), ("sglang", "cache_aware")]
)
async def test_nothing_is_left_behind(rig: StartRig, dialect: str, policy: str) -> None:
    await soak(rig, dialect, policy)


async def soak(rig: StartRig, dialect: str, policy: str) -> None:
    random = Random(f"{dialect} {policy} {os.environ.get('WARMROUTE_SEED', '')}")
    times = {"lease": 1.0, "bootstrap_timeout": 1.0, "waiting_timeout": 1.0, "time_scale": 0.02}
    r = await rig(2, 2, dialect, policy=policy, change=impatient, kv_tokens=32_768, **times)
    counted = {"left": 0, "refused": 0, "broke": 0, "served": 0}
    running: set[asyncio.Task[None]] = set()
    for number in range(REQUESTS):
        if random.random() < 0.15:
            kind = random.choice(FAULTS)
            seconds = random.choice((0.02, 0.3)) if "stall" in kind else 0.1 if kind == "refuse" else None
            after: Any = random.choice((0, 1, 3)) if kind in ("reset", "half_close", "garbage", "stall_during") else 0
            random.choice(r.engines).faults.add(kind, seconds=seconds, after_events=after)
        if number % 200 == 100:
            await random.choice(r.engines).restart(0.05)
        running.add(asyncio.ensure_future(one(r, random, number, counted)))
        if len(running) >= 8:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    await asyncio.gather(*running)
    for engine in r.engines:
        engine.faults.clear()
    await r.nothing_left()
    # Those that do not wait leave the sooner, the busier this machine is.
    assert counted["served"] > (REQUESTS - counted["left"]) // 3, counted
    assert counted["left"], counted
    assert not r.running.gateway.defects
