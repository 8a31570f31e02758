"""What a request says of how it is to be queued: how long it may take to begin, and a lower priority than its tenant's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf

from gateway.errors import BadRequest

LONGEST = 86_400.0
"""Seconds that a client may give."""
_TIMEOUT = re.compile(rb"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h)?")
_UNITS = {b"ms": 1e-3, b"s": 1.0, b"m": 60.0, b"h": 3600.0, None: 1.0}


def until(named: Mapping[bytes, bytes], now: float) -> float:
    """When the time that the client gave is over; infinite if it gave none. Raises `BadRequest`."""
    told = named.get(b"x-request-timeout")
    if told is None:
        return inf
    found = _TIMEOUT.fullmatch(told.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found is not None else 0.0
    if not 0 < seconds <= LONGEST:
        raise BadRequest(
            f"x-request-timeout must be seconds above 0, at most {LONGEST:.0f}, like 30, 2.5s or 500ms",
            param="x-request-timeout",
        )
    return now + seconds


def level(named: Mapping[bytes, bytes], place: int, levels: Mapping[str, int]) -> int:
    """Place of its priority among ``levels``: ``place``, its tenant's, or a lower one that it names. Raises `BadRequest`."""
    told = named.get(b"x-warmroute-priority")
    if told is None:
        return place
    wished = levels.get(told.decode("latin-1"))
    if wished is None:
        raise BadRequest(f"x-warmroute-priority must be one of {', '.join(levels)}", param="x-warmroute-priority")
    return max(place, wished)
