"""Traffic by name: a generator, or a trace's file."""

import os
from pathlib import Path

from load_tests.workloads.chains import Traffic
from load_tests.workloads.generators import GENERATORS
from load_tests.workloads.mooncake import TraceError
from load_tests.workloads.sessions import recorded
from load_tests.workloads.traces import mooncake

GZIP = b"\x1f\x8b"
"""What a gzipped file begins with."""

FOLDER = "WARMROUTE_TRACES"
"""Environment variable that names the folder in which traces are looked for too."""


class NoTraffic(ValueError):
    """TRACE names nothing that can be replayed; the message tells the cure."""


def find(name: str, *, workers: int, seed: int = 0, limit: int | None = None) -> Traffic:
    """The first ``limit`` requests of a generator, of a file in Mooncake's form, or of recorded sessions (gzipped).

    Raises `NoTraffic`. A generator's name wins; ``./agents`` is a file.
    """
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
