"""A gateway and simulated engines as processes of their own on loopback, as a user starts them; ended by their own ids.

Ports are taken free by whoever listens and read from what it prints; an engine that is started again takes the same one.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 30.0
STOP_SECONDS = 20.0
"""For a process that was asked to end; then it is killed."""
ASK_SECONDS = 30.0
TRIES = 5
"""To have a port again."""
LOOK = 0.05
WARMROUTE = [sys.executable, "-c", "from gateway.cli import main; raise SystemExit(main())"]
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting", "sglang:num_running_reqs", "sglang:num_queue_reqs")
"""Requests that an engine has, as it tells."""
_GATEWAY = re.compile(r"listening on 127\.0\.0\.1:(\d+), admin on 127\.0\.0\.1:(\d+)")
_ENGINE = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


class PlaceError(Exception):
    """A process did not start or does not answer; the message says which, and what it printed last."""


class Place:
    """One process. Its output is in ``log``."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process, which was started."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or is stopped by a signal."""
        return self.process is not None and self.process.poll() is None

    async def begin(self, command: Sequence[str], told: re.Pattern[str]) -> re.Match[str]:
        """Start it, and wait until it prints ``told``. Raises `PlaceError`."""
        known = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            # A session of its own: Ctrl-C is for whoever started us, who ends it in order.
            self.process = subprocess.Popen(  # noqa: ASYNC220
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        for _ in range(int(START_SECONDS / LOOK)):
            found = told.search(self.log.read_bytes()[known:].decode(errors="replace"))
            if found is not None:
                return found
            if not self.alive:
                break
            await asyncio.sleep(LOOK)
        raise PlaceError(f"{self.log.stem} did not start:\n{self.log.read_text()[-2000:]}")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.process is not None and self.alive:
            os.kill(self.process.pid, number)

    async def ended(self, seconds: float = STOP_SECONDS) -> int | None:
        """Its exit status; ``None`` if it did not end in time."""
        assert self.process is not None
        for _ in range(int(seconds / LOOK)):
            status = self.process.poll()
            if status is not None:
                return status
            await asyncio.sleep(LOOK)
        return None

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_SECONDS)

    def resident(self) -> int | None:
        """Bytes of memory; ``None`` if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return None

    def descriptors(self) -> int | None:
        """How many it has open; ``None`` if it is gone."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        except OSError:
            return None


class EnginePlace(Place):
    """A simulated engine; ``flags`` are those of ``python -m load_tests.engine``."""

    def __init__(self, folder: Path, name: str, flags: Sequence[str]) -> None:
        super().__init__(folder / f"{name}.log")
        self.flags = list(flags)
        self.port = 0

    @property
    def worker(self) -> str:
        """How the gateway calls it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{self.worker}"

    async def start(self) -> None:
        """On the port that it had, if it had one. Raises `PlaceError`."""
        command = [sys.executable, "-m", "load_tests.engine", "--port", str(self.port), *self.flags]
        for left in reversed(range(TRIES)):
            try:
                self.port = int((await self.begin(command, _ENGINE))[1])
                return
            except PlaceError:
                # Somebody's connection may go out from that port for a moment.
                if not self.port or not left:
                    raise
                await asyncio.sleep(1.0)

    async def busy(self) -> float:
        """Requests that it has. Raises `PlaceError`."""
        found = await scrape(f"{self.url}/metrics")
        return sum(found[name] for name in BUSY if name in found)


class GatewayPlace(Place):
    """``warmroute serve``. Use it as a context: what it holds towards the control plane is closed at the end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "gateway.log")
        self.config = folder / "warmroute.yaml"
        self.port = self.admin = 0
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GatewayPlace:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()
        assert self._http is not None
        await self._http.close()

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://127.0.0.1:{self.port}"

    def write(self, text: str) -> None:
        """Its configuration, as an editor that is careful writes it."""
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)

    async def start(self, workers: int, before: Sequence[str] = ()) -> None:
        """With the configuration that was written; returns when so many workers are ready. Raises `PlaceError`.

        ``before`` is put in front of the command, such as ``prlimit``.
        """
        found = await self.begin([*before, *WARMROUTE, "serve", "--config", str(self.config)], _GATEWAY)
        self.port, self.admin = int(found[1]), int(found[2])
        await self.ready(workers)

    async def ready(self, workers: int) -> None:
        """Wait until so many workers are. Raises `PlaceError`."""
        for _ in range(int(START_SECONDS / LOOK)):
            told = await self.ask("GET", "/workers")
            if sum(worker["state"] == "ready" for worker in told["workers"]) >= workers:
                return
            await asyncio.sleep(LOOK)
        raise PlaceError(f"the workers did not become ready:\n{self.log.read_text()[-2000:]}")

    async def ask(self, method: str, path: str, body: Any = None, good: Sequence[int] = (200, 201, 202)) -> Any:
        """One question to the control plane. Raises `PlaceError` for another status than ``good``, or none."""
        assert self._http is not None
        try:
            async with self._http.request(method, f"http://127.0.0.1:{self.admin}{path}", json=body) as response:
                if response.status not in good:
                    raise PlaceError(f"{method} {path}: {response.status} {await response.text()}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PlaceError(f"{method} {path}: {type(error).__name__} {error}") from None

    async def metrics(self) -> dict[str, float]:
        """Every metric, summed over its labels. Raises `PlaceError`."""
        return await scrape(f"http://127.0.0.1:{self.admin}/metrics")

    async def stop(self) -> int | None:
        """Ask it to end; its exit status, ``None`` if it had to be killed."""
        self.send(signal.SIGINT)
        status = await self.ended()
        self.kill()
        return status


async def scrape(url: str) -> dict[str, float]:
    """Every metric of a Prometheus exposition, summed over its labels. Raises `PlaceError`."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_SECONDS)) as http,
            http.get(url) as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PlaceError(f"{url}: {type(error).__name__} {error}") from None
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
