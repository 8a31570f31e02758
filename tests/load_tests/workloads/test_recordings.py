"""Recordings of a gateway as traffic: who follows on whom, what a page holds, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Chain
from load_tests.workloads.mooncake import TraceError
from load_tests.workloads.recordings import parse

HEAD = '{"warmroute_recording":1,"key":"00"}\n'


def line(at: float, lasted: float, ids: list[int], **fields: Any) -> str:
    """A request that came at ``at`` seconds; without more a page holds sixty tokens."""
    pages = fields.pop("pages", len(ids) + 0.5)
    row = {
        "timestamp": 1_700_000_000_000 + at * 1e3,
        "duration_ms": lasted * 1e3,
        "status": 200,
        "session_id": "s",
        "input_length": round(60 * pages),
        "output_length": 10,
        "page": "text",
        "pages": pages,
        "hash_ids": ids,
    }
    return json.dumps({**row, **fields}) + "\n"


def chains(*lines: str) -> list[Chain]:
    return list(parse([HEAD, *lines], "r").chains)


def test_a_request_follows_on_the_answer_and_thinks_as_long_as_then() -> None:
    (chain,) = chains(line(10, 2, [1, 2]), line(15, 1, [1, 2, 3]), line(16, 1, [1, 2, 3, 4]))
    assert chain.at == 0.0
    assert chain.session == "s"
    assert [turn.think for turn in chain.turns] == [0.0, pytest.approx(3.0), pytest.approx(0.0)]
    assert [turn.tokens for turn in chain.turns] == [150, 210, 270]
    assert [len(turn.blocks) for turn in chain.turns] == [2, 3, 4]
    assert chain.turns[0].blocks == chain.turns[2].blocks[:2]


def test_lines_may_come_in_the_order_in_which_answers_ended() -> None:
    (chain,) = chains(line(15, 1, [1, 2, 3]), line(10, 2, [1, 2]))
    assert [turn.tokens for turn in chain.turns] == [150, 210]


def test_requests_of_a_session_that_overlap_are_chains_of_their_own() -> None:
    first, second = chains(line(0, 10, [1, 2]), line(5, 10, [1, 9]), line(11, 1, [1, 2, 3]), line(16, 1, [1, 9, 8]))
    assert first.session == second.session == "s"
    assert (first.at, second.at) == (0.0, 5.0)
    assert [len(chain.turns) for chain in (first, second)] == [2, 2]
    # Each goes on from the one with which it shares most.
    assert first.turns[1].blocks[:2] == first.turns[0].blocks
    assert second.turns[1].blocks[:2] == second.turns[0].blocks


def test_times_in_whole_milliseconds_do_not_make_an_overlap() -> None:
    (chain,) = chains(line(0, 2.0004, [1]), line(2.0, 1, [1, 2]))
    assert chain.turns[1].think == 0.0


def test_requests_without_a_session_belong_to_the_prompt_that_they_go_on_from() -> None:
    found = chains(
        line(0, 1, [1, 2], session_id=None), line(2, 1, [1, 2, 3], session_id=None), line(3, 1, [7], session_id=None)
    )
    assert [len(chain.turns) for chain in found] == [2, 1]
    assert found[0].session != found[1].session


def test_a_page_holds_what_it_held_on_average_and_no_prompt_has_more_blocks_than_tokens_fill() -> None:
    traffic = parse([HEAD, line(0, 1, [1, 2, 3], pages=3.0, input_length=150), line(2, 1, [7], pages=1.0)], "r")
    # 210 tokens on four pages.
    assert traffic.block == 52
    assert [len(turn.blocks) for chain in traffic.chains for turn in chain.turns] == [2, 1]


def test_what_the_engine_did_not_tell_is_estimated_from_what_others_told() -> None:
    lines = [line(0, 1, [1, 2], output_length=30), line(2, 1, [5, 6], input_length=None, output_length=None)]
    first, second = parse([HEAD, *lines], "r").chains[0].turns
    assert second.tokens == first.tokens == 150
    assert second.output == first.output == 30


def test_the_answer_is_cached_where_the_next_prompt_carries_it() -> None:
    carried = [line(0, 1, [1, 2], output_length=100), line(2, 1, [1, 2, 3, 4, 5], output_length=1)]
    first, second = chains(*carried)[0].turns
    # 150 + 100 - 1 tokens are four blocks of sixty.
    assert first.after == second.blocks[2:4]
    dropped = [line(0, 1, [1, 2], output_length=400), line(2, 1, [1, 2, 3, 4, 5], output_length=1)]
    assert chains(*dropped)[0].turns[0].after == ()
    elsewhere = [line(0, 1, [1, 2], output_length=100), line(2, 1, [1, 9, 3, 4, 5], output_length=1)]
    assert chains(*elsewhere)[0].turns[0].after == ()


def test_pages_of_token_ids_are_sixteen_tokens_and_stand_beside_text() -> None:
    ids = line(0, 1, list(range(100, 110)), page="ids", pages=10.25, input_length=164, session_id="ids")
    traffic = parse([HEAD, ids], "r")
    assert traffic.block == 16
    assert len(traffic.chains[0].turns[0].blocks) == 10
    traffic = parse([HEAD, ids, line(3, 1, [1, 2])], "r")
    assert traffic.block == 60
    # Blocks of sixty tokens end with pages 3 and 7.
    other = line(
        1, 1, [*range(100, 107), *range(207, 210)], page="ids", pages=10.25, input_length=164, session_id="ids"
    )
    one, two = parse([HEAD, ids, line(3, 1, [1, 2]), other], "r").chains[0].turns
    assert len(one.blocks) == 2
    assert one.blocks == two.blocks


def test_what_an_engine_refused_is_left_out_and_an_unfinished_last_line_too() -> None:
    traffic = parse([HEAD, line(0, 1, [1]), line(1, 1, [2], status=400), '{"timestamp": 17'], "r")
    assert traffic.requests == 1


def test_the_file_is_known_by_its_first_line_gzipped_or_not(tmp_path: Path) -> None:
    text = HEAD + line(0, 1, [1, 2]) + line(5, 1, [1, 2, 3])
    (tmp_path / "plain").write_text(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    for name in ("plain", "packed"):
        traffic = find(str(tmp_path / name), workers=2)
        assert (traffic.name, traffic.requests, len(traffic.chains)) == (name, 2, 1)
        assert find(str(tmp_path / name), workers=2, limit=1).requests == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the recording has no request that was answered"),
        ([line(0, 1, [1], status=500)], "the recording has no request that was answered"),
        (["nothing\n"], "line 2: not JSON"),
        (["[]\n"], "line 2: an object is needed, not list"),
        ([line(0, 1, [1], timestamp=None)], "line 2: timestamp is None: a number of at least 0 is needed"),
        ([line(0, -1, [1])], "line 2: duration_ms is -1000"),
        ([line(0, 1, [1], timestamp=10**400)], "line 2: timestamp is 1000"),
        (
            [line(0, 1, [1], output_length=None, outcome="client_gone")],
            "no line tells output_length: every client left",
        ),
        ([line(0, 1, [1], status=True)], "line 2: status is True"),
        ([line(0, 1, [1], session_id=5)], "line 2: session_id must be a string or null"),
        ([line(0, 1, ["a"])], "line 2: hash_ids must be a list of whole numbers"),  # type: ignore[list-item]
        ([line(0, 1, [1], pages=2.5)], "line 2: hash_ids has 1 ids, which does not fit 2.5 pages"),
        ([line(0, 1, [1], page="block")], "line 2: page must be text or ids, not 'block'"),
        ([line(0, 1, [1], input_length="many")], "line 2: input_length is 'many'"),
        ([line(0, 1, [1], input_length=None)], "no line tells input_length, so nothing tells what a page holds"),
        (
            [line(0, 1, [1], output_length=None)],
            "no line tells output_length: the engines reported no usage, or are of a kind that is not asked",
        ),
    ],
)
def test_what_is_wrong_is_told_with_line_and_field(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse([HEAD, *lines], "r")
    assert str(caught.value).startswith(message)


def test_an_answer_that_a_client_left_counts_with_what_is_known_of_it() -> None:
    left = line(2, 1, [1, 2, 3], output_length=None, input_length=None, outcome="client_gone")
    (chain,) = chains(line(0, 1, [1, 2], output_length=30), left)
    assert [turn.tokens for turn in chain.turns] == [150, 210]
    assert [turn.output for turn in chain.turns] == [30, 30]


def test_a_mark_of_byte_order_is_passed_over(tmp_path: Path) -> None:
    text = "\ufeff" + HEAD + line(0, 1, [1, 2])
    (tmp_path / "plain").write_text(text)
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    for name in ("plain", "packed"):
        assert find(str(tmp_path / name), workers=1).requests == 1


def test_a_recording_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "later"
    path.write_text(HEAD.replace(":1", ":2", 1) + line(0, 1, [1]))
    with pytest.raises(NoTraffic, match="line 1: warmroute_recording is 2: recordings of form 1 are read here"):
        find(str(path), workers=1)
