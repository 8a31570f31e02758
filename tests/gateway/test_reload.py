"""Changing the configuration of a gateway that runs: all of it or nothing, and nothing that was learned is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from hypothesis import given, strategies as st

from gateway import reload as reloading
from gateway.config import TLS, Config, Listen, MetricsAddress, ModelConfig, Secret, TenantConfig, WorkerConfig
from gateway.config_diff import compare, effective, live, tree
from gateway.run import Running
from gateway.source import Source
from gateway.workers import State
from load_tests.engine import Engine
from tests.gateway.conftest import StartEngine, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import Raw, admin, chat, once, request, tell, until
from tests.gateway.test_tenants import ask, series

Start = Callable[[dict[str, Any]], Awaitable[Running]]


class File:
    """The configuration's file. What is left out of it would keep a test waiting, or bind a port."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "warmroute.yaml"
        self.says: dict[str, Any] = {}

    def write(self, says: dict[str, Any]) -> None:
        self.says = says
        base = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "policy": "round_robin",
            "probes": {"join": 0.1, "health": 0.1},
            "drain": 0,
            "drain_limit": "20s",
        }
        for key, value in says.items():
            both = isinstance(value, dict) and isinstance(base.get(key), dict)
            base[key] = {**base[key], **value} if both else value  # type: ignore[dict-item]
        self.raw(yaml.safe_dump(base))

    def raw(self, text: str) -> None:
        # As editors and Kubernetes do it: whoever reads sees one or the other.
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, self.path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


