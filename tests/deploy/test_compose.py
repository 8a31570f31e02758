"""What the compose file runs, without containers: both gateways with the configuration it mounts, Redis with its command."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import yaml

from load_tests.engine import Engine, EngineOptions
from tests.conftest import Require
from tests.gateway.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
GATEWAYS = [name for name in COMPOSE if name.startswith("gateway-")]


def free_ports(count: int) -> list[int]:
    sockets = [socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def started(stack: AsyncExitStack, file: Path, folder: Path) -> None:
    """One gateway with that configuration, which ends with the test."""
    with (folder / "log").open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway", "serve", "--config", str(file)),
            stderr=out,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()

    stack.push_async_callback(end)


async def heard(http: httpx.AsyncClient, port: int) -> list[float]:
    """For each process of a gateway, how many others it hears."""
    try:
        text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    except httpx.HTTPError:
        return []
    return [float(each) for each in re.findall(r"^warmroute_replicas\{[^}]*\} (\S+)$", text, re.MULTILINE)]


async def test_all_processes_of_both_gateways_hear_each_other_and_serve(require: Require, tmp_path: Path) -> None:
    require("redis", shutil.which("redis-server") is not None, "apt-get install redis-server")
    text = (ROOT / "deploy/examples/compose.yaml").read_text()
    async with AsyncExitStack() as stack:
        command = COMPOSE["redis"]["command"]
        redis = RedisServer(str(tmp_path), *command[1:])
        redis.start()
        stack.callback(redis.kill)
        await redis.up()
        for name in ("engine-a", "engine-b"):
            engine = await Engine.start(EngineOptions(dialect="vllm", time_scale=0.02))
            stack.push_async_callback(engine.kill)
            text = text.replace(f"http://{name}:8000", engine.url)
        text = text.replace("redis://redis:6379/0", redis.url)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=20))
        ports: dict[str, tuple[int, int]] = {}
        for name in GATEWAYS:
            (tmp_path / name).mkdir()
            clients, metrics = free_ports(2)
            ports[name] = clients, metrics
            told = yaml.safe_load(text)
            told["listen"] = {"host": "127.0.0.1", "port": clients}
            told["metrics"] = {"host": "127.0.0.1", "port": metrics}
            told |= {"admin": {"port": 0}, "drain": "0s", "drain_limit": "5s"}
            file = tmp_path / f"{name}.yaml"
            file.write_text(yaml.safe_dump(told))
            await started(stack, file, tmp_path / name)
        processes = yaml.safe_load(text)["replicas"]["processes"]
        everybody = [float(processes * len(GATEWAYS) - 1)] * processes
        for _ in range(450):
            counts = [await heard(http, metrics) for _, metrics in ports.values()]
            if all(each == everybody for each in counts):
                break
            await asyncio.sleep(0.2)
        logs = "\n".join((tmp_path / name / "log").read_text() for name in GATEWAYS)
        assert all(each == everybody for each in counts), (counts, logs)
        body = {"model": "sim", "messages": [{"role": "user", "content": "a question " * 50}], "max_tokens": 4}
        homes = set()
        for clients, _ in (*ports.values(), *ports.values()):
            url = f"http://127.0.0.1:{clients}/v1/chat/completions"
            answer = await http.post(url, json=body, headers={"x-session-id": "one"})
            assert answer.status_code == 200, answer.text
            homes.add(answer.headers["x-warmroute-worker"])
        assert len(homes) == 1
