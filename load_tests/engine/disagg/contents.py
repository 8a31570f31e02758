"""What KV was really computed from, where that is not what its tokens say.

A block is found by the tokens that it is filed under. KV that came from another engine is filed under the prompt of
whoever asked for it, whatever it was computed from: nobody compares the two. This remembers the blocks where they
differ, so that an answer can be made from the KV that is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MOST_BLOCKS = 65_536


class Contents:
    """By whole blocks of ``block_size`` tokens. Costs nothing while every block holds what it says."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._foreign: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Blocks whose KV was computed from other tokens."""
        return len(self._foreign)

    def seen(self, namespace: str, tokens: Sequence[int], hit: int) -> list[int]:
        """The tokens that the KV of the first ``hit`` tokens was computed from."""
        known = list(tokens[:hit])
        if self._foreign:
            for start, key, _ in self._blocks(namespace, tokens, hit):
                if key in self._foreign:
                    known[start : start + self._size] = self._foreign[key]
        return known

    def write(self, namespace: str, tokens: Sequence[int], seen: Sequence[int], start: int) -> None:
        """From position ``start`` on, the KV filed under ``tokens`` is new and was computed from ``seen``."""
        for place, key, block in self._blocks(namespace, tokens, len(seen)):
            if place + self._size <= start:
                continue
            really = tuple(seen[place : place + self._size])
            if really == block:
                self._foreign.pop(key, None)
            else:
                self._foreign[key] = really
                self._foreign.move_to_end(key)
        while len(self._foreign) > MOST_BLOCKS:
            self._foreign.popitem(last=False)

    def clear(self) -> None:
        self._foreign.clear()

    def _blocks(self, namespace: str, tokens: Sequence[int], upto: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(first position, key, tokens) of every whole block before ``upto``; a key names all that comes before."""
        key = hash(namespace)
        for start in range(0, upto // self._size * self._size, self._size):
            block = tuple(tokens[start : start + self._size])
            key = hash((key, block))
            yield start, key, block
