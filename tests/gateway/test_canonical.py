"""Canonical bodies: equal whatever the order of tools and keys, idempotent, and nothing touched that could mean something."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.canonical import ALL, DEEPEST, STEPS, canonical
from gateway.dialects.anthropic import BILLING

NAMES = st.text("abcdefgh_", min_size=1, max_size=6)
SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=6
)


def _objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=4)},
        optional={
            "required": st.lists(NAMES, max_size=3),
            "items": inner,
            "anyOf": st.lists(inner, max_size=2),
            "$defs": st.dictionaries(NAMES, inner, max_size=2),
            "additionalProperties": st.booleans(),
        },
    )


LEAVES = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer"])},
    optional={
        "description": st.text(max_size=12),
        "enum": st.lists(VALUES, max_size=3),
        "default": VALUES,
        "examples": st.lists(VALUES, max_size=2),
        "const": VALUES,
        "minimum": st.integers(0, 9),
    },
)
SCHEMAS = st.recursive(LEAVES, _objects, max_leaves=8)
TOOLS = st.lists(
    st.fixed_dictionaries({"name": NAMES, "parameters": SCHEMAS}, optional={"description": st.text(max_size=12)}),
    min_size=1,
    max_size=4,
    unique_by=lambda tool: tool["name"],
)
KEPT = ("enum", "const", "default", "examples", "required", "prefixItems")


def wrapped(kind: str, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if kind == "chat":
        return [{"type": "function", "function": tool} for tool in tools]
    if kind == "messages":
        return [
            {**{k: v for k, v in tool.items() if k != "parameters"}, "input_schema": tool["parameters"]}
            for tool in tools
        ]
    return [{"type": "function", **tool} for tool in tools]


def body(kind: str, tools: list[dict[str, Any]], **more: Any) -> bytes:
    said = {"input": "hello"} if kind == "responses" else {"messages": [{"role": "user", "content": "1.0 é"}]}
    return json.dumps({"model": "m", **said, "tools": wrapped(kind, tools), **more}).encode()


def shuffled(value: Any, draw: st.DrawFn, inside: str = "") -> Any:
    """Keys of schemas in another order; what is a value stays."""
    if isinstance(value, dict):
        names = draw(st.permutations(list(value)))
        return {
            name: value[name] if name in KEPT and inside != "properties" else shuffled(value[name], draw, name)
            for name in names
        }
    return [shuffled(each, draw) for each in value] if isinstance(value, list) else value


@st.composite
def permuted(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    tools = draw(TOOLS)
    return tools, [shuffled(tool, draw) for tool in draw(st.permutations(tools))]


@given(permuted(), st.sampled_from(["chat", "messages", "responses"]))
def test_equal_after_tools_and_keys_were_permuted(pair: tuple[list[Any], list[Any]], kind: str) -> None:
    one, other = (canonical(kind, body(kind, tools), ALL)[0] for tools in pair)
    assert one == other
    assert json.loads(one)["tools"] == sorted(
        wrapped(kind, pair[0]), key=lambda tool: (tool.get("function") or tool)["name"]
    )


@given(TOOLS, st.sets(st.sampled_from(STEPS)), st.sampled_from(["chat", "messages", "responses"]))
def test_idempotent_and_what_it_says_it_did(tools: list[Any], steps: set[str], kind: str) -> None:
    before = body(kind, tools)
    after, done = canonical(kind, before, frozenset(steps))
    assert set(done) <= steps
    assert (after is before) == (done == ())
    again, nothing = canonical(kind, after, frozenset(steps))
    assert again is after and nothing == ()
    # Equal as values (1.0 is 1), but for the order of tools.
    named = [{tool["name"]: tool for tool in found} for found in (tools, _plain(kind, after))]
    assert named[0] == named[1]


def _plain(kind: str, after: bytes) -> list[dict[str, Any]]:
    found = []
    for tool in json.loads(after)["tools"]:
        tool = dict(tool.get("function") or tool)
        tool.pop("type", None)
        if "input_schema" in tool:
            tool["parameters"] = tool.pop("input_schema")
        found.append(tool)
    return found


def test_values_keep_their_bytes() -> None:
    raw = (
        b'{"b":1.50,"tools":[{"type":"function","function":{"name":"z","parameters":{"type":"object","properties":'
        b'{"q":{"minimum":1.0,"maximum":1e2,"enum":[{"b":1.0,"a":2}],"default":{"z":3.0,"parameters":4.0},'
        b'"prefixItems":[{"b":1,"a":2.0}],"examples":[1.0],"multipleOf":0.50},"a":{"const":{"y":1.0,"b":2}}},'
        b'"required":["q","a"]}}},{"type":"function","function":{"name":"a","description":"\\u00e9\\/"}}],'
        b'"messages":[{"role":"user","content":"\\u00e9  1.0"}] , "seed" : 1.0}'
    )
    after, done = canonical("chat", raw, ALL)
    assert done == ("json", "tools")
    for kept in (
        b'"enum":[{"b":1.0,"a":2}]',
        b'"default":{"z":3.0,"parameters":4.0}',
        b'"prefixItems":[{"b":1,"a":2.0}]',
        b'"examples":[1.0]',
        b'"const":{"y":1.0,"b":2}',
        b'"required":["q","a"]',
        b'"multipleOf":0.50',
        b'"minimum":1,',
        b'"maximum":100,',
        b'{"b":1.50,"tools":',
        b'"messages":[{"role":"user","content":"\\u00e9  1.0"}]',
        b'"seed":1.0}',
        '"description":"é/"'.encode(),
    ):
        assert kept in after, kept
    assert after.index(b'"name":"a"') < after.index(b'"name":"z"')


ORDERED = [
    {"name": "f", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "string"}}}}
]


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({}, False),
        ({"tool_choice": "auto"}, False),
        ({"tool_choice": {"type": "auto"}}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "any"}}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ],
)
def test_properties_stay_where_answers_are_generated_along_them(more: dict[str, Any], kept: bool) -> None:
    after, _ = canonical("chat", body("chat", ORDERED, **more), ALL)
    told = json.loads(after)
    assert list(told["tools"][0]["function"]["parameters"]["properties"]) == (["z", "a"] if kept else ["a", "z"])
    assert told.get("tool_choice") == more.get("tool_choice")


def test_properties_of_strict_tools_stay_in_all_dialects() -> None:
    for kind in ("chat", "messages", "responses"):
        after, _ = canonical(kind, body(kind, [{**ORDERED[0], "strict": True}]), ALL)
        (tool,) = _plain(kind, after)
        assert list(tool["parameters"]["properties"]) == ["z", "a"]
        assert list(tool["parameters"]) == ["properties", "type"]


@pytest.mark.parametrize(
    "tools",
    [
        b'[{"name":"b","name":"c","input_schema":{"b":1,"a":{}}}]',
        b'[{"name":"b","input_schema":{"properties":{"z":1,"z":2,"a":{}}}}]',
        b"[3]",
        b'{"b":1,"a":2}',
        b'"tools"',
        b"null",
        b"[]",
        b'[{"name":"b","input_schema":' + b'{"not":' * (DEEPEST + 9) + b"{}" + b"}" * (DEEPEST + 9) + b"}]",
        b'[{"name":"b","input_schema":' + b'{"not":' * 9000 + b"{}" + b"}" * 9000 + b"}]",
        b'[{"name":"\\ud800","input_schema":{"b":{},"a":{}}}]',
    ],
)
def test_what_is_not_understood_stays(tools: bytes) -> None:
    raw = b'{"messages":[],"tools":' + tools + b"}"
    after, done = canonical("messages", raw, ALL)
    assert after is raw and done == ()


def test_tools_stay_in_order_where_two_have_one_name_or_one_is_marked() -> None:
    twice = [{"name": "b", "x": 1}, {"name": "a", "x": 2}, {"name": "b", "x": 3}]
    assert [each["x"] for each in _plain("chat", canonical("chat", body("chat", twice), ALL)[0])] == [1, 2, 3]
    marked = [{"name": "b"}, {"name": "a", "cache_control": {"type": "ephemeral"}}]
    raw = body("messages", [{**each, "parameters": {}} for each in marked])
    assert [each["name"] for each in _plain("messages", canonical("messages", raw, ALL)[0])] == ["b", "a"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no",
        b"[]",
        b"3",
        b"\xff",
        b'{"tools":[{}',
        b'{"tools":[{"name":"b"}],"tools":[{"b":1,"a":2}]}',
        b'{"tools":[{"name":"b"}],"\\u0074ools":[{"b":1,"a":2}]}',
        b'{ "tools":[{"name":"b"}] , "tools":[{"b":1,"a":2}]}',
    ],
)
def test_bad_bodies_and_members_that_are_there_twice_stay(raw: bytes) -> None:
    after, done = canonical("chat", raw, ALL)
    assert after is raw and done == ()


def test_unknown_steps_are_named() -> None:
    with pytest.raises(ValueError, match="no step 'sort'; the steps are json, tools, volatile"):
        canonical("chat", b"{}", frozenset({"sort"}))


LINE = f"{BILLING} cc_version=2.1; cch=a1b2c3;"


@pytest.mark.parametrize(
    ("kind", "told", "left"),
    [
        ("messages", {"system": f"{LINE}\nYou help."}, {"system": "You help."}),
        (
            "messages",
            {"system": [{"type": "text", "text": LINE}, {"type": "text", "text": "You help.", "cache_control": {}}]},
            {"system": [{"type": "text", "text": "You help.", "cache_control": {}}]},
        ),
        (
            "messages",
            {"system": [{"type": "text", "text": LINE, "cache_control": {}}, {"type": "text", "text": "x"}]},
            None,
        ),
        ("messages", {"system": [{"type": "text", "text": LINE}]}, None),
        ("messages", {"system": f"You know {LINE}"}, None),
        ("messages", {"system": [{"type": "text", "text": f"{LINE}\nmore"}, {"type": "text", "text": "x"}]}, None),
        (
            "chat",
            {"messages": [{"role": "system", "content": [{"type": "text", "text": f"{LINE}\nmore"}]}]},
            {"messages": [{"role": "system", "content": [{"type": "text", "text": "more"}]}]},
        ),
        ("responses", {"instructions": f"{LINE}\nYou help."}, {"instructions": "You help."}),
        (
            "chat",
            {"messages": [{"role": "system", "content": f"{LINE}\nYou help."}, {"role": "user", "content": LINE}]},
            {"messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": LINE}]},
        ),
        ("chat", {"messages": [{"role": "user", "content": f"{LINE}\nmine"}]}, None),
        ("completions", {"prompt": f"{LINE}\nx"}, None),
    ],
)
def test_the_billing_line_is_cut_from_the_head_of_the_system_prompt(kind: str, told: Any, left: Any) -> None:
    raw = json.dumps({"model": "m", **told}).encode()
    after, done = canonical(kind, raw, ALL)
    if left is None:
        assert after is raw and done == ()
    else:
        assert json.loads(after) == {"model": "m", **left} and done == ("volatile",)
        assert canonical(kind, after, ALL) == (after, ())
    assert canonical(kind, raw, frozenset({"json", "tools"}))[0] is raw
