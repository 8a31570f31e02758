"""What the gateway believes, learns and answers of KV that a peer lends."""

from __future__ import annotations

import pytest

from gateway.config import WorkerConfig
from load_tests.engine.physics import Rates
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.rig import name
from tests.gateway.disagg.test_peers import peers
from tests.gateway.disagg.two import Two, calm


async def test_a_stream_whose_kv_does_not_come_is_tried_elsewhere(gateway: Begin, engine: StartEngine) -> None:
    """Without a stream it is; the engine opens its stream before it has the KV."""
    two = await peers(gateway, engine)
    home, _ = two.split(await two.turn(stream=True))
    two.busy(home)
    home.faults.add("transfer_fail", count=1)
    await two.turn(stream=True)


async def test_the_device_of_a_peer_does_not_hold_what_it_can_fetch(gateway: Begin, engine: StartEngine) -> None:
    two = await peers(gateway, engine)
    _, other = two.split(await two.turn())
    row = (await two.rows())[name(other)]
    assert row["terms"]["transfer"] > 0
    assert row["holding_tokens"]["device"] == 0


@pytest.mark.parametrize("handshake", [0.01, 20.0])
async def test_the_time_of_a_transfer_is_no_prefill(gateway: Begin, engine: StartEngine, handshake: float) -> None:
    """20 x 0.02 = 0.4 s for each transfer; prompts cost the same in both."""
    engines = [await engine(connector="p2p", rates=Rates(handshake=handshake)) for _ in range(2)]
    alone = await engine(time_scale=0)
    workers = [WorkerConfig(each.url, kv_source=f"127.0.0.1:{each.side_port}") for each in engines]
    two = Two(await gateway(*workers, policy="cache_aware", change=calm), engines, alone)
    home, other = two.split(await two.turn(stream=True))
    for _ in range(8):
        two.busy(home)
        two.busy(other, 0.0)
        await two.turn(stream=True)
        home, other = other, home
    assert two.target(home).rates.base <= 0.02
    if handshake > 1:
        assert two.target(home).rates.moved(1_000) > 0.08, "it is learned as what it is"
