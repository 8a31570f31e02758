"""One engine without its sockets: ranks, sessions, stored responses, faults and accounting."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from load_tests.engine.asks import Traits
from load_tests.engine.disagg.choose import make_connector
from load_tests.engine.disagg.connector import JSON
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError, queue_full
from load_tests.engine.faults import Faults
from load_tests.engine.language import load_language
from load_tests.engine.options import EngineOptions
from load_tests.engine.publisher import EventBus, Events, Publisher
from load_tests.engine.rank import Rank
from load_tests.engine.recorder import Recorder
from load_tests.engine.replies import Reply
from load_tests.engine.sessions import OpenSessions
from load_tests.engine.work import QueueFull, Work

STORED_RESPONSES = 1000
EMPTY = Reply([], [], "", "", "stop")


class Core:
    """``changed`` is called when the faults that stand change. ``bus`` is None where no events are published."""

    def __init__(self, options: EngineOptions, changed: Callable[[], None]) -> None:
        self.options = options
        self.faults = Faults(changed)
        self.recorder = Recorder()
        self.language = load_language(options.tokenizer, options.template)
        self.restarts = 0
        self.errors = 0
        self.traffic = Traffic()
        self._side_port = options.side_port
        old = options.event_format == "positional"
        self._publishers = [
            Publisher(rank, options.topic, options.buffer_steps, old_replay=old)
            for rank in range(options.ranks if options.publishes else 0)
        ]
        self.bus: EventBus | None = None
        if options.publishes:
            self.bus = EventBus(options.host, self._publishers, options.events_port or 0, options.replay_port)
        self.events = Events(self._publishers)
        self._start()

    def _start(self) -> None:
        self.started = time.time()
        self._next_rank = 0
        # Steps that /metrics of TensorRT-LLM has told of.
        self.drained = 0
        publishers: Sequence[Publisher | None] = self._publishers or [None] * self.options.ranks
        self.ranks = [Rank(self.options, number, publisher) for number, publisher in enumerate(publishers)]
        self.sessions: set[str] = set()
        self.opened = OpenSessions(self.options.streaming_sessions)
        self.responses: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.jobs: dict[str, Job] = {}
        self.connector = make_connector(self.options, self.faults, self.traffic, self._side_port)
        self.connector.serve(self.ranks)

    @property
    def busy(self) -> bool:
        return any(rank.scheduler.engaged for rank in self.ranks)

    def run(self) -> None:
        """Start serving: sockets of events, and a driver for each rank. OSError if a port is taken."""
        if self.bus is not None:
            self.bus.open()
        for rank in self.ranks:
            rank.driver.start()

    async def open(self) -> None:
        """Let other engines in; after a restart on the same port. OSError if it is taken."""
        await self.connector.open()
        self._side_port = self.connector.port or 0

    async def halt(self) -> None:
        """Stop every rank as a process that ends: what was not published is lost."""
        await self.connector.close()
        for rank in self.ranks:
            await rank.driver.stop()
        if self.bus is not None:
            self.bus.close()

    def reset(self) -> None:
        """A new process: nothing cached, no session, no stored response; the accounting of /sim/stats goes on."""
        totals = [rank.scheduler.totals for rank in self.ranks]
        self._start()
        for rank, kept in zip(self.ranks, totals, strict=True):
            rank.scheduler.totals = kept
        self.restarts += 1

    def clear_caches(self, below: bool = False) -> bool:
        """Forget what every rank has cached; False if one of them is in use."""
        cleared = [rank.clear(below) for rank in self.ranks]
        return all(cleared)

    def pick(self, wanted: int | None) -> Rank:
        """The rank asked for, 400 if there is none such; or the engine's own choice, which knows no cache.

        SGLang goes round; vLLM takes the least loaded, and goes round among equals.
        """
        count = len(self.ranks)
        if wanted is not None:
            if not 0 <= wanted < count:
                raise ApiError(400, f"data_parallel_rank {wanted} is out of range [0, {count}).")
            return self.ranks[wanted]
        turn = [self.ranks[(self._next_rank + place) % count] for place in range(count)]
        chosen = turn[0] if self.options.dialect == "sglang" else min(turn, key=lambda rank: rank.load)
        self._next_rank = (chosen.number + 1) % count
        return chosen

    def begin(
        self,
        name: str,
        prompts: Sequence[Sequence[int]],
        replies: Sequence[Reply | None],
        traits: Traits,
        body: JSON | None = None,
    ) -> Job:
        """Queue one request of one or more sequences under ``name``; a reply of None computes the prompt only. ``body``
        is what may tie it to another engine.

        Raises ApiError: 503 in the dialect's words when the queue is at its limit, 400 for a rank that is none.
        """
        body = body or {}
        rank = self.pick(self.connector.rank(body) if traits.rank is None else traits.rank)
        works = [
            Work(
                prompt,
                reply.tokens if reply else (),
                traits.namespace,
                traits.session,
                traits.report_all,
                traits.slot,
                traits.priority,
            )
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        job = Job(rank.driver, works, [reply or EMPTY for reply in replies], rank.number)
        self.connector.attach(job, name, body, rank)
        try:
            rank.driver.submit(job)
        except QueueFull:
            rank.measures.rejected += 1
            for work in works:
                if work.state == "new" and work.link is not None:
                    work.link.left(work)
            error = queue_full(self.options.dialect)
            error.told = True
            raise error from None
        self.jobs[name] = job
        return job

    def end(self, name: str, job: Job) -> None:
        """Every request passes here when it leaves, whatever happened: what still runs is aborted."""
        job.abort()
        if self.jobs.get(name) is job:
            del self.jobs[name]
        for index, work in enumerate(job.works):
            self.ranks[job.rank].measures.observe(work, job.reason(index))

    def abort_named(self, prefix: str) -> None:
        """Abort every request whose name starts with ``prefix``, as SGLang's scheduler matches them."""
        for name, job in list(self.jobs.items()):
            if name.startswith(prefix):
                job.abort()

    def remember(self, response: dict[str, Any]) -> None:
        """Store a finished response for previous_response_id; the oldest goes beyond STORED_RESPONSES."""
        self.responses[response["response"]["id"]] = response
        while len(self.responses) > STORED_RESPONSES:
            self.responses.popitem(last=False)

    def stats(self) -> dict[str, Any]:
        """The engine's own accounting, as GET /sim/stats prints it, summed over ``ranks``, which has each one's.

        Block counts are in blocks of this engine.
        """
        ranks = [rank.stats() for rank in self.ranks]
        return {
            **{name: sum(each[name] for each in ranks) for name in ranks[0]},
            "errors": self.errors,
            "sessions": len(self.sessions),
            "opened_sessions": len(self.opened),
            "restarts": self.restarts,
            "disaggregation": self.connector.stats(self.ranks),
            "ranks": ranks,
        }
