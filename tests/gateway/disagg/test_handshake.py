"""How a pair that does not meet is told of, and whose fault that is."""

from __future__ import annotations

import pytest

from tests.gateway.disagg.rig import StartRig, name, story


@pytest.mark.parametrize("stream", [True, False])
async def test_a_bootstrap_server_that_is_not_there_is_the_prefill_engine_s(rig: StartRig, stream: bool) -> None:
    r = await rig(2, 2, "sglang")
    r.running.fleet.workers[name(r.p)].facts.bootstrap_port = 9
    for number in range(4):
        await r.check(story(number, stream=stream))
    assert not await r.blamed() & {name(each) for each in r.decodes}
    await r.nothing_left()


async def test_an_error_that_a_prefill_engine_streamed_reaches_the_client_as_json(rig: StartRig) -> None:
    r = await rig(1, 1, "sglang")
    r.p.faults.add("queue_full", count=None)
    answer = await r.ask(story("x", stream=True))
    assert answer.status == 503
    assert answer.one("content-type").startswith("application/json")
    told = answer.json()
    assert told.get("error", told)["message"]
