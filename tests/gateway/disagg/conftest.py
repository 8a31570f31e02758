"""Starts gateways with pairs behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import LEASE, Rig, StartRig


@pytest.fixture
def rig(gateway: Begin, engine: StartEngine) -> StartRig:
    """Starts ``p`` prefill and ``d`` decode engines and a gateway that probes seldom, so that only requests find faults.

    ``change`` edits its configuration; further options are the engines'.
    """

    async def begin(
        p: int = 1,
        d: int = 1,
        dialect: str = "vllm",
        *,
        policy: str = "round_robin",
        change: Callable[[Config], None] | None = None,
        **options: Any,
    ) -> Rig:
        options = {"lease": LEASE, "bootstrap_timeout": 5.0, "waiting_timeout": 5.0, "heartbeat": 0.1, **options}
        prefills = [await engine(dialect, role="prefill", **options) for _ in range(p)]
        decodes = [await engine(dialect, role="decode", **options) for _ in range(d)]
        files = {key: options[key] for key in ("tokenizer", "template") if key in options}
        alone = await engine(dialect, time_scale=0, **files)

        def calm(config: Config) -> None:
            config.probes.health = 60.0
            config.disaggregation.lease = LEASE * 0.8
            config.retries.budget = 1.0
            if change is not None:
                change(config)

        workers = [WorkerConfig(each.url, role="prefill") for each in prefills]
        workers += [WorkerConfig(each.url, role="decode") for each in decodes]
        running = await gateway(*workers, policy=policy, change=calm)
        return Rig(running, prefills, decodes, alone)

    return begin
