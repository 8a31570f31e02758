"""One engine without its sockets: cache, scheduler, sessions, stored responses, faults and accounting."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from load_tests.engine.blocks import BlockCache
from load_tests.engine.cache import KVCache
from load_tests.engine.driver import Driver, Job
from load_tests.engine.errors import queue_full
from load_tests.engine.faults import Faults
from load_tests.engine.metrics import Measures
from load_tests.engine.options import EngineOptions
from load_tests.engine.radix import RadixCache
from load_tests.engine.recorder import Recorder
from load_tests.engine.replies import Reply
from load_tests.engine.scheduler import QueueFull, Scheduler, Work
from load_tests.engine.slots import SlotCache

STORED_RESPONSES = 1000
EMPTY = Reply([], [], "", "", "stop")


def make_cache(options: EngineOptions) -> KVCache:
    if options.dialect == "sglang":
        return RadixCache(options.num_blocks, options.block_size, reuse=options.prefix_cache)
    if options.dialect == "llamacpp":
        return SlotCache(options.max_running, options.context_length, reuse=options.prefix_cache)
    return BlockCache(options.num_blocks, options.block_size, reuse=options.prefix_cache)


class Core:
    """``changed`` is called when the faults that stand change."""

    def __init__(self, options: EngineOptions, changed: Callable[[], None]) -> None:
        self.options = options
        self.faults = Faults(changed)
        self.recorder = Recorder()
        self.measures = Measures()
        self.restarts = 0
        self.errors = 0
        self._start()

    def _start(self) -> None:
        options = self.options
        self.started = time.time()
        self.cache = make_cache(options)
        self.scheduler = Scheduler(
            self.cache,
            options.rates,
            max_running=options.max_running,
            chunk_tokens=options.chunk_tokens,
            max_queued=options.max_queued,
        )
        self.driver = Driver(self.scheduler, options.time_scale)
        self.sessions: set[str] = set()
        self.responses: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.jobs: dict[str, Job] = {}

    def reset(self) -> None:
        """A new process: nothing cached, no session, no stored response; the accounting of /sim/stats goes on."""
        totals = self.scheduler.totals
        self._start()
        self.scheduler.totals = totals
        self.measures = Measures()
        self.restarts += 1

    def begin(
        self, name: str, prompts: Sequence[Sequence[int]], replies: Sequence[Reply | None], namespace: str = ""
    ) -> Job:
        """Queue one request of one or more sequences under ``name``; a reply of None computes the prompt only.

        Raises ApiError 503 in the dialect's words when the queue is at its limit.
        """
        works = [
            Work(prompt, reply.tokens if reply else (), namespace)
            for prompt, reply in zip(prompts, replies, strict=True)
        ]
        job = Job(self.driver, works, [reply or EMPTY for reply in replies])
        try:
            self.driver.submit(job)
        except QueueFull:
            self.measures.rejected += 1
            raise queue_full(self.options.dialect) from None
        self.jobs[name] = job
        return job

    def end(self, name: str, job: Job) -> None:
        """Every request passes here when it leaves, whatever happened: what still runs is aborted."""
        job.abort()
        if self.jobs.get(name) is job:
            del self.jobs[name]
        for index, work in enumerate(job.works):
            self.measures.observe(work, job.reason(index))

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

    def stats(self) -> dict[str, int]:
        """The engine's own accounting, as GET /sim/stats prints it. Block counts are in blocks of this engine."""
        totals, scheduler, cache = self.scheduler.totals, self.scheduler, self.cache
        held = cache.recount(work.holding for work in scheduler.running)
        return {
            "requests": totals.requests,
            "finished": totals.finished,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "computed_tokens": totals.computed_tokens,
            "recomputed_tokens": totals.recomputed_tokens,
            "generated_tokens": totals.generated_tokens,
            "steps": totals.steps,
            "kv_blocks": cache.num_blocks,
            "kv_blocks_used": held,
            "kv_blocks_cached": cache.cached_blocks,
            "kv_blocks_leaked": cache.used_blocks - held,
            "aborts": totals.aborts,
            "preemptions": totals.preemptions,
            "errors": self.errors,
            "sessions": len(self.sessions),
            "evicted_blocks": cache.evicted_blocks,
            "restarts": self.restarts,
        }
