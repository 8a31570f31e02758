"""A new operator's exercise: five things go wrong, and each is found on the dashboards alone.

A fleet under load is scraped by a real Prometheus. What a panel shows is asked with its own query; pictures of those panels go
to the folder that WARMROUTE_PICTURES names, else to the test's own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from math import isfinite
from pathlib import Path
from random import Random
from time import time
from typing import Any

import httpx
import pytest

from gateway.config import Config, ModelConfig, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.run import Running
from load_tests.demo import MODEL
from load_tests.engine import Engine, EngineOptions
from load_tests.workloads.agents import words
from tests.conftest import Require
from tests.deploy.picture import drawn
from tests.deploy.prometheus import BINARY, Prometheus, scraping
from tests.deploy.test_dashboard import CURE, DASHBOARDS, filled

pytestmark = pytest.mark.slow
SEEN = 12.0
"""Seconds that are looked back at."""
TENANTS = ("atlas", "birch", "cedar")


def panel(title: str) -> dict[str, Any]:
    return next(each for board in DASHBOARDS.values() for each in board["panels"] if each["title"] == title)


class Watched:
    """A fleet that works, as an operator sees it."""

    def __init__(self, running: Running, engines: list[Engine], prometheus: Prometheus, folder: Path) -> None:
        self.running, self.engines, self.prometheus, self.folder = running, engines, prometheus, folder
        self.began = time()
        self.talks: list[asyncio.Task[None]] = []
        self.marks: dict[str, float] = {}

    def target(self, number: int) -> str:
        return f"127.0.0.1:{self.engines[number].port}"

    def talk(self, tenant: str, number: int, system: Callable[[], str], think: float = 0.3, turns: int = 1000) -> None:
        """A session that goes on until the test is over; after some turns it begins anew."""
        self.talks.append(asyncio.create_task(self._talk(tenant, number, system, think, turns)))

    async def _talk(self, tenant: str, number: int, system: Callable[[], str], think: float, turns: int) -> None:
        random = Random(f"{tenant} {number}")
        url = f"http://127.0.0.1:{self.running.port}/v1/chat/completions"
        key = {"authorization": f"Bearer {tenant}-key"}
        async with httpx.AsyncClient(timeout=60) as http:
            for turn in range(10_000):
                if turn % turns == 0:
                    messages = [{"role": "system", "content": ""}]
                messages[0]["content"] = system()
                messages.append({"role": "user", "content": words(random, 60)})
                body = {"model": MODEL, "max_tokens": 16, "messages": messages, "stream": True}
                name = f"{tenant}-{number}-{turn // turns}"
                with suppress(httpx.HTTPError):
                    answer = await http.post(url, json=body, headers={**key, "x-session-id": name})
                    said = "".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', answer.text))
                    messages.append({"role": "assistant", "content": said or "yes"})
                await asyncio.sleep(think * random.uniform(0.7, 1.3))

    def happens(self, what: str) -> None:
        self.marks[what] = time()

    async def shows(self, title: str, query: int = 0) -> dict[str, float]:
        """What a panel shows now: legend -> its newest value."""
        wanted = panel(title)["targets"][query]
        found = await self.prometheus.ask("query", query=filled(wanted["expr"], f"{SEEN:.0f}s"))
        values = {_legend(wanted["legendFormat"], each["metric"]): float(each["value"][1]) for each in found}
        return {legend: value for legend, value in values.items() if isfinite(value)}

    async def until(
        self, title: str, condition: Callable[[dict[str, float]], bool], query: int = 0
    ) -> dict[str, float]:
        """Until a panel shows it, and a picture of it."""
        shown: dict[str, float] = {}
        for _ in range(60):
            shown = await self.shows(title, query)
            if shown and condition(shown):
                break
            await asyncio.sleep(1.0)
        await self.picture(title)
        assert condition(shown), (title, shown)
        return shown

    async def picture(self, title: str) -> None:
        shown: dict[str, list[tuple[float, float]]] = {}
        wanted = panel(title)
        for target in wanted["targets"]:
            query = filled(target["expr"], f"{SEEN:.0f}s")
            found = await self.prometheus.ask("query_range", query=query, start=self.began, end=time(), step=1)
            for each in found:
                points = [(float(at), float(value)) for at, value in each["values"] if isfinite(float(value))]
                if points:
                    shown[_legend(target["legendFormat"], each["metric"])] = points
        named = {self.target(number): f"engine-{number}" for number in range(len(self.engines))}
        plain = {_renamed(legend, named): points for legend, points in shown.items()}
        text = drawn(title, wanted["fieldConfig"]["defaults"]["unit"], plain, self.marks)
        (self.folder / f"{re.sub(r'[^a-z]+', '-', title.lower())}.svg").write_text(text)


def _legend(form: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), form)


def _renamed(legend: str, names: dict[str, str]) -> str:
    for name, plain in names.items():
        legend = legend.replace(name, plain)
    return legend


@asynccontextmanager
async def watched(folder: Path, name: str, options: Callable[[int], dict[str, Any]]) -> AsyncIterator[Watched]:
    """Four engines, three tenants, Prometheus. ``options``: of the engine with that number."""
    told = os.environ.get("WARMROUTE_PICTURES")
    pictures = (Path(told) if told else folder) / name
    pictures.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        engines = []
        for number in range(4):
            settings = {"kv_tokens": 60_000, "events": True, "events_replay": True, **options(number)}
            engine = await Engine.start(EngineOptions(models=[MODEL], seed=number, **settings))
            stack.push_async_callback(engine.kill)
            engines.append(engine)
        config = Config(models={MODEL: ModelConfig(tokenizer="engine")}, drain=0.0, drain_limit=2.0)
        config.listen.host, config.listen.port, config.admin.port = "127.0.0.1", 0, 0
        config.workers = [WorkerConfig(engine.url) for engine in engines]
        config.probes.load = 0.5
        config.pressure.lag = 10.0
        config.tenants = [TenantConfig(tenant, [Secret(f"{tenant}-key")]) for tenant in TENANTS]
        running = Running(config)
        await running.start()
        stack.push_async_callback(running.stop)
        async with asyncio.timeout(30):
            while len(list(running.fleet.ready())) < len(engines):
                await asyncio.sleep(0.02)
        prometheus = await stack.enter_async_context(scraping(running.admin.port, folder))
        there = Watched(running, engines, prometheus, pictures)
        try:
            yield there
        finally:
            for task in there.talks:
                task.cancel()
            await asyncio.gather(*there.talks, return_exceptions=True)
        assert running.gateway.defects == 0


def rules(tenant: str) -> str:
    """A long system prompt, the same for all sessions of a tenant."""
    return f"You work for {tenant}. " + words(Random(tenant), 700)


@pytest.fixture
def prometheus_there(require: Require) -> None:
    require("prometheus", BINARY is not None, CURE)


async def test_a_timestamp_in_one_tenants_prompt(prometheus_there: None, tmp_path: Path) -> None:
    stamped = False

    def system_of(tenant: str) -> Callable[[], str]:
        def system() -> str:
            now = f"It is {time():.3f} now, 2026-11-30T10:{int(time()) % 60:02d}:{int(time() * 10) % 60:02d}. "
            return (now if stamped and tenant == "birch" else "") + rules(tenant)

        return system

    async with watched(tmp_path, "timestamp", lambda number: {}) as there:
        for tenant in TENANTS:
            for number in range(4):
                there.talk(tenant, number, system_of(tenant))
        await there.until("Reported hit rate by tenant", lambda shown: len(shown) == 3 and min(shown.values()) > 0.7)
        stamped = True
        there.happens("a timestamp")
        await there.until(
            "Reported hit rate by tenant",
            lambda shown: shown["birch"] < 0.3 < 0.7 < min(shown["atlas"], shown["cedar"]),
        )
        await there.until("Ceiling by tenant", lambda shown: shown["birch"] < 0.3 < shown["atlas"])
        broken = await there.until(
            "Tokens lost to broken prompts", lambda shown: max(shown, key=lambda legend: shown[legend]) == "birch time"
        )
        assert not [legend for legend, lost in broken.items() if lost > 0 and not legend.startswith("birch")]


async def test_an_engine_with_its_events_off(prometheus_there: None, tmp_path: Path) -> None:
    def quiet(number: int) -> dict[str, Any]:
        return {"events": False, "events_replay": False} if number == 2 else {}

    async with watched(tmp_path, "events", quiet) as there:
        for tenant in TENANTS:
            for number in range(4):
                there.talk(tenant, number, lambda tenant=tenant: rules(tenant))
        believed = await there.until("Belief", lambda shown: sorted(shown.values()) == [2, 3, 3, 3])
        assert believed[there.target(2)] == 2, "predicted, where the others are exact"
        told = await there.until("KV events by target", lambda shown: sum(value > 0 for value in shown.values()) == 3)
        assert there.target(2) not in told


async def test_one_slow_engine(prometheus_there: None, tmp_path: Path) -> None:
    async with watched(tmp_path, "slow", lambda number: {}) as there:
        for tenant in TENANTS:
            for number in range(5):
                there.talk(tenant, number, lambda tenant=tenant: rules(tenant), think=0.2)
        await there.until("Lateness", lambda shown: len(shown) == 4)
        for rank in there.engines[1].core.ranks:
            rank.driver.time_scale *= 12
        there.happens("engine-1 is slow")
        late = await there.until(
            "Lateness",
            lambda shown: there.target(1) in shown and shown[there.target(1)] > 2 * _others(shown, there.target(1)),
        )
        assert max(late, key=lambda legend: late[legend]) == there.target(1)


def _others(shown: dict[str, float], but: str) -> float:
    return max((value for legend, value in shown.items() if legend != but), default=0.0)


async def test_caches_that_are_too_small(prometheus_there: None, tmp_path: Path) -> None:
    async with watched(tmp_path, "eviction", lambda number: {"kv_tokens": 6_000}) as there:
        for tenant in TENANTS:
            for number in range(8):
                there.talk(tenant, number, lambda tenant=tenant, number=number: rules(f"{tenant} {number}"), think=0.5)
        lost = await there.until("Where prompt tokens went", lambda shown: shown["lost to eviction"] > 0.25, 2)
        routed = await there.shows("Where prompt tokens went", 1)
        assert lost["lost to eviction"] > 2 * routed["lost to routing"]
        await there.until("Hit rate against its ceiling", lambda shown: shown["ceiling"] > 0.6, 3)
        reported = await there.shows("Hit rate against its ceiling", 0)
        assert reported["reported"] < 0.6


async def test_a_hot_tenant(prometheus_there: None, tmp_path: Path) -> None:
    async with watched(tmp_path, "hot", lambda number: {}) as there:
        for tenant in TENANTS:
            for number in range(3):
                there.talk(tenant, number, lambda tenant=tenant: rules(tenant))
        await there.until("Computed tokens by tenant", lambda shown: len(shown) == 3)
        there.happens("cedar floods")
        for number in range(100, 112):
            there.talk("cedar", number, lambda number=number: rules(f"{number} {time()}"), think=0.05, turns=1)
        await there.until(
            "Computed tokens by tenant", lambda shown: shown["cedar"] > 3 * (shown["atlas"] + shown["birch"])
        )
        await there.until("Requests by tenant", lambda shown: shown["cedar"] > shown["atlas"] + shown["birch"])


def test_the_walk_through_shows_pictures_that_are_there() -> None:
    folder = Path(__file__).parents[2] / "deploy/grafana"
    text = (folder / "README.md").read_text()
    named = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(named) >= 8
    assert all((folder / each).is_file() for each in named)
    titles = {each["title"] for board in DASHBOARDS.values() for each in board["panels"]}
    told = set(re.findall(r"\*\*([^*]+)\*\*", text))
    assert told
    assert told <= titles, json.dumps(sorted(told - titles))
