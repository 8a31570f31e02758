"""Chat templates render what engines render, and templates and bodies that cannot be rendered harm nobody."""

from __future__ import annotations

import copy
import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.preparing import Unrendered
from gateway.templates import NAMES, REFUSED, Template
from tests.qwen import Files
from tests.qwen.session import body, messages

USER = {"role": "user", "content": "Hi"}


def rendered(source: str, *told: dict[str, Any], **fields: Any) -> str:
    return Template(source).render({"messages": list(told) or [USER], **fields})


def refused(source: str, *told: Any, **fields: Any) -> str:
    """The reason."""
    with pytest.raises(Unrendered) as caught:
        rendered(source, *told, **fields)
    return caught.value.reason


@pytest.fixture(scope="module")
def real(qwen: Files) -> Template:
    return Template.load(qwen.template, qwen.tokenizer)


# -- what templates are given ---------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_json_is_written_as_python_writes_it(value: Any) -> None:
    assert rendered("{{ value | tojson }}", chat_template_kwargs={"value": value}) == json.dumps(
        value, ensure_ascii=False
    )


def test_json_is_neither_escaped_for_html_nor_for_ascii() -> None:
    value = {"z": "<b>&'\"</b>", "a": ["你好", "é", "\u2028"]}
    assert rendered("{{ value | tojson }}", chat_template_kwargs={"value": value}) == (
        '{"z": "<b>&\'\\"</b>", "a": ["你好", "é", "\u2028"]}'
    )


@pytest.mark.parametrize(
    "options", [{"indent": 2}, {"sort_keys": True}, {"ensure_ascii": True}, {"separators": [",", ":"]}, {"indent": 4}]
)
def test_json_is_written_with_the_options_that_engines_allow(options: dict[str, Any]) -> None:
    value = {"b": ["ü", 1.5], "a": None}
    source = "{{ value | tojson(" + ", ".join(f"{name}={told!r}" for name, told in options.items()) + ") }}"
    expected = json.dumps(value, **{"ensure_ascii": False, **options})
    assert rendered(source, chat_template_kwargs={"value": value}) == expected


def test_the_time_can_be_asked_for() -> None:
    before = datetime.now()
    told = datetime.fromisoformat(rendered("{{ strftime_now('%Y-%m-%dT%H:%M:%S.%f') }}"))
    assert before <= told <= datetime.now()


def test_loops_can_be_left() -> None:
    leaving = "{% if x == 1 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}"
    assert rendered("{% for x in range(9) %}" + leaving + "{{ x }}{% endfor %}") == "023"


def test_what_a_model_said_may_be_marked() -> None:
    source = "a{% generation %}b{{ messages[0].content }}{% if true %}c{% endif %}{% endgeneration %}d"
    assert rendered(source) == "abHicd"
    nested = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert rendered(nested, USER, USER) == "HiHi"


def test_lines_of_blocks_leave_no_trace() -> None:
    assert rendered("  {% if true %}\n  x\n    {% endif %}\ny\n") == "  x\ny"


def test_there_is_something_to_generate() -> None:
    source = "{% if add_generation_prompt %}go on{% endif %}"
    assert rendered(source) == rendered(source, add_generation_prompt=True) == "go on"
    assert rendered(source, add_generation_prompt=None) == "go on"


def test_other_arguments_reach_the_template() -> None:
    assert rendered("{{ a }}{{ b.c }}", chat_template_kwargs={"a": "x", "b": {"c": [1]}}) == "x[1]"
    assert rendered("{{ a is defined }}", chat_template_kwargs=None) == "False"
    source = "{{ reasoning_effort }}"
    assert rendered(source, reasoning_effort="low") == "low"
    assert rendered(source, chat_template_kwargs={"reasoning_effort": "high"}) == "high"


def test_other_fields_do_not() -> None:
    source = "{{ temperature is defined }}{{ model is defined }}{{ user is defined }}"
    assert rendered(source, temperature=1, model="m", user="u") == "FalseFalseFalse"


def test_thinking_can_be_switched_off(real: Template) -> None:
    on, off = [real.render(body(1, chat_template_kwargs={"enable_thinking": told})) for told in (True, False)]
    assert on == real.render(body(1))
    assert off == on + "\n</think>\n\n"


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_engines_read_differently_are_not_guessed(name: str) -> None:
    assert refused("x", **{name: "{{ messages }}"}) == "parameter"
    assert rendered("x", **{name: None}) == "x"


