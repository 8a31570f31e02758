"""Every query of the shipped dashboards, run by a real Prometheus that scraped a real gateway under load."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from gateway.config import (
    Config,
    DiscoveryConfig,
    LimitsConfig,
    ModelConfig,
    Recording,
    Secret,
    ShadowConfig,
    TenantConfig,
    WorkerConfig,
)
from gateway.reference import reference
from gateway.run import Running
from gateway.seat import Seat
from load_tests.client import Client, Results
from load_tests.demo import MODEL, Fleet
from load_tests.engine import Engine, EngineOptions
from load_tests.workloads.agents import agent_sessions
from tests.conftest import Require
from tests.deploy.prometheus import BINARY, Prometheus, scraping

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = {file.stem: json.loads(file.read_text()) for file in (DEPLOY / "grafana/dashboards").glob("*.json")}
PANELS = [panel for each in DASHBOARDS.values() for panel in each["panels"] if panel["type"] != "row"]
CURE = "apt-get install prometheus"
ORPHAN = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": 2,
    "token_ids": [*range(16)],
    "block_size": 16,
}
"""Stored behind a block that nobody knows."""
PAIRS = "warmroute_pd_"
UNSEEN = {
    "warmroute_routed_requests_total",
    "warmroute_jwks_reads_total",
    "warmroute_jwks_age_seconds",
    "warmroute_jwks_keys",
}
"""Metrics of which no panel is: what they tell is on others, or in an alert."""
UNITS = {"s", "short", "reqps", "bytes", "percentunit"}


def filled(query: str, interval: str = "5s") -> str:
    """A query as Grafana sends it with every variable at All."""
    for name, value in (("$__rate_interval", interval), ("$model", ".*"), ("$target", ".*"), ("$tenant", ".*")):
        query = query.replace(name, value)
    assert "$" not in query
    return query


def queries() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


async def start_fleet(stack: AsyncExitStack, folder: Path) -> Fleet:
    """Engines that publish KV events, one of them with host memory below a small device; chats are routed by token ids."""
    engines = []
    for number in range(4):
        small = not number
        options = EngineOptions(
            models=[MODEL],
            seed=number,
            kv_tokens=16_000 if small else 48_000,
            host_tokens=64_000 if small else 0,
            events=True,
            events_replay=True,
            offload_events="full",
        )
        engine = await Engine.start(options)
        stack.push_async_callback(engine.kill)
        engines.append(engine)
    config = Config(models={MODEL: ModelConfig(tokenizer="engine")}, drain=0.0, drain_limit=5.0)
    config.listen.host, config.listen.port, config.admin.port = "127.0.0.1", 0, 0
    config.workers = [WorkerConfig(engine.url) for engine in engines]
    config.probes.load = 0.3
    (folder / "none.json").write_text("[]")
    config.discovery = [
        DiscoveryConfig("file", options={"path": str(folder / "none.json")}),
        DiscoveryConfig("file", "missing", options={"path": str(folder / "missing.json")}),
    ]
    config.recording = Recording(str(folder / "recording.jsonl"))
    config.anonymous = True
    config.tenants = [
        TenantConfig("metered", [Secret("metered-key")], limits=LimitsConfig(requests_per_minute=2)),
        TenantConfig("narrow", [Secret("narrow-key")], limits=LimitsConfig(concurrency=1)),
        TenantConfig("tried", [Secret("tried-key")], shadow=ShadowConfig("least_load", share=1.0)),
    ]
    # One of several tells most; its socket's name has to be short.
    seat = Seat(0, 1, stack.enter_context(TemporaryDirectory(dir="/tmp")), "aa" * 8, "secret", {}, -1, -1)
    running = Running(config, seat=seat)
    await running.start()
    stack.push_async_callback(running.stop)
    index = running.gateway.index
    async with asyncio.timeout(30):
        while sum(index.of(target).exact for target in running.fleet.targets) < len(engines):
            await asyncio.sleep(0.02)
    return Fleet(engines, running)


async def trouble(fleet: Fleet, turn: int) -> None:
    """Whatever the panels for trouble count: a reset, a full engine, an opened breaker, a client that leaves, a refusal,
    events that are lost or of no use, a prompt that no token ids are made of."""
    first, second, third, _ = fleet.engines
    first.faults.add("reset", count=2)
    second.faults.add("queue_full", count=1)
    third.faults.add("error500", count=5)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "stream": True}
    async with httpx.AsyncClient(base_url=fleet.url, timeout=30) as http:
        for number in range(60):
            messages = [{"role": "user", "content": f"{number} hello"}]
            await http.post("/v1/chat/completions", json={**body, "max_tokens": 2, "messages": messages})
        for engine in fleet.engines:
            # The first is lost on its way: with the second one that is noticed, and both are asked for.
            engine.events.drop(1)
            engine.events.inject(b"no batch")
            engine.events.inject(msgspec.msgpack.encode([time(), [ORPHAN], 0]))
        for number in range(16):
            # Given as token ids, other ones each time, and more of them than the smallest cache holds.
            first = 100_000 * turn + 5_000 * number
            prompt = [*range(first, first + 4_000)]
            await http.post("/v1/completions", json={"model": MODEL, "max_tokens": 2, "prompt": prompt})
        await http.post("/v1/messages", json={"model": MODEL, "max_tokens": 2, "messages": messages})
        async with http.stream("POST", "/v1/chat/completions", json={**body, "messages": messages}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    break
        assert (await http.get("/v1/nothing")).status_code == 404
        await of_tenants(http, turn)


async def of_tenants(http: httpx.AsyncClient, turn: int) -> None:
    """One is over its limit, one may run one request at a time, one has a shadow; one key is nobody's; a prompt breaks."""

    async def ask(key: str, text: str, **more: Any) -> int:
        headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})} if key else more.pop("headers", {})
        messages = [{"role": "system", "content": more.pop("system", "Be brief.")}, {"role": "user", "content": text}]
        body = {"model": MODEL, "max_tokens": 2, "messages": messages, **more}
        return (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code

    for number in range(4):
        await ask("metered-key", f"{turn} {number}")
        await ask("tried-key", f"{turn} {number} " + "a story that is told again " * (40 * number))
    assert await ask("nobody's-key", "hello") == 401
    long = {"max_tokens": 300, "ignore_eos": True}
    statuses = await asyncio.gather(
        ask("narrow-key", "one", **long),
        ask("narrow-key", "two"),
        *[ask("narrow-key", f"more {at}", headers={"x-request-timeout": "0.05"}, **long) for at in range(2)],
    )
    assert 429 in statuses
    rules = "It is half past ten. " + "Follow each of the rules. " * 200
    for minute in range(3):
        # Far more than a page is shared, and then it breaks.
        system = rules.replace("ten", f"{minute + 1}{turn}")
        await ask("", "go on", system=system, headers={"x-session-id": f"broken-{turn}"})


async def settled(prometheus: Prometheus, fleet: Fleet) -> None:
    """Until the newest scrape has everything: the sum of cached tokens equals what the engines count themselves."""
    async with asyncio.timeout(20):
        while True:
            cached = sum(engine.stats()["cached_tokens"] for engine in fleet.engines)
            if await prometheus.value("sum(warmroute_cached_tokens_total)") == cached:
                return
            await asyncio.sleep(0.2)


async def holds(prometheus: Prometheus, fleet: Fleet) -> None:
    """Tokens that targets are said to hold are those that engines cache: on the device but for blocks that it has twice, below
    it to the token."""
    async with asyncio.timeout(20):
        while True:
            stats = [engine.stats() for engine in fleet.engines]
            device, host = (16 * sum(each[name] for each in stats) for name in ("kv_blocks_cached", "host_blocks"))
            told = {
                series["metric"]["tier"]: float(series["value"][1])
                for series in await prometheus.ask("query", query="sum by (tier) (warmroute_target_held_tokens)")
            }
            if told["host"] == host > 0 and 0.95 * device <= told["device"] <= device:
                assert await prometheus.value("sum(warmroute_target_belief)") == len(fleet.engines)
                return
            await asyncio.sleep(0.2)


async def agrees(prometheus: Prometheus, fleet: Fleet) -> None:
    """Counters to the token, the dashboard's hit rate to what extrapolation at the edges of an interval costs."""
    stats = [engine.stats() for engine in fleet.engines]
    cached, prompt = (sum(each[name] for each in stats) for name in ("cached_tokens", "prompt_tokens"))
    assert await prometheus.value("sum(warmroute_prompt_tokens_total)") == prompt
    assert await prometheus.value("sum(warmroute_cache_reported_prompt_tokens_total)") == prompt
    for engine, each in zip(fleet.engines, stats, strict=True):
        of_target = f'sum(warmroute_cached_tokens_total{{target="127.0.0.1:{engine.port}"}})'
        assert await prometheus.value(of_target) == each["cached_tokens"]
    panel = next(query for title, query in queries() if title == "Hit rate against its ceiling")
    shown = await prometheus.value(filled(panel, "5m"))
    assert shown == pytest.approx(cached / prompt, abs=0.03)


async def test_every_panel_has_data_and_agrees_with_the_engines(require: Require, tmp_path: Path) -> None:
    require("prometheus", BINARY is not None, CURE)
    sessions = agent_sessions(sessions=16, turns=5, seed=3, think=0.4, spread=1.5)
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, tmp_path)
        prometheus = await stack.enter_async_context(scraping(fleet.running.admin.port, tmp_path))
        began = time()
        async with Client(fleet.url, MODEL) as client:
            results = await client.run(sessions, Results())
        assert results.errors == []
        await settled(prometheus, fleet)
        await agrees(prometheus, fleet)
        await offers(prometheus, fleet)
        await seen(
            prometheus, [each for each in queries() if PAIRS not in each[1]], lambda turn: trouble(fleet, turn), began
        )
        await holds(prometheus, fleet)
        assert fleet.running.gateway.defects == 0


