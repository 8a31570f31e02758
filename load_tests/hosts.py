"""Two gateways on hosts of their own behind a balancer that sends each turn of a session to the next of them, beside one alone.

    python -m load_tests.hosts [--sessions 400] [--turns 6] [--kill] [--redis-gone SECONDS] [--json]

Hosts are network namespaces on a bridge, so it needs root, ``ip`` and ``redis-server``; it takes all of them away again.
Engines are simulated, and tell what they found in their caches themselves. With ``--kill`` one gateway is killed half way, and
the balancer sends everything to the other. With ``--redis-gone`` Redis is killed half way for so many seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from load_tests.engine import Engine, EngineOptions

NET = "10.213.7"
BRIDGE = "wrbr0"
ENGINES = 8
KV_TOKENS = 800_000
THINK = (1.0, 4.0)
"""Seconds between two turns of a session."""
BEGIN = 30.0
"""Seconds within which sessions begin."""
PATIENCE = 60.0


@dataclass
class Figures:
    """What came of one run."""

    turns: int = 0
    at_home: int = 0
    failed: int = 0
    hit_rate: float | None = None
    moved_after_kill: int = 0
    converged_seconds: float | None = None
    bytes_a_request: float | None = None
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def home_share(self) -> float | None:
        """Of the turns behind a session's first."""
        return self.at_home / self.turns if self.turns else None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network(hosts: int) -> Iterator[list[str]]:
    """Namespaces ``wrh0`` and so on, at ``NET.10`` and so on; this one is at ``NET.1``."""
    names = [f"wrh{number}" for number in range(hosts)]
    _clear(names)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", f"wrv{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"wrv{number}", "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{NET}.{10 + number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        _clear(names)


def _clear(names: list[str]) -> None:
    links = [["link", "del", f"wrv{number}"] for number in range(len(names))]
    for words in (*(["netns", "del", name] for name in names), *links, ["link", "del", BRIDGE]):
        subprocess.run(["ip", *words], check=False, capture_output=True)


class Host:
    """A gateway in a namespace."""

    def __init__(self, name: str, number: int, engines: list[Engine], redis: str | None, folder: Path) -> None:
        self.address = f"{NET}.{10 + number}"
        file, log = folder / f"{name}.yaml", folder / f"{name}.log"
        workers = "".join(f"  - {{url: '{each.url}'}}\n" for each in engines)
        told = "" if redis is None else f"replicas: {{redis: '{redis}'}}\n"
        file.write_text(
            f"listen: {{host: 0.0.0.0, port: 8080}}\nadmin: {{host: 0.0.0.0, port: 8081, token: {'t' * 32}}}\n"
            f"policy: cache_aware\ndrain: 0s\ndrain_limit: 1s\npressure: {{lag: 5s}}\n{told}workers:\n{workers}"
        )
        self.log = log
        with log.open("wb") as out:
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "gateway", "serve", "--config", str(file)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        self.url = f"http://{self.address}:8080"

    async def admin(self, http: httpx.AsyncClient, path: str) -> httpx.Response:
        """What its control plane says."""
        return await http.get(f"http://{self.address}:8081{path}", headers={"authorization": "Bearer " + "t" * 32})

    async def ready(self, http: httpx.AsyncClient, peers: int) -> None:
        """It serves, and hears so many others."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    text = (await self.admin(http, "/metrics")).text
                    ready = (await http.get(self.url + "/readyz")).status_code == 200
                    if ready and (not peers or f"\nwarmroute_replicas {float(peers)}" in text):
                        return
                except httpx.HTTPError:
                    if self.process.poll() is not None:
                        raise RuntimeError(self.log.read_text()) from None
                await asyncio.sleep(0.1)

    async def metric(self, http: httpx.AsyncClient, start: str) -> float:
        """The sum of lines that begin so."""
        lines = (await self.admin(http, "/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(20)


class Balancer:
    """Sends each request to the next gateway that lives, and tells what came of it."""

    def __init__(self, hosts: list[Host], http: httpx.AsyncClient, words: int) -> None:
        """``words``: three times as many are added by a turn."""
        self.hosts = hosts
        self.words = words
        self.http = http
        self.figures = Figures()
        self.homes: dict[int, str] = {}
        self._next = 0
        self.killed = False

    async def session(self, number: int, turns: int, random: Random) -> None:
        """All turns of one session."""
        messages: list[dict[str, str]] = [{"role": "system", "content": "You are of use. " * 150}]
        await asyncio.sleep(random.uniform(0, BEGIN))
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{number}.{turn} " + "and more of it " * self.words})
            body = {"model": "sim", "messages": messages, "max_tokens": 8}
            self._next += 1
            host = self.hosts[self._next % len(self.hosts)]
            try:
                answer = await self.http.post(
                    host.url + "/v1/chat/completions", json=body, headers={"x-session-id": f"s{number}"}
                )
            except httpx.HTTPError as error:
                if host not in self.hosts:
                    # It was killed under this request: a client asks again.
                    messages.pop()
                    continue
                self.figures.statuses[type(error).__name__] += 1
                self.figures.failed += 1
                return
            self.figures.statuses[str(answer.status_code)] += 1
            if answer.status_code != 200:
                self.figures.failed += 1
                return
            self._at(number, answer.headers["x-warmroute-worker"])
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            await asyncio.sleep(random.uniform(*THINK))

    def _at(self, number: int, worker: str) -> None:
        home = self.homes.get(number)
        if home is not None:
            self.figures.turns += 1
            self.figures.at_home += worker == home
            self.figures.moved_after_kill += self.killed and worker != home
        self.homes[number] = worker


async def run(options: argparse.Namespace, hosts: int, folder: Path, redis_port: int) -> Figures:
    """One run with so many gateways."""
    async with AsyncExitStack() as stack:
        names = stack.enter_context(network(hosts))
        engines = []
        for _ in range(ENGINES):
            engine = await Engine.start(
                EngineOptions(dialect="vllm", host=f"{NET}.1", kv_tokens=KV_TOKENS, time_scale=0.02)
            )
            stack.push_async_callback(engine.kill)
            engines.append(engine)
        redis = Redis(redis_port, folder)
        stack.callback(redis.kill)
        if hosts > 1:
            redis.start()
        gateways = []
        for number, name in enumerate(names):
            host = Host(name, number, engines, redis.url if hosts > 1 else None, folder)
            stack.callback(host.stop)
            gateways.append(host)
        http = await stack.enter_async_context(
            httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=500, max_keepalive_connections=500))
        )
        for host in gateways:
            await host.ready(http, hosts - 1)
        balancer = Balancer(list(gateways), http, options.words)
        random = Random(7)
        sessions = [
            asyncio.create_task(balancer.session(number, options.turns, Random(random.random())))
            for number in range(options.sessions)
        ]
        if hosts > 1:
            await _trouble(options, balancer, gateways, redis, http, sessions)
        await asyncio.gather(*sessions)
        figures = balancer.figures
        stats = [engine.stats() for engine in engines]
        prompt = sum(each["prompt_tokens"] for each in stats)
        figures.hit_rate = sum(each["cached_tokens"] for each in stats) / prompt if prompt else None
        if hosts > 1:
            live = balancer.hosts
            said = sum([await host.metric(http, 'warmroute_replicas_bytes_total{what="said"}') for host in live])
            asked = sum([await host.metric(http, "warmroute_requests_total") for host in live])
            figures.bytes_a_request = said / asked if asked else None
        return figures


async def _trouble(
    options: argparse.Namespace,
    balancer: Balancer,
    gateways: list[Host],
    redis: Redis,
    http: httpx.AsyncClient,
    sessions: list[asyncio.Task[None]],
) -> None:
    half = options.sessions * options.turns // 2
    if not options.kill and not options.redis_gone:
        return
    while sum(balancer.figures.statuses.values()) < half and not all(each.done() for each in sessions):
        await asyncio.sleep(0.05)
    if options.redis_gone:
        redis.kill()
        await asyncio.sleep(options.redis_gone)
        redis.start()
    if options.kill:
        gone = gateways[-1]
        balancer.hosts.remove(gone)
        gone.stop(signal.SIGKILL)
        balancer.killed = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        while await gateways[0].metric(http, "warmroute_replicas "):
            await asyncio.sleep(0.1)
        balancer.figures.converged_seconds = loop.time() - began


class Redis:
    """Of all hosts."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"redis://{NET}.1:{port}/0"
        self._command = ["redis-server", "--port", str(port), "--bind", f"{NET}.1", "--save", "", "--dir", str(folder)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """From nothing."""
        self._process = subprocess.Popen([*self._command, "--protected-mode", "no"], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """At once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


def told(figures: Figures) -> dict[str, Any]:
    """For people and scripts."""
    share, rate, each = figures.home_share, figures.hit_rate, figures.bytes_a_request
    return {
        "turns": figures.turns,
        "at_home": None if share is None else round(share, 4),
        "hit_rate": None if rate is None else round(rate, 4),
        "failed": figures.failed,
        "statuses": dict(figures.statuses),
        "moved_after_kill": figures.moved_after_kill,
        "converged_seconds": None if figures.converged_seconds is None else round(figures.converged_seconds, 2),
        "bus_bytes_a_request": None if each is None else round(each),
    }


def possible() -> str | None:
    """Why it cannot be run here; ``None``: it can."""
    for program in ("ip", "redis-server"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if os.geteuid():
        return "only root makes network namespaces"
    try:
        with network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.decode().strip()}"


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Two gateways, and one, on the same sessions."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        two = await run(options, 2, folder, 16399)
        one = await run(options, 1, folder, 16399)
    return {"two": told(two), "one": told(one)}


def main() -> int:
    """The command; 0 when no request failed."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.hosts", description=__doc__)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--words", type=int, default=500, help="a turn adds three times as many (default 500)")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--redis-gone", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # Whoever ends it, it takes everything away.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    why = possible()
    if why is not None:
        print(f"this cannot be run here: {why}", file=sys.stderr)
        return 2
    found = asyncio.run(compare(options))
    if options.json:
        print(json.dumps(found))
    else:
        for which, figures in found.items():
            print(which, *(f"{name}={value}" for name, value in figures.items()))
    return int(any(figures["failed"] for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
