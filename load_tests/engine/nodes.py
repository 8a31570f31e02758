"""What a radix tree over tokens is made of."""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[int, ...]


class Node:
    """An edge and what hangs below it: ``key`` is a whole number of pages of tokens, each with its hash if any are."""

    __slots__ = (
        "children",
        "hashes",
        "key",
        "locks",
        "namespace",
        "parent",
        "priority",
        "sessions",
        "start",
        "tails",
        "used",
    )

    def __init__(self, key: Key, parent: Node | None, used: int) -> None:
        self.key = key
        self.parent = parent
        self.used = used
        self.priority = 0
        self.sessions: set[str] = set()
        self.locks = 0
        self.hashes: list[bytes] = []
        self.tails: list[bytes] = []
        self.namespace: str = parent.namespace if parent is not None else ""
        self.start: int = parent.start + len(parent.key) if parent is not None else 0
        self.children: dict[Key, Node] = {}


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, by halving slices: each comparison runs in C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low
