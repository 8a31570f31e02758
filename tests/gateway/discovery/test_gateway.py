"""What a gateway makes of lists: workers come, drain and go; failures leave what there is; the configuration is followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.config import Config, DiscoveryConfig
from gateway.run import Running
from gateway.source import Source
from gateway.workers import State
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import Raw, admin, once, request, tell, until


def say(file: Path, *workers: Any) -> None:
    """Each a scripted worker, or what is said of one."""
    told = [each if isinstance(each, dict) else {"url": each.url, "engine": "generic"} for each in workers]
    file.write_text(json.dumps(told))


def from_file(file: Path, **more: Any) -> Any:
    def change(config: Config) -> None:
        config.discovery.append(DiscoveryConfig("file", options={"path": str(file), "every": 0.05}, **more))

    return change


def states(running: Running) -> dict[str, State]:
    return {worker.url: worker.state for worker in running.fleet.workers.values()}


async def ready(running: Running, *urls: str) -> None:
    """Until these, and no others, are there and ready."""
    await until(lambda: states(running) == dict.fromkeys(urls, State.READY))


async def value(running: Running, series: str) -> float | None:
    rows = [line for line in (await admin(running, "/metrics")).splitlines() if line.startswith(series + " ")]
    return float(rows[0].rsplit(" ", 1)[1]) if rows else None


async def test_workers_come_beside_the_configured_ones_and_leave_when_nothing_runs_there(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    pending: list[Seen] = []

    async def late(seen: Seen) -> None:
        pending.append(seen)
        await until(lambda: finished)
        await seen.write(ok(b'{"late":1}'))

    finished: list[int] = []
    fixed, found, other = await scripted(), await scripted(late), await scripted()
    file = tmp_path / "workers.json"
    say(file, found)
    running = await gateway(fixed, change=from_file(file))
    await ready(running, fixed.url, found.url)
    rows = {row["url"]: row["source"] for row in (await admin(running, "/workers"))["workers"]}
    assert rows == {fixed.url: "config", found.url: "file"}
    async with await Raw.connect(running.port) as client:
        await client.send(request())
        await until(lambda: pending or fixed.seen)
        if not pending:
            # The other one's turn is next.
            await client.response()
            await client.send(request())
            await until(lambda: pending)
        say(file, other)
        await until(lambda: states(running).get(found.url) is State.DRAINING and other.url in states(running))
        for _ in range(4):
            assert (await once(running.port, request())).status == 200
        assert len(found.seen) == 1
        finished.append(1)
        assert (await client.response()).json() == {"late": 1}
    await ready(running, fixed.url, other.url)


async def test_a_source_that_fails_leaves_its_workers_and_says_so(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    found = await scripted()
    file = tmp_path / "workers.json"
    say(file, found)
    running = await gateway(change=from_file(file, name="racks"))
    await ready(running, found.url)
    assert await value(running, 'warmroute_discovery_up{source="racks"}') == 1
    assert await value(running, 'warmroute_discovery_workers{source="racks"}') == 1
    file.write_text("[")
    await until(lambda: running.discovered.following[0].contact.troubles)
    assert await value(running, 'warmroute_discovery_up{source="racks"}') == 0
    assert (await value(running, 'warmroute_discovery_errors_total{reason="malformed",source="racks"}') or 0) >= 1
    age = await value(running, 'warmroute_discovery_list_age_seconds{source="racks"}')
    assert age is not None and age >= 0
    assert (await once(running.port, request())).status == 200
    say(file, found)
    await until(lambda: running.discovered.following[0].up)
    assert states(running) == {found.url: State.READY}


async def test_one_that_an_operator_removed_stays_away_while_it_is_listed(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    one, two = await scripted(), await scripted()
    file = tmp_path / "workers.json"
    say(file, one, two)
    running = await gateway(change=from_file(file))
    await ready(running, one.url, two.url)
    id_ = one.url.removeprefix("http://")
    assert (await tell(running, "DELETE", f"/workers/{id_}"))[0] == 200
    running.discovered.follow()
    assert states(running) == {two.url: State.READY}
    say(file, two)
    await until(lambda: len(running.discovered.following[0].workers or ()) == 1)
    say(file, one, two)
    await ready(running, one.url, two.url)


async def test_one_that_is_listed_twice_belongs_to_the_configuration_then_to_the_first_source(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    both, shared = await scripted(), await scripted()
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    say(first, both, shared)
    say(second, shared)

    def change(config: Config) -> None:
        from_file(first, name="first")(config)
        from_file(second, name="second")(config)

    running = await gateway(both, change=change)
    await ready(running, both.url, shared.url)

    def sources() -> dict[str, str]:
        return {worker.url: worker.origin for worker in running.fleet.workers.values()}

    await until(lambda: sources() == {both.url: "config", shared.url: "first"})
    say(first)
    await until(lambda: sources() == {both.url: "config", shared.url: "second"})
    assert states(running)[shared.url] is State.READY
    say(second)
    await ready(running, both.url)


async def test_sources_are_followed_when_the_configuration_changes(scripted: StartScripted, tmp_path: Path) -> None:
    one, two, three = await scripted(), await scripted(), await scripted()
    file, other = tmp_path / "one.json", tmp_path / "two.json"
    say(file, one, two)
    say(other, two, three)
    config = tmp_path / "warmroute.yaml"

    def configure(text: str) -> None:
        config.write_text(
            "listen: {host: 127.0.0.1, port: 0}\nadmin: {port: 0}\nprobes: {join: 100ms, health: 100ms}\n"
            f"pressure: {{lag: 10s}}\ndrain: 0\ndrain_limit: 500ms\n{text}\n"
        )

    configure(f"discovery: {{source: file, path: {file}, every: 50ms}}")
    source = Source(str(config))
    running = Running(source.load(), source)
    await running.start()
    try:
        await ready(running, one.url, two.url)
        kept = running.fleet.workers[two.url.removeprefix("http://")]
        configure(f"discovery: [{{source: file, path: {other}, every: 50ms, worker: {{max_running: 7}}}}]")
        status, told = await tell(running, "POST", "/config/reload")
        assert (status, told["changed"], told["needs_restart"]) == (200, ["discovery"], [])
        await ready(running, two.url, three.url)
        assert kept is running.fleet.workers[kept.id]
        assert kept.spec.max_running == 7
        configure(f"discovery: {{source: file, path: {other}, evry: 50ms}}")
        status, told = await tell(running, "POST", "/config/reload")
        assert status == 400
        assert "did you mean 'every'" in str(told)
        configure(f"workers: [{{url: '{three.url}', engine: generic}}]")
        assert (await tell(running, "POST", "/config/reload"))[0] == 200
        await ready(running, three.url)
        assert running.fleet.workers[three.url.removeprefix("http://")].origin == "config"
        assert "discovery_up{" not in await admin(running, "/metrics")
    finally:
        await running.stop()
    assert running.gateway.defects == 0


async def test_the_first_refused_connection_of_traffic_takes_a_worker_out(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    """Probes are seldom here: it is traffic that tells."""
    one, two = await scripted(), await scripted()
    file = tmp_path / "workers.json"
    say(file, one, two)

    def change(config: Config) -> None:
        from_file(file)(config)
        config.probes.health = 600.0

    running = await gateway(change=change)
    await ready(running, one.url, two.url)
    await one.stop()
    for _ in range(8):
        assert (await once(running.port, request())).status == 200
    counted = (await admin(running, "/metrics")).splitlines()
    faults = [line for line in counted if line.startswith("warmroute_worker_faults_total") and "refused" in line]
    assert [float(line.rsplit(" ", 1)[1]) for line in faults] == [1]
    assert states(running)[one.url] is State.DOWN


async def test_the_only_one_that_was_found_comes_back_by_its_probes(
    gateway: Begin, scripted: StartScripted, tmp_path: Path
) -> None:
    only = await scripted()
    file = tmp_path / "workers.json"
    say(file, only)
    running = await gateway(change=from_file(file))
    await ready(running, only.url)
    await only.stop()
    assert (await once(running.port, request())).status in (502, 503)
    await until(lambda: states(running)[only.url] is State.DOWN)
    await only.start()
    await ready(running, only.url)
    assert (await once(running.port, request())).status == 200
