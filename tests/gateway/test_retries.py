"""When a request goes to another worker, when not, and what counts against whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import Config
from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Scripted, Seen, events, ok
from tests.gateway.talk import Raw, admin, chat, once, request, settled, until

OOPS = ok(b'{"error":{"message":"oops, in the engine\'s own words","code":500}}', b"X-Engine: 1", status=b"500 Oops")


async def breakers(running: Running) -> dict[str, str]:
    rows = (await admin(running, "/workers"))["workers"]
    return {target["name"]: target["breaker"] for row in rows for target in row["targets"]}


def name(worker: Scripted) -> str:
    return f"127.0.0.1:{worker.port}"


async def hang_up(seen: Seen) -> None:
    seen.reset()


@pytest.mark.parametrize("status", [500, 502, 503, 504, 429])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_of_a_worker_goes_to_another_one(
    gateway: Begin, scripted: StartScripted, status: int, stream: bool
) -> None:
    bad = await scripted(ok(b'{"error":"no"}', status=b"%d No" % status))
    good = await scripted(events(b"data: fine\n\n") if stream else ok())
    running = await gateway(bad, good)
    for _ in range(4):
        assert (await once(running.port, request(chat(stream=stream)))).status == 200
    assert bad.seen
    assert len(good.seen) == 4
    assert all(seen.body == good.seen[0].body for seen in bad.seen), "the same bytes again"
    await settled(running)


@pytest.mark.parametrize(
    "death",
    [
        hang_up,
        b"\x00garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_a_worker_that_dies_before_its_first_content_goes_to_another_one(
    gateway: Begin, scripted: StartScripted, death: Any
) -> None:
    bad, good = await scripted(death), await scripted()
    running = await gateway(bad, good)
    for _ in range(4):
        assert (await once(running.port, request())).json() == {"ok": True}
    assert bad.seen
    assert len(good.seen) == 4
    await settled(running)


async def test_a_refused_connection_goes_to_another_worker(gateway: Begin, scripted: StartScripted) -> None:
    gone, good = await scripted(), await scripted()

    def calm(config: Config) -> None:
        config.probes.health = 60.0

    running = await gateway(gone, good, change=calm)
    await gone.stop()
    for _ in range(6):
        assert (await once(running.port, request())).status == 200
    assert len(good.seen) == 6
    # Traffic is a probe too: after some refusals in a row it is down without waiting for the next one.
    await until(lambda: running.fleet.workers[name(gone)].state is not State.READY)


async def test_every_worker_is_tried_once_and_none_twice(gateway: Begin, scripted: StartScripted) -> None:
    workers = [await scripted(OOPS) for _ in range(3)]
    running = await gateway(*workers)
    answer = await once(running.port, request())
    assert answer.status == 500
    assert [len(worker.seen) for worker in workers] == [1, 1, 1]


async def test_attempts_are_bounded(gateway: Begin, scripted: StartScripted) -> None:
    def two(config: Config) -> None:
        config.retries.attempts = 2

    workers = [await scripted(OOPS) for _ in range(5)]
    running = await gateway(*workers, change=two)
    assert (await once(running.port, request())).status == 500
    assert sum(len(worker.seen) for worker in workers) == 2


async def test_the_budget_of_retries_is_bounded(gateway: Begin, scripted: StartScripted) -> None:
    def none(config: Config) -> None:
        config.retries.budget = 0.0

    bad, good = await scripted(ok(b"{}", status=b"429 Full")), await scripted(ok(b"{}", status=b"429 Full"))
    running = await gateway(bad, good, change=none)
    for _ in range(40):
        await once(running.port, request())
        running.fleet.workers[name(bad)].targets[0].paused_until = 0
        running.fleet.workers[name(good)].targets[0].paused_until = 0
        running.fleet.changed()
    assert len(bad.seen) + len(good.seen) <= 40 + 11


async def test_when_none_is_left_the_worker_s_own_error_is_passed_on(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(OOPS))
    answer = await once(running.port, request())
    assert (answer.status, answer.one("x-engine")) == (500, "1")
    assert b"in the engine's own words" in answer.body


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 415, 422, 451])
async def test_a_worker_s_4xx_reaches_the_client_unchanged_and_is_not_retried(
    gateway: Begin, scripted: StartScripted, status: int
) -> None:
    body = b' {"detail" : [1,2] }'
    workers = [await scripted(ok(body, b"X-Engine: 1", status=b"%d Odd Reason" % status)) for _ in range(2)]
    running = await gateway(*workers)
    for _ in range(12):
        answer = await once(running.port, request())
        assert (answer.status, answer.body, answer.one("x-engine")) == (status, body, "1")
    assert sum(len(worker.seen) for worker in workers) == 12
    assert set((await breakers(running)).values()) == {"closed"}
    assert all(worker.state is State.READY for worker in running.fleet.workers.values())


@pytest.mark.parametrize("status", [429, 503])
async def test_back_pressure_never_opens_a_breaker(gateway: Begin, scripted: StartScripted, status: int) -> None:
    full = await scripted(ok(b'{"error":"full"}', status=b"%d Full" % status))
    running = await gateway(full)
    target = running.fleet.workers[name(full)].targets[0]
    for _ in range(15):
        await until(lambda: not target.paused_until or target.paused_until < running.gateway.clock())
        running.fleet.changed()
        answer = await once(running.port, request())
        assert answer.status == status
    assert len(full.seen) >= 12
    assert await breakers(running) == {name(full): "closed"}
    assert "warmroute_worker_faults_total{" not in await admin(running, "/metrics")


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_honoured_and_told(gateway: Begin, scripted: StartScripted, status: int) -> None:
    full = await scripted(ok(b'{"error":"full"}', b"Retry-After: 30", status=b"%d Full" % status))
    running = await gateway(full)
    answer = await once(running.port, request())
    assert (answer.status, answer.one("retry-after")) == (status, "30")
    answer = await once(running.port, request())
    if status == 503:
        assert answer.status == 503
        assert 20 <= int(answer.one("retry-after")) <= 30
        assert len(full.seen) == 1, "it asked to be left alone"
    else:
        # The quota may have been one client's: nobody else is kept out by it.
        assert (answer.status, answer.one("retry-after")) == (status, "30")
        assert len(full.seen) == 2
    other = await scripted()
    # The one that asked for rest is left out while another is free.
    running2 = await gateway(full, other)
    for _ in range(6):
        assert (await once(running2.port, request())).status == 200
    assert len(full.seen) <= 3


async def test_a_bad_retry_after_of_a_worker_harms_nobody(gateway: Begin, scripted: StartScripted) -> None:
    for value in (b"Wed, 21 Oct 2099 07:28:00 GMT", b"-5", b"9" * 30, b"abc", b""):
        full = await scripted(ok(b"{}", b"Retry-After: " + value, status=b"503 Full"), ok())
        running = await gateway(full)
        assert (await once(running.port, request())).status == 503
        target = running.fleet.workers[name(full)].targets[0]
        assert target.paused_until - running.gateway.clock() < 61


async def test_faults_in_a_row_open_the_breaker_and_one_trial_closes_it(
    gateway: Begin, scripted: StartScripted
) -> None:
    release = asyncio.Event()

    async def trial(seen: Seen) -> None:
        await release.wait()
        await seen.write(ok())

    bad = await scripted(*[OOPS] * 5, trial, ok())
    running = await gateway(bad)
    for _ in range(5):
        assert (await once(running.port, request())).status == 500
    assert await breakers(running) == {name(bad): "open"}
    answer = await once(running.port, request())
    assert answer.status == 503
    assert int(answer.one("retry-after")) >= 1
    assert len(bad.seen) == 5, "an open breaker sends nothing"

    running.fleet.workers[name(bad)].targets[0].breaker.open_until = running.gateway.clock()
    running.fleet.changed()
    tries = [asyncio.ensure_future(once(running.port, request())) for _ in range(10)]
    await until(lambda: sum(task.done() for task in tries) == 9)
    assert len(bad.seen) == 6, "half open lets one through"
    assert await breakers(running) == {name(bad): "half_open"}
    release.set()
    assert sorted(answer.status for answer in await asyncio.gather(*tries)) == [200] + [503] * 9
    assert await breakers(running) == {name(bad): "closed"}
    assert (await once(running.port, request())).status == 200


async def test_a_trial_whose_client_leaves_decides_nothing_and_another_is_made(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def wait(seen: Seen) -> None:
        await seen.gone()

    bad = await scripted(*[OOPS] * 5, wait, ok())
    running = await gateway(bad)
    for _ in range(5):
        await once(running.port, request())
    running.fleet.workers[name(bad)].targets[0].breaker.open_until = running.gateway.clock()
    running.fleet.changed()
    async with await Raw.connect(running.port) as client:
        await client.send(request())
        await until(lambda: len(bad.seen) == 6)
    await until(lambda: not running.gateway.exchanges)
    running.fleet.changed()
    assert (await once(running.port, request())).status == 200
    assert await breakers(running) == {name(bad): "closed"}


async def test_a_trial_that_fails_opens_it_for_longer(gateway: Begin, scripted: StartScripted) -> None:
    bad = await scripted(OOPS)
    running = await gateway(bad)
    for _ in range(5):
        await once(running.port, request())
    breaker = running.fleet.workers[name(bad)].targets[0].breaker
    first = breaker.open_until - running.gateway.clock()  # type: ignore[operator]
    breaker.open_until = running.gateway.clock()
    running.fleet.changed()
    assert (await once(running.port, request())).status == 500
    assert breaker.state == "open"
    assert breaker.open_until - running.gateway.clock() > first * 1.5  # type: ignore[operator]


async def test_successes_between_faults_keep_it_closed(gateway: Begin, scripted: StartScripted) -> None:
    flaky = await scripted(*[OOPS, ok()] * 8)
    running = await gateway(flaky)
    for number in range(16):
        assert (await once(running.port, request())).status == (200 if number % 2 else 500)
    assert await breakers(running) == {name(flaky): "closed"}


async def test_one_hung_worker_does_not_hold_up_the_others(gateway: Begin, scripted: StartScripted) -> None:
    async def hang(seen: Seen) -> None:
        await seen.gone(60)

    hung, good = await scripted(hang), await scripted()
    running = await gateway(hung, good)
    waiting = [asyncio.ensure_future(once(running.port, request())) for _ in range(10)]
    await until(lambda: sum(task.done() for task in waiting) == 5)
    assert len(hung.seen) == 5
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await settled(running)


async def test_a_session_at_home_on_a_dead_worker_goes_elsewhere_and_stays_there(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine() for _ in range(3)]
    running = await gateway(*engines, policy="cache_aware")
    body = chat(messages=[{"role": "user", "content": "long " * 400}], max_tokens=4)

    async def ask() -> str:
        answer = await once(running.port, request(body, "X-Session-Id: s"))
        assert answer.status == 200
        return answer.one("x-warmroute-worker")

    home = await ask()
    assert [await ask() for _ in range(3)] == [home] * 3
    await next(each for each in engines if each.url.endswith(home)).kill()
    after = await ask()
    assert after != home
    assert [await ask() for _ in range(3)] == [after] * 3


@pytest.mark.parametrize("kind", ["error500", "error503", "queue_full", "reset", "garbage", "half_close"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_faults_of_real_shape_are_hidden_by_a_healthy_peer(
    gateway: Begin, engine: StartEngine, dialect: str, kind: str
) -> None:
    bad, good = await engine(dialect), await engine(dialect)
    running = await gateway(bad, good)
    bad.faults.add(kind, count=None)  # type: ignore[arg-type]
    for stream in (True, False, True, False):
        answer = await once(running.port, request(chat(stream=stream, max_tokens=3)))
        assert answer.status == 200
        assert b'"error"' not in answer.body
    assert good.stats()["finished"] == 4


async def test_what_is_sent_again_is_asked_once(gateway: Begin, scripted: StartScripted) -> None:
    """An outage is no crowd, and makes sessions no shorter."""
    bad, good = await scripted(OOPS), await scripted()
    running = await gateway(bad, good, policy="cache_aware")
    for number in range(20):
        body = {"model": "sim", "messages": [{"role": "user", "content": f"{number} " * 200}]}
        assert (await once(running.port, request(body, f"x-session-id: s{number}"))).status == 200
    assert bad.seen
    demand = running.gateway.routing.models["sim"].demand
    # Four sessions of four turns are what is assumed before any is seen.
    assert demand.turns == pytest.approx((16 + 20) / (4 + 20), rel=0.02)
    assert demand.crowd(1, running.fleet.clock()) <= 0.5 * 20 / (60 * 0.2) / 0.2
