"""Workers that drain: nothing new goes there, what runs ends as it would, and sessions find other homes, the cheapest first."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.config import Config, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.run import Running
from gateway.sessions import Session
from gateway.workers import Worker
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, Response, chat, once, request, tell, until

WORDS = "one of many words to be read again "


def body(size: int = 1, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": WORDS * size}], **{"max_tokens": 1, **fields})


async def ask(running: Running, name: str, size: int = 1, **fields: Any) -> Response:
    answer = await once(running.port, request(body(size, **fields), f"x-session-id: {name}"))
    assert answer.status == 200, answer.body
    return answer


async def where(running: Running, name: str, size: int = 1) -> str:
    return (await ask(running, name, size)).one("x-warmroute-worker")


async def two(gateway: Begin, engine: StartEngine, **options: Any) -> tuple[Running, list[Engine]]:
    options.setdefault("time_scale", 0.0)
    engines = [await engine(**options) for _ in range(2)]
    return await gateway(*engines, policy="cache_aware"), engines


async def at_one(running: Running, sizes: dict[str, int]) -> Worker:
    """Sessions of these names and sizes, all at home on one worker, which is returned."""
    for name, size in sizes.items():
        await ask(running, name, size)
    worker = next(iter(running.fleet.workers.values()))
    for session in running.sessions.all():
        await tell(running, "POST", f"/sessions/{session.key.hex()}/move", {"to": worker.targets[0].name})
    assert worker.targets[0].homes == len(sizes)
    return worker


def named(running: Running, name: str) -> Session:
    session = running.sessions.named(name.encode(), "anonymous", "sim")
    assert session is not None
    return session


def at_home(running: Running, worker: Worker, names: list[str]) -> list[str]:
    ids = {target.id for target in worker.targets}
    return [name for name in names if named(running, name).home in ids]


async def drain(running: Running, worker: Worker, over: object = "") -> dict[str, Any]:
    status, told = await tell(running, "POST", f"/workers/{worker.id}/drain" + (f"?over={over}" if over != "" else ""))
    assert (status, told["state"]) == (202, "draining")
    return dict(told["drain"])


async def progress(running: Running, worker: Worker) -> Any:
    status, told = await tell(running, "GET", f"/workers/{worker.id}")
    assert status == 200
    return told["drain"]


async def resume(running: Running, worker: Worker) -> None:
    status, told = await tell(running, "PATCH", f"/workers/{worker.id}", {"state": "ready"})
    assert (status, told["state"], told["drain"]) == (200, "ready", None)


# -- what an operator sees ----------------------------------------------------------------------------------------------


async def test_at_once_all_sessions_are_elsewhere_and_nothing_new_comes(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(12)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    assert await progress(running, worker) is None
    told = await drain(running, worker)
    assert told["seconds"] < 5
    del told["seconds"]
    assert told == {"sessions": 12, "moved": 12, "ended": 0, "left": 0, "running": 0, "done": True, "stuck": None}
    assert [target.homes for each in running.fleet.workers.values() for target in each.targets] == [0, 12]
    workers = {await where(running, name, 2) for name in [*names, "new", "newer"]}
    assert worker.targets[0].name not in workers
    assert all(session.turns == 2 for session in running.sessions.all() if session.key != b"" and session.turns > 1)


async def test_over_some_seconds_the_cheapest_move_first_and_the_others_go_on_at_home(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await two(gateway, engine)
    sizes = {f"s{number}": 1 + 37 * number % 24 * 8 for number in range(24)}
    worker = await at_one(running, sizes)
    order = sorted(sizes, key=lambda name: named(running, name).prompt_tokens or 0)
    home = worker.targets[0].name
    began = time.monotonic()
    told = await drain(running, worker, 3)
    assert told["sessions"] == 24
    seen = {len(at_home(running, worker, order))}
    both = 0
    while at_home(running, worker, order):
        left = at_home(running, worker, order)
        assert left == order[len(order) - len(left) :], "the cheapest to compute again went first"
        told = await progress(running, worker)
        assert told["moved"] + told["left"] == 24
        if 0 < len(left) < 24 and both < 6:
            both += 1
            assert await where(running, left[-1], sizes[left[-1]]) == home, "its turn to move did not come yet"
            gone = order[0]
            assert await where(running, gone, sizes[gone]) != home
            assert await where(running, f"new{both}") != home
        seen.add(len(left))
        assert time.monotonic() - began < 8
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    assert 1.5 < took < 5
    assert len(seen) >= 5, "they went one by one"
    await until(lambda: not worker.lingers)
    told = await progress(running, worker)
    assert (told["moved"], told["left"], told["done"]) == (24, 0, True)
    assert await where(running, order[-1], sizes[order[-1]]) != home


@pytest.mark.parametrize(
    "over", ["-1", "abc", "1e3", "nan", "inf", "", "1.2345", "100000", "0x10", "1,5", "%2b1", "1 "]
)
async def test_what_is_no_number_of_seconds_is_refused_and_drains_nothing(
    gateway: Begin, engine: StartEngine, over: str
) -> None:
    running, _ = await two(gateway, engine)
    worker = next(iter(running.fleet.workers.values()))
    status, told = await tell(running, "POST", f"/workers/{worker.id}/drain?over={over}")
    assert status == 400
    assert "over" in told["error"]["message"]
    assert worker.state.value == "ready"
    assert await progress(running, worker) is None


async def test_a_worker_that_is_not_there_cannot_be_drained(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    for id_ in ("nobody", "127.0.0.1:1", "%00", "a%2Fb"):
        status, told = await tell(running, "POST", f"/workers/{id_}/drain")
        assert (status, told["error"]["code"]) == (404, 404)


async def test_draining_again_changes_only_the_time(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(10)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    assert (await drain(running, worker, 600))["left"] >= 9
    await asyncio.sleep(0.7)
    told = await drain(running, worker, 500)
    assert (told["sessions"], told["left"] >= 7, told["seconds"] > 0.5) == (10, True, True)
    told = await drain(running, worker)
    assert (told["sessions"], told["moved"], told["left"], told["done"]) == (10, 10, 0, True)
    assert not at_home(running, worker, names)


# -- what runs ----------------------------------------------------------------------------------------------------------


async def test_a_running_turn_ends_as_it_would_and_its_session_moves_after_it(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await two(gateway, engine, time_scale=0.3)
    names = ["busy", *(f"s{number}" for number in range(4))]
    worker = await at_one(running, dict.fromkeys(names, 2))
    async with await Raw.connect(running.port) as client:
        stream = body(2, stream=True, max_tokens=150, ignore_eos=True)
        await client.send(request(stream, "x-session-id: busy"))
        head = await client.head()
        assert (dict(head.fields)["x-warmroute-worker"], worker.running) == (worker.targets[0].name, 1)
        told = await drain(running, worker)
        assert (told["moved"], told["left"], told["running"], told["done"]) == (4, 1, 1, False)
        assert at_home(running, worker, names) == ["busy"]
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
    assert data.count(b'"content"') >= 100
    assert b'"error"' not in data
    await until(lambda: not at_home(running, worker, names))
    told = await progress(running, worker)
    assert (told["moved"], told["left"], told["running"], told["done"]) == (5, 0, 0, True)


async def test_a_next_turn_that_comes_while_the_last_still_runs_goes_elsewhere(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await two(gateway, engine, time_scale=0.3)
    worker = await at_one(running, {"busy": 2})
    async with await Raw.connect(running.port) as client:
        await client.send(request(body(2, stream=True, max_tokens=200, ignore_eos=True), "x-session-id: busy"))
        await client.head()
        await drain(running, worker)
        assert await where(running, "busy", 2) != worker.targets[0].name
        client.vanish()
    await until(lambda: not at_home(running, worker, ["busy"]))


# -- back, away, and nobody else ----------------------------------------------------------------------------------------


async def test_resumed_halfway_the_rest_stays_at_home(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(20)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    await drain(running, worker, 5)
    await until(lambda: len(at_home(running, worker, names)) <= 17)
    await resume(running, worker)
    left = at_home(running, worker, names)
    assert left
    await asyncio.sleep(1.2)
    assert at_home(running, worker, names) == left
    assert not worker.lingers
    for name in left[:4]:
        assert await where(running, name, 2) == worker.targets[0].name
    # It may be drained again, from the start.
    told = await drain(running, worker)
    assert (told["sessions"], told["moved"], told["done"]) == (len(left), len(left), True)


@pytest.mark.parametrize("over", ["", "30"])
async def test_the_only_worker_s_sessions_cannot_move_and_it_says_so(
    gateway: Begin, engine: StartEngine, over: str
) -> None:
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware")
    names = [f"s{number}" for number in range(4)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    told = await drain(running, worker, over)
    assert (told["moved"], told["left"], told["done"]) == (0, 4, False)
    assert told["stuck"]
    assert "sim" in told["stuck"]
    assert at_home(running, worker, names) == names
    if not over:
        answer = await once(running.port, request(body(2), "x-session-id: s1"))
        assert answer.status == 503
        assert answer.all("retry-after")
    assert (await once(running.port, request(body(2), "x-session-id: new"))).status == 503
    await asyncio.sleep(0.7)
    assert (await progress(running, worker))["stuck"]
    await resume(running, worker)
    assert {await where(running, name, 2) for name in [*names, "new"]} == {worker.targets[0].name}
    assert all(named(running, name).turns == 2 for name in names)


async def test_the_last_worker_comes_back_while_another_is_drained(gateway: Begin, engine: StartEngine) -> None:
    """A rolling restart: each in turn, and at no time an error."""
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(8)]
    for name in names:
        await ask(running, name, 2)
    for worker in list(running.fleet.workers.values()):
        assert (await drain(running, worker))["done"]
        homes = {await where(running, name, 2) for name in names}
        assert homes == {t.name for each in running.fleet.workers.values() if each is not worker for t in each.targets}
        await resume(running, worker)
    assert all(named(running, name).turns == 3 for name in names)


async def test_what_could_not_move_moves_when_somebody_joins(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware")
    names = [f"s{number}" for number in range(4)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    assert (await drain(running, worker))["stuck"]
    other = await engine(time_scale=0.0)
    await tell(running, "POST", "/workers", {"url": other.url})
    await until(lambda: not at_home(running, worker, names))
    told = await progress(running, worker)
    assert (told["moved"], told["left"], told["stuck"], told["done"]) == (4, 0, None, True)


async def test_sessions_that_end_meanwhile_are_told_apart(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(6)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    await drain(running, worker, 600)
    left = at_home(running, worker, names)
    for name in left[:3]:
        assert (await once(running.port, request(None, method="DELETE", path=f"/v1/sessions/{name}"))).status == 200
    told = await drain(running, worker)
    assert (told["moved"], told["ended"], told["left"]) == (3, 3, 0)


async def test_a_worker_that_is_removed_while_it_drains_is_forgotten_with_its_drain(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await two(gateway, engine)
    names = [f"s{number}" for number in range(6)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    await drain(running, worker, 600)
    assert (await tell(running, "DELETE", f"/workers/{worker.id}"))[0] == 200
    assert (await tell(running, "GET", f"/workers/{worker.id}"))[0] == 404
    assert all(named(running, name).home is None for name in at_home(running, worker, names))
    await until(lambda: not running.moving.drains)
    for name in names:
        assert await where(running, name, 2) != worker.targets[0].name


async def test_an_engine_that_dies_while_it_drains_costs_its_sessions_no_answer(
    gateway: Begin, engine: StartEngine
) -> None:
    running, engines = await two(gateway, engine)
    names = [f"s{number}" for number in range(8)]
    worker = await at_one(running, dict.fromkeys(names, 2))
    await drain(running, worker, 600)
    await next(each for each in engines if each.url == worker.url).kill()
    for _ in range(2):
        for name in names:
            assert await where(running, name, 2) != worker.targets[0].name
    assert not at_home(running, worker, names)


async def test_new_turns_do_not_reach_a_drained_worker_through_a_connection_that_waits(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await two(gateway, engine)
    worker = await at_one(running, {"s": 2})
    async with await Raw.connect(running.port) as client:
        for _ in range(3):
            assert (await client.ask(request(body(2), "x-session-id: s"))).status == 200
        await drain(running, worker)
        answer = await client.ask(request(body(2), "x-session-id: s"))
        assert answer.one("x-warmroute-worker") != worker.targets[0].name


async def test_with_time_to_move_in_the_only_worker_s_sessions_go_on_there(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware")
    worker = await at_one(running, {"s1": 2, "s2": 2})
    assert (await drain(running, worker, 30))["stuck"]
    answer = await once(running.port, request(body(2), "x-session-id: s1"))
    assert answer.status == 200, answer.body


async def test_a_session_that_is_never_idle_leaves_when_the_time_is_over(gateway: Begin, engine: StartEngine) -> None:
    """Two requests of it that overlap, one after the other, as agents with parallel tools make them."""
    running, _ = await two(gateway, engine, time_scale=0.3)
    worker = await at_one(running, {"busy": 2})
    stop = asyncio.Event()
    seen: list[str] = []

    async def chatter(after: float) -> None:
        await asyncio.sleep(after)
        while not stop.is_set():
            fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
            answer = await once(running.port, request(body(2, **fields), "x-session-id: busy"))
            seen.append(answer.one("x-warmroute-worker"))

    tasks = [asyncio.ensure_future(chatter(after)) for after in (0.0, 0.15)]
    await asyncio.sleep(0.4)
    await drain(running, worker, 1)
    await asyncio.sleep(5)
    told = await progress(running, worker)
    stop.set()
    await asyncio.gather(*tasks)
    assert seen[-1] != worker.targets[0].name, f"4 seconds after the drain was to be over: {told}"


async def test_sessions_that_nobody_else_can_serve_do_not_keep_the_others(gateway: Begin, engine: StartEngine) -> None:
    """One worker serves two models, of which another serves one."""
    both = await engine("vllm", models=["sim", "rare"], time_scale=0.0)
    one = await engine("vllm", models=["sim"], time_scale=0.0)
    running = await gateway(WorkerConfig(both.url), WorkerConfig(one.url), policy="cache_aware")
    worker = running.fleet.workers[both.url.removeprefix("http://")]
    rare = {**body(1), "model": "rare"}
    assert (await once(running.port, request(rare, "x-session-id: r"))).status == 200
    names = [f"s{number}" for number in range(4)]
    for name in names:
        await where(running, name, 8)
    for session in running.sessions.all():
        await tell(running, "POST", f"/sessions/{session.key.hex()}/move", {"to": worker.targets[0].name})
    await drain(running, worker)
    await asyncio.sleep(1.5)
    assert at_home(running, worker, names) == []
    assert (await progress(running, worker))["stuck"]


async def test_a_worker_of_the_same_address_has_a_drain_of_its_own(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine)
    worker = await at_one(running, {f"s{number}": 2 for number in range(6)})
    await drain(running, worker, 600)
    await tell(running, "DELETE", f"/workers/{worker.id}")
    await tell(running, "POST", "/workers", {"url": worker.url})
    again = running.fleet.workers[worker.id]
    await until(lambda: again.state.value == "ready")
    for session in running.sessions.all():
        await tell(running, "POST", f"/sessions/{session.key.hex()}/move", {"to": again.targets[0].name})
    told = await drain(running, again)
    assert (told["sessions"], told["moved"]) == (6, 6), told
    await asyncio.sleep(0.6)
    assert (await progress(running, again) or {}).get("done")


async def test_sessions_that_nobody_else_can_serve_go_on_at_home_until_somebody_can(
    gateway: Begin, engine: StartEngine
) -> None:
    """With ``over`` they go on at home until they are moved: the engine is well, and there is no other."""
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware")
    worker = await at_one(running, {"s1": 2, "s2": 2})
    assert (await drain(running, worker, 1))["stuck"]
    await asyncio.sleep(2)
    assert (await progress(running, worker))["left"] == 2
    answer = await once(running.port, request(body(2), "x-session-id: s1"))
    assert answer.status == 200, answer.body


async def test_moves_are_spread_evenly_over_the_time(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await two(gateway, engine, time_scale=0.0)
    worker = await at_one(running, {f"s{number}": 2 for number in range(20)})
    await drain(running, worker, 100)
    drained = running.moving.drains[worker.id]
    begun, gone = drained.began, []
    for seconds in (0.0, 10.0, 25.0, 50.0, 99.0, 100.0):
        running.moving._step(drained, begun + seconds)
        gone.append(drained.moved)
    assert gone == [0, 2, 5, 10, 19, 20]


async def test_a_tenant_s_own_policy_places_its_sessions_anew(gateway: Begin, engine: StartEngine) -> None:
    """The fleet's is another, and would put them all at one place."""

    def change(config: Config) -> None:
        config.policies = {"turns": {"name": "session", "fallback": "round_robin"}}
        config.tenants = [TenantConfig("a", [Secret("key-a")], policy="turns")]
        config.policy = "cache_aware"

    running = await gateway(*[await engine(time_scale=0.0) for _ in range(4)], change=change)
    for number in range(12):
        sent = request(body(1), f"x-session-id: s{number}", "authorization: Bearer key-a")
        assert (await once(running.port, sent)).status == 200
    worker = next(iter(running.fleet.workers.values()))
    for session in running.sessions.all():
        running.sessions.bind(session, worker.targets[0].id, "test")
    await drain(running, worker)
    assert len(running.sessions) == 12
    await until(lambda: not worker.targets[0].homes)
    assert sorted(target.homes for target in running.fleet.targets.values()) == [0, 4, 4, 4]


async def test_sessions_leave_a_draining_worker_that_does_not_answer_any_more(
    gateway: Begin, engine: StartEngine
) -> None:
    running, engines = await two(gateway, engine, time_scale=0.0)
    worker = await at_one(running, {f"s{number}": 2 for number in range(6)})
    await drain(running, worker, 600)
    await next(each for each in engines if each.url == worker.url).kill()
    await until(lambda: worker.failures >= 3)
    for number in range(6):
        answer = await once(running.port, request(body(2), f"x-session-id: s{number}"))
        assert answer.status == 200
        assert answer.one("x-warmroute-worker") != worker.targets[0].name
