"""What engines are told of sessions: that they exist, and that they ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.run import Running
from gateway.slots import Slots
from gateway.workers import State
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import Raw, chat, once, request, tell, until


def named(name: str, *lines: str, **fields: Any) -> bytes:
    return request(chat(max_tokens=2, **fields), f"x-session-id: {name}", *lines)


async def ask_all(running: Running, requests: list[bytes]) -> None:
    """All of them over a few connections; each must succeed."""

    async def some(part: list[bytes]) -> None:
        async with await Raw.connect(running.port) as client:
            for each in part:
                assert (await client.ask(each)).status == 200

    await asyncio.gather(*(some(requests[at::8]) for at in range(8)))


def references(engines: list[Engine]) -> int:
    return sum(engine.stats()["sessions"] for engine in engines)


async def fleet(engine: StartEngine, count: int = 4) -> list[Engine]:
    return [await engine("sglang", session_refs=True, time_scale=0.0) for _ in range(count)]


async def test_after_a_thousand_sessions_ended_in_every_way_no_engine_holds_a_reference(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = await fleet(engine)
    running = await gateway(*engines, policy="cache_aware")
    await ask_all(running, [named(f"s{number}") for number in range(1000)])
    assert references(engines) == 1000
    # A quarter each: ended by its owner, final, moved and then idle, and still there when the gateway stops.
    async with await Raw.connect(running.port) as client:
        for number in range(250):
            answer = await client.ask(request(None, method="DELETE", path=f"/v1/sessions/s{number}"))
            assert answer.status == 200
            assert answer.json() == {"id": f"s{number}", "object": "session.deleted", "deleted": True}
    await ask_all(running, [named(f"s{number}", "x-session-final: 1") for number in range(250, 500)])
    await until(lambda: references(engines) == 500)
    names = [target.name for target in running.fleet.targets.values()]
    for session in list(running.sessions.all())[:250]:
        home = running.fleet.targets[session.home].name if session.home is not None else ""
        to = names[(names.index(home) + 1) % 4]
        status, told = await tell(running, "POST", f"/sessions/{session.key.hex()}/move", {"to": to})
        assert (status, told["home"]) == (200, to)
    await until(lambda: references(engines) == 250)
    moved = list(running.sessions.all())[:250]
    for session in moved:
        session.used -= 2 * running.sessions.idle
    running.gateway.sweep()
    assert len(running.sessions) == 250
    await running.stop()
    assert references(engines) == 0
    assert running.lifecycle.lost == 0


async def test_a_session_that_moves_while_it_runs_is_closed_where_it_was_when_its_turn_ends(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.2) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    await once(running.port, named("s"))
    (session,) = running.sessions.all()
    first = session.home
    assert first is not None
    slow = next(each for each in engines if each.url == running.fleet.targets[first].worker.url)
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=400, ignore_eos=True), "x-session-id: s"))
        await until(lambda: session.running == 1 and session.told)
        other = next(target for target in running.fleet.targets.values() if target.id != first)
        await tell(running, "POST", f"/sessions/{session.key.hex()}/move", {"to": other.name})
        await asyncio.sleep(0.05)
        assert slow.stats()["sessions"] == 1
        client.vanish()
    await until(lambda: references(engines) == 0)


async def test_an_engine_that_is_down_hears_of_the_end_when_it_is_back(
    gateway: Begin, scripted: StartScripted, engine: StartEngine
) -> None:
    engines = await fleet(engine, 1)
    running = await gateway(*engines, policy="cache_aware")
    await once(running.port, named("s"))
    (worker,) = running.fleet.workers.values()
    running.fleet.set_state(worker, State.DOWN, "test")
    (session,) = running.sessions.all()
    running.sessions.drop(session)
    await asyncio.sleep(0.05)
    assert references(engines) == 1
    await until(lambda: references(engines) == 0)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({}, True),
        ({"session_id": "theirs"}, True),
        ({"session_params": {"id": "theirs"}}, False),
    ],
)
async def test_the_engine_is_told_an_id_of_ours_and_never_the_client_s(
    gateway: Begin, engine: StartEngine, sent: dict[str, Any], told: bool
) -> None:
    engines = await fleet(engine, 1)
    running = await gateway(*engines, policy="cache_aware")
    await once(running.port, named("mine", **sent))
    (session,) = running.sessions.all()
    assert engines[0].core.sessions == ({session.key.hex()} if told else set())


async def test_an_engine_that_keeps_no_references_gets_the_client_s_own_bytes(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted()
    running = await gateway(worker, policy="cache_aware")
    sent = named("s", session_id="theirs")
    await once(running.port, sent)
    assert worker.one.body == sent.partition(b"\r\n\r\n")[2]


def _keyed(config: Config) -> None:
    config.tenants = [TenantConfig("a", [Secret("key-a")]), TenantConfig("b", [Secret("key-b")])]


async def test_only_its_owner_can_end_a_session(gateway: Begin, engine: StartEngine) -> None:
    engines = await fleet(engine, 1)
    running = await gateway(*engines, policy="cache_aware", change=_keyed)
    await once(running.port, named("s", "authorization: Bearer key-a"))
    (session,) = running.sessions.all()
    for name in ("s", session.key.hex()):
        path = f"/v1/sessions/{name}"
        assert (
            await once(running.port, request(None, "authorization: Bearer key-b", method="DELETE", path=path))
        ).status == 404
        assert (await once(running.port, request(None, method="DELETE", path=path))).status == 401
    assert len(running.sessions) == 1
    ended = request(None, "authorization: Bearer key-a", method="DELETE", path=f"/v1/sessions/{session.key.hex()}")
    assert (await once(running.port, ended)).status == 200
    assert (await once(running.port, ended)).status == 404
    assert len(running.sessions) == 0


@pytest.mark.parametrize(
    "path", ["/v1/sessions/", "/v1/sessions/" + "x" * 300, "/v1/sessions/a%00b", "/v1/sessions/a/b"]
)
async def test_a_name_that_is_none_is_not_found(gateway: Begin, engine: StartEngine, path: str) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    assert (await once(running.port, request(None, method="DELETE", path=path))).status == 404
    wrong = await once(running.port, request(None, path=path))
    assert (wrong.status, wrong.one("allow")) == (405, "DELETE")


async def test_a_session_that_ends_while_it_runs_is_answered_to_its_end(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.2)]
    running = await gateway(*engines, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=40, ignore_eos=True), "x-session-id: s"))
        await until(lambda: references(engines) == 1)
        assert (await once(running.port, request(None, method="DELETE", path="/v1/sessions/s"))).status == 200
        answer = await client.response()
    assert b"[DONE]" in answer.body
    await until(lambda: references(engines) == 0)
    assert len(running.sessions) == 0


async def test_sessions_of_llama_cpp_find_their_own_slot(gateway: Begin, engine: StartEngine) -> None:
    """Under one long system prompt every slot looks alike to the server."""
    server = await engine("llamacpp", max_running=4, kv_tokens=40_000)
    running = await gateway(WorkerConfig(server.url, slots=True), policy="cache_aware")
    system = {"role": "system", "content": "You are one of many. " * 200}
    said: dict[str, list[dict[str, Any]]] = {f"s{number}": [system] for number in range(4)}
    before: dict[str, int] = {}
    for turn in range(4):
        for name, messages in said.items():
            messages.append(
                {"role": "user", "content": f"{name} asks for the {turn}th time: " + f"{name} {turn} " * 40}
            )
            answer = await once(running.port, request(chat(messages=messages, max_tokens=8), f"x-session-id: {name}"))
            usage = answer.json()["usage"]
            messages.append(answer.json()["choices"][0]["message"])
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] > before[name] - 20
            before[name] = usage["prompt_tokens"]
    target = next(iter(running.fleet.targets.values()))
    assert target.slots is not None
    assert len(target.slots._of) == 4


def test_slots_are_kept_by_their_sessions_and_given_away_by_age() -> None:
    slots = Slots(2)
    first, second = slots.take(b"a"), slots.take(b"b")
    assert {first, second} == {0, 1}
    assert slots.take(b"c") is None
    assert slots.take(b"a") is None
    assert first is not None and second is not None
    slots.done(second)
    slots.done(first)
    assert slots.take(b"a") == first
    assert slots.take(b"c") == second
    slots.done(first)
    slots.done(second)
    assert slots.take(b"b") == first


@pytest.mark.parametrize(
    ("lines", "fields", "label"),
    [
        (["x-task-id: t"], {}, "key"),
        (["x-session-id: theirs"], {}, "theirs"),
        (["x-task-id: t"], {"session_id": "theirs"}, "theirs"),
    ],
)
async def test_vllm_labels_its_events_with_the_session(
    gateway: Begin, engine: StartEngine, lines: list[str], fields: dict[str, Any], label: str
) -> None:
    def change(config: Config) -> None:
        config.sessions.labels = True

    server = await engine("vllm")
    labels: list[str] = []
    inner = server.core.begin

    def begin(name: str, prompts: Any, replies: Any, traits: Any, body: Any = None) -> Any:
        labels.append(traits.session)
        return inner(name, prompts, replies, traits, body)

    server.core.begin = begin  # type: ignore[method-assign]
    running = await gateway(server, policy="cache_aware", change=change)
    await once(running.port, request(chat(max_tokens=2, **fields), *lines))
    (session,) = running.sessions.all()
    assert labels == [session.key.hex() if label == "key" else label]


async def agents(running: Running, names: list[str]) -> None:
    """A turn of each."""
    for name in names:
        await once(running.port, named(name, messages=[{"role": "user", "content": f"{name} " * 150}]))


async def test_an_engine_is_asked_to_keep_what_would_not_survive_and_nothing_else(
    gateway: Begin, engine: StartEngine
) -> None:
    server = await engine("sglang", eviction="priority", kv_tokens=4_000, time_scale=0.0)
    asked: list[int] = []
    inner = server.core.begin

    def begin(name: str, prompts: Any, replies: Any, traits: Any, body: Any = None) -> Any:
        asked.append(traits.priority)
        return inner(name, prompts, replies, traits, body)

    server.core.begin = begin  # type: ignore[method-assign]
    running = await gateway(server, policy="cache_aware")
    names = [f"s{number}" for number in range(12)]
    await agents(running, names)
    # Nothing is known of their returns yet.
    assert set(asked) == {0}
    for _ in range(2):
        asked.clear()
        for session in running.sessions.all():
            # As if its tool had run for a minute.
            session.ended -= 60.0
        await agents(running, names)
    assert set(asked) == {1}
    # A client's own priority is its own business.
    asked.clear()
    await once(running.port, named("s0", priority=-3))
    assert asked == [-3]


async def test_both_engines_of_a_pair_hear_of_sessions_and_of_their_ends(gateway: Begin, engine: StartEngine) -> None:
    prefill = [await engine("sglang", role="prefill", session_refs=True) for _ in range(2)]
    decode = [await engine("sglang", role="decode", session_refs=True, decode_radix=True) for _ in range(2)]
    engines = prefill + decode
    running = await gateway(*engines, policy="cache_aware")
    for turn in range(1, 4):
        for number in range(8):
            messages = [{"role": "user", "content": f"{number} " * 400 * turn}]
            assert (await once(running.port, named(f"s{number}", messages=messages))).status == 200
    assert sum(each.stats()["sessions"] for each in prefill) == 8
    assert sum(each.stats()["sessions"] for each in decode) == 8
    for number in range(4):
        await once(running.port, request(None, method="DELETE", path=f"/v1/sessions/s{number}"))
    await until(lambda: references(engines) == 8)
    worker = next(worker for worker in running.fleet.workers.values() if worker.url == decode[0].url)
    running.moving.drain(worker)
    await until(lambda: decode[0].stats()["sessions"] == 0)
    await running.stop()
    assert references(engines) == 0


async def test_an_empty_body_stays_one_that_the_engine_can_judge(gateway: Begin, engine: StartEngine) -> None:
    engines = await fleet(engine, 1)
    running = await gateway(*engines, policy="cache_aware")
    for body in (b"{}", b" { } "):
        answer = await once(running.port, request(body, "x-session-id: s"))
        assert answer.status == 400
        assert "messages" in answer.json()["message"], answer.body


# -- ends and the living -----------------------------------------------------------------------------------------------


async def test_an_end_does_not_reach_a_session_that_took_its_name(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.2)]
    running = await gateway(*engines, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=60, ignore_eos=True), "x-session-id: s"))
        await until(lambda: references(engines) == 1)
        assert (await once(running.port, request(None, method="DELETE", path="/v1/sessions/s"))).status == 200
        # Another begins while the old one's last turn still runs.
        assert (await once(running.port, named("s"))).status == 200
        assert b"[DONE]" in (await client.response()).body
    await until(lambda: not len(running.lifecycle))
    await asyncio.sleep(0.1)
    assert references(engines) == 1


async def test_an_engine_that_does_not_answer_keeps_no_other_from_hearing(gateway: Begin, engine: StartEngine) -> None:
    engines = await fleet(engine, 2)
    running = await gateway(*engines, policy="cache_aware")
    await ask_all(running, [named(f"s{number}") for number in range(60)])
    hung = engines[0].url
    post = running.lifecycle._post

    async def slow(worker: Any, path: str, method: str, body: bytes) -> Any:
        if worker.url == hung:
            await asyncio.sleep(60)
        return await post(worker, path, method, body)

    running.lifecycle._post = slow
    for session in list(running.sessions.all()):
        running.sessions.drop(session)
    await until(lambda: engines[1].stats()["sessions"] == 0, 3)
    assert engines[0].stats()["sessions"] > 0
    running.lifecycle._post = post


async def test_a_move_that_came_to_nothing_leaves_the_reference_where_it_was(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = await fleet(engine, 2)
    running = await gateway(*engines, policy="cache_aware")
    await once(running.port, named("s"))
    (session,) = running.sessions.all()
    home = session.home
    other = next(target.id for target in running.fleet.targets.values() if target.id != home)
    assert home is not None
    running.sessions.bind(session, other, "moved")
    running.sessions.bind(session, home, "undone")
    await asyncio.sleep(0.1)
    assert references(engines) == 1
    assert session.told == {running.fleet.targets[home].worker.id: 0}


async def test_a_session_is_ended_by_a_token_that_another_gateway_made(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.sessions.token_key = Secret("the same everywhere")

    engines = await fleet(engine, 2)
    one, two = [await gateway(*engines, policy="cache_aware", change=change) for _ in range(2)]
    token = (await once(one.port, request(chat(max_tokens=2)))).one("x-warmroute-session")
    other = request(
        chat(messages=[{"role": "user", "content": "other"}], max_tokens=2), f"x-warmroute-session: {token}"
    )
    assert (await once(two.port, other)).one("x-warmroute-session-source") == "sticky"
    assert (await once(two.port, request(None, method="DELETE", path=f"/v1/sessions/{token}"))).status == 200
    assert len(two.sessions) == 0


async def test_a_slot_is_not_named_while_the_server_chooses_for_others(gateway: Begin, engine: StartEngine) -> None:
    """A request of no session may be in any slot: naming one could mean waiting for it beside a free one."""
    server = await engine("llamacpp", max_running=2, kv_tokens=20_000, time_scale=0.2)
    running = await gateway(WorkerConfig(server.url, slots=True), policy="cache_aware")
    await once(running.port, named("b"))
    (target,) = running.fleet.targets.values()
    assert target.slots is not None
    async with await Raw.connect(running.port) as client:
        prompt = {"model": "sim", "prompt": "x", "max_tokens": 2000, "stream": True}
        await client.send(request(prompt, path="/v1/completions"))
        await until(lambda: target.running == 1)
        answer = await asyncio.wait_for(once(running.port, named("b")), 5)
        assert answer.status == 200
        assert target.running == 1
        client.vanish()
    await until(lambda: not target.running)


async def test_our_cookie_stops_here_and_the_others_go_on(gateway: Begin, scripted: StartScripted) -> None:
    def change(config: Config) -> None:
        config.sessions.cookie = True

    worker = await scripted()
    running = await gateway(worker, policy="cache_aware", change=change)
    first = await once(running.port, request(chat()))
    token = first.one("x-warmroute-session")
    assert first.one("set-cookie") == f"x-warmroute-session={token}; Path=/; HttpOnly; SameSite=Lax"
    await once(running.port, request(chat(), f"cookie: a=1; x-warmroute-session={token}; b=2"))
    assert worker.seen[-1].all("cookie") == ["a=1; b=2"]
    await once(running.port, request(chat(), f"cookie: x-warmroute-session={token}"))
    assert worker.seen[-1].all("cookie") == []
