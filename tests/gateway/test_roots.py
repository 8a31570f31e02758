"""Starts that many sessions share are known, and an engine with an empty cache gets them before its sessions come."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.config import Config, TenantConfig
from gateway.config_reader import Secret
from gateway.roots import MOST, Roots, warming_body
from gateway.run import Running
from gateway.workers import WorkerSpec
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import chat, once, request, until

SYSTEM = "You are one of many agents and follow all of these rules. " * 60
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks. " * 80, "parameters": {}}}]


def first(number: int, system: str = SYSTEM, **fields: Any) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"I am number {number}"}]
    return request(chat(**{"messages": messages, "max_tokens": 2, **fields}), f"x-session-id: {system[:9]}{number}")


async def sessions(running: Running, count: int, *lines: str, **fields: Any) -> None:
    for number in range(count):
        assert (await once(running.port, first(number, **fields))).status == 200


async def joined(running: Running, engine: Engine) -> None:
    running.add_worker(WorkerSpec(engine.url))


def prompts(engine: Engine) -> int:
    return int(engine.stats()["requests"])


async def test_a_newcomer_has_the_shared_start_before_its_first_session_comes(
    gateway: Begin, engine: StartEngine
) -> None:
    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware")
    await sessions(running, 4, tools=TOOLS)
    await joined(running, new)
    await until(lambda: prompts(new) == 1 and not new.core.busy)
    before = new.stats()
    # Straight to it: what it computed is the very start that sessions have.
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "I am another"}]
    body = chat(messages=messages, tools=TOOLS, max_tokens=2)
    usage = (await once(new.options.port or int(new.url.rsplit(":", 1)[1]), request(body))).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    assert before["cached_tokens"] == 0
    # And the gateway knows.
    target = next(t for t in running.fleet.targets.values() if t.worker.url == new.url)
    await until(lambda: running.index.radix.pages(target.id) > 5)


async def test_an_engine_that_started_anew_gets_the_most_wanted_ones(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.warming.starts = 2

    old = await engine()
    running = await gateway(old, policy="cache_aware", change=change)
    for system, count in (("A" + SYSTEM, 6), ("B" + SYSTEM, 2), ("C" + SYSTEM, 4), ("D" + SYSTEM, 1)):
        await sessions(running, count, system=system)
    before = prompts(old)
    await old.restart()
    await until(lambda: prompts(old) == before + 2, 30)
    await asyncio.sleep(0.2)
    assert prompts(old) == before + 2
    port = int(old.url.rsplit(":", 1)[1])
    for system, found in (("A", True), ("C", True), ("B", False)):
        told = (await once(port, first(99, system + SYSTEM))).json()["usage"]
        assert (told["prompt_tokens_details"]["cached_tokens"] > 0.8 * told["prompt_tokens"]) is found


async def test_no_start_that_only_one_session_had_is_sent(gateway: Begin, engine: StartEngine) -> None:
    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware")
    await sessions(running, 1)
    for _ in range(3):
        # Further turns of it are no further sessions.
        await once(running.port, first(0))
    await joined(running, new)
    await until(lambda: len(running.fleet.targets) == 2)
    await asyncio.sleep(0.3)
    assert prompts(new) == 0


async def test_it_can_be_turned_off(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.warming.starts = 0

    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware", change=change)
    await sessions(running, 4)
    await joined(running, new)
    await until(lambda: len(running.fleet.targets) == 2)
    await asyncio.sleep(0.3)
    assert prompts(new) == 0


async def test_a_busy_newcomer_is_left_alone(gateway: Begin, engine: StartEngine) -> None:
    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware")
    await sessions(running, 4)
    running.warming.seconds = 0.3
    charges = []

    def began(target: int) -> None:
        charges.append(running.fleet.dispatch(running.fleet.targets[target], 100_000, 0, True))
        running.warming.empty(target)

    running.fleet.began = began
    await joined(running, new)
    await until(lambda: charges)
    await asyncio.sleep(0.6)
    assert prompts(new) == 0
    for charge in charges:
        running.fleet.release(charge)


async def test_an_endpoint_of_an_unknown_kind_is_sent_nothing_by_itself(
    gateway: Begin, scripted: StartScripted, engine: StartEngine
) -> None:
    old, other = await engine(), await scripted()
    running = await gateway(old, policy="cache_aware")
    await sessions(running, 4)
    running.add_worker(WorkerSpec(other.url, engine="generic"))
    await until(lambda: len(running.fleet.targets) == 2)
    await asyncio.sleep(0.3)
    assert other.seen == []


async def test_an_isolated_tenant_s_start_is_warmed_under_its_own_salt(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.tenants = [TenantConfig("a", [Secret("key-a")], isolation="isolated")]

    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware", change=change)
    for number in range(3):
        sent = first(number).replace(b"\r\nHost", b"\r\nAuthorization: Bearer key-a\r\nHost", 1)
        assert (await once(running.port, sent)).status == 200
    await joined(running, new)
    await until(lambda: prompts(new) == 1 and not new.core.busy)
    port = int(new.url.rsplit(":", 1)[1])
    told = (await once(port, first(7))).json()["usage"]["prompt_tokens_details"]
    assert told["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (
            b"/v1/chat/completions",
            {"messages": [{"role": "system", "content": "s", "x": 1}, {"role": "user", "content": "u"}], "n": 4},
            {
                "messages": [{"role": "system", "content": "s", "x": 1}, {"role": "user", "content": "."}],
                "max_tokens": 1,
            },
        ),
        (
            b"/v1/messages",
            {"system": [{"type": "text", "text": "s"}], "messages": [{"role": "user", "content": "u"}], "tools": []},
            {
                "system": [{"type": "text", "text": "s"}],
                "tools": [],
                "messages": [{"role": "user", "content": "."}],
                "max_tokens": 1,
            },
        ),
        (
            b"/v1/responses",
            {"instructions": "i", "input": "u", "tools": [], "store": True},
            {"instructions": "i", "tools": [], "input": ".", "max_output_tokens": 1, "store": False},
        ),
    ],
)
def test_a_warming_request_has_the_start_and_one_token(path: bytes, body: dict[str, Any], wanted: Any) -> None:
    made = warming_body(path, json.dumps({"model": "alias", "stream": True, **body}).encode(), "real", None)
    assert made is not None
    assert json.loads(made) == {"model": "real", "stream": False, **wanted}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 3}', b'{"messages": [3]}', b"\xff"])
def test_what_is_not_understood_is_not_warmed(body: bytes) -> None:
    assert warming_body(b"/v1/chat/completions", body, "m", None) is None
    assert warming_body(b"/generate", b"{}", "m", None) is None


async def test_the_store_of_starts_is_bounded(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware")
    roots = running.gateway.roots
    assert isinstance(roots, Roots)
    for number in range(MOST + 50):
        await once(running.port, first(0, f"{number:09}" + SYSTEM[:1200]))
    assert len(roots) == MOST
    assert roots.bytes == 0


async def test_a_start_that_engines_refuse_is_nobody_s(gateway: Begin, engine: StartEngine) -> None:
    old, new = [await engine() for _ in range(2)]
    running = await gateway(old, policy="cache_aware")
    for number in range(4):
        assert (await once(running.port, first(number, "X" + SYSTEM, max_tokens=-1))).status == 400
    await sessions(running, 2)
    await joined(running, new)
    await until(lambda: prompts(new) == 1)
    await asyncio.sleep(0.2)
    assert prompts(new) == 1
    assert len(running.gateway.roots or ()) == 1
