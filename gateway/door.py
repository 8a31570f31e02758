"""Connections of the control plane, counted and timed.

aiohttp waits for ever for the first byte of a connection, and for a client that does not take its answer. Here each connection
has a time by which something has to happen on it: a request, the end of one, the next one. One that is late is cut.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

MOST = 256
"""Connections to one address; of more, those go first that are due first."""
SILENT = 15.0
"""Seconds from connecting to the end of the first request's head."""
WORKING = 180.0
"""Seconds that a request may take: reading a configuration from a slow disk, and following it."""
RESTING = 90.0
"""Seconds from one request to the next, with what it takes to send the answer; aiohttp closes what rests for 75."""

Protocol = web.RequestHandler


class Door:
    """Those of one server."""

    def __init__(self) -> None:
        self.server: web.Server | None = None
        self._clock = asyncio.get_running_loop().time
        self._due: dict[Protocol, float] = {}

    def begun(self, protocol: Protocol) -> None:
        """A request came."""
        self._due[protocol] = self._clock() + WORKING

    def ended(self, protocol: Protocol) -> None:
        """Its answer is on its way."""
        self._due[protocol] = self._clock() + RESTING

    def sweep(self) -> None:
        """Twice a second: cut what is late, and what is too much."""
        now = self._clock()
        connections = () if self.server is None else self.server.connections
        self._due = {each: self._due.get(each, now + SILENT) for each in connections}
        late = [each for each, due in self._due.items() if due <= now]
        many = len(self._due) - len(late) - MOST
        if many > 0:
            late += sorted(self._due.keys() - late, key=self._due.__getitem__)[:many]
        for each in late:
            if each.transport is not None:
                each.transport.abort()
