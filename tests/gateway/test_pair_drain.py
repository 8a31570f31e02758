"""Drains of the only engine of a role, in a fleet of pairs."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import tell
from tests.gateway.test_draining_pairs import id_of, pairs, turn


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_with_time_the_only_engine_of_a_role_goes_on_for_its_sessions(
    gateway: Begin, engine: StartEngine, role: str
) -> None:
    running, prefill, decode = await pairs(gateway, engine, 1, 1)
    assert (await turn(running, "s", 1)).status == 200
    drained = id_of((prefill if role == "prefill" else decode)[0])
    status, told = await tell(running, "POST", f"/workers/{drained}/drain?over=30")
    assert (status, told["drain"]["sessions"]) == (202, 1)
    answer = await turn(running, "s", 2)
    assert answer.status == 200, (answer.body, told["drain"])
    assert (await tell(running, "GET", f"/workers/{drained}"))[1]["drain"]["stuck"]
    await tell(running, "PATCH", f"/workers/{drained}", {"state": "ready"})
    assert (await turn(running, "s", 3)).status == 200
