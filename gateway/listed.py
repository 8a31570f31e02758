"""Workers that are listed, by the configuration or by a source, when the list changes: who comes, who is told something else,
who leaves."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.workers import CONFIGURED, State, Worker, WorkerSpec

if TYPE_CHECKING:
    from gateway.run import Running

log = logging.getLogger("warmroute")


class Listed:
    """Follows lists. Those that were added over the admin port were never on one, and stay."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.leaving: dict[str, tuple[Worker, float]] = {}
        """Workers that are not listed any more, and when they are forgotten whatever runs on them."""

    def follow(self, before: set[str], specs: dict[str, WorkerSpec]) -> None:
        """The configuration's list is ``specs`` now, by id; ``before`` are those that it had."""
        for id_, spec in specs.items():
            worker = self.running.fleet.workers.get(id_)
            if worker is not None:
                worker.origin = CONFIGURED
                self.stays(worker, spec)
            elif id_ not in before:
                # One that an operator removed by hand stays away while its entry is the same.
                self.running.add_worker(spec)
        for id_ in before - specs.keys():
            worker = self.running.fleet.workers.get(id_)
            if worker is not None and worker.origin == CONFIGURED:
                self.leaves(worker, "not in the configuration any more")

    def stays(self, worker: Worker, spec: WorkerSpec) -> None:
        """It is listed, as ``spec`` says."""
        if self.leaving.pop(worker.id, None) is not None:
            self.running.resume_worker(worker)
            worker.reason = "listed again"
        if worker.spec is not spec and worker.spec != spec:
            worker.respec(spec)
            self.running.probe.doubt(worker)
            self.running.fleet.changed()

    def leaves(self, worker: Worker, why: str) -> None:
        """It is not listed any more: it drains first."""
        if worker.state is not State.DRAINING:
            self.running.moving.drain(worker)
        worker.reason = why
        self.leaving[worker.id] = (worker, self.running.fleet.clock() + self.running.config.drain_limit)

    def sweep(self, now: float) -> None:
        """Twice a second: forget workers that left."""
        for id_, (worker, until) in list(self.leaving.items()):
            if self.running.fleet.workers.get(id_) is not worker or worker.state is not State.DRAINING:
                # An operator was there first.
                del self.leaving[id_]
                continue
            drain = self.running.moving.drains.get(id_)
            moved = drain is None or not drain.left or drain.stuck is not None
            if (moved and not worker.running) or now >= until:
                del self.leaving[id_]
                why = worker.reason
                self.running.remove_worker(worker)
                log.info("%s is forgotten: it is %s", id_, why)
