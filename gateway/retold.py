"""What passes a pair's answer on where the client's is not the decode engine's as it stands."""

from collections import deque

from gateway.disagg.logprobs import Logprobs, merged_events
from gateway.disagg.nixl import hidden
from gateway.http.relay import Relay

TAPE = 4 * 1024 * 1024
"""Bytes of an answer that are kept whole to learn its token ids."""


class Merged(Relay):
    """Passes events on with what the prefill engine says of the prompt (`gateway.disagg.logprobs`)."""

    __slots__ = ("before",)
    before: Logprobs

    def _send(self, data: bytes) -> None:
        super()._send(merged_events(data, self.before))


class Hiding(Relay):
    """Passes events on without what only the gateway asked for."""

    __slots__ = ("ids",)
    ids: bool

    def shown(self, data: bytes) -> bytes:
        """Without parameters, and without token ids and usage unless the client wants those."""
        return super().shown(hidden(data, self.ids))


class Tape(deque[bytes]):
    """All pieces of an answer, while they are less than a bound; then the last few, as of any other."""

    size = 0

    def append(self, piece: bytes, /) -> None:
        """One more piece."""
        super().append(piece)
        self.size += len(piece)
        if self.size > TAPE:
            while len(self) > 4:
                self.popleft()
