"""One engine: continuous batching with chunked prefill, advanced by events instead of by steps.

The order is that of a step of the HTTP engine's scheduler: decodes first, oldest first; then the prompt that is partly
computed; then waiting ones in order of arrival while budget and KV last. When KV runs out the youngest loses its own and goes
back to the head of the queue.

Two facts make it fast. Whoever was admitted with less than its whole prompt took all that was left of the budget, so at most
one prompt is partly computed, and it is the youngest that runs. And while nothing is prefilled, steps differ only by one more
token of context for each sequence: so many of them are one *run*, whose end is an arithmetic series. A run ends with the
first sequence that ends, when KV runs out, or at the first step after an arrival.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from kv_index.checkpoints import Rule
from load_tests.engine.physics import Rates, step_seconds
from load_tests.simulate.cache import BlockCache


@dataclass(frozen=True, slots=True)
class Options:
    """One engine's size, in tokens. ``states``: where a hybrid model keeps its state, to the block before; ``events``: it
    tells what its cache holds."""

    kv_tokens: int = 500_000
    block: int = 16
    max_running: int = 64
    chunk_tokens: int = 2048
    rates: Rates = field(default_factory=Rates)
    host_tokens: int = 0
    states: Rule | None = None
    events: bool = False

    def __post_init__(self) -> None:
        if self.block < 1 or self.kv_tokens < self.block:
            raise ValueError(f"kv_tokens must be at least one block of {self.block} tokens, not {self.kv_tokens}")
        if not 1 <= self.max_running < self.chunk_tokens:
            raise ValueError(f"max_running must be from 1 to less than chunk_tokens, not {self.max_running}")


@dataclass(slots=True, eq=False)
class Work:
    """One request on one engine. ``ids``: of its prompt's full blocks, then of those that its answer fills."""

    prompt: int
    output: int
    ids: Sequence[int]
    owner: Any = None
    transferred: bool = False
    """Its prompt's KV comes from another engine."""
    kept: str | None = None
    """Whose KV it goes on from and leaves for the next one, as a streaming session does; ``None``: nobody's."""
    cached: int | None = None
    """The hit, counted at first admission."""
    computed: int = 0
    """Leading tokens whose KV exists."""
    emitted: int = 0
    blocks: int = 0
    """Blocks that it has, the first ``published`` of them by id."""
    published: int = 0
    arrived: float = 0.0
    first: float | None = None
    ended: float | None = None

    @property
    def tokens(self) -> int:
        """Of the prompt and what was generated."""
        return self.prompt + self.emitted


@dataclass(slots=True)
class Totals:
    """Since start. Of a request that was preempted the prompt counts once; ``recomputed`` is what it cost again."""

    requests: int = 0
    finished: int = 0
    prompt: int = 0
    cached: int = 0
    computed: int = 0
    recomputed: int = 0
    generated: int = 0
    preemptions: int = 0
    steps: int = 0


