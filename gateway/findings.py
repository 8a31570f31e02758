"""What the doctor found: breaks counted by tenant, model, cause and place, with what they cost and what cures them.

No text of a prompt is in here unless the operator asked for examples: positions, causes and names of tools are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from typing import Any, NamedTuple

from kv_index.causes import Cause
from kv_index.heads import Break
from kv_index.outlines import Part, Place

MOST = 1000
"""Findings; the one that costs least goes when there are more."""
OFFSETS = 8
"""Places in one part, from which on the part is the place: where it breaks depends on what stands before."""
PAIRS = 1000
"""Tenants and models of which totals are kept."""
NAME = 64
"""Characters of a tool's name."""
BITS = 1024
"""Of the map by which sessions are counted."""
SHOWN = 30
"""Characters on both sides of a break that an example shows."""

WHAT = {
    Cause.TIME: "a time or date",
    Cause.ID: "a random id or a counter",
    Cause.TOOLS_REORDERED: "tools, or keys of their schemas, in another order",
    Cause.TOOLS_CHANGED: "tools were added, removed or edited",
    Cause.SYSTEM_CHANGED: "the system prompt was edited",
    Cause.REWRITTEN: "an earlier message was edited or removed",
    Cause.COMPACTED: "the history was compacted",
    Cause.THINKING: "the template strips the thinking of earlier answers",
    Cause.PARAMETERS: "a parameter of the template changed",
    Cause.WHITESPACE: "other whitespace, or another form of a number",
    Cause.OTHER: "other text",
}
CURES = {
    Cause.TIME: "move it to the end",
    Cause.ID: "leave it out or move it to the end",
    Cause.TOOLS_REORDERED: "list tools and keys in one order, or turn canonical tools on",
    Cause.TOOLS_CHANGED: "keep one list of tools for the whole session",
    Cause.SYSTEM_CHANGED: "keep the system prompt and say what is new in the last message",
    Cause.REWRITTEN: "append to the history instead of editing it",
    Cause.COMPACTED: "compact less often and more at once",
    Cause.THINKING: "have the template keep thinking, or expect it at each new question",
    Cause.PARAMETERS: "send the same template parameters in all requests of a session",
    Cause.WHITESPACE: "send what was sent before byte by byte",
    Cause.OTHER: "keep what was sent before as it was",
}
SAID = "send it again as it was first said"
"""The cure of a value that changes inside an earlier message."""


class Cost(NamedTuple):
    """What one break cost, in tokens."""

    lost: int
    gain: int
    """How much less it would have cost with canonical prompts."""
    estimated: bool
    """By bytes, not by counts of tokens."""
    shared: int = 0
    """What two sessions share, ..."""
    could: int = 0
    """... what they would share without what is to blame, ..."""
    moved: int | None = None
    """... and with it at the end of the system prompt, where that is known."""


@dataclass(slots=True)
class Finding:
    """Breaks at one place for one reason."""

    tenant: str
    model: str
    cause: Cause
    place: Place
    between: bool
    breaks: int = 0
    lost: int = 0
    gain: int = 0
    estimated: bool = False
    shared: int = 0
    could: int = 0
    moved: int = 0
    known: int = 0
    """Of how many ``moved`` is the sum."""
    seen: float = 0.0
    example: dict[str, str] | None = None
    _sessions: int = 0

    def add(self, session: int, cost: Cost, now: float) -> None:
        """One more break."""
        self.breaks += 1
        self.lost += cost.lost
        self.gain += cost.gain
        self.estimated = self.estimated or cost.estimated
        self.shared += cost.shared
        self.could += cost.could
        if cost.moved is not None:
            self.moved += cost.moved
            self.known += 1
        self.seen = now
        # Its low bits: the high ones decide whether it is sampled.
        self._sessions |= 1 << (session % BITS)

    @property
    def sessions(self) -> int:
        """How many had such breaks, about."""
        free = BITS - self._sessions.bit_count()
        return self.breaks if not free else min(self.breaks, round(-BITS * log(free / BITS)))

    @property
    def cure(self) -> str:
        """One imperative clause."""
        volatile = self.cause in (Cause.TIME, Cause.ID)
        if volatile and self.place.part not in (Part.SYSTEM, Part.TOOL, Part.PARAMETER) and self.place.where:
            return SAID
        if self.cause is Cause.TIME and self.place.part in (Part.TOOL, Part.PARAMETER):
            return "move it into the last message"
        return CURES[self.cause]

    def text(self, share: float | None, of: str) -> str:
        """The sentence for the operator; ``share`` of the hits is lost, ``of`` names the model where that is needed."""
        about = "about " if self.estimated else ""
        if self.between:
            number = max(self.breaks, 1)
            shared, could = round(self.shared / number), round(self.could / number)
            if self.known:
                cure = f"at its end they would share {round(self.moved / self.known)}"
            else:
                cure = self.cure
            told = f"sessions of tenant {self.tenant}{of} share {about}{shared:,} tokens instead of {could:,}"
            return f"{told}: {WHAT[self.cause]} at {self.place}; {cure}"
        if share is None:
            what = f"lost {about}{self.lost:,} tokens"
        else:
            what = f"loses {about}{_percent(share)} % of its hits"
        return f"tenant {self.tenant}{of} {what} at {self.place}: {WHAT[self.cause]}; {self.cure}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.1f}"


