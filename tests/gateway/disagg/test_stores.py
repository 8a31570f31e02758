"""A store that a pool shares: what one worker computed another brings back from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import WorkerConfig
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import name
from tests.gateway.disagg.two import Two, calm
from tests.gateway.talk import settled

STREAMS = [False, True]


async def stores(
    gateway: Begin, engine: StartEngine, folder: Path, *told: dict[str, Any], connector: str = "shared"
) -> Two:
    options = {"connector": connector, "shared_dir": str(folder)} if connector else {}
    engines = [await engine(**options) for _ in told]
    alone = await engine(time_scale=0)
    workers = [WorkerConfig(each.url, **more) for each, more in zip(engines, told, strict=True)]
    return Two(await gateway(*workers, policy="cache_aware", change=calm), engines, alone)


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
        _, other = two.split(await two.turn())
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
