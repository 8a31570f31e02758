"""Logs of messages as traffic, and files whose content tells their form."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from load_tests.simulate.traffic import ceiling
from load_tests.workloads.catalogue import NoTraffic, find
from load_tests.workloads.chains import Traffic, begun
from load_tests.workloads.logs import agent_logs, chat_logs, spans
from load_tests.workloads.messages import BLOCK, answer_seconds, rendered
from load_tests.workloads.mooncake import TraceError

TOOLS = [{"type": "function", "function": {"name": "look", "description": "looks " * 100}}]


def sound(traffic: Traffic) -> None:
    """Ids have one parent each, counts fit, and all can begin."""
    parents: dict[int, int] = {}
    for chain in traffic.chains:
        assert chain.turns and chain.at >= 0
        for turn in chain.turns:
            assert turn.tokens >= 1 and turn.think >= 0
            assert len(turn.blocks) <= turn.tokens // traffic.block
            assert not turn.after or len(turn.blocks) == turn.tokens // traffic.block
            ids = (*turn.blocks, *turn.after)
            assert len(ids) * traffic.block <= turn.tokens + turn.output
            for before, id_ in zip((-1, *ids), ids, strict=False):
                assert parents.setdefault(id_, before) == before
    assert sorted(begun(traffic.chains)) == list(range(len(traffic.chains)))


def said(role: str, words: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"{role} {words} " * words, **more}


def asked(at: Any, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "body": {"model": "m", "messages": messages, "tools": TOOLS}, **more}


def lines(*rows: Any) -> list[str]:
    return [json.dumps(row) for row in rows]


def conversation(session: str | None, begin: float = 1_760_000_000.0, turns: int = 3) -> list[dict[str, Any]]:
    """Requests 30 s apart whose answers are carried along."""
    messages, rows = [said("system", 100)], []
    for number in range(turns):
        messages = [*messages, said("user", 80 + number)]
        answer = said("assistant", 60 + number, refusal=None)
        row = asked(begin + 30 * number, messages, response={"choices": [{"message": answer}]})
        rows.append(row if session is None else {**row, "session_id": session})
        messages = [*messages, said("assistant", 60 + number)]
    return rows


def test_a_session_is_a_chain_whose_answers_are_carried_along() -> None:
    traffic = chat_logs(lines(*conversation("a"), *conversation("b", 1_760_000_010)), "log")
    sound(traffic)
    one, other = traffic.chains
    assert [chain.session for chain in traffic.chains] == ["a", "b"]
    assert [chain.at for chain in traffic.chains] == [0, 10]
    for turn, following in pairwise(one.turns):
        known = turn.blocks + turn.after
        assert turn.after and following.blocks[: len(known)] == known
        assert following.think == pytest.approx(30 - answer_seconds(turn))
    assert [turn.blocks for turn in one.turns] == [turn.blocks for turn in other.turns]
    text = rendered(conversation("a")[0]["body"]["messages"], TOOLS)
    assert one.turns[0].tokens == len(text) // 4
    assert len(one.turns[0].blocks) == len(text) // 256


def test_another_model_shares_nothing() -> None:
    row = conversation("a", turns=1)[0]
    other = {**row, "session_id": "b", "body": {**row["body"], "model": "n"}}
    one, two = chat_logs(lines(row, other), "log").chains
    assert not set(one.turns[0].blocks) & set(two.turns[0].blocks)


@pytest.mark.parametrize("place", [None, "body", "request"])
def test_a_request_may_stand_alone_or_under_a_name(place: str | None) -> None:
    request = {"messages": [said("user", 200)], "session_id": "s"}
    row: dict[str, Any] = dict(request) if place is None else {place: request}
    traffic = chat_logs(lines({**row, "created": 5}, {**row, "created": 9}), "log")
    assert [chain.session for chain in traffic.chains] == ["s"]
    assert len(traffic.chains[0].turns) == 2


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1_760_000_000, 1_760_000_060),
        (1_760_000_000_000, 1_760_000_060_000),
        (1_760_000_000_000_000, 1_760_000_060_000_000),
        (1_760_000_000_000_000_000, 1_760_000_060_000_000_000),
        ("2025-10-09T08:53:20Z", "2025-10-09T08:54:20"),
        ("2025-10-09T08:53:20+00:00", "2025-10-09T10:54:20+02:00"),
        (0.5, 60.5),
    ],
)
def test_times_are_told_apart_by_their_size(one: Any, two: Any) -> None:
    message = [{"role": "user", "content": "x"}]
    traffic = chat_logs(lines(asked(two, message), asked(one, message)), "log")
    assert [chain.at for chain in traffic.chains] == pytest.approx([0, 60])


def test_usage_wins_and_sets_the_size_of_a_block() -> None:
    messages = [said("user", 300)]
    size = len(rendered(messages, TOOLS))
    usage = {"prompt_tokens": size // 2, "completion_tokens": 77}
    by_line, by_answer = (
        chat_logs(lines(asked(1, messages, **more)), "log").chains[0].turns[0]
        for more in ({"usage": usage}, {"response": {"usage": usage}})
    )
    assert by_line == by_answer
    assert (by_line.tokens, by_line.output) == (size // 2, 77)
    assert len(by_line.blocks) == size // 2 // BLOCK


def test_without_sessions_requests_are_open_and_prompts_tell_who_goes_on() -> None:
    traffic = chat_logs(lines(*conversation(None), asked(1_760_000_005, [said("user", 99)])), "log")
    sound(traffic)
    assert [len(chain.turns) for chain in traffic.chains] == [1] * 4
    assert [chain.at for chain in traffic.chains] == [0, 5, 30, 60]
    first, stranger, second, third = (chain.session for chain in traffic.chains)
    assert first == second == third != stranger


def test_the_user_is_no_session() -> None:
    rows = [{"messages": [said("user", 9)], "user": "u"}, {"messages": [said("user", 8)], "user": "u"}]
    assert len({chain.session for chain in chat_logs(lines(*rows), "log").chains}) == 2
    rows = [{**row, "prompt_cache_key": "k"} for row in rows]
    assert [chain.session for chain in chat_logs(lines(*rows), "log").chains] == ["k"]


def test_without_times_turns_come_one_after_another() -> None:
    rows = [{key: value for key, value in row.items() if key != "timestamp"} for row in conversation("a")]
    (chain,) = chat_logs(lines(*rows), "log").chains
    assert [turn.think for turn in chain.turns] == [0, 0, 0]


def span(name: str, begin: float, end: float, words: int, **attributes: Any) -> dict[str, Any]:
    told = {"gen_ai.input.messages": json.dumps([said("user", words)]), "gen_ai.output.text": "y" * 400, **attributes}
    time = "2026-02-26T10:00:{:06.3f}+00:00"
    return {
        "trace_id": "t",
        "span_id": name,
        "start_time": time.format(begin),
        "end_time": time.format(end),
        "attributes": told,
    }


def test_spans_that_overlap_are_a_burst_that_the_next_awaits() -> None:
    found = [
        span("a", 0, 2, 50),
        span("b", 2.5, 4, 60),
        span("c", 3, 5, 70),
        {"attributes": {"tool.name": "look"}},
        span("d", 5.5, 6, 80),
    ]
    traffic = spans(json.dumps({"spans": found}), "log")
    sound(traffic)
    main, side = traffic.chains
    assert [turn.think for turn in main.turns] == pytest.approx([0, 0.5, 0.5])
    assert [turn.awaits for turn in main.turns] == [(), (), (1,)]
    assert (side.follows, side.at, side.session) == ((0, 0), pytest.approx(1), "t")
    assert main.turns[0].output > 90


def test_spans_tell_their_session_and_tokens() -> None:
    usage = {"gen_ai.usage.input_tokens": 40, "gen_ai.usage.output_tokens": 5, "gen_ai.conversation.id": "c"}
    (chain,) = spans(json.dumps([span("a", 0, 1, 9, **usage)]), "log").chains
    assert chain.session == "c"
    assert (chain.turns[0].tokens, chain.turns[0].output) == (40, 5)


def test_agents_logs_are_chains() -> None:
    text = "the task " * 100
    rows = [
        {"timestamp": 1_760_428_436_000_000, "input": text, "output": "ok " * 40, "session_id": "s"},
        {"timestamp": 1_760_428_446_000_000, "input": text + "a result " * 60, "output": "", "session_id": "s"},
    ]
    traffic = agent_logs(lines(*rows), "log")
    sound(traffic)
    (chain,) = traffic.chains
    assert [turn.tokens for turn in chain.turns] == [225, 360]
    assert [turn.output for turn in chain.turns] == [30, 1]
    assert chain.turns[1].blocks[:3] == chain.turns[0].blocks
    assert chain.turns[1].think == pytest.approx(10 - answer_seconds(chain.turns[0]))


MESSAGE = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, "line 2: messages must be a list with a message"),
        ({"body": "x"}, "line 2: messages must be a list with a message"),
        ({"messages": MESSAGE, "usage": 3}, "line 2: usage must be an object, not 3"),
        ({"messages": MESSAGE, "usage": {"prompt_tokens": "7"}}, "line 2: usage.prompt_tokens is '7'"),
        ({"messages": MESSAGE, "usage": {"completion_tokens": -7}}, "line 2: usage.completion_tokens is -7"),
        ({"messages": MESSAGE, "timestamp": "noon"}, "line 2: timestamp is 'noon': a number or ISO 8601 is needed"),
        ({"messages": MESSAGE, "created": -1}, "line 2: created is -1"),
        ({"messages": MESSAGE, "created": float("nan")}, "line 2: created is nan"),
        ({"messages": MESSAGE, "created": 10**400}, "line 2: created is 1000"),
        ({"messages": MESSAGE, "session_id": [1]}, "line 2: session_id must be a string or a number"),
        ([], "line 2: an object is needed, not list"),
    ],
)
def test_errors_of_chat_logs_name_line_and_field(row: Any, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        chat_logs(["", *lines(row)], "log")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"spans": 3}', "spans must be a list"),
        ('{"spans": [3]}', "span 1: attributes must be an object"),
        ('{"spans": []}', "the trace has no request"),
        (json.dumps([span("a", 0, 1, 9, **{"gen_ai.input.messages": "["})]), "span 1: gen_ai.input.messages: not JSON"),
        (
            json.dumps([span("a", 0, 1, 9, **{"gen_ai.input.messages": "[]"})]),
            "span 1: gen_ai.input.messages must be a",
        ),
        (
            json.dumps([span("a", 0, 1, 9, **{"gen_ai.output.messages": 3})]),
            "span 1: gen_ai.output.messages must be a list",
        ),
        (json.dumps([span("a", 0, 1, 9) | {"end_time": True}]), "span 1: end_time is True"),
    ],
)
def test_errors_of_spans_name_span_and_field(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        spans(text, "log")
    assert str(caught.value).startswith(message)


def test_errors_of_agents_logs_name_line_and_field() -> None:
    with pytest.raises(TraceError, match="line 1: input must be text, not 3"):
        agent_logs(lines({"input": 3, "output": ""}), "log")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), inner)
    ),
    max_leaves=6,
)
FIELDS = (
    "messages tools model timestamp created usage response body request session_id user input output spans attributes chains"
).split()


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.dictionaries(st.sampled_from(FIELDS), VALUES), min_size=1, max_size=3))
def test_whatever_a_file_has_is_read_or_refused(rows: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("any") / "trace"
    path.write_text("\n".join(lines(*rows)))
    with suppress(NoTraffic):
        sound(find(str(path), workers=1))


@pytest.mark.parametrize("packed", [False, True])
def test_the_content_of_a_file_tells_its_form(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "any.name"
    forms = {
        "chat": "\n".join(lines(*conversation("a"))),
        "agents": json.dumps({"timestamp": 1, "input": "x" * 999, "output": "y", "session_id": "s"}),
        "spans": json.dumps({"spans": [span("a", 0, 1, 9)]}, indent=1),
        "one span": json.dumps([span("a", 0, 1, 9)]),
        "mooncake": json.dumps(
            {"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3], "block_size": 16}
        ),
    }
    blocks = {}
    for form, text in forms.items():
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        traffic = find(str(path), workers=1)
        blocks[form] = traffic.block, traffic.requests
    assert blocks == {"chat": (64, 3), "agents": (64, 1), "spans": (64, 1), "one span": (64, 1), "mooncake": (16, 1)}
    assert find(f"{path}?rate=2", workers=1).requests == 1


def traces(name: str) -> str:
    folder = os.environ.get("WARMROUTE_TRACES")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"not run: WARMROUTE_TRACES names no folder with {name}")
    return name


def test_the_published_agents_logs_are_as_their_readme_says() -> None:
    traffic = find(traces("lmcache_agent/miniswe.jsonl.gz"), workers=4)
    sound(traffic)
    assert (len(traffic.chains), traffic.requests) == (20, 402)
    assert ceiling(traffic) == pytest.approx(0.932, abs=0.005)


def test_the_published_spans_can_be_read() -> None:
    fan_in = find(traces("inference_perf_otel/fan_in_dependencies.json"), workers=1)
    sound(fan_in)
    assert [len(chain.turns) for chain in fan_in.chains] == [3, 1]
    assert fan_in.chains[0].turns[2].awaits == (1,)
    sharing = find(traces("inference_perf_otel/prefix_sharing_example.json"), workers=1)
    sound(sharing)
    assert sorted(len(chain.turns) for chain in sharing.chains) == [1, 1, 1, 4]
