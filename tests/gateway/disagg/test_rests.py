"""A worker that rests for a moment is asked by a request that has nobody else."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import Config
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import ok
from tests.gateway.talk import chat, once, request

FULL = ok(b'{"error":"full"}', status=b"503 Full")
OOPS = ok(b'{"error":"no"}', status=b"500 Oops")


@pytest.mark.parametrize("pause", [0.0, 0.25])
async def test_one_that_rests_is_asked_when_the_other_fails(
    gateway: Begin, scripted: StartScripted, pause: float
) -> None:
    """It named no time (200 ms are assumed). ``pause`` 0.25: that is over as well, but for the view that was kept."""

    def calm(config: Config) -> None:
        config.retries.budget = 1.0
        config.probes.health = 60.0

    a, b = await scripted(FULL, ok()), await scripted(ok(), OOPS)
    running = await gateway(a, b, change=calm)
    while not a.seen:
        assert (await once(running.port, request(chat()))).status == 200
    await asyncio.sleep(pause)
    b.replies[:] = [OOPS]
    answer = await once(running.port, request(chat()))
    assert answer.status == 200, answer.body
