"""Everything that can happen to sessions, at once and at random; afterwards every account is even."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from gateway.workers import Worker
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, request, settled, tell, until

SECONDS = 3.0
MODELS = ("sim", "rare")


class Client:
    """One that does whatever comes to its mind, to sessions of its own and of others."""

    def __init__(self, running: Running, seed: int) -> None:
        self.running = running
        self.random = Random(seed)
        self.seed = seed
        self.statuses: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.token = ""

    async def run(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < until:
            client = await Raw.connect(self.running.port)
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while loop.time() < until and await self.turn(client):
                    pass
            client.vanish()

    def naming(self) -> list[str]:
        name = self.random.randrange(12)
        ways: tuple[list[str], ...] = (
            [f"x-session-id: {name}"],
            [f"x-claude-code-session-id: {name}", f"x-claude-code-agent-id: {self.random.randrange(3)}"],
            [f"session-id: {name}", f"thread-id: {self.seed}"],
            [f"x-warmroute-session: {self.token}"] if self.token else [],
            [f"x-warmroute-session: {self.token[::-1]}"],
            [],
        )
        return self.random.choice(ways)

    async def turn(self, client: Raw) -> bool:
        """One thing done; whether the connection can be used again."""
        random = self.random
        if random.random() < 0.1:
            name = random.choice((str(random.randrange(12)), self.token or "%00", "x" * 40))
            answer = await client.ask(request(None, method="DELETE", path=f"/v1/sessions/{name}"))
            assert answer.status in (200, 404)
            return True
        if not self.messages or random.random() < 0.15:
            self.messages = [
                {"role": "user", "content": f"{random.randrange(4)} " + "begin here " * random.randrange(60)}
            ]
        else:
            self.messages.append({"role": "user", "content": f"{self.seed}: " + "go on " * random.randrange(60)})
        stream, lines = random.random() < 0.6, self.naming()
        if random.random() < 0.1:
            lines.append("x-session-final: true")
        fields: dict[str, Any] = {"messages": self.messages, "stream": stream, "max_tokens": random.randrange(1, 60)}
        fields["model"] = "sim" if random.random() < 0.85 else "rare"
        await client.send(request(chat(ignore_eos=True, **fields), *lines))
        if random.random() < 0.15:
            await asyncio.sleep(random.random() * 0.1)
            return False
        answer = await client.response()
        self.statuses.append(answer.status)
        self.token = next(iter(answer.all("x-warmroute-session")), self.token)
        if answer.status == 200 and answer.whole and not stream:
            self.messages.append(json.loads(answer.body)["choices"][0]["message"])
        return answer.whole


class Operator:
    """One that moves, drains, resumes, removes and adds; and engines that fail."""

    def __init__(self, running: Running, engines: list[Engine], seed: int) -> None:
        self.running = running
        self.engines = engines
        self.random = Random(seed)
        self.statuses: list[int] = []
        self.verbs = [self.move, self.move, self.look, self.drain, self.resume, self.fail, self.remove]

    async def run(self, until: float) -> None:
        while asyncio.get_running_loop().time() < until:
            await self.random.choice(self.verbs)()
            await asyncio.sleep(self.random.random() * 0.1)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        status, told = await tell(self.running, method, path, body)
        self.statuses.append(status)
        assert status in (200, 201, 202, 400, 404, 503), (path, told)
        return told

    def worker(self) -> Worker:
        return self.random.choice(list(self.running.fleet.workers.values()))

    async def move(self) -> None:
        rows = (await self.call("GET", "/sessions"))["sessions"]
        if rows:
            id_ = self.random.choice(rows)["id"]
            to = {"to": self.worker().id} if self.random.random() < 0.7 else None
            await self.call("POST", f"/sessions/{id_}/move", to)
            await self.call("GET" if self.random.random() < 0.9 else "DELETE", f"/sessions/{id_}")

    async def look(self) -> None:
        await self.call("GET", "/workers")
        rows = (await self.call("GET", "/sessions?limit=1000"))["sessions"]
        assert len(rows) <= 40

    async def drain(self) -> None:
        over = self.random.choice(("", "?over=0.3", "?over=2"))
        await self.call("POST", f"/workers/{self.worker().id}/drain{over}")

    async def resume(self) -> None:
        for worker in list(self.running.fleet.workers.values()):
            await self.call("PATCH", f"/workers/{worker.id}", {"state": "ready"})

    async def fail(self) -> None:
        at = self.random.choice(self.engines)
        kind: Any = self.random.choice(("reset", "error500", "queue_full", "half_close", "error503"))
        at.faults.add(kind, after_events=self.random.randrange(3) if kind in ("reset", "half_close") else 0)

    async def restart(self) -> None:
        if self.random.random() < 0.3:
            await self.random.choice(self.engines).restart(0.1)

    async def remove(self) -> None:
        worker = self.worker()
        await self.call("DELETE", f"/workers/{worker.id}")
        await self.call("POST", "/workers", {"url": worker.url})


async def even(running: Running, engines: list[Engine]) -> None:
    """Every account of sessions agrees with every other."""
    for at in engines:
        at.faults.clear()
    await settled(running)
    await until(lambda: not any(at.stats()["running"] for at in engines))
    live = list(running.sessions.all())
    assert len(live) <= 40
    assert all(session.running == 0 for session in live)
    for target in running.fleet.targets.values():
        at_home = sum((session.home == target.id) + (session.partner == target.id) for session in live)
        assert target.homes == at_home
    known = {None, *running.fleet.targets}
    dangling = [(s.home, s.partner, s.tail_target, s.why) for s in live if not {s.home, s.partner} <= known]
    assert dangling == [], "homes on targets that were removed"
    assert running.sessions.symbol_bytes == sum(len(session.pages.symbols) for session in live)
    running.sessions.ends.check()
    for session in live:
        running.sessions.drop(session)
    assert all(target.homes == 0 for target in running.fleet.targets.values())
    assert (running.sessions.symbol_bytes, len(running.sessions.ends)) == (0, 0)
    assert running.gateway.defects == 0


def small(config: Config) -> None:
    config.sessions.max = 40
    config.sessions.idle = 1.5
    config.retries.budget = 1.0


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_clients_operators_and_engines_do_the_accounts_are_even(
    gateway: Begin, engine: StartEngine, seed: int
) -> None:
    options: dict[str, Any] = {"session_refs": True, "time_scale": 0.05}
    engines = [await engine("sglang", models=["sim"], **options) for _ in range(2)]
    engines += [await engine("sglang", models=[model], **options) for model in MODELS]
    running = await gateway(*engines, policy="cache_aware", change=small)
    ends = asyncio.get_running_loop().time() + SECONDS
    clients = [Client(running, seed * 1000 + number) for number in range(24)]
    operator = Operator(running, engines, seed)
    await asyncio.gather(operator.run(ends), *(client.run(ends) for client in clients))
    await operator.resume()
    statuses = [status for client in clients for status in client.statuses]
    print(f"{len(statuses)} answers, {statuses.count(200)} of them 200; {len(operator.statuses)} calls of the operator")
    assert statuses.count(200) > 200
    assert set(statuses) <= {200, 404, 500, 502, 503}
    await even(running, engines)
    # Engines hear of the ends of all, but of workers that were removed: their references are those engines' own.
    await until(lambda: not len(running.lifecycle))


async def test_afterwards_engines_refer_to_the_sessions_at_home_there_and_to_no_others(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine("sglang", models=list(MODELS), session_refs=True, time_scale=0.05) for _ in range(3)]
    running = await gateway(*engines, policy="cache_aware", change=small)
    ends = asyncio.get_running_loop().time() + SECONDS / 2
    clients = [Client(running, number) for number in range(24)]
    operator = Operator(running, engines, 7)
    # A worker that was removed is told nothing any more.
    operator.verbs.remove(operator.remove)
    await asyncio.gather(operator.run(ends), *(client.run(ends) for client in clients))
    await operator.resume()
    for at in engines:
        at.faults.clear()
    await settled(running)
    await until(lambda: not any(at.stats()["running"] for at in engines))
    await until(lambda: not len(running.lifecycle))
    homes = {session.key.hex(): session.home for session in running.sessions.all()}
    for at in engines:
        (target,) = running.fleet.workers[at.url.removeprefix("http://")].targets
        assert {homes.get(name) for name in at.core.sessions} <= {target.id}
    await even(running, engines)
    await until(lambda: not sum(at.stats()["sessions"] for at in engines))
    assert running.lifecycle.lost == 0


async def test_the_same_with_ranks_restarts_and_a_state_that_outlives_the_gateway(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    def kept(config: Config) -> None:
        small(config)
        config.sessions.state = str(tmp_path / "state")

    engines = [await engine(models=list(MODELS), ranks=2, time_scale=0.05) for _ in range(2)]
    engines.append(await engine(time_scale=0.05))
    for seed in (5, 6):
        running = await gateway(*engines, policy="cache_aware", change=kept)
        ends = asyncio.get_running_loop().time() + SECONDS / 2
        clients = [Client(running, seed * 1000 + number) for number in range(16)]
        operator = Operator(running, engines, seed)
        operator.verbs.append(operator.restart)
        await asyncio.gather(operator.run(ends), *(client.run(ends) for client in clients))
        await operator.resume()
        assert sum(client.statuses.count(200) for client in clients) > 50
        if seed == 5:
            # It stops in the middle of it all.
            await running.stop()
        else:
            await even(running, engines)


async def test_the_same_in_a_fleet_of_pairs(gateway: Begin, engine: StartEngine) -> None:
    roles = ("prefill", "prefill", "decode", "decode")
    engines = [await engine(role=role, time_scale=0.05, lease=2.0) for role in roles]
    workers = [WorkerConfig(at.url, role=role) for at, role in zip(engines, roles, strict=True)]
    running = await gateway(*workers, policy="cache_aware", change=small)
    ends = asyncio.get_running_loop().time() + SECONDS
    clients = [Client(running, number) for number in range(16)]
    operator = Operator(running, engines, 3)
    # What is added again has no role of its own.
    operator.verbs.remove(operator.remove)
    await asyncio.gather(operator.run(ends), *(client.run(ends) for client in clients))
    await operator.resume()
    statuses = [status for client in clients for status in client.statuses]
    assert statuses.count(200) > 100
    await even(running, engines)
