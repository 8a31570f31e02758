"""The prefix cache: a leaf goes first, what runs stays, nothing is counted twice."""

from __future__ import annotations

from random import Random

import pytest

from load_tests.simulate.cache import BlockCache


def fill(cache: BlockCache, ids: list[int]) -> int:
    """One request that computes ``ids`` and ends; returns the hit."""
    hit = cache.match(ids, len(ids))
    assert cache.open(ids, hit, len(ids))
    cache.publish(ids[hit:])
    cache.close(ids, 0)
    return hit


def test_the_least_recently_used_goes_leaf_first() -> None:
    cache = BlockCache(6)
    fill(cache, [1, 2, 3])
    fill(cache, [1, 2, 4])
    fill(cache, [9, 10])
    assert list(cache.idle) == [3, 4, 2, 1, 10, 9]
    fill(cache, [20, 21])
    assert [cache.match(ids, 3) for ids in ([1, 2, 3], [1, 2, 4], [9, 10])] == [2, 2, 2]
    assert cache.evicted == 2


def test_what_runs_is_not_evicted() -> None:
    cache = BlockCache(4)
    assert cache.open([1, 2, 3], 0, 3)
    cache.publish([1, 2])
    assert (cache.used, cache.room, cache.private) == (3, 1, 1)
    assert not cache.open([5, 6], 0, 2)
    assert not cache.take(2)
    assert cache.used == 3
    cache.close([1, 2], 1)
    assert (cache.used, cache.room) == (0, 4)
    assert cache.open([5, 6, 7], 0, 3)
    assert cache.match([1, 2, 3], 3) == 1


def test_a_hit_counts_as_use_only_of_blocks_that_would_be_free() -> None:
    cache = BlockCache(3)
    fill(cache, [1, 2])
    # Two are revived and two are missing, but only one block is empty.
    assert not cache.open([1, 2, 3, 4], 2, 4)
    assert cache.refs == {1: 0, 2: 0}
    assert cache.open([1, 2, 3], 2, 3)


def test_a_block_computed_twice_at_once_is_kept_once() -> None:
    cache = BlockCache(8)
    assert cache.open([1, 2], 0, 2)
    assert cache.open([1, 2, 3], 0, 3)
    cache.publish([1, 2])
    cache.publish([1, 2, 3])
    assert (cache.used, cache.private) == (3, 0)
    cache.close([1, 2], 0)
    cache.close([1, 2, 3], 0)
    assert list(cache.idle) == [3, 2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_cached_is_closed_towards_the_root(seed: int) -> None:
    random = Random(seed)
    cache = BlockCache(40)
    parents: dict[int, int] = {}
    running: list[tuple[list[int], int, int]] = []
    for _ in range(3000):
        if running and random.random() < 0.5:
            ids, published, blocks = running.pop(random.randrange(len(running)))
            cache.close(ids[:published], blocks - published)
        else:
            # Digits of a number from the highest on: many paths through one small tree.
            path = [random.randrange(2) for _ in range(random.randint(1, 12))]
            ids = [int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))]
            parents.update(zip(ids[1:], ids, strict=False))
            hit = cache.match(ids, len(ids))
            if cache.open(ids, hit, len(ids)):
                published = random.randint(hit, len(ids))
                cache.publish(ids[hit:published])
                running.append((ids, published, len(ids)))
        assert len(cache.refs) + cache.private <= cache.capacity
        assert all(parents[id_] in cache.refs for id_ in cache.refs if id_ in parents)
        wanted = {id_ for ids, published, _ in running for id_ in ids[:published]}
        assert wanted == {id_ for id_, count in cache.refs.items() if count}
        assert set(cache.idle) == {id_ for id_, count in cache.refs.items() if not count}
