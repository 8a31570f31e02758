"""What the gateway leaves out when it is short of time or memory, and who still hears of its health."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest

from gateway.config import Config, HealthAddress, ModelConfig
from gateway.health import MOST, Health
from gateway.pressure import CALM, Limits, Pressure, Pulse, Rung, allowed, resident
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import admin, chat, once, request, until
from tests.gateway.test_admission import metric, tenant

MIB = 1 << 20


def after(pressure: Pressure, seconds: float, late: float, memory: int | None = None, start: float = 0.0) -> list[Rung]:
    """The rungs that it was on, beat by beat."""
    seen = []
    for beat in range(1, int(seconds / 0.05) + 1):
        pressure.beat(late, memory, start + beat * 0.05)
        if not seen or seen[-1] is not pressure.rung:
            seen.append(pressure.rung)
    return seen


# -- the ladder ---------------------------------------------------------------------------------------------------------


def test_it_climbs_rung_by_rung_while_the_loop_is_late_and_comes_down_again() -> None:
    moves: list[tuple[Rung, Rung]] = []
    pressure = Pressure(Limits(lag=0.05), lambda before, after, why: moves.append((before, after)))
    assert after(pressure, 10, 0.01) == [Rung.NONE]
    assert after(pressure, 10, 0.3, start=10) == list(Rung)
    down = after(pressure, 7 * CALM, 0.0, start=20)
    assert down == list(reversed(Rung))
    assert [after - before for before, after in moves] == [1] * 5 + [-1] * 5


def test_one_long_stall_is_over_when_it_is_seen() -> None:
    pressure = Pressure(Limits(lag=0.05))
    after(pressure, 10, 0.0)
    pressure.beat(60.0, None, 70.0)
    assert max(after(pressure, 20, 0.0, start=70)) <= Rung.OPTIONAL


def test_between_calm_and_late_it_stays_where_it_is() -> None:
    pressure = Pressure(Limits(lag=0.05))
    after(pressure, 3, 0.3)
    there = pressure.rung
    after(pressure, 3, 0.04, start=3)
    assert after(pressure, 60, 0.04, start=6) == [pressure.rung]
    assert pressure.rung >= there


def test_memory_counts_too_and_is_not_guessed() -> None:
    pressure = Pressure(Limits(lag=0.05, memory=100 * MIB))
    assert after(pressure, 10, 0.0, None) == [Rung.NONE]
    assert after(pressure, 600, 0.0, 101 * MIB, start=10)[-1] is Rung.PREFIX, "refusing would give nothing back"
    assert after(pressure, 10, 0.0, 110 * MIB, start=610)[-1] is Rung.ALL, "but this would be the end"
    assert after(pressure, 60, 0.0, 104 * MIB, start=620)[-1] is Rung.PREFIX
    assert after(pressure, 60, 0.0, 97 * MIB, start=680)[-1] is Rung.NONE
    assert pressure.told()["memory_limit_bytes"] == 100 * MIB


def test_the_process_knows_its_memory_here() -> None:
    have, most = resident(), allowed()
    assert have is not None
    assert most is not None
    assert 10 * MIB < have < most


# -- rungs --------------------------------------------------------------------------------------------------------------


def press(running: Running, rung: Rung) -> None:
    """Up to that rung, as a loop that is late would bring it there."""
    pressure = running.gateway.pressure
    while pressure.rung < rung:
        pressure._step(1, "by the test", running.gateway.clock() + 600)


async def test_the_doctor_goes_first_and_requests_are_served_as_before(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    press(running, Rung.OPTIONAL)
    answers = [await once(running.port, request(chat(max_tokens=1), "x-session-id: s")) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert len({answer.one("x-warmroute-worker") for answer in answers}) == 1
    assert await metric(running, "warmroute_pressure_skipped_total", what="doctor") == 4
    assert await metric(running, "warmroute_pressure_rung") == Rung.OPTIONAL
    assert (await admin(running, "/healthz"))["pressure"]["rung"] == "optional"


async def test_then_prompts_are_read_as_text(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.models = {"sim": ModelConfig(tokenizer="engine")}

    running = await gateway(await engine(), policy="cache_aware", change=change)
    assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    assert await metric(running, "warmroute_token_fallbacks_total", reason="pressure") == 0
    press(running, Rung.TOKENS)
    assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    assert await metric(running, "warmroute_token_fallbacks_total", reason="pressure") == 1


async def test_then_no_prompt_is_hashed_and_sessions_stay_at_home(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(*[await engine() for _ in range(4)], policy="cache_aware")
    before = [
        (await once(running.port, request(chat(max_tokens=1), f"x-session-id: s{number}"))).one("x-warmroute-worker")
        for number in range(8)
    ]
    press(running, Rung.PREFIX)
    for number, home in enumerate(before):
        answer = await once(running.port, request(chat(max_tokens=1), f"x-session-id: s{number}"))
        assert answer.one("x-warmroute-worker") == home
        assert answer.one("x-warmroute-decision") == "session/home"
        assert answer.all("x-warmroute-predicted-cached-tokens") == []
    running.gateway.pressure._step(-1, "by the test", running.gateway.clock())
    answer = await once(running.port, request(chat(max_tokens=1), "x-session-id: s0"))
    assert answer.one("x-warmroute-decision").startswith("cache_aware/")


async def test_then_all_but_the_first_priority_are_refused_and_then_everybody(
    gateway: Begin, scripted: StartScripted
) -> None:
    def change(config: Config) -> None:
        config.tenants = [tenant("first"), tenant("last", priority="bulk")]

    worker = await scripted()
    running = await gateway(worker, change=change)
    press(running, Rung.BULK)
    refused = await once(running.port, request(chat(), "Authorization: Bearer key-last"))
    assert refused.status == 429
    assert refused.one("x-warmroute-refused") == "pressure"
    assert int(refused.one("retry-after")) >= 1
    assert (await once(running.port, request(chat(), "Authorization: Bearer key-first"))).status == 200
    assert (await once(running.port, request(method="GET", path="/readyz"))).status == 200
    press(running, Rung.ALL)
    assert (await once(running.port, request(chat(), "Authorization: Bearer key-first"))).status == 429
    assert (await once(running.port, request(method="GET", path="/readyz"))).status == 503
    assert len(worker.seen) == 1
    assert await metric(running, "warmroute_pressure_skipped_total", what="request") == 2


async def test_what_runs_is_served_to_its_end(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(time_scale=1.0))
    task = asyncio.create_task(once(running.port, request(chat(max_tokens=30, ignore_eos=True))))
    await until(lambda: running.gateway.exchanges)
    press(running, Rung.ALL)
    assert (await task).status == 200


# -- health, from a thread of its own -----------------------------------------------------------------------------------


def get(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """Over a connection of the calling thread's own."""
    call = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(call, timeout=20) as answer:
            return answer.status, httpx.Response(200, content=answer.read()).json()
    except urllib.error.HTTPError as error:
        return error.code, httpx.Response(200, content=error.read()).json()


