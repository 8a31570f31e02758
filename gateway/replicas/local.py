"""The bus of one host: each gateway publishes on a Unix socket of its own, in a folder that all look into.

Nobody is in the middle, so there is nobody without whom the others could not talk. A socket whose process is gone is taken
away by whoever sees it first.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq

from gateway.replicas.words import Batch

log = logging.getLogger("warmroute")

LOOK = 0.5
"""Seconds between two looks into the folder."""
WAITING = 2000
"""Batches that wait for one that does not read, at most: it misses the rest, and asks for it."""
TURN = 64
"""Batches that are taken in one turn of the loop."""
ALL = b"*"
END = ".bus"


class Local:
    """``heard`` is told every batch that is for all, or for ``who``. Raises `OSError` if nothing can be bound in ``folder``."""

    name = "local"

    def __init__(self, folder: str, who: bytes, heard: Callable[[bytes], None]) -> None:
        self.folder = Path(folder)
        self.who = who
        self._heard = heard
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._own = self.folder / f"{os.getpid()}-{who.hex()}{END}"
        self._peers: set[Path] = set()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Be there."""
        # One that is never started has no thread that would have to be ended.
        self._context = zmq.Context(io_threads=1)
        self._says = self._context.socket(zmq.PUB)
        self._hears = self._context.socket(zmq.SUB)
        for socket in (self._says, self._hears):
            socket.setsockopt(zmq.LINGER, 200)
            socket.setsockopt(zmq.SNDHWM, WAITING)
            socket.setsockopt(zmq.RCVHWM, WAITING)
            socket.setsockopt(zmq.RECONNECT_IVL, 200)
        try:
            self._says.bind(f"ipc://{self._own}")
        except zmq.ZMQError as error:
            raise OSError(f"no socket can be bound in {self.folder}: {error}") from None
        for topic in (ALL, self.who):
            self._hears.setsockopt(zmq.SUBSCRIBE, topic)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._hears.getsockopt(zmq.FD)), self._readable)
        self._look()
        self._task = self._loop.create_task(self._watch(), name="bus")

    async def stop(self) -> None:
        """Be there no more. What was said is still sent, for a moment."""
        context, self._context = self._context, None
        if context is None:
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._loop is not None:
            self._loop.remove_reader(int(self._hears.getsockopt(zmq.FD)))
        self._hears.close(0)
        self._says.close()
        with suppress(OSError):
            self._own.unlink()
        await asyncio.to_thread(context.term)

    def say(self, data: bytes, to: bytes | None, batch: Batch) -> None:
        """To one, or to all. Who does not read misses it."""
        with suppress(zmq.Again):
            self._says.send_multipart((to or ALL, data), zmq.NOBLOCK)

    @property
    def troubled(self) -> str | None:
        """Why it cannot be heard; nobody is in the way here."""
        return None

    # -- reading ----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(TURN):
            try:
                _, batch = self._hears.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except ValueError:
                continue
            self._heard(batch)
        if self._loop is not None:
            self._loop.call_soon(self._readable)

    # -- who is there -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            try:
                self._look()
            except OSError as error:
                log.warning("%s cannot be read: %s", self.folder, error)

    def _look(self) -> None:
        found = set()
        for path in self.folder.glob("*" + END):
            if path == self._own:
                continue
            if _lives(path):
                found.add(path)
            else:
                with suppress(OSError):
                    path.unlink()
        for path in found - self._peers:
            self._hears.connect(f"ipc://{path}")
        for path in self._peers - found:
            with suppress(zmq.ZMQError):
                self._hears.disconnect(f"ipc://{path}")
        self._peers = found


def _lives(path: Path) -> bool:
    """Whether the process that made it does."""
    try:
        os.kill(int(path.name.split("-", 1)[0]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        pass
    return True
