"""Where prompts must be as vLLM 0.32 renders them: each expectation was compared with its own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast, models, pre_tokenizers, processors

from gateway.preparing import Unrendered
from gateway.templates import Template
from gateway.tokens import Tokenizer

USER = {"role": "user", "content": "Hi"}


def rendered(source: str, *told: dict[str, Any], **fields: Any) -> str:
    return Template(source).render({"messages": list(told) or [USER], **fields})


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ({"name": "f"}, {"name": "f", "description": None, "parameters": None}),
        ({"name": "f", "parameters": {}}, {"name": "f", "description": None, "parameters": {}}),
        ({"strict": None, "name": "f"}, {"name": "f", "description": None, "parameters": None}),
        ({"strict": False, "name": "f"}, {"name": "f", "description": None, "parameters": None, "strict": False}),
        ({"name": "f", "other": 1}, {"name": "f", "description": None, "parameters": None}),
    ],
)
def test_tools_have_all_their_fields_and_no_others(function: dict[str, Any], expected: dict[str, Any]) -> None:
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    assert rendered("{{ tools[0] | tojson }}", tools=[tool]) == json.dumps({"type": "function", "function": expected})


@pytest.mark.parametrize(("effort", "thinking"), [("none", "False"), ("low", "True"), (None, "")])
def test_effort_switches_thinking(effort: str | None, thinking: str) -> None:
    assert rendered("{{ enable_thinking }}", reasoning_effort=effort) == thinking
    own = {"enable_thinking": "own"}
    assert rendered("{{ enable_thinking }}", reasoning_effort=effort, chat_template_kwargs=own) == "own"


def test_a_requests_own_fields_count_more_than_arguments() -> None:
    more = {"reasoning_effort": "high", "add_generation_prompt": False}
    source = "{{ reasoning_effort }} {{ add_generation_prompt }}"
    assert rendered(source, reasoning_effort="low", chat_template_kwargs=more) == "low True"
    for name in ("messages", "tools", "chat_template"):
        with pytest.raises(Unrendered, match="own"):
            rendered("x", chat_template_kwargs={name: "x"})


LOOPS = [
    "{% for m in messages %}{% for content in m.content %}[{{ content.text }}]{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for block in m['content'] %}[{{ block.text }}]{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for x in content %}[{{ x.text }}]{% endfor %}{% endfor %}",
    "{% macro show(all) %}{% for x in all %}[{{ x.text }}]{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
]


@pytest.mark.parametrize("source", LOOPS)
def test_a_template_that_reads_parts_is_given_parts(source: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(source, USER, {"role": "user", "content": parts}) == "[Hi][a][b]"


def test_a_template_that_only_mentions_a_loop_is_given_text() -> None:
    source = "{# {% for content in x %} #}{% for m in messages %}({{ m.content }}){% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(source, {"role": "user", "content": parts}) == "(a\nb)"


def test_what_a_tool_says_is_one_text() -> None:
    source = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for x in m.content %}{{ x.text }}"
    source += "{% endfor %}{% endif %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert rendered(source, {"role": "tool", "content": parts}) == "a\nb"


def test_other_fields_of_a_part_stay() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    source = "{% for m in messages %}{% for x in m.content %}{{ x | tojson }}{% endfor %}{% endfor %}"
    assert rendered(source, {"role": "user", "content": [part]}) == json.dumps(part)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}, "text": "x"}, {"text": "x"}])
def test_only_a_part_of_text_is_text(part: dict[str, Any]) -> None:
    with pytest.raises(Unrendered) as caught:
        rendered("x", {"role": "user", "content": [part]})
    assert caught.value.reason == "media"


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ["[1]", "null", "7", '"x"'])
def test_arguments_that_are_no_object_are_none(arguments: str) -> None:
    assert rendered("{{ messages[0].tool_calls[0].function.arguments | tojson }}", call(arguments)) == "{}"


def test_thinking_that_is_empty_is_thinking() -> None:
    message = {"role": "assistant", "content": "x", "reasoning": ""}
    assert rendered("{{ messages[0].reasoning_content is string }}", message) == "True"


def test_no_calls_of_tools_are_none() -> None:
    assert rendered("{{ messages[0].tool_calls is defined }}", {"role": "assistant", "tool_calls": []}) == "False"


def test_only_the_assistant_thinks() -> None:
    assert rendered("{{ messages[0].reasoning is defined }}", {**USER, "reasoning": "x"}) == "False"


def test_what_is_set_in_what_a_model_said_is_not_set_behind_it() -> None:
    source = "{% set x = 'a' %}{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}{{ x }}"
    assert rendered(source) == "ba"


def test_documents_are_none() -> None:
    assert rendered("{{ documents is none }}") == "True"


@pytest.mark.parametrize("field", [{"truncate_prompt_tokens": 5}, {"add_special_tokens": True}])
def test_what_cuts_or_extends_a_prompt_is_not_guessed(field: dict[str, Any]) -> None:
    with pytest.raises(Unrendered) as caught:
        rendered("x", **field)
    assert caught.value.reason == "parameter"


def test_what_a_field_says_anyway_is_no_reason() -> None:
    usual = {"continue_final_message": False, "echo": False, "add_special_tokens": False, "add_generation_prompt": True}
    assert rendered("x", **usual) == "x"


@pytest.mark.parametrize("text", ["[]", '"x"', "7"])
def test_a_configuration_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "chat.jinja").write_text("x")
    for name in ("tokenizer_config.json", "chat.jinja"):
        with pytest.raises(ValueError, match="is no chat template"):
            Template.load(str(tmp_path / name))


def small(tmp_path: Path, tokenizer: Fast, begin: str) -> Tokenizer:
    tokenizer.add_special_tokens([begin])
    ends = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(str(tmp_path / "tokenizer.json"))


def listed(found: bytes) -> list[int]:
    return memoryview(found).cast("I").tolist()


@pytest.mark.parametrize("words", [{"a": 0, "<s>": 1, "b": 2}, {"你": 0, "b": 1}])
def test_what_stands_around_a_text_is_told_to_the_token(tmp_path: Path, words: dict[str, int]) -> None:
    tokenizer = Fast(models.BPE(words, []))
    ours = small(tmp_path, tokenizer, "<s>")
    assert listed(ours.ids("b", special=True)) == tokenizer.encode("b").ids


def test_a_mark_in_front_that_melts_into_the_unknown_is_found_out(tmp_path: Path) -> None:
    tokenizer = Fast(models.BPE({"<unk>": 0, "你": 1, "好": 2}, [], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ours = small(tmp_path, tokenizer, "<s>")
    assert listed(ours.ids("<s>你好")) == tokenizer.encode("<s>你好", add_special_tokens=False).ids