async def seen(
    prometheus: Prometheus, missing: list[tuple[str, str]], again: Callable[[int], Awaitable[None]], began: float
) -> None:
    """Every query has data: a counter must have been scraped once before its rate can be told, so ``again`` until all have."""
    for turn in range(8):
        await again(turn)
        await asyncio.sleep(1.2)
        missing = [each for each in missing if not await has_data(prometheus, each[1], began)]
        if not missing:
            break
    assert missing == []


async def test_the_row_of_pairs_has_data(require: Require, tmp_path: Path) -> None:
    require("prometheus", BINARY is not None, CURE)
    async with AsyncExitStack() as stack:
        config = Config(models={MODEL: ModelConfig(tokenizer="engine")}, drain=0.0, drain_limit=5.0, policy="sides")
        config.policies["sides"] = {"name": "disaggregated", "prefill": "least_load", "decode": "prefix_hash"}
        config.disaggregation.bidirectional = True
        config.listen.host, config.listen.port, config.admin.port = "127.0.0.1", 0, 0
        engines = []
        for role in ("prefill", "prefill", "decode"):
            engine = await Engine.start(EngineOptions(models=[MODEL], role=role, bidirectional=True, time_scale=0.1))
            stack.push_async_callback(engine.kill)
            engines.append(engine)
            config.workers.append(WorkerConfig(engine.url, role=role))
        running = Running(config)
        await running.start()
        stack.push_async_callback(running.stop)
        async with asyncio.timeout(30):
            while len(list(running.fleet.ready())) < len(engines):
                await asyncio.sleep(0.02)
        prometheus = await stack.enter_async_context(scraping(running.admin.port, tmp_path))

        async def talk(turn: int) -> None:
            """A session of three turns, and prefill workers that fail now and then."""
            engines[turn % 2].faults.add("error500", count=1)
            messages: list[dict[str, str]] = []
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.port}", timeout=30) as http:
                for number in range(3):
                    messages.append({"role": "user", "content": f"{turn} {number} " + "and so on " * 200})
                    body = {"model": MODEL, "max_tokens": 40, "messages": messages, "stream": number == 2}
                    answer = await http.post(
                        "/v1/chat/completions", json=body, headers={"x-session-id": f"talk-{turn}"}
                    )
                    assert answer.status_code == 200, answer.text
                    if number < 2:
                        messages.append(
                            {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}
                        )

        await seen(prometheus, [each for each in queries() if PAIRS in each[1]], talk, time())
        assert running.gateway.defects == 0


