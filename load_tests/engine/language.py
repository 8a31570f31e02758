"""What an engine reads and writes: tokenizer and chat template, its own small ones or a real model's from files.

``tokenizers`` and ``jinja2`` are imported when a file is given, so that engines without need neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from load_tests.engine import template, tokens as toy
from load_tests.engine.template import JSON, TemplateError

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "</s>", "<|endoftext|>")
THINK, THOUGHT = "<think>", "</think>"


class Language:
    """The engine's own tokenizer and template."""

    # Whether tool calls are written as XML parameters rather than as JSON.
    xml_calls = False
    end = toy.IM_END

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids; ``special`` adds what a tokenizer puts around a text that no template has rendered."""
        return toy.tokenize(text)

    def pieces(self, text: str) -> list[tuple[int, str]]:
        """(id, what it adds to the text) of every token; the texts joined are ``text``."""
        return [(toy.tokenize(piece)[0], piece) for piece in toy.pieces_of(text)]

    def decode(self, tokens: Iterable[int]) -> str:
        return toy.detokenize(tokens)

    def render(
        self, messages: Sequence[JSON], tools: Sequence[JSON], generate: bool, variables: Mapping[str, Any]
    ) -> str:
        """The prompt's text; TemplateError for what the template does not accept."""
        return template.render(messages, tools, generate=generate)

    def call_text(self, name: str, arguments: str) -> str:
        """A tool call as the model writes it."""
        if not self.xml_calls:
            return template.tool_call_text(name, arguments)
        lines = ["<tool_call>", f"<function={name}>"]
        for key, value in json.loads(arguments or "{}").items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"<parameter={key}>", shown, "</parameter>"]
        return "\n".join([*lines, "</function>", "</tool_call>"])

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether what follows ``prompt`` begins inside a thinking block."""
        return self.decode(prompt[-8:]).rstrip().endswith(THINK)


class RealTokens(Language):
    """A Hugging Face ``tokenizer.json``; the template is still the engine's own."""

    def __init__(self, path: str) -> None:
        self._tokenizer = _tokenizer(path)
        vocabulary = (self._tokenizer.token_to_id(token) for token in END_TOKENS)
        self.end = next((token for token in vocabulary if token is not None), 0)

    def encode(self, text: str, special: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def pieces(self, text: str) -> list[tuple[int, str]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        found: list[tuple[int, str]] = []
        shown = 0
        # A character that is several tokens is shown by the last of them, as no part of it can be.
        offsets = [end for _, end in encoding.offsets]
        for place, (token, end) in enumerate(zip(encoding.ids, offsets, strict=True)):
            if place + 1 == len(offsets):
                end = len(text)
            elif offsets[place + 1] <= end:
                end = shown
            found.append((token, text[shown:end]))
            shown = max(shown, end)
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


class Templated(Language):
    """A jinja2 chat template over another language's tokens, rendered as vLLM renders it."""

    def __init__(self, path: str, below: Language) -> None:
        source = Path(path).read_text()
        self._template = _environment().from_string(source)
        self._below = below
        # Templates that know parts of contents look at their type; the others are given text.
        self._parts = "content is string" in source or ".type ==" in source
        self.xml_calls = "<function=" in source
        self.end = below.end

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._below.encode(text, special)

    def pieces(self, text: str) -> list[tuple[int, str]]:
        return self._below.pieces(text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._below.decode(tokens)

    def call_text(self, name: str, arguments: str) -> str:
        if self.xml_calls:
            return super().call_text(name, arguments)
        call = {"name": name, "arguments": json.loads(arguments or "{}")}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"

    def render(
        self, messages: Sequence[JSON], tools: Sequence[JSON], generate: bool, variables: Mapping[str, Any]
    ) -> str:
        given = [self._message(message) for message in messages]
        try:
            text: str = self._template.render(
                {**variables, "messages": given, "tools": list(tools) or None, "add_generation_prompt": generate}
            )
            return text
        # Whatever a template raises over what it was given is an answer of 400, as on a real engine.
        except Exception as error:
            raise TemplateError(str(error)) from None

    def _message(self, message: JSON) -> JSON:
        """A message as vLLM hands it to a template."""
        seen = dict(message)
        content = seen.get("content")
        if content is None:
            seen["content"] = ""
        elif isinstance(content, list) and not self._parts:
            texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in content]
            seen["content"] = "\n".join(texts)
        reasoning = seen.get("reasoning") or seen.get("reasoning_content")
        if reasoning:
            seen["reasoning"] = seen["reasoning_content"] = reasoning
        else:
            seen.pop("reasoning", None)
            seen.pop("reasoning_content", None)
        if isinstance(calls := seen.get("tool_calls"), list) and calls:
            seen["tool_calls"] = [_parsed_call(call) for call in calls]
        else:
            seen.pop("tool_calls", None)
        return seen


def _parsed_call(call: Any) -> Any:
    """Arguments are an object to a template, not JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise TemplateError("a tool call needs a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise TemplateError(f"the arguments of a tool call are no JSON: {error}") from None
    return {**call, "function": {**function, "arguments": arguments or {}}}


@lru_cache(maxsize=4)
def _tokenizer(path: str) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _environment() -> Any:
    from datetime import datetime

    from jinja2 import TemplateError as JinjaError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise JinjaError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def load_language(tokenizer: str, chat_template: str) -> Language:
    """The language that two files make; "" takes the engine's own. OSError or ValueError for a file that is none."""
    language = RealTokens(tokenizer) if tokenizer else Language()
    return Templated(chat_template, language) if chat_template else language
