"""Traffic by name: a generator, or a trace's file."""

import json
import os
import zlib
from gzip import GzipFile
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from load_tests.workloads.chains import BadScale, Traffic, scaled
from load_tests.workloads.generators import GENERATORS
from load_tests.workloads.logs import agent_logs, chat_logs, request_in, spans
from load_tests.workloads.mooncake import TraceError
from load_tests.workloads.recordings import MARK, parse as recording
from load_tests.workloads.sessions import parse as sessions
from load_tests.workloads.traces import mooncake_of

GZIP = b"\x1f\x8b"
"""What a gzipped file begins with."""

DOCUMENT = 1 << 28
"""Characters of the longest file that is one JSON document."""

FOLDER = "WARMROUTE_TRACES"
"""Environment variable that names the folder in which traces are looked for too."""

FACTORS = ("tokens", "think", "rate")
"""What may be scaled."""


class NoTraffic(ValueError):
    """TRACE names nothing that can be replayed; the message tells the cure."""


def find(name: str, *, workers: int, seed: int = 0, limit: int | None = None) -> Traffic:
    """The first ``limit`` requests of a generator or of a file, gzipped or not, whose content tells its form: Mooncake's,
    recorded sessions, a gateway's recording, or a log of messages (agents' logs, OpenAI requests, OpenTelemetry spans).

    A name may end in factors of `scaled`: ``agents?tokens=0.5&think=0.1&rate=2``. Raises `NoTraffic`. A generator's name
    wins; ``./agents`` is a file.
    """
    base, mark, options = name.rpartition("?")
    if not mark or Path(name).exists():
        return _found(name, workers, seed, limit)
    factors = _factors(name, options)
    traffic = _found(base, workers, seed, limit)
    try:
        return scaled(traffic, **factors)
    except BadScale as error:
        raise NoTraffic(f"TRACE {name}: {error}") from None


def _factors(name: str, options: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for option in options.split("&"):
        key, _, value = option.partition("=")
        if key not in FACTORS:
            raise NoTraffic(
                f"TRACE {name}: no option {key!r}; after the ? give {', '.join(FACTORS)}, like tokens=0.5&rate=2"
            )
        if key in found:
            raise NoTraffic(f"TRACE {name}: {key} is given twice; give it once")
        try:
            found[key] = float(value)
        except ValueError:
            raise NoTraffic(f"TRACE {name}: {key}={value}: give a number above 0, like {key}=0.5") from None
    return found


def _found(name: str, workers: int, seed: int, limit: int | None) -> Traffic:
    generator = GENERATORS.get(name)
    if generator is not None:
        return generator(workers, seed).limited(limit)
    path = located(name)
    try:
        with _lines(path) as lines:
            form = _form(lines)
        with _lines(path) as lines:
            return _read(form, lines, path.name, workers, seed, limit)
    except (OSError, TraceError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NoTraffic(f"TRACE {path}: {reason}") from None
    except (EOFError, zlib.error):
        raise NoTraffic(f"TRACE {path}: the gzipped file is damaged or ends early: fetch it again") from None


def _lines(path: Path) -> TextIO:
    with path.open("rb") as file:
        packed = file.read(2) == GZIP
    if packed:
        return TextIOWrapper(GzipFile(path), encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


def _read(form: str, lines: TextIO, name: str, workers: int, seed: int, limit: int | None) -> Traffic:
    if form == "mooncake":
        return mooncake_of(lines, name, limit, seed)
    if form == "recording":
        return recording(lines, name).limited(limit)
    if form == "sessions":
        traffic = sessions(lines, name, workers, seed)
    elif form == "spans":
        traffic = spans(lines.read(), name)
    else:
        traffic = agent_logs(lines, name) if form == "agents" else chat_logs(lines, name)
    return traffic.limited(limit)


def _form(lines: TextIO) -> str:
    """What a file is, by its first line or, where that is no JSON, by all of it; where nothing tells, Mooncake's form, whose
    reader then names what is missing."""
    first = next((line for line in lines if line.strip()), "")
    row = _decoded(first)
    if row is None:
        row = _decoded(first + lines.read(DOCUMENT))
    if isinstance(row, list):
        return "spans" if row and isinstance(row[0], dict) and "attributes" in row[0] else "mooncake"
    if not isinstance(row, dict):
        return "mooncake"
    if MARK in row:
        return "recording"
    if "spans" in row:
        return "spans"
    if "chains" in row:
        return "sessions"
    if request_in(row) is not None:
        return "chat"
    return "agents" if "input" in row and "output" in row else "mooncake"


def _decoded(text: str) -> Any:
    """``None`` for what is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def located(name: str) -> Path:
    """The file of that name, here or in the folder of traces. Raises `NoTraffic`."""
    folder = os.environ.get(FOLDER)
    places = [Path(name)] + ([Path(folder) / name] if folder else [])
    for path in places:
        if path.exists():
            return path
    also = f"nor in {FOLDER} ({folder})" if folder else f"and {FOLDER} names no folder to look in"
    raise NoTraffic(
        f"TRACE {name!r} is no file here, {also}; give the path of a trace (Mooncake's form, recorded sessions, a gateway's "
        "recording, message logs) "
        "or one of the generators: " + ", ".join(sorted(GENERATORS))
    )
