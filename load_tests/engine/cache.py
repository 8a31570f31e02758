"""The contract of a KV cache, as the scheduler uses it, and what a sequence holds in one.

Three caches keep it: ``blocks.py`` (vLLM: full blocks, chained hashes), ``radix.py`` (SGLang: a token radix tree)
and ``slots.py`` (llama.cpp: one sequence per slot). All count room in units of ``block_size`` tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from load_tests.engine.tiers import Sources, Tiers

if TYPE_CHECKING:
    from load_tests.engine.journal import Journal


class Holding:
    """What one sequence holds: created once, opened when admitted, closed when finished, aborted or preempted.

    slot: the one that was asked for, where the cache has such.
    session labels the KV events that it causes; report_all: blocks it finds are told again, as if it stored them.
    marks and stated are a hybrid model's: positions whose state is kept, and up to where that has been done.
    sources: where the hit was found, once opened. loading: what it has room for is still to come, and is nobody's hit.
    """

    __slots__ = (
        "blocks",
        "digests",
        "loading",
        "marks",
        "namespace",
        "node",
        "open",
        "priority",
        "published",
        "report_all",
        "session",
        "slot",
        "sources",
        "stated",
    )

    def __init__(
        self, namespace: str = "", session: str = "", report_all: bool = False, slot: int | None = None
    ) -> None:
        self.namespace = namespace
        self.session = session
        self.report_all = report_all
        self.slot = slot
        self.priority = 0
        self.open = False
        self.loading = False
        self.blocks: list[int] = []
        self.digests: list[bytes] = []
        self.published = 0
        self.marks: Sequence[int] = ()
        self.stated = 0
        self.sources = Sources()
        self.node: Any = None


class KVCache(ABC):
    """Room for ``num_blocks`` blocks of ``block_size`` tokens.

    ``tokens`` is always the whole sequence known so far (prompt and generated); ``upto`` and ``computed`` count
    positions from its start. Nothing here reads a clock: recency is the order of calls.
    """

    block_size: int
    num_blocks: int
    evicted_blocks: int = 0
    # Where blocks that come and go are told of; None where nobody listens.
    journal: Journal | None = None
    # Where blocks that leave the device go; None where they are lost.
    tiers: Tiers | None = None

    @abstractmethod
    def match(self, holding: Holding, tokens: Sequence[int]) -> int:
        """How many leading tokens of ``tokens`` have KV here, as the engine would count a hit. Changes nothing."""

    @abstractmethod
    def open(self, holding: Holding, tokens: Sequence[int], hit: int, upto: int) -> bool:
        """Reference the first ``hit`` tokens and reserve room for the first ``upto``; False, unchanged, if no room."""

    @abstractmethod
    def grow(self, holding: Holding, tokens: Sequence[int], upto: int) -> bool:
        """Reserve room for the first ``upto`` tokens; False, unchanged, if there is none."""

    @abstractmethod
    def commit(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """The KV of the first ``computed`` tokens exists now (end of a prefill chunk)."""

    @abstractmethod
    def close(self, holding: Holding, tokens: Sequence[int], computed: int) -> None:
        """Give back every reference; what is complete stays cached. Idempotent."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget everything cached; False, unchanged, while a sequence holds something."""

    @property
    @abstractmethod
    def used_blocks(self) -> int:
        """Blocks referenced by open holdings."""

    @property
    @abstractmethod
    def cached_blocks(self) -> int:
        """Blocks with reusable contents, referenced or not."""

    @property
    @abstractmethod
    def evictable_blocks(self) -> int:
        """Cached blocks that nobody references: they go when room is needed."""

    @abstractmethod
    def recount(self, holdings: Iterable[Holding]) -> int:
        """Blocks that these holdings reference, counted afresh: used_blocks minus this is what has leaked."""
