"""Chats as clients send them, well-formed and odd."""

from __future__ import annotations

from typing import Any

from tests.real_engines.vllm.talk import TOOLS


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def answered(*calls: dict[str, Any], content: Any = None) -> list[dict[str, Any]]:
    """A chat in which tools were called."""
    return [
        {"role": "user", "content": "read the file"},
        {"role": "assistant", "content": content, "tool_calls": list(calls)},
        {"role": "tool", "tool_call_id": "call-1", "content": "it is empty"},
    ]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "find", **fields}}


SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "description": "a < b & 'c' \u00e9"}}}
USER = {"role": "user", "content": "read the file"}
CHATS: dict[str, dict[str, Any]] = {
    "one message": {"messages": [USER]},
    "system": {"messages": [{"role": "system", "content": "be of use"}, USER]},
    "system late": {"messages": [USER, {"role": "system", "content": "be of use"}, USER]},
    "turns": {"messages": [USER, {"role": "assistant", "content": "the file  is\n\nempty "}, USER]},
    "spaces": {"messages": [{"role": "user", "content": "  two  spaces\t\n\n\n and\r\nlines \n"}]},
    "unicode": {
        "messages": [{"role": "user", "content": "na\u00efve \u4f60\u597d \U0001f600 e\u0301 \u00a0\u200b\u202e"}]
    },
    "control": {"messages": [{"role": "user", "content": "a\u0000b\u001f\u007f\ufeff"}]},
    "special tokens": {
        "messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n<tool_call>a</tools>"}]
    },
    "empty": {"messages": [{"role": "user", "content": ""}]},
    "parts": {
        "messages": [{"role": "system", "content": parts("be", "of use")}, {"role": "user", "content": parts("a")}]
    },
    "no parts": {"messages": [{"role": "user", "content": []}, USER]},
    "null content": {"messages": answered(call("read", "{}"))},
    "no content": {"messages": [USER, {"role": "assistant", "tool_calls": [call("read", "{}")]}, USER]},
    "empty content beside a call": {"messages": answered(call("read", "{}"), content="")},
    "parts beside a call": {"messages": answered(call("read", "{}"), content=parts("I", "read"))},
    "tool parts": {
        "messages": [
            *answered(call("read", "{}"))[:2],
            {"role": "tool", "content": parts("a", "b"), "tool_call_id": "x"},
        ]
    },
    "name": {"messages": [{"role": "user", "content": "read", "name": "me"}]},
    "unknown fields": {
        "messages": [
            {**USER, "cache_control": {"type": "ephemeral"}},
            {"role": "assistant", "content": "a", "refusal": None},
            USER,
        ]
    },
    "null calls": {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": None}, USER]},
    "arguments": {
        "messages": answered(call("read", '{"path": "a b", "line": 3, "deep": {"x": [1, 2.50, null, true]}}'))
    },
    "arguments, compact": {"messages": answered(call("read", '{"b":1,"a":"\\u00e9\\u4f60"}'))},
    "arguments, spaced": {"messages": answered(call("read", ' { "b" :\n1 } '))},
    "arguments, empty": {"messages": answered(call("read", ""))},
    "arguments, numbers": {
        "messages": answered(call("read", '{"a": 1e5, "b": -0.0, "c": 12345678901234567890123, "d": 1E-7, "e": 1.10}'))
    },
    "arguments, twice": {"messages": answered(call("read", '{"a": 1, "a": 2}'))},
    "call, other order": {
        "messages": answered({"function": {"arguments": '{"a": 1}', "name": "read"}, "type": "function", "id": "z"})
    },
    "call, more fields": {"messages": answered(call("read", "{}", index=0))},
    "two calls": {"messages": answered(call("read", '{"path": "a"}'), call("write", '{"path": "b"}'), content="both")},
    "tools": {"messages": [USER], "tools": TOOLS},
    "tools and system": {"messages": [{"role": "system", "content": "be of use"}, USER], "tools": TOOLS[:1]},
    "tool, odd schema": {"messages": [USER], "tools": [tool(description='d "q" <b>', parameters=SCHEMA)]},
    "tool, other order": {
        "messages": [USER],
        "tools": [{"function": {"parameters": SCHEMA, "description": "d", "name": "find"}, "type": "function"}],
    },
    "tool, strict": {"messages": [USER], "tools": [tool(strict=True, parameters=SCHEMA, description="d")]},
    "tool, not strict": {"messages": [USER], "tools": [tool(description="d", parameters=SCHEMA, strict=False)]},
    "tool choice": {"messages": [USER], "tools": TOOLS, "tool_choice": "auto"},
    "tool choice none": {"messages": [USER], "tools": TOOLS, "tool_choice": "none"},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "a", "reasoning": "I think"}, USER]},
    "reasoning content": {
        "messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "I think"}, USER]
    },
    "no calls": {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER]},
    "tool, name alone": {"messages": [USER], "tools": [tool()]},
    "tool, no parameters": {"messages": [USER], "tools": [tool(description="d")]},
    "tool, no description": {"messages": [USER], "tools": [tool(parameters=SCHEMA)]},
    "tool, null fields": {"messages": [USER], "tools": [tool(description=None, parameters=None, strict=None)]},
    "tool, unknown fields": {
        "messages": [USER],
        "tools": [{**tool(description="d", parameters=SCHEMA, extra=1), "more": 2}],
    },
}

TEMPLATES = {
    "reads parts": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for content in message.content %}{{- content.text }}{%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- ' calls ' + call.function.name + (call.function.arguments | tojson(indent=2)) }}
    {%- endfor %}
    {%- if message.reasoning_content %}{{- ' thinks ' + message.reasoning_content }}{%- endif %}
    {%- if message.name %}{{- ' named ' + message.name }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if tools is not none %}{{- tools | tojson(indent=2) }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip(),
    "names": """
{{- bos_token }}{{- pad_token }}
{%- for message in messages if message['role'] != 'tool' %}
    {%- if loop.last and message['role'] == 'assistant' %}{% break %}{%- endif %}
    {%- if message['tool_call_id'] is defined %}{{- 'answers' }}{%- endif %}
    {{- message['role'] + ': ' + message['content'] | trim + eos_token }}
{%- endfor %}
""".strip(),
    "reads calls": """
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if 'tool_calls' in message %}{{- 'calls' }}{%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
""".strip(),
    "reads parts by another name": """
{%- for message in messages %}
    {{- message.role + ': ' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endfor %}
""".strip(),
}
"""Templates that differ from the model's own in what they read and in what they are given."""
