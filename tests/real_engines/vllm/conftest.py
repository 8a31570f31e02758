"""Two vLLM servers on the CPU, gateways in front of them, and figures at the end."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from load_tests.client import quantile
from tests.conftest import Require
from tests.real_engines.vllm.engine import PLAIN, PYTHON, VLLM
from tests.real_engines.vllm.pair import Pair, staged
from tests.real_engines.vllm.talk import Figures, until

Fleet = Callable[..., list[VLLM]]
Begin = Callable[..., Any]
StartPair = Callable[..., Awaitable[Pair]]

_figures = Figures()


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that ``warmroute serve`` runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder."""
    require("vllm", (PYTHON.parents[1] / "ready").exists(), "make test-engines")
    folder = tmp_path_factory.mktemp("vllm") / "model"
    script = Path(__file__).with_name("write_model.py")
    subprocess.run([PYTHON, script, folder], check=True, timeout=120)
    return folder


@pytest.fixture(scope="session")
def servers(model: Path) -> Iterator[list[VLLM]]:
    """Both engines, not started yet: see `engines`. Their logs lie beside the model."""
    both = [VLLM(name, model, model.parent) for name in ("one", "two")]
    yield both
    for engine in both:
        engine.end()


@pytest.fixture
def engines(servers: list[VLLM]) -> Fleet:
    """``engines(flags, flags)``: both serve with these flags, whatever the test before did to them. ``None``: any flags."""

    def ready(*wanted: tuple[str, ...] | None) -> list[VLLM]:
        late = []
        for engine, flags in zip(servers, wanted or (None, None), strict=True):
            if not engine.alive or flags not in (None, engine.flags):
                engine.start(flags or PLAIN)
                late.append(engine)
        for engine in late:
            engine.wait()
        return servers

    return ready


@pytest.fixture
async def gateway() -> AsyncIterator[Begin]:
    """Starts cache-aware gateways; at the end nothing may be in flight and no defect counted."""
    started: list[Running] = []

    async def begin(engines: list[VLLM], change: Callable[[Config], None] = lambda config: None) -> Running:
        config = Config(policy="cache_aware", workers=[WorkerConfig(engine.url) for engine in engines])
        config.listen.host = "127.0.0.1"
        config.listen.port = config.admin.port = 0
        config.drain, config.drain_limit = 0.0, 1.0
        config.probes.health = config.probes.join = 0.2
        change(config)
        running = Running(config)
        started.append(running)
        await running.start()
        await until(lambda: sum(1 for _ in running.fleet.ready()) == len(engines))
        return running

    yield begin
    for running in started:
        await running.stop()
        assert running.gateway.defects == 0
        assert {target.name: target.running for target in running.fleet.targets.values() if target.running} == {}


@pytest.fixture
async def pair(gateway: Begin, servers: list[VLLM], engines: Fleet) -> AsyncIterator[StartPair]:
    """``await pair(policy, ...)``: both engines as a pair, and a gateway in front of them. At the end neither may run
    anything, nor keep anything that is not kept for the session's next turn.

    ``flags``: each engine's. ``through``: what stands between the gateway and (prefill, decode) engine, by its URL.
    ``change`` edits the configuration; ``more`` are fields of its ``disaggregation``.
    """
    made: list[Pair] = []
    async with httpx.AsyncClient(timeout=60) as http:

        async def begin(
            policy: str = "round_robin",
            *,
            flags: Callable[[VLLM], tuple[str, ...]] = VLLM.paired,
            through: tuple[str | None, str | None] = (None, None),
            change: Callable[[Config], None] = lambda config: None,
            **more: Any,
        ) -> Pair:
            p, d = await asyncio.to_thread(engines, *[flags(engine) for engine in servers])

            def told(config: Config) -> None:
                staged(policy, **more)(config)
                for worker, url in zip(config.workers, through, strict=True):
                    worker.url = url or worker.url
                change(config)

            made.append(Pair(await gateway([p, d], told), p, d, http))
            return made[-1]

        yield begin
        for each in made:
            hands_back = '"bidirectional_kv_xfer": true' in " ".join(each.d.flags)
            await (each.running_nothing(10) if hands_back else each.idle())


@pytest.fixture(scope="session")
def figures() -> Figures:
    """What tests measured; printed at the end."""
    return _figures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A failure shows the ends of the engines' logs."""
    report = yield
    if report.failed:
        for engine in getattr(item, "funcargs", {}).get("servers", []):
            if engine.log.exists():
                report.sections.append((f"log of engine {engine.name}: {engine.log}", engine.told()))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A short table."""
    if _figures.events:
        terminalreporter.section("predictions from KV events of two vLLM engines")
        for name, value in _figures.events.items():
            terminalreporter.write_line(f"{name:<36}{value}")
    if _figures.pairs:
        terminalreporter.section("a vLLM prefill engine and a vLLM decode engine")
        for name, value in _figures.pairs.items():
            terminalreporter.write_line(f"{name:<48}{value}")
    turns = _figures.turns
    if not turns:
        return
    errors = [turn.error for turn in turns if turn.error is not None]
    tokens = [abs(turn.cached - turn.predicted) for turn in turns if turn.predicted is not None]
    prompt, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
    predicted = sum(turn.predicted or 0 for turn in turns)
    rows = {
        "sessions": f"{_figures.sessions}",
        "requests": f"{len(turns)}",
        "prompt tokens": f"{prompt}",
        "hit rate, reported by the engines": f"{cached / prompt:.1%}",
        "hit rate, predicted by the gateway": f"{predicted / prompt:.1%}",
        "prediction off by, median": f"{statistics.median(tokens):.0f} tokens, {statistics.median(errors):.1%} of the prompt",
        "prediction off by, p95": f"{quantile(tokens, 0.95):.0f} tokens, {quantile(errors, 0.95):.1%} of the prompt",
        "time to first token, p50": f"{1000 * statistics.median(turn.ttft for turn in turns):.0f} ms",
    }
    terminalreporter.section("sessions on two vLLM engines")
    for name, value in rows.items():
        terminalreporter.write_line(f"{name:<36}{value}")
