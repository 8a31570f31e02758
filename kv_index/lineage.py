"""Where a prompt broke from its session's previous one, and why.

What is compared are outlines: a prompt's pieces in the order in which chat templates render them (parameters, tools, system
prompt, messages). The first piece that differs is where a prefix cache ends. Why it differs is told only as far as it is
sure: a time or an id is to blame where all else is equal, a changed system prompt or changed tools only where the conversation
is the same one, and an edit of what the user asked last breaks nothing that could have been kept.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kv_index.causes import Cause, Difference, Effort, common, difference
from kv_index.heads import Break, broken_at, heads
from kv_index.outlines import Message, Outline, Part, Piece, Place, weight

ALIKE = 0.25
"""Conversations are one if more than this share of the shorter one is in the other, too."""
SAYING = 8
"""Texts of a message that may say that it is a summary."""
SHORTER = 0.7
"""A history is much shorter if less than this share of it is left."""


class Relation(StrEnum):
    """What a prompt is to the one before it."""

    EXTENDS = "extends"
    BROKEN = "broken"
    RETRY = "retry"
    """The last question is asked again, or otherwise; or the history was cut at its end."""
    BRANCH = "branch"
    """It is another conversation."""


class Lineage(NamedTuple):
    """What `compare` finds; ``broken`` only for `Relation.BROKEN`."""

    relation: Relation
    broken: Break | None = None


_EXTENDS = Lineage(Relation.EXTENDS)
_RETRY = Lineage(Relation.RETRY)
_BRANCH = Lineage(Relation.BRANCH)
_SAME_PROMPT = (Cause.TIME, Cause.ID, Cause.TOOLS_REORDERED, Cause.WHITESPACE)
"""Causes for which the rest is equal: the prompt was meant to be the same."""


def compare(before: Outline, after: Outline, effort: Effort | None = None) -> Lineage:
    """What ``after`` is to ``before``, the previous prompt of its session; ``effort``: what that may cost."""
    effort = effort or Effort()
    if before.text is not None or after.text is not None:
        return _texts(before, after, effort)
    found = next(heads(before, after, effort), None)
    if found is None:
        return _history(before, after, effort)
    if found.cause in _SAME_PROMPT or _continues(before, after, effort):
        return Lineage(Relation.BROKEN, found)
    return _BRANCH


def between(before: Outline, after: Outline, effort: Effort | None = None) -> Break | None:
    """What keeps the starts of two sessions from being shared: parameters, tools, system prompt.

    ``None`` if they are equal, or those of different applications: if anything differs but times, ids, order and whitespace.
    ``effort``: what that may cost.
    """
    first = None
    effort = effort or Effort()
    effort.explained = 0
    for found in heads(before, after, effort):
        if found.cause not in _SAME_PROMPT:
            return None
        first = first or found
    return first


# -- messages ---------------------------------------------------------------------------------------------------------


def _history(before: Outline, after: Outline, effort: Effort) -> Lineage:
    ones, others = before.messages, after.messages
    at = 0
    while at < len(ones) and at < len(others):
        if ones[at].role != others[at].role or not _same(before.shows(at), after.shows(at)):
            break
        at += 1
    if at == len(ones):
        return _EXTENDS
    if at == len(others):
        return _RETRY
    asked = all(message.role != "assistant" for message in others[at:])
    told = _in_message(before, after, at, effort) if not asked else None
    if told is not None:
        return told
    cause = _rewritten(ones, others, at, asked)
    if isinstance(cause, Lineage):
        return cause
    part, one, other = _first_piece(before, after, at)
    same = common(one, other)
    place = Place(part, ones[at].role, before.first + at, same, before.where)
    return Lineage(Relation.BROKEN, broken_at(before, after, cause, place, _up_to(before, after, at), one, other))


def _same(ones: Sequence[Piece], others: Sequence[Piece]) -> bool:
    return len(ones) == len(others) and all(one == other for one, other in zip(ones, others, strict=True))


def _up_to(before: Outline, after: Outline, at: int) -> int:
    """Bytes in front of the first piece of message ``at`` that differs."""
    shared = before.head + sum(map(before.rendered, range(at)))
    for one, other in zip(before.shows(at), after.shows(at), strict=False):
        if one != other:
            break
        shared += weight(one.text)
    return shared


def _first_piece(before: Outline, after: Outline, at: int) -> tuple[Part, str, str]:
    """The first piece of message ``at`` that differs: what it is, and its text in both."""
    ones, others = before.shows(at), after.shows(at)
    for one, other in zip(ones, others, strict=False):
        if one != other:
            return one.part, one.text, other.text if one.part is other.part else ""
    longer = ones if len(ones) > len(others) else others
    more = longer[min(len(ones), len(others))] if len(ones) != len(others) else Piece(Part.TEXT, "")
    return more.part, more.text if longer is ones else "", more.text if longer is others else ""


def _in_message(before: Outline, after: Outline, at: int, effort: Effort) -> Lineage | None:
    """The break, if the message is the same but for its thinking, times, ids or whitespace."""
    one, other = before.messages[at], after.messages[at]
    if one.role != other.role:
        return None
    shared = _up_to(before, after, at)

    def broken(cause: Cause, part: Part, offset: int, texts: tuple[str, str]) -> Lineage:
        place = Place(part, one.role, before.first + at, offset, before.where)
        return Lineage(Relation.BROKEN, broken_at(before, after, cause, place, shared, *texts))

    if one.key == other.key and before.shown <= at < after.shown:
        thought = next((piece.text for piece in one.pieces if piece.part is Part.THINKING), "")
        return broken(Cause.THINKING, Part.THINKING, 0, (thought, ""))
    if one.key == other.key and after.shown <= at < before.shown:
        # Thinking comes back only where the question behind it was taken back.
        return _RETRY
    ones, others = before.shows(at), after.shows(at)
    if [piece.part for piece in ones] != [piece.part for piece in others]:
        return None
    found: tuple[Part, Difference, tuple[str, str]] | None = None
    for left, right in zip(ones, others, strict=True):
        told = difference(left.text, right.text, effort)
        if told is None:
            continue
        if found is not None and effort.enough:
            break
        if told.cause is None or left.part is Part.MEDIA:
            return None
        found = found or (left.part, told, (left.text, right.text))
    if found is None or found[1].cause is None:
        return None
    return broken(found[1].cause, found[0], found[1].start, found[2])


_SUMMARY = re.compile(
    r"\b(?:summary|summari[sz]ed?|compacted|condensed|continued from a previous|conversation so far|earlier conversation"
    r"|previous conversation|ran out of context|truncated)\b|总结|摘要|概括",
    re.IGNORECASE,
)


def _summarises(message: Message, instead: Message) -> bool:
    """Whether it says, in what the one that it stands instead of does not say, that it stands for others."""
    known = set(instead.pieces)
    new = [piece.text for piece in message.pieces if piece.part is Part.TEXT and piece not in known]
    return any(_SUMMARY.search(text, 0, 4096) for text in new[:SAYING])


def _kept(ones: Sequence[Message], others: Sequence[Message]) -> tuple[int, int]:
    """(messages, place): how many of the last of ``ones`` stand together in ``others``, and where the first of them does."""
    last = ones[-1].key
    for place in range(len(others) - 1, -1, -1):
        if others[place].key != last:
            continue
        kept = 1
        while kept < len(ones) and kept <= place and others[place - kept].key == ones[-1 - kept].key:
            kept += 1
        return kept, place - kept + 1
    return 0, len(others)


def _rewritten(ones: Sequence[Message], others: Sequence[Message], at: int, asked: bool) -> Cause | Lineage:
    """What became of a history whose first message that differs is ``at``; ``asked``: no answer is behind that."""
    rest, others = ones[at:], others[at:]
    kept, place = _kept(rest, others)
    size = sum([message.weight for message in ones])
    said = size - sum([message.weight for message in rest])
    summary = any(_summarises(message, rest[0]) for message in others[: place + 1][:2])
    if kept:
        # Many short ones that end alike are no sign.
        gone, put = rest[: len(rest) - kept], others[:place]
        left = size - sum([message.weight for message in gone]) + sum([message.weight for message in put])
        if len(gone) > len(put) and (at == 0 or left < SHORTER * size or (summary and put)):
            return Cause.COMPACTED
        return Cause.REWRITTEN
    shorter = said + sum([message.weight for message in others]) < SHORTER * size
    if summary and shorter and len(rest) > 1:
        return Cause.COMPACTED
    if asked:
        return _BRANCH if at == 0 and any(message.role == "assistant" for message in rest) else _RETRY
    if at == 0 and not _overlaps(rest, others):
        return _BRANCH
    return Cause.COMPACTED if shorter and len(others) < len(rest) else Cause.REWRITTEN


def _overlaps(ones: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether both say so much alike that they are one conversation: many have a short message in common."""
    known = {message.key for message in ones}
    alike = sum([message.weight for message in others if message.key in known])
    return alike > ALIKE * min(sum([each.weight for each in messages]) for messages in (ones, others))


