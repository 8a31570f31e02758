"""What stands in front of the messages: template parameters, tools, the system prompt; and how that of two prompts differs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kv_index.causes import EQUAL, Cause, Difference, Effort, common, difference
from kv_index.outlines import Outline, Part, Place, Tool, weight


class Break(NamedTuple):
    """The first break of a prompt from the one before it; sizes are bytes of what is rendered."""

    cause: Cause
    place: Place
    shared: int
    """In front of the first character that differs."""
    before: int
    after: int
    texts: tuple[str, str] = ("", "")
    """The part in both, ..."""
    at: int = 0
    """... and where it differs first."""


SPELLED = 2
"""Characters of a tool that are one step where its values are taken apart."""


def alike(before: Outline, after: Outline) -> int:
    """Bytes in front of the first part that differs, and of that what both have; costs next to nothing."""
    if before.parameters != after.parameters:
        return 0
    shared = 0
    for ones, others in (
        ([t.text for t in before.tools], [t.text for t in after.tools]),
        (before.system, after.system),
    ):
        for one, other in zip(ones, others, strict=False):
            if one != other:
                return shared + weight(one[: common(one, other)])
            shared += weight(one)
        if len(ones) != len(others):
            break
    return shared


def heads(before: Outline, after: Outline, effort: Effort) -> Iterator[Break]:
    """Each part that differs, first ones first: parameters, tools, the system prompt."""
    for name in sorted(before.parameters.keys() | after.parameters.keys()):
        one, other = before.parameters.get(name, ""), after.parameters.get(name, "")
        if one != other:
            told = difference(one, other, effort)
            cause = told.cause if told is not None and one and other else None
            if cause not in (Cause.TIME, Cause.ID):
                cause = Cause.PARAMETERS
            # Where a template renders it is not known.
            yield broken_at(before, after, cause, Place(Part.PARAMETER, name), 0, one, other)._replace(shared=0)
    if [tool.text for tool in before.tools] != [tool.text for tool in after.tools]:
        yield _tools(before, after, effort)
    if before.system != after.system and "".join(before.system) != "".join(after.system):
        yield _system(before, after, effort)


def broken_at(
    before: Outline, after: Outline, cause: Cause, place: Place, shared: int, one: str = "", other: str = ""
) -> Break:
    """The break in a part; ``shared``: bytes in front of it; ``one``, ``other``: it in both."""
    at = common(one, other)
    return Break(cause, place, shared + weight(one[:at]), before.size, after.size, (one, other), at)


def _tools(before: Outline, after: Outline, effort: Effort) -> Break:
    ones, others = before.tools, after.tools
    at = next((at for at, (one, other) in enumerate(zip(ones, others, strict=False)) if one.text != other.text), None)
    if at is None:
        at = min(len(ones), len(others))
    one = ones[at] if at < len(ones) else None
    other = others[at] if at < len(others) else None
    cause, offset = _tools_cause(ones, others, effort)
    shared = sum([weight(tool.text) for tool in ones[:at]])
    named = one or other
    place = Place(Part.TOOL, named.name if named is not None else "", at, offset)
    return broken_at(before, after, cause, place, shared, one.text if one else "", other.text if other else "")


def _tools_cause(ones: Sequence[Tool], others: Sequence[Tool], effort: Effort) -> tuple[Cause, int | None]:
    """Why they differ, and where in the first that does; no character is told where whole tools moved."""
    if sorted([tool.text for tool in ones]) == sorted([tool.text for tool in others]):
        return Cause.TOOLS_REORDERED, None
    if len(ones) != len(others):
        return Cause.TOOLS_CHANGED, None
    # What is equal adds the same to both sides.
    pairs = [(tool, fellow) for tool, fellow in zip(ones, others, strict=True) if tool.text != fellow.text]
    at = common(pairs[0][0].text, pairs[0][1].text)
    if not effort.take(sum([len(tool.text) + len(fellow.text) for tool, fellow in pairs]) // EQUAL):
        return Cause.TOOLS_CHANGED, at if pairs[0][0].name == pairs[0][1].name else None
    plain, plains = [_sorted(tool) for tool, _ in pairs], [_sorted(fellow) for _, fellow in pairs]
    if sorted(plain) == sorted(plains):
        moved = [tool.name for tool, _ in pairs] != [fellow.name for _, fellow in pairs]
        return Cause.TOOLS_REORDERED, None if moved else at
    return _values_of_tools(pairs, [one == other for one, other in zip(plain, plains, strict=True)], effort)


def _values_of_tools(
    pairs: Sequence[tuple[Tool, Tool]], moved: Sequence[bool], effort: Effort
) -> tuple[Cause, int | None]:
    """The cause if it is the same kind of value in all of them; ``moved``: they differ in the order of their keys."""
    found: tuple[Cause, int | None] | None = None
    for (tool, fellow), reordered in zip(pairs, moved, strict=True):
        if reordered:
            # Order too: two things at once are an edit.
            return Cause.TOOLS_CHANGED, None
        told = difference(tool.text.replace("\\n", "\n "), fellow.text.replace("\\n", "\n "), effort)
        cause = told.cause if told is not None else None
        if cause is None and effort.take((len(tool.text) + len(fellow.text)) // SPELLED):
            cause = Cause.WHITESPACE if _loose(tool) == _loose(fellow) else None
        if cause is None or told is None:
            if found is not None and effort.enough:
                break
            return Cause.TOOLS_CHANGED, told.at if told is not None and tool.name == fellow.name else None
        found = found or (cause, told.start)
    return found or (Cause.OTHER, None)


def _sorted(tool: Tool) -> str:
    return json.dumps(tool.value, sort_keys=True)


def _loose(tool: Tool) -> str:
    """With whole numbers, and whitespace, in one form."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return " ".join(value.split())
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return json.dumps(plain(tool.value))


def _system(before: Outline, after: Outline, effort: Effort) -> Break:
    ones, others = before.system, after.system
    shared = sum([weight(tool.text) for tool in before.tools])
    index = None
    if len(ones) != len(others):
        one, other = "\n".join(ones), "\n".join(others)
        told = difference(one, other, effort)
    else:
        one, other, told, index = _system_part(ones, others, effort)
        shared += sum([weight(text) for text in ones[: index or 0]])
    cause = told.cause if told is not None and told.cause is not None else Cause.SYSTEM_CHANGED
    if not one or not other:
        cause = Cause.SYSTEM_CHANGED
    offset = None if told is None else told.start
    place = Place(Part.SYSTEM, "", index if len(ones) > 1 else None, offset)
    return broken_at(before, after, cause, place, shared, one, other)


def _system_part(ones: Sequence[str], others: Sequence[str], effort: Effort) -> tuple[str, str, Difference | None, int]:
    """The first text that differs, and how: by words if any of them does."""
    found: tuple[str, str, Difference, int] | None = None
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        told = difference(one, other, effort)
        if told is None:
            continue
        if found is None:
            found = one, other, told, index
        if told.cause is None and found[2].cause is not None:
            if effort.enough:
                break
            found = found[0], found[1], Difference(None, found[2].at, found[2].at), found[3]
        if found[2].cause is None:
            break
    return found or ("", "", None, 0)
