"""Replay over HTTP against a gateway with simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from load_tests.demo import MODEL, Fleet, start_fleet
from load_tests.replay_http import replay
from load_tests.workloads.mooncake import BLOCK, read


def write_trace(path: Path, sessions: int = 6, turns: int = 4) -> None:
    """Sessions whose prompts grow by a block a turn, behind one shared block."""
    random, rows = Random(5), []
    for session in range(sessions):
        blocks = [0]
        for turn in range(turns):
            blocks = [*blocks, 1 + session * turns + turn]
            rows.append(
                {
                    "timestamp": 4000 * turn + random.randrange(2000),
                    "input_length": BLOCK * len(blocks) - random.randrange(BLOCK // 4),
                    "output_length": random.randrange(4, 12),
                    "hash_ids": blocks,
                    "session_id": f"s{session}",
                }
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def command(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "load_tests.replay_http",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def accounted(fleet: Fleet, name: str) -> int:
    return sum(engine.stats()[name] for engine in fleet.engines)


async def test_figures_agree_with_the_engines(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "cache_aware")
        status, out, err = await command(str(trace), "--url", fleet.url, "--model", MODEL, "--speed", "8", "--json")
        assert (status, err) == (0, "")
        row: dict[str, Any] = json.loads(out)
        assert row["requests"] == 24
        assert row["errors"] == 0
        assert row["prompt_tokens"] == accounted(fleet, "prompt_tokens")
        assert row["cached_tokens"] == accounted(fleet, "cached_tokens")
        assert row["token_hit_rate"] == pytest.approx(row["cached_tokens"] / row["prompt_tokens"], abs=1e-4)
        assert row["token_hit_rate"] > 0.4
        assert row["ttft_p50_ms"] <= row["ttft_p90_ms"] <= row["ttft_p99_ms"]
        assert row["moved_sessions"] == 0


async def test_sessions_that_move_are_counted(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "round_robin")
        replayed = await replay(read(trace), fleet.url, MODEL, speed=20)
        assert replayed.row()["moved_sessions"] > 0


async def test_failures_are_reported_and_the_limit_holds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace)
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "cache_aware")
        options = ("--url", f"{fleet.url}/v1", "--model", "another", "--speed", "50", "--limit", "3", "--json")
        status, out, err = await command(str(trace), *options)
    assert status == 1
    row = json.loads(out)
    assert (row["requests"], row["errors"], row["token_hit_rate"]) == (3, 3, None)
    assert "404" in err


async def test_a_broken_trace_is_told_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n')
    status, out, err = await command(str(trace), "--url", "http://127.0.0.1:9", "--model", "m")
    assert (status, out) == (2, "")
    assert "line 1: input_length is missing" in err


async def test_the_published_trace_is_served_without_an_error() -> None:
    folder = os.environ.get("WARMROUTE_TRACES")
    path = Path(folder or "") / "mooncake/conversation_trace.jsonl"
    if not folder or not path.exists():
        pytest.skip("not run: WARMROUTE_TRACES names no folder with mooncake/conversation_trace.jsonl")
    requests = [request for request in read(path, 60) if request.input_tokens < 12_000][:25]
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "cache_aware")
        replayed = await replay(requests, fleet.url, MODEL, speed=10)
        assert replayed.row()["errors"] == 0
        assert replayed.row()["cached_tokens"] == accounted(fleet, "cached_tokens")
