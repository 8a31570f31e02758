"""Two gateways on hosts of their own do what one does, and one that is killed takes nothing with it."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from load_tests.hosts import possible, run
from tests.conftest import Require


async def test_a_session_stays_at_home_whichever_host_is_asked_and_when_one_is_killed(require: Require) -> None:
    why = await asyncio.to_thread(possible)
    require("netns", why is None, why or "")
    options = argparse.Namespace(sessions=40, turns=4, words=500, kill=True, redis_gone=0.0)
    with tempfile.TemporaryDirectory() as folder:
        figures = await run(options, 2, Path(folder), 16398)
    assert figures.failed == 0
    assert figures.turns > 60
    assert figures.home_share is not None
    assert figures.home_share > 0.9
    assert figures.converged_seconds is not None
    assert figures.hit_rate is not None
    assert figures.hit_rate > 0.4
