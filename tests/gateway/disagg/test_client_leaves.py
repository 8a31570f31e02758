"""A client leaves, in each phase of a request that two engines serve: both are told, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.disagg.rig import Rig, StartRig, story
from tests.gateway.talk import Raw, request, until

DIALECTS = ["vllm", "sglang"]


async def leave(r: Rig, body: dict[str, Any], when: Callable[[], Any]) -> None:
    """Ask, and go as soon as ``when``."""
    async with await Raw.connect(r.running.port) as client:
        await client.send(request(body))
        await until(when)
    await r.nothing_left()
    assert await r.faults() == {}
    assert set((await r.breakers()).values()) == {"closed"}


async def serves(r: Rig, stream: bool) -> None:
    for engine in r.engines:
        engine.faults.clear()
    await r.check(story("afterwards", stream=stream))
    await r.nothing_left()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_while_the_prompt_is_computed(rig: StartRig, dialect: str, stream: bool) -> None:
    r = await rig(dialect=dialect, time_scale=20)
    await leave(r, story("x", stream=stream), lambda: r.p.stats()["running"])
    assert r.p.stats()["finished"] == 0
    for engine in r.engines:
        await engine.stop()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_while_kv_goes_over(rig: StartRig, dialect: str, stream: bool, side: str) -> None:
    r = await rig(dialect=dialect)
    (r.p if side == "prefill" else r.d).faults.add("transfer_stall", count=None)
    await leave(r, story("x", stream=stream), lambda: r.d.stats()["disaggregation"]["receiving"])
    await serves(r, stream)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_event(rig: StartRig, dialect: str, stream: bool) -> None:
    r = await rig(dialect=dialect)
    r.d.faults.add("stall_before", count=None)
    await leave(
        r,
        story("x", stream=stream),
        lambda: next(iter(r.running.gateway.exchanges)).legs.decode_sent if r.running.gateway.exchanges else False,  # type: ignore[union-attr]
    )
    await serves(r, stream)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_in_the_middle_of_the_answer(rig: StartRig, dialect: str, stream: bool) -> None:
    r = await rig(dialect=dialect, time_scale=0.5)
    body = story("x", stream=stream, max_tokens=8000, ignore_eos=True)
    async with await Raw.connect(r.running.port) as client:
        await client.send(request(body))
        if stream:
            await client.reader.readuntil(b'"content"')
        else:
            await until(lambda: r.d.stats()["running"] and not r.d.stats()["disaggregation"]["receiving"])
    await r.nothing_left()
    assert r.d.stats()["finished"] == 0
    assert await r.faults() == {}
    await serves(r, stream)
