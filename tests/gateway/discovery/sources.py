"""A source that is watched alone, without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import gateway
from gateway.config import WorkerTemplate
from gateway.discovery import load
from gateway.discovery.base import Contact, Found, Lost, Template
from tests.gateway.talk import until

FOLDER = Path(gateway.__file__).parent


class Watched:
    """What a source said so far."""

    def __init__(self) -> None:
        self.lists: list[list[Found]] = []
        self.lost: list[Lost] = []
        self.raised: Exception | None = None
        self.contact = Contact(lambda lost, new: self.lost.append(lost))

    @property
    def urls(self) -> list[str]:
        """Of the last list; ``[]`` before there was one."""
        return [found.spec.url for found in self.lists[-1]] if self.lists else []

    @property
    def serving(self) -> list[str]:
        """Those that are to get something."""
        return [found.spec.url for found in self.lists[-1] if found.serving] if self.lists else []

    @property
    def reasons(self) -> list[str]:
        return [lost.reason for lost in self.lost]

    async def until(self, *urls: str) -> None:
        """Until just these are listed."""
        try:
            await until(lambda: self.lists and self.urls == sorted(urls))
        except AssertionError:
            raise AssertionError(f"{self.urls} are listed, not {urls}; {self.lost}, {self.raised!r}") from None

    async def until_lost(self, reason: str, times: int = 1) -> Lost:
        """Until it told of so many such failures; the last of them."""
        await until(lambda: self.reasons.count(reason) >= times)
        return [lost for lost in self.lost if lost.reason == reason][-1]


def of_sources() -> set[Any]:
    """Tasks that sources began, and the tests did not."""
    files = {task: getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks()}
    return {task for task, code in files.items() if code is not None and FOLDER in Path(code.co_filename).parents}


@asynccontextmanager
async def watching(kind: str, worker: WorkerTemplate | None = None, **options: Any) -> AsyncIterator[Watched]:
    """Watch a source; at the end it is cancelled, and has to end then."""
    source = load(kind, options, Template(worker))
    watched = Watched()
    source.contact = watched.contact

    async def run() -> None:
        async with aclosing(source.watch()) as lists:  # type: ignore[type-var]
            async for found in lists:
                watched.lists.append(found)

    task = asyncio.get_running_loop().create_task(run())
    try:
        yield watched
    finally:
        task.cancel()
        (watched.raised,) = await asyncio.gather(task, return_exceptions=True)  # type: ignore[assignment]
    assert isinstance(watched.raised, asyncio.CancelledError), watched.raised
    await until(lambda: not of_sources())
