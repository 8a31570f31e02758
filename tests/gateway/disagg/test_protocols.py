"""Every protocol by itself: what it sends for what it is told. No sockets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.disagg import End, Pair, Protocol, all_protocols, answers_to, prompts_in, several
from gateway.disagg.nixl import ASKED, offered, packed, read
from gateway.errors import ServerError
from policies.base import Role

PROTOCOLS = all_protocols()
BOOTSTRAP = ("10.0.0.1", 8998)
NIXL, SGLANG, MOONCAKE, SHARED, TENSORRT = (
    PROTOCOLS[each] for each in ("nixl", "sglang", "mooncake", "shared", "tensorrt_llm")
)


def pair_of(body: dict[str, Any], kind: str = "chat", draw: int = 1234567, **more: Any) -> Pair:
    end = End("10.0.0.1", more.pop("rank", 0), more.pop("ranks", 1), more.pop("bootstrap", BOOTSTRAP), "engine-1")
    return Pair(end, End("10.0.0.2"), kind, json.dumps(body).encode(), "request", draw, **more)


def first(protocol: Protocol, pair: Pair) -> dict[Role, Any]:
    return {send.role: json.loads(send.body) for send in next(protocol.steps(pair))}


def test_there_are_five() -> None:
    assert set(PROTOCOLS) == {"nixl", "sglang", "mooncake", "shared", "tensorrt_llm"}
    assert all(protocol.name == name for name, protocol in PROTOCOLS.items())


# -- who takes what -----------------------------------------------------------------------------------------------------

PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": []},
    "completions": {"prompt": "a"},
    "messages": {"messages": []},
}
SINGLE = ["nixl", "mooncake", "tensorrt_llm"]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", {"n": 2}),
        ("completions", {"prompt": "a", "best_of": 2}),
        ("completions", {"prompt": ["a", "b"]}),
        ("completions", {"prompt": [[1], [2]]}),
        ("completions", {"prompt": "a", "echo": True}),
        ("embeddings", {"input": "a"}),
        ("responses", {"input": "a"}),
        ("chat", {"n": "two"}),
    ],
)
def test_several_are_not_split(name: str, kind: str, body: dict[str, Any]) -> None:
    assert not PROTOCOLS[name].takes(kind, json.dumps(body).encode())


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_logprobs_of_the_prompt_are_not_split(name: str) -> None:
    assert not PROTOCOLS[name].takes("completions", b'{"prompt":"a","prompt_logprobs":0}')


@pytest.mark.parametrize("kind", ["chat", "completions", "messages"])
@pytest.mark.parametrize("name", ["nixl", "mooncake", "shared", "sglang"])
def test_one_is(name: str, kind: str) -> None:
    for more in ({}, {"n": 1}, {"n": None}, {"stream": True}, {"best_of": 1}):
        assert PROTOCOLS[name].takes(kind, json.dumps({**PLAIN[kind], **more}).encode()), more
    assert PROTOCOLS[name].takes("completions", b'{"prompt":[1,2,3]}')
    assert PROTOCOLS[name].takes("completions", b'{"prompt":["a"]}')


@pytest.mark.parametrize(
    ("limits", "splits"),
    [({"max_tokens": 1}, False), ({"max_completion_tokens": 1}, False), ({"max_tokens": 2}, True), ({}, True)],
)
def test_tensorrt_needs_a_second_token(limits: dict[str, int], splits: bool) -> None:
    assert TENSORRT.takes("chat", json.dumps({"messages": [], **limits}).encode()) is splits


def test_sglang_takes_all_that_generates() -> None:
    assert all(SGLANG.takes(kind, b"{}") for kind in ("chat", "completions", "generate", "messages", "responses"))
    assert not any(SGLANG.takes(kind, b"{}") for kind in ("embeddings", "rerank", "stored", "passthrough"))


@pytest.mark.parametrize(
    ("body", "prompts", "answers"),
    [
        ({"text": ["a", "b", "c"], "sampling_params": {"n": 4}}, 3, 4),
        ({"input_ids": [[1], [2]]}, 2, 1),
        ({"input_ids": [1, 2]}, 1, 1),
        ({"prompt": []}, 1, 1),
        ({"prompt": "[1]"}, 1, 1),
        ({"text": "a", "sampling_params": [{"n": 2}]}, 1, 1),
        ({"prompt": "a", "n": 0}, 1, 1),
        ({"prompt": "a", "n": 3, "best_of": 5}, 1, 5),
    ],
)
def test_how_many(body: dict[str, Any], prompts: int, answers: int) -> None:
    asked = several(json.dumps(body).encode())
    assert asked is not None
    assert (prompts_in(asked), answers_to(asked)) == (prompts, answers)


# -- nixl ---------------------------------------------------------------------------------------------------------------


def nixl(answer: bytes, body: dict[str, Any] | None = None, **more: Any) -> tuple[dict[str, Any], bytes]:
    """(what the prefill engine is sent, what the decode engine is)."""
    steps = NIXL.steps(pair_of(body or {"messages": [], "max_tokens": 9, "x": 1}, **more))
    (one,) = next(steps)
    assert one.role is Role.PREFILL
    (two,) = steps.send(answer)
    assert two.role is Role.DECODE
    with pytest.raises(StopIteration):
        steps.send(b"")
    return json.loads(one.body), two.body


PARAMS = b'{ "a":1.50,"b":[ [1,2]], "c":"\\u00e9" }'


def test_nixl_parameters_go_on_byte_for_byte() -> None:
    asked, given = nixl(b'{"kv_transfer_params":' + PARAMS + b',"choices":[]}')
    assert asked["kv_transfer_params"] == json.loads(ASKED)
    assert given == b'{"messages":[],"max_tokens":9,"x":1,"kv_transfer_params":' + PARAMS + b"}"


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params":null}', b'{"choices":[]}'])
def test_nixl_without_parameters_the_body_is_the_client_s(answer: bytes) -> None:
    body = {"messages": [], "max_tokens": 9}
    assert nixl(answer, body)[1] == json.dumps(body).encode()


@pytest.mark.parametrize(
    "answer", [b"", b"oops", b"[]", b"\xff", b'{"choices":3}', b'{"kv_transfer_params":{}', b"[" * 5000]
)
@pytest.mark.parametrize("name", ["nixl", "tensorrt_llm"])
def test_an_answer_that_cannot_be_read_is_the_engine_s_fault(name: str, answer: bytes) -> None:
    steps = PROTOCOLS[name].steps(pair_of({"messages": []}))
    next(steps)
    with pytest.raises(ServerError):
        steps.send(answer)


def test_nixl_hands_back_what_was_lent_and_asks_for_ids() -> None:
    asked, given = nixl(b"{}", lent=b'{"do_remote_decode":true,"remote_num_tokens":7}', tells_ids=True)
    assert asked["kv_transfer_params"] == {"do_remote_decode": True, "remote_num_tokens": 7}
    assert asked["return_token_ids"] is True
    assert json.loads(given)["return_token_ids"] is True


@pytest.mark.parametrize(
    ("kind", "limits"),
    [("chat", {"max_tokens", "max_completion_tokens"}), ("completions", {"max_tokens"}), ("messages", {"max_tokens"})],
)
@pytest.mark.parametrize("protocol", [NIXL, MOONCAKE, SHARED, TENSORRT], ids=lambda each: each.name)
def test_one_token_is_asked_of_the_prefill_engine(protocol: Protocol, kind: str, limits: set[str]) -> None:
    body = {"stream": True, "stream_options": {}, "min_tokens": 4, "max_tokens": 50, "x": [1]}
    told = first(protocol, pair_of(body, kind))[Role.PREFILL]
    assert {key: told[key] for key in limits} == dict.fromkeys(limits, 1)
    assert told["stream"] is False
    assert told["x"] == [1]
    assert not {"stream_options", "min_tokens"} & set(told)
    assert ("max_completion_tokens" in told) is ("max_completion_tokens" in limits)


def test_what_a_decode_engine_offers() -> None:
    params = b'{"do_remote_decode":true,"remote_num_tokens":5}'
    whole = b'{"choices":[{"token_ids":[4,5,6]}],"kv_transfer_params":' + params + b"}"
    assert offered(whole, False) == (5, params, packed([4, 5, 6]))
    stream = (
        b'data: {"choices":[{"token_ids":[4]}]}\n\ndata: {"choices":[{"token_ids":[5,6]}]}\n\n'
        b'data: {"choices":[],"kv_transfer_params":' + params + b"}\n\ndata: [DONE]\n\n"
    )
    assert offered(stream, True) == (5, params, packed([4, 5, 6]))
    assert offered(b'{"choices":[{"token_ids":[4]}]}', False) is None
    assert offered(b'{"choices":[],"kv_transfer_params":' + params + b"}", False) is None, "ids are not told"
    assert offered(whole.replace(b"true", b"false"), False) is None
    assert offered(b"", True) is offered(b"", False) is offered(b"oops", False) is None
    assert packed([1 << 32]) is packed([-1]) is None


@given(st.binary(max_size=200), st.booleans())
def test_nothing_that_an_engine_says_is_a_defect(answer: bytes, streamed: bool) -> None:
    read(answer)
    offered(answer, streamed)
    offered(b"data: " + answer + b"\n\n", True)


# -- sglang -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64 - 1), st.integers(1, 64), st.data())
def test_the_room_is_the_rank_s(draw: int, ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    told = first(SGLANG, pair_of({"messages": []}, draw=draw, rank=rank, ranks=ranks))
    assert told[Role.PREFILL] == told[Role.DECODE]
    room = told[Role.DECODE]["bootstrap_room"]
    assert 0 <= room < 2**63
    assert room % ranks == rank
    assert (told[Role.DECODE]["bootstrap_host"], told[Role.DECODE]["bootstrap_port"]) == BOOTSTRAP
    assert len(told[Role.DECODE]["rid"]) == len("wr-") + 16


@pytest.mark.parametrize("ranks", [1, 4])
def test_each_prompt_of_a_batch_has_a_room(ranks: int) -> None:
    body = {"text": ["a", "b", "c"]}
    told = first(SGLANG, pair_of(body, "generate", ranks=ranks, rank=ranks - 1))[Role.DECODE]
    assert "rid" not in told, "one id is none for three"
    rooms = told["bootstrap_room"]
    if ranks == 1:
        assert isinstance(rooms, int)
        return
    assert len(set(rooms)) == len(rooms) == len(told["bootstrap_host"]) == len(told["bootstrap_port"]) == 3
    assert {room % ranks for room in rooms} == {ranks - 1}


def test_the_client_s_own_id_stays_and_is_not_aborted_by() -> None:
    pair = pair_of({"messages": [], "rid": "mine"})
    assert first(SGLANG, pair)[Role.DECODE]["rid"] == "mine"
    assert SGLANG.abort(pair) is None
    other = pair_of({"messages": [{"content": '"rid"'}]})
    path, body = SGLANG.abort(other) or ("", b"")
    assert path == "/abort_request"
    assert json.loads(body) == {"rid": first(SGLANG, other)[Role.DECODE]["rid"]}


@pytest.mark.parametrize("protocol", [SGLANG, MOONCAKE], ids=lambda each: each.name)
def test_without_a_bootstrap_server_there_is_no_meeting(protocol: Protocol) -> None:
    with pytest.raises(ServerError):
        next(protocol.steps(pair_of({"messages": []}, bootstrap=None)))


@pytest.mark.parametrize(
    ("message", "side"),
    [
        ("Prefill bootstrap failed for request rank=0 with exception KVTransferError", Role.PREFILL),
        ("Decode transfer failed ...: Failed to get kvcache from prefill instance, it might be dead", Role.PREFILL),
        ("Lost connection with prefill instance (bootstrap_addr: 1:2)", Role.PREFILL),
        ("Decode handshake failed for request", None),
        ("Internal server error", None),
    ],
)
def test_whom_an_error_blames(message: str, side: Role | None) -> None:
    assert SGLANG.blames(message) is side


# -- the others ---------------------------------------------------------------------------------------------------------


def test_mooncake_names_one_transfer_to_both() -> None:
    told = first(MOONCAKE, pair_of({"messages": [], "stream": True}))
    one, two = (told[role]["kv_transfer_params"] for role in (Role.PREFILL, Role.DECODE))
    assert one == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": two["transfer_id"]}
    assert two["remote_bootstrap_addr"] == "http://10.0.0.1:8998"
    assert two["remote_engine_id"] == "engine-1"
    assert told[Role.DECODE]["stream"] is True
    other = first(MOONCAKE, pair_of({"messages": []}, draw=99))[Role.DECODE]["kv_transfer_params"]
    assert other["transfer_id"] != two["transfer_id"]


def test_a_shared_store_needs_no_parameters() -> None:
    pair = pair_of({"messages": [], "stream": True})
    steps = SHARED.steps(pair)
    (one,) = next(steps)
    (two,) = steps.send(b"whatever")
    assert (one.role, two.role, two.body) == (Role.PREFILL, Role.DECODE, pair.body)
    assert b"kv_transfer" not in one.body


def test_tensorrt_hands_its_context_on() -> None:
    steps = TENSORRT.steps(pair_of({"messages": [], "max_tokens": 5}))
    (one,) = next(steps)
    assert json.loads(one.body)["disaggregated_params"] == {"request_type": "context_only"}
    told = b'{"request_type":"context_only","first_gen_tokens":[7],"ctx_request_id":12345678901234567890}'
    (two,) = steps.send(b'{"choices":[{"finish_reason":"length","disaggregated_params":' + told + b"}]}")
    assert json.loads(two.body)["disaggregated_params"] == {**json.loads(told), "request_type": "generation_only"}


@pytest.mark.parametrize(
    "answer",
    [b'{"choices":[]}', b'{"choices":[{"finish_reason":"stop","disaggregated_params":{}}]}', b'{"choices":[{}]}'],
)
def test_tensorrt_that_has_nothing_to_hand_over(answer: bytes) -> None:
    pair = pair_of({"messages": []})
    steps = TENSORRT.steps(pair)
    next(steps)
    assert steps.send(answer)[0].body == pair.body
