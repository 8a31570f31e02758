"""Homes of sessions outlive the gateway, where a file or Redis keeps them; nothing waits for either."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config
from gateway.config_reader import ConfigError, Secret
from gateway.run import Running
from gateway.stores import STALE_LINES, FileStore, Kept, RedisStore
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.redis_server import RedisServer
from tests.gateway.talk import chat, once, request, until

Change = Callable[[Config], None]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def written(path: Path) -> bytes:
    return path.read_bytes()


def cut_short(path: Path) -> Path:
    """A copy as after kill -9: its last line is half a line."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes() + b'{"key":"00ff')
    return copy


def kept_in(path: Path) -> Change:
    def change(config: Config) -> None:
        config.sessions.state = str(path)

    return change


def in_redis(server: RedisServer) -> Change:
    def change(config: Config) -> None:
        config.sessions.redis = Secret(server.url)

    return change


async def homes(running: Running, names: list[str]) -> dict[str, str]:
    """Where each answers its next turn."""
    found = {}
    for name in names:
        answer = await once(running.port, request(chat(max_tokens=2), f"x-session-id: {name}"))
        assert answer.status == 200
        found[name] = answer.one("x-warmroute-worker")
    return found


async def talk(running: Running, messages: list[dict[str, Any]], *lines: str) -> tuple[str, str]:
    """One turn of a client that names no session: (worker, token)."""
    answer = await once(running.port, request(chat(messages=messages, max_tokens=4), *lines))
    messages.append(answer.json()["choices"][0]["message"])
    return answer.one("x-warmroute-worker"), answer.one("x-warmroute-session")


NAMES = [f"s{number}" for number in range(24)]


@pytest.mark.parametrize("where", ["file", "redis"])
async def test_sessions_are_at_home_where_they_were_after_a_restart(
    gateway: Begin, engine: StartEngine, state: Path, where: str, request: pytest.FixtureRequest
) -> None:
    engines = [await engine() for _ in range(4)]
    change = kept_in(state)
    if where == "redis":
        server: RedisServer = request.getfixturevalue("redis")
        await server.up()
        change = in_redis(server)
    running = await gateway(*engines, policy="cache_aware", change=change)
    before = await homes(running, NAMES)
    assert len(set(before.values())) == 4
    chats = [[{"role": "user", "content": f"I am {number}"}] for number in range(12)]
    nameless = [(await talk(running, messages))[0] for messages in chats]
    await running.stop()
    again = await gateway(*engines, policy="cache_aware", change=change)
    assert len(again.sessions) == 36
    for messages in chats:
        messages.append({"role": "user", "content": "go on"})
    assert [(await talk(again, messages))[0] for messages in chats] == nameless
    assert await homes(again, NAMES) == before
    assert len(again.sessions) == 36


async def test_a_gateway_that_is_killed_loses_a_second_at_most(
    gateway: Begin, engine: StartEngine, state: Path
) -> None:
    engines = [await engine() for _ in range(4)]
    running = await gateway(*engines, policy="cache_aware", change=kept_in(state))
    before = await homes(running, NAMES)
    assert running.keeper is not None
    await until(lambda: running.keeper is not None and not len(running.keeper))
    again = await gateway(*engines, policy="cache_aware", change=kept_in(cut_short(state)))
    assert await homes(again, NAMES) == before


async def test_a_token_says_where_its_session_is_at_home_to_a_gateway_that_knows_nothing(
    gateway: Begin, engine: StartEngine
) -> None:
    def change(config: Config) -> None:
        config.sessions.token_key = Secret("the same everywhere")

    engines = [await engine() for _ in range(4)]
    first, second = [await gateway(*engines, policy="cache_aware", change=change) for _ in range(2)]
    for number in range(8):
        messages = [{"role": "user", "content": f"I am {number}"}]
        worker, token = await talk(first, messages)
        # Another history: its content says nothing.
        other = [{"role": "user", "content": f"I was {number}"}]
        assert (await talk(second, other, f"x-warmroute-session: {token}"))[0] == worker
    assert {session.source for session in second.sessions.all()} == {"sticky"}


async def test_the_file_is_ours_alone_and_holds_no_word_of_a_client(
    gateway: Begin, engine: StartEngine, state: Path
) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=kept_in(state))
    await once(running.port, request(chat(user="somebody"), "x-session-id: very-secret-name"))
    await running.stop()
    assert stat.S_IMODE(os.stat(state).st_mode) == 0o600
    text = written(state)
    assert b"secret-name" not in text
    assert b"somebody" not in text
    head, line = text.splitlines()
    assert set(json.loads(head)) == {"state", "secret"}
    assert json.loads(line)["model"] == "sim"


