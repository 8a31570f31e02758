"""What a worker does not hold, but can get: out of a store that its pool shares, or from the session's home."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from gateway.workers import State, Target
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import name, text_of
from tests.gateway.talk import Response, admin, once, request, settled, until
from tests.load_tests.engine.pairs import STORY

STREAMS = [False, True]
BUSY = 200.0
"""Requests of others that keep a home busy: it costs more than any transfer."""


@dataclass
class Two:
    """Two unified workers, one session, and an engine alone that is always right."""

    running: Running
    engines: list[Engine]
    alone: Engine
    messages: list[dict[str, Any]] = field(default_factory=list)

    def target(self, engine: Engine) -> Target:
        return self.running.fleet.workers[name(engine)].targets[0]

    def busy(self, engine: Engine, requests: float = BUSY) -> None:
        """With requests that others sent."""
        target = self.target(engine)
        target.foreign = target.busy = requests

    def body(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        body = {"model": "sim", "messages": self.messages, "max_tokens": 12, "temperature": 0, "stream": stream}
        return body | fields

    def says(self, words: str) -> None:
        self.messages.append({"role": "user", "content": words})

    async def turn(self, words: str = STORY * 4, stream: bool = False, **fields: Any) -> Response:
        """The session's next, answered rightly."""
        self.says(f"{len(self.messages)} {words}")
        body = self.body(stream, **fields)
        plain = {key: value for key, value in self.body().items() if key != "kv_transfer_params"}
        right = text_of(await once(self.alone.port, request(plain)), False)
        answer = await once(self.running.port, request(body, "X-Session-Id: s"))
        assert answer.status == 200, answer.body
        assert text_of(answer, stream) == right
        self.messages.append({"role": "assistant", "content": right})
        await until(lambda: not self.running.gateway.exchanges)
        return answer

    def split(self, answer: Response) -> tuple[Engine, Engine]:
        """Who answered, and the other."""
        at = [name(each) for each in self.engines].index(answer.one("x-warmroute-worker"))
        return self.engines[at], self.engines[1 - at]

    async def route(self, **fields: Any) -> dict[str, Any]:
        """The dry run of what the session would say next."""
        messages = [*self.messages, {"role": "user", "content": "And?"}]
        url = f"http://127.0.0.1:{self.running.admin.port}/route"
        data = json.dumps({**self.body(**fields), "messages": messages})
        async with aiohttp.ClientSession() as http, http.post(url, data=data, headers={"X-Session-Id": "s"}) as answer:
            assert answer.status == 200, await answer.text()
            told: dict[str, Any] = await answer.json()
            return told

    async def rows(self) -> dict[str, dict[str, Any]]:
        return {row["target"]: row for row in (await self.route())["candidates"]}

    async def fetches(self) -> float:
        """Requests that were told to fetch."""
        rows = (await admin(self.running, "/metrics")).splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith("warmroute_kv_fetches_total{"))


def named(engine: Engine) -> dict[str, Any]:
    """What the last request said of other engines."""
    told: dict[str, Any] = json.loads(engine.core.recorder.last_body or b"{}")
    return dict(told.get("kv_transfer_params") or {})


def calm(config: Config) -> None:
    config.probes.health = 60.0
    config.probes.load = 600.0
    config.retries.budget = 1.0


async def begin(
    gateway: Begin, engine: StartEngine, told: list[dict[str, Any]], policy: str = "cache_aware", **options: Any
) -> Two:
    engines = [await engine(**options) for _ in told]
    alone = await engine(time_scale=0)
    workers = [WorkerConfig(each.url, **more) for each, more in zip(engines, told, strict=True)]
    return Two(await gateway(*workers, policy=policy, change=calm), engines, alone)


# -- stores -------------------------------------------------------------------------------------------------------------


async def stores(
    gateway: Begin, engine: StartEngine, folder: Path, *told: dict[str, Any], connector: str = "shared"
) -> Two:
    options = {"connector": connector, "shared_dir": str(folder)} if connector else {}
    return await begin(gateway, engine, list(told), **options)


STORES: dict[str, Any] = {"pool": "x", "shared_store": True}


@pytest.mark.parametrize("stream", STREAMS)
async def test_the_other_restores_what_one_computed(
    gateway: Begin, engine: StartEngine, tmp_path: Path, stream: bool
) -> None:
    two = await stores(gateway, engine, tmp_path, STORES, STORES)
    home, other = two.split(await two.turn(stream=stream))
    rows = await two.rows()
    mine, its = rows[name(home)], rows[name(other)]
    assert mine["holding_tokens"]["device"] > 0
    assert not mine["holding_tokens"].get("shared") and not mine["terms"]["restore"]
    assert its["holding_tokens"]["device"] == 0
    assert its["holding_tokens"]["shared"] == mine["holding_tokens"]["device"]
    assert its["terms"]["restore"] > 0
    assert its["terms"]["transfer"] == 0
    two.busy(home)
    told = await two.route()
    assert (told["target"], told["reason"]) == (name(other), "moved")
    answer = await two.turn(stream=stream)
    assert answer.one("x-warmroute-worker") == name(other)
    assert answer.one("x-warmroute-decision") == "cache_aware/moved"
    assert int(answer.one("x-warmroute-predicted-cached-tokens")) > 0
    assert other.stats()["transferred_tokens"] > 0, "it was in the store"
    assert (await two.route())["session"]["home"] == name(other)
    assert await two.fetches() == 0
    assert "kv_transfer_params" not in json.loads(other.core.recorder.last_body)
    await settled(two.running)


