"""Gateways on several hosts agree by way of Redis, and go on when it is gone, slow, full, flushed or another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.config import Config
from gateway.config_reader import Secret
from gateway.replicas.redis_url import connect, place_of
from gateway.run import Running
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.redis_server import RedisServer
from tests.gateway.replicas.test_agreeing import hears, told, turn
from tests.gateway.talk import once, request, until

Two = Callable[..., Awaitable[list[Running]]]


def by(url: str) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config.replicas.redis = Secret(url)

    return change


@pytest.fixture
async def two(gateway: Begin, redis: RedisServer) -> Two:
    """Starts gateways that hear each other in Redis."""

    async def begin(*engines: Engine, count: int = 2, url: str | None = None, **options: Any) -> list[Running]:
        await redis.up()
        options.setdefault("policy", "cache_aware")
        options.setdefault("change", by(url or redis.url))
        started = [await gateway(*engines, **options) for _ in range(count)]
        await until(lambda: all(hears(each) == count - 1 for each in started), 10)
        return started

    return begin


def deaf(running: Running) -> str | None:
    assert running.replicas is not None
    return running.replicas.deaf


async def agree(one: Running, two: Running, names: list[str]) -> int:
    """How many of the sessions answer both where they are at home; each was served by one of them, and goes on at the other."""
    same = 0
    for number, name in enumerate(names):
        first, second = (one, two) if number % 2 else (two, one)
        home = (await once(first.port, turn(number, 0, f"X-Session-Id: {name}"))).one("x-warmroute-worker")
        await told(first, second)
        same += (await once(second.port, turn(number, 1, f"X-Session-Id: {name}"))).one("x-warmroute-worker") == home
    return same


async def test_a_session_goes_on_at_the_other_host(two: Two, engine: StartEngine) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    assert await agree(one, other, [f"s{number}" for number in range(10)]) == 10


async def test_tokens_of_one_are_read_by_the_other_although_nothing_is_configured(
    two: Two, engine: StartEngine
) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    first = await once(one.port, turn(1, 0))
    token = first.one("x-warmroute-session")
    second = await once(other.port, turn(1, 1, f"x-warmroute-session: {token}"))
    assert second.one("x-warmroute-session-source") == "x-warmroute-session" or second.one(
        "x-warmroute-session-source"
    ).startswith("sticky")
    assert second.one("x-warmroute-worker") == first.one("x-warmroute-worker")


async def test_while_redis_is_gone_all_is_served_and_then_they_agree_again(
    two: Two, engine: StartEngine, redis: RedisServer
) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    redis.kill()
    await until(lambda: deaf(one) is not None and deaf(other) is not None, 20)
    homes = {}
    for number in range(20):
        at = one if number % 2 else other
        answer = await once(at.port, turn(number, 0, f"X-Session-Id: gone{number}"))
        assert answer.status == 200
        homes[number] = answer.one("x-warmroute-worker")
    redis.start()
    await redis.up()
    await until(lambda: deaf(one) is None and deaf(other) is None and hears(one) == hears(other) == 1, 30)
    await told(one, other)
    for number, home in homes.items():
        at = other if number % 2 else one
        answer = await once(at.port, turn(number, 1, f"X-Session-Id: gone{number}"))
        assert answer.one("x-warmroute-worker") == home
    assert await agree(one, other, [f"after{number}" for number in range(6)]) == 6


async def test_while_redis_hangs_nobody_waits(two: Two, engine: StartEngine, redis: RedisServer) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    assert redis.process is not None
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        for number in range(10):
            async with asyncio.timeout(5):
                assert (await once(one.port, turn(number, 0, f"X-Session-Id: h{number}"))).status == 200
        await until(lambda: deaf(one) is not None, 20)
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)
    await until(lambda: deaf(one) is None and deaf(other) is None, 30)
    await told(one, other)
    for number in range(10):
        home = (await once(one.port, turn(number, 1, f"X-Session-Id: h{number}"))).one("x-warmroute-worker")
        assert (await once(other.port, turn(number, 2, f"X-Session-Id: h{number}"))).one("x-warmroute-worker") == home


async def test_flushed_it_goes_on(two: Two, engine: StartEngine, redis: RedisServer) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    assert await agree(one, other, [f"a{number}" for number in range(4)]) == 4
    Redis(port=redis.port).flushall()
    assert await agree(one, other, [f"b{number}" for number in range(6)]) == 6


async def test_another_server_whose_clock_is_behind_is_read_from_where_it_is(
    two: Two, engine: StartEngine, redis: RedisServer
) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    client = Redis(port=redis.port)
    client.flushall()
    # What the reader waits for is an hour ahead of what is written now: as after a failover between clocks that differ.
    for each in (one, other):
        assert each.replicas is not None
        bus = each.replicas.buses[0]
        await until(lambda bus=bus: bus.troubled is None)
    stream = "warmroute:{default}:log"
    seconds, _ = client.time()
    client.xadd(stream, {"w": "x"}, id=f"{(seconds + 3600) * 1000}-0")
    await asyncio.sleep(0.7)
    client.flushall()
    await until(lambda: hears(one) == hears(other) == 1 and deaf(one) is None, 30)
    await until(lambda: not one.replicas.said.waits if one.replicas else False)
    await asyncio.sleep(4)
    assert await agree(one, other, [f"c{number}" for number in range(4)]) == 4


async def test_full_it_takes_nothing_and_all_is_served(two: Two, engine: StartEngine, redis: RedisServer) -> None:
    one, other = await two(*[await engine(time_scale=0.0) for _ in range(4)])
    client = Redis(port=redis.port)
    client.config_set("maxmemory", "1")
    await until(lambda: deaf(one) is not None, 20)
    for number in range(6):
        assert (await once(one.port, turn(number, 0, f"X-Session-Id: f{number}"))).status == 200
    client.config_set("maxmemory", "0")
    await until(lambda: deaf(one) is None and deaf(other) is None, 20)
    assert await agree(one, other, [f"g{number}" for number in range(4)]) == 4


async def test_homes_outlive_all_gateways(gateway: Begin, engine: StartEngine, redis: RedisServer) -> None:
    engines = [await engine(time_scale=0.0) for _ in range(4)]
    await redis.up()
    first = await gateway(*engines, policy="cache_aware", change=by(redis.url))
    homes = {}
    for number in range(10):
        answer = await once(first.port, turn(number, 0, f"X-Session-Id: o{number}"))
        homes[number] = answer.one("x-warmroute-worker")
    await first.stop()
    second = await gateway(*engines, policy="cache_aware", change=by(redis.url))
    replicas = second.replicas
    assert replicas is not None
    await until(lambda: len(replicas.elsewhere) >= 10, 10)
    for number, home in homes.items():
        answer = await once(second.port, turn(number, 1, f"X-Session-Id: o{number}"))
        assert answer.one("x-warmroute-worker") == home


async def test_scopes_do_not_hear_each_other(gateway: Begin, engine: StartEngine, redis: RedisServer) -> None:
    await redis.up()
    engines = [await engine(time_scale=0.0)]

    def scoped(name: str) -> Callable[[Config], None]:
        def change(config: Config) -> None:
            by(redis.url)(config)
            config.replicas.scope = name

        return change

    one, other = [await gateway(*engines, change=scoped(name)) for name in ("a", "b")]
    third = await gateway(*engines, change=scoped("a"))
    await until(lambda: hears(one) == 1 and hears(third) == 1, 10)
    assert hears(other) == 0
    assert deaf(other) is None


async def test_in_a_cluster(gateway: Begin, engine: StartEngine, redis: RedisServer) -> None:
    redis.kill()
    redis.more = ("--cluster-enabled", "yes")
    redis.start()
    await redis.up()
    Redis(port=redis.port).execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    engines = [await engine(time_scale=0.0) for _ in range(3)]
    change = by(f"redis+cluster://127.0.0.1:{redis.port}")
    await asyncio.sleep(1.0)
    one, other = [await gateway(*engines, policy="cache_aware", change=change) for _ in range(2)]
    await until(lambda: hears(one) == hears(other) == 1, 20)
    assert await agree(one, other, [f"s{number}" for number in range(4)]) == 4


async def test_watched_by_sentinels_with_users(gateway: Begin, engine: StartEngine, redis: RedisServer) -> None:
    await redis.up()
    client = Redis(port=redis.port)
    client.acl_setuser(
        "gate", enabled=True, passwords=["+a word"], keys=["warmroute:*"], commands=["+@all", "-@dangerous", "+info"]
    )
    sentinel = RedisServer(redis.folder)
    told_it = f"port {sentinel.port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {redis.port} 1\n"
    await asyncio.to_thread(Path(redis.folder, "sentinel.conf").write_text, told_it)
    process = await asyncio.create_subprocess_exec(
        "redis-server", f"{redis.folder}/sentinel.conf", "--sentinel", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await sentinel.up()
        engines = [await engine(time_scale=0.0) for _ in range(3)]
        change = by(f"redis+sentinel://gate:a%20word@127.0.0.1:{sentinel.port}/main/0")
        one, other = [await gateway(*engines, policy="cache_aware", change=change) for _ in range(2)]
        await until(lambda: hears(one) == hears(other) == 1, 20)
        assert await agree(one, other, [f"s{number}" for number in range(4)]) == 4
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    "url",
    [
        "http://h:6379",
        "redis+sentinel://h:26379",
        "redis+cluster://",
        "unix+cluster:///a",
        "redis+sentinel://h:26379/name/x",
    ],
)
def test_what_is_no_url_of_redis_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="redis"):
        place_of(url)
    with pytest.raises(ValueError, match="redis"):
        connect(url, 1.0)


async def test_requests_need_no_redis_at_the_start_either(
    gateway: Begin, engine: StartEngine, redis: RedisServer
) -> None:
    redis.kill()
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware", change=by(redis.url))
    assert (await once(running.port, turn(1, 0))).status == 200
    await until(lambda: deaf(running) is not None, 20)
    assert (await once(running.port, request({"model": "sim", "prompt": "x"}, path="/v1/completions"))).status == 200
