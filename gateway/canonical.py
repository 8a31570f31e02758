"""Canonical prompts: the same tools and the same system prompt in the same bytes, so that their prefix is shared.

Only ``tools`` and the leading system text are touched; every other value keeps its bytes. What is done leaves alone whatever
could mean something else:

* Values of ``enum``, ``const``, ``default``, ``examples``, ``required`` and ``prefixItems`` stay as they are.
* Where answers are generated along a schema (``strict`` tools, and all tools when ``tool_choice`` demands a call), they come
  in the order of its properties: that order stays.
* ``tool_choice`` names tools, never their places, so they may be sorted; not where two have one name, and not where
  ``cache_control`` marks how far a prefix reaches.
* An object that names a member twice, a schema of more levels than `DEEPEST`, and a body that is not understood stay as
  they are.
"""

import json
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from gateway.dialects.anthropic import BILLING

STEPS = ("json", "tools", "volatile")
"""In the order in which they are done:

``json``: numbers, escapes and whitespace of ``tools`` in one form (1.0 is 1); ``tools``: sorted by name, and so are the keys
in their schemas; ``volatile``: lines at the head of the system prompt that are known to change and to tell the model nothing
(Claude Code's billing line).
"""
ALL = frozenset(STEPS)
DEEPEST = 64
"""Levels of a schema."""
KEPT = 128 * 1024
"""Bytes of tools, up to which what was made of them is remembered: they are the same for many requests, ..."""
REMEMBERED = 64
"""... and of so many at most."""

_VERBATIM = frozenset(("enum", "const", "default", "examples", "example", "required", "prefixItems"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_ORDERED = frozenset(("properties", "patternProperties"))
_ONE = frozenset(
    "items additionalProperties additionalItems contains not if then else propertyNames unevaluatedItems "
    "unevaluatedProperties contentSchema".split()
)
_SEVERAL = frozenset(("anyOf", "allOf", "oneOf"))
_SCHEMAS = ("parameters", "input_schema")

_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])


class _Left(Exception):
    """This is to be left as it is."""


class _Number(str):
    """A number as it was written."""

    __slots__ = ()


def canonical(kind: str, body: bytes, steps: frozenset[str]) -> tuple[bytes, tuple[str, ...]]:
    """The canonical body of a request of that kind, and the steps that changed something; without any, the same object.

    Raises `ValueError` for a step that is not one of `STEPS`.
    """
    unknown = steps.difference(STEPS)
    if unknown:
        raise ValueError(f"canonical: no step {min(unknown)!r}; the steps are {', '.join(STEPS)}")
    if not steps:
        return body, ()
    try:
        members = _members.decode(body)
        changed: dict[str, bytes] = {}
        done: list[str] = []
        tools = members.get("tools")
        if tools is not None and _opens(tools, b"["):
            ordered = _demands(members.get("tool_choice"))
            make = _remembered if len(memoryview(tools)) <= KEPT else _tools
            found, done = make(bytes(tools), steps & {"json", "tools"}, ordered)
            if done:
                changed["tools"] = found
        if "volatile" in steps:
            without = _without_volatile(kind, members)
            if without:
                changed |= without
                done = [*done, "volatile"]
        if not changed or _twice(body, members, changed):
            return body, ()
    except (ValueError, UnicodeError, RecursionError):
        return body, ()
    parts = [_name(name) + b":" + changed.get(name, bytes(raw)) for name, raw in members.items()]
    return b"{" + b",".join(parts) + b"}", tuple(done)


def _name(name: str) -> bytes:
    return msgspec.json.encode(name)


def _demands(choice: Raw | None) -> bool:
    """Whether ``tool_choice`` demands a call, so that arguments are generated along the schema."""
    if choice is None:
        return False
    told = msgspec.json.decode(choice)
    if isinstance(told, dict):
        told = told.get("type", "required")
    return told not in (None, "auto", "none")


