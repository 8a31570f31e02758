"""Runs a scheduler in real time: one task, asleep whenever there is no work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

from load_tests.engine.errors import ApiError
from load_tests.engine.replies import Reply
from load_tests.engine.scheduler import Scheduler
from load_tests.engine.work import Step, Work

ENDED = ("finished", "aborted", "failed")


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
            work.replan = partial(self._replan, index)

    @property
    def error(self) -> ApiError | None:
        """Why a sequence could not be served; None as long as none failed."""
        return next((work.error for work in self.works if work.error is not None), None)

    def _replan(self, index: int, seen: Sequence[int]) -> Sequence[int]:
        """The reply to what the KV was computed from."""
        again = self.replies[index].again
        if again is not None:
            self.replies[index] = again(seen)
        return self.replies[index].tokens

    def notify(self, index: int) -> None:
        self._fresh[index] = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def progress(self) -> AsyncIterator[Progress]:
        """What came, as it comes; tokens that came while the reader was busy arrive together.

        Raises the ApiError of a sequence that failed.
        """
        while self._open:
            if not self._fresh:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            fresh, self._fresh = self._fresh, {}
            for index in fresh:
                work = self.works[index]
                start, self._taken[index] = self._taken[index], work.emitted
                if work.error is not None:
                    work.error.told = True
                    raise work.error
                ended = work.state in ENDED
                self._open -= ended
                yield Progress(index, start, work.emitted, ended)

    async def wait(self) -> None:
        """Until every sequence has ended."""
        async for _ in self.progress():
            pass

    def abort(self) -> None:
        """Free whatever still runs or waits; a reader sees it end."""
        for index, work in enumerate(self.works):
            if work.state != "new" and work.state not in ENDED:
                self._driver.scheduler.abort(work)
                self._driver.wake()
                self.notify(index)

    def reason(self, index: int) -> str:
        """Why sequence ``index`` ended: stop, length, tool_calls, abort or error."""
        odd = {"aborted": "abort", "failed": "error"}
        return odd.get(self.works[index].state, self.replies[index].finish)


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
                if work.link is not None and work.link.hold(work):
                    work.state, work.arrived = "held", now
                else:
                    self.scheduler.submit(work, now)
        except Exception:
            job.abort()
            raise
        self._wake.set()

    def wake(self) -> None:
        """Room or work has come from outside of a step."""
        self._wake.set()

    def queue(self, work: Work) -> None:
        """Queue a sequence that was held. Raises QueueFull."""
        arrived = work.arrived
        self.scheduler.submit(work, asyncio.get_running_loop().time())
        work.arrived = arrived
        self._wake.set()

    def received(self, work: Work, tokens: Sequence[int]) -> None:
        """What a sequence waited for has come."""
        self.scheduler.received(work, tokens, asyncio.get_running_loop().time())
        self._wake.set()

    def recompute(self, work: Work) -> None:
        self.scheduler.recompute(work)
        self._wake.set()

    def fail(self, work: Work, error: ApiError) -> None:
        """End a sequence with an error, if it still goes on."""
        self.scheduler.fail(work, error)
        self._tell(work)

    def release(self, work: Work) -> None:
        """Give back what a link kept; a sequence that was still sending ends by that."""
        sending = work.state == "sending"
        self.scheduler.release(work)
        if sending:
            self._tell(work)
        self._wake.set()

    def _tell(self, work: Work) -> None:
        job, index = work.owner
        job.notify(index)
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
            if not step.work:
                for work in self.scheduler.complete(step, now):
                    self._tell(work)
                # Nothing fits, or all that was there waits for another engine: whoever changes that wakes this.
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
                continue
            due = max(due, now - self.SLACK) + step.seconds * self.time_scale
            await asyncio.sleep(max(0.0, due - now))
            touched = self.scheduler.complete(step, loop.time())
            if self._stepped is not None:
                self._stepped(step)
            for work in touched:
                job, index = work.owner
                job.notify(index)
