"""Every way into the queue and out of it: paths, sessions of engines, workers that go, retries, clients' own times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import Raw, chat, once, request, settled, until
from tests.gateway.test_admission import held
from tests.gateway.test_admission_adversarial import empty

__all__ = ["held"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "sim", "input": "hi"}),
        ("/generate", {"text": "a", "sampling_params": {}}),
        ("/v1/messages", chat(max_tokens=3)),
        ("/v1/audio/speech", {"model": "sim", "input": "hi"}),
        ("/v1/rerank", {"model": "sim", "query": "a", "documents": ["b"]}),
    ],
)
async def test_whatever_computes_waits(gateway: Begin, held: Any, path: str, body: dict[str, Any]) -> None:
    worker = await held()
    running = await gateway(worker.config)
    tasks = [asyncio.create_task(once(running.port, request(body, path=path))) for _ in range(4)]
    await until(lambda: running.gateway.admission.held.requests == 3)
    assert len(worker.worker.seen) == 1
    worker.let(4)
    assert [(await task).status for task in tasks] == [200] * 4
    await settled(running)
    empty(running)


async def test_what_left_the_queue_is_tried_elsewhere_and_waits_no_second_time(
    gateway: Begin, scripted: StartScripted
) -> None:
    number = 0

    async def now_and_then(seen: Seen) -> None:
        nonlocal number
        number += 1
        await asyncio.sleep(0.02)
        await seen.write(ok() if number % 3 else ok(b"{}", status=b"500 Internal Server Error"))

    workers = [await scripted(now_and_then) for _ in range(3)]

    def change(config: Config) -> None:
        config.retries.budget = 1.0
        config.retries.attempts = 3

    running = await gateway(
        *[WorkerConfig(each.url, engine="generic", max_running=1) for each in workers], change=change
    )
    running.gateway.retries_left = 1000.0
    answers = await asyncio.gather(*[once(running.port, request(chat())) for _ in range(15)])
    assert {answer.status for answer in answers} <= {200, 500}
    assert sum(answer.status == 200 for answer in answers) >= 10
    await settled(running)
    empty(running)


async def test_those_that_wait_for_a_worker_that_is_taken_out_go_elsewhere(gateway: Begin, engine: StartEngine) -> None:
    one, other = await engine(time_scale=1.0), await engine(time_scale=1.0)
    workers = [WorkerConfig(each.url, max_running=1) for each in (one, other)]
    running = await gateway(*workers, policy="cache_aware")
    bodies = [request(chat(max_tokens=20), f"x-session-id: s{number % 3}") for number in range(12)]
    tasks = [asyncio.create_task(once(running.port, body)) for body in bodies]
    await until(lambda: running.gateway.admission.held.requests > 4)
    running.remove_worker(next(iter(running.fleet.workers.values())))
    assert [(await task).status for task in tasks] == [200] * 12
    await settled(running)
    empty(running)


def turn(name: str) -> bytes:
    """A turn of an engine's session."""
    told = {"id": name, "rid": None}
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 10}, "session_params": told}
    return request(body, path="/generate")


async def test_turns_of_an_engine_s_session_wait_beside_others(gateway: Begin, engine: StartEngine) -> None:
    one = await engine("sglang", time_scale=0.2)
    running = await gateway(WorkerConfig(one.url, max_running=1))
    name = (await once(running.port, request({"capacity_of_str_len": 1000}, path="/open_session"))).json()
    tasks = [asyncio.create_task(once(running.port, data)) for data in [turn(name), request(chat(max_tokens=9))] * 4]
    assert [(await task).status for task in tasks] == [200] * 8
    await settled(running)
    empty(running)


async def test_a_turn_whose_client_leaves_while_it_waits_leaves_the_session_free(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine("sglang", time_scale=0.5)
    running = await gateway(WorkerConfig(one.url, max_running=1))
    name = (await once(running.port, request({"capacity_of_str_len": 1000}, path="/open_session"))).json()
    first = asyncio.create_task(once(running.port, request(chat(max_tokens=60))))
    await until(lambda: running.gateway.exchanges)
    async with await Raw.connect(running.port) as client:
        await client.send(turn(name))
        await until(lambda: running.gateway.admission.held.requests == 1)
    await until(lambda: running.gateway.admission.held.requests == 0)
    assert (await first).status == 200
    assert (await once(running.port, turn(name))).status == 200
    await settled(running)
    empty(running)


async def test_times_that_are_over_at_any_moment_before_the_answer_are_told(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def never(seen: Seen) -> None:
        await seen.gone(30)

    running = await gateway(await scripted(never))
    bodies = [request(chat(stream=bool(each % 2)), f"x-request-timeout: {each}ms") for each in range(1, 11)]
    answers = await asyncio.gather(*[once(running.port, body) for body in bodies])
    assert {answer.status for answer in answers} == {504}
    await settled(running)
    empty(running)
