"""Workers that register themselves: a lease, heartbeats, and what comes of their absence."""

from __future__ import annotations

from typing import Any

from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.talk import admin, tell, until


def id_of(worker: Any) -> str:
    return str(worker.url.removeprefix("http://"))


async def register(running: Running, worker: Any, **more: Any) -> tuple[int, Any]:
    return await tell(running, "POST", "/workers", {"url": worker.url, "engine": "generic", **more})


def now(running: Running, seconds: float) -> None:
    """Have upkeep see what is due so many seconds from now."""
    running.leases.sweep(running.fleet.clock() + seconds)


async def test_registering_again_is_the_same_worker_and_counts_as_a_heartbeat(
    gateway: Begin, scripted: StartScripted
) -> None:
    one = await scripted()
    running = await gateway()
    status, told = await register(running, one, lease=60)
    assert (status, told["source"], told["lease"]["seconds"]) == (201, "lease", 60)
    before = running.fleet.workers[id_of(one)]
    await until(lambda: before.state is State.READY)
    status, told = await register(running, one, lease=90, role="unified")
    assert (status, told["lease"]["seconds"], told["state"]) == (200, 90, "ready")
    assert running.fleet.workers[id_of(one)] is before
    now(running, 61)
    assert before.state is State.READY


async def test_one_that_answers_drains_when_its_lease_runs_out_and_a_heartbeat_ends_that(
    gateway: Begin, scripted: StartScripted
) -> None:
    one = await scripted()
    running = await gateway()
    await register(running, one, lease=60)
    worker = running.fleet.workers[id_of(one)]
    await until(lambda: worker.state is State.READY)
    now(running, 61)
    assert (worker.state, worker.reason) == (State.DRAINING, "out of its lease")
    status, told = await tell(running, "POST", f"/workers/{worker.id}/heartbeat")
    assert (status, told["state"]) == (200, "ready")
    now(running, 59)
    assert worker.state is State.READY
    now(running, 61)
    await until(lambda: worker.id not in running.fleet.workers)
    assert (await tell(running, "POST", f"/workers/{worker.id}/heartbeat"))[0] == 404
    assert "warmroute_leases_expired_total 2" in await admin(running, "/metrics")
    assert (await register(running, one, lease=60))[0] == 201


async def test_one_that_does_not_answer_is_forgotten_at_once(gateway: Begin, scripted: StartScripted) -> None:
    gone, never = await scripted(), await scripted()
    await never.stop()
    running = await gateway()
    await register(running, gone, lease=60)
    await register(running, never, lease=60)
    worker = running.fleet.workers[id_of(gone)]
    await until(lambda: worker.state is State.READY)
    await gone.stop()
    await until(lambda: worker.state is State.DOWN)
    now(running, 61)
    assert running.fleet.workers == {}


async def test_without_a_lease_nothing_runs_out(gateway: Begin, scripted: StartScripted) -> None:
    configured, added = await scripted(), await scripted()
    running = await gateway(configured)
    status, told = await register(running, added)
    assert (status, told["source"], told["lease"]) == (201, "admin", None)
    # What the configuration lists stays its own, whatever it says of itself.
    status, told = await register(running, configured, lease=1)
    assert (status, told["source"], told["lease"]) == (200, "config", None)
    assert (await tell(running, "POST", f"/workers/{id_of(added)}/heartbeat"))[0] == 200
    now(running, 100_000)
    assert len(running.fleet.workers) == 2
    await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()))


async def test_a_lease_that_is_none_is_told(gateway: Begin) -> None:
    running = await gateway()
    for lease in (0, -1, "60", True, 86_401):
        status, told = await tell(running, "POST", "/workers", {"url": "http://127.0.0.1:9", "lease": lease})
        assert status == 400
        assert "lease must be a number of seconds" in told["error"]["message"]
    assert running.fleet.workers == {}
