"""Whoever counts stored and removed blocks, by group, tier and hash, knows what an engine holds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings, strategies as st

from load_tests.engine import EngineOptions
from load_tests.engine.hybrid import HybridCache
from load_tests.engine.rank import make_cache
from load_tests.engine.scheduler import Scheduler, Work

KINDS: list[dict[str, Any]] = [
    {"dialect": "vllm", "block_size": 4},
    {"dialect": "vllm", "block_size": 4, "hybrid": "boundary", "hybrid_states": 3},
    {"dialect": "vllm", "block_size": 4, "hybrid": "every:8", "hybrid_states": 2},
    {"dialect": "vllm", "block_size": 4, "host_tokens": 16, "disk_tokens": 16},
    {"dialect": "vllm", "block_size": 4, "host_tokens": 16, "disk_tokens": 16, "offload_events": "full"},
    {"dialect": "sglang", "block_size": 1},
    {"dialect": "sglang", "block_size": 4},
    {"dialect": "sglang", "block_size": 1, "host_tokens": 16, "disk_tokens": 16},
]


def count(books: Counter[tuple[Any, ...]], events: list[dict[str, Any]]) -> None:
    for event in events:
        for each in event.get("block_hashes", ()):
            key = (event["medium"], event.get("group_idx"), each)
            books[key] += 1 if event["type"] == "BlockStored" else -1
            assert books[key] >= 0, "removed more often than stored"


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    requests=st.lists(
        st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=30), st.integers(0, 12)), min_size=1, max_size=15
    ),
    running=st.integers(1, 4),
)
def test_books_agree_with_the_cache(kind: dict[str, Any], requests: list[tuple[list[int], int]], running: int) -> None:
    options = EngineOptions(events=True, kv_tokens=48, **kind)
    cache = make_cache(options)
    assert cache.journal is not None
    scheduler = Scheduler(cache, options.rates, max_running=running, chunk_tokens=16)
    for prompt, length in requests:
        scheduler.submit(Work(prompt, [1 + place % 2 for place in range(length)]))
    books: Counter[tuple[Any, ...]] = Counter()
    while scheduler.busy:
        scheduler.step(0.0)
        count(books, cache.journal.take())
        group = 3 if "hybrid" in kind else 0 if kind["dialect"] == "vllm" else None
        device = sum(number for (medium, where, _), number in books.items() if (medium, where) == ("GPU", group))
        assert device == cache.cached_blocks
        for tier, media in enumerate((("CPU", "CPU_PINNED"), ("STORAGE", "DISK"))):
            below = sum(number for (medium, _, _), number in books.items() if medium in media)
            assert below == (cache.tiers.used[tier] if cache.tiers else 0)
        if isinstance(cache, HybridCache):
            for recurrent in range(3):
                states = sum(number for (_, where, _), number in books.items() if where == recurrent)
                assert states == len(cache.states)
