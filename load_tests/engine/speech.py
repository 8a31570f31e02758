"""The reply to a prompt: scripted by the request, or of the engine's own making; and what a client sees of each token.

A request may force its reply with ``"sim": {"reply": {...}}``: either ``text``, exactly what is generated, or
``reasoning``, ``content`` and ``tool_calls`` ([{"name", "arguments"}]), from which the text is made. The end token
follows unless ``"end": false``. What is generated is the tokens of that text, however it is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from load_tests.engine.errors import ApiError
from load_tests.engine.language import THINK, THOUGHT, Language
from load_tests.engine.replies import NOTHING, Part, Reply, TextKind, ToolCall, Wanted, compose
from load_tests.engine.template import JSON

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>]+)>")
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Script(NamedTuple):
    """What a request forces: the text to generate, and whether the end token follows."""

    text: str
    end: bool = True


class Span(NamedTuple):
    """Characters ``start:end`` of what is generated are shown as ``kind``."""

    start: int
    end: int
    kind: TextKind
    call: int = 0


def script_of(language: Language, body: JSON, prompt: Sequence[int]) -> Script | None:
    """The forced reply of a request; 400 if it cannot be understood."""
    sim = body.get("sim")
    reply = sim.get("reply") if isinstance(sim, dict) else None
    if reply is None:
        return None
    if isinstance(reply, str):
        return Script(reply)
    if not isinstance(reply, dict):
        raise ApiError(400, "sim.reply must be text or an object", param="sim")
    end = reply.get("end") is not False
    if isinstance(reply.get("text"), str):
        return Script(reply["text"], end)
    text = str(reply.get("content") or "")
    if language.thinks(prompt) or reply.get("reasoning"):
        opening = "" if language.thinks(prompt) else f"{THINK}\n"
        text = f"{opening}{reply.get('reasoning') or ''}\n{THOUGHT}\n\n{text}"
    for call in reply.get("tool_calls") or []:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ApiError(400, "sim.reply.tool_calls must be objects with a name", param="sim")
        arguments = call.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        between = "" if not text or text.endswith("\n") else "\n"
        text += between + language.call_text(call["name"], arguments)
    return Script(text, end)


def speak(
    language: Language, prompt: Sequence[int], wanted: Wanted, body: JSON, *, seed: int = 0, index: int = 0
) -> Reply:
    """The reply to ``prompt``; ``index`` tells the choices of one request apart."""
    reply = _spoken(language, prompt, wanted, body, seed, index)
    reply.again = lambda other: _spoken(language, other, wanted, body, seed, index)
    return reply


def _spoken(language: Language, prompt: Sequence[int], wanted: Wanted, body: JSON, seed: int, index: int) -> Reply:
    script = script_of(language, body, prompt)
    thinking = language.thinks(prompt)
    if script is None and type(language) is Language:
        return compose(prompt, wanted, seed=seed, index=index)
    random = Random(hash((seed, index, *prompt)))
    if script is None:
        own = compose(prompt, wanted, seed=seed, index=index)
        text = own.content
        if own.calls and own.finish == "tool_calls":
            text = language.call_text(own.calls[0].name, own.calls[0].arguments)
        if thinking:
            text = f"I think about it.\n{THOUGHT}\n\n{text}"
        script = Script(text, own.finish != "length")
    return _planned(language, script, wanted, thinking, random)


def _planned(language: Language, script: Script, wanted: Wanted, thinking: bool, random: Random) -> Reply:
    text = script.text
    calls = [_call(found[1], wanted.tools, random) for found in CALL.finditer(text)]
    spans = _spans(text, thinking)
    pieces = language.pieces(text)
    cut = len(pieces) > wanted.max_tokens
    pieces = pieces[: wanted.max_tokens]
    tokens, parts = [token for token, _ in pieces], _parts(pieces, spans, calls)
    ended = bool(tokens) and tokens[-1] == language.end
    if script.end and not ended and not cut:
        cut = len(tokens) >= wanted.max_tokens
        if not cut:
            tokens.append(language.end)
            parts.append(NOTHING)
    done = [call for number, call in enumerate(calls) if any(p.kind == "tool" and p.call == number for p in parts)]
    shown = "".join(piece for _, piece in pieces).removesuffix(language.decode([language.end]) if ended else "")
    content = "".join(part.text for part in parts if part.kind == "text")
    reasoning = "".join(part.text for part in parts if part.kind == "reasoning")
    finish = "length" if cut or not (script.end or ended) else "tool_calls" if done else "stop"
    if done and not content.strip():
        content = ""
    return Reply(tokens, parts, shown, content, finish, None, done, reasoning)


def _spans(text: str, thinking: bool) -> list[Span]:
    """What a reasoning parser and a tool parser make of a text: reasoning, text and calls, in order."""
    spans: list[Span] = []
    start = len(THINK) + 1 if text.startswith(THINK) else 0
    close = text.find(THOUGHT)
    if thinking or start:
        stop = close if close >= 0 else len(text)
        spans.append(Span(start, stop, "reasoning"))
        start = stop + len(THOUGHT) if close >= 0 else stop
    for number, found in enumerate(CALL.finditer(text)):
        if found.start() > start:
            spans.append(Span(start, found.start(), "text"))
        spans.append(Span(found.start(), found.end(), "arguments", number))
        start = found.end()
    if start < len(text):
        spans.append(Span(start, len(text), "text"))
    return spans


def _parts(pieces: Sequence[tuple[int, str]], spans: Sequence[Span], calls: Sequence[ToolCall]) -> list[Part]:
    """What each token shows. A call's name comes with its first token, its arguments with its last."""
    parts: list[Part] = []
    position, place = 0, 0
    for _, piece in pieces:
        end = position + len(piece)
        while place < len(spans) and spans[place].end <= position:
            place += 1
        part = NOTHING
        if place < len(spans) and piece:
            span = spans[place]
            if span.kind != "arguments":
                special = piece.startswith("<|") and piece.endswith("|>")
                shown = "" if special else piece[max(0, span.start - position) : max(0, span.end - position)]
                part = Part(span.kind, shown) if shown else NOTHING
            elif end >= span.end:
                part = Part("arguments", calls[span.call].arguments, span.call)
            elif position <= span.start < end:
                part = Part("tool", calls[span.call].name, span.call)
        parts.append(part)
        position = end
    return parts


def _call(inside: str, tools: Sequence[JSON], random: Random) -> ToolCall:
    """A call as written, in JSON or in XML parameters, as the parsers of engines read it."""
    name = f"call_{random.getrandbits(96):024x}"
    function = FUNCTION.search(inside)
    if function is None:
        try:
            written = json.loads(inside)
        except ValueError:
            return ToolCall(name, "", inside)
        written = written if isinstance(written, dict) else {}
        arguments = json.dumps(written.get("arguments") or {}, ensure_ascii=False)
        return ToolCall(name, str(written.get("name", "")), arguments)
    schema: Any = next((t["function"].get("parameters") for t in tools if t["function"]["name"] == function[1]), None)
    kinds = schema.get("properties") if isinstance(schema, dict) else None
    values = {
        found[1]: _value(found[2], kinds.get(found[1]) if isinstance(kinds, dict) else None)
        for found in PARAMETER.finditer(inside)
    }
    return ToolCall(name, function[1], json.dumps(values, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    """A parameter's text by its schema: what is not declared, or declared as text, is text."""
    if not isinstance(schema, dict) or schema.get("type") in (None, "string"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
