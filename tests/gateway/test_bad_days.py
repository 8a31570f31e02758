"""Bad days: targets put out with answers under way, probes on a crowded port, stops with a full queue, a blocked loop."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from typing import Any

import pytest

from gateway.health import MOST, Health
from gateway.pressure import Pulse
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import EVENTS, Seen, chunk, events, ok
from tests.gateway.talk import Raw, chat, once, request, settled, tell, until
from tests.gateway.test_admission import Asked, held
from tests.gateway.test_outliers import judge, target_of

__all__ = ["held"]

EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_one_that_is_put_out_stays_out_while_its_late_answers_end(
    gateway: Begin, scripted: StartScripted
) -> None:
    begin, end = asyncio.Event(), asyncio.Event()

    async def late(seen: Seen) -> None:
        await begin.wait()
        await seen.write(EVENTS + chunk(EVENT))
        await end.wait()
        await seen.write(chunk(DONE) + b"0\r\n\r\n")

    slow, quick = await scripted(late), [await scripted(events(EVENT, DONE)) for _ in range(2)]
    running = await gateway(slow, *quick)
    tasks = [asyncio.create_task(once(running.port, request(chat(stream=True)))) for _ in range(9)]
    await until(lambda: len(slow.seen) == 3 and sum(task.done() for task in tasks) == 6)
    target = target_of(running, slow)
    target.record.begun, target.record.late = 30.0, 3_000.0
    for each in quick:
        record = target_of(running, each).record
        record.begun = record.late = 30.0
    judge(running)
    assert (target.breaker.state, target.breaker.reason) == ("open", "latency")
    begin.set()
    await until(lambda: all(each.relay is not None for each in running.gateway.exchanges))
    assert target.breaker.reason == "latency", "an answer that was under way is no trial"
    end.set()
    assert [(await task).status for task in tasks] == [200] * 9
    await settled(running)
    assert target.breaker.reason == "latency"
    # Its time is over, and the next one is.
    target.breaker.open_until = running.gateway.clock() - 1
    running.fleet.sweep(running.gateway.clock())
    for _ in range(6):
        assert (await once(running.port, request(chat(stream=True)))).status == 200
    assert target.breaker.reason is None


async def test_one_that_failed_in_a_row_but_answers_is_used_again(gateway: Begin, scripted: StartScripted) -> None:
    go = asyncio.Event()

    async def later(seen: Seen) -> None:
        await go.wait()
        await seen.write(ok())

    worker = await scripted(later)
    running = await gateway(worker)
    task = asyncio.create_task(once(running.port, request(chat())))
    await until(lambda: worker.seen)
    target = target_of(running, worker)
    for _ in range(5):
        running.fleet.failed(target, running.gateway.clock())
    assert target.breaker.state == "open"
    go.set()
    assert (await task).status == 200
    assert target.breaker.state == "closed"


async def test_requests_that_wait_when_the_time_to_stop_is_over_are_told(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config)
    asked = Asked(running)
    for name in "abc":
        await asked.send(name)
    running.config.drain_limit = 0.2
    await running.stop()
    for name in "bc":
        response = await asked.tasks[name]
        assert response.status == 503
        assert "shuts down" in response.json()["error"]["message"]
    assert running.gateway.admission.held.requests == 0


async def test_ranks_of_one_worker_are_judged_one_by_one_and_half_of_them_stay(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine(ranks=4)
    running = await gateway(one)
    targets = list(running.fleet.targets.values())
    assert len(targets) == 4
    for number, target in enumerate(targets):
        target.record.answered, target.record.faults = (100.0, 0.0) if number == 3 else (30.0, 70.0)
    targets[0].record.faults = 100.0
    judge(running)
    out = [target for target in targets if target.breaker.reason is not None]
    assert len(out) <= 2
    for _ in range(8):
        assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    for number, target in enumerate(targets):
        target.record.answered, target.record.faults = (100.0, 0.0) if number == 3 else (0.0, 100.0)
    judge(running)
    assert sum(target.breaker.reason is not None for target in targets) <= 2


async def test_a_session_whose_home_is_put_out_goes_on_elsewhere(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine() for _ in range(3)]
    running = await gateway(*engines, policy="session")

    async def turn() -> str:
        answer = await once(running.port, request(chat(max_tokens=1), "x-session-id: s"))
        assert answer.status == 200
        return answer.one("x-warmroute-worker")

    first = await turn()
    assert await turn() == first
    (home,) = [target for target in running.fleet.targets.values() if target.name == first]
    home.breaker.put_out(running.gateway.clock(), 30.0, 300.0, "latency")
    running.fleet.changed()
    second = await turn()
    assert second != first
    (session,) = running.sessions.all()
    assert session.turns == 3
    await tell(running, "DELETE", f"/workers/{first}?force=1")
    assert await turn() in {target.name for target in running.fleet.targets.values()}
    assert [each.turns for each in running.sessions.all()] == [4]


async def test_when_all_of_a_pool_fail_it_comes_back_as_soon_as_they_are_well(
    gateway: Begin, scripted: StartScripted
) -> None:
    workers = [await scripted(ok(b"{}", status=b"500 Internal Server Error")) for _ in range(3)]
    running = await gateway(*workers)
    for _ in range(20):
        assert (await once(running.port, request(chat()))).status in (500, 503)
    for worker in workers:
        worker.replies = [ok()]
    for target in running.fleet.targets.values():
        if target.breaker.open_until is not None:
            target.breaker.open_until = running.gateway.clock() - 1
    running.fleet.sweep(running.gateway.clock())
    for _ in range(9):
        assert (await once(running.port, request(chat()))).status == 200
    assert {target.breaker.state for target in running.fleet.targets.values()} == {"closed"}


# -- the health listener ------------------------------------------------------------------------------------------------


@pytest.fixture
def health() -> Any:
    pulse = Pulse()
    one = Health(pulse, "127.0.0.1", 0, 1000.0)
    one.start()
    yield one
    one.stop()


def asked(health: Health) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{health.port}/healthz", timeout=4) as answer:
        told: dict[str, Any] = json.loads(answer.read())
    return told


async def test_probes_are_answered_however_many_connections_say_nothing(health: Health) -> None:
    idle = [await Raw.connect(health.port) for _ in range(MOST + 50)]
    for number in range(20):
        assert (await asyncio.to_thread(asked, health))["status"] == "ok", number
        idle.append(await Raw.connect(health.port))
    await until(lambda: health.connections <= MOST)
    for client in idle:
        client.vanish()
    await until(lambda: not health.connections)


async def test_garbage_is_answered_or_cut_and_the_next_one_is_served(health: Health) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"G" * 20_000,
        b"GET /healthz\x00 HTTP/9\r\n\r\n",
    ):
        async with await Raw.connect(health.port) as client:
            await client.send(data)
            if b"\r\n\r\n" in data or len(data) > 10_000:
                assert (await client.rest())[:9] in (b"", b"HTTP/1.1 ")
    assert (await asyncio.to_thread(asked, health))["status"] == "ok"


async def test_it_ends_at_once_though_connections_say_nothing(health: Health) -> None:
    idle = [await Raw.connect(health.port) for _ in range(5)]
    await until(lambda: health.connections == 5)
    await asyncio.to_thread(health.stop)
    assert health.connections == 0
    assert [await client.rest() for client in idle] == [b""] * 5


async def test_a_loop_that_is_blocked_is_told_of_meanwhile(health: Health) -> None:
    seen: list[Any] = []

    def ask() -> None:
        seen.append(asked(health))

    waits = asyncio.get_running_loop().run_in_executor(None, ask)
    # On purpose.
    time.sleep(0.5)  # noqa: ASYNC251
    assert seen, "the loop stood still all the time"
    await waits
