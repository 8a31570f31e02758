"""Replay over HTTP against a gateway with simulated engines."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import pytest
from aiohttp import web

from load_tests.demo import MODEL, Fleet, start_fleet
from load_tests.replay_http import Replay
from load_tests.workloads.catalogue import find
from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.mooncake import BLOCK


def write_trace(path: Path, sessions: int = 6, turns: int = 4) -> None:
    """Sessions whose prompts grow by a block a turn, behind one shared block; the last block of each is partial, its own."""
    random, rows = Random(5), []
    for session in range(sessions):
        blocks = [0]
        for turn in range(turns):
            blocks = [*blocks, 1 + session * turns + turn]
            rows.append(
                {
                    "timestamp": 4000 * turn + random.randrange(2000),
                    "input_length": BLOCK * len(blocks) + random.randrange(1, BLOCK // 4),
                    "output_length": random.randrange(4, 12),
                    "hash_ids": [*blocks, 1000 + len(rows)],
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
        replayed = await Replay(find(str(trace), workers=1), fleet.url, MODEL, speed=20).run()
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
    traffic = find(str(path), workers=1, limit=60)
    chains = [chain for chain in traffic.chains if chain.turns[0].tokens < 12_000][:25]
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "cache_aware")
        replayed = await Replay(Traffic("some", traffic.block, chains), fleet.url, MODEL, speed=10).run()
        assert replayed.row()["errors"] == 0
        assert replayed.row()["cached_tokens"] == accounted(fleet, "cached_tokens")


class Listener:
    """A server that answers one token, and keeps what it was asked and when."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.asked: list[tuple[float, str | None, str]] = []
        self.ended: list[float] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        session = request.headers.get("x-session-id")
        self.asked.append((monotonic(), session, body["messages"][0]["content"]))
        if session and session == self.failing:
            return web.Response(status=500, text="no")
        await asyncio.sleep(0.05)
        self.ended.append(monotonic())
        event = json.dumps({"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 1}})
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async def start(self, stack: AsyncExitStack) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"


def called() -> Traffic:
    """A session that calls two others after its first turn and goes on when both have ended."""
    naming = Naming()
    start, own = naming.fresh(2), naming.fresh(3)
    main = (Turn(start, 40, 1), Turn(start + own, 90, 1, awaits=(1, 2), think=0.2))
    sub = Turn(start, 35, 1)
    return Traffic(
        "called",
        16,
        [
            Chain(0.0, main, "main"),
            Chain(0.1, (sub,), "one", "main", (0, 0)),
            Chain(0.4, (sub, sub), "two", "main", (0, 0)),
        ],
    )


async def test_chains_follow_and_await_each_other() -> None:
    async with AsyncExitStack() as stack:
        listener = Listener()
        url = await listener.start(stack)
        row = (await Replay(called(), url, MODEL, speed=2).run()).row()
    assert (row["requests"], row["errors"], row["unsent"]) == (5, 0, 0)
    assert [session for _, session, _ in listener.asked] == ["main", "one", "two", "two", "main"]
    times = [at for at, _, _ in listener.asked]
    assert times[1] - listener.ended[0] >= 0.05
    assert times[2] - listener.ended[0] >= 0.2
    assert times[4] - listener.ended[3] >= 0.1
    words = [text.split() for _, _, text in listener.asked]
    assert [len(each) for each in words] == [40, 35, 35, 35, 90]
    # What is behind the last full block of the first prompt begins the block that the next prompt has there.
    assert words[4][:40] == words[0]
    assert words[1][:32] == words[0][:32]
    assert words[1][32] != words[0][32]


async def test_a_failed_turn_ends_its_chain_and_holds_nobody_up() -> None:
    async with AsyncExitStack() as stack:
        listener = Listener(failing="two")
        url = await listener.start(stack)
        replayed = await Replay(called(), url, MODEL, speed=20).run()
    assert (len(replayed.answers), replayed.unsent, replayed.row()["errors"]) == (4, 1, 1)
    assert [session for _, session, _ in listener.asked] == ["main", "one", "two", "main"]


async def test_sessions_may_be_left_out() -> None:
    async with AsyncExitStack() as stack:
        listener = Listener()
        url = await listener.start(stack)
        options = ("--url", url, "--model", "m", "--speed", "50", "--limit", "5", "--workers", "1", "--json")
        status, out, err = await command("causal", *options, "--no-session")
        assert (status, err) == (0, "")
        assert json.loads(out)["requests"] == 5
        assert {session for _, session, _ in listener.asked} == {None}


async def test_generated_chains_hit_what_they_share() -> None:
    async with AsyncExitStack() as stack:
        fleet = await start_fleet(stack, "cache_aware")
        options = ("--url", fleet.url, "--model", MODEL, "--speed", "60", "--limit", "12", "--workers", "1", "--json")
        status, out, err = await command("causal?tokens=0.2", *options)
        assert (status, err) == (0, "")
        row = json.loads(out)
        assert row["prompt_tokens"] == accounted(fleet, "prompt_tokens")
        assert row["token_hit_rate"] > 0.4
