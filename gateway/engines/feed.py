"""The order of one engine rank's batches: gaps, duplicates, restarts. No sockets here.

Batches are numbered from 0 at the engine's start. A batch is applied once and in order. One that was missed can be asked for
again (a *replay*), as long as the engine keeps it; where it does not, all that is known of that rank is dropped, for a
removal may be among what was missed. Numbers that begin again are another process: so is one that comes again with other
bytes. Both look like a plain gap when the new process is already past the last number that was seen, so the gateway also
watches the connection and the engine's start time.
"""

from collections import OrderedDict
from enum import Enum

from xxhash import xxh3_64_intdigest

RECENT = 1024
"""Batches whose bytes are remembered, to tell one that comes twice from another one of the same number."""


class Step(Enum):
    """What to do with a batch."""

    APPLY = "apply"
    SKIP = "skip"
    """It was applied before."""
    REPLAY = "replay"
    """Batches before it are missing: ask for them, from `Feed.wanted` on. It will come with them."""
    RESTARTED = "restarted"
    """Another process: drop what is known, then show it again."""


class Feed:
    """What was seen of one rank."""

    def __init__(self) -> None:
        self.last = -1
        """Number of the last batch that was applied; -1: none."""
        self.complete = False
        """Whether every batch since the engine's start, or since it held nothing, was applied."""
        self._recent: OrderedDict[int, int] = OrderedDict()

    @property
    def wanted(self) -> int:
        """The number of the next batch in order."""
        return self.last + 1

    def show(self, number: int, payload: bytes) -> Step:
        """A batch came. After `Step.APPLY` it counts as applied."""
        if number > self.last:
            if number > self.last + 1:
                return Step.REPLAY
            self._took(number, payload)
            return Step.APPLY
        if self._recent.get(number) == xxh3_64_intdigest(payload):
            return Step.SKIP
        return Step.RESTARTED

    def remembers(self, number: int) -> bool:
        """Whether a batch of that number can be told from another one."""
        return number in self._recent

    def skip_to(self, number: int) -> None:
        """What is missing before ``number`` cannot be had: go on with it. The history is not whole."""
        self.last = number - 1
        self.complete = False

    def restart(self) -> None:
        """Another process, or nothing is known of it: batches begin again."""
        self.last = -1
        self.complete = False
        self._recent.clear()

    def cleared(self) -> None:
        """The engine holds nothing: what was missed before does not matter."""
        self.complete = True

    def _took(self, number: int, payload: bytes) -> None:
        if not number:
            self.complete = True
        self.last = number
        self._recent[number] = xxh3_64_intdigest(payload)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
