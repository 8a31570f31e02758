"""Whose fault it was, where two engines failed together: the one that fails with everybody, and no client's."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import Config, WorkerConfig
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.disagg.rig import FIRST_BYTE, StartRig, name, story
from tests.gateway.scripted import ok
from tests.gateway.talk import once, request, until


def impatient(config: Config) -> None:
    config.timeouts.first_byte = FIRST_BYTE


@pytest.mark.parametrize("stream", [True, False])
async def test_a_broken_decode_engine_is_found_out(rig: StartRig, stream: bool) -> None:
    r = await rig(1, 2)
    r.d.faults.add("error500", count=None)
    for number in range(24):
        await r.check(story(number, stream=stream))
    assert await r.blamed() == {name(r.d)}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_engine_whose_kv_never_arrives_is_found_out(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2)
    r.p.faults.add("forget", count=None)
    for number in range(24):
        await r.check(story(number, stream=stream))
    assert await r.blamed() == {name(r.p)}


@pytest.mark.parametrize("stream", [True, False])
async def test_success_clears_suspicion(rig: StartRig, stream: bool) -> None:
    """Else who fails once in a long while would be blamed for what another does."""
    r = await rig(1, 2)
    for number in range(6):
        r.p.faults.add("forget", count=1)
        await r.check(story(number, stream=stream))
        await r.check(story(f"{number} again", stream=stream))
        await r.check(story(f"{number} and again", stream=stream))
    assert not {name(each) for each in r.decodes} & {
        target for target, state in (await r.breakers()).items() if state != "closed"
    }
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_engine_that_never_gives_is_not_the_decode_engines_fault(rig: StartRig, stream: bool) -> None:
    r = await rig(1, 3, change=impatient)
    r.p.faults.add("transfer_stall", count=None)
    await r.ask(story("x", stream=stream))
    blamed = await r.blamed()
    r.p.faults.clear()
    assert not blamed & {name(each) for each in r.decodes}


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_a_decode_engine_that_stalls_is_blamed(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 1, "sglang", change=impatient)
    r.d.faults.add("stall_before", count=None)
    await r.ask(story("x", stream=stream))
    assert not await r.blamed() & {name(each) for each in r.prefills}
    r.d.faults.clear()


@pytest.mark.parametrize("stream", [True, False])
async def test_sglang_a_decode_engine_that_dies_while_it_waits_is_blamed(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2, "sglang", change=impatient)
    for each in r.decodes:
        each.faults.add("transfer_stall", count=1)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: any(each.stats()["disaggregation"]["receiving"] for each in r.decodes))
    dead = next(each for each in r.decodes if each.stats()["disaggregation"]["receiving"])
    for each in r.decodes:
        each.faults.clear()
    await dead.kill()
    await asked
    assert await r.blamed() == {name(dead)}


async def test_sglang_a_prefill_engine_that_fails_in_its_stream_is_no_success(rig: StartRig) -> None:
    r = await rig(1, 1, "sglang", change=impatient, bootstrap_timeout=0.2)
    r.d.faults.add("stall_before", count=None)
    await r.ask(story("x", stream=True))
    assert r.running.fleet.workers[name(r.p)].answered == 0
    r.d.faults.clear()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_with_a_wrong_key_harms_no_prefill_engine(
    gateway: Begin, scripted: StartScripted, stream: bool
) -> None:
    refusal = b'{"error":{"message":"bad key","type":"auth","param":null,"code":401}}'
    p, d = [await scripted(ok(refusal, status=b"401 Unauthorized")) for _ in range(2)]
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="nixl"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="nixl"),
    )
    answers = [await once(running.port, request(story("x", stream=stream))) for _ in range(6)]
    target = running.fleet.workers[f"127.0.0.1:{p.port}"].targets[0]
    assert target.breaker.state == "closed"
    assert [(answer.status, answer.body) for answer in answers] == [(401, refusal)] * 6
    assert len(p.seen) == 6


async def test_a_prefill_engine_without_bootstrap_is_not_the_end(rig: StartRig) -> None:
    r = await rig(2, 1, "sglang")
    r.running.fleet.workers[name(r.p)].facts.bootstrap_port = None
    for number in range(4):
        await r.check(story(number))


async def test_sglang_a_prefill_engine_that_is_full_says_so_in_its_stream(rig: StartRig) -> None:
    r = await rig(2, 2, "sglang", waiting_timeout=2.0)
    r.p.faults.add("queue_full", count=None)
    answer = await r.ask(story("x", stream=True))
    assert answer.status == 200
    assert await r.faults() == {}
