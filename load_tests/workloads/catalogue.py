"""Traffic by name: a generator, or a trace's file."""

import os
from pathlib import Path

from load_tests.workloads.chains import BadScale, Traffic, scaled
from load_tests.workloads.generators import GENERATORS
from load_tests.workloads.mooncake import TraceError
from load_tests.workloads.sessions import recorded
from load_tests.workloads.traces import mooncake

GZIP = b"\x1f\x8b"
"""What a gzipped file begins with."""

FOLDER = "WARMROUTE_TRACES"
"""Environment variable that names the folder in which traces are looked for too."""

FACTORS = ("tokens", "think", "rate")
"""What may be scaled."""


class NoTraffic(ValueError):
    """TRACE names nothing that can be replayed; the message tells the cure."""


def find(name: str, *, workers: int, seed: int = 0, limit: int | None = None) -> Traffic:
    """The first ``limit`` requests of a generator, of a file in Mooncake's form, or of recorded sessions (gzipped).

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
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
        return recorded(path, workers, seed).limited(limit) if packed else mooncake(path, limit, seed)
    except (OSError, TraceError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise NoTraffic(f"TRACE {path}: {reason}") from None


def located(name: str) -> Path:
    """The file of that name, here or in the folder of traces. Raises `NoTraffic`."""
    folder = os.environ.get(FOLDER)
    places = [Path(name)] + ([Path(folder) / name] if folder else [])
    for path in places:
        if path.exists():
            return path
    also = f"nor in {FOLDER} ({folder})" if folder else f"and {FOLDER} names no folder to look in"
    raise NoTraffic(
        f"TRACE {name!r} is no file here, {also}; give the path of a trace in Mooncake's form, or one of the generators: "
        + ", ".join(sorted(GENERATORS))
    )
