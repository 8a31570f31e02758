"""A copy of a collection at the API server: listed, then kept up to date by a watch, and listed again from time to time.

    list (pages) -> watch from the list's version -> ends: asked to, or broken off -> watch from the last version
                                                    -> expired, silent, or a while has passed -> list

The copy is what was seen last, whatever happens to the connection. A list replaces it whole, so that what a watch missed, or a
server forgot to tell, is put right within ``relist`` seconds; bookmarks keep the version fresh while nothing happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from random import uniform
from time import monotonic
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from gateway.discovery.base import Contact, Lost
from gateway.kube.api import Api, Collection, Expired
from gateway.kube.objects import Meta

T = TypeVar("T")

PAGE = 250
"""Objects of one page."""
AGAIN, LATEST = 0.2, 30.0
"""Seconds until it is asked again after a failure, at first and at most."""
CALM = 5.0
"""Seconds of peace after which a failure is a first one."""
GRACE = 10.0
"""Seconds by which a watch may end late."""
SETTLE = 0.05
"""Seconds in which changes that come together are one."""


class _ListMeta(msgspec.Struct, rename="camel", kw_only=True):
    resource_version: str = ""
    next: str | None = msgspec.field(default=None, name="continue")


class _Page(msgspec.Struct):
    metadata: _ListMeta = msgspec.field(default_factory=_ListMeta)
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bare(msgspec.Struct):
    metadata: Meta


class _Status(msgspec.Struct):
    code: int = 0
    message: str | None = None


class Mirror(Generic[T]):
    """``kind``: what its objects are read as. ``changed`` is told after every change; ``part`` names it to ``contact``."""

    def __init__(
        self,
        api: Api,
        collection: Collection,
        kind: type[T],
        changed: Callable[[], None],
        contact: Contact,
        relist: float,
    ) -> None:
        self.api = api
        self.collection = collection
        self.kind = kind
        self.changed = changed
        self.contact = contact
        self.relist = relist
        self.part = f"{collection} {collection.labels or collection.fields or ''}".strip()
        self.objects: dict[tuple[str, str], T] | None = None
        """By namespace and name; ``None``: never listed."""
        self._version = ""

    async def run(self) -> None:
        """Keep it up to date until cancelled."""
        pause = AGAIN
        while True:
            began = monotonic()
            try:
                await self._list()
                await self._follow()
                pause = AGAIN
                continue
            except Expired as expired:
                lost: Lost = expired
            except Lost as error:
                lost = error
                self.contact.lost(lost, self.part)
            pause = AGAIN if monotonic() - began > CALM else min(LATEST, 2 * pause)
            await asyncio.sleep(max(lost.again or 0.0, pause * uniform(0.5, 1.0)))

    # -- listing ----------------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Raises `Lost`."""
        try:
            found, version = await self._pages(PAGE)
        except Expired:
            # The server forgot between two pages what the first was of: all at once, then.
            found, version = await self._pages(None)
        self.objects, self._version = found, version
        self.contact.well(self.part)
        self.changed()

    async def _pages(self, size: int | None) -> tuple[dict[tuple[str, str], T], str]:
        found: dict[tuple[str, str], T] = {}
        query = {} if size is None else {"limit": str(size)}
        while True:
            page = self._read(await self.api.page(self.collection, query), _Page)
            for raw in page.items or ():
                found[self._key(self._read(raw, _Bare).metadata)] = self._read(raw, self.kind)
            if not page.metadata.next:
                return found, page.metadata.resource_version
            query["continue"] = page.metadata.next

    def _read(self, data: bytes | msgspec.Raw, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Lost("malformed", f"what the API server says of {self.collection} cannot be read: {error}") from None

    @staticmethod
    def _key(meta: Meta) -> tuple[str, str]:
        return meta.namespace, meta.name

    # -- watching ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Watch until it is time to list again. Raises `Lost` where only a list helps."""
        due = monotonic() + self.relist * uniform(0.9, 1.1)
        pause = AGAIN
        while (left := due - monotonic()) > 0:
            began = monotonic()
            try:
                await self._watch(left)
                lost = None
            except Expired:
                raise
            except Lost as error:
                if error.reason in ("silent", "malformed"):
                    raise
                lost = error
                self.contact.lost(lost, self.part)
            if monotonic() - began > CALM:
                pause = AGAIN
            await asyncio.sleep(max(0.0 if lost is None else lost.again or 0.0, pause * uniform(0.5, 1.0)))
            pause = min(CALM, 2 * pause)

    async def _watch(self, seconds: float) -> None:
        """One watch, to its end. Raises `Lost`."""
        async with aclosing(self.api.watch(self.collection, self._version, seconds, GRACE)) as lines:  # type: ignore[type-var]
            async for line in lines:
                self.contact.well(self.part)
                if line:
                    self._take(self._read(line, _Event))

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = self._read(event.object, _Status)
            if status.code == 410:
                raise Expired("expired", f"the version of {self.collection} is not kept any more")
            raise Lost("server_error", f"a watch of {self.collection} ended: {(status.message or '')[:200]}")
        meta: Meta = self._read(event.object, _Bare).metadata
        assert self.objects is not None
        if event.type in ("ADDED", "MODIFIED"):
            self.objects[self._key(meta)] = self._read(event.object, self.kind)
            self.changed()
        elif event.type == "DELETED":
            self.objects.pop(self._key(meta), None)
            self.changed()
        self._version = meta.resource_version or self._version


class Mirrors:
    """Mirrors that run, and their tasks. ``async with`` it."""

    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self._tasks: dict[Mirror[Any], asyncio.Task[None]] = {}
        self._turned = asyncio.Event()

    def changed(self) -> None:
        """Something is another than it was."""
        self._turned.set()

    async def turn(self) -> None:
        """Until something changed. Raises what ended a mirror."""
        await self._turned.wait()
        await asyncio.sleep(SETTLE)
        self._turned.clear()
        for task in self._tasks.values():
            if task.done():
                task.result()

    def begin(self, mirror: Mirror[Any]) -> None:
        """Run it."""
        task = asyncio.get_running_loop().create_task(mirror.run(), name=f"mirror {mirror.part}")
        task.add_done_callback(lambda _: self._turned.set())
        self._tasks[mirror] = task

    async def end(self, mirror: Mirror[Any]) -> None:
        """Run it no more; what was wrong with it is no matter then."""
        task = self._tasks.pop(mirror)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.contact.troubles.pop(mirror.part, None)

    async def __aenter__(self) -> Mirrors:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
