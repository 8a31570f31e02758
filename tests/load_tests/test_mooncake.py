"""The reader of traces in Mooncake's form."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from load_tests.workloads.mooncake import BLOCK, TraceError, parse, read


def line(**changes: object) -> str:
    row: dict[str, object] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}
    row.update(changes)
    return json.dumps({name: value for name, value in row.items() if value is not None})


def test_requests_are_in_order_of_time_from_the_first() -> None:
    found = parse(
        [line(timestamp=4500), "\n", line(timestamp=3000, session_id="a"), line(timestamp=3000, session_id=7)]
    )
    assert [request.at for request in found] == [0.0, 0.0, 1.5]
    assert [request.session for request in found] == ["a", "7", None]


def test_blocks_have_the_size_that_is_told() -> None:
    (one,) = parse([line(hash_ids=[1] * 63, block_size=16)])
    assert one.block == 16
    (other,) = parse([line()])
    assert other.block == BLOCK


def test_the_limit_counts_requests() -> None:
    assert len(parse([line()] * 5 + ["not JSON"], 5)) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: an object is needed, not list"),
        (line(timestamp=None), "line 2: timestamp is missing"),
        (line(timestamp=-1), "line 2: timestamp is -1"),
        (line(input_length=0), "line 2: input_length is 0"),
        (line(input_length=True), "line 2: input_length is True"),
        (line(output_length="7"), "line 2: output_length is '7'"),
        (line(hash_ids="1"), "line 2: hash_ids must be a list"),
        (line(hash_ids=[1, 2.5]), "line 2: hash_ids must be a list"),
        (line(hash_ids=[1]), "line 2: hash_ids has 1 blocks of 512 tokens, which does not fit input_length 1000"),
        (line(block_size=0), "line 2: block_size is 0"),
        (line(block_size=16), "line 2: hash_ids has 2 blocks of 16 tokens, which does not fit input_length 1000"),
        (line(hash_ids=[1], block_size=1024), "block_size must be the same in all lines, not 512 and 1024"),
        (line(session_id=[]), "line 2: session_id"),
    ],
)
def test_errors_name_line_and_field(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse([line(), text])
    assert str(caught.value).startswith(message)


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(TraceError, match="no request"):
        parse(["\n"])


def test_the_published_trace_can_be_read() -> None:
    folder = os.environ.get("WARMROUTE_TRACES")
    path = Path(folder or "") / "mooncake/conversation_trace.jsonl"
    if not folder or not path.exists():
        pytest.skip("not run: WARMROUTE_TRACES names no folder with mooncake/conversation_trace.jsonl")
    requests = read(path)
    assert len(requests) == 12_031
    first, second = requests[:2]
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert [request.at for request in requests] == sorted(request.at for request in requests)
