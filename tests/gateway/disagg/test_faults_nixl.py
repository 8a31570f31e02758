"""One half of a pair fails: another pair answers, the guilty half alone is blamed, nothing stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config
from tests.gateway.disagg.rig import FIRST_BYTE, StartRig, name, story
from tests.gateway.talk import until

BEFORE = ["error500", "reset", "garbage", "half_close", "lost_answer", "refuse", "stall_before"]
WHOLE = ("lost_answer", True)
"""A stream is not lost as a whole."""
KINDS = {
    "error500": "servererror",
    "reset": "reset",
    "garbage": "malformed",
    "half_close": "reset",
    "lost_answer": "reset",
    "refuse": "refused",
    "stall_before": "stalled",
}


def impatient(config: Config) -> None:
    config.timeouts.first_byte = FIRST_BYTE


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", BEFORE)
async def test_a_prefill_engine_that_fails(rig: StartRig, kind: Any, stream: bool) -> None:
    r = await rig(2, 2, change=impatient)
    bad, good = r.prefills
    bad.faults.add(kind, count=None)
    for number in range(3):
        await r.check(story(number, stream=stream))
    faults = await r.faults()
    assert {target for target, _ in faults} == {name(bad)}, faults
    assert KINDS[kind] in {found for _, found in faults}, faults
    assert good.stats()["finished"] == 3
    assert sum(each.stats()["computed_tokens"] for each in r.decodes) == 0
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize(
    ("kind", "stream"), [(kind, stream) for kind in BEFORE for stream in (True, False) if (kind, stream) != WHOLE]
)
async def test_a_decode_engine_that_fails(rig: StartRig, kind: Any, stream: bool) -> None:
    r = await rig(2, 2, change=impatient)
    bad, good = r.decodes
    bad.faults.add(kind, count=None)
    for number in range(2):
        await r.check(story(number, stream=stream))
    faults = await r.faults()
    assert {target for target, _ in faults} <= {name(bad)}, faults
    if kind not in ("error500", "stall_before"):
        # Whether that was the handing over, nobody can tell from one.
        assert KINDS[kind] in {found for _, found in faults}, faults
    if kind == "refuse":
        assert sum(each.stats()["finished"] for each in r.prefills) == 2, "what nobody saw is not computed again"
    assert good.stats()["finished"] == 2
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_one_that_is_full_is_no_fault(rig: StartRig, side: str, stream: bool) -> None:
    r = await rig(2, 2)
    bad = (r.prefills if side == "prefill" else r.decodes)[0]
    bad.faults.add("queue_full", count=None)
    for number in range(3):
        await r.check(story(number, stream=stream))
    assert await r.faults() == {}
    full = {labels["target"] for labels, _ in await r.samples("warmroute_backpressure_total")}
    assert full == {name(bad)}
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prefill forgets", "prefill fails", "decode fails"])
async def test_kv_that_does_not_arrive(rig: StartRig, where: str, stream: bool) -> None:
    r = await rig(2, 2)
    bad = r.d if where == "decode fails" else r.p
    bad.faults.add("forget" if where == "prefill forgets" else "transfer_fail", count=1)
    for number in range(2):
        await r.check(story(number, stream=stream))
    assert await r.faults() == {}, "from one failure nobody can tell whose it was"
    failures = [(labels["role"], labels["stage"]) for labels, _ in await r.samples("warmroute_pd_leg_failures_total")]
    assert failures == [("unknown", "transfer")]
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lease_that_ended_at_once_is_not_used(rig: StartRig, stream: bool) -> None:
    """With one pair: the decode engine does it all by itself."""
    r = await rig(1, 1)
    r.p.faults.add("forget", count=None)
    for number in range(2):
        await r.check(story(number, stream=stream))
    r.p.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_engine_that_dies_while_it_computes(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2, time_scale=0.5)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: any(each.stats()["running"] for each in r.prefills))
    dead = next(each for each in r.prefills if each.stats()["running"])
    await dead.kill()
    await asked
    faults = await r.faults()
    assert {target for target, _ in faults} == {name(dead)}, faults
    await r.nothing_left(engines=[each for each in r.engines if each is not dead])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_dies_while_the_prompt_is_computed(rig: StartRig, stream: bool) -> None:
    """It was not asked yet: another one fetches what was computed once."""
    r = await rig(1, 2, time_scale=0.5)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: r.p.stats()["running"])
    target = next(iter(r.running.gateway.exchanges)).target
    assert target is not None
    dead = next(each for each in r.decodes if name(each) == target.name)
    await dead.kill()
    await asked
    assert r.p.stats()["finished"] == 1
    assert {found for found, _ in await r.faults()} <= {name(dead)}
    await r.nothing_left(engines=[each for each in r.engines if each is not dead])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_engine_that_dies_while_it_fetches(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2)
    for each in r.decodes:
        each.faults.add("transfer_stall", count=1)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: any(each.stats()["disaggregation"]["receiving"] for each in r.decodes))
    dead = next(each for each in r.decodes if each.stats()["disaggregation"]["receiving"])
    for each in r.decodes:
        each.faults.clear()
    await dead.kill()
    await asked
    assert {found for found, _ in await r.faults()} == {name(dead)}
    await r.nothing_left(engines=[each for each in r.engines if each is not dead])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_engine_that_dies_while_it_gives(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2)
    for each in r.prefills:
        each.faults.add("transfer_stall", count=1)
    asked = asyncio.ensure_future(r.check(story("x", stream=stream)))
    await until(lambda: any(each.stats()["disaggregation"]["receiving"] for each in r.decodes))
    dead = next(each for each in r.prefills if each.stats()["finished"])
    for each in r.prefills:
        each.faults.clear()
    await dead.kill()
    await asked
    assert {found for found, _ in await r.faults()} <= {name(dead)}
    await r.nothing_left(engines=[each for each in r.engines if each is not dead])


async def test_a_decode_engine_that_dies_in_the_middle_of_an_answer(rig: StartRig) -> None:
    """The client has a part already: it is told, in its dialect, and the other half is not blamed."""
    r = await rig(2, 2)
    for each in r.decodes:
        each.faults.add("reset", after_events=3)
    answer = await r.ask(story("x", stream=True, max_tokens=200, ignore_eos=True))
    assert answer.status == 200
    assert answer.whole
    assert b'"error"' in answer.body
    for each in r.decodes:
        each.faults.clear()
    blamed = await r.blamed()
    assert len(blamed) == 1
    assert blamed <= {name(each) for each in r.decodes}
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_attempts_are_bounded(rig: StartRig, stream: bool) -> None:
    def two(config: Config) -> None:
        config.retries.attempts = 2

    r = await rig(4, 2, change=two)
    for each in r.prefills:
        each.faults.add("error500", count=None)
    answer = await r.ask(story("x", stream=stream))
    assert answer.status == 500
    assert sum(value for _, value in await r.samples("warmroute_worker_faults_total")) == 2
    for each in r.prefills:
        each.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
async def test_engines_that_restart_serve_again(rig: StartRig, stream: bool) -> None:
    def lively(config: Config) -> None:
        config.probes.health = 0.1

    r = await rig(1, 1, change=lively)
    await r.check(story("before", stream=stream))
    for each in (r.p, r.d):
        before = each.engine_id
        await each.restart(0.05)
        assert each.engine_id != before
        for number in range(3):
            await r.check(story(f"{number} after", stream=stream))
        await until(lambda: all(w.state == "ready" for w in r.running.fleet.workers.values()))
    served = r.d.stats()["transferred_tokens"]
    await r.check(story("at last", stream=stream))
    assert r.d.stats()["transferred_tokens"] > served
    await r.nothing_left()
