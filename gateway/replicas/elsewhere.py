"""Sessions that other gateways serve, until one of them comes here: bytes, found by key or by what was said last."""

from __future__ import annotations

from gateway.replicas.words import Home, home_of


class Elsewhere:
    """At most twice ``most`` sessions: when so many were heard, those that nobody spoke of since are forgotten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        self._ends: dict[bytes, bytes] = {}
        self._old_ends: dict[bytes, bytes] = {}
        """End of what was said -> key."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def put(self, key: bytes, end: bytes, home: bytes) -> None:
        """It is as ``home`` says."""
        self._young[key] = home
        if end:
            self._ends[end] = key
        if len(self._young) > self.most or len(self._ends) > 2 * self.most:
            self._old, self._young = self._young, {}
            self._old_ends, self._ends = self._ends, {}

    def drop(self, key: bytes) -> None:
        """It ended, or is here now."""
        self._young.pop(key, None)
        self._old.pop(key, None)

    def get(self, key: bytes) -> Home | None:
        """The session of a key."""
        found = self._young.get(key) or self._old.get(key)
        return None if found is None else home_of(found)

    def ends_with(self, end: bytes) -> Home | None:
        """The session whose content is known by ``end``."""
        key = self._ends.get(end) or self._old_ends.get(end)
        return None if key is None else self.get(key)
