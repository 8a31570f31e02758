"""Which slot of a llama.cpp server holds which session.

Its cache is one sequence a slot, and it chooses a slot by likeness of prompts, which sessions with one system prompt have; a
session that is told its slot finds its own sequence. A slot at work is never waited for while others are free.
"""

from collections import OrderedDict


class Slots:
    """Of one server. Keys are sessions'."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._holds: OrderedDict[int, bytes | None] = OrderedDict.fromkeys(range(count))
        """The longest unused first."""
        self._of: dict[bytes, int] = {}
        self._busy: set[int] = set()

    @property
    def busy(self) -> int:
        """Slots at work that were named."""
        return len(self._busy)

    def take(self, key: bytes) -> int | None:
        """The slot for a request of that session: its own, or the free one that was unused for longest.

        ``None`` if its own is at work, or all are: then the server chooses.
        """
        own = self._of.get(key)
        if own is None:
            own = next((slot for slot in self._holds if slot not in self._busy), None)
            if own is None:
                return None
            before = self._holds[own]
            if before is not None:
                del self._of[before]
            self._holds[own] = key
            self._of[key] = own
        elif own in self._busy:
            return None
        self._busy.add(own)
        self._holds.move_to_end(own)
        return own

    def done(self, slot: int) -> None:
        """The request that took ``slot`` is over."""
        self._busy.discard(slot)

    def forget(self) -> None:
        """The server started anew."""
        self._holds = OrderedDict.fromkeys(range(self.count))
        self._of.clear()