async def offers(prometheus: Prometheus, fleet: Fleet) -> None:
    """The dashboard's variables list the model and all targets."""
    targets = {f"127.0.0.1:{engine.port}" for engine in fleet.engines}
    for name, values in (("model", {MODEL}), ("target", targets), ("tenant", {"anonymous"})):
        (variable,) = [each for each in DASHBOARDS["cache"]["templating"]["list"] if each["name"] == name]
        asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
        assert asked is not None
        assert await prometheus.label_values(asked[1], asked[2]) == values


async def has_data(prometheus: Prometheus, query: str, since: float) -> bool:
    found = await prometheus.ask("query_range", query=filled(query), start=since, end=time(), step=1)
    return any(isfinite(float(value)) for series in found for _, value in series["values"])


def test_panels_say_what_they_show() -> None:
    for panel in PANELS:
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert set(DASHBOARDS) == {"fleet", "cache", "tenants", "gateway"}
    for each in DASHBOARDS.values():
        assert len({panel["id"] for panel in each["panels"]}) == len(each["panels"])
        names = {variable["name"] for variable in each["templating"]["list"]}
        text = json.dumps(each)
        # A variable that changes nothing would be a lie.
        assert names - {"datasource"} == {name for name in ("model", "tenant", "target") if f"${name}" in text}
        assert each["annotations"]["list"]


def test_what_is_shipped_is_what_its_source_makes() -> None:
    """``python deploy/grafana/build.py`` writes it."""
    made = subprocess.run(
        [sys.executable, "-c", "import build, json; print(json.dumps(build.texts()))"],
        cwd=DEPLOY / "grafana",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shipped = {file.name: file.read_text() for file in (DEPLOY / "grafana/dashboards").glob("*.json")}
    assert json.loads(made.stdout) == shipped


async def test_every_metric_is_on_some_dashboard() -> None:
    text = json.dumps(DASHBOARDS)
    told = re.findall(r"^\| `(\w+)`", await reference(), re.MULTILINE)
    assert len(told) > 80
    assert {name for name in told if name not in text} == UNSEEN


def test_queries_take_rates_of_counters_and_hide_no_gap() -> None:
    for title, query in queries():
        assert "vector(0)" not in query, title
        if "_total" in query or "_bucket" in query:
            assert query.count("rate(") == query.count("[$__rate_interval]") > 0, title
        assert "avg" not in query, title


def test_provisioned_files_point_at_each_other() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/warmroute.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