def _continues(before: Outline, after: Outline, effort: Effort) -> bool:
    """Whether both are of one conversation, whatever stands in front of it."""
    ones, others = before.messages, after.messages
    if not ones or not others:
        return not ones and not others
    one, other = ones[0], others[0]
    if one.key == other.key or _overlaps(ones, others):
        return True
    if one.role == other.role and len(one.pieces) == len(other.pieces):
        pieces = zip(one.pieces, other.pieces, strict=True)
        told = (difference(left.text, right.text, effort) for left, right in pieces if left != right)
        if all(each is None or each.cause is not None for each in told):
            return True
    return len(ones) > 2 and _summarises(other, one)


# -- prompts that are one text ----------------------------------------------------------------------------------------


def _texts(before: Outline, after: Outline, effort: Effort) -> Lineage:
    one, other = before.text, after.text
    if one is None or other is None:
        return _BRANCH
    if other.startswith(one):
        return _EXTENDS
    at = common(one, other)
    if at == len(other):
        return _RETRY
    begin = one.rfind("\n", 0, at) + 1
    ends = [text.find("\n", at) for text in (one, other)]
    lines = [text[begin:] if end < 0 else text[begin:end] for text, end in zip((one, other), ends, strict=True)]
    told = difference(lines[0], lines[1], effort)
    follows = ends[0] >= 0 and ends[1] >= 0 and other.startswith(one[ends[0] : ends[0] + 512], ends[1])
    cause = told.cause if told is not None else None
    if cause is None or not (follows or ends[0] < 0):
        if 2 * at < min(len(one), len(other)):
            # Little in common: a time in a line of its own does not make two prompts one.
            return _BRANCH
        if ends[0] < 0:
            return _RETRY
        cause, start = Cause.OTHER, at
    else:
        start = begin + (told.start if told is not None else 0)
    place = Place(Part.TEXT, "", None, start)
    return Lineage(Relation.BROKEN, broken_at(before, after, cause, place, 0, one, other))
