"""Two llama.cpp servers, and gateways in front of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from tests.conftest import Require

CONTEXT = 32_768
"""Tokens of one slot."""
SLOTS = 2
START = 60.0


def pytest_asyncio_loop_factories(config: Any, item: Any) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that ``warmroute serve`` runs on."""
    return {"uvloop": uvloop.new_event_loop}


def _address(server: subprocess.Popen[str], reader: ThreadPoolExecutor) -> str:
    """The server's URL, once it listens."""
    assert server.stdout is not None
    line = reader.submit(server.stdout.readline).result(START).strip()
    assert line, f"llama.cpp's server ended with status {server.poll()}"
    return line if line.startswith("http") else f"http://{line}"


@pytest.fixture(scope="session")
def llamas(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """URLs of two fresh servers with the same tiny model."""
    found = all(find_spec(name) is not None for name in ("xllamacpp", "gguf", "numpy"))
    require("llamacpp", found, "pip install 'warmroute[engines-llamacpp]', where there is a wheel for the platform")
    from tests.real_engines.llamacpp.model import write_model

    folder = tmp_path_factory.mktemp("llamacpp")
    write_model(folder / "tiny.gguf")
    script = Path(__file__).with_name("server.py")
    command = [sys.executable, str(script), str(folder / "tiny.gguf"), "0", str(CONTEXT), str(SLOTS)]
    servers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{number}.log").open("wb"),
            text=True,
        )
        for number in range(2)
    ]
    try:
        with ThreadPoolExecutor(2) as readers:
            yield [_address(server, readers) for server in servers]
    finally:
        for server in servers:
            server.kill()
            server.wait(10)


@pytest.fixture
async def running(llamas: list[str]) -> AsyncIterator[Running]:
    """A cache-aware gateway in front of both; no defect may have been counted at the end."""
    config = Config(policy="cache_aware", workers=[WorkerConfig(url) for url in llamas])
    config.listen.host = "127.0.0.1"
    config.listen.port = config.admin.port = 0
    config.drain, config.drain_limit = 0.0, 1.0
    running = Running(config)
    await running.start()
    async with asyncio.timeout(30):
        while sum(1 for _ in running.fleet.ready()) < len(llamas):
            await asyncio.sleep(0.02)
    yield running
    await running.stop()
    assert running.gateway.defects == 0
