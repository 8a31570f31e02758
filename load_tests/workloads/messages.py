"""Logged messages as traffic: text becomes blocks, and what a session asked becomes chains.

A block is 64 tokens: 256 bytes of the text, or, where a log tells tokens, as many bytes as 64 tokens were on average. An id
names a block's text *and* all text before it. Turns of one session become causal: each waits for what had been answered when
it was asked, then for as long as its client waited. Where a log does not tell when an answer ended, `answer_seconds` is taken.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from statistics import median
from typing import Any

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.traces import named

BLOCK = 64
"""Tokens of one block."""

BYTES = 4.0
"""Of one token, where a log tells none."""

OUTPUT = 128
"""Tokens of an answer, where a log tells of none."""

UNTIMED = 1.0
"""Seconds between the begins of chains whose time is not told."""


@dataclass(slots=True)
class Logged:
    """One request of a log. ``None``: not told."""

    text: str
    """The prompt, as `rendered`."""
    answer: str | None = None
    """What follows the prompt when a client carries the answer along, as `rendered`."""
    at: float | None = None
    """Seconds, of any clock."""
    ended: float | None = None
    """When the answer ended, of the same clock."""
    tokens: int | None = None
    output: int | None = None
    session: str | None = None
    model: str = ""


def rendered(messages: Sequence[Any], tools: Any = None) -> str:
    """One text of tools and messages, each message as role, text and whatever else it has; the same for the same content."""
    pieces = [f"<|tools|>\n{_json(tools)}\n"] if tools else []
    for message in messages:
        if not isinstance(message, dict):
            pieces.append(f"<|message|>\n{_json(message)}\n")
            continue
        rest = {
            key: value for key, value in message.items() if key not in ("role", "content") and value not in (None, [])
        }
        text = _text(message.get("content")) + (_json(rest) if rest else "")
        pieces.append(f"<|{message.get('role', 'message')}|>\n{text}\n")
    return "".join(pieces)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        return "".join(
            text if isinstance(text, str) else _json(part) for text, part in zip(parts, content, strict=True)
        )
    return _json(content)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def traffic(name: str, logged: Sequence[Logged]) -> Traffic:
    """The requests of a log, in its order. Those that tell no session arrive at their own time whatever became of the others,
    and belong to the session of the prompt that theirs goes on from, as `named` finds it."""
    turns = _turns(logged)
    first = min((each.at for each in logged if each.at is not None), default=0.0)
    sessions: dict[str, list[int]] = {}
    alone: list[int] = []
    for place, each in enumerate(logged):
        if each.session is None:
            alone.append(place)
        else:
            sessions.setdefault(each.session, []).append(place)
    chains: list[Chain] = []
    for session, places in sessions.items():
        begin = first if any(logged[place].at is not None for place in places) else first + UNTIMED * places[0]
        spans = _spans([logged[place] for place in places], [turns[place] for place in places], begin)
        chains += _session(session, spans, first, len(chains))
    alone.sort(key=lambda place: _begin(logged[place], first, place))
    inferred = named([turns[place].blocks for place in alone], [logged[place] for place in alone])
    for place, session in zip(alone, inferred, strict=True):
        chains.append(Chain(_begin(logged[place], first, place) - first, (turns[place],), session))
    return Traffic(name, BLOCK, chains)


def _begin(logged: Logged, first: float, place: int) -> float:
    return logged.at if logged.at is not None else first + UNTIMED * place


def _turns(logged: Sequence[Logged]) -> list[Turn]:
    texts = [each.text.encode("utf-8", "replace") for each in logged]
    told = [(len(text), each.tokens) for text, each in zip(texts, logged, strict=True) if each.tokens]
    piece = round(BLOCK * BYTES)
    if told:
        share = sum(size for size, _ in told) / sum(tokens for _, tokens in told)
        piece = round(BLOCK * min(max(share, 1.0), 4 * BYTES))
    outputs = [each.output for each in logged if each.output is not None]
    usual = max(1, round(median(outputs))) if outputs else OUTPUT
    naming, found = Naming(), []
    for text, each in zip(texts, logged, strict=True):
        tokens = each.tokens or max(1, len(text) * BLOCK // piece)
        answer = b"" if each.answer is None else each.answer.encode("utf-8", "replace")
        output = each.output
        if output is None:
            output = usual if each.answer is None else max(1, len(answer) * BLOCK // piece)
        ids = naming.chained(_pieces(each.model, text + answer, piece, (tokens + output) // BLOCK))
        full = min(len(text) // piece, tokens // BLOCK)
        # Ids of an answer stand right behind those of the prompt: where the prompt lacks some, the answer has no place.
        after = ids[full:] if answer and full == tokens // BLOCK else ()
        found.append(Turn(ids[:full], tokens, output, after))
    return found


def _pieces(model: str, text: bytes, piece: int, most: int) -> list[tuple[str, bytes]]:
    ends = range(piece, min(len(text), most * piece) + 1, piece)
    return [(model, blake2b(text[end - piece : end], digest_size=16).digest()) for end in ends]


def answer_seconds(turn: Turn) -> float:
    """About how long an answer took: prompts at 10,000 tokens a second, 50 generated a second."""
    return turn.tokens / 10_000 + turn.output / 50


@dataclass(frozen=True, slots=True)
class _Span:
    begun: float
    ended: float
    told: bool
    """The end is known, not taken."""
    turn: Turn


def _spans(logged: Sequence[Logged], turns: Sequence[Turn], begin: float) -> list[_Span]:
    """In order of time; what has none comes right after the one before it."""
    if all(each.at is not None for each in logged):
        order = sorted(range(len(logged)), key=lambda place: logged[place].at or 0.0)
    else:
        order = list(range(len(logged)))
    spans: list[_Span] = []
    for place in order:
        each, turn = logged[place], turns[place]
        at = each.at if each.at is not None else spans[-1].ended if spans else begin
        known = each.ended is not None and each.ended >= at
        ended = each.ended if known and each.ended is not None else at + answer_seconds(turn)
        spans.append(_Span(at, ended, known, turn))
    return spans


def _session(session: str, spans: Sequence[_Span], first: float, place: int) -> list[Chain]:
    """One session's chains, the first of which gets the number ``place``.

    Requests that were surely under way together are one burst, which begins when all of the one before it have ended. The
    first request of each burst is a turn of one chain, the others are chains that follow.
    """
    turns: list[Turn] = []
    sides: list[Chain] = []
    before: tuple[int, ...] = ()
    last = first
    for number, burst in enumerate(_bursts(spans)):
        beside: list[int] = []
        for index, span in enumerate(burst):
            wait = max(0.0, span.begun - last)
            turn = replace(span.turn, think=wait if number and not index else 0.0, awaits=before)
            if not index:
                turns.append(turn)
                continue
            beside.append(place + 1 + len(sides))
            sides.append(Chain(wait, (turn,), session, follows=(place, number - 1) if number else None))
        before, last = tuple(beside), max(span.ended for span in burst)
    return [Chain(max(0.0, spans[0].begun - first), tuple(turns), session), *sides]


def _bursts(spans: Sequence[_Span]) -> list[list[_Span]]:
    found: list[list[_Span]] = []
    until = 0.0
    for span in spans:
        if found and span.begun < until:
            found[-1].append(span)
            until = max(until, span.ended) if span.told else until
        else:
            found.append([span])
            until = span.ended if span.told else span.begun
    return found