OTHERWISE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"pool": "x"}, {"pool": "x"}),
    ({"pool": "x", "shared_store": False}, {"pool": "x", "shared_store": False}),
    (STORES, {"pool": "x"}),
    (STORES, {"pool": "y", "shared_store": True}),
]


@pytest.mark.parametrize("told", OTHERWISE)
async def test_nothing_is_restored_without_a_store_of_the_same_pool(
    gateway: Begin, engine: StartEngine, tmp_path: Path, told: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    two = await stores(gateway, engine, tmp_path, *told, connector="")
    for _ in range(2):
        home, other = two.split(await two.turn())
    its = (await two.rows())[name(other)]
    assert sum(its["holding_tokens"].values()) == 0
    assert its["terms"]["restore"] == its["terms"]["transfer"] == 0
    await settled(two.running)


async def test_a_home_that_is_not_busy_keeps_its_session(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    two = await stores(gateway, engine, tmp_path, STORES, STORES)
    home, _ = two.split(await two.turn())
    for _ in range(4):
        assert two.split(await two.turn())[0] is home
    await settled(two.running)


# -- peers --------------------------------------------------------------------------------------------------------------


async def peers(gateway: Begin, engine: StartEngine, *, lends: bool = True, connector: str = "p2p", **more: Any) -> Two:
    """Of real sockets: each is told where the other can be asked."""
    engines = [await engine(connector=connector) for _ in range(2)]
    alone = await engine(time_scale=0)
    sources = [f"127.0.0.1:{each.side_port or 7000 + at}" for at, each in enumerate(engines)]
    workers = [
        WorkerConfig(each.url, **({"kv_source": source} if lends else {}))
        for each, source in zip(engines, sources, strict=True)
    ]
    return Two(await gateway(*workers, policy="cache_aware", change=calm, **more), engines, alone)


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_session_moves_with_its_kv(gateway: Begin, engine: StartEngine, stream: bool) -> None:
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn(stream=stream))
    assert named(home) == {}, "nobody has anything yet"
    held = (await two.rows())[name(home)]["holding_tokens"]["device"]
    two.busy(home)
    told = await two.route()
    rows = {row["target"]: row for row in told["candidates"]}
    assert (told["target"], told["reason"], told["pair"]) == (name(other), "moved", None)
    assert rows[name(other)]["terms"]["transfer"] > 0 == rows[name(home)]["terms"]["transfer"]
    assert sum(rows[name(other)]["holding_tokens"].values()) == held
    assert await two.fetches() == 0, "a dry run changes nothing"
    answer = await two.turn(stream=stream)
    assert answer.one("x-warmroute-worker") == name(other)
    assert answer.one("x-warmroute-decision") == "cache_aware/moved"
    assert answer.all("x-warmroute-prefill-worker") == []
    (source,) = named(other).values()
    assert list(named(other)) == ["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("127.0.0.1", home.side_port)
    assert source["kv_request_id"]
    came, went = (each.stats()["disaggregation"] for each in (other, home))
    assert came["transfers_in"]["tokens"] == went["transfers_out"]["tokens"] > 0
    assert came["transfers_in"]["tokens"] == pytest.approx(held, abs=32)
    assert int(answer.one("x-warmroute-predicted-cached-tokens")) == pytest.approx(held, abs=32)
    assert other.stats()["computed_tokens"] < other.stats()["prompt_tokens"] - held + 64
    assert await two.fetches() == 1
    assert (await two.route())["session"]["home"] == name(other)
    await two.turn(stream=stream)
    assert named(other) == {}, "it holds the rest itself"
    assert await two.fetches() == 1
    await settled(two.running)


async def test_each_fetch_has_a_name_of_its_own(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn())
    seen = set()
    for _ in range(4):
        two.busy(home)
        two.busy(other, 0.0)
        await two.turn()
        seen.add(named(other)["remote_kv_source"]["kv_request_id"])
        home, other = other, home
    assert len(seen) == await two.fetches() == 4
    await settled(two.running)


async def test_real_load_moves_a_session_too(gateway: Begin, engine: StartEngine) -> None:
    """Its home computes others' prompts."""
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn())
    two.target(home).wait = 30.0
    two.target(home).head = 0.0
    told = await two.route()
    assert told["target"] == name(other)
    two.target(home).wait = 0.0
    await settled(two.running)


async def test_nothing_is_named_where_the_home_is_down(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn())
    worker = two.running.fleet.workers[name(home)]
    two.running.fleet.set_state(worker, State.DOWN, "for a test")
    told = await two.route()
    assert [row["terms"]["transfer"] for row in told["candidates"]] == [0]
    await two.turn()
    assert named(other) == {}
    assert await two.fetches() == 0
    assert other.stats()["transferred_tokens"] == 0


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_home_that_just_died_has_nothing(gateway: Begin, engine: StartEngine, stream: bool) -> None:
    """The gateway does not know yet: the peer asks in vain, and computes."""
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn(stream=stream))
    await home.kill()
    answer = await two.turn(stream=stream)
    assert answer.one("x-warmroute-worker") == name(other)
    assert other.stats()["transferred_tokens"] == 0


