"""Traffic that is generated, traced or recorded: what the simulation relies on, and what each shape is meant to be."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from load_tests.simulate.traffic import ceiling
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Naming, Traffic
from load_tests.workloads.generators import BLOCK, GENERATORS
from load_tests.workloads.mooncake import TraceError, parse as parse_mooncake
from load_tests.workloads.sessions import COARSE, parse
from load_tests.workloads.traces import TICK, mooncake, named


def sound(traffic: Traffic) -> None:
    """Ids have one parent each, and counts fit."""
    parents: dict[int, int] = {}
    for chain in traffic.chains:
        assert chain.turns and chain.at >= 0
        for turn in chain.turns:
            assert len(turn.blocks) == turn.tokens // traffic.block or not turn.blocks
            ids = (*turn.blocks, *turn.after)
            assert len(ids) * traffic.block <= turn.tokens + turn.output
            for before, id_ in zip((-1, *ids), ids, strict=False):
                assert parents.setdefault(id_, before) == before


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_generated_traffic_is_sound_and_follows_from_the_seed(name: str) -> None:
    traffic = GENERATORS[name](3, 4)
    sound(traffic)
    assert traffic == GENERATORS[name](3, 4)
    assert traffic != GENERATORS[name](3, 5)
    assert GENERATORS[name](6, 4).requests > 1.4 * traffic.requests


def test_agents_are_as_recorded_ones() -> None:
    traffic = GENERATORS["agents"](32, 1)
    turns = [turn for chain in traffic.chains for turn in chain.turns]
    assert median(chain.turns[0].tokens for chain in traffic.chains) == pytest.approx(21_600, rel=0.1)
    assert median(turn.output for turn in turns) == pytest.approx(216, rel=0.1)
    assert median(turn.think for turn in turns if turn.think) == pytest.approx(10, rel=0.35)
    assert ceiling(traffic) > 0.95
    for chain in traffic.chains:
        for turn, following in zip(chain.turns, chain.turns[1:], strict=False):
            assert following.blocks[: len(turn.blocks) + len(turn.after)] == turn.blocks + turn.after


def test_what_each_shape_shares() -> None:
    universal, documents, load = (GENERATORS[name](4, 1) for name in ("universal", "documents", "load"))
    assert len({chain.turns[0].blocks[: 8192 // BLOCK] for chain in universal.chains}) == 1
    assert all(chain.session for chain in universal.chains)
    assert not any(chain.session for chain in (*documents.chains, *load.chains))
    assert ceiling(documents) > 0.5
    assert ceiling(load) == 0.0


def test_a_limit_cuts_the_last_chain_short() -> None:
    traffic = GENERATORS["agents"](2, 1)
    assert traffic.limited(None) is traffic
    some = traffic.limited(100)
    assert some.requests == 100
    first = min(traffic.chains, key=lambda chain: chain.at)
    assert some.chains[0].session == first.session


def test_ids_tell_what_stands_before_them() -> None:
    naming = Naming()
    one, two, three = naming.chained([7, 8, 9]), naming.chained([7, 8, 5]), naming.chained([8, 8, 9])
    assert one[:2] == two[:2]
    assert len({*one, *two, *three}) == 7
    assert not set(naming.fresh(3)) & {*one, *two, *three}


def traced(*rows: tuple[int, list[int]], **more: Any) -> list[str]:
    return [
        json.dumps(
            {"timestamp": at, "input_length": 512 * len(blocks) - 1, "output_length": 1, "hash_ids": blocks, **more}
        )
        for at, blocks in rows
    ]


def test_sessions_are_inferred_from_prompts_that_go_on() -> None:
    requests = parse_mooncake(
        traced(
            (0, [0, 1, 2, 3]),  # a conversation
            (1, [0, 4, 5]),  # another, that shares a start with it
            (2, [0, 1, 2, 6, 7]),  # goes on from the first
            (3, [0, 1, 2, 6, 8, 9]),  # and on
            (4, [0, 1, 2, 3]),  # the first prompt asked again
            (5, [0, 30]),  # a single full block tells nothing
            (6, [0, 31]),
        )
    )
    naming = Naming()
    prompts = [naming.chained(request.blocks[:-1]) for request in requests]
    sessions = named(prompts, requests)
    assert sessions[0] == sessions[2] == sessions[3] == sessions[4]
    assert len(set(sessions)) == 4
    told = parse_mooncake(traced((0, [0, 1]), (1, [5, 6]), session_id="mine"))
    assert named([(0,), (1,)], told) == ["mine", "mine"]


def test_requests_on_ticks_come_at_any_time_within(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            traced(
                *((3000 * number + (0, -1, 3)[number % 3 if number else 0], [0, number + 1]) for number in range(20))
            )
        )
    )
    ats = [chain.at for chain in mooncake(path).chains]
    assert all(TICK * number <= at < TICK * (number + 1) for number, at in enumerate(ats))
    assert ats != [chain.at for chain in mooncake(path, seed=1).chains]
    # Stamps miss their tick by some milliseconds.
    path.write_text("\n".join(traced((0, [0, 1]), (1500, [0, 2]))))
    assert [chain.at for chain in mooncake(path).chains] == [0.0, 1.5]


def session(**changes: Any) -> str:
    """A conversation of three requests whose last rewrites the context, and a sub-agent's."""
    asked = {"t": 0.0, "model": "m", "in": 64 * 40 + 3, "out": 7, "think_time": 2.0, "keep": 0, "new": [1, 40]}
    requests = [
        asked,
        {**asked, "t": 9.0, "in": 64 * 50, "keep": 40, "new": [41, 10]},
        {**asked, "t": 20.0, "in": 64 * 24 + 1, "keep": 16, "new": [100, 4, 200, 4]},
    ]
    sub = {"agent": "a", "requests": [{**asked, "t": 5.0, "in": 640, "new": [300, 10]}]}
    row = {
        "id": "s",
        "block_size": 64,
        "tool_tokens": 64 * 8,
        "system_tokens": 64 * 9,
        "chains": [{"agent": None, "requests": requests}, sub],
    }
    return json.dumps({**row, **changes})