async def test_ended_and_idle_sessions_do_not_come_back(gateway: Begin, engine: StartEngine, state: Path) -> None:
    engines = [await engine()]
    running = await gateway(*engines, policy="cache_aware", change=kept_in(state))
    await homes(running, ["a", "b", "c"])
    await once(running.port, request(None, method="DELETE", path="/v1/sessions/a"))
    old = running.sessions.named(b"b", "anonymous", "sim")
    assert old is not None
    old.used -= running.sessions.idle + 1
    assert running.keeper is not None
    running.keeper.changed(old)
    await running.stop()
    again = await gateway(*engines, policy="cache_aware", change=kept_in(state))
    assert {session.key for session in again.sessions.all()} == {
        session.key for session in running.sessions.all() if session is not old
    }


async def test_a_worker_that_never_comes_back_costs_its_sessions_their_homes_and_nothing_else(
    gateway: Begin, engine: StartEngine, state: Path
) -> None:
    engines = [await engine() for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware", change=kept_in(state))
    before = await homes(running, NAMES)
    await running.stop()
    again = await gateway(engines[0], policy="cache_aware", change=kept_in(state))
    after = await homes(again, NAMES)
    assert set(after.values()) == {again.fleet.targets[0].name}
    assert set(before.values()) != set(after.values())


@pytest.mark.parametrize("text", [b"", b"{}\n", b"not ours\n", b'{"state":1,"secret":5}\n', b"\xff\xfe\n"])
def test_a_file_that_is_no_state_is_refused_and_left_as_it_is(state: Path, text: bytes) -> None:
    state.write_bytes(text)
    config = Config()
    config.sessions.state = str(state)

    async def start() -> None:
        Running(config)

    with pytest.raises(ConfigError, match=r"sessions\.state: .*name another file"):
        asyncio.run(start())
    assert state.read_bytes() == text


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = Config()
    config.sessions.state = str(tmp_path / "no" / "state")

    async def start() -> None:
        Running(config)

    with pytest.raises(ConfigError, match=r"sessions\.state: .*cannot be written"):
        asyncio.run(start())


async def test_the_file_stays_in_proportion_to_the_sessions(state: Path) -> None:
    store = FileStore(str(state))
    store.secret_of()
    line = json.dumps({"key": "ab" * 16, "tenant": "t", "model": "m", "used": 1.0}).encode()
    for _ in range(STALE_LINES // 500 + 2):
        await store.save([("ab" * 16, line)] * 500, 1)
    assert len(written(state).splitlines()) < 1000
    assert await store.load() == [Kept("ab" * 16, "t", "m", used=1.0)]
    await store.save([("ab" * 16, None)], 0)
    assert await store.load() == []


async def test_a_redis_that_dies_costs_no_request_and_is_caught_up_with(
    gateway: Begin, engine: StartEngine, redis: RedisServer
) -> None:
    await redis.up()
    engines = [await engine() for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware", change=in_redis(redis))
    await homes(running, ["a"])
    redis.kill()
    before = await homes(running, NAMES)
    keeper = running.keeper
    assert keeper is not None
    await until(lambda: keeper.unsaved is not None)
    assert len(keeper) >= len(NAMES)
    redis.start()
    await redis.up()
    await until(lambda: keeper.unsaved is None and not len(keeper), 40)
    again = await gateway(*engines, policy="cache_aware", change=in_redis(redis))
    assert await homes(again, NAMES) == before


async def test_a_gateway_starts_without_its_redis(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.sessions.redis = Secret("redis://127.0.0.1:1/0")

    running = await gateway(await engine(), policy="cache_aware", change=change)
    assert await homes(running, ["a"])


@pytest.mark.parametrize("junk", [b"", b"{", b'{"key": 5}', b'{"key":"zz"}', b"\x00"])
async def test_what_others_wrote_into_redis_is_left_out(
    gateway: Begin, engine: StartEngine, redis: RedisServer, junk: bytes
) -> None:
    await redis.up()
    store: Any = RedisStore(redis.url, 60)
    await store._redis.set("warmroute:session:ab", junk)
    await store.close()
    running = await gateway(await engine(), policy="cache_aware", change=in_redis(redis))
    assert len(running.sessions) == 0
