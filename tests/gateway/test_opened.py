"""Sessions that clients open on SGLang: bound to one target, one turn at a time, and never two at once after a client left."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config, TenantConfig
from gateway.config_reader import Secret
from gateway.opened import QUEUE
from gateway.run import Running
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, Response, once, request, until


def allowed(config: Config) -> None:
    config.sessions.streaming = True


def opening(name: str | None = None, *lines: str, **fields: Any) -> bytes:
    body = {"streaming": True, **({} if name is None else {"session_id": name}), **fields}
    return request(body, *lines, path="/open_session")


def closing(name: str, *lines: str) -> bytes:
    return request({"session_id": name}, *lines, path="/close_session")


def turn(name: Any, ids: list[int], *lines: str, most: int = 4, **fields: Any) -> bytes:
    params = {"max_new_tokens": most, "ignore_eos": True}
    body = {"input_ids": ids, "session_params": {"id": name}, "sampling_params": params, **fields}
    return request(body, *lines, path="/generate")


async def start(gateway: Begin, engine: StartEngine, count: int = 3, **options: Any) -> tuple[Running, list[Engine]]:
    engines = [await engine("sglang", streaming_sessions=True, **options) for _ in range(count)]
    return await gateway(*engines, policy="round_robin", change=allowed), engines


def open_on(engines: list[Engine]) -> list[int]:
    return [engine.stats()["opened_sessions"] for engine in engines]


async def say(running: Running, sent: bytes) -> Response:
    return await once(running.port, sent)


async def test_all_turns_of_a_session_go_where_it_was_opened_and_say_only_what_is_new(
    gateway: Begin, engine: StartEngine
) -> None:
    running, engines = await start(gateway, engine)
    for number in range(9):
        answer = await say(running, opening(f"s{number}"))
        assert (answer.status, answer.json()) == (200, f"s{number}")
    assert open_on(engines) == [3, 3, 3]
    for number in range(9):
        workers, prompts = set(), []
        for step in range(4):
            answer = await say(running, turn(f"s{number}", [number, step, 7, 8, 9]))
            assert answer.status == 200
            workers.add(answer.one("x-warmroute-worker"))
            prompts.append(answer.json()["meta_info"]["prompt_tokens"])
        assert len(workers) == 1
        # The engine remembers what was said, and what it answered.
        assert prompts == [5, 14, 23, 32]
    for number in range(9):
        assert (await say(running, closing(f"s{number}"))).status == 200
    assert open_on(engines) == [0, 0, 0]
    assert (await say(running, turn("s1", [1]))).status == 400


async def test_a_second_turn_waits_for_the_first(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await start(gateway, engine, 1)
    await say(running, opening("s"))
    answers = await asyncio.gather(*(say(running, turn("s", [number] * 10, most=20)) for number in range(8)))
    assert [answer.status for answer in answers] == [200] * 8
    # Each went on from all that came before it, in the order in which they came.
    assert sorted(answer.json()["meta_info"]["prompt_tokens"] for answer in answers) == [
        10 + 30 * number for number in range(8)
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_after_a_client_that_left_the_next_turn_is_not_refused(
    gateway: Begin, engine: StartEngine, stream: bool
) -> None:
    running, engines = await start(gateway, engine, 1, time_scale=0.2)
    await say(running, opening("s"))
    assert (await say(running, turn("s", [1, 2, 3]))).status == 200
    for _ in range(10):
        async with await Raw.connect(running.port) as client:
            await client.send(turn("s", [4, 5], most=5000, stream=stream))
            await until(lambda: engines[0].core.busy)
            client.vanish()
        answer = await say(running, turn("s", [6], most=1))
        assert answer.status == 200, answer.body
    # What aborted turns said was forgotten: 3 + 4 generated, then 10 times 1 + 1.
    assert (await say(running, turn("s", [7], most=1))).json()["meta_info"]["prompt_tokens"] == 28
    assert engines[0].stats()["aborts"] == 10


async def test_too_many_that_wait_are_refused(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await start(gateway, engine, 1, time_scale=1.0)
    await say(running, opening("s"))
    clients = [await Raw.connect(running.port) for _ in range(QUEUE + 1)]
    for client in clients:
        await client.send(turn("s", [1], most=2000))
    opened = running.gateway.opened
    assert opened is not None
    await until(lambda: len(opened.of("anonymous", "s").waiting) == QUEUE)
    refused = await say(running, turn("s", [1]))
    assert refused.status == 503
    assert refused.one("retry-after")
    # One that waits and leaves costs nothing; closing ends the wait of the others.
    clients[3].vanish()
    await until(lambda: len(opened.of("anonymous", "s").waiting) == QUEUE - 1)
    assert (await say(running, closing("s"))).status == 200
    for number, client in enumerate(clients):
        if number not in (0, 3):
            assert (await client.response()).status == 400
        client.vanish()


def _keyed(config: Config) -> None:
    allowed(config)
    config.tenants = [TenantConfig("a", [Secret("key-a")]), TenantConfig("b", [Secret("key-b")])]


async def test_a_session_is_its_tenant_s_alone(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine("sglang", streaming_sessions=True)]
    running = await gateway(*engines, policy="round_robin", change=_keyed)
    ours, theirs = "authorization: Bearer key-a", "authorization: Bearer key-b"
    assert (await say(running, opening("s", ours))).status == 200
    assert (await say(running, turn("s", [1], theirs))).status == 400
    # On every path, and whatever its engine calls it.
    body = {"model": "sim", "prompt": [1], "session_params": {"id": "s"}}
    assert (await say(running, request(body, theirs, path="/v1/completions"))).status == 400
    own = running.gateway.opened
    assert own is not None
    entry = own.of("a", "s")
    assert entry is not None
    assert (await say(running, turn(entry.alias, [1], theirs))).status == 400
    # A name is nobody's for ever.
    assert (await say(running, opening("s", theirs))).json() == "s"
    assert (await say(running, turn("s", [1, 2], theirs))).json()["meta_info"]["prompt_tokens"] == 2
    assert (await say(running, closing("s", theirs))).status == 200
    assert (await say(running, closing("s", theirs))).status == 404
    assert (await say(running, closing("s"))).status == 401
    assert (await say(running, turn("s", [1], ours))).status == 200


@pytest.mark.parametrize(
    "sent",
    [
        request(b"{", path="/open_session"),
        request(b"[]", path="/open_session"),
        opening(""),
        opening("x" * 300),
        opening("a\nb"),
        request({"session_id": 5}, path="/open_session"),
        opening("s", timeout=-1),
        opening("s", timeout="soon"),
        turn("nobody's", [1]),
        turn(5, [1]),
        turn(None, [1]),
    ],
)
async def test_what_is_wrong_is_said(gateway: Begin, engine: StartEngine, sent: bytes) -> None:
    running, engines = await start(gateway, engine, 1)
    answer = await say(running, sent)
    assert answer.status == 400
    assert answer.json()["error"]["message"]
    assert open_on(engines) == [0]


async def test_without_an_engine_that_takes_them_it_is_said_which_one_would(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine("sglang"), await engine("vllm"), policy="round_robin", change=allowed)
    answer = await say(running, opening("s"))
    assert answer.status == 503
    assert "--enable-streaming-session" in answer.json()["error"]["message"]


async def test_without_the_option_there_is_no_such_path(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine("sglang", streaming_sessions=True), policy="round_robin")
    assert (await say(running, opening("s"))).status == 404


async def test_a_session_whose_engine_is_gone_says_so(gateway: Begin, engine: StartEngine) -> None:
    running, engines = await start(gateway, engine, 2)
    for name in ("a", "b"):
        await say(running, opening(name))
    await engines[0].kill()
    statuses = [(await say(running, turn(name, [1]))).status for name in ("a", "b")]
    assert sorted(statuses) == [200, 502] or sorted(statuses) == [200, 503]
    lost = ("a", "b")[[status == 200 for status in statuses].index(False)]
    await until(lambda: any(worker.state == "down" for worker in running.fleet.workers.values()))
    answer = await say(running, turn(lost, [1]))
    assert answer.status == 503
    assert "open another one" in answer.json()["error"]["message"]


async def test_idle_sessions_are_closed_and_those_of_a_gateway_that_stops(gateway: Begin, engine: StartEngine) -> None:
    running, engines = await start(gateway, engine, 1)
    for name in ("a", "b", "c"):
        await say(running, opening(name, **({"timeout": 300} if name == "c" else {})))
    opened = running.gateway.opened
    assert opened is not None
    found = {name: opened.of("anonymous", name) for name in "abc"}
    later = running.gateway.clock() + running.sessions.idle + 10
    assert found["b"] is not None
    found["b"].used = later
    opened.sweep(later)
    assert [name for name in "abc" if opened.of("anonymous", name) is not None] == ["b"]
    # The engine closes the one that it was given a timeout for.
    await until(lambda: open_on(engines) == [2])
    await running.stop()
    assert open_on(engines) == [1]


async def test_a_session_is_of_a_model_that_its_tenant_may_use(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        allowed(config)
        config.tenants = [TenantConfig("a", [Secret("key-a")], models=["cheap"]), TenantConfig("b", [Secret("key-b")])]

    engines = [await engine("sglang", streaming_sessions=True, models=[name]) for name in ("cheap", "secret")]
    running = await gateway(*engines, policy="round_robin", change=change)
    ours, theirs = "authorization: Bearer key-a", "authorization: Bearer key-b"
    for number in range(4):
        assert (await say(running, opening(f"s{number}", ours))).status == 200
        answer = await say(running, turn(f"s{number}", [1], ours))
        assert answer.status == 200
        assert answer.one("x-warmroute-worker") in engines[0].url
    assert open_on(engines) == [4, 0]
    assert (await say(running, opening("x", ours, model="secret"))).status == 403
    assert (await say(running, opening("x", theirs, model="secret"))).status == 200
    assert open_on(engines) == [4, 1]
    # A turn cannot be of another model than its session.
    assert (await say(running, turn("x", [1], theirs, model="cheap"))).status == 400
    assert (await say(running, turn("x", [1], theirs, model="secret"))).status == 200
