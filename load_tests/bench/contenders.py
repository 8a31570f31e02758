"""Who is measured: Warmroute with each policy, and the peers that are installed.

Peers are looked for in the folder that ``WARMROUTE_PEERS`` names (one virtual environment a peer) and on the PATH (nginx).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from load_tests.bench.load import KEY
from load_tests.bench.processes import free_ports

POLICIES = ("round_robin", "cache_aware")
OURS = "warmroute"
OBSERVED = "warmroute-observed"
_OBSERVED = """
request_log: {{file: "{folder}/requests-{port}.log"}}
tracing: {{endpoint: "http://127.0.0.1:9/v1/traces"}}
"""
NGINX = """
daemon off; master_process off; worker_processes 1; error_log stderr error; pid {folder}/nginx.pid;
events {{ worker_connections 4096; }}
http {{
  access_log off; sendfile off; tcp_nodelay on; keepalive_requests 100000000;
  client_max_body_size 64m; client_body_buffer_size 512k;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream engines {{ {servers} keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a contender was told to listen; ``admin`` is 0 for peers."""

    port: int
    admin: int = 0


@dataclass(frozen=True, slots=True)
class Contender:
    """One program in one mode. ``command`` gets the address, the engines' ports and a folder for its files."""

    name: str
    policy: str
    targets: int
    command: Callable[[Address, Sequence[int], Path], list[str]]


def ours(policy: str, targets: int = 2, observed: bool = False) -> Contender:
    """Warmroute with everything on: keys, sessions, index, metrics. ``observed``: the log of requests and traces too, of which
    nobody takes a delivery."""

    def command(address: Address, engines: Sequence[int], folder: Path) -> list[str]:
        workers = "".join(f'  - {{url: "http://127.0.0.1:{port}"}}\n' for port in engines)
        path = folder / f"{OURS}-{address.port}.yaml"
        path.write_text(
            f"listen: {{host: 127.0.0.1, port: {address.port}}}\n"
            f"admin: {{host: 127.0.0.1, port: {address.admin}}}\n"
            f"policy: {policy}\ndrain: 0s\ndrain_limit: 1s\n"
            f"tenants: [{{name: bench, keys: [{KEY}]}}]\n"
            f"workers:\n{workers}" + (_OBSERVED.format(folder=folder, port=address.port) if observed else "")
        )
        run = "from gateway.cli import main; raise SystemExit(main())"
        return [sys.executable, "-c", run, "serve", "--config", str(path)]

    return Contender(OBSERVED if observed else OURS, policy, targets, command)


def peer_python(name: str) -> Path | None:
    """The Python of an installed peer."""
    folder = os.environ.get("WARMROUTE_PEERS")
    python = Path(folder) / name / "bin/python" if folder else None
    return python if python is not None and python.exists() else None


def peers() -> list[Contender]:
    """Whoever is installed here."""
    found = []
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is not None:
        found.append(Contender("nginx", "plain", 2, _nginx(nginx)))
    folder = os.environ.get("WARMROUTE_PEERS")
    if folder:
        python = peer_python("sglang-router")
        if python is not None:
            launch = [str(python), "-m", "sglang_router.launch_router"]
            found += [Contender("sglang-router", policy, 2, _router(launch, policy, "warn")) for policy in POLICIES]
        program = Path(folder) / "vllm-router/bin/vllm-router"
        if program.exists():
            found += [
                Contender("vllm-router", policy, 2, _router([str(program)], policy, "warning")) for policy in POLICIES
            ]
    return found


def _nginx(program: str) -> Callable[[Address, Sequence[int], Path], list[str]]:
    def command(address: Address, engines: Sequence[int], folder: Path) -> list[str]:
        servers = " ".join(f"server 127.0.0.1:{port};" for port in engines)
        path = folder / f"nginx-{address.port}.conf"
        path.write_text(NGINX.format(folder=folder, port=address.port, servers=servers))
        return [program, "-c", str(path)]

    return command


def _router(program: list[str], policy: str, level: str) -> Callable[[Address, Sequence[int], Path], list[str]]:
    def command(address: Address, engines: Sequence[int], folder: Path) -> list[str]:
        (metrics,) = free_ports(1)
        urls = [f"http://127.0.0.1:{port}" for port in engines]
        options = ["--host", "127.0.0.1", "--port", str(address.port), "--policy", policy, "--log-level", level]
        options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        return [*program, *options, "--worker-urls", *urls]

    return command
