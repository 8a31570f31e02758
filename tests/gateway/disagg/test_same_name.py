"""A client's request id is its own to choose, and says nothing of whose KV is whose."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.kinds import BeginKind, kind_of_pair
from tests.gateway.disagg.rig import StartRig, name, story
from tests.gateway.disagg.test_peers import peers
from tests.gateway.disagg.two import named
from tests.gateway.talk import once, request, until
from tests.load_tests.engine.pairs import STORY

__all__ = ["kind_of_pair"]


@pytest.mark.parametrize("stream", [False, True])
async def test_mooncake(kind_of_pair: BeginKind, stream: bool) -> None:
    r = await kind_of_pair("mooncake")
    bodies = [story(number, stream=stream) for number in range(6)]
    for each in bodies:
        await r.right(each)
    await asyncio.gather(*(r.check(each, "X-Request-Id: mine") for each in bodies))
    await r.nothing_left()


async def test_fetches_from_peers(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn())
    names = set()
    for number in range(3):
        two.busy(home)
        two.busy(other, 0.0)
        two.says(f"{number} {STORY}")
        answer = await once(two.running.port, request(two.body(), "X-Session-Id: s", "X-Request-Id: mine"))
        assert answer.one("x-warmroute-worker") == name(other)
        await until(lambda: not two.running.gateway.exchanges)
        names.add(named(other)["remote_kv_source"]["kv_request_id"])
        home, other = other, home
    assert len(names) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang(rig: StartRig, stream: bool) -> None:
    r = await rig(1, 1, "sglang")
    bodies = [story(number, stream=stream) for number in range(6)]
    for each in bodies:
        await r.right(each)
    await asyncio.gather(*(r.check(each, "X-Request-Id: mine") for each in bodies))
    await r.nothing_left()
