"""The caches against a small model: never over capacity, nothing leaked, hits as the engines count them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from load_tests.engine.blocks import BlockCache
from load_tests.engine.cache import Holding, KVCache
from load_tests.engine.hashes import sglang_chain
from load_tests.engine.hybrid import HybridCache
from load_tests.engine.radix import RadixCache
from load_tests.engine.slots import SlotCache
from load_tests.engine.tiers import Tiers

TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=24)


def run(cache: KVCache, tokens: list[int], namespace: str = "") -> int:
    """One sequence from admission to finish; its hit."""
    holding = Holding(namespace)
    hit = cache.match(holding, tokens)
    assert cache.open(holding, tokens, hit, len(tokens))
    cache.commit(holding, tokens, len(tokens))
    cache.close(holding, tokens, len(tokens))
    return hit


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_repeated_prompt_hits_whole_blocks_of_all_but_its_last_token(size: int) -> None:
    for length in range(1, 70):
        for cache in (BlockCache(128, size), RadixCache(128, size)):
            tokens = list(range(length))
            assert run(cache, tokens) == 0
            assert run(cache, tokens) == (length - 1) // size * size


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache = BlockCache(4, 4)
    first = list(range(16))
    run(cache, first)
    run(cache, [100, 101, 102, 103, 104])
    assert cache.match(Holding(), first) == 8


def test_a_block_that_many_share_counts_once_and_outlives_each_of_them() -> None:
    cache = BlockCache(8, 4)
    tokens = list(range(9))
    run(cache, tokens)
    pair = [Holding(), Holding()]
    for holding in pair:
        assert cache.open(holding, tokens, cache.match(holding, tokens), 9)
    assert cache.used_blocks == 4
    cache.close(pair[0], tokens, 9)
    assert cache.used_blocks == 3
    cache.close(pair[1], tokens, 9)
    assert cache.used_blocks == 0


def test_radix_keeps_the_generated_tokens_but_the_last() -> None:
    cache = RadixCache(100)
    prompt = [1, 2, 3]
    holding = Holding()
    assert cache.open(holding, prompt, cache.match(holding, prompt), 3)
    cache.commit(holding, prompt, 3)
    said = [*prompt, 4, 5, 6]
    assert cache.grow(holding, said, 5)
    cache.close(holding, said, 5)
    assert cache.match(Holding(), [*said, 7]) == 5


def test_two_equal_prompts_at_once_leave_one_copy_in_the_tree() -> None:
    cache = RadixCache(20)
    tokens = list(range(8))
    pair = [Holding(), Holding()]
    for holding in pair:
        assert cache.open(holding, tokens, cache.match(holding, tokens), 8)
    assert cache.used_blocks == 16
    for holding in pair:
        cache.commit(holding, tokens, 8)
    assert (cache.used_blocks, cache.cached_blocks) == (8, 8)


@pytest.mark.parametrize("make", [lambda: BlockCache(64, 4), lambda: RadixCache(256), lambda: SlotCache(4, 64)])
def test_namespaces_never_share(make: Callable[[], KVCache]) -> None:
    cache = make()
    tokens = list(range(32))
    run(cache, tokens, "a")
    assert cache.match(Holding("b"), tokens) == 0
    assert cache.match(Holding("a"), tokens) > 0


def test_a_cache_in_use_cannot_be_cleared() -> None:
    for cache in (BlockCache(64, 4), RadixCache(256), SlotCache(4, 64)):
        tokens = list(range(32))
        holding = Holding()
        assert cache.open(holding, tokens, 0, 32)
        cache.commit(holding, tokens, 32)
        assert not cache.clear()
        cache.close(holding, tokens, 32)
        assert cache.clear()
        assert cache.cached_blocks == 0
        assert cache.match(Holding(), tokens) == 0


def test_slots_keep_conversations_apart() -> None:
    cache = SlotCache(2, 64)
    run(cache, [1] * 20)
    run(cache, [2] * 20)
    assert run(cache, [1] * 30) == 20
    assert run(cache, [2] * 30) == 20
    run(cache, [3] * 30)
    assert cache.match(Holding(), [1] * 30) == 0


def with_tiers(cache: KVCache) -> KVCache:
    cache.tiers = Tiers(5, 5, None)
    return cache


def check(cache: KVCache, live: dict[int, tuple[Holding, list[int], int]]) -> None:
    holdings = [holding for holding, _, _ in live.values()]
    assert 0 <= cache.used_blocks <= cache.num_blocks
    assert cache.recount(holdings) == cache.used_blocks, "referenced by nobody"
    assert cache.used_blocks + cache.evictable_blocks <= cache.num_blocks
    size = cache.block_size
    longest = max((-(-upto // size) for _, _, upto in live.values()), default=0)
    assert longest <= cache.used_blocks <= sum(-(-upto // size) for _, _, upto in live.values()) + len(live)


@settings(max_examples=150, deadline=None)
@given(
    make=st.sampled_from(
        [
            lambda: BlockCache(12, 4),
            lambda: BlockCache(30, 1),
            lambda: RadixCache(40),
            lambda: RadixCache(12, 4),
            lambda: HybridCache(BlockCache(12, 4), "boundary", 3),
            lambda: HybridCache(RadixCache(40), "ends", 3),
            lambda: with_tiers(BlockCache(12, 4)),
            lambda: with_tiers(RadixCache(12, 4, chain=sglang_chain(0))),
        ]
    ),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("open"), st.integers(0, 3), TOKENS),
            st.tuples(st.just("grow"), st.integers(0, 3), st.lists(st.integers(1, 3), min_size=1, max_size=6)),
            st.tuples(st.just("close"), st.integers(0, 3), st.just([])),
        ),
        max_size=60,
    ),
)
def test_any_history_keeps_the_books(make: Callable[[], KVCache], steps: list[tuple[str, int, list[int]]]) -> None:
    cache = make()
    live: dict[int, tuple[Holding, list[int], int]] = {}
    seen: set[tuple[int, ...]] = set()
    for verb, key, tokens in steps:
        if verb == "open" and key not in live:
            holding = Holding()
            hit = cache.match(holding, tokens)
            assert hit % cache.block_size == 0
            assert hit <= (len(tokens) - 1) // cache.block_size * cache.block_size
            assert hit == 0 or tuple(tokens[:hit]) in seen, "a hit on what was never computed"
            if cache.open(holding, tokens, hit, len(tokens)):
                cache.commit(holding, tokens, len(tokens))
                live[key] = (holding, tokens, len(tokens))
                seen.update(tuple(tokens[:end]) for end in range(len(tokens) + 1))
        elif verb == "grow" and key in live:
            holding, known, upto = live[key]
            longer = known + tokens
            if cache.grow(holding, longer, len(longer)):
                live[key] = (holding, longer, len(longer))
                seen.update(tuple(longer[:end]) for end in range(len(longer) + 1))
        elif verb == "close" and key in live:
            holding, known, upto = live.pop(key)
            cache.close(holding, known, upto)
            cache.close(holding, known, upto)
        check(cache, live)
    for holding, known, upto in live.values():
        cache.close(holding, known, upto)
    assert cache.used_blocks == 0


@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(TOKENS, min_size=1, max_size=12))
def test_with_room_enough_a_hit_is_the_longest_common_prefix(prompts: list[list[int]]) -> None:
    def longest(tokens: list[int], earlier: list[list[int]]) -> int:
        best = 0
        for other in earlier:
            shared = 0
            while shared < min(len(tokens), len(other)) and tokens[shared] == other[shared]:
                shared += 1
            best = max(best, shared)
        return min(best, len(tokens) - 1)

    for cache in (RadixCache(10_000), RadixCache(10_000, 4), BlockCache(10_000, 4)):
        for number, tokens in enumerate(prompts):
            size = cache.block_size
            assert run(cache, tokens) == longest(tokens, prompts[:number]) // size * size


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_eviction_follows_last_use(order: list[int]) -> None:
    """Six prompts of one block each in room for four: the four used last are the ones that are there."""
    for cache in (BlockCache(4, 4), RadixCache(16)):
        size = 4
        used: list[int] = []
        for name in order:
            tokens = [name * 10 + place for place in range(size)]
            holding = Holding()
            # One token more than the block makes the whole block hittable; it needs no room, as it is not computed.
            hit = cache.match(holding, [*tokens, 0])
            assert (hit == size) == (name in used[-4:])
            assert cache.open(holding, tokens, hit, size)
            cache.commit(holding, tokens, size)
            cache.close(holding, tokens, size)
            used = [other for other in used if other != name] + [name]


def _left(cache: RadixCache, tokens: list[int], session: str = "", priority: int = 0) -> None:
    """A request came and went."""
    holding = Holding(session=session)
    holding.priority = priority
    assert cache.open(holding, tokens, cache.match(holding, tokens), len(tokens))
    cache.commit(holding, tokens, len(tokens))
    cache.close(holding, tokens, len(tokens))


def test_what_a_session_refers_to_goes_after_what_none_does_until_it_is_closed() -> None:
    cache = RadixCache(100)
    cache.refers = True
    _left(cache, [1] * 40, session="old")
    _left(cache, [2] * 40)
    # The one that nobody refers to goes, although it was used later.
    _left(cache, [3] * 40, session="new")
    assert cache.match(Holding(), [1] * 40 + [9]) == 40
    assert cache.match(Holding(), [2] * 40 + [9]) == 0
    cache.close_session("old")
    _left(cache, [4] * 40)
    assert cache.match(Holding(), [1] * 40 + [9]) == 0
    assert cache.match(Holding(), [3] * 40 + [9]) == 40


def test_a_reference_survives_the_splitting_of_its_edge() -> None:
    cache = RadixCache(100)
    cache.refers = True
    _left(cache, [1] * 30, session="s")
    _left(cache, [1] * 15 + [2] * 30)
    _left(cache, [3] * 60)
    assert cache.match(Holding(), [1] * 31) == 30
    cache.close_session("s")
    _left(cache, [4] * 90)
    assert cache.match(Holding(), [1] * 31) == 0


def test_eviction_by_priority_takes_the_lowest_first() -> None:
    cache = RadixCache(100)
    cache.by_priority = True
    _left(cache, [1] * 40, priority=1)
    _left(cache, [2] * 40)
    _left(cache, [3] * 40)
    assert cache.match(Holding(), [1] * 41) == 40
    assert cache.match(Holding(), [2] * 41) == 0
