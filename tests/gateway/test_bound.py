"""State that is bound to one worker, while that drains or is gone; tokens that come twice; moves to workers and ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, once, request, tell
from tests.gateway.test_clients import RESPONSES, Client, Talk, plain
from tests.gateway.test_opened import closing, opening, say, start, turn
from tests.gateway.test_sessions_adversarial import body, fleet, home_of, move, named, ok


def respond(**fields: Any) -> bytes:
    return request({"model": "sim", "input": "hi", "max_output_tokens": 4, **fields}, path=RESPONSES)


async def test_a_chain_of_responses_goes_on_while_its_worker_drains_over_time(
    gateway: Begin, engine: StartEngine
) -> None:
    """Its state lives there alone: it cannot be moved, only end."""
    running, _ = await fleet(gateway, engine)
    first = await ok(running, respond())
    worker = first.one("x-warmroute-worker")
    status, told = await tell(running, "POST", f"/workers/{worker}/drain?over=30")
    assert status == 202
    again = await once(running.port, respond(previous_response_id=first.json()["id"]))
    assert again.status == 200, (again.body, told["drain"])
    assert again.one("x-warmroute-worker") == worker
    stored = await once(running.port, request(None, method="GET", path=f"{RESPONSES}/{first.json()['id']}"))
    assert stored.status == 200


async def test_a_session_opened_on_an_engine_goes_on_while_it_drains_over_time(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await start(gateway, engine, 2, time_scale=0.0)
    assert (await say(running, opening("s"))).status == 200
    first = await say(running, turn("s", [1, 2, 3]))
    assert first.status == 200
    await tell(running, "POST", f"/workers/{first.one('x-warmroute-worker')}/drain?over=30")
    again = await say(running, turn("s", [4, 5, 6]))
    assert again.status == 200, again.body
    assert (await say(running, closing("s"))).status == 200


@pytest.mark.parametrize(
    "lines",
    [
        ["x-warmroute-session: forged", "cookie: x-warmroute-session={0}"],
        ["x-warmroute-session:", "cookie: x-warmroute-session={0}"],
        ["cookie: x-warmroute-session=forged; x-warmroute-session={0}"],
    ],
)
async def test_a_forged_token_beside_a_good_one_is_as_if_it_were_not_there(
    gateway: Begin, engine: StartEngine, lines: list[str]
) -> None:
    def change(config: Config) -> None:
        config.sessions.cookie = True

    running, _ = await fleet(gateway, engine, 2, change=change)
    token = (await ok(running, request(body(3)))).one("x-warmroute-session")
    answer = await ok(running, request(body(9), *(line.format(token) for line in lines)))
    assert answer.one("x-warmroute-session-source") == "sticky"


async def test_a_move_to_a_target_whose_breaker_is_open_says_that(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine)
    await ok(running, named("s"))
    home = home_of(running, "s")
    other = next(target for target in running.fleet.targets.values() if target.name != home)
    now = running.fleet.clock()
    while other.breaker.allows(now):
        running.fleet.failed(other, now)
    status, told = await move(running, "s", other.name)
    assert status == 400
    assert "it is ready" not in told["error"]["message"], told["error"]["message"]
    assert "breaker" in told["error"]["message"]


async def test_a_move_to_a_worker_of_several_ranks_finds_one_that_can_take_it(
    gateway: Begin, engine: StartEngine
) -> None:
    one, many = await engine(time_scale=0.0), await engine(ranks=2, time_scale=0.0)
    running = await gateway(one, many, policy="cache_aware")
    await ok(running, named("s"))
    id_ = many.url.removeprefix("http://")
    ranks = running.fleet.workers[id_].targets
    assert len(ranks) == 2
    for target in [*ranks, *ranks]:
        status, told = await move(running, "s", f"{id_}#{target.rank}")
        assert (status, told["home"]) == (200, target.name)
        assert (await ok(running, named("s"))).one("x-warmroute-worker") == target.name
    now = running.fleet.clock()
    while ranks[0].breaker.allows(now):
        running.fleet.failed(ranks[0], now)
    await move(running, "s", one.url.removeprefix("http://"))
    status, told = await move(running, "s", id_)
    assert (status, told.get("home")) == (200, ranks[1].name), told


async def test_a_conversation_whose_worker_is_gone_is_told_so(gateway: Begin, engine: StartEngine) -> None:
    running, engines = await fleet(gateway, engine)
    first = await ok(running, respond(conversation="conv_1"))
    worker = first.one("x-warmroute-worker")
    for _ in range(4):
        assert (await ok(running, respond(conversation={"id": "conv_1"}))).one("x-warmroute-worker") == worker
    await next(at for at in engines if at.url.endswith(worker)).kill()
    await asyncio.sleep(0.6)
    answer = await once(running.port, respond(conversation="conv_1"))
    assert answer.status == 503
    assert b"conv_1" in answer.body
    assert (await once(running.port, respond(conversation="conv_2"))).status == 200


async def test_a_chain_of_responses_stays_on_the_rank_that_has_its_cache(gateway: Begin, engine: StartEngine) -> None:
    """The engine's process has the state, one of its ranks the KV."""
    running = await gateway(await engine(ranks=4, time_scale=0.0), policy="cache_aware")
    chain = Client("responses", "", plain, RESPONSES, stored=True)
    talks = [Talk(chain, f"s-{number}") for number in range(8)]
    async with await Raw.connect(running.port) as client:
        for turn in range(4):
            for talk in talks:
                talk.heard(await client.ask(talk.next(turn)))
    places = [sorted(set(talk.workers)) for talk in talks]
    assert [len(each) for each in places] == [1] * 8, places
    assert len({each[0] for each in places}) == 4, "and they are spread over the ranks"
