"""A whole gateway over real sockets, in front of simulated engines or of workers whose every byte a test writes."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from gateway.seat import Seat
from gateway.workers import State
from load_tests.engine import Engine, EngineOptions
from tests.conftest import Require
from tests.gateway.collector import Collector, collecting
from tests.gateway.redis_server import RedisServer
from tests.gateway.scripted import Scripted
from tests.gateway.talk import until

Begin = Callable[..., Awaitable[Running]]
StartEngine = Callable[..., Awaitable[Engine]]
StartScripted = Callable[..., Awaitable[Scripted]]


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that ``warmroute serve`` runs on: it orders callbacks otherwise than asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


async def start_gateway(
    *workers: Scripted | Engine | str | WorkerConfig,
    change: Callable[[Config], None] | None = None,
    ready: bool = True,
    policy: str = "round_robin",
    seat: Seat | None = None,
) -> Running:
    """A gateway on free ports. ``change`` edits its configuration; ``ready``: wait for all workers."""
    config = Config(policy=policy)
    config.listen.host = "127.0.0.1"
    config.listen.port = config.admin.port = 0
    config.drain = 0.0
    config.drain_limit = 0.5
    config.probes.join = config.probes.health = 0.1
    # A machine that runs other tests beside this one is no gateway under pressure.
    config.pressure.lag = 10.0
    for worker in workers:
        if isinstance(worker, WorkerConfig):
            config.workers.append(worker)
        elif isinstance(worker, Scripted):
            config.workers.append(WorkerConfig(worker.url, engine="generic"))
        else:
            config.workers.append(WorkerConfig(worker if isinstance(worker, str) else worker.url))
    if change is not None:
        change(config)
    running = Running(config, seat=seat)
    await running.start()
    if ready:
        await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()), 20)
        keeper = running.keeper
        await until(lambda: keeper is None or not keeper.restoring)
    return running


@pytest.fixture
async def gateway() -> AsyncIterator[Begin]:
    """Starts gateways (see `start_gateway`); at the end nothing may be in flight and no defect counted."""
    started: list[Running] = []

    async def begin(*workers: Any, **options: Any) -> Running:
        running = await start_gateway(*workers, **options)
        started.append(running)
        return running

    yield begin
    for running in started:
        await running.stop()
        assert running.gateway.defects == 0, "the gateway counted a defect of its own"
        assert {target.name: target.running for target in running.fleet.targets.values() if target.running} == {}


@pytest.fixture
async def engine() -> AsyncIterator[StartEngine]:
    """Starts simulated engines, fast ones unless told otherwise."""
    engines: list[Engine] = []

    async def begin(dialect: str = "vllm", **options: Any) -> Engine:
        options.setdefault("time_scale", 0.02)
        started = await Engine.start(EngineOptions(dialect=dialect, **options))  # type: ignore[arg-type]
        engines.append(started)
        return started

    yield begin
    for started in engines:
        await started.kill()


@pytest.fixture
async def scripted() -> AsyncIterator[StartScripted]:
    """Starts workers that answer what a test says."""
    workers: list[Scripted] = []

    async def begin(*replies: Any, **options: Any) -> Scripted:
        worker = Scripted(*replies, **options)
        await worker.start()
        workers.append(worker)
        return worker

    yield begin
    for worker in workers:
        await worker.stop()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    """Takes traces."""
    async with collecting() as there:
        yield there


@pytest.fixture
def redis(require: Require) -> Iterator[RedisServer]:
    require("redis", shutil.which("redis-server") is not None, "apt-get install redis-server")
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(folder)
        server.start()
        yield server
        server.kill()
