"""A real Redis."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import closing
from socket import socket


class RedisServer:
    """A real one, on a free port, that can be killed and started again."""

    def __init__(self, folder: str, *more: str) -> None:
        with closing(socket()) as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.folder = folder
        self.more = more
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        told = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        self.process = subprocess.Popen([*told, *self.more], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    async def up(self) -> None:
        for _ in range(400):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.01)
        raise AssertionError("redis did not start")