class Engine:
    """See the module's head. ``due`` is when its present run ends; ``None`` while it has nothing to do."""

    def __init__(self, options: Options) -> None:
        self.options = options
        size = options.block
        self.cache = BlockCache(options.kv_tokens // size, options.host_tokens // size, options.events)
        self.held: dict[str, tuple[Sequence[int], int]] = {}
        """What streaming sessions keep between their turns: ids and blocks without one, the one that rests longest first."""
        self.totals = Totals()
        self.waiting: deque[Work] = deque()
        self.decoding: list[Work] = []
        self.chunks: list[tuple[Work, int]] = []
        """Prompts of the present step, and how many tokens of each."""
        self.partial: Work | None = None
        """The prompt that is computed in part."""
        self.due: float | None = None
        self._began = 0.0
        self._steps = 0
        self._first_step = 0.0
        self._growth = 0.0
        self._restoring = 0.0
        """Seconds that the next step takes longer for what is copied back from host memory."""

    @property
    def running(self) -> int:
        """Requests that have KV. A prompt that is computed in part is among the chunks of a step."""
        return len(self.decoding) + len(self.chunks)

    @property
    def load(self) -> tuple[int, int]:
        """What it reports: requests that run and that wait."""
        return self.running, len(self.waiting)

    def submit(self, work: Work, now: float) -> None:
        """Queue ``work``; may bring ``due`` nearer."""
        work.arrived = now
        self.totals.requests += 1
        alone = not self.waiting
        self.waiting.append(work)
        if self.due is None:
            self._plan(now)
        elif alone and self._steps > 1 and len(self.decoding) < self.options.max_running:
            # Behind others that wait it changes nothing: they wait for room, and room comes with an end.
            self._cut(now)

    def advance(self) -> tuple[list[Work], list[Work]]:
        """The present run is over, at ``due``: requests that begin to answer, and those that end. Plans the next run."""
        now = self.due
        assert now is not None, "an idle engine has nothing to finish"
        begun: list[Work] = []
        ended: list[Work] = []
        self.totals.steps += self._steps
        self._decode(self._steps, ended)
        chunks, self.chunks = self.chunks, []
        self.partial = None
        for work, new in chunks:
            work.computed += new
            if work.computed < work.tokens:
                self.partial = work
                continue
            if work.first is None:
                work.first = now
                begun.append(work)
                if self.options.states is not None:
                    self._keep_states(work, work.prompt, work.cached or 0)
            if work.emitted < work.output:
                work.emitted += 1
                self.totals.generated += 1
            if work.emitted < work.output:
                self.decoding.append(work)
            else:
                ended.append(work)
        for work in ended:
            work.ended = now
            if self.options.states is not None:
                self._keep_states(work, work.computed, work.prompt)
            self._close(work)
        self.totals.finished += len(ended)
        self._plan(now)
        return begun, ended

    # -- steps ------------------------------------------------------------------------------------------------------

    def _decode(self, steps: int, ended: list[Work]) -> None:
        """Every decoding sequence has ``steps`` more tokens."""
        if not self.decoding:
            return
        left = []
        self.totals.generated += steps * len(self.decoding)
        for work in self.decoding:
            work.computed += steps
            work.emitted += steps
            self._grow(work, work.computed)
            if work.emitted < work.output:
                left.append(work)
            else:
                ended.append(work)
        self.decoding = left

    def _plan(self, now: float) -> None:
        """Choose the next run and reserve its KV."""
        budget = self.options.chunk_tokens
        preempted = self._make_room()
        budget -= len(self.decoding)
        if self.partial is not None:
            work = self.partial
            new = min(work.tokens - work.computed, budget)
            if self._grow(work, work.computed + new):
                self.chunks.append((work, new))
                budget -= new
            else:
                self._preempt()
                preempted = True
        if not preempted and self.waiting:
            self._admit(budget)
        if not self.chunks and not self.decoding:
            self.due = None
            return
        self._measure(now)
        self._steps = 1 if self.chunks or preempted else self._longest()
        self.due = self._time(self._steps)

    def _measure(self, now: float) -> None:
        """What the next step takes, and how much more each after it."""
        rates = self.options.rates
        restoring, self._restoring = self._restoring, 0.0
        # One last token to compute again after a preemption is a decode like others.
        single = [work.computed for work, new in self.chunks if new == 1 and work.emitted]
        chunks = [(work.computed, new) for work, new in self.chunks if new > 1 or not work.emitted]
        contexts = sum([work.computed for work in self.decoding]) + sum(single)
        self._began = now
        self._first_step = restoring + step_seconds(rates, chunks, len(self.decoding) + len(single), contexts)
        self._growth = rates.attention * len(self.decoding)

    def _make_room(self) -> bool:
        """Reserve one more token for every decoding sequence; whether somebody had to go for it."""
        preempted = False
        for work in list(self.decoding):
            if work.computed < work.blocks * self.options.block:
                continue
            while work in self.decoding and not self._grow(work, work.computed + 1):
                self._preempt()
                preempted = True
        return preempted

    def _admit(self, budget: int) -> None:
        options, cache = self.options, self.cache
        running = len(self.decoding) + len(self.chunks)
        while self.waiting and budget > 0 and running < options.max_running:
            work = self.waiting[0]
            if work.kept is not None:
                self._resume(work.kept)
            hit, restored = self._hit(work)
            cached = (hit + restored) * options.block
            if work.transferred:
                cached = work.tokens - 1
            new = min(work.tokens - cached, budget)
            blocks = -(-(cached + new) // options.block)
            while not cache.open(work.ids, hit, blocks):
                if not self.held:
                    return
                self._resume(next(iter(self.held)))
            self._restoring += restored * options.block * options.rates.host
            self.waiting.popleft()
            work.computed, work.blocks, work.published = cached, blocks, hit
            self._publish(work, cached + new)
            self._count(work, cached)
            self.chunks.append((work, new))
            running += 1
            budget -= new

    def _hit(self, work: Work) -> tuple[int, int]:
        """Blocks of the prompt that are on the device, and those behind them that can be brought back to it."""
        cache, most = self.cache, (work.tokens - 1) // self.options.block
        hit = cache.match(work.ids, most)
        restored = cache.found_below(work.ids, hit, most) if cache.below and not work.transferred else 0
        if self.options.states is not None and not work.transferred:
            usable = cache.resumable(work.ids, hit + restored)
            hit, restored = min(hit, usable), max(0, usable - hit)
        return hit, restored

    def _count(self, work: Work, cached: int) -> None:
        if work.cached is not None:
            self.totals.recomputed += work.tokens - cached
            return
        work.cached = cached
        self.totals.prompt += work.prompt
        self.totals.cached += cached
        self.totals.computed += work.prompt - cached

    def _preempt(self) -> None:
        """The youngest loses its KV."""
        work = self.partial
        if work is None:
            work = self.decoding.pop()
        self.partial = None
        self._close(work)
        work.computed = 0
        # What came from another engine is lost too, and is computed here now.
        work.transferred = False
        self.waiting.appendleft(work)
        self.totals.preemptions += 1

    # -- runs -------------------------------------------------------------------------------------------------------

    def _time(self, steps: int) -> float:
        """When the first ``steps`` of the present run are over."""
        return self._began + steps * self._first_step + self._growth * (steps * (steps - 1) / 2)

    def _longest(self) -> int:
        """Steps until the first decoding sequence ends or KV is short."""
        most = min([work.output - work.emitted for work in self.decoding])
        size, room = self.options.block, self.cache.room
        if len(self.decoding) * (most // size + 1) <= room:
            return most
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            wanted = sum([-(-(work.computed + middle) // size) - work.blocks for work in self.decoding])
            if wanted <= room:
                low = middle
            else:
                high = middle - 1
        return low

    def _cut(self, now: float) -> None:
        """Somebody arrived: the run ends with the step that runs at ``now``."""
        base, growth = self._first_step - self._growth / 2, self._growth / 2
        passed = now - self._began
        # The positive root of growth*n^2 + base*n = passed, in the form that is stable for a growth near 0.
        steps = int(2 * passed / (base + sqrt(base * base + 4 * growth * passed)))
        steps = max(1, min(steps - 1, self._steps))
        while steps < self._steps and self._time(steps) < now:
            steps += 1
        self._steps = steps
        self.due = self._time(steps)

    # -- KV ---------------------------------------------------------------------------------------------------------

    def _grow(self, work: Work, upto: int) -> bool:
        """Room for the first ``upto`` tokens; False, unchanged, if there is none."""
        missing = -(-upto // self.options.block) - work.blocks
        if missing > 0:
            while not self.cache.take(missing):
                if not self.held:
                    return False
                self._resume(next(iter(self.held)))
            work.blocks += missing
        self._publish(work, upto)
        return True

    def _publish(self, work: Work, upto: int) -> None:
        """As in vLLM a block can be found from when the step that fills it is scheduled."""
        full = min(upto // self.options.block, len(work.ids))
        if full > work.published:
            parent = work.ids[work.published - 1] if work.published else None
            self.cache.publish(work.ids[work.published : full], parent)
            work.published = full

    def _keep_states(self, work: Work, tokens: int, shared: int) -> None:
        assert self.options.states is not None
        for at in self.options.states.positions(tokens, self.options.block, shared):
            block = at // self.options.block
            if 0 < block <= work.published:
                self.cache.states.add(work.ids[block - 1])

    def _close(self, work: Work) -> None:
        ids, private = work.ids[: work.published], work.blocks - work.published
        work.blocks = work.published = 0
        if work.kept is not None and work.ended is not None and work.kept not in self.held:
            self.held[work.kept] = (ids, private)
        else:
            self.cache.close(ids, private)

    def _resume(self, session: str) -> None:
        """What ``session`` kept is as any other KV again."""
        kept = self.held.pop(session, None)
        if kept is not None:
            self.cache.close(*kept)

    # -- life -------------------------------------------------------------------------------------------------------

    def left(self, session: str) -> None:
        """``session`` is over."""
        self._resume(session)

    @property
    def unfinished(self) -> list[Work]:
        """Everything that runs or waits, in order of arrival."""
        running = [*self.decoding, *[work for work, _ in self.chunks]]
        return sorted([*running, *self.waiting], key=lambda work: work.arrived)
