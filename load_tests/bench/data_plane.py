"""The data plane's CPU: contenders one at a time on a core of their own, load and mock engines on another, in rounds."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

import msgspec

from load_tests.bench.contenders import OBSERVED, OURS, Address, Contender
from load_tests.bench.load import KEY, Load, Measured
from load_tests.bench.processes import Started, cores, free_ports, resident_mb, start, tree

START_SECONDS = 60.0
RUN_SECONDS = 150.0
STREAM = "stream"
SCENARIOS = {
    "1k": Load(0, requests=8000, warmup=500, body=1024, shared=256),
    "20k": Load(0, requests=5000, warmup=300, body=20_480, shared=8192),
    "100k": Load(0, requests=2000, warmup=150, body=102_400, shared=8192),
    "agent": Load(0, requests=2 * 64 * 24, body=2048, shared=8192, sessions=64, turns=24),
    STREAM: Load(0, requests=96, warmup=32, body=2048, stream=True),
}
MANY = ("20k", "agent")
"""What is measured at many targets."""

Key = tuple[str, str, int, str]
"""(contender, policy, targets, scenario)."""


class BenchError(RuntimeError):
    """A contender did not start, or a run did not end as it should."""


class DataPlane:
    """Mock engines in one process; starts contenders in front of them. ``with DataPlane(folder) as plane``."""

    def __init__(self, folder: Path, engines: int) -> None:
        self.folder = folder
        self.gateway_core, self.load_core = cores()
        self.engines = free_ports(engines)
        self.seed = 0
        self._mock: Started | None = None

    def __enter__(self) -> DataPlane:
        command = [sys.executable, "-m", "load_tests.bench.mock", *map(str, self.engines)]
        self._mock = start(command, self.load_core, self.folder / "mock.log")
        try:
            _wait(lambda: _status(self.engines[-1], "/health") == 200, self._mock, "the mock engines")
        except BaseException:
            self._mock.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._mock is not None:
            self._mock.stop()

    @contextmanager
    def running(self, contender: Contender) -> Iterator[tuple[Address, Started]]:
        """``contender``, ready to serve."""
        address = Address(*free_ports(2))
        log = self.folder / f"{contender.name}-{contender.policy}-{contender.targets}.log"
        engines = self.engines[: contender.targets]
        started = start(contender.command(address, engines, self.folder), self.gateway_core, log)
        what = f"{contender.name} {contender.policy} (see {log})"
        try:
            _wait(lambda: _serves(address.port), started, what)
            if contender.name in (OURS, OBSERVED):
                _wait(lambda: _ready_workers(address.admin) == contender.targets, started, what)
            yield address, started
        finally:
            started.stop()

    def run(self, load: Load, address: Address, started: Started) -> Measured:
        """One load against a running contender. Raises `BenchError`."""
        self.seed += 1
        pids = tree(started.process.pid)
        load = msgspec.structs.replace(load, port=address.port, pids=pids, seed=self.seed)
        command = [sys.executable, "-m", "load_tests.bench.load", msgspec.json.encode(load).decode()]
        log = self.folder / f"load-{self.seed}.log"
        generator = start(command, self.load_core, log)
        try:
            generator.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchError("the load generator did not end") from None
        finally:
            generator.stop()
        said = log.read_text().strip()
        if generator.process.returncode != 0:
            raise BenchError(f"the load generator failed: {said[-500:]}")
        return msgspec.json.decode(said.splitlines()[-1], type=Measured)

    def rounds(self, contenders: Sequence[Contender], rounds: int, tell: Callable[[str], None]) -> dict[Key, float]:
        """Medians over rounds of CPU microseconds: a request, or an event for streams.

        Every round measures every contender, in another order. A contender that fails is told and left out.
        """
        values: dict[Key, list[float]] = defaultdict(list)
        order, shuffle = list(contenders), Random(1).shuffle
        for number in range(1, rounds + 1):
            shuffle(order)
            for contender in order:
                what = f"round {number}: {contender.name} {contender.policy}, {contender.targets} targets"
                try:
                    for scenario, value in self._round(contender):
                        values[contender.name, contender.policy, contender.targets, scenario].append(value)
                        what += f"  {scenario} {value:.0f}"
                except BenchError as error:
                    what += f"  FAILED: {error}"
                tell(what)
        return {key: round(median(found), 1) for key, found in values.items()}

    def _round(self, contender: Contender) -> Iterator[tuple[str, float]]:
        with self.running(contender) as (address, started):
            for name, load in SCENARIOS.items():
                if contender.targets > 2 and name not in MANY:
                    continue
                got = self.run(load, address, started)
                if got.errors:
                    raise BenchError(f"{name}: {got.errors} of {got.requests} requests failed")
                if load.stream and not got.events:
                    raise BenchError(f"{name}: no answer was streamed")
                yield name, got.cpu_seconds * 1e6 / (got.events if load.stream else got.requests)

    def memory(self, contender: Contender) -> dict[str, float]:
        """Resident MB before and after 20,000 distinct prompts of 20 KB."""
        load = Load(0, requests=20_000, body=20_480, shared=8192)
        with self.running(contender) as (address, started):
            self.run(msgspec.structs.replace(load, requests=500, body=1024, shared=256), address, started)
            before = resident_mb(tree(started.process.pid))
            got = self.run(load, address, started)
            after = resident_mb(tree(started.process.pid))
        if got.errors:
            raise BenchError(f"memory: {got.errors} of {got.requests} requests failed")
        return {"before_mb": round(before, 1), "after_mb": round(after, 1), "growth_mb": round(after - before, 1)}


def _wait(ready: Callable[[], bool], started: Started, what: str) -> None:
    end = time.monotonic() + START_SECONDS
    while not ready():
        if not started.alive:
            raise BenchError(f"{what} ended with status {started.process.returncode}")
        if time.monotonic() > end:
            raise BenchError(f"{what} did not become ready in {START_SECONDS:.0f} s")
        time.sleep(0.05)


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body; status 0 if nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body, {"content-type": "application/json", "authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _status(port: int, path: str) -> int:
    return _ask(port, "GET", path)[0]


def _serves(port: int) -> bool:
    body = b'{"model":"mock","max_tokens":4,"messages":[{"role":"user","content":"hello"}]}'
    status, answer = _ask(port, "POST", "/v1/chat/completions", body)
    return status == 200 and b"choices" in answer


def _ready_workers(admin: int) -> int:
    text = _ask(admin, "GET", "/metrics")[1].decode()
    return sum(float(value) == 1 for value in re.findall(r'warmroute_worker_state\{.*state="ready".*\} (\S+)', text))
