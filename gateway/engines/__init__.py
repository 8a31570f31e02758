"""What each kind of engine says of itself and how. One engine a file.

An engine is an object called ``ENGINE`` in a module of this package. ``read`` asks a worker for its facts and answers
``None`` when the worker is not of its kind; ``load`` reads its load, ``counts`` what it counts of its cache. All get `Ask`,
which never raises for a status: a path that is not there is an answer too. What an engine does not say stays ``None``.
"""

import re
from collections.abc import Awaitable, Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol

import msgspec

from gateway.workers import Facts, Load, ServedModel


class Answer(NamedTuple):
    """One answer of a worker's control surface."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON if the status is 200, else ``None``."""
        if self.status != 200:
            return None
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None


class Counts(NamedTuple):
    """What a worker counted of its prefix cache since it started, in tokens, all ranks together."""

    prompt: int
    cached: int
    """Found on the device or below it."""
    brought: int = 0
    """Of those, what may have been sent by another worker: on one that decodes for others that is no hit."""
    aborted: int | None = None
    """Requests that it stopped because nobody wanted them any more."""


Ask = Callable[[str], Awaitable[Answer]]
"""GET a path of the worker. Raises `gateway.errors.WorkerFault` if there is no answer."""


class Engine(Protocol):
    """Reads one kind of engine."""

    name: str
    rank: int
    """Order in which kinds are tried: the most telling first."""
    health: str
    """Path that says whether it serves."""

    async def read(self, ask: Ask) -> Facts | None:
        """Its facts, or ``None`` if it is of another kind."""
        ...

    async def load(self, ask: Ask) -> list[Load] | None:
        """Its load, a report for each rank; ``None`` if it does not tell."""
        ...

    async def counts(self, ask: Ask) -> Counts | None:
        """What it counts of its cache; ``None`` if it does not tell."""
        ...


def all_engines() -> dict[str, Engine]:
    """Every engine of this package by name, in the order in which kinds are tried."""
    found: list[Engine] = []
    for module in iter_modules(__path__):
        engine = getattr(import_module(f"{__name__}.{module.name}"), "ENGINE", None)
        if engine is not None:
            found.append(engine)
    return {engine.name: engine for engine in sorted(found, key=lambda engine: engine.rank)}


async def served_models(ask: Ask) -> list[ServedModel] | None:
    """``/v1/models``; ``None`` if there is no such list."""
    listed = (await ask("/v1/models")).json()
    rows = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(rows, list):
        return None
    models = []
    for row in rows:
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            models.append(ServedModel(row["id"], _text(row.get("parent")), whole(row.get("max_model_len")), row))
    return models


def owner(models: list[ServedModel]) -> str:
    """``owned_by`` of the first model."""
    return str(models[0].listing.get("owned_by", "")) if models else ""


def whole(value: Any) -> int | None:
    """A non-negative integer, also out of a string or a whole float; else ``None``."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 18 else None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, float) and 0 <= value < 1e18 and value == int(value):
        return int(value)
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_SAMPLE = re.compile(rb"(?:\{([^}\n]*)\})?[ \t]+([^ \t\r\n]+)")
NEW_LINE = 0x0A


def gauge(text: bytes, name: str) -> dict[str, float]:
    """Values of one metric in a Prometheus exposition: label text -> value. Reads only the lines it needs."""
    found: dict[str, float] = {}
    wanted = name.encode()
    at = text.find(wanted)
    # Pages are long and lines few: searching for the name's bytes alone is what a busy event loop can afford.
    while at >= 0:
        match = _SAMPLE.match(text, at + len(wanted)) if not at or text[at - 1] == NEW_LINE else None
        if match is not None:
            try:
                found[(match[1] or b"").decode("utf-8", "replace")] = float(match[2])
            except ValueError:
                pass
        at = text.find(wanted, at + len(wanted))
    return found


def label(labels: str, name: str) -> str | None:
    """The value of one label in a label text."""
    match = re.search(rf'(?:^|,)\s*{re.escape(name)}="((?:[^"\\]|\\.)*)"', labels)
    return match[1] if match else None


def summed(text: bytes, name: str, only: str = "") -> int | None:
    """One counter over all its labels, those that have ``only`` in them; ``None`` if it is not there at all."""
    found = gauge(text, name)
    return whole(sum(value for labels, value in found.items() if only in labels)) if found else None


def by_rank(text: bytes, name: str, rank_label: str) -> dict[int, float]:
    """Values of one gauge by rank, summed over other labels; rank 0 where the label is missing."""
    found: dict[int, float] = {}
    for labels, value in gauge(text, name).items():
        rank = whole(label(labels, rank_label)) or 0
        found[rank] = found.get(rank, 0.0) + value
    return found
