"""One vLLM server on the CPU, as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

PYTHON = Path(__file__).parents[3] / ".venv-vllm/bin/python"
"""The engines' own environment; ``make test-engines`` makes it."""
MODEL = "tiny"
BLOCK = 32
"""Tokens: attention on the CPU wants a multiple of this."""
BLOCKS = 1024
CONTEXT = 4096
START = 240.0
"""Seconds that an engine may take to start; two take about 45 on two cores."""

FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", str(CONTEXT), "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--kv-cache-memory-bytes", "64M", "--distributed-executor-backend", "uni"),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-scale-out",  # for a path that gives up a request
)
PLAIN = ("--max-num-seqs", "8")
NARROW = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1")
"""One request at a time and one that waits; the next is told 503."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # Routes for tests: the one that resets the prefix cache.
    "VLLM_SERVER_DEV_MODE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # One thread an engine and no worker process: otherwise two engines on few cores mostly wait for each other, spinning.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # How engines find and reach each other to hand over KV.
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "PYTHONPATH": str(Path(__file__).with_name("inside")),
}
LEASE = 12
"""Seconds for which a prefill engine keeps KV that nobody asks for; it wants a multiple of 6."""
KEPT = 12
"""Seconds for which a decode engine keeps KV that it offers to hand back."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VLLM:
    """A server that can be started again on the same port. All its processes are one group, which ends with it."""

    def __init__(self, name: str, model: Path, logs: Path) -> None:
        self.name = name
        self.model = model
        self.log = logs / f"{name}.log"
        self.port, self.published, self.replayed, self.side = free_port(), free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags: tuple[str, ...] = ()
        self.process: subprocess.Popen[bytes] | None = None
        self.started = 0.0

    @property
    def id(self) -> str:
        """What the gateway calls it."""
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def publishing(self, *more: str, replay: bool = True) -> tuple[str, ...]:
        """Flags with which it publishes its KV events, on ports that stay the same when it starts again."""
        # It binds only where the address has a star; to any other it would connect.
        told = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.published}",
            "topic": "kv",
        }
        if replay:
            told["replay_endpoint"] = f"tcp://*:{self.replayed}"
        return (*PLAIN, "--kv-events-config", json.dumps(told), "--trust-request-chat-template", *more)

    def paired(self, *more: str, bidirectional: bool = False, on_failure: str = "fail") -> tuple[str, ...]:
        """Flags of one half of a pair, either half. ``on_failure``: what it does with a request whose KV does not come,
        ``fail`` or ``recompute``."""
        told = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": on_failure,
            "kv_connector_extra_config": {
                "kv_lease_duration": LEASE,
                "bidirectional_kv_xfer": bidirectional,
                "decoder_kv_blocks_ttl": KEPT,
            },
        }
        rests = ("--worker-extension-cls", "nixl_rests.Rests")
        return (*PLAIN, "--kv-transfer-config", json.dumps(told), *rests, *more)

    def start(self, flags: tuple[str, ...] = PLAIN) -> None:
        """Start it, ending what runs; see `wait`."""
        self.end()
        self.flags = flags
        command = [PYTHON, Path(__file__).with_name("serve.py"), "--model", self.model, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *FLAGS, *flags],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side)},
                start_new_session=True,
            )
        self.started = time.monotonic()

    def wait(self) -> None:
        """Until it serves."""
        while time.monotonic() < self.started + START:
            assert self.alive, f"{self.name} ended while it started:\n{self.told()}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"{self.name} did not start in {START:.0f} s:\n{self.told()}")

    def told(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def signal(self, number: int) -> None:
        """To the server's first process alone, as a supervisor does."""
        assert self.process is not None
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """To all its processes, as a terminal does."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill_core(self) -> None:
        """End the process that computes; the HTTP server is another."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        cores = [int(child) for child in children if "EngineCor" in Path(f"/proc/{child}/comm").read_text()]
        assert cores, f"{self.name} has no process of its own that computes"
        for core in cores:
            os.kill(core, signal.SIGKILL)

    def kill(self) -> None:
        """End all its processes at once, as a machine that fails does."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)

    def end(self) -> None:
        """Kill what is left of it."""
        self.kill()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None

    def sources(self) -> dict[str, int]:
        """Where the prompts' tokens came from, as it counts them: source -> tokens."""
        name, found = "vllm:prompt_tokens_by_source_total", Counter[str]()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text):
            for sample in family.samples:
                if sample.name == name:
                    found[sample.labels["source"]] += int(sample.value)
        return dict(found)

    def metrics(self) -> dict[str, float]:
        """Its own counters and gauges, each summed over its labels."""
        sums: Counter[str] = Counter()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text):
            for sample in family.samples:
                sums[sample.name] += sample.value
        return dict(sums)