def _twice(body: bytes, members: dict[str, Raw], changed: dict[str, bytes]) -> bool:
    """Whether a member that is to change is there twice."""
    told = sum([len(memoryview(raw)) for raw in members.values()]) + sum([len(name.encode()) + 4 for name in members])
    if told + 1 == len(body):
        # There is no room for another.
        return False
    if all(body.count(b'"' + name.encode() + b'"') < 2 for name in changed) and b"\\u" not in body:
        return False
    top: list[list[str]] = [[]]

    def outermost(pairs: list[tuple[str, Any]]) -> None:
        top[0] = [name for name, _ in pairs]

    json.loads(body, object_pairs_hook=outermost)
    return any(top[0].count(name) > 1 for name in changed)


# -- tools ------------------------------------------------------------------------------------------------------------


def _tools(tools: bytes, steps: frozenset[str], ordered: bool) -> tuple[bytes, list[str]]:
    """The tools after those steps, and which of them changed something."""
    done: list[str] = []
    try:
        tree = json.loads(tools, object_pairs_hook=_once, parse_int=_Number, parse_float=_Number, parse_constant=_no)
        if not isinstance(tree, list) or not all(isinstance(tool, dict) for tool in tree):
            return tools, done
        if "json" in steps:
            found = _written(tree, None, 0).encode()
            if found != tools:
                tools, done = found, ["json"]
        if "tools" in steps:
            found = _sorted_tools(tools, ordered)
            if found is not tools:
                tools, done = found, [*done, "tools"]
    except (_Left, ValueError, UnicodeError, RecursionError):
        return tools, done
    return tools, done


_remembered = lru_cache(REMEMBERED)(_tools)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Left
    return found


def _no(constant: str) -> None:
    raise _Left


def _written(value: Any, literal: bool | None, level: int) -> str:
    """``value`` as compact JSON; ``literal``: numbers stay as they were written; ``None``: until a schema begins."""
    if level > DEEPEST:
        raise _Left
    if isinstance(value, _Number):
        return _number(value) if literal is False else value
    if isinstance(value, dict):
        parts = []
        for name, each in value.items():
            as_is = True if name in _VERBATIM else literal
            if literal is None and name in _SCHEMAS:
                as_is = False
            parts.append(f"{json.dumps(name, ensure_ascii=False)}:{_written(each, as_is, level + 1)}")
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join([_written(each, literal, level + 1) for each in value]) + "]"
    return json.dumps(value, ensure_ascii=False)


def _number(text: str) -> str:
    """A whole number without a fraction or an exponent; others as they were written."""
    if text.lstrip("-").isdigit():
        return text
    value = float(text)
    if not value.is_integer() or abs(value) >= 2**53 or (value == 0 and text.startswith("-")):
        return text
    return str(int(value))


def _sorted_tools(tools: bytes, ordered: bool) -> bytes:
    """The same object if all is sorted."""
    found = []
    names = []
    marked = False
    for raw in _items.decode(tools):
        members = _members.decode(raw)
        function = members.get("function")
        inner = _members.decode(function) if function is not None and _is_object(function) else members
        named = inner.get("name", members.get("type"))
        names.append(str(msgspec.json.decode(named)) if named is not None else "")
        marked = marked or "cache_control" in members
        strict = ordered or any(_true(each.get("strict")) for each in (members, inner))
        found.append(_sorted_tool(raw, members, strict))
    order = list(range(len(found)))
    if len(set(names)) == len(names) and not marked:
        order.sort(key=names.__getitem__)
    if order == sorted(order) and all(not isinstance(each, bytes) for each in found):
        return tools
    return b"[" + b",".join([bytes(found[at]) for at in order]) + b"]"


def _opens(raw: Raw | bytes, mark: bytes) -> bool:
    return bytes(memoryview(raw)[:1]) == mark


def _is_object(raw: Raw | bytes) -> bool:
    return _opens(raw, b"{")


def _true(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw) == b"true"


def _sorted_tool(raw: Raw, members: dict[str, Raw], strict: bool) -> Raw | bytes:
    """``bytes`` if something moved, else ``raw``."""
    new: dict[str, Raw | bytes] = {}
    for name, value in members.items():
        if not _is_object(value):
            new[name] = value
        elif name == "function":
            new[name] = _sorted_tool(value, _members.decode(value), strict)
        else:
            new[name] = _schema(value, strict, 0) if name in _SCHEMAS else value
    return _joined(raw, new, sort=True)


