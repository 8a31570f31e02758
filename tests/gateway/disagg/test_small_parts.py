"""Parts of pairs by themselves: logprobs put together, what is hidden, what is kept, what is read of bootstrap servers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.disagg import Several, answers_to, prompts_in, several
from gateway.disagg.logprobs import FIELDS, merged, merged_events, prompt_logprobs
from gateway.disagg.mooncake import engine_ids
from gateway.disagg.nixl import hidden
from gateway.retold import TAPE, Tape

# -- logprobs -----------------------------------------------------------------------------------------------------------

FIRST = [[None, 5, None], [-0.5, 6, None]]


def row(**meta: Any) -> dict[str, Any]:
    return {"text": "a", "meta_info": {"id": "x", **meta}}


def dumped(told: Any) -> bytes:
    return json.dumps(told).encode()


ONE = {0: {"input_token_logprobs": FIRST}}


def test_what_a_prefill_engine_says_of_the_prompt() -> None:
    answer = dumped(row(input_token_logprobs=FIRST, output_token_logprobs=[[-1, 9, None]], cached_tokens=4))
    assert prompt_logprobs(answer, False) == ONE
    all_three = dict.fromkeys(FIELDS, FIRST)
    assert prompt_logprobs(dumped(row(**all_three)), False) == {0: all_three}
    batch = [row(input_token_logprobs=FIRST), row(), row(input_token_logprobs=FIRST[:1])]
    assert prompt_logprobs(dumped(batch), False) == ONE | {2: {"input_token_logprobs": FIRST[:1]}}


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_of_a_stream_the_last_event_of_each_answer_tells(end: bytes) -> None:
    begun, told = {"text": "", "meta_info": {}}, row(input_token_logprobs=FIRST)
    events = [b"data: " + dumped(begun), b"data: " + dumped(told), b"data: [DONE]"]
    assert prompt_logprobs(b"".join(event + end for event in events), True) == ONE
    several_told = [row(input_token_logprobs=FIRST[:1]) | {"index": 1}, told | {"index": 0}, begun | {"index": 1}]
    events = [b"data: " + dumped(each) for each in several_told]
    found = prompt_logprobs(b"".join(event + end for event in events), True)
    assert found == ONE | {1: {"input_token_logprobs": FIRST[:1]}}
    assert prompt_logprobs(b"data: [DONE]" + end, True) == prompt_logprobs(b"", True) == {}


@pytest.mark.parametrize("told", [None, {"meta_info": None}, {}, [{}], 3, "x", {"meta_info": 7}, [row(), 3]])
def test_what_tells_nothing_of_it_is_nothing(told: Any) -> None:
    assert prompt_logprobs(dumped(told), False) == {}


@pytest.mark.parametrize("value", [None, 5, "x", {}])
def test_fields_that_are_no_lists_are_left_out(value: Any) -> None:
    assert prompt_logprobs(dumped(row(input_token_logprobs=value)), False) == {}


def test_they_stand_before_the_decode_engine_s_own() -> None:
    own = [[-2, 7, None]]
    answer = json.loads(merged(dumped(row(input_token_logprobs=own, x=1.5)), ONE))
    assert answer == row(input_token_logprobs=[*FIRST, *own], x=1.5)
    for nothing in ([], None):
        assert json.loads(merged(dumped(row(input_token_logprobs=nothing)), ONE)) == row(input_token_logprobs=FIRST)
    assert json.loads(merged(dumped(row()), ONE)) == row(input_token_logprobs=FIRST)


def test_of_several_answers_each_has_its_own() -> None:
    told = {0: {"input_token_logprobs": FIRST}, 1: {"input_token_logprobs": FIRST[:1]}}
    answer = json.loads(merged(dumped([row(), row()]), told))
    assert [each["meta_info"]["input_token_logprobs"] for each in answer] == [FIRST, FIRST[:1]]
    for number, right in enumerate((FIRST, FIRST[:1])):
        event = json.loads(merged(dumped(row() | {"index": number}), told))
        assert event["meta_info"]["input_token_logprobs"] == right


ANSWERS = [b"", b"oops", b"[]", b"3", b'{"error":{"message":"x"}}', b"\xff", b"[" * 3000, b'[{"meta_info":7},3]']


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_cannot_be_put_together_stays_as_it_is(answer: bytes) -> None:
    assert merged(answer, ONE) == answer


def test_without_anything_to_add_bytes_stay() -> None:
    answer = b'{ "text":"a" , "meta_info": {"x": 1.50} }'
    for nothing in ({}, {1: {"input_token_logprobs": FIRST}}):
        assert merged(answer, nothing) == answer
        assert merged_events(b"data: " + answer + b"\n\n", nothing) == b"data: " + answer + b"\n\n"


def test_events_keep_what_is_not_theirs() -> None:
    one, two = dumped(row(n=1)), dumped(row(n=2))
    data = b": keep-alive\n\ndata: " + one + b"\n\ndata: " + two + b"\r\n\r\ndata: [DONE]\n\n: half"
    told = merged_events(data, ONE)
    assert told.startswith(b": keep-alive\n\ndata: ")
    assert told.endswith(b"\r\n\r\ndata: [DONE]\n\n: half")
    found = [json.loads(line[6:]) for line in told.splitlines() if line.startswith(b"data: {")]
    assert found == [row(n=1, input_token_logprobs=FIRST), row(n=2, input_token_logprobs=FIRST)]


@given(st.binary(max_size=300), st.booleans())
def test_no_answer_of_an_engine_breaks_it(answer: bytes, streamed: bool) -> None:
    assert all(isinstance(number, int) for number in prompt_logprobs(answer, streamed))
    assert merged(answer, {}) == answer
    assert merged_events(answer, {}) == answer


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["meta_info", "index", *FIELDS]), inner)
    ),
    max_leaves=8,
)


@given(JSONS, JSONS)
def test_whatever_two_engines_say(first: Any, second: Any) -> None:
    told = prompt_logprobs(dumped(first), False)
    answer = json.loads(merged(dumped(second), told))
    assert type(answer) is type(second)


# -- hidden -------------------------------------------------------------------------------------------------------------

PARAMS = '"kv_transfer_params":{"do_remote_decode":true,"remote_block_ids":[[1,2],[3]],"remote_host":"h","x":null}'


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (f'{{"id":"a",{PARAMS}}}', '{"id":"a"}'),
        (f'{{"id":"a", {PARAMS}, "z":1}}', '{"id":"a", "z":1}'),
        ('{"id":"a","kv_transfer_params":null}', '{"id":"a","kv_transfer_params":null}'),
        ('{"id":"a","kv_transfer_params":{}}', '{"id":"a"}'),
        ('{"kv_transfer_params":{"a":{"b":[{}]},"c":"}"},"id":"a"}', '{"id":"a"}'),
    ],
)
def test_parameters_are_hidden(answer: str, left: str) -> None:
    assert hidden(answer.encode(), False) == hidden(answer.encode(), True)
    assert json.loads(hidden(answer.encode(), False)) == json.loads(left)


@pytest.mark.parametrize("ids", ["null", "[]", "[1]", "[1,2,3]", "[ 1, 2,\n3 ]"])
@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids"])
def test_ids_are_hidden_where_nobody_asked(name: str, ids: str) -> None:
    answer = f'{{"choices":[{{"index":0,"{name}":{ids},"text":"a"}}],"{name}": {ids}}}'.encode()
    assert json.loads(hidden(answer, True)) == {"choices": [{"index": 0, "text": "a"}]}
    assert hidden(answer, False) == answer


SAID = [
    ',"kv_transfer_params":null',
    ',"kv_transfer_params":{"a":1}',
    ',"token_ids":[1,2]',
    ', "prompt_token_ids" : null',
    '\\",\\"token_ids\\":[1]',
]


@pytest.mark.parametrize("said", SAID)
def test_what_was_said_is_not_hidden(said: str) -> None:
    for made in (json.dumps, lambda told: json.dumps(told, ensure_ascii=False, separators=(",", ":"))):
        answer = made({"choices": [{"message": {"content": said, "arguments": made({"a": said})}}]}).encode()
        assert hidden(answer, True) == answer


@given(st.text(max_size=60), st.lists(st.integers(0, 1 << 31), max_size=5))
def test_only_those_members_go(said: str, ids: list[int]) -> None:
    kept = {"choices": [{"index": 0, "text": said}], "id": said}
    whole = {"choices": [{**kept["choices"][0], "token_ids": ids}], "id": said, "prompt_token_ids": ids}  # type: ignore[dict-item]
    assert json.loads(hidden(dumped(whole | {"kv_transfer_params": {"remote_host": "h"}}), True)) == kept


# -- the tape -----------------------------------------------------------------------------------------------------------


def test_a_tape_keeps_all_while_it_is_short() -> None:
    tape = Tape()
    pieces = [b"%d" % number for number in range(1000)]
    for piece in pieces:
        tape.append(piece)
    assert list(tape) == pieces
    assert tape.size == sum(map(len, pieces))


@given(st.lists(st.integers(1, TAPE), min_size=1, max_size=40))
def test_a_tape_is_bounded(sizes: list[int]) -> None:
    tape, largest = Tape(), bytes(TAPE)
    for size in sizes:
        tape.append(largest[:size])
    held = sum(map(len, tape))
    assert held <= max(TAPE, 4 * max(sizes))
    kept = [len(piece) for piece in tape]
    assert kept == sizes[len(sizes) - len(kept) :]
    assert len(kept) >= min(4, len(sizes))


# -- engine ids ---------------------------------------------------------------------------------------------------------


def test_the_ids_of_each_rank_in_order() -> None:
    told = {str(rank): {"engine_id": f"e_dp{rank}", "worker_addr": {"0": {"0": "tcp://h:1"}}} for rank in (2, 0, 1)}
    assert engine_ids(dumped(told)) == ["e_dp0", "e_dp1", "e_dp2"]
    many = {str(rank): {"engine_id": str(rank)} for rank in range(12)}
    assert engine_ids(dumped(many)) == [str(rank) for rank in range(12)]


GARBAGE = [
    b"",
    b"oops",
    b"[]",
    b"null",
    b"{}",
    b'"x"',
    b"\xff\xfe",
    b"{" * 3000,
    b'{"0":null}',
    b'{"0":{}}',
    b'{"0":{"engine_id":7}}',
    b'{"0":{"engine_id":null}}',
    b'{"1":{"engine_id":"a"}}',
    b'{"0":{"engine_id":"a"},"2":{"engine_id":"b"}}',
    b'{"0":{"engine_id":"a"},"x":{"engine_id":"b"}}',
    b'{"00":{"engine_id":"a"}}',
    b"<html>",
]


@pytest.mark.parametrize("answer", GARBAGE)
def test_what_tells_no_ids(answer: bytes) -> None:
    assert engine_ids(answer) is None


@given(st.binary(max_size=100))
def test_no_bootstrap_server_breaks_it(answer: bytes) -> None:
    told = engine_ids(answer)
    assert told is None or all(isinstance(each, str) for each in told)


# -- how many -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"oops", b'{"n":"2"}', b'{"n":1.5}', b'{"echo":3}', b'{"max_tokens":"x"}', b"\xff", b"{" * 3000],
)
def test_what_engines_do_not_take_is_not_counted(body: bytes) -> None:
    assert several(body) is None


def asked_of(told: dict[str, Any]) -> Several:
    asked = several(dumped(told))
    assert asked is not None
    return asked


@pytest.mark.parametrize(
    ("told", "prompts", "answers"),
    [
        ({}, 1, 1),
        ({"prompt": ["a"]}, 1, 1),
        ({"prompt": ["a", "b"]}, 2, 1),
        ({"prompt": [[1], [2], [3]]}, 3, 1),
        ({"prompt": [1, 2, 3]}, 1, 1),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, 2, 2),
        ({"input_ids": [[1]], "sampling_params": {"n": None}}, 1, 1),
        ({"prompt": [None, None]}, 1, 1),
        ({"prompt": {}}, 1, 1),
        ({"text": None}, 1, 1),
        ({"sampling_params": None}, 1, 1),
        ({"sampling_params": "x"}, 1, 1),
        ({"sampling_params": {"n": "x"}}, 1, 1),
        ({"n": 2, "sampling_params": {"n": 5}}, 1, 2),
        ({"n": 0, "best_of": 0}, 1, 1),
        ({"n": -3}, 1, 1),
        ({"best_of": 4}, 1, 4),
    ],
)
def test_how_many_prompts_and_answers(told: dict[str, Any], prompts: int, answers: int) -> None:
    asked = asked_of(told)
    assert (prompts_in(asked), answers_to(asked)) == (prompts, answers)


@given(st.dictionaries(st.sampled_from(["n", "best_of", "prompt", "text", "input_ids", "sampling_params"]), JSONS))
def test_any_body_has_at_least_one(told: dict[str, Any]) -> None:
    asked = several(dumped(told))
    if asked is not None:
        assert prompts_in(asked) >= 1
        assert answers_to(asked) != 0
