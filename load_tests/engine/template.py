"""Chat messages to text, in the manner of ChatML templates: appending a message only extends the text.

    <|im_start|>system\n{tools}{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n

Tools are rendered before everything else, each as compact JSON with its keys in the order received. An assistant's
tool calls are rendered as the engine generates them, arguments verbatim, so that the generated tokens are found again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from load_tests.engine.tokens import tokenize

JSON = dict[str, Any]

TOOLS_HEAD = "# Tools\n\nYou may call these functions:\n<tools>\n"
TOOLS_TAIL = "\n</tools>\n\n"


class TemplateError(ValueError):
    """The messages cannot be rendered; the message says why."""


def compact(value: object) -> str:
    """JSON without spaces, keys in the order given."""
    return msgspec.json.encode(value).decode()


def tool_call_text(name: str, arguments: str) -> str:
    """A call as generated and as rendered back; ``arguments`` is JSON text, taken verbatim."""
    return f'<tool_call>\n{{"name":{compact(name)},"arguments":{arguments}}}\n</tool_call>'


def content_text(content: object) -> str:
    """Text of a message's content: a string, null, or parts. A part that is not text counts by its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("message content must be a string, null or a list of parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts.append(f"<|part|>{compact(part)}<|/part|>")
    return "".join(texts)


def message_text(message: JSON) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateError("every message needs a role")
    body = content_text(message.get("content"))
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TemplateError("tool_calls must be a list")
    if calls:
        rendered = [_call_text(call) for call in calls]
        body = "\n".join([body, *rendered] if body else rendered)
    if role == "tool":
        return f"<|im_start|>user\n<tool_response>\n{body}\n</tool_response><|im_end|>\n"
    return f"<|im_start|>{role}\n{body}<|im_end|>\n"


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TemplateError("a tool call needs a function with a name")
    arguments = function.get("arguments", "{}")
    return tool_call_text(function["name"], arguments if isinstance(arguments, str) else compact(arguments))


def render(messages: Sequence[JSON], tools: Sequence[JSON] = (), *, generate: bool = True) -> str:
    """The prompt's text. Raises TemplateError for what no template accepts."""
    if not messages:
        raise TemplateError("messages must not be empty")
    parts: list[str] = []
    rest = list(messages)
    if tools:
        system = ""
        if rest[0].get("role") in ("system", "developer"):
            system = content_text(rest.pop(0).get("content"))
        listing = "\n".join(map(compact, tools))
        parts.append(f"<|im_start|>system\n{TOOLS_HEAD}{listing}{TOOLS_TAIL}{system}<|im_end|>\n")
    parts.extend(map(message_text, rest))
    if generate:
        parts.append("<|im_start|>assistant\n")
    return "".join(parts)


def render_tokens(messages: Sequence[JSON], tools: Sequence[JSON] = (), *, generate: bool = True) -> list[int]:
    return tokenize(render(messages, tools, generate=generate))
