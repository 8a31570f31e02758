"""Prompts as token ids, in the engine's language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from load_tests.engine.errors import ApiError
from load_tests.engine.language import Language
from load_tests.engine.options import EngineOptions
from load_tests.engine.template import JSON, TemplateError
from load_tests.engine.tokens import is_tokens


def chat_prompt(
    options: EngineOptions,
    language: Language,
    messages: Sequence[JSON],
    tools: Sequence[JSON] = (),
    *,
    body: Mapping[str, Any] | None = None,
    generate: bool = True,
    param: str | None = "messages",
) -> list[int]:
    """Messages rendered and tokenized; 400 for what the template does not accept."""
    body = body or {}
    variables = body.get("chat_template_kwargs")
    variables = dict(variables) if isinstance(variables, dict) else {}
    if isinstance(effort := body.get("reasoning_effort"), str):
        variables = {"enable_thinking": effort != "none", "reasoning_effort": effort, **variables}
    given = [_tool(options.dialect, tool) for tool in tools] if options.template else tools
    try:
        return language.encode(language.render(messages, given, generate, variables))
    except TemplateError as error:
        raise ApiError(400, str(error), param=param) from None


def _tool(dialect: str, tool: JSON) -> JSON:
    """A tool as the engine's own model of it prints it: fields in its order, what is absent as null."""
    function = tool["function"]
    known = {key: function.get(key) for key in ("name", "description", "parameters")}
    seen: JSON = {"type": "function", "function": {**known, **function}}
    if dialect == "sglang":
        seen["defer_loading"] = None
    return seen


def prompts_of(language: Language, body: JSON, key: str = "prompt") -> list[list[int]]:
    """A string, strings, token ids, or lists of token ids, as lists of token ids."""
    value = body.get(key)
    if isinstance(value, str) and value:
        return [language.encode(value, special=True)]
    if is_tokens(value):
        return [list(value or ())]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) and item for item in value):
            return [language.encode(item, special=True) for item in value]
        if all(is_tokens(item) for item in value):
            return [list(item) for item in value]
    raise ApiError(400, f"{key} must be a string, a list of strings, token ids or lists of token ids", param=key)
