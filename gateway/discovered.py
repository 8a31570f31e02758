"""Workers that sources find: one task for each source, and what the fleet makes of all their lists.

A source that fails is asked again after a pause that grows, and what it said last holds meanwhile. Of workers that several
know the configuration comes first, then who was added over the admin port, then the sources in their order. What a source says
is followed on the way that a changed configuration takes (`gateway.listed`): who is not listed any more drains, and is
forgotten when nothing runs there.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from random import uniform
from time import monotonic
from typing import TYPE_CHECKING

from gateway.discovery import load
from gateway.discovery.base import Contact, Found, Lost, Source, Template
from gateway.series import Gauge
from gateway.workers import ADDED, CONFIGURED, GIVEN, LEASED, State, Worker, id_of

if TYPE_CHECKING:
    from gateway.config import DiscoveryConfig
    from gateway.run import Running

log = logging.getLogger("warmroute")

AGAIN, LATEST = 0.5, 30.0
"""Seconds until a source that failed is asked again, at first and at most."""
AGREE = 5.0
"""Seconds between two comparisons of the lists with a fleet that others change too."""


class Following:
    """One source and its last list."""

    def __init__(
        self, running: Running, told: DiscoveryConfig, protocol: str | None, known: list[Found] | None
    ) -> None:
        self.running = running
        self.told = told
        self.protocol = protocol
        self.name = told.name or told.source
        self.workers = known
        """As last said; ``None``: nothing was said so far."""
        self.source: Source = load(told.source, told.options, Template(told.worker, protocol))
        self.contact = self.source.contact = Contact(self._failed, self._recovered)

    @property
    def up(self) -> bool:
        """Whether what it said is known to be so."""
        return self.workers is not None and not self.contact.troubles

    async def run(self) -> None:
        """Follow it until cancelled."""
        pause = AGAIN
        while True:
            try:
                async with aclosing(self.source.watch()) as lists:  # type: ignore[type-var]
                    async for found in lists:
                        pause = AGAIN
                        self.workers = found
                        self.contact.well("source")
                        self.running.discovered.follow()
                lost = Lost("ended", "it ended without a word")
            except Lost as error:
                lost = error
            except Exception:
                self.running.gateway.defect("discovery")
                lost = Lost("defect", "the gateway failed at it; its log says why")
            self.contact.lost(lost, "source")
            await asyncio.sleep(max(lost.again or 0.0, pause * uniform(0.5, 1.0)))
            pause = min(LATEST, 2 * pause)

    def _failed(self, lost: Lost, new: bool) -> None:
        self.running.metrics.discovery_errors.add((self.name, lost.reason))
        if new:
            stays = "" if self.workers is None else f"; the {len(self.workers)} workers that it listed last stay"
            log.warning("discovery %s: %s%s", self.name, lost.message, stays)

    def _recovered(self) -> None:
        log.info("discovery %s is well again", self.name)


class Discovered:
    """See the module's head. ``start()``, then ``await stop()``."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.following: list[Following] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._known: dict[str, str | None] = {}
        """Workers that were made for what sources list, and who was there: one that an operator removed stays away."""
        self._held: dict[str, Worker] = {}
        """Those that are to get nothing because their source says so."""
        self._agree_at = 0.0
        self._running = False

    def start(self) -> None:
        """Follow what the configuration names."""
        self._running = True
        self.reconfigure()

    async def stop(self) -> None:
        """Follow nothing any more."""
        self._running = False
        for name in list(self._tasks):
            self._end(name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def reconfigure(self) -> None:
        """Follow what the configuration says now: a source that is told the same goes on, what one of the same name listed
        stays until it lists something else."""
        config = self.running.config
        protocol = config.disaggregation.named
        before = {each.name: each for each in self.following}
        self.following = []
        for told in config.discovery:
            known = before.pop(told.name or told.source, None)
            if known is not None and (known.told, known.protocol) == (told, protocol):
                self.following.append(known)
                continue
            if known is not None:
                self._end(known.name)
            made = Following(self.running, told, protocol, None if known is None else known.workers)
            self.following.append(made)
            self._begin(made)
        for name in before:
            self._end(name)
            self.running.metrics.drop("source", name)
        self.follow()

    def _begin(self, made: Following) -> None:
        task = asyncio.get_running_loop().create_task(made.run(), name=f"discovery {made.name}")
        self._tasks[made.name] = task

    def _end(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
            task.cancel()

    # -- the fleet --------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Twice a second."""
        if now >= self._agree_at:
            self._agree_at = now + AGREE
            self.follow()

    def follow(self) -> None:
        """Make the fleet what the lists say."""
        if not self._running:
            return
        configured = {id_of(worker.url) for worker in self.running.config.workers}
        wanted: dict[str, tuple[Found, Following]] = {}
        for each in self.following:
            for found in each.workers or ():
                if found.id not in configured:
                    wanted.setdefault(found.id, (found, each))
        known: dict[str, str | None] = {}
        for id_, (found, source) in wanted.items():
            if self._there(found, source):
                known[id_] = found.identity
        for id_ in self._known.keys() - wanted.keys():
            worker = self.running.fleet.workers.get(id_)
            if worker is not None and worker.origin not in GIVEN and id_ not in self.running.reloading.listed.leaving:
                self.running.reloading.listed.leaves(worker, f"not listed by {worker.origin} any more")
        self._known = known
        workers = self.running.fleet.workers
        self._held = {id_: worker for id_, worker in self._held.items() if id_ in wanted and workers.get(id_) is worker}

    def _there(self, found: Found, source: Following) -> bool:
        """It is listed; whether a worker was made for it, now or before."""
        worker = self.running.fleet.workers.get(found.id)
        if worker is None:
            if found.id in self._known and self._known[found.id] == found.identity:
                return True
            return found.serving and self._add(found, source)
        if worker.origin in (ADDED, LEASED):
            return False
        if worker.origin == CONFIGURED and found.id not in self.running.reloading.listed.leaving:
            # An operator stopped its leaving.
            return False
        worker.origin = source.name
        if worker.identity is not None and found.identity not in (None, worker.identity):
            log.info("%s is another worker than before", worker.id)
            self.running.remove_worker(worker)
            return found.serving and self._add(found, source)
        worker.identity = found.identity or worker.identity
        self._stays(worker, found, source)
        return True

    def _add(self, found: Found, source: Following) -> bool:
        try:
            worker = self.running.add_worker(found.spec)
        except (OSError, ValueError) as error:
            source.contact.lost(Lost("unusable", f"{found.spec.url} cannot be used: {error}"), found.id)
            return False
        source.contact.troubles.pop(found.id, None)
        worker.origin, worker.identity = source.name, found.identity
        log.info("%s was found by %s", worker.id, source.name)
        return True

    def _stays(self, worker: Worker, found: Found, source: Following) -> None:
        listed = self.running.reloading.listed
        if listed.leaving.pop(worker.id, None) is not None:
            self._held[worker.id] = worker
        listed.stays(worker, found.spec)
        if not found.serving:
            # An operator who has it serve all the same was there later.
            if worker.state is not State.DRAINING and self._held.get(worker.id) is not worker:
                self.running.moving.drain(worker)
                self._held[worker.id] = worker
            if worker.id in self._held and worker.state is State.DRAINING:
                worker.reason = f"{source.name} says that it is not ready, or ends"
        elif self._held.pop(worker.id, None) is worker and worker.state is State.DRAINING:
            self.running.resume_worker(worker)
            worker.reason = f"{source.name} says that it is ready"

    # -- what is told -----------------------------------------------------------------------------------------------

    def gauges(self) -> list[Gauge]:
        """For the metrics."""
        return [
            Gauge(
                "warmroute_discovery_up",
                "1 while a source of workers answers and its list is followed; while it is 0 what it listed last stays.",
                lambda: [((each.name,), float(each.up)) for each in self.following],
                ("source",),
            ),
            Gauge(
                "warmroute_discovery_list_age_seconds",
                "Since a source's list was last known to be what there is; absent while nothing is known.",
                lambda: [
                    ((each.name,), monotonic() - each.contact.heard)
                    for each in self.following
                    if each.contact.heard is not None
                ],
                ("source",),
            ),
            Gauge(
                "warmroute_discovery_workers",
                "Workers that a source lists, those that are not ready or end included.",
                lambda: [((each.name,), len(each.workers)) for each in self.following if each.workers is not None],
                ("source",),
            ),
        ]
