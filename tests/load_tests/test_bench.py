"""The benchmark's parts: that it counts what it sends, and that its verdicts follow from its figures."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from load_tests.bench import data_plane, index
from load_tests.bench.contenders import ours
from load_tests.bench.data_plane import DataPlane, Key
from load_tests.bench.load import Load, drive, requests
from load_tests.bench.mock import EVENTS, Connection
from load_tests.bench.report import Budget, budgets, document

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"),
    reason="not run: benchmarks read /proc and pin processes, which Linux alone offers",
)


def bodies(load: Load, count: int) -> list[bytes]:
    return [request.split(b"\r\n\r\n", 1)[1] for request in islice(requests(load), count)]


def text(body: bytes) -> str:
    content: str = json.loads(body)["messages"][0]["content"]
    return content


def test_distinct_prompts_share_their_start_only() -> None:
    one, other = (text(body) for body in bodies(Load(1, requests=2, body=2048, shared=512), 2))
    assert one[:512] == other[:512]
    assert one[512:530] != other[512:530]
    assert abs(len(one) - 2048) < 128


def test_sessions_grow_by_a_turn_each() -> None:
    load = Load(1, requests=6, body=300, shared=100, sessions=2, turns=3)
    texts = [text(body) for body in bodies(load, 6)]
    for session in range(2):
        turns = texts[session::2]
        assert turns[1].startswith(turns[0])
        assert turns[2].startswith(turns[1])
        assert len(turns[2]) - len(turns[1]) == 300


@pytest.mark.parametrize(("stream", "events"), [(False, 0), (True, 20 * (EVENTS + 2))])
async def test_a_run_counts_every_answer_and_event(stream: bool, events: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        got = await drive(Load(port, requests=20, warmup=4, connections=4 if not stream else 24, stream=stream))
    finally:
        server.close()
    assert (got.requests, got.errors, got.events) == (20, 0, events)


async def test_what_is_not_answered_with_200_is_an_error() -> None:
    class Refusing(Connection):
        def answer(self, request: bytes) -> None:
            self.transport.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.get_running_loop().create_server(Refusing, "127.0.0.1", 0)
    try:
        got = await drive(Load(server.sockets[0].getsockname()[1], requests=10, connections=2))
    finally:
        server.close()
    assert (got.requests, got.errors) == (10, 10)


def test_our_own_gateway_is_measured_whole(tmp_path: Path) -> None:
    with DataPlane(tmp_path, 3) as plane, plane.running(ours("cache_aware", 3)) as (address, started):
        for load in data_plane.SCENARIOS.values():
            got = plane.run(msgspec.structs.replace(load, requests=32, warmup=0), address, started)
            assert (got.requests, got.errors) == (32, 0)
            assert bool(got.events) == load.stream
        process = started.process
    assert process.poll() is not None


def figures(ours_us: float) -> dict[Key, float]:
    return {
        ("warmroute", "cache_aware", 2, "20k"): ours_us,
        ("warmroute", "cache_aware", 64, "20k"): 1.2 * ours_us,
        ("warmroute", "cache_aware", 2, "stream"): 20.0,
        ("warmroute", "round_robin", 2, "stream"): 10.0,
        ("nginx", "plain", 2, "stream"): 16.0,
        ("sglang-router", "round_robin", 2, "20k"): 100.0,
        ("sglang-router", "cache_aware", 2, "20k"): 120.0,
    }


def verdicts(ours_us: float) -> dict[tuple[str, str], str]:
    return {(line.what, line.beside): line.verdict for line in budgets(document(figures(ours_us), {}, {}))}


def test_verdicts_follow_from_figures() -> None:
    found = verdicts(80.0)
    assert found["request, 20k", "sglang-router round_robin"] == "met"
    assert found["request, 20k", "0.6 x sglang-router cache_aware"] == "missed"
    assert found["request, 20k, 64 targets : 2", ""] == "met"
    assert found["streamed event", "1.3 x nginx"] == "met"
    assert found["request, 1k", "sglang-router round_robin"] == "not measured"
    assert verdicts(101.0)["request, 20k", "sglang-router round_robin"] == "missed"
    assert Budget("", 1.0, None, "").verdict == "not measured"


def test_the_document_has_its_fixed_shape() -> None:
    made = document(figures(80.0), {"some": 1}, {})
    assert made["proxy"]["cache_aware"] == {"20k": 80.0}
    assert made["stream"]["cpu_us_per_event"] == 20.0
    assert made["sglang-router"]["proxy"]["round_robin"] == {"20k": 100.0}
    assert made["nginx"]["stream"]["cpu_us_per_event"] == 16.0
    assert made["index"] == {"some": 1}
    assert made["machine"]["cores"] >= 1


def test_the_index_benchmark_measures_all_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "ROUNDS", 5)
    found = index.at_targets(64)
    assert found.keys() == {"match_us", "insert_us", "match_insert_us", "decision_and_index_us"}
    assert min(found.values()) > 0
    assert index.bytes_per_token(1) > 0
