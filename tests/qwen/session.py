"""A session of four requests to an agent with three tools, the session behind the figures in `tests.qwen.test_session`.

A question, two calls of tools, an answer, and a further question. That one begins a new round: the template leaves out what
the model thought in the round before, so what the engine holds is of no use behind the first call.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.templates import Template

MODEL = "qwen3.5"
REQUESTS = (1, 2, 3, 4)


def _tool(name: str, description: str, argument: str, about: dict[str, str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string", **about}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    _tool("web_search", "搜索网页，返回前几条结果的标题和摘要", "query", {"description": "搜索词"}),
    _tool("run_python", "在沙箱里执行一段 Python 代码，返回标准输出", "code", {"description": "要执行的代码"}),
    _tool("read_file", "读取工作区里的一个文件", "path", {}),
]
SYSTEM = 3 * "你是一个能调用工具的助手。先想清楚再行动，需要时调用工具，拿到结果后继续推理，直到能回答用户。"


def _calls(id_: str, name: str, **arguments: str) -> list[dict[str, Any]]:
    return [{"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}]


ASKED: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "北京今天最高气温是多少摄氏度？换算成华氏度是多少？"},
    {
        "role": "tool",
        "tool_call_id": "call-1",
        "content": 6 * "1. 北京今日天气：晴转多云，气温 12～23°C，北风 3 级，空气质量良。\n",
    },
    {"role": "tool", "tool_call_id": "call-2", "content": "73.4"},
    {"role": "user", "content": "那明天呢？"},
)
"""What each request adds, and ..."""
ANSWERED: tuple[dict[str, Any], ...] = (
    {
        "role": "assistant",
        "reasoning_content": 2 * "用户要北京今天的最高气温，并换算成华氏度。我需要先搜索今天的天气。",
        "content": "",
        "tool_calls": _calls("call-1", "web_search", query="北京 今天 天气 最高气温"),
    },
    {
        "role": "assistant",
        "reasoning_content": 2 * "搜索结果显示最高气温 23°C。华氏度 = 摄氏度 × 9/5 + 32，用代码算一下更稳妥。",
        "content": "",
        "tool_calls": _calls("call-2", "run_python", code="print(23 * 9 / 5 + 32)"),
    },
    {
        "role": "assistant",
        "reasoning_content": "23°C 换算成华氏度是 73.4°F，可以回答了。",
        "content": "北京今天最高气温约 23°C，换算成华氏度是 73.4°F。",
    },
)
"""... what the model says to it. To the last one the session does not tell."""

BEGINNING = "<|im_start|>assistant\n<think>\n"
"""Where the model is to go on: the end of every prompt."""

STRANGERS = ("北京今天会下雨吗？", "帮我算一下 2 的 30 次方。")
"""First questions of two other sessions of the same agent."""
SECONDS = (1, 7)
"""Within one minute, when those began."""


def messages(request: int, objects: bool = False) -> list[dict[str, Any]]:
    """What request 1, 2, 3 or 4 sends. ``objects``: arguments of tool calls as objects, not as the text of one."""
    found: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    for at in range(request):
        if at:
            found.append(answer(at, objects))
        found.append(ASKED[at])
    return found


def answer(request: int, objects: bool = False) -> dict[str, Any]:
    """What the model says to request 1, 2 or 3, as clients send it back."""
    told = ANSWERED[request - 1]
    if objects or "tool_calls" not in told:
        return told
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in told["tool_calls"]
    ]
    return {**told, "tool_calls": calls}


def body(request: int, objects: bool = False, **fields: Any) -> dict[str, Any]:
    """A chat completion's body, with whatever other ``fields``."""
    return chat(messages(request, objects), **fields)


def chat(told: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A chat completion's body with those messages and the agent's tools."""
    return {"model": MODEL, "messages": told, "tools": TOOLS, **fields}


def generated(template: Template, request: int) -> str:
    """What is generated for request 1, 2 or 3: thinking, then a call or an answer, to the line's end behind it.

    Engines stop a token earlier, at the mark in front of the line's end.
    """
    prompt = template.render(body(request))
    whole = template.render(chat([*messages(request), answer(request)])).removesuffix(BEGINNING)
    if not (whole.startswith(prompt) and prompt.endswith(BEGINNING)):
        raise ValueError("the template shows the last answer otherwise than it was generated")
    return whole[len(prompt) :]


def strangers(clock: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """First requests of two sessions that have nothing but the agent in common. ``clock``: their system prompts have the
    time of day at the ``"start"`` or the ``"end"``."""
    found = []
    for question, second in zip(STRANGERS, SECONDS, strict=True):
        time = f"当前时间：2026-10-20 09:00:{second:02}。"
        system = {None: SYSTEM, "start": time + SYSTEM, "end": SYSTEM + time}[clock]
        found.append(chat([{"role": "system", "content": system}, {"role": "user", "content": question}]))
    return found[0], found[1]
