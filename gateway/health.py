"""Health on a listener of its own: a thread with an event loop of its own answers, however busy the gateway's is.

``/healthz`` is 200 while the gateway's event loop has run within the last `stalled` seconds, and 503 once it has not: then
only a restart helps. ``/readyz`` is what the gateway last said of itself. Whoever asks is asked nothing: no more than their
request line is read, and nothing of it but the path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from threading import Event, Thread
from time import monotonic
from typing import Any, cast

from gateway.pressure import Pulse

log = logging.getLogger("warmroute")

MOST = 256
"""Connections at one time: the oldest makes room for the next, or those that say nothing would keep probes out."""
PATIENCE = 5.0
"""Seconds that a connection may take to say what it wants."""
LONGEST = 8192
"""Bytes of a request."""
STARTS = 10.0


class Health:
    """The thread and its listener. ``pulse`` is written by the gateway's thread and only read here."""

    def __init__(
        self, pulse: Pulse, host: str, port: int, stalled: float, listener: socket.socket | None = None
    ) -> None:
        """``listener``: a socket that listens already."""
        self.pulse = pulse
        self.listener = listener
        self.host = host
        self.port = port
        self.stalled = stalled
        self.open: dict[_Asker, None] = {}
        """Connections, the oldest first."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._failed: OSError | None = None
        self._begun = Event()
        self._thread = Thread(target=self._run, name="health", daemon=True)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self.open)

    def start(self) -> None:
        """Listen. Raises `OSError`."""
        self._thread.start()
        if not self._begun.wait(STARTS):
            raise OSError("the health listener did not start in time")
        if self._failed is not None:
            raise self._failed

    def stop(self) -> None:
        """End the thread."""
        if self._loop is not None and self._ended is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(STARTS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._failed = error
        except Exception:
            log.exception("the health listener ended")
        finally:
            self._begun.set()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        given = self.listener
        told: dict[str, Any] = {"host": self.host, "port": self.port} if given is None else {"sock": given}
        server = await self._loop.create_server(lambda: _Asker(self), backlog=256, **told)
        self.port = server.sockets[0].getsockname()[1]
        self._begun.set()
        await self._ended.wait()
        server.close()
        for asker in list(self.open):
            asker.cut()
        # One turn of the loop, for closed transports to say so.
        await asyncio.sleep(0)

    def answer(self, path: bytes) -> tuple[int, dict[str, object]]:
        """Status and body for ``path``."""
        silent = monotonic() - self.pulse.at
        lives = silent < self.stalled
        if path == b"/healthz":
            told = {"status": "ok" if lives else "stalled", "seconds_since_loop": round(silent, 3), **self.pulse.told}
            return (200 if lives else 503), told
        if path == b"/readyz":
            ready = lives and self.pulse.ready
            return (200 if ready else 503), {"ready": ready}
        return 404, {"error": {"message": "there are /healthz and /readyz here"}}


class _Asker(asyncio.Protocol):
    """One connection, one answer."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.data = b""
        self.transport: asyncio.Transport | None = None
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if len(self.health.open) >= MOST:
            next(iter(self.health.open)).cut()
        self.health.open[self] = None
        self.timer = asyncio.get_running_loop().call_later(PATIENCE, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.health.open.pop(self, None)
        self.transport = None
        if self.timer is not None:
            self.timer.cancel()

    def cut(self) -> None:
        """Close it, whatever it was about to say."""
        self.health.open.pop(self, None)
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self.data += data
        if b"\r\n\r\n" not in self.data:
            if len(self.data) > LONGEST:
                self.transport.abort()
            return
        method, _, rest = self.data.split(b"\r\n", 1)[0].partition(b" ")
        status, body = self.health.answer(rest.partition(b" ")[0].partition(b"?")[0])
        if method not in (b"GET", b"HEAD"):
            status, body = 405, {"error": {"message": "GET and HEAD only"}}
        words = {200: b"OK", 404: b"Not Found", 405: b"Method Not Allowed", 503: b"Service Unavailable"}
        text = json.dumps(body).encode()
        head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nCache-Control: no-store\r\n"
        head += b"Allow: GET, HEAD\r\n" if status == 405 else b""
        head += b"Connection: close\r\n\r\n"
        self.transport.write(head % (status, words[status], len(text)) + (b"" if method == b"HEAD" else text))
        self.transport.close()
