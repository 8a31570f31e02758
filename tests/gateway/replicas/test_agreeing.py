"""Several gateways on one host decide as one: what one of them learned, the others know a moment later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import Config, LimitsConfig, TenantConfig
from gateway.config_reader import Secret
from gateway.run import Running
from gateway.seat import Seat
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, long_chat, once, request, settled, until

Several = Callable[..., Awaitable[list[Running]]]


def seats(folder: Path, count: int) -> list[Seat]:
    return [Seat(number, count, str(folder), "aa" * 8, "of all", {}, -1, -1) for number in range(count)]


@pytest.fixture
async def several(gateway: Begin, tmp_path: Path) -> Several:
    """Starts gateways that hear each other."""

    async def begin(*engines: Engine, count: int = 2, **options: Any) -> list[Running]:
        options.setdefault("policy", "cache_aware")
        started = [await gateway(*engines, seat=seat, **options) for seat in seats(tmp_path, count)]
        await until(lambda: all(hears(each) == count - 1 for each in started))
        return started

    return begin


def hears(running: Running) -> int:
    assert running.replicas is not None
    return len(running.replicas.peers)


async def told(*gateways: Running) -> None:
    """All that they have to say was said and heard."""
    for each in gateways:
        replicas = each.replicas
        assert replicas is not None
        await until(lambda replicas=replicas: not replicas.said.waits)
        said = replicas._number
        for other in gateways:
            if other is not each and other.replicas is not None:
                peers = other.replicas.peers
                await until(lambda peers=peers, who=replicas.who, said=said: peers[who].number >= said)


def turn(session: int, number: int, *lines: str, size: int = 300, **more: Any) -> bytes:
    messages: list[dict[str, str]] = [{"role": "user", "content": f"{session} says " * size}]
    for before in range(number):
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"and {before} " * 200}]
    return request(chat(messages=messages, max_tokens=2, **more), *lines)


async def test_a_session_goes_on_at_the_other_gateway_where_it_is_at_home(
    several: Several, engine: StartEngine
) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(4)])
    for session in range(12):
        first = await once(one.port, turn(session, 0, f"X-Session-Id: s{session}"))
        await told(one, two)
        second = await once(two.port, turn(session, 1, f"X-Session-Id: s{session}"))
        assert second.one("x-warmroute-worker") == first.one("x-warmroute-worker")
        assert second.one("x-warmroute-decision") == "cache_aware/home"
        assert int(second.one("x-warmroute-predicted-cached-tokens")) > 100
        await told(one, two)
        third = await once(one.port, turn(session, 2, f"X-Session-Id: s{session}"))
        assert third.one("x-warmroute-worker") == first.one("x-warmroute-worker")
    assert two.replicas is not None
    assert two.metrics.replicas_conflicts.values[()] == [0.0]


async def test_a_session_known_by_what_it_said_goes_on_at_the_other(several: Several, engine: StartEngine) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(4)])
    for session in range(8):
        first = await once(one.port, turn(session, 0))
        await settled(one)
        await told(one, two)
        second = await once(two.port, turn(session, 1))
        assert second.one("x-warmroute-worker") == first.one("x-warmroute-worker")
        assert second.one("x-warmroute-decision") == "cache_aware/home"


async def test_a_prompt_without_a_session_goes_where_the_other_sent_its_start(
    several: Several, engine: StartEngine
) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(4)])
    for number in range(6):
        body = {"model": "sim", "prompt": f"{number} is a document of which many ask " * 200, "max_tokens": 2}
        first = await once(one.port, request(body, path="/v1/completions"))
        await told(one, two)
        again = await once(two.port, request({**body, "prompt": body["prompt"] + "?"}, path="/v1/completions"))
        assert again.one("x-warmroute-worker") == first.one("x-warmroute-worker")
        assert int(again.one("x-warmroute-predicted-cached-tokens")) > 1000


async def test_what_one_has_in_flight_the_other_counts(several: Several, engine: StartEngine) -> None:
    engines = [await engine(time_scale=20.0) for _ in range(2)]
    one, two = await several(*engines)
    client = await Raw.connect(one.port)
    await client.send(request(long_chat(stream=True)))
    await client.head()
    name = next(target.name for target in one.fleet.targets.values() if target.running)
    there = next(target for target in two.fleet.targets.values() if target.name == name)
    await until(lambda: there.foreign >= 1)
    assert there.beside[0] == 1
    client.vanish()
    await settled(one)
    await until(lambda: there.beside[0] == 0)


async def test_who_leaves_counts_no_more_and_who_comes_is_told(
    several: Several, gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    engines = [await engine(time_scale=0.0) for _ in range(4)]
    one, two = await several(*engines)
    homes = {}
    for session in range(20):
        homes[session] = (await once(one.port, turn(session, 0, f"X-Session-Id: s{session}"))).one("x-warmroute-worker")
    await told(one, two)
    await two.stop()
    await until(lambda: hears(one) == 0)
    assert all(target.homes_beside == 0 for target in one.fleet.targets.values())
    three = await gateway(*engines, policy="cache_aware", seat=seats(tmp_path, 2)[1])
    assert three.replicas is not None
    replicas = three.replicas
    await until(lambda: replicas._caught_up, 10)
    for session, home in homes.items():
        answer = await once(three.port, turn(session, 1, f"X-Session-Id: s{session}"))
        assert answer.one("x-warmroute-worker") == home
        assert int(answer.one("x-warmroute-predicted-cached-tokens")) > 100


async def test_a_session_that_moved_is_at_its_new_home_everywhere(several: Several, engine: StartEngine) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(3)])
    await once(one.port, turn(1, 0, "X-Session-Id: s"))
    await told(one, two)
    await once(two.port, turn(1, 1, "X-Session-Id: s"))
    await told(one, two)
    (session,) = one.sessions.all()
    other = next(target for target in one.fleet.targets.values() if target.id != session.home)
    one.moving.move(session, other.name)
    await told(one, two)
    (here,) = two.sessions.all()
    assert here.home is not None
    assert two.fleet.targets[here.home].name == other.name
    answer = await once(two.port, turn(1, 2, "X-Session-Id: s"))
    assert answer.one("x-warmroute-worker") == other.name


async def test_two_that_bind_one_session_at_once_agree_in_the_end(several: Several, engine: StartEngine) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(4)])
    for session in range(10):
        await asyncio.gather(
            once(one.port, turn(session, 0, f"X-Session-Id: s{session}")),
            once(two.port, turn(session, 0, f"X-Session-Id: s{session}", size=120)),
        )
    await told(one, two)
    await told(one, two)
    homes = [{s.key: each.fleet.targets[s.home or 0].name for s in each.sessions.all()} for each in (one, two)]
    assert homes[0] == homes[1]
    assert len(homes[0]) == 10


async def test_a_session_that_was_ended_is_ended_everywhere(several: Several, engine: StartEngine) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(2)])
    for each in (one, two, one):
        await once(each.port, turn(1, 0, "X-Session-Id: s"))
        await told(one, two)
    (session,) = one.sessions.all()
    async with aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{one.admin.port}/sessions/{session.key.hex()}"
        async with http.delete(url) as answer:
            assert answer.status == 200
    await told(one, two)
    assert len(two.sessions) == 0
    assert two.replicas is not None
    assert two.replicas.elsewhere.get(session.key) is None


async def test_a_stored_response_is_found_through_the_other_gateway(several: Several, engine: StartEngine) -> None:
    one, two = await several(*[await engine(time_scale=0.0) for _ in range(4)])
    for number in range(6):
        body = {"model": "sim", "input": f"hello {number}", "max_output_tokens": 2}
        first = await once(one.port, request(body, path="/v1/responses"))
        assert first.status == 200
        await told(one, two)
        again = {**body, "previous_response_id": first.json()["id"]}
        second = await once(two.port, request(again, path="/v1/responses"))
        assert second.status == 200
        assert second.one("x-warmroute-worker") == first.one("x-warmroute-worker")


def limited(config: Config) -> None:
    config.tenants = [TenantConfig("a", [Secret("key-of-a")], limits=LimitsConfig(requests_per_minute=100))]


async def test_a_limit_holds_for_all_of_them_together(several: Several, engine: StartEngine) -> None:
    gateways = await several(await engine(time_scale=0.0), count=3, change=limited, policy="round_robin")

    async def ask(running: Running, times: int) -> int:
        good = 0
        for _ in range(times):
            answer = await once(running.port, request(chat(max_tokens=1), "Authorization: Bearer key-of-a"))
            assert answer.status in (200, 429)
            good += answer.status == 200
        return good

    done = sum(await asyncio.gather(*[ask(each, 120) for each in gateways for _ in range(2)]))
    assert 95 <= done <= 105


async def test_one_that_hears_nobody_says_so_and_agrees_with_the_others_all_the_same(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    engines = [await engine(time_scale=0.0) for _ in range(4)]
    alone = []
    for number in range(2):
        (folder := tmp_path / str(number)).mkdir()
        alone.append(await gateway(*engines, policy="cache_aware", seat=seats(folder, 2)[number]))
    await until(lambda: all(each.replicas is not None and each.replicas.deaf for each in alone), 10)
    same = 0
    for session in range(20):
        homes = {
            (await once(each.port, turn(session, 0, f"X-Session-Id: s{session}"))).one("x-warmroute-worker")
            for each in alone
        }
        same += len(homes) == 1
    assert same >= 19
    text = await admin(alone[0], "/metrics")
    assert 'warmroute_replicas_deaf{process="0"} 1.0' in text
