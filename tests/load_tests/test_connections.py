"""What the gateway does with many connections, with too many, and with no descriptor left: a few hundred of them here."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from load_tests import connections


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured over seconds tells nothing here."""
    monkeypatch.setattr(connections, "STREAM_SECONDS", 2.0)
    monkeypatch.setattr(connections, "MEASURED", 1.0)


async def test_idle_connections_cost_little_and_streams_beside_them_go_on(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await connections.many(tmp_path, stack, 300, 50)
    assert (found["idle"], found["answered"], found["refused"], found["cut"]) == (300, 300, 0, 0)
    assert (found["active"], found["answered_beside_active"]) == (50, 200)
    assert found["active_events"] >= 50
    assert found["kib_per_idle_connection"] < 30


async def test_over_the_limit_it_refuses_politely_and_recovers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await connections.full(tmp_path, stack, 100, 30)
    assert (found["held"], found["refused"], found["cut"]) == (100, 30, 0)
    assert found["answered_at_the_limit"] == found["answered_after_others_closed"] == 100


async def test_without_descriptors_it_serves_whom_it_has_and_recovers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        found = await connections.short(tmp_path, stack, 50)
    assert found["answered_before"] == found["answered_in_the_flood"] == found["answered_after"] == 50
    # Of 128 that 512 descriptors allow, 50 are there already.
    assert found["flood_refused"] + found["flood_cut"] == found["flood"] - (128 - 50)
    assert found["cut_without_descriptors"] == 50
    assert found["new_connections_after"] == found["answered_on_new_connections"] == 50
    assert found["defects"] == 0
    assert found["told_of"] >= 1, "that clients are cut was not told"
    # One line for each of many connections would fill a disk.
    assert found["log_bytes"] < 4000
