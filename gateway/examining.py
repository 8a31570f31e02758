"""What one examination tells: what a break cost, and what keeps the starts of sessions from being shared.

Both go in steps: they are generators that yield where requests may go on meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from typing import NamedTuple, Protocol

from gateway.canonical import ALL, canonical
from gateway.findings import Cost
from gateway.outline import head_of, outline
from gateway.prompt import Thinking
from kv_index.causes import Effort
from kv_index.heads import Break, alike
from kv_index.lineage import between, compare
from kv_index.outlines import Outline, Part

OVERHEAD = 1024
"""Bytes that a session, or a start, costs besides its bodies, about."""
STARTS = 8
"""Distinct starts of sessions that are remembered for each tenant and model, ..."""
START = 512 * 1024
"""... each of at most so many bytes, ..."""
PAIRS = 256
"""... for so many tenants and models."""
PARTS = 5000
"""Commas and brackets of a start that is made canonical to see what that would save: what it costs goes by their number."""
BYTES = 4.0
"""Bytes of a token, where nobody counted any."""


class Note(NamedTuple):
    """One finished request of a session."""

    tenant: str
    model: str
    session: int
    """64-bit hash."""
    kind: str
    """Its route's: chat, messages, responses, completions, generate."""
    body: bytes
    thinking: Thinking
    prompt_tokens: int | None
    cached_tokens: int | None
    before_tokens: int | None
    """Tokens of the session's previous prompt with what was generated."""
    shared_tokens: int | None
    """Leading tokens that it shares with that; ``None``: it extends it, or there is none."""
    new: bool
    """The first prompt of its session."""
    now: float


class Measure(Protocol):
    """Counts tokens, where a tokenizer and a template are at hand."""

    def lineage(self, before: Note, after: Note) -> tuple[int, int, int] | None:
        """(shared, of before, of after): tokens of two prompts."""
        ...

    def starts(self, before: Note, after: Note, broken: Break) -> tuple[int, int, int | None] | None:
        """(shared, could, moved): what two sessions share, without what is to blame, and with it at the end."""
        ...


class _Start(NamedTuple):
    """How a session began: what stands before its messages, as sent and canonical."""

    key: tuple[object, ...]
    told: Outline
    plain: Outline
    note: Note
    size: int


Found = tuple[Break, Cost] | None


class Starts:
    """Distinct starts of recent sessions, in at most ``memory`` bytes."""

    def __init__(self, memory: int, measure: Measure | None = None) -> None:
        self.memory = memory
        self.measure = measure
        self.size = 0
        self._starts: OrderedDict[tuple[str, str], list[_Start]] = OrderedDict()

    def add(self, note: Note, told: Outline) -> Generator[None, None, tuple[int, Found]]:
        """In steps: bytes that the start of a session shares with those of others of its tenant and model, and what keeps it
        from sharing the rest; ``None``: nothing does, or nothing like it was seen. Raises `Unread`.
        """
        if told.text is not None or told.head > START:
            return 0, None
        head = _head_of(told)
        key = (tuple(sorted(head.parameters.items())), tuple([tool.text for tool in head.tools]), head.system)
        pair = note.tenant, note.model
        known = self._starts.get(pair)
        if known is None:
            known = self._starts[pair] = []
        self._starts.move_to_end(pair)
        same = next((start for start in known if start.key == key), None)
        if same is not None:
            known.remove(same)
            known.append(same)
            return head.size, None
        yield
        plain = _canonical(note, head) or head
        yield
        # Objects take some times as much as the JSON that they were read from.
        size = (6 if plain is head else 12) * head.size + OVERHEAD + (len(note.body) if self.measure is not None else 0)
        kept = note if self.measure is not None else note._replace(body=b"")
        start = _Start(key, head, plain, kept, size)
        found = yield from self._differs(start, known, rate_of(note, told))
        known.append(start)
        self.size += size
        self._bound(known)
        return 0 if found is None else found[0].shared, found

    def _differs(self, start: _Start, known: list[_Start], rate: float) -> Generator[None, None, Found]:
        found: tuple[Break, _Start] | None = None
        effort = Effort()
        # The first one of those that share most.
        for other in sorted(known, key=lambda each: -alike(each.told, start.told)):
            broken = between(other.told, start.told, effort)
            if broken is not None:
                found = broken, other
                break
        if found is None:
            return None
        yield
        broken, other = found
        size = min(broken.before, broken.after)
        plain = between(other.plain, start.plain)
        left = 0 if plain is None else max(0, min(plain.before, plain.after) - plain.shared)
        lost_bytes = max(0, size - broken.shared)
        measured = self.measure.starts(other.note, start.note, broken) if self.measure is not None else None
        if measured is not None:
            shared, could, moved = measured
        else:
            shared, could, moved = round(broken.shared * rate), round(size * rate), None
        lost = could - shared
        if lost <= 0:
            # At the end of the start, where it costs nothing.
            return None
        gain = round(lost * max(0, lost_bytes - left) / lost_bytes) if lost_bytes else 0
        return broken, Cost(lost, gain, measured is None, shared, could, moved)

    def _bound(self, newest: list[_Start]) -> None:
        while len(newest) > STARTS:
            self._forget(newest)
        while len(self._starts) > PAIRS or (self.size > self.memory and self._starts):
            pair = next(iter(self._starts))
            if self._starts[pair]:
                self._forget(self._starts[pair])
            if not self._starts[pair]:
                del self._starts[pair]

    def _forget(self, starts: list[_Start]) -> None:
        self.size -= starts.pop(0).size


