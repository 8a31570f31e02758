"""All targets by name."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple
from zlib import crc32


class Target(NamedTuple):
    """``run`` raises for what must not be; ``seeds`` are whole inputs, ``words`` what mutations insert."""

    run: Callable[[bytes], None]
    seeds: list[bytes]
    words: list[bytes]


def cuts(data: bytes) -> list[bytes]:
    """``data`` in pieces, always the same ones for the same data."""
    random = Random(crc32(data))
    pieces, at = [], 0
    while at < len(data):
        size = random.choice((1, 1, 2, 3, 7, 40, 400))
        pieces.append(data[at : at + size])
        at += size
    return pieces


def all_targets() -> dict[str, Target]:
    """Name -> target."""
    # Not at the head: both import the above.
    from tests.fuzz import texts, wire

    return {**wire.TARGETS, **texts.TARGETS}