@pytest.mark.parametrize("told", [None, [], {}, "x", 1, [None], ["x"], [[]], [USER, 3]])
def test_messages_must_be_a_list_of_objects(told: Any) -> None:
    with pytest.raises(Unrendered) as caught:
        Template("{% for m in messages %}x{% endfor %}").render({"messages": told})
    assert caught.value.reason == "messages"
    with pytest.raises(Unrendered, match="messages"):
        Template("x").render({})


# -- what engines make of messages ----------------------------------------------------------------------------------

READS_PART = "[{{ content.type }}:{{ content.text }}]"
READS_PARTS = "{% for m in messages %}{% for content in m.content %}" + READS_PART + "{% endfor %}{% endfor %}"
READS_TEXT = "{% for m in messages %}({{ m.content }}){% endfor %}"


def text(*parts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": part} for part in parts]}


def test_parts_of_text_are_joined_for_a_template_that_reads_text() -> None:
    assert rendered(READS_TEXT, text("a"), text("b", "c"), text()) == "(a)(b\nc)()"


def test_parts_of_text_are_left_to_a_template_that_reads_parts() -> None:
    assert rendered(READS_PARTS, text("a", "b"), text()) == "[text:a][text:b]"


def test_one_part_of_text_is_that_text(real: Template) -> None:
    as_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} if message["content"] else message
        for message in messages(4)
    ]
    assert real.render(body(4, messages=as_parts)) == real.render(body(4))


MEDIA = [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    {"type": "image"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "file:///x"}},
    {"type": "text"},
    {"type": "text", "text": None},
    {"type": "text", "text": 7},
    {"type": "refusal", "refusal": "no"},
    {},
    None,
    7,
    ["text"],
]


@pytest.mark.parametrize("part", MEDIA, ids=json.dumps)
def test_other_parts_cannot_be_told(part: Any) -> None:
    for source in (READS_TEXT, READS_PARTS):
        assert refused(source, {"role": "user", "content": [{"type": "text", "text": "look"}, part]}) == "media"


def test_no_content_is_an_empty_one(real: Template) -> None:
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": ""},
    ):
        assert rendered("[{{ messages[0].content }}]", message) == "[]"
    without = [{key: value for key, value in message.items() if value or key != "content"} for message in messages(3)]
    null = [{**message, "content": message.get("content")} for message in without]
    assert without != messages(3)
    assert real.render(body(3, messages=without)) == real.render(body(3, messages=null)) == real.render(body(3))


@pytest.mark.parametrize("asked", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("told", ["reasoning", "reasoning_content"])
def test_thinking_has_two_names(asked: str, told: str) -> None:
    source = "{{ messages[0]." + asked + " }}"
    assert rendered(source, {"role": "assistant", told: "hm"}) == "hm"
    assert rendered(source, {"role": "assistant", "reasoning": None, "reasoning_content": None, told: "hm"}) == "hm"


def test_no_thinking_is_none() -> None:
    for absent in ({}, {"reasoning": None}, {"reasoning_content": None}):
        assert rendered("{{ messages[0].reasoning_content is string }}", {"role": "assistant", **absent}) == "False"


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function, **more}]}


READS_CALL = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_arguments_are_the_same_as_text_and_as_objects(arguments: dict[str, Any]) -> None:
    expected = json.dumps(arguments, ensure_ascii=False)
    assert rendered(READS_CALL, call(arguments)) == expected
    for ascii, indent in itertools.product((False, True), (None, 2)):
        assert rendered(READS_CALL, call(json.dumps(arguments, ensure_ascii=ascii, indent=indent))) == expected


def test_the_real_template_reads_arguments_as_text_and_as_objects(real: Template) -> None:
    for request in (2, 3, 4):
        assert real.render(body(request)) == real.render(body(request, objects=True))
    assert real.render(body(2)) != real.render({**body(2), "messages": [*messages(1), call('{"query": "x"}')]})


def test_no_arguments_are_an_empty_object() -> None:
    assert rendered(READS_CALL, call("")) == rendered(READS_CALL, call("{}")) == "{}"