def _joined(raw: Raw, new: dict[str, Raw | bytes], sort: bool) -> Raw | bytes:
    names = sorted(new) if sort else list(new)
    if names == list(new) and all(not isinstance(each, bytes) for each in new.values()):
        return raw
    return b"{" + b",".join([_name(name) + b":" + bytes(new[name]) for name in names]) + b"}"


def _schema(raw: Raw, strict: bool, level: int) -> Raw | bytes:
    """A schema with sorted keys: ``bytes`` if something moved, else ``raw``."""
    if level > DEEPEST:
        raise _Left
    if not _is_object(raw):
        return raw
    new: dict[str, Raw | bytes] = {}
    for name, value in _members.decode(raw).items():
        if name in _NAMED and _is_object(value):
            named = {each: _schema(told, strict, level + 1) for each, told in _members.decode(value).items()}
            new[name] = _joined(value, named, sort=not (strict and name in _ORDERED))
        elif name in _ONE:
            new[name] = _schema(value, strict, level + 1)
        elif name in _SEVERAL and _opens(value, b"["):
            each = [_schema(told, strict, level + 1) for told in _items.decode(value)]
            moved = any(isinstance(told, bytes) for told in each)
            new[name] = b"[" + b",".join(map(bytes, each)) + b"]" if moved else value
        else:
            new[name] = value
    return _joined(raw, new, sort=True)


# -- the system prompt ------------------------------------------------------------------------------------------------


def _without_volatile(kind: str, members: dict[str, Raw]) -> dict[str, bytes]:
    """The members that hold the system prompt, without lines that are known to change; empty if there are none."""
    name = {"messages": "system", "responses": "instructions", "chat": "messages"}.get(kind)
    raw = members.get(name) if name is not None else None
    if name is None or raw is None or BILLING.encode() not in bytes(raw):
        return {}
    found = _chat(raw) if kind == "chat" else _content(raw, whole=True)
    return {} if found is None else {name: found}


def _chat(raw: Raw) -> bytes | None:
    """The messages with their first one cut, if it is the system's."""
    listed: list[Raw | bytes] = [*_items.decode(raw)]
    if not listed:
        return None
    first = _members.decode(listed[0])
    role = first.get("role")
    if role is None or msgspec.json.decode(role) not in ("system", "developer") or "content" not in first:
        return None
    content = _content(first["content"], whole=False)
    if content is None:
        return None
    parts = [_name(name) + b":" + (content if name == "content" else bytes(each)) for name, each in first.items()]
    listed[0] = b"{" + b",".join(parts) + b"}"
    return b"[" + b",".join(map(bytes, listed)) + b"]"


def _content(raw: Raw, whole: bool) -> bytes | None:
    """A text, or the first of a list of text blocks, without its billing line; ``None``: it has none.

    ``whole``: engines leave out such a block with whatever else it says, so one that says more stays.
    """
    if _opens(raw, b'"'):
        rest = _rest(msgspec.json.decode(raw))
        return None if rest is None else msgspec.json.encode(rest)
    if not _opens(raw, b"["):
        return None
    listed: list[Raw | bytes] = [*_items.decode(raw)]
    if not listed or not _is_object(listed[0]):
        return None
    block = _members.decode(listed[0])
    rest = _rest(msgspec.json.decode(block["text"])) if "text" in block else None
    if rest is None:
        return None
    if rest and whole:
        return None
    if rest:
        parts = [
            _name(name) + b":" + (msgspec.json.encode(rest) if name == "text" else bytes(each))
            for name, each in block.items()
        ]
        listed[0] = b"{" + b",".join(parts) + b"}"
    elif block.keys() <= {"type", "text"} and len(listed) > 1:
        del listed[0]
    else:
        return None
    return b"[" + b",".join(map(bytes, listed)) + b"]"


def _rest(text: Any) -> str | None:
    if not isinstance(text, str) or not text.startswith(BILLING):
        return None
    return text.partition("\n")[2]