def with_health(config: Config) -> None:
    config.health = HealthAddress("127.0.0.1", 0)


async def test_health_is_told_while_the_event_loop_is_blocked(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(), change=with_health)
    assert running.health is not None
    port = running.health.port
    found: list[tuple[int, dict[str, Any]]] = []
    heard = threading.Event()

    def ask() -> None:
        found.append(get(port, "/healthz"))
        heard.set()

    threading.Thread(target=ask).start()
    # The event loop does nothing else until the answer is here.
    assert heard.wait(20)
    assert found[0][0] == 200
    assert found[0][1]["status"] == "ok"


async def test_it_is_told_while_the_event_loop_computes(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(), change=with_health)
    assert running.health is not None
    port = running.health.port
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(get(port, "/healthz")[0])) for _ in range(20)]
    for thread in threads:
        thread.start()
    until_then = time.monotonic() + 20
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until_then:
        sum(range(100_000))
    assert found == [200] * 20


async def test_readiness_is_what_the_gateway_said_last(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker, change=with_health)
    assert running.health is not None
    port = running.health.port
    for _ in range(200):
        if (await asyncio.to_thread(get, port, "/readyz"))[0] == 200:
            break
        await asyncio.sleep(0.05)
    assert (await asyncio.to_thread(get, port, "/readyz")) == (200, {"ready": True})
    running.remove_worker(next(iter(running.fleet.workers.values())))
    for _ in range(200):
        if (await asyncio.to_thread(get, port, "/readyz"))[0] == 503:
            break
        await asyncio.sleep(0.05)
    assert (await asyncio.to_thread(get, port, "/readyz"))[0] == 503
    assert (await asyncio.to_thread(get, port, "/metrics"))[0] == 404
    assert (await asyncio.to_thread(get, port, "/healthz", "POST"))[0] == 405


async def test_a_loop_that_stands_still_is_told_as_such() -> None:
    pulse = Pulse()
    health = Health(pulse, "127.0.0.1", 0, stalled=30.0)
    health.start()
    try:
        pulse.ready = True
        assert (await asyncio.to_thread(get, health.port, "/readyz"))[0] == 200
        pulse.at -= 31.0
        status, body = await asyncio.to_thread(get, health.port, "/healthz")
        assert (status, body["status"]) == (503, "stalled")
        assert (await asyncio.to_thread(get, health.port, "/readyz"))[0] == 503
    finally:
        await asyncio.to_thread(health.stop)


async def test_those_that_ask_and_say_nothing_do_not_keep_others_from_asking() -> None:
    health = Health(Pulse(), "127.0.0.1", 0, stalled=30.0)
    health.start()
    silent = [await asyncio.open_connection("127.0.0.1", health.port) for _ in range(MOST // 2)]
    try:
        await until(lambda: len(health.open) == MOST // 2)
        assert (await asyncio.to_thread(get, health.port, "/healthz"))[0] == 200
        reader, writer = silent[0]
        writer.write(b"GET " + b"x" * 20_000)
        assert await asyncio.wait_for(reader.read(), 20) == b""
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.to_thread(health.stop)


async def test_however_many_say_nothing_whoever_asks_is_told() -> None:
    health = Health(Pulse(), "127.0.0.1", 0, stalled=30.0)
    health.start()
    silent = [await asyncio.open_connection("127.0.0.1", health.port) for _ in range(2 * MOST)]
    try:
        for _ in range(5):
            assert (await asyncio.to_thread(get, health.port, "/healthz"))[0] == 200
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.to_thread(health.stop)


async def test_an_address_that_is_taken_is_told_at_start() -> None:
    one = Health(Pulse(), "127.0.0.1", 0, stalled=30.0)
    one.start()
    try:
        with pytest.raises(OSError):
            Health(Pulse(), "127.0.0.1", one.port, stalled=30.0).start()
    finally:
        await asyncio.to_thread(one.stop)
