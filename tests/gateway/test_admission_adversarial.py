"""The queue as a distrustful operator would try it: models, sessions, pairs, clients that leave at any moment, reloads."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from gateway.config import Config, LimitsConfig, ModelConfig, WorkerConfig
from gateway.rounds import spare
from gateway.run import Running
from gateway.workers import State
from policies.base import Choice
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import Raw, chat, once, request, settled, until
from tests.gateway.test_admission import Asked, Held, having, held, metric, tenant, told

__all__ = ["held"]

LONG = "the quick brown fox jumps over the lazy dog " * 400


def empty(running: Running) -> None:
    """Nothing waits by any account, and nobody is thought to have anything running."""
    admission = running.gateway.admission
    assert (admission.held.requests, admission.held.bytes, admission.held.tenants) == (0, 0, {})
    assert all(len(queue) == 0 for queue in admission.queues.values())
    assert all(meter.running == 0 for _, meter in running.gateway.meters.all())


# -- who may not hold up whom -------------------------------------------------------------------------------------------


async def test_a_tenant_that_waits_for_its_own_limit_does_not_have_others_turned_away_from_idle_engines(
    gateway: Begin, held: Any, scripted: StartScripted
) -> None:
    worker = await held(most=None)
    change = having(tenant("slow", limits=LimitsConfig(concurrency=1)), tenant("calm"))
    running = await gateway(worker.config, policy="cache_aware", change=change)
    asked = Asked(running)
    for number in range(6):
        await asked.send(f"slow-{number}", key="slow", max_tokens=1)
    for number in range(2):
        # So that the pace at which it is served is known: slowly.
        await asyncio.sleep(0.7)
        worker.let()
        assert await asked.status(f"slow-{number}") == 200
    await asyncio.sleep(0.3)
    await asked.send("calm", key="calm", messages=[{"role": "user", "content": LONG * 20}])
    await until(lambda: "calm" in worker.asked or asked.tasks["calm"].done())
    assert "calm" in worker.asked, (await asked.tasks["calm"]).body
    worker.let(20)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    await settled(running)
    empty(running)


async def test_models_of_the_same_engines_take_turns(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(models=("base", "adapter"))
    one = Held(worker)
    worker.replies = [one.script]
    running = await gateway(one.config)
    asked = Asked(running)
    for number in range(12):
        await asked.send(f"base-{number}", model="base")
    for number in range(4):
        await asked.send(f"adapter-{number}", model="adapter")
    one.let(50)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    last = max(one.asked.index(f"adapter-{number}") for number in range(4))
    assert last <= 10, one.asked
    empty(running)


async def test_bulk_of_one_model_does_not_go_before_another_s_first_priority_on_the_same_engines(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted(models=("base", "adapter"))
    one = Held(worker)
    worker.replies = [one.script]
    running = await gateway(one.config)
    asked = Asked(running)
    for number in range(12):
        await asked.send(f"base-{number}", "x-warmroute-priority: bulk", model="base")
    for number in range(6):
        await asked.send(f"adapter-{number}", model="adapter")
    one.let(50)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    last = max(one.asked.index(f"adapter-{number}") for number in range(6))
    assert last <= 8, one.asked


async def test_names_that_nobody_lists_wait_in_one_queue(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(models=())
    one = Held(worker)
    worker.replies = [one.script]
    running = await gateway(one.config)
    asked = Asked(running)
    for number in range(40):
        await asked.send(f"r{number}", model=f"made-up-{number}")
    assert len(running.gateway.admission.queues) <= 1
    one.let(50)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    assert one.asked == [f"r{number}" for number in range(40)]
    empty(running)


async def test_one_model_s_overload_does_not_hold_up_another_on_other_engines(
    gateway: Begin, scripted: StartScripted
) -> None:
    workers = [await scripted(models=(name,)) for name in ("one", "two")]
    busy, free = Held(workers[0]), Held(workers[1], most=4)
    for each in (busy, free):
        each.worker.replies = [each.script]
    running = await gateway(busy.config, free.config, change=having(queue=100))
    asked = Asked(running)
    for number in range(101):
        await asked.send(f"r{number}", model="one")
    told(await once(running.port, request(chat(model="one"))), "queue_full")
    free.let(3)
    for name in "abc":
        await asked.send(name, model="two")
        assert await asked.status(name) == 200
    busy.let(200)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    empty(running)


async def test_bulk_of_one_model_makes_room_for_another_s_first_priority(
    gateway: Begin, scripted: StartScripted
) -> None:
    workers = [await scripted(models=(name,)) for name in ("one", "two")]
    first, second = Held(workers[0]), Held(workers[1])
    for each in (first, second):
        each.worker.replies = [each.script]
    running = await gateway(first.config, second.config, change=having(queue=5))
    asked = Asked(running)
    for number in range(6):
        await asked.send(f"bulk-{number}", "x-warmroute-priority: bulk", model="one")
    await asked.send("a", model="two")
    # As many come as have to leave.
    asked.tasks["b"] = asyncio.create_task(once(running.port, request(chat(model="two", user="b"))))
    told(await asked.tasks["bulk-5"], "displaced")
    told(await once(running.port, request(chat(model="two"), "x-warmroute-priority: bulk")), "queue_full")
    first.let(9)
    second.let(9)
    for name in [name for name in asked.tasks if name != "bulk-5"]:
        assert await asked.status(name) == 200
    await settled(running)
    empty(running)


async def test_nobody_has_to_leave_for_one_that_does_not_fit_anyway(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(bytes=20_000))
    asked = Asked(running)
    for name in "abc":
        await asked.send(name, "x-warmroute-priority: bulk")
    large = chat(messages=[{"role": "user", "content": "x" * 30_000}])
    told(await once(running.port, request(large)), "queue_full")
    assert asked.waiting == 2
    worker.let(3)
    for name in "abc":
        assert await asked.status(name) == 200
    empty(running)


async def test_an_alias_waits_where_its_model_does(gateway: Begin, held: Any) -> None:
    worker = await held()

    def change(config: Config) -> None:
        config.models = {"sim": ModelConfig(aliases=["fast"])}

    running = await gateway(worker.config, change=change)
    asked = Asked(running)
    for number, model in enumerate(("sim", "fast", "sim", "fast")):
        await asked.send(f"r{number}", model=model)
    assert list(running.gateway.admission.queues) == ["sim"]
    worker.let(4)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    assert worker.asked == ["r0", "r1", "r2", "r3"]


# -- state that lives on one worker -------------------------------------------------------------------------------------


async def test_what_goes_on_from_a_stored_response_is_within_its_tenant_s_limit_too(
    gateway: Begin, scripted: StartScripted
) -> None:
    stored = ok(b'{"id":"resp_abc","object":"response","output":[],"usage":{"input_tokens":4,"output_tokens":2}}')
    worker, other = await scripted(stored), await scripted(stored)
    running = await gateway(worker, other, change=having(tenant("a", limits=LimitsConfig(concurrency=1))))

    async def ask(previous: str | None) -> Any:
        body: dict[str, Any] = {"model": "sim", "input": "hi"}
        if previous is not None:
            body["previous_response_id"] = previous
        return await once(running.port, request(body, "Authorization: Bearer key-a", path="/v1/responses"))

    assert (await ask(None)).status == 200
    await until(lambda: not running.gateway.exchanges)
    home = worker if worker.seen else other
    free = asyncio.Semaphore(0)
    at_once = most = 0

    async def slowly(seen: Seen) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await free.acquire()
        at_once -= 1
        await seen.write(stored)

    worker.replies = other.replies = [slowly]
    before = len(home.seen)
    tasks = [asyncio.create_task(ask("resp_abc")) for _ in range(5)]
    await until(lambda: len(running.gateway.exchanges) == 5 and len(home.seen) > before)
    # What is only read does not wait for anybody.
    home.replies = [stored]
    path = "/v1/responses/resp_abc"
    looked = await once(running.port, request(b"", "Authorization: Bearer key-a", path=path, method="GET"))
    assert looked.status == 200
    home.replies = [slowly]
    for _ in range(5):
        free.release()
        await asyncio.sleep(0.05)
    assert [(await task).status for task in tasks] == [200] * 5
    assert most == 1
    assert len((other if home is worker else worker).seen) == 0
    await settled(running)
    empty(running)


async def test_a_stored_response_s_worker_that_is_full_is_waited_for_and_none_else(gateway: Begin, held: Any) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config)
    running.gateway.routing.pin(
        running.gateway.tenants.all()[0], "resp_x", one.worker.url.removeprefix("http://"), None
    )
    asked = Asked(running)

    async def go_on(name: str) -> None:
        client = asked.clients[name] = await Raw.connect(running.port)
        body = {"model": "sim", "input": "hi", "user": name, "previous_response_id": "resp_x"}
        before = len(running.gateway.exchanges)
        asked.tasks[name] = asyncio.create_task(client.ask(request(body, path="/v1/responses")))
        await until(lambda: len(running.gateway.exchanges) > before)

    for name in "abc":
        await go_on(name)
    await until(lambda: one.asked == ["a"])
    assert asked.waiting == 2
    two.let(2)
    await asked.send("d")
    assert await asked.status("d") == 200, "the other worker is free for the others"
    one.let(3)
    for name in "abc":
        assert await asked.status(name) == 200
    assert one.asked == ["a", "b", "c"]
    assert two.asked == ["d"]
    await settled(running)
    empty(running)


# -- sessions -----------------------------------------------------------------------------------------------------------


async def test_a_session_on_a_home_that_drains_goes_on_there_though_all_others_are_full(
    gateway: Begin, held: Any
) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config, policy="session")
    asked = Asked(running)
    one.let()
    two.let()
    await asked.send("first", "x-session-id: s")
    assert await asked.status("first") == 200
    home, other = (one, two) if one.asked else (two, one)
    home._free, other._free = asyncio.Semaphore(0), asyncio.Semaphore(0)
    (worker,) = [each for each in running.fleet.workers.values() if each.spec.url == home.worker.url]
    worker.lingers = True
    running.fleet.set_state(worker, State.DRAINING, "by the test")
    for name in "abc":
        await asked.send(name)
    await until(lambda: other.asked == ["a"])
    assert asked.waiting == 2
    await asked.send("again", "x-session-id: s")
    await until(lambda: home.asked == ["first", "again"])
    home.let(2)
    other.let(5)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    empty(running)


async def test_two_requests_of_a_session_wait_for_its_home_and_it_does_not_move(gateway: Begin, held: Any) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config, policy="session")
    asked = Asked(running)
    await asked.send("a", "x-session-id: s")
    await until(lambda: one.asked or two.asked)
    home, other = (one, two) if one.asked else (two, one)
    other.let(50)
    await asked.send("b", "x-session-id: s")
    await asked.send("c", "x-session-id: s")
    for number in range(3):
        await asked.send(f"other-{number}", f"x-session-id: o{number}")
    home.let(10)
    for name in asked.tasks:
        assert await asked.status(name) == 200
    assert [name for name in home.asked if name in "abc"] == ["a", "b", "c"]
    assert not [name for name in other.asked if name in "abc"]
    await settled(running)
    empty(running)


# -- fleets of several kinds --------------------------------------------------------------------------------------------


async def test_a_whole_worker_beside_pairs_that_are_full_is_used(gateway: Begin, engine: StartEngine) -> None:
    prefill, decode, whole = await engine(role="prefill"), await engine(role="decode"), await engine()
    workers = [
        WorkerConfig(prefill.url, role="prefill", max_running=1),
        WorkerConfig(decode.url, role="decode", max_running=8),
        WorkerConfig(whole.url, max_running=8),
    ]
    running = await gateway(*workers)
    view = running.fleet.view("sim")
    assert view is not None
    assert view.prefill is not None
    now = running.gateway.clock()
    (first,) = view.prefill.targets
    assert len(spare(view, 0.05, now)) == 2
    first.running = 1
    try:
        assert [target.name for target in spare(view, 0.05, now)] == [whole.url.removeprefix("http://")]
    finally:
        first.running = 0


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_pairs_wait_for_the_stage_that_is_full(gateway: Begin, engine: StartEngine, stage: str) -> None:
    most = {"prefill": 8, "decode": 8, stage: 1}
    engines = {role: await engine(role=role, time_scale=0.2) for role in ("prefill", "decode")}
    workers = [WorkerConfig(each.url, role=role, max_running=most[role]) for role, each in engines.items()]
    running = await gateway(*workers, policy="round_robin")
    body = chat(max_tokens=30, messages=[{"role": "user", "content": LONG}])
    tasks = [asyncio.create_task(once(running.port, request(body))) for _ in range(8)]
    await until(lambda: running.gateway.admission.held.requests > 2)
    assert [(await task).status for task in tasks] == [200] * 8
    await settled(running)
    empty(running)


# -- a policy that fails ------------------------------------------------------------------------------------------------


async def test_a_request_whose_policy_fails_while_it_waits_costs_nobody_else(gateway: Begin, held: Any) -> None:
    one, two = await held(), await held()
    running = await gateway(one.config, two.config, policy="session")
    asked = Asked(running)
    await asked.send("a", "x-session-id: s")
    await until(lambda: one.asked or two.asked)
    home, other = (one, two) if one.asked else (two, one)
    await asked.send("x")
    await until(lambda: other.asked == ["x"])
    await asked.send("bad", "x-session-id: s")
    (exchange,) = [each for each in running.gateway.exchanges if each.waits is not None]

    class Broken:
        name, needs_prefix, needs_session = "broken", False, True

        def choose(self, *_: Any) -> Choice:
            raise ZeroDivisionError

        explain: Any = choose

    exchange.ask.policy = Broken()  # type: ignore[assignment]
    other.let()
    assert await asked.status("bad") == 500
    await asked.send("y")
    other.let()
    home.let()
    for name in "axy":
        assert await asked.status(name) == 200
    assert 1 <= running.gateway.defects <= 2
    running.gateway.defects = 0
    empty(running)


# -- any sequence of events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_nobody_waits_while_an_engine_is_free_and_nothing_is_left(
    gateway: Begin, held: Any, seed: int
) -> None:
    random = Random(seed)
    workers = [await held(most=2) for _ in range(3)]
    change = having(tenant("a", weight=2.0), tenant("b"), tenant("c", limits=LimitsConfig(concurrency=2)))
    policy = ("round_robin", "session", "cache_aware", "least_load")[seed]
    running = await gateway(*[each.config for each in workers], policy=policy, change=change)
    asked = Asked(running)
    for number in range(120):
        event = random.random()
        name = f"r{number}"
        if event < 0.55:
            lines = [f"x-session-id: s{random.randrange(6)}"] if random.random() < 0.4 else []
            if random.random() < 0.2:
                lines.append("x-warmroute-priority: bulk")
            if random.random() < 0.1:
                lines.append("x-request-timeout: 50ms")
            lines.append(f"Authorization: Bearer key-{random.choice('abc')}")
            client = asked.clients[name] = await Raw.connect(running.port)
            asked.tasks[name] = asyncio.create_task(client.ask(request(chat(user=name, max_tokens=1), *lines)))
        elif event < 0.8:
            random.choice(workers).let(random.randrange(3))
        elif event < 0.9 and asked.clients:
            gone = random.choice(list(asked.clients))
            asked.clients.pop(gone).vanish()
            asked.tasks.pop(gone).cancel()
        elif event < 0.95:
            worker = random.choice(list(running.fleet.workers.values()))
            state = State.DRAINING if worker.state is State.READY else State.READY
            if state is State.READY or sum(each.state is State.READY for each in running.fleet.workers.values()) > 1:
                running.fleet.set_state(worker, state, "by the test")
        await asyncio.sleep(random.choice((0, 0.002, 0.03)))
    for worker in running.fleet.workers.values():
        running.fleet.set_state(worker, State.READY, "by the test")
    for each in workers:
        each.let(500)
    done, pending = await asyncio.wait(asked.tasks.values(), timeout=20)
    assert not pending, "somebody waits though every engine is free"
    statuses = {task.result().status for task in done}
    assert statuses <= {200, 429, 504}, statuses
    await settled(running)
    empty(running)


async def test_clients_that_leave_at_every_moment_leave_nothing(gateway: Begin, engine: StartEngine) -> None:
    one = WorkerConfig((await engine(time_scale=0.1)).url, max_running=2)
    running = await gateway(one, policy="cache_aware")
    random = Random(7)

    async def leave(number: int) -> None:
        client = await Raw.connect(running.port)
        body = chat(max_tokens=3, stream=number % 2 == 0, messages=[{"role": "user", "content": f"{number} {LONG}"}])
        data = request(body, f"x-session-id: s{number % 5}")
        if number % 7 == 0:
            data += data
        await client.send(data)
        await asyncio.sleep(random.random() * 0.4)
        client.vanish()

    await asyncio.gather(*[leave(number) for number in range(80)])
    assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    await settled(running)
    empty(running)
    assert await metric(running, "warmroute_queue_requests") == 0


async def test_pipelined_requests_wait_and_are_answered_in_order(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    await asked.send("first")
    async with await Raw.connect(running.port) as client:
        await client.send(b"".join(request(chat(user=name)) for name in "abc"))
        await until(lambda: asked.waiting >= 1)
        worker.let(4)
        assert [(await client.response()).status for _ in "abc"] == [200] * 3
    assert worker.asked == ["first", "a", "b", "c"]
    empty(running)


async def test_an_answer_that_has_begun_is_not_cut_by_the_client_s_own_time(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def slowly(seen: Seen) -> None:
        await seen.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\n{")
        await asyncio.sleep(1.5)
        await seen.write(b'"":'[:2] + b"}")

    running = await gateway(await scripted(slowly))
    answer = await once(running.port, request(chat(), "x-request-timeout: 300ms"))
    assert (answer.status, answer.whole, len(answer.body)) == (200, True, 4)
