"""State that lives on one worker binds its requests to that worker, and to its session."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import Config, TenantConfig
from gateway.config_reader import Secret
from gateway.pins import Pins
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Response, once, request, until


async def respond(running: Running, *lines: str, **fields: Any) -> Response:
    body = {"model": "sim", "input": "tell me", "max_output_tokens": 4, **fields}
    return await once(running.port, request(body, *lines, path="/v1/responses"))


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
async def test_a_conversation_stays_where_it_began(gateway: Begin, engine: StartEngine, policy: str) -> None:
    running = await gateway(*[await engine() for _ in range(4)], policy=policy)
    for form in ("conv_1", {"id": "conv_2"}):
        found = {(await respond(running, conversation=form)).one("x-warmroute-worker") for _ in range(8)}
        assert len(found) == 1


async def test_a_conversation_whose_worker_is_gone_is_an_error_that_says_so(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine() for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    first = await respond(running, conversation="conv_1")
    gone = next(each for each in engines if first.one("x-warmroute-worker") in each.url)
    await gone.kill()
    await until(lambda: any(worker.state == "down" for worker in running.fleet.workers.values()))
    answer = await respond(running, conversation="conv_1")
    assert answer.status == 503
    assert "conv_1" in answer.json()["error"]["message"]
    assert "cannot be reached" in answer.json()["error"]["message"]
    assert (await respond(running, conversation="conv_2")).status == 200


async def test_what_goes_on_from_a_response_belongs_to_its_session(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(*[await engine() for _ in range(3)], policy="cache_aware")
    answer = await respond(running)
    assert answer.one("x-warmroute-session-source") == "content"
    for _ in range(4):
        before = answer.json()["id"]
        answer = await respond(running, "x-session-id: something else", previous_response_id=before)
        assert answer.status == 200
        assert answer.one("x-warmroute-session-source") == "previous_response_id"
    (session,) = running.sessions.all()
    assert session.turns == 5


async def test_names_of_conversations_are_bounded(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    assert (await respond(running, conversation="c" * 5000)).status == 200
    assert all(len(name) < 300 for name in running.gateway.routing.pins.names())


def test_a_name_in_use_is_not_crowded_out_and_no_tenant_crowds_another() -> None:
    pins = Pins(most=100)
    pins.put("a", "conversation", "w", None)
    for number in range(500):
        pins.put("a", f"r{number}", "w", None)
        pins.put("b", f"r{number}", "v", b"key")
        if number % 50 == 0:
            assert pins.find("a", "conversation") == ("w", None)
    assert pins.find("a", "conversation") == ("w", None)
    assert pins.find("a", "r0") == (None, None)
    assert pins.find("b", "r499") == ("v", b"key")
    assert len(pins) == 200


async def test_another_tenant_s_response_is_not_known_and_never_found_by_chance(
    gateway: Begin, engine: StartEngine
) -> None:
    def change(config: Config) -> None:
        config.tenants = [TenantConfig("a", [Secret("key-a")]), TenantConfig("b", [Secret("key-b")])]

    running = await gateway(await engine(), policy="cache_aware", change=change)
    first = await respond(running, "authorization: Bearer key-a", conversation="c")
    name = first.json()["id"]
    other = await respond(running, "authorization: Bearer key-b", previous_response_id=name)
    assert other.status == 404
    assert (await respond(running, "authorization: Bearer key-a", previous_response_id=name)).status == 200
    # A conversation's name is its tenant's own.
    assert (await respond(running, "authorization: Bearer key-b", conversation="c")).status == 200