@pytest.mark.parametrize("arguments", ["{", "x", "{'a': 1}", '{"a": }', "{} {}", " "])
def test_arguments_that_are_no_json_are_none_as_engines_read_them(arguments: str) -> None:
    assert rendered(READS_CALL, call(arguments)) == "{}"


@pytest.mark.parametrize("depth", [1000, 100_000])
def test_arguments_may_not_be_endlessly_deep(depth: int) -> None:
    assert rendered(READS_CALL, call(depth * "[" + depth * "]")) == "{}"


@pytest.mark.parametrize("calls", [None, "x", 7, {}])
def test_tool_calls_that_are_no_list_are_none(calls: Any) -> None:
    assert rendered("{{ messages[0].tool_calls is defined }}", {"role": "assistant", "tool_calls": calls}) == "False"


@pytest.mark.parametrize("odd", [None, 7, "x", [], {}, {"function": None}, {"function": []}, {"function": {}}])
def test_an_odd_tool_call_is_the_templates_affair(odd: Any) -> None:
    assert rendered("{{ messages[0].role }}", {"role": "assistant", "tool_calls": [odd]}) == "assistant"


TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does <it>",
        "parameters": {"type": "object", "required": ["b"], "properties": {"b": {}, "a": {}}},
        "strict": True,
    },
}


def test_tools_are_listed_in_the_order_that_engines_give_them() -> None:
    expected = json.dumps(TOOL)
    outer = [dict(order) for order in itertools.permutations(TOOL.items())]
    inner = [dict(order) for order in itertools.permutations(TOOL["function"].items())]  # type: ignore[attr-defined]
    for tool, function in itertools.product(outer, inner):
        told = {name: function if name == "function" else value for name, value in tool.items()}
        assert rendered("{{ tools[0] | tojson }}", tools=[told]) == expected


def test_the_order_of_tools_and_of_their_parameters_is_the_clients() -> None:
    other = {"type": "function", "function": {"name": "g", "description": "", "parameters": {"z": 1, "a": 2}}}
    source = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    assert rendered(source, tools=[other, TOOL]) == f"{json.dumps(other)}\n{json.dumps(TOOL)}\n"
    assert rendered(source, tools=[TOOL, other]) == f"{json.dumps(TOOL)}\n{json.dumps(other)}\n"


@pytest.mark.parametrize("tools", [None, [], "x", {}, 7])
def test_no_tools_are_none(tools: Any) -> None:
    assert rendered("{{ tools is none }}{% if tools %}x{% endif %}", tools=tools) == "True"


@pytest.mark.parametrize("tool", [None, "x", {}, {"function": None}, {"type": "web_search"}, []])
def test_tools_that_are_no_functions_cannot_be_told(tool: Any) -> None:
    assert refused("x", tools=[TOOL, tool]) == "tools"


def test_the_body_stays_as_it_was(real: Template) -> None:
    told = body(4)
    told["messages"].append({"role": "user", "content": [{"type": "text", "text": "x"}], "reasoning": "y"})
    told["chat_template_kwargs"] = {"enable_thinking": False}
    before = copy.deepcopy(told)
    real.render(told)
    assert told == before


# -- somebody else's program ----------------------------------------------------------------------------------------


