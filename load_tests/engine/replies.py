"""What the engine says: deterministic in its seed and the prompt, so that two engines with one seed agree.

A reply is planned whole when a request arrives: token ids, and for each token what a stream shows of it. It ends with
<|im_end|> unless a limit comes first, and it tokenizes to the same ids when a client sends it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, NamedTuple

from load_tests.engine.template import JSON, compact, tool_call_text
from load_tests.engine.tokens import IM_END, pieces_of, tokenize

# fmt: off
WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were",
    "all", "her", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "no", "more",
    "if", "out", "so", "up", "said", "what", "its", "about", "than", "into", "them", "can", "only", "other", "time",
    "new", "some", "could", "these", "two", "may", "first", "then", "do", "any", "like", "my", "now", "over", "such",
    "our", "man", "even", "most", "made", "after", "also", "did", "many", "off", "before", "must", "well", "back",
    "through", "years", "where", "much", "your", "way", "down", "should", "because", "long", "each", "just", "state",
    "people", "those", "too", "how", "little", "good", "world", "make", "very", "year", "still", "see", "work",
    "life",
)
# fmt: on

TextKind = Literal["text", "reasoning", "tool", "arguments", "none"]


class Part(NamedTuple):
    """What one token shows: text, reasoning, the start of a call (text is its name), a piece of its arguments, nothing."""

    kind: TextKind
    text: str
    call: int = 0


NOTHING = Part("none", "")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Reply:
    """tokens: what is generated. parts: as many, what each shows. text: everything as text, calls included.
    content: text outside tool calls and reasoning. finish: stop, length or tool_calls. stop_reason: the stop string
    that matched. again: the reply to another prompt, asked for in the same way."""

    tokens: list[int]
    parts: list[Part]
    text: str
    content: str
    finish: str
    stop_reason: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    again: Callable[[Sequence[int]], Reply] | None = None


@dataclass(slots=True)
class Wanted:
    """What a request asks of its reply. max_tokens counts every generated token, <|im_end|> included."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    seed: int | None = None
    tools: Sequence[JSON] = ()
    choice: str = "auto"
    choice_name: str = ""
    may_call: bool = False
    schema: JSON | None = None


def compose(prompt: Sequence[int], wanted: Wanted, *, seed: int = 0, index: int = 0) -> Reply:
    """Plan the reply to ``prompt``; ``index`` tells the choices of one request apart."""
    # Ints only: their hashes, unlike those of strings and None, are the same in every process.
    random = Random(hash((seed, wanted.seed or 0, index, *prompt)))
    name = _called(random, wanted)
    if name is not None:
        return _calling(random, wanted, name)
    if wanted.schema is not None:
        text, ends = compact(_example(random, wanted.schema)), True
    else:
        length = max(random.randint(16, 80), wanted.min_tokens)
        ends = not wanted.ignore_eos and length < wanted.max_tokens
        text = _prose(random, length if ends else wanted.max_tokens)
    return _telling(text, wanted, ends)


def _prose(random: Random, tokens: int) -> str:
    """Sentences of at least ``tokens`` tokens."""
    sentences: list[str] = []
    count = 0
    while count < tokens:
        words = random.choices(WORDS, k=random.randint(6, 14))
        sentence = (" " if sentences else "") + words[0].capitalize() + " " + " ".join(words[1:]) + "."
        sentences.append(sentence)
        count += len(pieces_of(sentence))
    return "".join(sentences)


def _telling(text: str, wanted: Wanted, ends: bool) -> Reply:
    """The reply that says ``text``, cut at the first stop string and at the limit; ``ends``: with <|im_end|>."""
    pieces, visible, stop_reason = pieces_of(text), len(text), None
    found = min(((text.find(stop), stop) for stop in wanted.stop if stop and stop in text), default=None)
    if found is not None:
        visible, stop_reason = found
        pieces = _until(pieces, visible + len(stop_reason))
    closing = ends and found is None
    finish = "stop"
    if len(pieces) + closing > wanted.max_tokens or not (ends or found):
        pieces = pieces[: wanted.max_tokens]
        visible = min(visible, sum(map(len, pieces)))
        finish, stop_reason, closing = "length", None, False
    tokens = tokenize("".join(pieces))
    parts: list[Part] = []
    position = 0
    for piece in pieces:
        shown = piece[: max(0, visible - position)]
        parts.append(Part("text", shown) if shown else NOTHING)
        position += len(piece)
    if closing:
        tokens.append(IM_END)
        parts.append(NOTHING)
    return Reply(tokens, parts, text[:visible], text[:visible], finish, stop_reason)


def _until(pieces: list[str], length: int) -> list[str]:
    """The fewest leading pieces that cover ``length`` characters."""
    position = 0
    for count, piece in enumerate(pieces, 1):
        position += len(piece)
        if position >= length:
            return pieces[:count]
    return pieces


def _called(random: Random, wanted: Wanted) -> str | None:
    names = [tool["function"]["name"] for tool in wanted.tools]
    draw = random.random()
    if not names or wanted.choice == "none":
        return None
    if wanted.choice_name:
        return wanted.choice_name
    if wanted.choice == "required" or (wanted.may_call and draw < 0.5):
        return str(random.choice(names))
    return None


def _calling(random: Random, wanted: Wanted, name: str) -> Reply:
    schema = next((t["function"].get("parameters") for t in wanted.tools if t["function"]["name"] == name), None)
    arguments = compact(_example(random, schema or {"type": "object"}))
    text = tool_call_text(name, arguments)
    start = text.index(',"arguments":') + len(',"arguments":')
    named, end = text.index(',"arguments":'), start + len(arguments)
    parts: list[Part] = []
    position = 0
    pieces = pieces_of(text)[: wanted.max_tokens]
    opened = False
    for piece in pieces:
        after = position + len(piece)
        shown = text[max(position, start) : min(after, end)] if after > start and position < end else ""
        if not opened and after > named:
            parts.append(Part("tool", name))
            opened = True
        else:
            parts.append(Part("arguments", shown) if shown else NOTHING)
        position = after
    tokens = tokenize("".join(pieces))
    cut = position < len(text) or len(tokens) >= wanted.max_tokens
    if not cut:
        tokens.append(IM_END)
        parts.append(NOTHING)
    received = text[start : min(position, end)] if position > start else ""
    call = ToolCall(f"call_{random.getrandbits(96):024x}", name, received)
    calls = [call] if opened else []
    return Reply(tokens, parts, text[:position], "", "length" if cut else "tool_calls", None, calls)


def _whole(value: Any, otherwise: int) -> int:
    return int(value) if isinstance(value, int | float) else otherwise


def _example(random: Random, schema: Any, depth: int = 0) -> Any:
    """A value that a JSON schema admits: enough of the language for tool parameters."""
    if not isinstance(schema, dict) or depth > 6:
        return random.choice(WORDS)
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return random.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), list) and schema[union]:
            return _example(random, schema[union][0], depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if kind == "object" or (kind is None and "properties" in schema):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return {key: _example(random, value, depth + 1) for key, value in properties.items()}
    if kind == "array":
        least = min(8, max(1, _whole(schema.get("minItems"), 1)))
        return [_example(random, schema.get("items", {}), depth + 1) for _ in range(least)]
    if kind in ("integer", "number"):
        return _whole(schema.get("minimum"), 0) + random.randint(0, 9)
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    return " ".join(random.choices(WORDS, k=random.randint(2, 8)))
