"""What comes back with a restart: whom an end finds, names, and the order of use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.config import Config
from gateway.naming import Found
from gateway.sessions import Session, Sessions
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import chat, once, request

END = b"e" * 16


def restored(key: bytes, used: float, store: Sessions) -> Session:
    session = Session(key * 16, "content", "t", "m", key[0], asked=(END,))
    assert store.restore(session, used)
    return session


def test_an_end_that_two_sessions_claim_belongs_to_one_of_them() -> None:
    store = Sessions()
    newer, older = restored(b"b", 2.0, store), restored(b"a", 1.0, store)
    assert store.ends.claims(END) == [older, newer]
    store.ends.check()


def test_forgetting_one_of_them_leaves_the_other_its_own() -> None:
    store = Sessions()
    first, second = restored(b"a", 1.0, store), restored(b"b", 2.0, store)
    store.drop(first)
    assert store.ends.claims(END) == [second]
    store.drop(second)
    assert store.ends.claims(END) == []


async def test_the_newest_of_two_that_said_the_same_is_found_after_a_restart_too(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    def kept(config: Config) -> None:
        config.sessions.state = str(tmp_path / "state")

    engines = [await engine(time_scale=0.0) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware", change=kept)
    said: list[dict[str, Any]] = [{"role": "user", "content": "the same words " * 40}]
    workers = []
    for _ in range(2):
        answer = await once(running.port, request(chat(messages=said, max_tokens=2)))
        workers.append(answer.one("x-warmroute-worker"))
        # The first is saved before the second comes.
        await asyncio.sleep(1.3)
    assert workers[0] != workers[1]
    await running.stop()
    again = await gateway(*engines, policy="cache_aware", change=kept)
    assert len(again.sessions) == 2
    more = [*said, answer.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    answer = await once(again.port, request(chat(messages=more, max_tokens=2)))
    assert answer.one("x-warmroute-worker") in workers
    assert len(again.sessions) == 2


async def test_a_session_of_a_name_is_ended_by_it_after_a_restart_too(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    """Before any request of its model came: names are looked for among the models that requests named."""

    def kept(config: Config) -> None:
        config.sessions.state = str(tmp_path / "state")

    at = await engine(time_scale=0.0)
    running = await gateway(at, policy="cache_aware", change=kept)
    assert (await once(running.port, request(chat(max_tokens=1), "x-session-id: s"))).status == 200
    await running.stop()
    again = await gateway(at, policy="cache_aware", change=kept)
    assert len(again.sessions) == 1
    assert again.sessions.named(b"s", "anonymous", "sim") is not None
    ended = await once(again.port, request(None, method="DELETE", path="/v1/sessions/s"))
    assert ended.status == 200


def test_a_restored_session_is_forgotten_in_its_turn() -> None:
    """One that is restored behind a newer one (its gateway took requests already) is the oldest all the same."""
    store = Sessions(idle=10.0)
    store.find(Found("rid", b"new"), "t", "m", 100.0)
    restored(b"a", 91.0, store)
    store.sweep(105.0)
    assert [session.source for session in store.all()] == ["rid"]
