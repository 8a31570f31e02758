"""One half of a pair that meets in a room fails: another pair answers, nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config
from gateway.workers import State
from tests.gateway.disagg.rig import FIRST_BYTE, StartRig, name, story
from tests.gateway.talk import until

BEFORE = ["error500", "reset", "garbage", "half_close", "refuse", "stall_before"]


def impatient(config: Config) -> None:
    config.timeouts.first_byte = FIRST_BYTE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", BEFORE)
async def test_a_prefill_engine_that_fails(rig: StartRig, kind: Any, stream: bool) -> None:
    r = await rig(2, 2, "sglang", change=impatient)
    r.p.faults.add(kind, count=None)
    for number in range(2):
        await r.check(story(number, stream=stream))
    assert await r.blamed() == {name(r.p)}
    r.p.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", BEFORE[:-1])
async def test_a_decode_engine_that_fails(rig: StartRig, kind: Any, stream: bool) -> None:
    r = await rig(2, 2, "sglang", change=impatient)
    r.d.faults.add(kind, count=None)
    for number in range(2):
        await r.check(story(number, stream=stream))
    assert await r.blamed() == {name(r.d)}
    r.d.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize(("side", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
async def test_one_that_is_full_is_no_fault(rig: StartRig, side: str, stream: bool) -> None:
    r = await rig(2, 2, "sglang")
    bad = (r.prefills if side == "prefill" else r.decodes)[0]
    bad.faults.add("queue_full", count=None)
    for number in range(3):
        await r.check(story(number, stream=stream))
    assert await r.faults() == {}
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_without_memory_is_full(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2, "sglang")
    r.d.faults.add("out_of_memory", count=1)
    for number in range(2):
        await r.check(story(number, stream=stream))
    assert await r.faults() == {}
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_kv_that_does_not_arrive(rig: StartRig, side: str, stream: bool) -> None:
    r = await rig(2, 2, "sglang")
    bad = r.p if side == "prefill" else r.d
    bad.faults.add("transfer_fail", count=1)
    for number in range(2):
        await r.check(story(number, stream=stream))
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_one_that_dies_while_kv_goes_over(rig: StartRig, side: str, stream: bool) -> None:
    r = await rig(2, 2, "sglang", change=impatient)
    for each in r.decodes:
        each.faults.add("transfer_stall", count=1)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: any(each.stats()["disaggregation"]["receiving"] for each in r.decodes))
    for each in r.decodes:
        each.faults.clear()
    legs = next(iter(r.running.gateway.exchanges)).legs
    assert legs is not None
    named = (legs.prefill if side == "prefill" else legs.decode).name
    dead = next(each for each in r.engines if name(each) == named)
    await dead.kill()
    await asked
    assert await r.blamed() == {name(dead)}
    await r.nothing_left(engines=[each for each in r.engines if each is not dead])


async def test_without_a_stage_the_client_is_told_which(rig: StartRig) -> None:
    r = await rig(1, 1, "sglang")
    for engine, stage in ((r.p, "prefill"), (r.d, "decode")):
        worker = r.running.fleet.workers[name(engine)]
        r.running.fleet.set_state(worker, State.DOWN, "for a test")
        for stream in (True, False):
            answer = await r.ask(story("x", stream=stream))
            assert answer.status == 503
            assert stage in answer.json()["error"]["message"]
            assert int(answer.one("retry-after")) >= 1
        r.running.fleet.set_state(worker, State.READY, "again")
        await r.check(story("x"))
    await r.nothing_left()
