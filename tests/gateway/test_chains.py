"""Stored responses, and a gateway that starts anew."""

from __future__ import annotations

from pathlib import Path

from gateway.config import Config
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import once, request
from tests.gateway.test_bound import respond
from tests.gateway.test_clients import RESPONSES


async def test_a_chain_goes_on_when_the_gateway_starts_anew(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    """Homes of sessions outlive a restart; so does what binds them."""

    def kept(config: Config) -> None:
        config.sessions.state = str(tmp_path / "state")

    engines = [await engine(time_scale=0.0) for _ in range(4)]
    running = await gateway(*engines, policy="cache_aware", change=kept)
    firsts = [await once(running.port, respond(input=f"task {number}")) for number in range(8)]
    await running.stop()
    again = await gateway(*engines, policy="cache_aware", change=kept)
    statuses = []
    for first in firsts:
        answer = await once(again.port, respond(previous_response_id=first.json()["id"]))
        statuses.append(answer.status)
        path = f"{RESPONSES}/{first.json()['id']}"
        statuses.append((await once(again.port, request(None, method="GET", path=path))).status)
    assert statuses == [200] * 16, statuses
