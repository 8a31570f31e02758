"""Two gateways that seal tokens with one secret: a session goes on at the other, where its cache is, and ends there."""

from __future__ import annotations

from typing import Any

from gateway.config import Config
from gateway.config_reader import Secret
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import chat, once, request
from tests.gateway.test_sessions_adversarial import ending


def one_secret(config: Config) -> None:
    config.sessions.token_key = Secret("of both")


def other_secret(config: Config) -> None:
    config.sessions.token_key = Secret("of one alone")


async def two(gateway: Begin, engine: StartEngine, second: Any = one_secret) -> tuple[Running, Running]:
    engines = [await engine(time_scale=0.0) for _ in range(4)]
    return (
        await gateway(*engines, policy="cache_aware", change=one_secret),
        await gateway(*reversed(engines), policy="cache_aware", change=second),
    )


def asking(number: int, turn: int, *lines: str) -> bytes:
    messages: list[dict[str, str]] = [{"role": "user", "content": f"{number} " * 80}]
    for before in range(turn):
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"on {before}"}]
    return request(chat(messages=messages, max_tokens=2), *lines)


async def test_a_gateway_with_another_secret_takes_no_token(gateway: Begin, engine: StartEngine) -> None:
    first, second = await two(gateway, engine, other_secret)
    token = (await once(first.port, asking(1, 0))).one("x-warmroute-session")
    answer = await once(second.port, asking(1, 1, f"x-warmroute-session: {token}"))
    assert answer.one("x-warmroute-session-source") == "content"
    assert (await once(second.port, ending(token))).status == 404
    assert (await once(first.port, ending(token))).status == 200


async def test_where_its_home_moved_the_token_says_so_to_the_other_gateway(gateway: Begin, engine: StartEngine) -> None:
    first, second = await two(gateway, engine)
    answer = await once(first.port, asking(1, 0))
    (session,) = first.sessions.all()
    assert session.home is not None
    other = next(target for target in first.fleet.targets.values() if target.id != session.home)
    first.moving.move(session, other.name)
    token = (await once(first.port, asking(1, 1, f"x-warmroute-session: {answer.one('x-warmroute-session')}"))).one(
        "x-warmroute-session"
    )
    assert token != answer.one("x-warmroute-session")
    again = await once(second.port, asking(1, 2, f"x-warmroute-session: {token}"))
    assert again.one("x-warmroute-worker") == other.name
