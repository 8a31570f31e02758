"""What an engine's connector to others must do, and what is counted of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any

from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank

JSON = dict[str, Any]


class Connector:
    """The one of an engine that has none: it ties nothing to anybody. A connector lives as long as its process."""

    name = "none"
    engine_id = ""
    port: int | None = None

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic) -> None:
        self.options = options
        self.faults = faults
        self.traffic = traffic
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, ranks: list[Rank]) -> None:
        """These are the ranks of the engine."""

    async def open(self) -> None:
        """Listen. OSError if a port is taken."""

    async def close(self) -> None:
        """End as a process that ends: whoever is in the middle of something meets a reset."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        """Tie the sequences of a job to others, as its body says. Raises ApiError for what cannot be."""

    def rank(self, body: JSON) -> int | None:
        """The rank that a request has to be on where it does not say itself; None: any."""
        return None

    def rejected(self, body: JSON) -> None:
        """A request was refused before it was a job."""

    def blocks(self) -> tuple[int, int]:
        """(blocks kept for others, those of them that nobody can free any more)."""
        return 0, 0

    def rooms(self) -> int:
        """Meetings with other engines that are open."""
        return 0

    def queues(self) -> dict[str, int]:
        """How many requests are where between two engines, in SGLang's words."""
        return {}

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something until it ends or the process does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stalled(self) -> bool:
        """Let a transfer's faults happen; True if it is to fail."""
        stall = self.faults.take("transfer_stall")
        if stall is not None:
            await (asyncio.Event().wait() if stall.seconds is None else asyncio.sleep(stall.seconds))
        return self.faults.take("transfer_fail") is not None

    def seconds(self, tokens: int) -> float:
        """How long a transfer of ``tokens`` takes, in real seconds."""
        rates = self.options.rates
        return (rates.handshake + tokens * rates.transfer) * self.options.time_scale

    def stats(self, ranks: Sequence[Rank]) -> JSON:
        """What /sim/stats prints under "disaggregation"."""
        pinned, leaked = self.blocks()
        totals = asdict(self.traffic)
        ways: JSON = {
            f"transfers_{way}": {
                key.removeprefix(f"{way}_"): value
                for key, value in totals.items()
                if key.startswith(f"{way}_") and not key.endswith("seconds")
            }
            for way in ("in", "out")
        }
        return {
            "connector": self.name,
            "engine_id": self.engine_id,
            "side_port": self.port,
            "pinned_blocks": pinned,
            "leaked_blocks": leaked,
            "rooms": self.rooms(),
            "receiving": sum(len(rank.scheduler.receiving) for rank in ranks),
            "sending": sum(work.state == "sending" for rank in ranks for work in rank.scheduler.kept),
            **ways,
            "leases_expired": totals["expired"],
            "notifications_late": totals["late_notes"],
            "notifications_lost": totals["lost_notes"],
            "bootstrap_failed": totals["bootstrap_failed"],
            "aborts": totals["aborts"],
            "foreign_blocks": sum(len(rank.scheduler.contents) for rank in ranks),
        }