def test_a_template_may_refuse() -> None:
    with pytest.raises(Unrendered, match="no system prompts here") as caught:
        rendered("{{ raise_exception('no system prompts here') }}")
    assert caught.value.reason == "template"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[9].content }}",
        "{{ nothing() }}",
        "{{ 'x' + 1 }}",
        "{{ nothing | tojson }}",
        "{{ range(10**9) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends messages[0].content %}",
    ],
)
def test_a_template_that_fails_is_no_defect_of_ours(source: str) -> None:
    assert refused(source) == "template"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '' | attr('__class__') | attr('__mro__') }}",
    "{{ ['__class__'] | map('upper') | list }}{{ messages | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "{{ ('{0.__class__.__mro__}' | safe).format('') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ raise_exception.__globals__['Path']('/etc/passwd').read_text() }}",
    "{{ raise_exception.__code__.co_filename }}",
    "{{ strftime_now.__closure__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.__mro__ }}",
    "{{ (messages | map('tojson')).gi_frame.f_globals }}",
    "{% for x in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func.__globals__ }}",
    "{{ __import__('os') }}",
    "{{ config }}{{ request.environ }}{{ environment.loader }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_does_not_get_out(source: str) -> None:
    reason, told = "template", ""
    try:
        told = rendered(source)
    except Unrendered as error:
        reason = error.reason
    # What it may not have is an error, or nothing.
    assert (reason, told) in (("template", ""), ("template", "['__CLASS__']"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ messages[0].pop('content') }}",
        "{{ tools[0].function.parameters.clear() }}",
        "{{ given.sort() }}",
    ],
)
def test_a_template_changes_nothing(source: str) -> None:
    told = {"messages": [dict(USER)], "tools": [copy.deepcopy(TOOL)], "chat_template_kwargs": {"given": [2, 1]}}
    before = copy.deepcopy(told)
    with pytest.raises(Unrendered) as caught:
        Template(source).render(told)
    assert caught.value.reason == "template"
    assert told == before


def test_nothing_is_left_for_the_next_request() -> None:
    template = Template(
        "{{ seen }}{% set seen = messages[0].content %}{% set ns = namespace(x=1) %}{{ seen }}{{ extra }}"
    )
    assert template.render({"messages": [USER], "chat_template_kwargs": {"extra": "!"}}) == "Hi!"
    assert template.render({"messages": [{**USER, "content": "Ho"}]}) == "Ho"


# -- where templates come from --------------------------------------------------------------------------------------

SHOWS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}"
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
"""As the files have them: names, descriptions, nothing."""
SHOWN = "<s>|</s>||"


def write(folder: Path, name: str, told: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")
    return str(path)


def loaded(path: str, tokenizer: str | None = None) -> str:
    return Template.load(path, tokenizer).render({"messages": [USER]})


def test_special_tokens_are_known_by_name() -> None:
    names = dict(zip(NAMES, "abcd", strict=True))
    assert Template("".join("{{ " + name + " }}" for name in NAMES), names).render({"messages": [USER]}) == "abcd"


def test_a_template_of_its_own_and_the_names_beside_it(tmp_path: Path) -> None:
    path = write(tmp_path, "chat.jinja", SHOWS)
    assert loaded(path) == "|||"
    write(tmp_path, "tokenizer_config.json", TOKENS)
    assert loaded(path) == SHOWN


def test_a_template_elsewhere_has_the_names_beside_the_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "chat.jinja", SHOWS)
    tokenizer = write(tmp_path / "b", "tokenizer.json", "{}")
    assert loaded(path, tokenizer) == "|||"
    write(tmp_path / "b", "tokenizer_config.json", TOKENS)
    assert loaded(path, tokenizer) == SHOWN
    # What lies beside the template is nearer.
    write(tmp_path / "a", "tokenizer_config.json", {"bos_token": "near"})
    assert loaded(path, tokenizer) == "near|||"


def test_a_template_inside_the_tokenizers_configuration(tmp_path: Path) -> None:
    assert loaded(write(tmp_path, "tokenizer_config.json", {**TOKENS, "chat_template": SHOWS})) == SHOWN
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": SHOWS}]
    assert loaded(write(tmp_path, "tokenizer_config.json", {**TOKENS, "chat_template": several})) == SHOWN


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chat.jinja", "{% if %}"),
        ("chat.jinja", "{% for x in y %}"),
        ("chat.jinja", "{{ x | unknown_filter }}"),
        ("chat.jinja", "{% generation %}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", {}),
        ("tokenizer_config.json", {"chat_template": None}),
        ("tokenizer_config.json", {"chat_template": 7}),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]}),
        ("tokenizer_config.json", {"chat_template": ["default"]}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
    ],
)
def test_a_file_without_a_template_is_named(tmp_path: Path, name: str, told: Any) -> None:
    path = write(tmp_path, name, told)
    with pytest.raises(ValueError, match=f"{name} is no chat template"):
        Template.load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.jinja"):
        with pytest.raises(ValueError, match="is no chat template"):
            Template.load(str(path))
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ValueError, match="latin"):
        Template.load(str(tmp_path / "latin.jinja"))