@pytest.fixture
async def start(file: File) -> AsyncIterator[Start]:
    """Starts a gateway on what the file says."""
    started: list[Running] = []

    async def begin(says: dict[str, Any], flags: Callable[[Config], None] = lambda config: None) -> Running:
        file.write(says)
        source = Source(str(file.path), flags)
        running = Running(source.load(), source)
        await running.start()
        started.append(running)
        await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()), 20)
        return running

    yield begin
    for running in started:
        await running.stop(0)
        assert running.gateway.defects == 0, "the gateway counted a defect of its own"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at its files often."""
    monkeypatch.setattr(reloading, "LOOK", 0.05)
    monkeypatch.setattr(reloading, "SETTLE", 0.05)


def urls(*engines: Engine) -> list[dict[str, Any]]:
    return [{"url": engine.url} for engine in engines]


async def reload(running: Running) -> tuple[int, Any]:
    return await tell(running, "POST", "/config/reload")


async def told(running: Running) -> dict[str, Any]:
    body = await admin(running, "/healthz")
    assert body["status"] == "ok"
    return dict(body["config"])


def keyed(*names: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"name": name, "keys": [f"key-{name}"], **fields} for name in names]


# -- tenants and models -------------------------------------------------------------------------------------------------


async def test_a_tenant_comes_and_another_s_key_stops_to_work_on_connections_that_are_open(
    start: Start, file: File, engine: StartEngine
) -> None:
    workers = urls(await engine())
    running = await start({"workers": workers, "tenants": keyed("old", "both")})
    assert (await told(running))["generation"] == 0
    async with await Raw.connect(running.port) as old, await Raw.connect(running.port) as both:
        for client, key in ((old, "key-old"), (both, "key-both")):
            assert (await client.ask(request(chat(max_tokens=1), f"x-api-key: {key}"))).status == 200
        file.write({"workers": workers, "tenants": keyed("both", "new")})
        status, body = await reload(running)
        assert (status, body["outcome"], body["generation"], body["needs_restart"]) == (200, "applied", 1, [])
        assert body["changed"] == ["tenants[old]", "tenants[new]"]
        assert (await old.ask(request(chat(max_tokens=1), "x-api-key: key-old"))).status == 401
        assert (await both.ask(request(chat(max_tokens=1), "x-api-key: key-both"))).status == 200
    assert (await ask(running, "key-new")).status == 200
    text = await admin(running, "/metrics")
    assert 'warmroute_config_reloads_total{outcome="applied"} 1.0' in text
    assert "warmroute_config_generation 1.0" in text
    assert "warmroute_config_last_reload_ok 1.0" in text


async def test_a_request_that_runs_when_its_key_goes_runs_to_its_end(
    start: Start, file: File, scripted: StartScripted
) -> None:
    go = asyncio.Event()

    async def late(seen: Seen) -> None:
        await go.wait()
        await seen.write(ok())

    worker = await scripted(late)
    workers = [{"url": worker.url, "engine": "generic"}]
    running = await start({"workers": workers, "tenants": keyed("old", "other")})
    file.write({"workers": workers, "tenants": keyed("other")})
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(), "x-api-key: key-old"))
        await until(lambda: worker.seen)
        assert (await reload(running))[1]["outcome"] == "applied"
        go.set()
        assert (await client.response()).status == 200
        assert (await client.ask(request(chat(), "x-api-key: key-old"))).status == 401


async def test_policies_aliases_and_what_models_are_called_change_and_sessions_stay_home(
    start: Start, file: File, engine: StartEngine
) -> None:
    workers = urls(await engine(), await engine())
    said = {"workers": workers, "policy": "cache_aware", "models": {"sim": {"aliases": ["one"]}}}
    running = await start(said)
    long = [{"role": "user", "content": "the quick brown fox " * 300}]
    answers = [await ask(running, None, "x-session-id: s", model="one", messages=long) for _ in range(2)]
    home = answers[1].one("x-warmroute-worker")
    assert int(answers[1].one("x-warmroute-predicted-cached-tokens")) > 0
    before = (await admin(running, "/sessions"))["sessions"]
    file.write({**said, "policy": "session", "models": {"sim": {"aliases": ["two"], "thinking": "keep"}}})
    status, body = await reload(running)
    assert status == 200
    assert body["changed"] == ["policy", "models.sim.aliases", "models.sim.thinking"]
    assert (await ask(running, None, model="one")).status == 404
    again = await ask(running, None, "x-session-id: s", model="two", messages=long)
    assert again.one("x-warmroute-decision").startswith("session/")
    assert again.one("x-warmroute-worker") == home
    after = (await admin(running, "/sessions"))["sessions"]
    assert [row["id"] for row in after] == [row["id"] for row in before]
    file.write({**said})
    await reload(running)
    believed = await ask(running, None, "x-session-id: s", model="one", messages=long)
    assert int(believed.one("x-warmroute-predicted-cached-tokens")) > 0, "what is held where was kept"


async def test_isolation_and_limits_and_paths_follow(start: Start, file: File, engine: StartEngine) -> None:
    workers = urls(await engine())
    running = await start({"workers": workers, "tenants": keyed("a")})
    file.write(
        {
            "workers": workers,
            "tenants": keyed("a", show_routing=False, models=["other"]),
            "listen": {"max_body": 2000},
            "passthrough": ["/v1/custom"],
            "anonymous": True,
        }
    )
    assert (await reload(running))[0] == 200
    assert (await ask(running, "key-a")).status == 403
    assert (await ask(running, None)).status == 200
    assert (await once(running.port, request(b"x" * 3000, "x-api-key: key-a"))).status == 413
    passed = await once(running.port, request(b"x", path="/v1/custom"))
    assert passed.one("x-warmroute-decision"), "it is the engine that has no such path"


# -- workers ------------------------------------------------------------------------------------------------------------


async def test_workers_come_and_go_and_those_that_were_added_by_hand_stay(
    start: Start, file: File, engine: StartEngine
) -> None:
    first, second, third, by_hand = [await engine() for _ in range(4)]
    running = await start({"workers": urls(first, second)})
    assert (await tell(running, "POST", "/workers", {"url": by_hand.url}))[0] == 201
    file.write({"workers": urls(second, third)})
    status, body = await reload(running)
    assert status == 200
    assert body["changed"] == [f"workers[{first.url}]", f"workers[{third.url}]"]
    await until(lambda: set(running.fleet.workers) == {_id(each) for each in (second, third, by_hand)})
    await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()))
    seen = {(await ask(running, None)).one("x-warmroute-worker") for _ in range(9)}
    assert seen == {_id(each) for each in (second, third, by_hand)}


def _id(engine: Engine) -> str:
    return engine.url.removeprefix("http://")


async def test_a_worker_that_is_taken_out_ends_what_runs_on_it_first(
    start: Start, file: File, scripted: StartScripted
) -> None:
    slow, other = await scripted(), await scripted()
    listed = [{"url": each.url, "engine": "generic"} for each in (slow, other)]
    running = await start({"workers": listed[:1]})
    worker = next(iter(running.fleet.workers.values()))
    target = worker.targets[0]
    charge = running.fleet.dispatch(target, 10, 0, False)
    file.write({"workers": listed[1:]})
    assert (await reload(running))[0] == 200
    await until(lambda: len(running.fleet.workers) == 2 and worker.state is State.DRAINING)
    assert worker.reason == "not in the configuration any more"
    await until(lambda: any(each.state is State.READY for each in running.fleet.workers.values()))
    assert (await ask(running, None)).one("x-warmroute-worker") != worker.id
    file.write({"workers": listed})
    await reload(running)
    assert worker.state is State.READY, "it is listed again before it left"
    file.write({"workers": listed[1:]})
    await reload(running)
    running.fleet.release(charge)
    await until(lambda: worker.id not in running.fleet.workers)


async def test_a_worker_s_credential_changes_in_place(start: Start, file: File, scripted: StartScripted) -> None:
    worker = await scripted()
    entry = {"url": worker.url, "engine": "generic", "api_key": "engine-key-1"}
    running = await start({"workers": [entry]})
    known = next(iter(running.fleet.workers.values()))
    assert (await ask(running, None)).status == 200
    assert worker.seen[-1].all("authorization") == ["Bearer engine-key-1"]
    file.write({"workers": [{**entry, "api_key": "engine-key-2"}]})
    status, body = await reload(running)
    assert (status, body["changed"]) == (200, [f"workers[{worker.url}].api_key"])
    assert (await ask(running, None)).status == 200
    assert worker.seen[-1].all("authorization") == ["Bearer engine-key-2"]
    assert next(iter(running.fleet.workers.values())) is known


async def test_what_a_worker_is_said_to_be_changes_in_place_and_its_cache_is_still_believed(
    start: Start, file: File, engine: StartEngine
) -> None:
    started = await engine(models=["sim", "other"])
    running = await start({"workers": [{"url": started.url, "kv_tokens": 5000}], "policy": "cache_aware"})
    long = [{"role": "user", "content": "the quick brown fox " * 300}]
    assert (await ask(running, None, messages=long)).status == 200
    (row,) = (await admin(running, "/workers"))["workers"]
    assert (row["kv_tokens"], row["models"]) == (5000, ["sim", "other"])
    file.write({"workers": [{"url": started.url, "models": ["sim"]}], "policy": "cache_aware"})
    status, body = await reload(running)
    assert (status, body["changed"]) == (200, [f"workers[{started.url}].models", f"workers[{started.url}].kv_tokens"])
    worker = next(iter(running.fleet.workers.values()))
    await until(lambda: [model.name for model in worker.facts.models] == ["sim"] and worker.facts.kv_tokens)
    assert worker.facts.kv_tokens != 5000, "it is the engine's own word now"
    assert (await ask(running, None, model="other")).status == 503
    again = await ask(running, None, messages=long)
    assert int(again.one("x-warmroute-predicted-cached-tokens")) > 0


async def test_authorities_of_a_worker_that_cannot_be_read_change_nothing(
    start: Start, file: File, engine: StartEngine
) -> None:
    started = await engine()
    running = await start({"workers": urls(started)})
    file.write(
        {"workers": [{"url": started.url.replace("http:", "https:"), "ca": "/no/such/file"}], "policy": "random"}
    )
    status, body = await reload(running)
    assert status == 400
    assert body["error"]["problems"][0]["key"] == "workers[0].ca"
    answer = await ask(running, None)
    assert (answer.status, answer.one("x-warmroute-decision")) == (200, "round_robin/turn")


# -- what fails, and what takes a restart -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("polcy: random", 1, "did you mean 'policy'"),
        ("policy: randomm", 1, "did you mean 'random'"),
        ("workers: [{url: ftp://x}]", 1, "http://host:port"),
        ("tenants: [{name: a}]", 1, "has no key"),
        ("tenants: [{name: a, keys: ['${NOT_THERE_AT_ALL}']}]", 1, "NOT_THERE_AT_ALL"),
        ("{", 2, "not YAML"),
    ],
)
async def test_what_is_wrong_changes_nothing_and_is_told(
    start: Start, file: File, engine: StartEngine, caplog: pytest.LogCaptureFixture, text: str, line: int, words: str
) -> None:
    running = await start({"workers": urls(await engine()), "tenants": keyed("a")})
    in_force = await admin(running, "/config")
    file.raw(text + "\n")
    status, body = await reload(running)
    assert status == 400
    (problem, *_) = body["error"]["problems"]
    assert problem["line"] == line
    assert words in problem["message"]
    assert words in caplog.text
    assert await admin(running, "/config") == in_force
    assert (await ask(running, "key-a")).status == 200
    health = await told(running)
    assert not health["last_reload_ok"]
    assert health["generation"] == 0
    assert words in health["last_error"][0]["message"]
    text_of = await admin(running, "/metrics")
    assert "warmroute_config_last_reload_ok 0.0" in text_of
    assert 'warmroute_config_reloads_total{outcome="failed"} 1.0' in text_of
    file.write(file.says)
    assert (await reload(running))[1]["outcome"] == "unchanged"
    assert (await told(running))["last_reload_ok"]


async def test_what_takes_a_restart_stays_and_is_told_by_name(start: Start, file: File, engine: StartEngine) -> None:
    said = {"workers": urls(await engine()), "tenants": keyed("a")}
    running = await start(said)
    port, admin_port = running.port, running.admin.port
    file.write(
        {
            **said,
            "listen": {"port": 1, "idle": "3m"},
            "admin": {"port": 2},
            "sessions": {"state": str(file.path.with_name("state")), "idle": "1h"},
            "metrics": {"port": 3},
            "isolation_key": "another",
        }
    )
    status, body = await reload(running)
    assert status == 200
    assert body["changed"] == ["listen.idle", "sessions.idle"]
    names = {"listen.port", "admin.port", "sessions.state", "metrics", "isolation_key"}
    assert set(body["needs_restart"]) == names
    assert set((await told(running))["needs_restart"]) == names
    assert "warmroute_config_needs_restart 5.0" in await admin(running, "/metrics")
    assert (running.port, running.admin.port) == (port, admin_port)
    assert (await admin(running, "/config"))["listen"] == {
        **(await admin(running, "/config"))["listen"],
        "port": 0,
        "idle": 180.0,
    }
    file.write(said)
    await reload(running)
    assert (await told(running))["needs_restart"] == []


async def test_a_tokenizer_takes_a_restart_to_come_and_goes_with_its_model(
    start: Start, file: File, engine: StartEngine
) -> None:
    said = {"workers": urls(await engine()), "policy": "cache_aware"}
    running = await start({**said, "models": {"sim": {"tokenizer": "engine"}}})
    assert (await ask(running, None)).status == 200
    file.write({**said, "models": {"sim": {"aliases": ["x"]}}})
    assert (await reload(running))[1]["needs_restart"] == ["models.sim.tokenizer"]
    assert (await ask(running, None, model="x")).status == 200
    file.write(said)
    assert (await reload(running))[1] == {
        "outcome": "applied",
        "changed": ["models.sim"],
        "generation": 2,
        "needs_restart": [],
    }
    assert not running.gateway.modes
    assert (await ask(running, None)).status == 200
    file.write({**said, "models": {"sim": {"tokenizer": "engine"}}})
    assert (await reload(running))[1]["needs_restart"] == ["models.sim.tokenizer"]
    assert (await ask(running, None)).status == 200


async def test_the_admin_token_is_not_lost_to_an_address_that_is_not_followed(
    start: Start, file: File, engine: StartEngine
) -> None:
    """The file is right as a whole, but its address takes a restart: without a token the old one would be open to all."""
    workers = urls(await engine())
    running = await start({"workers": workers, "admin": {"host": "0.0.0.0", "token": "admin-secret"}})
    file.write({"workers": workers, "admin": {"host": "127.0.0.1"}})
    url = f"http://127.0.0.1:{running.admin.port}"
    async with aiohttp.ClientSession() as http:
        bearer = {"authorization": "Bearer admin-secret"}
        async with http.post(f"{url}/config/reload", headers=bearer) as answer:
            assert answer.status == 400
            assert "admin.token" in await answer.text()
        async with http.get(f"{url}/config") as answer:
            assert answer.status == 401
        async with http.get(f"{url}/healthz") as answer:
            assert set((await answer.json())["config"]) == {"generation", "reloaded_at", "last_reload_ok"}
        file.write({"workers": workers, "admin": {"host": "0.0.0.0", "token": "other-secret"}})
        async with http.post(f"{url}/config/reload", headers=bearer) as answer:
            assert (await answer.json())["changed"] == ["admin.token"]
        async with http.get(f"{url}/config", headers=bearer) as answer:
            assert answer.status == 401


async def test_flags_win_at_every_reload(start: Start, file: File, engine: StartEngine) -> None:
    started, listed = await engine(), await engine()

    def flags(config: Config) -> None:
        config.workers.append(WorkerConfig(started.url))
        config.policy = "random"

    running = await start({"workers": urls(listed)}, flags)  # type: ignore[call-arg]
    file.write({"policy": "least_load", "retries": {"attempts": 2}})
    status, body = await reload(running)
    assert status == 200
    assert body["changed"] == [f"workers[{listed.url}]", "retries.attempts"]
    assert (await ask(running, None)).one("x-warmroute-decision").startswith("random/")
    await until(lambda: set(running.fleet.workers) == {_id(started)})


async def test_without_a_file_there_is_nothing_to_reload(file: File, engine: StartEngine) -> None:
    file.write({"workers": urls(await engine())})
    running = Running(Source(str(file.path)).load())
    await running.start()
    try:
        status, body = await reload(running)
        assert status == 409
        assert "without a configuration file" in body["error"]["message"]
    finally:
        await running.stop(0)


# -- watching -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
async def test_the_file_is_followed_and_a_touch_is_no_change(start: Start, file: File, engine: StartEngine) -> None:
    said = {"workers": urls(await engine()), "tenants": keyed("a")}
    running = await start(said)
    file.write(said)
    await asyncio.sleep(0.5)
    health = await told(running)
    assert (health["generation"], health["reloaded_at"]) == (0, None)
    file.write({**said, "tenants": keyed("a", "b")})
    await until(lambda: running.reloading.generation == 1)
    assert (await ask(running, "key-b")).status == 200
    file.raw("tenants: [{name: }")
    await until(lambda: running.reloading.problems)
    assert (await ask(running, "key-b")).status == 200
    file.write({**said, "tenants": keyed("b")})
    await until(lambda: running.reloading.generation == 2)
    assert not running.reloading.problems
    assert (await ask(running, "key-a")).status == 401
    assert await series(running, "warmroute_config_reloads") == [{"outcome": "applied"}, {"outcome": "failed"}]


@pytest.mark.usefixtures("quick")
async def test_files_of_keys_are_followed_even_beside_a_configuration_that_is_broken(
    start: Start, file: File, engine: StartEngine, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\n")
    said = {"workers": urls(await engine()), "tenants": [{"name": "a", "key_files": [str(keys)]}]}
    running = await start(said)
    async with await Raw.connect(running.port) as client:
        assert (await client.ask(request(chat(max_tokens=1), "x-api-key: first-key"))).status == 200
        keys.write_text("first-key\nsecond-key\n")
        await until(lambda: running.reloading.generation == 1)
        assert (await ask(running, "second-key")).status == 200
        file.raw("broken: true")
        await until(lambda: running.reloading.problems)
        keys.write_text("second-key\n")
        await until(lambda: running.reloading.generation == 2)
        assert (await client.ask(request(chat(max_tokens=1), "x-api-key: first-key"))).status == 401
        assert (await ask(running, "second-key")).status == 200
    assert [each.key for each in running.reloading.problems] == ["broken"], "that is as wrong as before"
    keys.unlink()
    await until(lambda: len(running.reloading.problems) == 2)
    assert "cannot be read" in running.reloading.problems[0].message
    assert (await ask(running, "second-key")).status == 200, "a file that is gone takes no key along"
    keys.write_text("# nobody\n")
    await until(lambda: running.reloading.generation == 3)
    assert [each.key for each in running.reloading.problems] == ["broken"]
    assert (await ask(running, "second-key")).status == 401, "one that is empty does"
    assert (await ask(running, None)).status == 401


async def test_a_signal_reloads_a_gateway_that_serves(file: File, engine: StartEngine) -> None:
    started = await engine()
    file.write({"workers": urls(started), "tenants": keyed("a")})
    script = (
        "import sys, asyncio; from gateway.cli import main; from gateway import run; found = run.Running.start\n"
        "async def start(self):\n    await found(self); print(self.port, self.admin.port, flush=True)\n"
        "run.Running.start = start\nsys.exit(main(sys.argv[1:]))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, "serve", "--config", str(file.path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            port, admin_port = map(int, (await process.stdout.readline()).split())
        file.write({"workers": urls(started), "tenants": keyed("a", "b")})
        process.send_signal(signal.SIGHUP)
        async with aiohttp.ClientSession() as http:
            for _ in range(1500):
                async with http.get(f"http://127.0.0.1:{admin_port}/healthz") as answer:
                    health = (await answer.json())["config"]
                if health["generation"]:
                    break
                await asyncio.sleep(0.01)
        assert health == {**health, "generation": 1, "last_reload_ok": True}
        listed = await once(port, request(b"", "x-api-key: key-b", path="/v1/models", method="GET"))
        assert listed.status == 200
    finally:
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await process.wait() == 0


@pytest.mark.usefixtures("quick")
async def test_nothing_fails_while_it_is_reloaded_again_and_again(
    start: Start, file: File, engine: StartEngine
) -> None:
    workers = urls(await engine(), await engine())
    running = await start({"workers": workers, "tenants": keyed("a", "x0")})
    over = asyncio.Event()
    seen: list[int] = []

    async def client() -> None:
        async with await Raw.connect(running.port) as client:
            while not over.is_set():
                seen.append((await client.ask(request(chat(max_tokens=1), "x-api-key: key-a"))).status)

    clients = [asyncio.ensure_future(client()) for _ in range(8)]
    for number in range(1, 21):
        listed = workers if number % 2 else workers[:1]
        file.write(
            {"workers": listed, "tenants": keyed("a", f"x{number}"), "policy": ("random", "cache_aware")[number % 2]}
        )
        assert (await reload(running))[0] == 200
    over.set()
    await asyncio.gather(*clients)
    assert len(seen) > 20
    assert set(seen) == {200}
    assert (await told(running))["generation"] >= 20


# -- pure ---------------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where a configuration has something that is not made of parts."""
    if is_dataclass(value):
        return [leaf for each in fields(value) for leaf in leaves(getattr(value, each.name), (*path, each.name))]
    return [path]


