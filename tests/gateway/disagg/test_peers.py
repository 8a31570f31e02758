"""Peers: a session that leaves its busy home takes its KV along, and nothing is asked of a home for nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from gateway.config import Config, ModelConfig, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import name, text_of
from tests.gateway.disagg.two import Two, calm, named
from tests.gateway.talk import once, request, settled, until
from tests.load_tests.engine.pairs import STORY

STREAMS = [False, True]


async def peers(
    gateway: Begin, engine: StartEngine, *, lends: bool = True, change: Callable[[Config], None] = calm
) -> Two:
    """Of real sockets: each is told where the other can be asked."""
    engines = [await engine(connector="p2p") for _ in range(2)]
    alone = await engine(time_scale=0)
    sources = [f"127.0.0.1:{each.side_port}" for each in engines]
    workers = [
        WorkerConfig(each.url, **({"kv_source": source} if lends else {}))
        for each, source in zip(engines, sources, strict=True)
    ]
    return Two(await gateway(*workers, policy="cache_aware", change=change), engines, alone)


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


async def test_an_isolated_tenant_s_session_moves_in_its_own_cache(gateway: Begin, engine: StartEngine) -> None:
    """Named by an alias, with parameters of the client's own: what is cut out, put in and renamed goes together."""

    def change(config: Config) -> None:
        calm(config)
        config.tenants = [TenantConfig(each, [Secret(f"key-{each}")], isolation="isolated") for each in ("a", "b")]
        config.models["sim"] = ModelConfig(aliases=["alias"])

    two = await peers(gateway, engine, change=change)
    said = [{"role": "user", "content": STORY * 4}]
    own = {"kv_transfer_params": {"remote_kv_source": 1}, "model": "alias", "max_tokens": 4}
    right = None
    for tenant in ("a", "b"):
        fields = (f"Authorization: Bearer key-{tenant}", "X-Session-Id: s")
        two.busy(two.engines[0], 0.0)
        two.busy(two.engines[1], 0.0)
        home, other = two.split(await once(two.running.port, request(two.body(messages=said, **own), *fields)))
        await until(lambda: not two.running.gateway.exchanges)
        before = other.stats()["transferred_tokens"]
        two.busy(home)
        answer = await once(two.running.port, request(two.body(messages=said, **own), *fields))
        await until(lambda: not two.running.gateway.exchanges)
        assert answer.one("x-warmroute-worker") == name(other)
        right = right or answer.json()["choices"][0]["message"]["content"]
        assert answer.json()["choices"][0]["message"]["content"] == right
        assert named(other)["remote_kv_source"]["remote_port"] == home.side_port
        sent = json.loads(other.core.recorder.last_body)
        assert sent["model"] == "sim"
        assert sent["cache_salt"]
        assert other.stats()["transferred_tokens"] > before, "each tenant's own"
    assert await two.fetches() == 2
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
