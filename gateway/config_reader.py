"""YAML to typed values: every problem with its line, the nearest known key and the cure.

The file is read into YAML's own node tree first, because only that knows lines. Kinds of values are those of dataclass
fields: nested dataclasses, lists, mappings, text, numbers, and the measures below.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

Seconds = Annotated[float, "duration"]
"""Written ``500ms``, ``30s``, ``5m``, ``1h``, or a number of seconds."""
Bytes = Annotated[int, "size"]
"""Written ``64k``, ``64M``, ``1G``, or a number."""
Count = Annotated[int, "count"]
"""Written ``200k``, ``2M``, or a number."""
SEVERAL = "several"
"""Annotates a list: where it has one member, that may be written without the list."""
REST = {"rest": True}
"""Metadata of a dataclass's field that takes the keys which it does not name."""


class Secret(str):
    """A string that never shows itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Problem(NamedTuple):
    """One thing that is wrong."""

    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


def masked(problems: list[Problem], filled: Mapping[str, str]) -> list[Problem]:
    """The same without what variables held: by its name it is found as well, and it may be a secret in the wrong place."""
    found = []
    for problem in problems:
        message = problem.message
        for name, value in filled.items():
            message = message.replace(repr(value), f"'${{{name}}}'")
            if len(value) >= LONG:
                message = message.replace(value, f"${{{name}}}").replace(repr(value)[1:-1], f"${{{name}}}")
        found.append(problem._replace(message=message))
    return found


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, not only the first."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{problem}" for problem in problems))


T = TypeVar("T")
LONG = 6
"""Characters of what is told from other words, wherever it stands."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?\Z")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMG])?\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


class Reader:
    """Walks the node tree, collecting problems and the line of every key."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {}
        self.filled: dict[str, str] = {}
        """What variables held that were read."""

    def wrong(self, node: yaml.Node, key: str, message: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, key, message))

    def build(self, kind: type[T], node: yaml.Node, path: str) -> T | None:
        """A dataclass out of a mapping; ``None`` after a problem."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, path, "a mapping of keys to values is needed here")
            return None
        hints = get_type_hints(kind, include_extras=True)
        rest = [each.name for each in fields(kind) if each.metadata == REST]  # type: ignore[arg-type]
        known = [each.name for each in fields(kind) if each.name not in rest]  # type: ignore[arg-type]
        values: dict[str, Any] = {name: {} for name in rest}
        before = len(self.problems)
        for key_node, value_node in node.value:
            key = str(key_node.value)
            at = f"{path}.{key}" if path else key
            self.lines[at] = key_node.start_mark.line + 1
            if (key in values and key not in rest) or any(key in values[name] for name in rest):
                self.wrong(key_node, at, "this key appears twice")
            elif key not in known and rest:
                values[rest[0]][key] = self.plain(value_node, at)
            elif key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
                self.wrong(key_node, at, f"unknown key{hint}")
            else:
                values[key] = self.value(hints[key], value_node, at)
        for each in fields(kind):  # type: ignore[arg-type]
            if each.default is MISSING and each.default_factory is MISSING and each.name not in values:
                self.wrong(node, path, f"{each.name!r} is missing")
        if len(self.problems) > before:
            return None
        return kind(**values)

    def value(self, hint: Any, node: yaml.Node, path: str) -> Any:
        """A value of type ``hint``; ``None`` after a problem."""
        if get_origin(hint) in (Union, UnionType):
            options = [option for option in get_args(hint) if option is not NoneType]
            if is_null(node) and NoneType in get_args(hint):
                return None
            return self.value(options[0], node, path)
        if get_origin(hint) is Annotated:
            inner, unit = get_args(hint)
            if unit != SEVERAL:
                return self.measure(unit, node, path)
            if isinstance(node, yaml.MappingNode):
                node = yaml.SequenceNode(node.tag, [node], node.start_mark, node.end_mark)
            return self.value(inner, node, path)
        if isinstance(hint, type) and is_dataclass(hint):
            return self.build(hint, node, path)
        if get_origin(hint) is list:
            if not isinstance(node, yaml.SequenceNode):
                self.wrong(node, path, "a list is needed here: [a, b]")
                return None
            (inner,) = get_args(hint)
            return [self.value(inner, item, f"{path}[{at}]") for at, item in enumerate(node.value)]
        if get_origin(hint) is dict:
            return self.mapping(get_args(hint)[1], node, path)
        if hint is Any:
            return self.plain(node, path)
        return self.scalar(hint, node, path)

    def mapping(self, inner: Any, node: yaml.Node, path: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, path, "a mapping of names to values is needed here")
            return {}
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            self.lines[f"{path}.{key}"] = key_node.start_mark.line + 1
            if key in found:
                self.wrong(key_node, f"{path}.{key}", "this key appears twice")
            found[key] = self.value(inner, value_node, f"{path}.{key}")
        return found

    def plain(self, node: yaml.Node, path: str) -> Any:
        """Whatever YAML says, with variables filled in."""
        if isinstance(node, yaml.MappingNode):
            return self.mapping(Any, node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, f"{path}[{at}]") for at, item in enumerate(node.value)]
        text = self.expand(node, path)
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return text
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text

    def expand(self, node: yaml.Node, path: str) -> str:
        """A scalar's text with ``${NAME}`` replaced."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, path, "one value is needed here, not a list or a mapping")
            return ""

        def fill(match: re.Match[str]) -> str:
            value = self.environment.get(match[1])
            if value is None:
                self.wrong(node, path, f"the environment has no {match[1]}: set it, or write the value here")
                return ""
            self.filled[match[1]] = value
            return value

        return _VARIABLE.sub(fill, str(node.value))

    def measure(self, unit: str, node: yaml.Node, path: str) -> float | int | None:
        text = self.expand(node, path)
        if unit == "duration":
            found = duration(text)
            if found is None:
                self.wrong(node, path, f"{text!r} is not a duration: write 500ms, 30s, 5m or 1h")
            return found
        match = _SIZE.match(text)
        if match is None:
            what = "size: write 64k, 64M or 1G" if unit == "size" else "count: write 5000, 200k or 2M"
            self.wrong(node, path, f"{text!r} is not a {what}")
            return None
        base = 1024 if unit == "size" else 1000
        return int(float(match[1]) * base ** " kMG".index(match[2] or " "))

    def scalar(self, kind: Any, node: yaml.Node, path: str) -> Any:
        text = self.expand(node, path)
        if kind is bool:
            if text.lower() in ("true", "yes", "on"):
                return True
            if text.lower() in ("false", "no", "off"):
                return False
            self.wrong(node, path, f"{text!r} is neither true nor false")
            return None
        if is_null(node):
            self.wrong(node, path, "a value is missing")
            return None
        try:
            return kind(text)
        except ValueError:
            self.wrong(node, path, f"{text!r} is not {'a whole number' if kind is int else 'a number'}")
            return None


def duration(text: str) -> float | None:
    """Seconds; ``None`` for what is no duration."""
    match = _DURATION.match(text)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
