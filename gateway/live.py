"""The live feed: what the fleet does, told once a second to whoever watches, as server-sent events.

One computation serves all watchers and nothing is computed while there are none. Each event is one JSON object of the same
shape. Its ``fleet`` has all tiles in a watcher's first event (``whole``), and only those that changed in the others; all else
is small and told each time.

A watcher is a request that never ends: its handler waits for events, and the one task that makes them leaves them with it. A
watcher that falls behind is cut off, for it would be told of a past that grows. The door of the control plane is told that
something happens with each event, or it would take the request for one that hangs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from os import urandom
from time import time
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from gateway.access import DOOR
from gateway.errors import BadRequest, Crowded
from gateway.ledger import activity
from gateway.sample import Sample
from gateway.tiles import Tiles, namer
from gateway.verdict import verdict
from gateway.windows import STEP, Windows

if TYPE_CHECKING:
    from gateway.run import Running

PERIOD = 1.0
"""Seconds between two events."""
WATCHERS = 32
"""At most."""
BEHIND = 5
"""Events that a watcher may be behind."""
HISTORY = 300
"""Points that are kept for charts, one every `gateway.windows.STEP` seconds."""
EXAMINE = 5.0
"""Seconds between two looks at what the doctor found."""
TENANTS = 200
"""Tenants that are told of, those that ask most."""
MOST_EVENTS = 100_000

Point = dict[str, Any]


class Watcher:
    """One of those who watch."""

    def __init__(self, transport: asyncio.BaseTransport | None) -> None:
        self._transport = transport
        self._events: deque[bytes] = deque()
        self._came = asyncio.Event()
        self.over = False
        self.takes = True
        """It took all that was sent so far."""

    def tell(self, event: bytes) -> bool:
        """Leave an event with it; false if it is too far behind, and was cut off."""
        if len(self._events) >= BEHIND:
            self.end()
            return False
        self._events.append(event)
        self._came.set()
        return True

    async def next(self) -> bytes | None:
        """The next event; ``None``: there will be no more. As long as it watches there is one each `PERIOD`."""
        while not self._events and not self.over:
            self._came.clear()
            await self._came.wait()
        return self._events.popleft() if self._events and not self.over else None

    def end(self) -> None:
        """Tell it no more; where it does not take what it was told, cut it off."""
        self.over = True
        self._came.set()
        if not self.takes and self._transport is not None:
            self._transport.abort()  # type: ignore[attr-defined]


class Live:
    """The feed of one gateway; see the module's head."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.name = namer(urandom(16))
        self._tiles = Tiles(running, self.name)
        self._windows = Windows(running.metrics)
        self._history: deque[Point] = deque(maxlen=HISTORY)
        self._remembered = -STEP
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._told: dict[str, dict[str, Any]] = {}
        """The tiles of the last event."""
        self._last: dict[str, Any] = {}
        """The rest of it."""
        self._doctor: dict[str, Any] | None = None
        self._examine_at = 0.0
        self._ending = False

    # -- watchers ---------------------------------------------------------------------------------------------------

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events, about one a second; ``?events=N``: so many, then the end. Raises `Crowded`."""
        left = _wanted(request.query.get("events"))
        if self._ending or len(self._watchers) >= WATCHERS:
            raise Crowded(f"{WATCHERS} watch already, which is as many as may", retry_after=10)
        response = web.StreamResponse(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        response.content_type, response.charset = "text/event-stream", "utf-8"
        watcher = Watcher(request.transport)
        self._begin(watcher)
        try:
            await response.prepare(request)
            while left != 0 and (event := await watcher.next()) is not None:
                watcher.takes = False
                await response.write(event)
                watcher.takes = True
                request.app[DOOR].begun(request.protocol)
                left = left - 1 if left is not None else None
        except ConnectionError:
            # It left; there is nobody to answer.
            pass
        finally:
            self._leave(watcher)
        return response

    def _begin(self, watcher: Watcher) -> None:
        """Its first event is all that the others were told."""
        if self._task is None:
            self._running.gateway.sample = Sample()
            self._look()
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live")
        whole = {**self._last, "history": list(self._history)}
        watcher.tell(_event({**whole, "fleet": _fleet(self._told, {}, whole=True)}))
        self._watchers.add(watcher)

    def _leave(self, watcher: Watcher) -> None:
        watcher.over = True
        self._watchers.discard(watcher)
        if not self._watchers and self._task is not None:
            self._task.cancel()
            self._task = self._running.gateway.sample = None

    async def stop(self) -> None:
        """Tell everybody that there is no more."""
        self._ending = True
        task = self._task
        for watcher in list(self._watchers):
            watcher.end()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- events -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            try:
                before = self._told
                self._look()
                event = _event({**self._last, "fleet": _fleet(self._told, before, whole=False)})
            except Exception:
                self._running.gateway.defect("looking at the fleet for those who watch")
                continue
            for watcher in [each for each in self._watchers if not each.tell(event)]:
                self._watchers.discard(watcher)

    def _look(self) -> None:
        """Make what the next event tells."""
        gateway = self._running.gateway
        now = gateway.clock()
        self._windows.look(now)
        self._told = self._tiles.now()
        taken = gateway.sample.take() if gateway.sample is not None else {"ended": 0, "shown": []}
        window = self._windows.tenants()
        told: dict[str, Any] = {
            "time": round(time(), 3),
            "window_seconds": round(self._windows.seconds, 1),
            "hits": self._windows.hits(),
            "ttft": self._windows.ttft(),
            "requests": {
                **taken,
                "window": sum(each["requests"] for each in window.values()),
                "failed": sum(each["failed"] for each in window.values()),
                "running": len(gateway.exchanges) - gateway.admission.held.requests,
                "reasons": self._windows.reasons(),
            },
            "groups": self._tiles.groups,
            "sessions": {"total": len(gateway.sessions)},
            "queue": self._queue(),
            "pressure": gateway.pressure.told(),
            "config": self._running.reloading.told(True),
            "tenants": self._tenants(window),
            "doctor": self._found(now),
        }
        told["verdict"] = verdict(told, self._told.values())
        self._remember(told, now)
        self._last = told

    def _found(self, now: float) -> dict[str, Any] | None:
        """What costs most of what the doctor found; ``None``: it is off."""
        doctor = self._running.gateway.doctor
        if doctor is not None and now >= self._examine_at:
            self._examine_at = now + EXAMINE
            findings = doctor.report()["findings"]
            worst = max(findings, key=lambda each: each["share_of_hits_lost"] or 0.0, default=None)
            self._doctor = {
                "findings": len(findings),
                "worst": None if worst is None else worst["text"],
                "share_of_hits_lost": None if worst is None else worst["share_of_hits_lost"],
            }
        return self._doctor if doctor is not None else None

    def _queue(self) -> dict[str, Any]:
        admission = self._running.gateway.admission
        queues = list(admission.queues.values())
        return {
            "waiting": admission.held.requests,
            "bytes": admission.held.bytes,
            "preparing": len(self._running.gateway.preparing),
            "by_priority": {
                priority.name: sum(queue.levels[place].requests for queue in queues)
                for place, priority in enumerate(admission.options.priorities)
            },
        }

    def _tenants(self, window: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
        busy = activity(self._running.gateway)
        nothing, idle = {"requests": 0, "failed": 0, "refused": 0}, {"running": 0, "queued": 0}
        named = {tenant.name for tenant in self._running.gateway.tenants.all()} | busy.keys()
        rows: list[dict[str, Any]] = [
            {"name": each, **window.get(each, nothing), **busy.get(each, idle)} for each in sorted(named)
        ]
        rows.sort(key=lambda row: -(row["requests"] + row["running"] + row["queued"]))
        return rows[:TENANTS]

    def _remember(self, told: dict[str, Any], now: float) -> None:
        """Keep a point for the charts of those who come later."""
        if now - self._remembered < STEP:
            return
        self._remembered = now
        hits, seconds = told["hits"], told["window_seconds"]
        self._history.append(
            {
                "time": told["time"],
                **{name: hits[name] for name in ("rate", "predicted", "best", "ceiling")},
                "requests_per_second": round(told["requests"]["window"] / seconds, 2) if seconds else None,
                "ttft_p50": {hit: row["p50"] for hit, row in told["ttft"]["by_hit"].items()},
            }
        )


def _fleet(tiles: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]], whole: bool) -> dict[str, Any]:
    """What changed of the tiles."""
    return {
        "whole": whole,
        "tiles": [tile for name, tile in tiles.items() if before.get(name) != tile],
        "gone": [name for name in before if name not in tiles],
    }


def _event(told: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(told) + b"\n\n"


def _wanted(text: str | None) -> int | None:
    """How many events; ``None``: as many as there will be. Raises `BadRequest`."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= MOST_EVENTS:
        raise BadRequest(f"events must be from 1 to {MOST_EVENTS}", param="events")
    return int(text)