@dataclass(slots=True)
class Totals:
    """Of one tenant and model, within what was examined."""

    examined: int = 0
    """Prompts that were compared with another, or known to extend it."""
    breaks: int = 0
    retries: int = 0
    branches: int = 0
    unexplained: int = 0
    """Prompts that extend the one before, but not what was generated to it: answers came back otherwise, ..."""
    unexplained_tokens: int = 0
    """... and what that cost."""
    lost: int = 0
    cached: int | None = None
    """Tokens that engines, or the comparison, found cached; ``None``: nobody told."""
    estimated: bool = False

    def hit(self, tokens: int | None) -> None:
        """So many were cached."""
        if tokens is not None:
            self.cached = tokens + (self.cached or 0)

    @property
    def told(self) -> dict[str, Any]:
        """For the report."""
        lost = None if self.cached is None or not self.lost + self.cached else self.lost / (self.lost + self.cached)
        return {
            "examined": self.examined,
            "breaks": self.breaks,
            "retries": self.retries,
            "branches": self.branches,
            "unexplained": self.unexplained,
            "unexplained_tokens": self.unexplained_tokens,
            "tokens_lost": self.lost,
            "tokens_cached": self.cached,
            "share_of_hits_lost": lost,
        }


@dataclass(slots=True)
class Findings:
    """All of them, within bounds."""

    examples: bool = False
    shows: Callable[[str], bool] = lambda tenant: True
    """Whether examples may be of that tenant's prompts."""
    most: int = MOST
    _found: dict[tuple[object, ...], Finding] = field(default_factory=dict)
    _offsets: dict[tuple[object, ...], int] = field(default_factory=dict)
    totals: dict[tuple[str, str], Totals] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._found)

    def of(self, tenant: str, model: str) -> Totals:
        """Totals of a tenant and a model."""
        found = self.totals.get((tenant, model))
        if found is None:
            if len(self.totals) >= PAIRS:
                self.totals.pop(next(iter(self.totals)))
            found = self.totals[tenant, model] = Totals()
        return found

    def add(
        self, tenant: str, model: str, session: int, broken: Break, place: Place, cost: Cost, between: bool, now: float
    ) -> None:
        """One break; ``place`` is normalised: see `normal`."""
        kind = (tenant, model, broken.cause, place._replace(offset=None), between)
        key = (*kind, place.offset)
        finding = self._found.get(key)
        if finding is None and place.offset is not None and self._offsets.get(kind, 0) >= OFFSETS:
            place = place._replace(offset=None)
            key = (*kind, None)
            finding = self._found.get(key)
        if finding is None:
            self._room()
            finding = self._found[key] = Finding(tenant, model, broken.cause, place, between)
            self._offsets[kind] = self._offsets.get(kind, 0) + 1
        finding.add(session, cost, now)
        totals = self.of(tenant, model)
        totals.breaks += 1
        totals.lost += cost.lost
        if self.examples and self.shows(tenant):
            before, after = (text[max(0, broken.at - SHOWN) : broken.at + SHOWN] for text in broken.texts)
            finding.example = {"before": before, "after": after}

    def _room(self) -> None:
        if len(self._found) < self.most:
            return
        key = min(self._found, key=lambda each: self._found[each].lost)
        del self._found[key]
        kind = key[:-1]
        self._offsets[kind] -= 1
        if not self._offsets[kind]:
            del self._offsets[kind]

    def ranked(self) -> list[dict[str, Any]]:
        """The costliest first."""
        models: dict[str, set[str]] = {}
        for tenant, model in self.totals:
            models.setdefault(tenant, set()).add(model)
        ranked = sorted(self._found.values(), key=lambda each: (-each.lost, -each.breaks, each.tenant, str(each.place)))
        return [self._told(each, f" ({each.model})" if len(models.get(each.tenant, ())) > 1 else "") for each in ranked]

    def _told(self, finding: Finding, of: str) -> dict[str, Any]:
        totals = self.of(finding.tenant, finding.model)
        hits = None if totals.cached is None else totals.cached + totals.lost
        share = finding.lost / hits if hits else None
        return {
            "tenant": finding.tenant,
            "model": finding.model,
            "cause": finding.cause.value,
            "place": place_of(finding.place),
            "between": finding.between,
            "breaks": finding.breaks,
            "sessions": finding.sessions,
            "tokens_lost": finding.lost,
            "share_of_hits_lost": share,
            "canonical_gain_tokens": finding.gain,
            "estimated": finding.estimated,
            "last_seen": finding.seen,
            "cure": finding.cure,
            "text": finding.text(share, of),
            "example": finding.example if self.examples and self.shows(finding.tenant) else None,
        }


def normal(place: Place, cause: Cause, first: int) -> Place:
    """The place as all sessions have it: in the first message to the character, behind that only the part.

    ``first``: the index of the first message behind the system's.
    """
    place = place._replace(name=place.name[:NAME])
    if cause is Cause.TOOLS_REORDERED:
        # Whichever came first this time.
        return Place(Part.TOOL) if place.offset is None else Place(Part.TOOL, place.name)
    if cause is Cause.TOOLS_CHANGED:
        return Place(Part.TOOL, place.name)
    if not place.where:
        return place
    if place.number == first and cause in (Cause.TIME, Cause.ID, Cause.WHITESPACE):
        return place
    return Place(place.part, place.name)


def place_of(place: Place) -> dict[str, Any]:
    """For JSON."""
    told = {
        "part": place.part.value,
        "name": place.name or None,
        "index": place.number,
        "offset": place.offset,
        "text": str(place),
    }
    return {name: value for name, value in told.items() if value is not None}
