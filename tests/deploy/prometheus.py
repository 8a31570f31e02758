"""A real Prometheus for one test."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

CONFIG = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"
BINARY = shutil.which("prometheus")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Prometheus:
    """Its HTTP API. Times are Unix seconds."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        response = await self.http.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["data"]["result"]
        return found

    async def label_values(self, metric: str, label: str) -> set[str]:
        """What a dashboard's ``label_values(metric, label)`` offers."""
        response = await self.http.get(f"/api/v1/label/{label}/values", params={"match[]": metric})
        assert response.status_code == 200, response.text
        return set(response.json()["data"])

    async def value(self, query: str) -> float | None:
        """The newest value of a query that yields one series; ``None`` if it yields none."""
        found = await self.ask("query", query=query)
        return float(found[0]["value"][1]) if found else None


@asynccontextmanager
async def scraping(port: int, folder: Path) -> AsyncIterator[Prometheus]:
    """The shipped configuration with ``port`` of loopback as the gateway, scraped every second."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = "1s"
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] == "warmroute"]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{port}"]
    config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(CONFIG.parent / name) for name in config["rule_files"]]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    assert BINARY is not None
    command = [BINARY, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        listen = f"--web.listen-address={address}"
        process = await asyncio.create_subprocess_exec(*command, listen, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as http:
            prometheus = Prometheus(http)
            async with asyncio.timeout(30):
                while not await _up(prometheus):
                    assert process.returncode is None, (folder / "log").read_text()[-2000:]
                    await asyncio.sleep(0.1)
            yield prometheus
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.wait_for(process.wait(), 10)


async def _up(prometheus: Prometheus) -> bool:
    """Whether it scraped the gateway once."""
    try:
        return await prometheus.value("up") == 1
    except (httpx.HTTPError, AssertionError):
        return False
