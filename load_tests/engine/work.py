"""What a scheduler works on: sequences, steps, what ties a sequence to another engine, and totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from load_tests.engine.cache import Holding
from load_tests.engine.errors import ApiError
from load_tests.engine.tiers import NOWHERE, Sources


class QueueFull(Exception):
    """The waiting queue is at its limit."""


class Link(Protocol):
    """What ties one sequence to another engine."""

    def hold(self, work: Work) -> bool:
        """Whether the sequence is not to be queued yet; the link queues it then."""

    def wanted(self, tokens: int, hit: int) -> int:
        """How many of ``tokens`` beyond the local hit come from elsewhere; 0: they are computed."""

    def begin(self, work: Work, hit: int, upto: int) -> None:
        """There is room for tokens ``hit:upto``: bring them."""

    def spared(self, work: Work) -> None:
        """Nothing has to be brought: it is here, or not worth it."""

    def finish(self, work: Work) -> bool:
        """The sequence has ended well; True keeps its KV until ``Scheduler.release``."""

    def left(self, work: Work) -> None:
        """The sequence was aborted or failed."""

    def retracted(self) -> ApiError | None:
        """Why a sequence that loses its KV cannot start again; None if it can."""


@dataclass(eq=False, slots=True)
class Work:
    """One prompt and the reply it will produce. ``planned`` empty: only the prompt is computed (embeddings).

    tokens: prompt and what was generated so far. computed: leading tokens whose KV exists. cached: the hit counted
    at first admission, brought tokens included. emitted: generated tokens so far. arrived, admitted, first, ended:
    seconds of ``now``. reported: the hit to tell of instead. brought: tokens whose KV came from another engine.
    seen: what the KV was computed from, None where that is ``tokens``; ``replan`` gives the reply to it. params: what
    the answer says of KV that is kept. states: new, held, waiting, receiving, running, sending; finished, aborted,
    failed with ``error``.
    """

    prompt: Sequence[int]
    planned: Sequence[int]
    namespace: str = ""
    session: str = ""
    report_all: bool = False
    slot: int | None = None
    priority: int = 0
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
    link: Link | None = None
    reported: int | None = None
    brought: int = 0
    seen: list[int] | None = None
    replan: Callable[[Sequence[int]], Sequence[int]] | None = None
    params: dict[str, Any] | None = None
    error: ApiError | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.holding = Holding(self.namespace, self.session, self.report_all, self.slot)
        self.holding.priority = self.priority


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
    computed = prompt - cached - transferred; host and disk are the part of cached that came from there, transferred came
    from another engine; recomputed counts the prompt and output tokens that preemption made computing again. The aborted ones
    are the parts of prompt, cached and generated that belong to sequences whose client did not wait for the end."""

    requests: int = 0
    finished: int = 0
    aborts: int = 0
    failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    transferred_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    aborted_prompt_tokens: int = 0
    aborted_cached_tokens: int = 0
    aborted_generated_tokens: int = 0
    steps: int = 0
