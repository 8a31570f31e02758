"""What was received, byte for byte, so that a proxy's fidelity can be tested."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

KEPT = 1000


@dataclass(slots=True)
class Received:
    """One request as it came: headers in order, with the case they were sent in."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    size: int
    keys: list[str] = field(default_factory=list)

    def listing(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "path": self.path,
            "headers": [list(pair) for pair in self.headers],
            "size": self.size,
            "keys": self.keys,
        }


class Recorder:
    """A ring of the last KEPT requests, and the last one's body; /sim/* is not recorded."""

    def __init__(self) -> None:
        self.ring: deque[Received] = deque(maxlen=KEPT)
        self.last_body = b""

    def note(self, received: Received, body: bytes) -> None:
        self.ring.append(received)
        self.last_body = body

    def note_keys(self, keys: Iterable[str]) -> None:
        """The keys of the last request's JSON object, known once it is parsed."""
        self.ring[-1].keys = list(keys)

    def last(self) -> dict[str, Any] | None:
        if not self.ring:
            return None
        return {**self.ring[-1].listing(), "body_base64": base64.b64encode(self.last_body).decode()}