def _head_of(told: Outline) -> Outline:
    return Outline(parameters=told.parameters, tools=told.tools, system=told.system)


def lost_of(note: Note) -> int | None:
    """Tokens of the one before that could have been found and were not; ``None``: nobody counted them."""
    if note.before_tokens is None or note.prompt_tokens is None or note.shared_tokens is None:
        return None
    return max(0, min(note.before_tokens, note.prompt_tokens) - note.shared_tokens)


def cost_of(
    base: Note, note: Note, before: Outline, after: Outline, broken: Break, measure: Measure | None
) -> Generator[None, None, Cost]:
    """In steps: what a break cost: by the note's own counts, measured, or estimated by bytes. Raises `Unread`."""
    size = min(broken.before, broken.after)
    lost_bytes = max(0, size - broken.shared)
    measured = measure.lineage(base, note) if measure is not None else None
    counted = lost_of(note) if measured is None else max(0, min(measured[1:]) - measured[0])
    estimated = counted is None
    lost = round(lost_bytes * rate_of(note, after)) if counted is None else counted
    heads = lost_bytes and broken.place.part in (Part.TOOL, Part.SYSTEM, Part.PARAMETER)
    left = (yield from _canonical_left(base, note, before, after)) if heads else None
    gain = 0 if left is None else round(lost * max(0, lost_bytes - left) / lost_bytes)
    return Cost(lost, gain, estimated)


def rate_of(note: Note, told: Outline) -> float:
    """Tokens of a byte."""
    return note.prompt_tokens / told.size if note.prompt_tokens and told.size else 1 / BYTES


def _canonical(note: Note, told: Outline) -> Outline | None:
    """The start of a canonical prompt; ``None``: it is the same, or has too many parts to see. Raises `Unread`."""
    texts = [*[tool.text for tool in told.tools], *told.system]
    if sum([text.count(mark) for text in texts for mark in ",[{"]) > PARTS:
        return None
    body, changed = canonical(note.kind, head_of(note.kind, note.body), ALL)
    return outline(note.kind, body, note.thinking, head=True) if changed else None


def _canonical_left(base: Note, note: Note, before: Outline, after: Outline) -> Generator[None, None, int | None]:
    """In steps: bytes that would be lost still with canonical prompts; ``None``: they change nothing."""
    told = []
    for each, found in ((base, before), (note, after)):
        yield
        head = _canonical(each, found)
        if head is not None:
            # Messages stay as they are.
            found = Outline(
                parameters=head.parameters,
                tools=head.tools,
                system=head.system,
                messages=found.messages,
                shown=found.shown,
                first=found.first,
                where=found.where,
            )
        told.append(found)
    if told[0] is before and told[1] is after:
        return None
    yield
    broken = compare(told[0], told[1]).broken
    return 0 if broken is None else max(0, min(broken.before, broken.after) - broken.shared)
