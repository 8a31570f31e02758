"""What prompts share, counted in the tokens of a model: with its tokenizer and its chat template.

Needs the extra ``warmroute[tokens]``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from gateway.canonical import ALL, canonical
from gateway.doctor import Note
from gateway.outline import SYSTEM
from gateway.preparing import Unrendered
from gateway.templates import Template
from gateway.tokens import Tokenizer
from kv_index.causes import Cause
from kv_index.heads import Break
from kv_index.outlines import Part

PROMPTS = 256
"""Prompts of which token ids are kept."""


class Tokens:
    """Implements `gateway.examining.Measure`. Raises `ValueError` for files that are no tokenizer or no template."""

    def __init__(self, tokenizer: str, template: str | None) -> None:
        self._tokenizer = Tokenizer(tokenizer)
        self._template = None if template is None else Template.load(template, tokenizer)
        self._known: OrderedDict[bytes, bytes | None] = OrderedDict()

    def lineage(self, before: Note, after: Note) -> tuple[int, int, int] | None:
        """(shared, of before, of after): tokens of two prompts; ``None`` where they cannot be told."""
        return self._of(before.kind, before.body, after.kind, after.body)

    def starts(self, before: Note, after: Note, broken: Break) -> tuple[int, int, int | None] | None:
        """(shared, could, moved): what two sessions share, without what is to blame, and with it at the end of the system
        prompt; ``None`` where they cannot be told."""
        told = self.lineage(before, after)
        if told is None:
            return None
        bodies = before.body, after.body
        moved = None
        if broken.cause in (Cause.TIME, Cause.ID) and broken.place.part is Part.SYSTEM and before.kind == "chat":
            at = (broken.place.number or 0, broken.place.offset or 0)
            could = self._between(*(_edited(body, *at, lambda text, clause: text) for body in bodies))
            moved = self._between(*(_edited(body, *at, _at_end) for body in bodies))
        else:
            could = self._between(*(canonical(before.kind, body, ALL)[0] for body in bodies))
        return None if could is None else (told[0], max(could, told[0]), moved)

    def _between(self, one: bytes | None, other: bytes | None) -> int | None:
        found = None if one is None or other is None else self._of("chat", one, "chat", other)
        return None if found is None else found[0]

    def _of(self, kind: str, body: bytes, other_kind: str, other_body: bytes) -> tuple[int, int, int] | None:
        one, other = self.ids(kind, body), self.ids(other_kind, other_body)
        if one is None or other is None:
            return None
        return common(one, other), len(one) // 4, len(other) // 4

    def ids(self, kind: str, body: bytes) -> bytes | None:
        """Token ids of a prompt, little-endian u32 each; ``None`` where they cannot be told."""
        key = xxh3_128_digest(body)
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        found = self._known[key] = self._ids(kind, body)
        if len(self._known) > PROMPTS:
            self._known.popitem(last=False)
        return found

    def _ids(self, kind: str, body: bytes) -> bytes | None:
        try:
            told = msgspec.json.decode(body)
            if kind == "chat" and self._template is not None:
                return self._tokenizer.ids(self._template.render(told))
            text = told.get("prompt", told.get("text")) if kind in ("completions", "generate") else None
            return self._tokenizer.ids(text, special=True) if isinstance(text, str) else None
        except (Unrendered, ValueError, RecursionError):
            return None


def common(one: bytes, other: bytes) -> int:
    """Leading token ids that both have."""
    low, high = 0, min(len(one), len(other)) // 4 + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low


_ENDS = re.compile(r"\n|[。！？；]|[.!?;](?=\s)\s?")


def clause(text: str, at: int) -> tuple[int, int]:
    """Where the sentence or the line begins and ends in which ``at`` is."""
    begin = max((found.end() for found in _ENDS.finditer(text, 0, at)), default=0)
    end = _ENDS.search(text, at)
    return begin, len(text) if end is None else end.end()


def _at_end(text: str, clause: str) -> str:
    return text + clause if not text or text[-1] in "\n 。！？；" else f"{text}\n{clause}"


def _edited(body: bytes, number: int, at: int, edit: Callable[[str, str], str]) -> bytes | None:
    """``body`` with its ``number``-th system text edited: ``edit`` is given it without the sentence at ``at``, and that."""
    told = msgspec.json.decode(body)
    seen = 0
    for message in told.get("messages", ()):
        if message.get("role") not in SYSTEM:
            return None
        content = message.get("content")
        texts: list[Any] = [message] if isinstance(content, str) else content or []
        name = "content" if isinstance(content, str) else "text"
        for each in texts:
            if not isinstance(each.get(name), str) or not each[name]:
                continue
            if seen == number:
                begin, end = clause(each[name], at)
                each[name] = edit(each[name][:begin] + each[name][end:], each[name][begin:end])
                return msgspec.json.encode(told)
            seen += 1
    return None
