"""Continuous batching at the grain of one step: pure and synchronous; whoever drives it sleeps.

Every step first serves what runs, oldest first: one token for a sequence that decodes, a chunk of at most
``chunk_tokens`` for one whose prompt is not computed yet. What is left of the budget admits waiting sequences in
order of arrival, and stops at the first that does not fit. When KV runs out the youngest running sequence loses its
KV and goes back to the head of the queue; it computes its prompt and what it had generated again, less what the cache
still holds. This is the order of vLLM's V1 scheduler; SGLang's differs in detail, not in what a gateway can see.

A sequence with a link shares its work with another engine. What the link brings is given room first and then waits,
in nobody's way, until it has come (``received``) or cannot come (``recompute``, ``fail``). What the link keeps at the
end stays in memory until it says ``release``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.disagg.contents import Contents
from load_tests.engine.errors import ApiError
from load_tests.engine.physics import Rates, step_seconds
from load_tests.engine.work import Counters, QueueFull, Step, Work


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
        self.receiving: list[Work] = []
        self.kept: list[Work] = []
        self.contents = Contents(cache.block_size)
        self.fallen: list[Work] = []
        self.totals = Counters()
        self._restoring = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def engaged(self) -> bool:
        """Whether a client still waits for one of its sequences."""
        sending = any(work.state == "sending" for work in self.kept)
        return self.busy or bool(self.receiving) or sending

    def holdings(self) -> Iterator[Holding]:
        """Whatever holds room, for a recount."""
        for works in (self.running, self.waiting, self.receiving, self.kept):
            yield from (work.holding for work in works)

    def submit(self, sequence: Work, now: float = 0.0) -> None:
        """Queue a sequence; QueueFull if ``max_queued`` already wait."""
        if self.max_queued is not None and len(self.waiting) >= self.max_queued:
            raise QueueFull
        sequence.state, sequence.arrived = "waiting", now
        self.waiting.append(sequence)
        self.totals.requests += 1

    def abort(self, sequence: Work) -> None:
        """Drop a sequence wherever it is and free its KV at once; does nothing to one that has ended."""
        if self._drop(sequence):
            sequence.state = "aborted"
            self.totals.aborts += 1
            if sequence.cached is not None:
                self.totals.aborted_prompt_tokens += len(sequence.prompt)
                self.totals.aborted_cached_tokens += sequence.cached - sequence.brought
                self.totals.aborted_generated_tokens += sequence.emitted
            if sequence.link is not None:
                sequence.link.left(sequence)

    def fail(self, sequence: Work, error: ApiError) -> None:
        """Drop a sequence that cannot go on; whoever waits for it is answered with ``error``."""
        if self._drop(sequence):
            sequence.state, sequence.error = "failed", error
            self.totals.failed += 1
            if sequence.link is not None:
                sequence.link.left(sequence)

    def received(self, sequence: Work, tokens: Sequence[int], now: float = 0.0) -> None:
        """The KV that a receiving sequence waits for is there; it was computed from ``tokens``."""
        self.receiving.remove(sequence)
        hit, upto = sequence.computed, sequence.computed + sequence.brought
        brought = [*tokens[: sequence.brought], *([0] * (sequence.brought - len(tokens)))]
        sequence.holding.loading = False
        sequence.computed = min(upto, len(sequence.tokens) - 1)
        self._count_admission(sequence, hit, now, brought)
        sequence.state = "waiting"
        self.waiting.appendleft(sequence)

    def recompute(self, sequence: Work) -> None:
        """What a receiving sequence waits for does not come: it is computed here."""
        if self._drop(sequence):
            sequence.state, sequence.computed, sequence.brought = "waiting", 0, 0
            self.waiting.appendleft(sequence)

    def release(self, sequence: Work) -> None:
        """Give back what a link kept. Idempotent."""
        if sequence in self.kept:
            self.kept.remove(sequence)
            self.cache.close(sequence.holding, sequence.tokens, sequence.computed)
            if sequence.state == "sending":
                sequence.state = "finished"

    def _drop(self, sequence: Work) -> bool:
        """Take a sequence out of wherever it is, with its KV; False if it is nowhere."""
        if sequence.state == "waiting":
            self.waiting.remove(sequence)
        elif sequence.state == "running":
            self.running.remove(sequence)
        elif sequence.state == "receiving":
            self.receiving.remove(sequence)
        elif sequence.state == "sending":
            self.kept.remove(sequence)
        elif sequence.state != "held":
            return False
        if sequence.holding.open:
            self.cache.close(sequence.holding, sequence.tokens, sequence.computed)
        sequence.holding.loading = False
        return True

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
        if not preempted or not work:
            self._admit(work, budget, now)
        return self._measure(work)

    def complete(self, step: Step, now: float = 0.0) -> list[Work]:
        """The step's time has passed: sequences that produced a token, or ended, in order. Aborted ones are absent."""
        touched, self.fallen = self.fallen, []
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
            if sequence.state != "sending":
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
            sequence.state, sequence.ended = "finished", now
            self.totals.finished += 1
            if sequence.seen is not None or len(self.contents):
                whole = self.seen_of(sequence)[: sequence.computed]
                self.contents.write(sequence.namespace, sequence.tokens, whole, len(sequence.prompt))
            if sequence.link is not None and sequence.link.finish(sequence):
                self.kept.append(sequence)
            else:
                self.cache.close(sequence.holding, sequence.tokens, sequence.computed)

    @staticmethod
    def seen_of(sequence: Work) -> list[int]:
        """The tokens that a sequence's KV was computed from."""
        seen = sequence.seen or []
        return [*seen, *sequence.tokens[len(seen) :]]

    def _admit(self, work: list[tuple[Work, int]], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if sequence.holding.open:
                new = min(len(sequence.tokens) - sequence.computed, budget)
                if not self.cache.grow(sequence.holding, sequence.tokens, sequence.computed + new):
                    return
                self._start(work, sequence, new)
                budget -= new
                continue
            hit = self.cache.match(sequence.holding, sequence.tokens)
            external = self._external(sequence, hit)
            if external:
                if not self._receive(sequence, hit, external):
                    return
                continue
            new = min(len(sequence.tokens) - hit, budget)
            if not self.cache.open(sequence.holding, sequence.tokens, hit, hit + new):
                return
            if sequence.link is not None and sequence.cached is None:
                sequence.link.spared(sequence)
            sequence.computed = hit
            self._count_admission(sequence, hit, now)
            self._start(work, sequence, new)
            budget -= new

    def _start(self, work: list[tuple[Work, int]], sequence: Work, new: int) -> None:
        self.waiting.popleft()
        self.running.append(sequence)
        sequence.state = "running"
        work.append((sequence, new))

    def _external(self, sequence: Work, hit: int) -> int:
        """How many tokens another engine is to give. A sequence that had run before computes for itself."""
        if sequence.link is None or sequence.cached is not None:
            return 0
        return sequence.link.wanted(len(sequence.tokens), hit)

    def _receive(self, sequence: Work, hit: int, external: int) -> bool:
        """Take memory for what is to come; False if there is none."""
        assert sequence.link is not None
        sequence.holding.loading = True
        if not self.cache.open(sequence.holding, sequence.tokens, hit, hit + external):
            sequence.holding.loading = False
            return False
        self.waiting.popleft()
        self.receiving.append(sequence)
        sequence.state, sequence.computed, sequence.brought = "receiving", hit, external
        sequence.link.begin(sequence, hit, hit + external)
        return True

    def _count_admission(self, sequence: Work, hit: int, now: float, brought: Sequence[int] = ()) -> None:
        found = sequence.holding.sources
        self._restoring += found.host * self.rates.host + found.disk * self.rates.disk
        if sequence.cached is not None:
            self.totals.recomputed_tokens += len(sequence.tokens) - hit
            return
        sequence.cached, sequence.admitted, sequence.sources = hit + len(brought), now, found
        self.totals.host_tokens += sequence.sources.host
        self.totals.disk_tokens += sequence.sources.disk
        self.totals.prompt_tokens += len(sequence.tokens)
        self.totals.cached_tokens += hit
        self.totals.transferred_tokens += len(brought)
        self.totals.computed_tokens += len(sequence.tokens) - hit - len(brought)
        if brought or len(self.contents):
            self._learn(sequence, hit, brought)

    def _learn(self, sequence: Work, hit: int, brought: Sequence[int]) -> None:
        """Note what the prompt's KV comes from; the reply is made from that."""
        prompt = sequence.tokens
        seen = [*self.contents.seen(sequence.namespace, prompt, hit), *brought]
        seen += prompt[len(seen) :]
        if seen == prompt and not len(self.contents):
            return
        self.contents.write(sequence.namespace, prompt, seen, hit)
        if seen != prompt:
            sequence.seen = seen
            if sequence.replan is not None:
                sequence.planned = sequence.replan(seen)

    def _preempt_youngest(self) -> Work:
        victim = self.running[-1]
        if victim.link is not None and (error := victim.link.retracted()) is not None:
            self.fail(victim, error)
            self.fallen.append(victim)
            return victim
        self.running.pop()
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
