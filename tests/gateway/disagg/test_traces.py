"""A pair's trace."""

from __future__ import annotations

from tests.gateway.collector import Collector, flushed, told, traced
from tests.gateway.disagg.rig import StartRig
from tests.gateway.talk import chat, once, request


async def test_a_pair_has_a_span_for_each_leg(rig: StartRig, collector: Collector) -> None:
    pair = await rig(change=traced(collector))
    body = chat(stream=True, max_tokens=5, messages=[{"role": "user", "content": "many words " * 300}])
    assert (await once(pair.running.port, request(body))).status == 200
    await flushed(pair.running)
    children = collector.children()
    assert {"admission", "decision", "prefill", "decode", "stream"} <= set(children)
    assert told(children["prefill"])["warmroute.target"] != told(children["decode"])["warmroute.target"]
    assert children["prefill"].end_time_unix_nano <= children["decode"].end_time_unix_nano
