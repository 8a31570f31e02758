"""Continuous batching at the grain of one step: pure and synchronous; whoever drives it sleeps.

Every step first serves what runs, oldest first: one token for a sequence that decodes, a chunk of at most
``chunk_tokens`` for one whose prompt is not computed yet. What is left of the budget admits waiting sequences in
order of arrival, and stops at the first that does not fit. When KV runs out the youngest running sequence loses its
KV and goes back to the head of the queue; it computes its prompt and what it had generated again, less what the cache
still holds. This is the order of vLLM's V1 scheduler; SGLang's differs in detail, not in what a gateway can see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.physics import Rates, step_seconds
from load_tests.engine.tiers import NOWHERE, Sources


class QueueFull(Exception):
    """The waiting queue is at its limit."""


@dataclass(eq=False, slots=True)
class Work:
    """One prompt and the reply it will produce. ``planned`` empty: only the prompt is computed (embeddings).

    tokens: prompt and what was generated so far. computed: leading tokens whose KV exists. cached: the hit counted
    at first admission. emitted: generated tokens so far. arrived, admitted, first, finished: seconds of ``now``.
    """

    prompt: Sequence[int]
    planned: Sequence[int]
    namespace: str = ""
    session: str = ""
    report_all: bool = False
    owner: Any = None
    tokens: list[int] = field(init=False)
    holding: Holding = field(init=False)
    computed: int = 0
    cached: int | None = None
    sources: Sources = NOWHERE
    emitted: int = 0
    preempted: int = 0
    state: str = "new"
    arrived: float = 0.0
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.holding = Holding(self.namespace, self.session, self.report_all)


@dataclass(slots=True)
class Step:
    """What one step does: (sequence, new tokens) in order, and how long it takes in seconds."""

    work: list[tuple[Work, int]]
    seconds: float
    prefill_tokens: int
    decodes: int


@dataclass(slots=True)
class Counters:
    """Totals since start. prompt, cached and computed are counted when a sequence is first admitted to a step, with
    computed = prompt - cached; host and disk are the part of cached that came from there; recomputed counts the prompt
    and output tokens that preemption made computing again."""

    requests: int = 0
    finished: int = 0
    aborts: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


class Scheduler:
    """``chunk_tokens`` bounds the tokens of one step, decodes included; ``max_queued`` None is unbounded."""

    def __init__(
        self,
        cache: KVCache,
        rates: Rates,
        *,
        max_running: int = 64,
        chunk_tokens: int = 2048,
        max_queued: int | None = None,
    ) -> None:
        self.cache = cache
        self.rates = rates
        self.max_running = max_running
        self.chunk_tokens = max(chunk_tokens, 1)
        self.max_queued = max_queued
        self.running: list[Work] = []
        self.waiting: deque[Work] = deque()
        self.totals = Counters()
        self._restoring = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def submit(self, sequence: Work, now: float = 0.0) -> None:
        """Queue a sequence; QueueFull if ``max_queued`` already wait."""
        if self.max_queued is not None and len(self.waiting) >= self.max_queued:
            raise QueueFull
        sequence.state, sequence.arrived = "waiting", now
        self.waiting.append(sequence)
        self.totals.requests += 1

    def abort(self, sequence: Work) -> None:
        """Drop a sequence wherever it is and free its KV at once; does nothing to one that has ended."""
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "running":
            self.running.remove(sequence)
            self.cache.close(sequence.holding, sequence.tokens, sequence.computed)
        else:
            return
        sequence.state = "aborted"
        self.totals.aborts += 1

    def plan(self, now: float = 0.0) -> Step:
        """Choose the work of the next step and reserve its KV. An empty step means that there is nothing to do."""
        work: list[tuple[Work, int]] = []
        budget = self.chunk_tokens
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            new = min(len(sequence.tokens) - sequence.computed, budget)
            while not self.cache.grow(sequence.holding, sequence.tokens, sequence.computed + new):
                preempted = True
                if self._preempt_youngest() is sequence:
                    break
            else:
                work.append((sequence, new))
                budget -= new
            index += 1
        if not preempted:
            self._admit(work, budget, now)
        return self._measure(work)

    def complete(self, step: Step, now: float = 0.0) -> list[Work]:
        """The step's time has passed: sequences that produced a token, or ended, in order. Aborted ones are absent."""
        touched: list[Work] = []
        for sequence, new in step.work:
            if sequence.state != "running":
                continue
            sequence.computed += new
            prefilling = new > 1 or sequence.emitted == 0
            if sequence.computed < len(sequence.tokens):
                self.cache.commit(sequence.holding, sequence.tokens, sequence.computed)
                continue
            if prefilling:
                self.cache.commit(sequence.holding, sequence.tokens, sequence.computed)
            self._sample(sequence, now)
            touched.append(sequence)
        return touched

    def step(self, now: float) -> tuple[list[Work], float]:
        """Plan and complete in one call, for virtual time: what was produced, and the seconds that it takes."""
        step = self.plan(now)
        return self.complete(step, now + step.seconds), step.seconds

    def _sample(self, sequence: Work, now: float) -> None:
        if sequence.first is None:
            sequence.first = now
        if sequence.emitted < len(sequence.planned):
            sequence.tokens.append(sequence.planned[sequence.emitted])
            sequence.emitted += 1
            self.totals.generated_tokens += 1
        if sequence.emitted >= len(sequence.planned):
            self.running.remove(sequence)
            self.cache.close(sequence.holding, sequence.tokens, sequence.computed)
            sequence.state, sequence.ended = "finished", now
            self.totals.finished += 1

    def _admit(self, work: list[tuple[Work, int]], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            hit = self.cache.match(sequence.holding, sequence.tokens)
            new = min(len(sequence.tokens) - hit, budget)
            if not self.cache.open(sequence.holding, sequence.tokens, hit, hit + new):
                return
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.state, sequence.computed = "running", hit
            found = sequence.holding.sources
            self._restoring += found.host * self.rates.host + found.disk * self.rates.disk
            self._count_admission(sequence, hit, now)
            work.append((sequence, new))
            budget -= new

    def _count_admission(self, sequence: Work, hit: int, now: float) -> None:
        if sequence.cached is not None:
            self.totals.recomputed_tokens += len(sequence.tokens) - hit
            return
        sequence.cached, sequence.admitted, sequence.sources = hit, now, sequence.holding.sources
        self.totals.host_tokens += sequence.sources.host
        self.totals.disk_tokens += sequence.sources.disk
        self.totals.prompt_tokens += len(sequence.tokens)
        self.totals.cached_tokens += hit
        self.totals.computed_tokens += len(sequence.tokens) - hit

    def _preempt_youngest(self) -> Work:
        victim = self.running.pop()
        self.cache.close(victim.holding, victim.tokens, victim.computed)
        victim.state, victim.computed = "waiting", 0
        victim.preempted += 1
        self.waiting.appendleft(victim)
        self.totals.preemptions += 1
        return victim

    def _measure(self, work: list[tuple[Work, int]]) -> Step:
        if not work:
            return Step(work, 0.0, 0, 0)
        chunks: list[tuple[int, int]] = []
        decodes = contexts = 0
        for sequence, new in work:
            if new == 1 and sequence.emitted:
                decodes += 1
                contexts += sequence.computed
            else:
                chunks.append((sequence.computed, new))
        self.totals.steps += 1
        prefill = sum(new for _, new in chunks)
        restoring, self._restoring = self._restoring, 0.0
        return Step(work, restoring + step_seconds(self.rates, chunks, decodes, contexts), prefill, decodes)