def changed(config: Config, path: tuple[str, ...]) -> None:
    """Make one key say something else, of its own type."""
    place: Any = config
    for name in path[:-1]:
        place = getattr(place, name)
    value = getattr(place, path[-1])
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif path in (("workers",), ("tenants",)):
        other = [WorkerConfig("http://h:1") if path == ("workers",) else TenantConfig("t", [Secret("k")])]
    elif isinstance(value, list):
        other = [*value, "x"]
    elif isinstance(value, dict):
        other = {**value, "new": ModelConfig(tokenizer="engine") if path == ("models",) else {"name": "random"}}
    elif path == ("listen", "tls"):
        other = TLS("c", "k")
    else:
        other = None if value else Secret("other")
    setattr(place, path[-1], other)


@given(st.sets(st.sampled_from(leaves(Config()))), st.sets(st.sampled_from(leaves(Config()))))
def test_every_key_is_either_followed_or_told_to_take_a_restart(one: set[Any], other: set[Any]) -> None:
    before, after = Config(), Config()
    for path in sorted(one):
        changed(before, path)
    for path in sorted(other):
        changed(after, path)
    found = effective(before, after)
    followed = [change.path for change in compare(tree(before, b""), tree(found, b""))]
    left = [change.path for change in compare(tree(found, b""), tree(after, b""))]
    assert all(map(live, followed))
    assert not any(map(live, left))
    whole = {change.path for change in compare(tree(before, b""), tree(after, b""))}
    # A model that is new is followed as such, and its tokenizer is not.
    assert whole <= {*followed, *left} <= whole | {("models", "new", "tokenizer")}
    assert not list(compare(tree(effective(found, after), b""), tree(found, b"")))


def test_what_is_followed_of_a_change_is_what_was_where_it_takes_a_restart() -> None:
    before = Config(models={"m": ModelConfig(tokenizer="engine", aliases=["x"])})
    after = Config(
        listen=Listen(port=1, idle=5.0),
        metrics=MetricsAddress(),
        models={"m": ModelConfig(aliases=["y"]), "n": ModelConfig(tokenizer="engine")},
        tenants=[TenantConfig("t")],
    )
    found = effective(before, after)
    assert (found.listen.port, found.listen.idle, found.metrics) == (8080, 5.0, None)
    assert {name: (model.tokenizer, model.aliases) for name, model in found.models.items()} == {
        "m": ("engine", ["y"]),
        "n": (None, []),
    }
    left = [change.key for change in compare(tree(found, b""), tree(after, b""))]
    assert left == ["listen.port", "metrics", "models.m.tokenizer", "models.n.tokenizer"]
    assert not any(live(change.path) for change in compare(tree(found, b""), tree(after, b"")))
