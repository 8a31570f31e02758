"""``warmroute top``: the fleet, live. It follows ``GET /live``, and comes back to it when the gateway does.

One task reads the feed and draws what it tells; where the feed ends it says so, and tries again. Whatever ends the whole (q,
Ctrl-C, a signal to terminate, a token that does not fit any more) gives the terminal back as it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager

import httpx
from rich.console import Console
from rich.live import Live

from gateway.console.client import Admin, Denied, Refused, Unanswered
from gateway.console.feed import Event
from gateway.console.looks import console
from gateway.console.screen import Seen, screen

SILENT = 10.0
"""Seconds without an event after which the feed is lost."""
PAUSE = 1.0
"""Seconds between two tries to come back."""
LONGEST = 64 * 1024 * 1024
"""Bytes of an event."""
RATES = 2.0
"""Seconds of a window that is long enough to tell rates of."""


def run(admin: Admin, once: bool) -> None:
    """Follow, until somebody has seen enough. Raises `Unanswered`, `Refused` if there is nothing to follow."""
    out = console()
    if not once and (not out.is_terminal or out.is_dumb_terminal):
        raise Unanswered("top needs a terminal that can be drawn on: --once prints one screen")
    try:
        asyncio.run(_once(admin, out) if once else _follow(admin, out))
    except KeyboardInterrupt:
        pass


# -- the feed -----------------------------------------------------------------------------------------------------------


async def events(admin: Admin) -> AsyncGenerator[Event, None]:
    """What the gateway tells, until it ends. Raises `Unanswered`, `Refused`, and httpx's errors once it told something."""
    told = False
    try:
        async with (
            httpx.AsyncClient(**admin.options) as http,  # type: ignore[arg-type]
            http.stream("GET", f"{admin.url}/live", timeout=SILENT) as answer,
        ):
            if answer.status_code != 200:
                admin.judged(answer.status_code, await _short(answer))
            async for data in _data(answer):
                yield admin.read(data, Event)
                told = True
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        if told:
            raise
        raise Unanswered(admin.why(error)) from None
    if not told:
        raise Unanswered(f"{admin.url} has no live feed: is it the gateway's admin port?")


async def _short(answer: httpx.Response) -> bytes:
    found = bytearray()
    async for piece in answer.aiter_bytes():
        found += piece
        if len(found) > LONGEST:
            break
    return bytes(found)


async def _data(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Data of server-sent events, one line each. Raises `httpx.DecodingError` for one that has no end."""
    rest = bytearray()
    async for piece in answer.aiter_bytes():
        rest += piece
        while (end := rest.find(b"\n\n")) >= 0:
            event = bytes(rest[:end])
            del rest[: end + 2]
            if event.startswith(b"data: "):
                yield event[6:]
        if len(rest) > LONGEST:
            raise httpx.DecodingError("an event has no end")


async def _once(admin: Admin, out: Console) -> None:
    """One screen, as soon as there is something to tell rates of."""
    seen = Seen(admin.url)
    try:
        async with asyncio.timeout(6 * SILENT), aclosing(events(admin)) as feed:
            async for event in feed:
                seen.take(event)
                if event.window_seconds >= RATES:
                    break
    except (httpx.HTTPError, OSError) as error:
        raise Unanswered(admin.why(error)) from None
    width, height = out.size
    out.print(screen(seen, width, height), crop=False, no_wrap=True, overflow="ignore")


# -- the terminal -------------------------------------------------------------------------------------------------------


async def _follow(admin: Admin, out: Console) -> None:
    seen = Seen(admin.url)
    feed = events(admin)
    # Before the screen is taken: what is wrong now is told below the command.
    seen.take(await anext(feed))
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, over.set)
    with _keys(loop, over), Live(console=out, screen=True, auto_refresh=False) as live:

        def draw() -> None:
            width, height = out.size
            live.update(screen(seen, width, height), refresh=True)

        draw()
        reading = asyncio.create_task(_read(admin, feed, seen, draw))
        ended = asyncio.create_task(over.wait())
        try:
            await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            ended.cancel()
            results = await asyncio.gather(reading, ended, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _read(admin: Admin, feed: AsyncIterator[Event], seen: Seen, draw: Callable[[], None]) -> None:
    """Show each event; where the feed ends, say so, and come back. Raises `Denied` where the token does not fit any more."""
    while True:
        try:
            async for event in feed:
                seen.take(event)
                draw()
            seen.lost = "the feed ended: coming back"
        except (httpx.HTTPError, OSError):
            seen.lost = "no answer: coming back"
        except Denied:
            raise
        except (Unanswered, Refused) as error:
            seen.lost = f"coming back: {error}"
        draw()
        await asyncio.sleep(PAUSE)
        feed = events(admin)


@contextmanager
def _keys(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> Iterator[None]:
    """q ends it, where somebody can press it; keys do not show meanwhile."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)

    def pressed() -> None:
        read = os.read(file, 64)
        if not read or b"q" in read.lower():
            over.set()

    tty.setcbreak(file)
    loop.add_reader(file, pressed)
    try:
        yield
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
