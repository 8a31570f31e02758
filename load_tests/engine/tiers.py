"""Host memory and disk below the device: a block that leaves one tier goes to the next, and a hit there is restored.

What is restored is copied: it is on the device again and stays where it was, so that leaving one tier is not leaving
another. Each tier forgets what was not used for longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from load_tests.engine.journal import Journal


class Block(NamedTuple):
    """What an event says of one block: its namespace, the block before it, its tokens, its first position."""

    namespace: str
    parent: bytes | None
    tokens: Sequence[int]
    start: int


class Sources(NamedTuple):
    """Where the tokens of a hit were found."""

    device: int = 0
    host: int = 0
    disk: int = 0


NOWHERE = Sources()


class Tiers:
    """Room is in blocks; 0 means that there is no such tier."""

    def __init__(self, host_room: int, disk_room: int, journal: Journal | None) -> None:
        self._rooms = (host_room, disk_room)
        self._kept: tuple[OrderedDict[bytes, Block], ...] = (OrderedDict(), OrderedDict())
        self._journal = journal

    @property
    def used(self) -> tuple[int, int]:
        """Blocks in host memory and on disk."""
        return len(self._kept[0]), len(self._kept[1])

    def find(self, digest: bytes) -> int | None:
        """0 if the block is in host memory, 1 if it is on disk only, None if it is in neither."""
        return next((tier for tier in (0, 1) if digest in self._kept[tier]), None)

    def use(self, digest: bytes) -> None:
        """The block is restored from where it was found."""
        tier = self.find(digest)
        if tier is not None:
            self._kept[tier].move_to_end(digest)

    def offload(self, digest: bytes, block: Block, tier: int = 0) -> None:
        """The block left the tier above ``tier``."""
        if tier == len(self._rooms):
            return
        if not self._rooms[tier]:
            self.offload(digest, block, tier + 1)
            return
        kept = self._kept[tier]
        if digest in kept:
            kept.move_to_end(digest)
            return
        kept[digest] = block
        if self._journal is not None:
            self._journal.offloaded(digest, block, tier)
        if len(kept) > self._rooms[tier]:
            oldest, content = kept.popitem(last=False)
            if self._journal is not None:
                self._journal.dropped(oldest, tier)
            self.offload(oldest, content, tier + 1)

    def clear(self, tier: int | None = None) -> None:
        """Forget one tier, or both."""
        for number, kept in enumerate(self._kept):
            if tier in (None, number):
                kept.clear()
