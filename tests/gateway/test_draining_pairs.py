"""Drains in a fleet of pairs."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.run import Running
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Response, chat, once, request, tell, until


async def pairs(gateway: Begin, engine: StartEngine, p: int, d: int) -> tuple[Running, list[Engine], list[Engine]]:
    prefill = [await engine("sglang", role="prefill", time_scale=0.0) for _ in range(p)]
    decode = [await engine("sglang", role="decode", decode_radix=True, time_scale=0.0) for _ in range(d)]
    return await gateway(*prefill, *decode, policy="cache_aware"), prefill, decode


async def turn(running: Running, name: str, number: int) -> Response:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} " * 400 * number}]
    body = chat(messages=messages, max_tokens=2)
    return await once(running.port, request(body, f"x-session-id: {name}"))


def id_of(at: Engine) -> str:
    return at.url.removeprefix("http://")


@pytest.mark.parametrize("over", [0, 3])
async def test_a_prefill_engine_that_drains_hands_its_sessions_to_the_other(
    gateway: Begin, engine: StartEngine, over: int
) -> None:
    running, prefill, _ = await pairs(gateway, engine, 2, 2)
    names = [f"s{number}" for number in range(8)]
    first = {}
    for name in names:
        answer = await turn(running, name, 1)
        assert answer.status == 200
        first[name] = (answer.one("x-warmroute-worker"), answer.one("x-warmroute-prefill-worker"))
    drained = id_of(prefill[0])
    mine = [name for name in names if first[name][1] == drained]
    assert mine
    status, told = await tell(running, "POST", f"/workers/{drained}/drain?over={over}")
    assert (status, told["drain"]["sessions"]) == (202, len(mine))
    worker = running.fleet.workers[drained]
    await until(lambda: not worker.targets[0].homes, over + 4)
    assert running.moving.drains[drained].done
    for name in names:
        answer = await turn(running, name, 2)
        assert answer.status == 200
        assert answer.one("x-warmroute-worker") == first[name][0], "where it is answered it stays"
        assert answer.all("x-warmroute-prefill-worker") in ([], [id_of(prefill[1])])


@pytest.mark.parametrize("over", [0, 3])
async def test_a_decode_engine_that_drains_hands_its_sessions_to_the_other(
    gateway: Begin, engine: StartEngine, over: int
) -> None:
    running, _, decode = await pairs(gateway, engine, 2, 2)
    names = [f"s{number}" for number in range(8)]
    for name in names:
        assert (await turn(running, name, 1)).status == 200
    drained = id_of(decode[0])
    await tell(running, "POST", f"/workers/{drained}/drain?over={over}")
    worker = running.fleet.workers[drained]
    for number in range(2, 4):
        for name in names:
            assert (await turn(running, name, number)).status == 200
    await until(lambda: not worker.targets[0].homes, over + 4)
    for name in names:
        answer = await turn(running, name, 4)
        assert (answer.status, answer.one("x-warmroute-worker")) == (200, id_of(decode[1]))
    homes = sum(target.homes for target in running.fleet.targets.values())
    assert homes == sum((s.home is not None) + (s.partner is not None) for s in running.sessions.all())
