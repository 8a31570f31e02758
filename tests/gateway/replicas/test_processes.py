"""``warmroute serve --processes N``: several processes that look like one, and of which each may go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.gateway.conftest import StartEngine
from tests.gateway.talk import Raw, chat, long_chat, once, request, until

PROCESSES = 3


class Served:
    """A supervisor with its processes."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log
        self.port = self.admin = 0

    def text(self) -> str:
        return self.log.read_text()

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(each) for each in path.read_text().split()]

    async def get(self, path: str, method: str = "GET", body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.admin}{path}"
        async with aiohttp.ClientSession() as http, http.request(method, url, json=body) as answer:
            text = await answer.text()
            assert answer.status < 300, text
            return json.loads(text) if "json" in answer.headers["content-type"] else text

    async def metric(self, name: str) -> dict[str, float]:
        """Process -> the sum of its lines."""
        found: Counter[str] = Counter()
        for line in (await self.get("/metrics")).splitlines():
            if line.startswith(name + "{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.split('process="', 1)[1].split('"', 1)[0]] += float(value)
        return dict(found)

    async def ready(self, count: int = PROCESSES) -> None:
        async def all_there() -> bool:
            try:
                return len(await self.metric("warmroute_replicas")) == count
            except (aiohttp.ClientError, OSError):
                return False

        for _ in range(300):
            if self.text().count("] INFO listening on") >= count and await all_there():
                return
            assert self.process.returncode is None, self.text()
            await asyncio.sleep(0.1)
        raise AssertionError(self.text())


Serve = Callable[..., Any]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts a supervisor; at the end it and all its processes are gone."""
    started: list[Served] = []

    async def begin(*engines: Engine, processes: int = PROCESSES, more: str = "", wait: bool = True) -> Served:
        file = tmp_path / "warmroute.yaml"
        workers = "".join(f"  - {{url: '{each.url}'}}\n" for each in engines)
        file.write_text(
            "listen: {host: 127.0.0.1, port: 0}\nadmin: {port: 0}\ndrain: 0s\ndrain_limit: 5s\n"
            f"probes: {{join: 100ms, health: 500ms}}\npressure: {{lag: 10s}}\n{more}\nworkers:\n{workers or '  []'}"
        )
        log = tmp_path / "log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "gateway", "serve"),
                *("--config", str(file), "--processes", str(processes)),
                stderr=out,
                stdout=out,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)},
            )
        served = Served(process, log)
        started.append(served)
        if wait:
            await until(lambda: "] INFO listening on" in served.text() or process.returncode is not None, 60)
            assert process.returncode is None, served.text()
            line = next(each for each in served.text().splitlines() if "] INFO listening on" in each)
            served.port, served.admin = (
                int(part.split()[0].rstrip(",").rsplit(":", 1)[1]) for part in line.split(" on ")[1:]
            )
            await served.ready(processes)
        return served

    yield begin
    for served in started:
        children = served.children() if served.process.returncode is None else []
        if served.process.returncode is None:
            served.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(served.process.wait(), 30)
            except TimeoutError:
                served.process.kill()
                raise
        for pid in children:
            await until(lambda pid=pid: not lives(pid), 20)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def ask(served: Served, *lines: str) -> int:
    return (await once(served.port, request(chat(max_tokens=1), *lines))).status


async def test_they_share_connections_and_look_like_one(serve: Serve, engine: StartEngine) -> None:
    engines = [await engine(time_scale=0.0) for _ in range(2)]
    served = await serve(*engines)
    assert len(served.children()) == PROCESSES
    for _ in range(8):
        assert await asyncio.gather(*[ask(served) for _ in range(15)]) == [200] * 15
    counts = await served.metric("warmroute_requests_total")
    assert sum(counts.values()) == 120
    assert len(counts) == PROCESSES
    assert all(count > 0 for count in counts.values())
    text = await served.get("/metrics")
    for line in text.splitlines():
        assert line.startswith("#") or 'process="' in line
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "lines of one metric stand together"
    # Whichever process is asked, the long request is one of all of them.
    slow = await engine(time_scale=50.0)
    await served.get("/workers", "POST", {"url": slow.url})
    client = await Raw.connect(served.port)
    await client.send(request(long_chat(stream=True)))
    for _ in range(100):
        told = [sum(row["running"] for row in (await served.get("/workers"))["workers"]) for _ in range(6)]
        if told == [1] * 6:
            break
        await asyncio.sleep(0.1)
    assert told == [1] * 6
    client.vanish()


async def test_what_is_changed_on_the_admin_port_is_changed_everywhere(serve: Serve, engine: StartEngine) -> None:
    first, second = await engine(time_scale=0.0), await engine(time_scale=0.0)
    served = await serve(first)
    await served.get("/workers", "POST", {"url": second.url})
    id_ = second.url.removeprefix("http://")
    for _ in range(8):
        assert id_ in [row["id"] for row in (await served.get("/workers"))["workers"]]
    await served.get(f"/workers/{first.url.removeprefix('http://')}", "PATCH", {"state": "draining"})
    for _ in range(100):
        states = [[row["state"] for row in (await served.get("/workers"))["workers"]] for _ in range(6)]
        if states == [["draining", "ready"]] * 6:
            break
        await asyncio.sleep(0.1)
    assert states == [["draining", "ready"]] * 6
    assert await asyncio.gather(*[ask(served) for _ in range(12)]) == [200] * 12
    # One that comes later knows it too.
    os.kill(served.children()[0], signal.SIGKILL)
    await until(lambda: served.text().count("] INFO listening on") == PROCESSES + 1, 30)
    for _ in range(100):
        states = [[row["state"] for row in (await served.get("/workers"))["workers"]] for _ in range(6)]
        if states == [["draining", "ready"]] * 6:
            break
        await asyncio.sleep(0.1)
    assert states == [["draining", "ready"]] * 6


async def test_sessions_are_listed_once_and_ended_everywhere(serve: Serve, engine: StartEngine) -> None:
    served = await serve(*[await engine(time_scale=0.0) for _ in range(2)])
    for _ in range(12):
        assert await ask(served, "X-Session-Id: s") == 200
    for _ in range(6):
        told = await served.get("/sessions")
        (row,) = told["sessions"]
        assert (await served.get(f"/sessions/{row['id']}"))["id"] == row["id"]
    await served.get(f"/sessions/{row['id']}", "DELETE")
    for _ in range(50):
        left = [(await served.get("/sessions"))["sessions"] for _ in range(6)]
        if left == [[]] * 6:
            break
        await asyncio.sleep(0.1)
    assert left == [[]] * 6


async def test_one_that_is_killed_is_started_again(serve: Serve, engine: StartEngine) -> None:
    served = await serve(*[await engine(time_scale=0.0) for _ in range(2)])
    before = served.children()
    os.kill(before[1], signal.SIGKILL)
    await until(lambda: served.text().count("] INFO listening on") == PROCESSES + 1, 30)
    assert len(served.children()) == PROCESSES
    assert await asyncio.gather(*[ask(served) for _ in range(30)]) == [200] * 30
    assert "SIGKILL" in served.text()


async def test_one_whose_loop_stands_still_is_killed(serve: Serve, engine: StartEngine) -> None:
    more = "health: {host: 127.0.0.1, port: 0, stalled: 2s}"
    served = await serve(await engine(time_scale=0.0), more=more)
    os.kill(served.children()[0], signal.SIGSTOP)
    await until(lambda: served.text().count("] INFO listening on") == PROCESSES + 1, 30)
    assert "does not turn its event loop" in served.text()
    assert await asyncio.gather(*[ask(served) for _ in range(10)]) == [200] * 10


async def test_all_are_replaced_under_load_and_no_request_fails(serve: Serve, engine: StartEngine) -> None:
    served = await serve(*[await engine(time_scale=0.2) for _ in range(2)])
    before = served.children()
    statuses: Counter[int] = Counter()
    over = asyncio.Event()

    async def client(number: int) -> None:
        async with aiohttp.ClientSession() as http:
            while not over.is_set():
                body = chat(max_tokens=4, messages=[{"role": "user", "content": f"hello {number} " * 50}])
                headers = {"x-session-id": f"s{number}"}
                url = f"http://127.0.0.1:{served.port}/v1/chat/completions"
                async with http.post(url, json=body, headers=headers) as answer:
                    await answer.read()
                    statuses[answer.status] += 1

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    await until(lambda: statuses[200] > 20)
    served.process.send_signal(signal.SIGUSR2)
    await until(lambda: "goes on with the code" in served.text(), 60)
    until_ = statuses[200] + 50
    await until(lambda: statuses[200] > until_, 30)
    await until(lambda: not set(before) & set(served.children()), 30)
    over.set()
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert len(served.children()) == PROCESSES
    # What it became still watches them.
    os.kill(served.children()[0], signal.SIGKILL)
    await until(lambda: served.text().count("] INFO listening on") == 2 * PROCESSES + 1, 30)


async def test_when_it_is_told_to_end_running_requests_end_well(serve: Serve, engine: StartEngine) -> None:
    served = await serve(*[await engine(time_scale=1.0) for _ in range(2)])
    running = [asyncio.create_task(once(served.port, request(chat(max_tokens=40)))) for _ in range(6)]
    await asyncio.sleep(0.3)
    served.process.send_signal(signal.SIGTERM)
    assert [each.status for each in await asyncio.gather(*running)] == [200] * 6
    assert await asyncio.wait_for(served.process.wait(), 30) == 0


async def test_when_it_is_killed_they_end_too(serve: Serve, engine: StartEngine) -> None:
    served = await serve(await engine(time_scale=0.0))
    children = served.children()
    served.process.kill()
    await served.process.wait()
    for pid in children:
        await until(lambda pid=pid: not lives(pid), 30)


async def test_what_no_process_can_do_ends_all_with_its_reason(
    serve: Serve, engine: StartEngine, tmp_path: Path
) -> None:
    more = f"request_log: {{file: '{tmp_path}/nowhere/requests.log'}}"
    served = await serve(await engine(), more=more, wait=False)
    assert await asyncio.wait_for(served.process.wait(), 60) == 2
    assert "request_log.file" in served.text()


async def test_each_writes_a_log_of_its_own(serve: Serve, engine: StartEngine, tmp_path: Path) -> None:
    served = await serve(await engine(time_scale=0.0), more=f"request_log: {{file: '{tmp_path}/requests.log'}}")
    for _ in range(30):
        assert await ask(served) == 200
    files = [tmp_path / f"requests-{number}.log" for number in range(PROCESSES)]
    await until(lambda: sum(len(each.read_text().splitlines()) for each in files if each.exists()) == 30, 10)
    assert not (tmp_path / "requests.log").exists()


async def test_where_a_new_process_does_not_come_up_those_that_run_stay(
    serve: Serve, engine: StartEngine, tmp_path: Path
) -> None:
    served = await serve(await engine(time_scale=0.0))
    before = sorted(served.children())
    file = tmp_path / "warmroute.yaml"
    text = file.read_text()
    file.write_text(text + "\nnonsense: 1\n")
    served.process.send_signal(signal.SIGUSR2)
    await until(lambda: "those that run stay" in served.text(), 30)
    assert await asyncio.gather(*[ask(served) for _ in range(12)]) == [200] * 12
    assert sorted(served.children()) == before
    file.write_text(text)
    served.process.send_signal(signal.SIGUSR2)
    await until(lambda: "goes on with the code" in served.text(), 60)
    assert await asyncio.gather(*[ask(served) for _ in range(12)]) == [200] * 12
    await until(lambda: not set(before) & set(served.children()), 30)


async def test_a_process_that_hangs_keeps_nobody_from_the_control_plane(serve: Serve, engine: StartEngine) -> None:
    served = await serve(await engine(time_scale=0.0))
    stopped = served.children()[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        answered = 0
        for _ in range(6):
            # What the kernel gives to the one that hangs waits there; any other answers for those that can.
            try:
                async with asyncio.timeout(6):
                    answered += len((await served.get("/workers"))["workers"]) == 1
            except TimeoutError:
                pass
        assert answered
    finally:
        os.kill(stopped, signal.SIGCONT)
