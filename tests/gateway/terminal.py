"""Commands as people run them: processes, on pipes or on a terminal of their own; and a door in front of a gateway that a test
can shut."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from typing import Any, NamedTuple

from tests.gateway.talk import until

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "import sys; from gateway.cli import main; sys.exit(main())")
OWNING = (sys.executable, "-c", f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {COMMAND[2]}")
"""The same, as the first of a session, whose terminal its standard input is."""
LONG = 60.0
"""Seconds that a command may take."""
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]")
"""What colours, moves the cursor, and takes the whole screen."""


def environment(**more: str) -> dict[str, str]:
    """That of a command, without what would change how it looks."""
    changes = ("WARMROUTE_ADMIN_TOKEN", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM")
    return {**{name: value for name, value in os.environ.items() if name not in changes}, "TERM": "xterm", **more}


class Done(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """Cells of its table's rows."""
        return [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines()]


async def run(*arguments: str, stdin: bytes = b"", out: int = asyncio.subprocess.PIPE, **more: str) -> Done:
    """Run ``warmroute`` on pipes; ``out``: a descriptor for its standard output, which is not read then."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        cwd=ROOT,
        env=environment(**more),
        stdin=asyncio.subprocess.PIPE,
        stdout=out,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        told, err = await asyncio.wait_for(process.communicate(stdin), LONG)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    assert "Traceback" not in err.decode()
    return Done(process.returncode, (told or b"").decode(), err.decode())


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, file: int) -> None:
        self.process = process
        self.file = file
        self.written = bytearray()
        """All that it wrote."""
        os.set_blocking(file, False)
        asyncio.get_running_loop().add_reader(file, self._read)

    def _read(self) -> None:
        try:
            self.written += os.read(self.file, 65536)
        except BlockingIOError:
            return
        except OSError:
            # The other side is closed.
            asyncio.get_running_loop().remove_reader(self.file)

    @property
    def text(self) -> str:
        """The same without escapes."""
        return ESCAPES.sub(b"", bytes(self.written)).decode("utf-8", "replace")

    @property
    def echoes(self) -> bool:
        """Whether keys that are pressed show."""
        return bool(termios.tcgetattr(self.file)[3] & termios.ECHO)

    def press(self, key: bytes) -> None:
        os.write(self.file, key)

    async def shows(self, text: str) -> None:
        """Until it wrote ``text``, from where it was last looked."""
        try:
            await until(lambda: text in self.text, LONG)
        except AssertionError:
            raise AssertionError(f"{text!r} is not in {self.text[-2000:]!r}") from None

    def forget(self) -> None:
        """What it wrote before is of no interest any more."""
        self.written.clear()

    async def ended(self) -> int:
        """Its exit status."""
        status = await asyncio.wait_for(self.process.wait(), LONG)
        self._read()
        return status


@asynccontextmanager
async def terminal(
    *arguments: str, width: int = 100, height: int = 30, owned: bool = False, **more: str
) -> AsyncIterator[Terminal]:
    """Run ``warmroute`` on a terminal; ``owned``: it is the terminal that keys interrupt it by."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(OWNING if owned else COMMAND),
        *arguments,
        cwd=ROOT,
        env=environment(**more),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=owned,
    )
    there = Terminal(process, ours)
    try:
        yield there
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(theirs)
        os.close(ours)


class Front:
    """Passes bytes on to a port of this machine; ``to`` may change, and ``None`` hangs up."""

    def __init__(self, to: int | None) -> None:
        self.to = to
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, tls: SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def hang_up(self) -> None:
        """Cut what there is, and whatever comes."""
        self.to = None
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.to is None:
            writer.transport.abort()
            return
        inner, outer = await asyncio.open_connection("127.0.0.1", self.to)
        self._writers |= {writer, outer}
        for one, other in ((reader, outer), (inner, writer)):
            task = asyncio.create_task(self._pass(one, other))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)


@asynccontextmanager
async def front(to: int | None, tls: SSLContext | None = None) -> AsyncIterator[Front]:
    """A door that is open."""
    there = Front(to)
    await there.start(tls)
    yield there
    await there.stop()
