"""Targets that do far worse than their peers, probes that are doubted, and workers that come and go; over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.config import Config
from gateway.run import Running
from gateway.workers import State
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Scripted, Seen, ok
from tests.gateway.talk import admin, chat, once, request, until
from tests.gateway.test_admission import metric

BROKEN = ok(b'{"error":{"message":"broken"}}', status=b"500 Internal Server Error")


def target_of(running: Running, worker: Scripted | Engine) -> Any:
    (found,) = [each for each in running.fleet.targets.values() if each.name.endswith(f":{worker.port}")]
    return found


def judge(running: Running) -> None:
    """The next comparison, now."""
    running.fleet._judge(running.gateway.clock())


async def ask(running: Running, number: int = 1, **fields: Any) -> list[int]:
    return [(await once(running.port, request(chat(**fields)))).status for _ in range(number)]


async def test_one_that_fails_every_other_time_is_put_out_and_comes_back_by_a_trial(
    gateway: Begin, scripted: StartScripted
) -> None:
    turn = 0

    async def now_and_then(seen: Seen) -> None:
        nonlocal turn
        turn += 1
        await seen.write(BROKEN if turn % 2 else ok())

    bad = await scripted(now_and_then)
    good = [await scripted() for _ in range(2)]
    running = await gateway(bad, *good)
    running.gateway.retries_left = 1000.0
    assert await ask(running, 75) == [200] * 75
    target = target_of(running, bad)
    assert target.breaker.state == "closed", "it never failed often enough in a row"
    judge(running)
    assert (target.breaker.state, target.breaker.reason) == ("open", "errors")
    before = len(bad.seen)
    assert await ask(running, 12) == [200] * 12
    assert len(bad.seen) == before
    assert await metric(running, "warmroute_target_put_out_total", reason="errors") == 1
    assert await metric(running, "warmroute_target_breaker", reason="errors") == 1
    rows = [target for worker in (await admin(running, "/workers"))["workers"] for target in worker["targets"]]
    assert sorted(str(row["breaker_reason"]) for row in rows) == ["None", "None", "errors"]
    # Its time is over, and it is well again.
    bad.replies = [ok()]
    target.breaker.open_until = running.gateway.clock() - 1
    running.fleet.sweep(running.gateway.clock())
    await ask(running, 6)
    assert target.breaker.state == "closed"
    assert len(bad.seen) > before
    judge(running)
    assert target.breaker.state == "closed", "it is not judged by what was before"


async def test_one_that_begins_far_later_than_its_peers_is_put_out(gateway: Begin, engine: StartEngine) -> None:
    slow = await engine(time_scale=40.0)
    quick = [await engine(time_scale=0.02) for _ in range(2)]
    running = await gateway(slow, *quick)
    await asyncio.gather(*[ask(running, 1, stream=True, max_tokens=1) for _ in range(45)])
    judge(running)
    assert target_of(running, slow).breaker.reason == "latency"
    assert all(target_of(running, each).breaker.reason is None for each in quick)


async def test_half_of_a_pool_stays_whatever_it_does(gateway: Begin, scripted: StartScripted) -> None:
    workers = [await scripted() for _ in range(4)]
    running = await gateway(*workers)
    for number, worker in enumerate(workers):
        record = target_of(running, worker).record
        record.answered, record.faults = (100.0, 0.0) if number == 0 else (50.0, 50.0 + number)
    for target in list(running.fleet.targets.values())[1:]:
        target.breaker.threshold = 1000
    judge(running)
    states = sorted(target.breaker.state for target in running.fleet.targets.values())
    assert states.count("open") <= 2


# -- probes -------------------------------------------------------------------------------------------------------------


class Probed(Scripted):
    """A worker whose probes can be left without a good answer, while it serves requests."""

    sick = False

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.sick:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                writer.write(ok(b"{}", status=b"503 Service Unavailable"))
                return True
            body = await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            self.seen.append(Seen(head, body, number, reader, writer))
            writer.write(ok())
            return True
        return await super()._serve(number, reader, writer)


async def fleet_of(gateway: Begin, number: int) -> tuple[Running, list[Probed]]:
    workers = [Probed() for _ in range(number)]
    for worker in workers:
        await worker.start()
    return await gateway(*workers), workers


async def test_when_most_seem_dead_by_their_probes_the_probes_are_doubted(gateway: Begin) -> None:
    running, workers = await fleet_of(gateway, 5)
    try:
        for worker in workers:
            worker.sick = True
        fleet = running.fleet
        await until(lambda: all(each.failures >= 5 for each in fleet.workers.values()))
        ready = [each for each in fleet.workers.values() if each.state is State.READY]
        assert len(ready) == 3, "no more than half are taken out by probes alone"
        assert await metric(running, "warmroute_workers_doubted") == 3
        assert await ask(running, 30) == [200] * 30
        assert sum(bool(worker.seen) for worker in workers) == 3
        rows = (await admin(running, "/workers"))["workers"]
        assert sum(row["reason"].startswith("doubted") for row in rows) == 3
        for worker in workers:
            worker.sick = False
        await until(lambda: all(each.state is State.READY for each in fleet.workers.values()))
        assert await metric(running, "warmroute_workers_doubted") == 0
    finally:
        for worker in workers:
            await worker.stop()


async def test_those_that_refuse_connections_are_down_however_many(gateway: Begin, scripted: StartScripted) -> None:
    workers = [await scripted() for _ in range(4)]
    running = await gateway(*workers)
    for worker in workers[1:]:
        await worker.stop()
    down = [target_of(running, worker).worker for worker in workers[1:]]
    await until(lambda: all(each.state is State.DOWN for each in down))
    assert await ask(running, 5) == [200] * 5


async def test_a_worker_that_comes_and_goes_has_to_answer_more_probes_each_time(gateway: Begin) -> None:
    running, workers = await fleet_of(gateway, 1)
    try:
        (worker,) = running.fleet.workers.values()
        needed = []
        for _ in range(3):
            workers[0].sick = True
            await until(lambda: worker.state is State.DOWN)
            needed.append(running.fleet.rise(worker))
            workers[0].sick = False
            await until(lambda: worker.state is State.READY, 60)
        assert needed == [2, 4, 8]
    finally:
        await workers[0].stop()


async def test_nobody_is_put_out_for_what_a_client_did(gateway: Begin, scripted: StartScripted) -> None:
    refusing = ok(b'{"error":{"message":"no"}}', status=b"400 Bad Request")
    full = ok(b'{"error":{"message":"full"}}', b"Retry-After: 0", status=b"429 Too Many Requests")
    workers = [await scripted(refusing), await scripted(full), await scripted()]

    def change(config: Config) -> None:
        config.retries.attempts = 1

    running = await gateway(*workers, change=change)
    await ask(running, 60)
    judge(running)
    assert all(target.breaker.state == "closed" for target in running.fleet.targets.values())
