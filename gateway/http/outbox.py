"""Writes of one turn of the event loop, sent together at its end.

Every write wakes whoever reads the other end, and waking a sleeping core costs more than the write. Between two writes of
one turn lies the work for a whole request, long enough for the reader to fall asleep again; written back to back they
wake it once. With one connection active the turn is that connection's, and nothing is delayed.
"""

import asyncio


class Outbox:
    """Collects writes to any number of transports; keeps the order of each."""

    __slots__ = ("_loop", "_writes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._writes: list[tuple[asyncio.Transport, bytes]] = []

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send ``data`` when all events of this turn were handled."""
        if not self._writes:
            self._loop.call_soon(self.flush)
        self._writes.append((transport, data))

    def flush(self) -> None:
        """Send now: before closing a transport whose last bytes may still be here."""
        writes = self._writes
        if not writes:
            return
        self._writes = []
        for transport, data in writes:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception:
                    # One transport's trouble is not the others'; its protocol is told by the loss of its connection.
                    transport.abort()
