"""Pairs of the protocols that engines do not tell by themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import LEASE, Rig

KINDS = ["mooncake", "shared", "tensorrt_llm"]
BeginKind = Callable[..., Awaitable[Rig]]
PATIENT = 30.0
"""Seconds for which engines keep KV where no test wants it given up."""


def calm(change: Callable[[Config], None] | None) -> Callable[[Config], None]:
    """Probes are seldom, so that only requests find faults."""

    def told(config: Config) -> None:
        config.probes.health = 60.0
        config.retries.budget = 1.0
        config.policies["pairs"] = {"name": "disaggregated", "prefill": "cache_aware"}
        if change is not None:
            change(config)

    return told


def spoken_to(engine: Engine, kind: str, role: str) -> WorkerConfig:
    """How a gateway is told of it."""
    told: dict[str, Any] = {} if kind == "tensorrt_llm" else {"protocol": kind}
    if kind == "mooncake" and role == "prefill":
        told["bootstrap"] = f"127.0.0.1:{engine.side_port}"
    return WorkerConfig(engine.url, role=role, **told)


@pytest.fixture
def kind_of_pair(gateway: Begin, engine: StartEngine, tmp_path: Path) -> BeginKind:
    """Starts ``p`` prefill and ``d`` decode engines of one kind, and a gateway."""

    async def begin(
        kind: str,
        p: int = 1,
        d: int = 1,
        *,
        policy: str = "pairs",
        change: Callable[[Config], None] | None = None,
        **options: Any,
    ) -> Rig:
        dialect = "tensorrt_llm" if kind == "tensorrt_llm" else "vllm"
        if kind != "tensorrt_llm":
            options["connector"] = kind
        if kind == "shared":
            options["shared_dir"] = str(tmp_path / "store")
        options = {"lease": PATIENT, "blocks_ttl": PATIENT, **options}
        prefills = [await engine(dialect, role="prefill", **options) for _ in range(p)]
        decodes = [await engine(dialect, role="decode", **options) for _ in range(d)]
        alone = await engine(dialect, time_scale=0)
        workers = [spoken_to(each, kind, "prefill") for each in prefills]
        workers += [spoken_to(each, kind, "decode") for each in decodes]
        running: Running = await gateway(*workers, policy=policy, change=calm(change))
        return Rig(running, prefills, decodes, alone)

    return begin


__all__ = ["KINDS", "LEASE", "BeginKind", "kind_of_pair"]
