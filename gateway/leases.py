"""Workers that register themselves: each is known for as long as it says so.

A worker that was added with a lease has to be heard of within so many seconds, again and again. If it is not, it is forgotten:
at once if it does not answer either, else as one that left a list, by draining, which a heartbeat ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.workers import LEASED, State, Worker, WorkerSpec

if TYPE_CHECKING:
    from gateway.run import Running

log = logging.getLogger("warmroute")

SHORTEST, LONGEST = 1, 86_400
"""Seconds."""


@dataclass(slots=True)
class Lease:
    """One worker's."""

    worker: Worker
    seconds: float
    until: float
    over: bool = False


class Leases:
    """See the module's head. As many as there are workers. Times are seconds on the loop's clock."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._of: dict[str, Lease] = {}

    def grant(self, spec: WorkerSpec, seconds: float) -> Worker:
        """Add a worker, or go on with the one of the same address if it has a lease: what ``spec`` says of it counts anew.

        Raises `OSError` for authorities that cannot be read.
        """
        fleet = self.running.fleet
        before = len(fleet.workers)
        worker = self.running.add_worker(spec)
        if len(fleet.workers) > before:
            worker.origin = LEASED
        if worker.origin == LEASED:
            self._of[worker.id] = Lease(worker, seconds, fleet.clock() + seconds)
            self.running.reloading.listed.stays(worker, spec)
        return worker

    def beat(self, worker: Worker) -> None:
        """It was heard of. One without a lease needs no heartbeat."""
        lease = self._find(worker)
        if lease is not None:
            lease.until, lease.over = self.running.fleet.clock() + lease.seconds, False
            self.running.reloading.listed.stays(worker, worker.spec)

    def seconds(self, worker: Worker) -> float | None:
        """Of its lease; ``None``: it has none."""
        lease = self._find(worker)
        return None if lease is None else lease.seconds

    def told(self, worker: Worker) -> dict[str, Any] | None:
        """For people; ``None``: it has none."""
        lease = self._find(worker)
        if lease is None:
            return None
        return {"seconds": lease.seconds, "left": round(max(0.0, lease.until - self.running.fleet.clock()), 3)}

    def _find(self, worker: Worker) -> Lease | None:
        lease = self._of.get(worker.id)
        return lease if lease is not None and lease.worker is worker and worker.origin == LEASED else None

    def sweep(self, now: float) -> None:
        """Twice a second: end what ran out."""
        for id_, lease in list(self._of.items()):
            worker = lease.worker
            if self.running.fleet.workers.get(id_) is not worker or worker.origin != LEASED:
                del self._of[id_]
            elif now >= lease.until and not lease.over:
                lease.over = True
                self.running.metrics.leases_expired.add()
                if worker.state in (State.READY, State.DRAINING) and not worker.failures:
                    log.warning("the lease of %s ran out: it drains", id_)
                    self.running.reloading.listed.leaves(worker, "out of its lease")
                else:
                    log.warning("the lease of %s ran out, and it does not answer: it is forgotten", id_)
                    self.running.remove_worker(worker)