async def test_nothing_is_named_where_little_would_be_gained(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    home, other = two.split(await two.turn("Hi."))
    two.busy(home)
    assert (await two.rows())[name(other)]["terms"]["transfer"] == 0
    answer = await two.turn("Well?")
    assert answer.one("x-warmroute-worker") == name(other)
    assert named(other) == {}
    assert await two.fetches() == 0
    await settled(two.running)


@pytest.mark.parametrize(("path", "key"), [("/v1/embeddings", "input"), ("/tokenize", "prompt")])
async def test_nothing_is_named_on_paths_that_do_not_generate(
    gateway: Begin, engine: StartEngine, path: str, key: str
) -> None:
    two = await peers(gateway, engine)
    said = STORY * 4
    body = {"model": "sim", "prompt": said, "max_tokens": 4}
    answer = await once(two.running.port, request(body, "X-Session-Id: s", path="/v1/completions"))
    home, other = two.split(answer)
    two.busy(home)
    for _ in range(3):
        sent = {"model": "sim", key: said}
        answer = await once(two.running.port, request(sent, "X-Session-Id: s", path=path))
        assert answer.status == 200, answer.body
    for each in (home, other):
        assert b"remote_kv_source" not in each.core.recorder.last_body
    assert await two.fetches() == 0
    await settled(two.running)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("lends", [False, True])
async def test_the_client_s_own_parameters_reach_no_engine(
    gateway: Begin, engine: StartEngine, lends: bool, moved: bool
) -> None:
    two = await peers(gateway, engine, lends=lends)
    home, other = two.split(await two.turn())
    if moved:
        two.busy(home)
    own = {"remote_kv_source": {"kv_request_id": "own", "remote_host": "10.1.2.3", "remote_port": 9}}
    await two.turn(kv_transfer_params=own)
    for each in (home, other):
        assert b"10.1.2.3" not in each.core.recorder.last_body
        assert each.core.recorder.last_body.count(b"kv_transfer_params") <= 1
    assert bool(named(other)) is (moved and lends)
    assert await two.fetches() == float(moved and lends)
    await settled(two.running)


async def test_without_sources_nothing_is_fetched(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine, lends=False)
    home, other = two.split(await two.turn())
    two.busy(home)
    row = (await two.rows())[name(other)]
    assert (sum(row["holding_tokens"].values()), row["terms"]["transfer"]) == (0, 0)
    await two.turn()
    await two.turn()
    assert other.stats()["transferred_tokens"] == 0
    assert await two.fetches() == 0
    await settled(two.running)


async def test_kv_that_does_not_come_from_a_peer(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    home, _ = two.split(await two.turn())
    two.busy(home)
    home.faults.add("transfer_fail", count=1)
    await two.turn()
    two.busy(home, 0.0)
    await settled(two.running)


async def test_many_sessions_at_once(gateway: Begin, engine: StartEngine) -> None:
    """All leave a busy home, each with its own KV."""
    two = await peers(gateway, engine)
    sessions = [Two(two.running, two.engines, two.alone) for _ in range(6)]

    async def turn(number: int) -> None:
        said = sessions[number]
        said.says(f"{number} {len(said.messages)} {STORY}")
        right = text_of(await once(two.alone.port, request(said.body())), False)
        answer = await once(two.running.port, request(said.body(), f"X-Session-Id: {number}"))
        assert (answer.status, text_of(answer, False)) == (200, right)
        said.messages.append({"role": "assistant", "content": right})

    for round_ in range(3):
        two.busy(two.engines[round_ % 2])
        two.busy(two.engines[1 - round_ % 2], 0.0)
        await asyncio.gather(*map(turn, range(6)))
        await until(lambda: not two.running.gateway.exchanges)
    assert await two.fetches() > 0
    moved = sum(each.stats()["disaggregation"]["transfers_in"]["tokens"] for each in two.engines)
    assert moved > 0
    await settled(two.running)