def test_recorded_sessions_are_causal_chains() -> None:
    traffic = parse([session(), session(id="other")], "sessions", 1)
    sound(traffic)
    assert traffic.block == 64 * COARSE
    chains = {chain.session: chain for chain in traffic.chains}
    assert sorted(name or "" for name in chains) == ["other", "other/1", "s", "s/1"]
    main = chains["s"]
    assert [turn.tokens for turn in main.turns] == [64 * 40 + 3, 64 * 50, 64 * 24 + 1]
    assert [turn.think for turn in main.turns] == [0.0, 2.0, 2.0]
    assert main.turns[1].blocks[:5] == main.turns[0].blocks
    assert main.turns[2].blocks[:2] == main.turns[0].blocks[:2]
    assert main.turns[2].blocks[2] != main.turns[0].blocks[2]
    assert chains["s/1"].at == pytest.approx(main.at + 5.0)
    # Tools and system prompt of 17 recorded blocks are two of ours, and the other session has the same.
    other = chains["other"].turns[0].blocks
    assert other[:2] == main.turns[0].blocks[:2]
    assert not set(other[2:]) & set(main.turns[0].blocks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: an object is needed, not list"),
        (session(block_size=None), "line 2: block_size must be int, not None"),
        (session(block_size=0), "line 2: block_size must be at least 1, not 0"),
        (session(block_size=32), "block_size must be the same in all lines, not 32 and 64"),
        (session(chains=[{}]), "line 2: chains: 'requests' is missing"),
        (session(chains=[{"requests": [{"model": "m", "t": 0}]}]), "line 2: chains: 'new' is missing"),
        (session(chains=[{"requests": ["x"]}]), "line 2: chains: is not as it should be"),
    ],
)
def test_errors_of_recorded_sessions_name_line_and_field(line: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse([session(), line], "sessions", 1)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("t", value) for value in (float("nan"), float("inf"), 10**400, "0", True)),
        *(("think_time", value) for value in (float("nan"), float("inf"), -(10**400))),
        *(("in", value) for value in (10.5, 10**400, -1, True)),
        *(("out", value) for value in (2.5, 10**400, -1)),
        *(("keep", value) for value in (-5, 1.5, True)),
        *(("new", value) for value in ([0, 10**12], [0, -1], [0.5, 3], [True, 3])),
    ],
)
def test_numbers_of_recorded_sessions_are_finite_whole_and_bounded(field: str, value: Any) -> None:
    asked = {"model": "m", "t": 0, "in": 1000, "out": 3, "keep": 0, "new": [0, 20], "think_time": 1.0}
    parse([session(chains=[{"requests": [asked, asked]}])], "sessions", 1)
    with pytest.raises(TraceError, match=f"line 1: chains: is not as it should be: {field} "):
        parse([session(chains=[{"requests": [{**asked, field: value}] * 2}])], "sessions", 1)


def test_a_gzipped_file_is_recorded_sessions(tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    path.write_bytes(gzip.compress((session() + "\n").encode()))
    assert find(str(path), workers=1).requests == 4
    assert find(str(path), workers=1, limit=2).requests == 2
    path.write_bytes(gzip.compress(os.urandom(3000))[:-500])
    with pytest.raises(NoTraffic, match=r"damaged|not JSON"):
        find(str(path), workers=1)
    path.write_bytes(gzip.compress(b"\n"))
    with pytest.raises(NoTraffic, match="no request"):
        find(str(path), workers=1)


def test_the_published_sessions_are_as_their_readme_says() -> None:
    folder = os.environ.get("WARMROUTE_TRACES")
    if not folder or not (Path(folder) / "kv_cache_tester/v8_sessions.jsonl.gz").exists():
        pytest.skip("not run: WARMROUTE_TRACES names no folder with kv_cache_tester/v8_sessions.jsonl.gz")
    traffic = find("kv_cache_tester/v8_sessions.jsonl.gz", workers=8)
    assert ceiling(traffic) == pytest.approx(0.966, abs=0.01)
