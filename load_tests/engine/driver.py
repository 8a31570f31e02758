"""Runs a scheduler in real time: one task, asleep whenever there is no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from load_tests.engine.replies import Reply
from load_tests.engine.scheduler import Scheduler, Step, Work


class Progress(NamedTuple):
    """Tokens ``start:end`` of one choice's reply are there; ``ended`` says that no more will come."""

    choice: int
    start: int
    end: int
    ended: bool


class Job:
    """One request in the engine, on one rank: a sequence for each prompt and choice, in order of ``index``."""

    def __init__(self, driver: Driver, works: Sequence[Work], replies: Sequence[Reply], rank: int = 0) -> None:
        self.rank = rank
        self.works = list(works)
        self.replies = list(replies)
        self._driver = driver
        self._taken = [0] * len(works)
        self._fresh: dict[int, None] = {}
        self._open = len(works)
        self._waiter: asyncio.Future[None] | None = None
        for index, work in enumerate(self.works):
            work.owner = (self, index)

    def notify(self, index: int) -> None:
        self._fresh[index] = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def progress(self) -> AsyncIterator[Progress]:
        """What came, as it comes; tokens that came while the reader was busy arrive together."""
        while self._open:
            if not self._fresh:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            fresh, self._fresh = self._fresh, {}
            for index in fresh:
                work = self.works[index]
                start, self._taken[index] = self._taken[index], work.emitted
                ended = work.state in ("finished", "aborted")
                self._open -= ended
                yield Progress(index, start, work.emitted, ended)

    async def wait(self) -> None:
        """Until every sequence has ended."""
        async for _ in self.progress():
            pass

    def abort(self) -> None:
        """Free whatever still runs or waits; a reader sees it end."""
        for index, work in enumerate(self.works):
            if work.state in ("waiting", "running"):
                self._driver.scheduler.abort(work)
                self.notify(index)

    def reason(self, index: int) -> str:
        """Why sequence ``index`` ended: stop, length, tool_calls or abort."""
        return "abort" if self.works[index].state == "aborted" else self.replies[index].finish


def _report(task: asyncio.Task[None]) -> None:
    """A driver that dies would leave every client waiting in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        context = {"message": "the simulated engine's driver died", "exception": error}
        task.get_loop().call_exception_handler(context)


class Driver:
    """``time_scale`` multiplies every step's duration. ``stepped`` hears of each step before those who wait for it."""

    # A loop that falls behind catches up over the next steps, but never by more than this many seconds.
    SLACK = 0.05

    def __init__(self, scheduler: Scheduler, time_scale: float, stepped: Callable[[Step], None] | None = None) -> None:
        self.scheduler = scheduler
        self.time_scale = time_scale
        self._stepped = stepped
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_report)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, job: Job) -> None:
        """Queue every sequence of a job, or none: QueueFull from the scheduler leaves nothing behind."""
        now = asyncio.get_running_loop().time()
        try:
            for work in job.works:
                self.scheduler.submit(work, now)
        except Exception:
            job.abort()
            raise
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self.scheduler.busy:
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
            now = loop.time()
            step = self.scheduler.plan(now)
            due = max(due, now - self.SLACK) + step.seconds * self.time_scale
            await asyncio.sleep(max(0.0, due - now))
            touched = self.scheduler.complete(step, loop.time())
            if self._stepped is not None:
                self._stepped(step)
            for work in touched:
                job, index = work.owner
                job.notify(index)
