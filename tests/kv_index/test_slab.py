"""Blocks smaller than a page: targets whose engine caches token by token, or nearly so, and splits its runs anywhere."""

import random

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kv_index.slab
from kv_index.blocks import BlockIndex
from kv_index.groups import Kind, Tier
from kv_index.pages import root
from kv_index.slab import SPARE, SPLITS, Slab
from tests.kv_index.block_model import Ids, Key, Model, hashed, keys, packed, symbols

TENANT = root(b"tenant")
SIZES = (1, 2, 4, 8)
TRUNK = tuple(range(48))


def branch(*at: int) -> Ids:
    """48 tokens, of which those in ``at`` and all behind the first of them are others."""
    return tuple([number + 1000 * sum(number >= each for each in at) for number in TRUNK])


PROMPTS = [branch(*at) for at in [(), (0,), (3,), (8,), (15,), (16,), (17,), (24,), (32,), (37,), (8, 12), (3, 40)]]
MATCHED = [(prompt, start, symbols(prompt, start), packed(prompt)) for prompt in PROMPTS for start in (0, TENANT)]
ENGINE = st.integers(0, 3)
PROMPT = st.integers(0, len(PROMPTS) - 1)
LENGTH = st.integers(0, 48)
START = st.sampled_from([0, 0, TENANT])


class Growing(RuleBasedStateMachine):
    """Without removals every prompt is held to the very block."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.models: dict[int, Model] = {}
        self.seeds = {engine: engine for engine in range(4)}

    def model(self, engine: int) -> Model:
        return self.models.setdefault(engine, Model(SIZES[engine]))

    def hashes(self, engine: int, some: list[Key]) -> list[int]:
        return [hashed(self.seeds[engine], key) for key in some]

    def put(self, engine: int, all: list[Key], first: int) -> None:
        some, size = all[first:], SIZES[engine]
        if not some:
            return
        [parent] = self.hashes(engine, all[first - 1 : first]) or [None]
        ids = some[-1].ids[first * size :]
        if self.index.store(engine, self.hashes(engine, some), parent, ids, size, start=some[0].start):
            self.model(engine).store(Tier.DEVICE, some, None)
        else:
            self.lost(parent)

    def lost(self, parent: int | None) -> None:
        raise AssertionError("a run behind a known block is placed")

    @rule(engine=ENGINE, prompt=PROMPT, length=LENGTH, start=START)
    def insert(self, engine, prompt, length, start):
        """As a radix tree tells it: what it lacks, from the place where it leaves what is there."""
        ids = PROMPTS[prompt][:length]
        depth, _ = self.model(engine).match(ids, start)
        self.put(engine, keys(ids, SIZES[engine], start), depth // SIZES[engine])

    @rule(engine=ENGINE, prompt=PROMPT, length=LENGTH, start=START)
    def insert_again(self, engine, prompt, length, start):
        """The whole of it, whatever was there."""
        self.put(engine, keys(PROMPTS[prompt][:length], SIZES[engine], start), 0)

    @rule(engine=ENGINE, prompt=PROMPT)
    def unknown_parent(self, engine, prompt):
        ids = PROMPTS[prompt][:40]
        assert not self.index.store(engine, range(40 // SIZES[engine]), -1, ids, SIZES[engine])

    @rule(engine=ENGINE)
    def clear(self, engine):
        size = self.index.block_size(engine)
        self.index.clear(engine)
        assert self.index.block_size(engine) == size
        self.models.pop(engine, None)

    @rule(engine=ENGINE)
    def restart(self, engine):
        self.index.drop(engine)
        self.models.pop(engine, None)
        self.seeds[engine] += 4

    @rule(most=st.integers(0, 20))
    def sweep(self, most):
        self.index.sweep(most)

    @invariant()
    def sound(self):
        self.index.check()
        for ids, start, chained, packed_ids in MATCHED:
            found = self.index.match(chained, packed_ids, start)
            rough = self.index.match(chained)
            assert not found.restored and not rough.restored
            for engine in range(4):
                depth, _ = self.model(engine).match(ids, start)
                self.compare(found.tokens.get(engine, 0), rough.tokens.get(engine, 0), depth)

    def compare(self, found: int, rough: int, depth: int) -> None:
        assert found == depth
        assert rough == depth // 16 * 16, "without the token ids a prompt is matched to the page"

    def teardown(self):
        for engine in range(4):
            self.index.drop(engine)
        while self.index.sweep(7):
            pass
        self.index.check()
        assert self.index.entries == 0
        assert self.index.footprint == 0, "an index that holds nothing costs nothing"


class Shrinking(Growing):
    """With removals never more than there is, and never less than its whole pages."""

    @rule(engine=ENGINE, prompt=PROMPT, at=LENGTH, start=START, backwards=st.booleans())
    def remove(self, engine, prompt, at, start, backwards):
        """A part of the tree from some block on, as engines drop it: with everything behind."""
        gone = self.behind(engine, PROMPTS[prompt][:at], start)
        if backwards:
            gone.reverse()
        self.model(engine).remove(Tier.DEVICE, gone)
        self.index.remove(engine, self.hashes(engine, gone))

    @rule(engine=ENGINE)
    def remove_all(self, engine):
        for start in (0, TENANT):
            gone = self.behind(engine, (), start)
            self.model(engine).remove(Tier.DEVICE, gone)
            self.index.remove(engine, self.hashes(engine, gone))

    def behind(self, engine: int, ids: Ids, start: int) -> list[Key]:
        held = [key for (_, key), count in self.model(engine).count.items() if count]
        return sorted([key for key in held if key.start == start and key.ids[: len(ids)] == ids])

    def compare(self, found: int, rough: int, depth: int) -> None:
        assert depth // 16 * 16 <= found <= depth
        assert rough == depth // 16 * 16


class Crowded(Shrinking):
    """And where hardly any room is left for what is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = kv_index.slab.SPARE
        kv_index.slab.SPARE = 0

    def lost(self, parent: int | None) -> None:
        assert parent is not None, "a run at the start is placed"

    def teardown(self):
        kv_index.slab.SPARE = self.spare
        super().teardown()


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(max_examples=50, stateful_step_count=25)
TestShrinking = Shrinking.TestCase
TestShrinking.settings = settings(max_examples=60, stateful_step_count=25)
TestCrowded = Crowded.TestCase
TestCrowded.settings = settings(max_examples=60, stateful_step_count=25)


def depth(index: BlockIndex, ids: Ids, start: int = 0) -> int:
    return index.match(symbols(ids, start), packed(ids), start).tokens.get(0, 0)


def put(
    index: BlockIndex, ids: Ids, first: int = 0, *, size: int = 1, tier: Tier = Tier.DEVICE, target: int = 0
) -> bool:
    """A run of ``ids`` from ``first`` on, whose parent is what stands before."""
    names = [hashed(0, key) for key in keys(ids, size)]
    at = first // size
    return index.store(target, names[at:], names[at - 1] if at else None, ids[first:], size, tier=tier)


def take(index: BlockIndex, ids: Ids, first: int = 0, *, size: int = 1, tier: Tier = Tier.DEVICE) -> None:
    index.remove(0, [hashed(0, key) for key in keys(ids, size)][first // size :], tier)


def other(ids: Ids, at: int, length: int) -> Ids:
    """A prompt that leaves ``ids`` at ``at``."""
    return ids[:at] + tuple(range(5000, 5000 + length - at))


@pytest.mark.parametrize("at", [1, 5, 15, 16, 17, 31, 32, 33, 39])
def test_a_run_that_splits_an_earlier_one_anywhere_is_placed_and_matched_exactly(at):
    index = BlockIndex()
    one, two = TRUNK[:40], other(TRUNK, at, 60)
    assert put(index, one)
    assert put(index, two, at)
    assert depth(index, one) == 40
    assert depth(index, two) == 60
    assert depth(index, two[:-1]) == 59
    assert depth(index, one[:at] + (9999,) * 40) == at
    index.check()


@pytest.mark.parametrize("at", [35, 39])
def test_the_short_tail_of_a_run_is_split_and_split_again(at):
    index = BlockIndex()
    put(index, TRUNK[:40])
    two = other(TRUNK, at, 43)
    three = two[: at + 2] + tuple(range(7000, 7040))
    assert put(index, two, at)
    assert put(index, three, at + 2)
    for ids in (TRUNK[:40], two, three):
        assert depth(index, ids) == len(ids)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_splits_are_at_whole_blocks(size):
    index = BlockIndex()
    put(index, TRUNK[:40], size=size)
    two = other(TRUNK, 24, 64)
    assert put(index, two, 24, size=size)
    assert depth(index, two) == 64
    assert depth(index, two[:63]) == 64 - size
    assert depth(index, TRUNK[: 40 - size + 1] + (9999,) * 9) == 40 - size


def test_a_run_is_continued_token_by_token():
    index = BlockIndex()
    for at in range(48):
        assert put(index, TRUNK[: at + 1], at)
        assert depth(index, TRUNK) == at + 1
    assert depth(index, TRUNK[:40] + (9999,) * 8) == 40
    assert index.blocks(0) == 3
    assert index.tokens(0) == 48


def test_all_that_was_removed_can_be_stored_again():
    index = BlockIndex()
    two = other(TRUNK, 21, 60)
    for _ in range(3):
        put(index, TRUNK[:40])
        put(index, two, 21)
        assert depth(index, two) == 60
        assert depth(index, TRUNK) == 40
        take(index, two, 21)
        assert depth(index, TRUNK) == 40
        assert depth(index, two) == 21
        take(index, TRUNK[:40])
        assert index.entries == 0
        assert index.match(symbols(two), packed(two)) == ({}, {})
        index.check()


def test_what_was_split_is_held_when_only_its_branches_went():
    index = BlockIndex()
    two = other(TRUNK, 21, 60)
    put(index, TRUNK[:40])
    put(index, two, 21)
    take(index, TRUNK[:40], 21)
    assert depth(index, TRUNK) == 21
    assert depth(index, two) == 60
    take(index, two, 21)
    assert 16 <= depth(index, two) <= 21
    assert put(index, two, 21), "the place of the split is still known"
    assert depth(index, two) == 60


def test_a_page_in_the_middle_that_goes_hides_what_follows_and_reveals_it_when_it_returns():
    index = BlockIndex()
    put(index, TRUNK)
    middle = [hashed(0, key) for key in keys(TRUNK, 1)][16:32]
    index.remove(0, middle)
    assert index.match(symbols(TRUNK)).tokens == {0: 16}
    assert put(index, TRUNK[:32], 16)
    assert depth(index, TRUNK) == 48


def test_namespaces_of_small_blocks_are_apart():
    index = BlockIndex()
    for start, end in ((0, 20), (TENANT, 40)):
        names = [hashed(0, key) for key in keys(TRUNK[:end], 1, start)]
        index.store(0, names, None, TRUNK[:end], 1, start=start)
    assert depth(index, TRUNK) == 20
    assert depth(index, TRUNK, TENANT) == 40
    assert depth(index, TRUNK, root(b"nobody")) == 0


def test_small_blocks_on_a_lower_tier_are_restored_from_there():
    index = BlockIndex()
    put(index, TRUNK)
    put(index, TRUNK, tier=Tier.HOST)
    assert index.match(symbols(TRUNK), packed(TRUNK)) == ({0: 48}, {})
    take(index, TRUNK, 16)
    assert index.match(symbols(TRUNK), packed(TRUNK)) == ({0: 48}, {0: (32, 0, 0)})
    take(index, TRUNK, tier=Tier.HOST)
    assert depth(index, TRUNK) == 16


def test_the_short_last_page_of_a_sequence_is_passed_over():
    index = BlockIndex()
    put(index, TRUNK, size=8)
    assert index.store(0, [77], hashed(0, keys(TRUNK, 8)[-1]), [1, 2, 3], 3)
    assert index.block_size(0) == 8
    assert depth(index, (*TRUNK, 1, 2, 3)) == 48


@pytest.mark.parametrize("size", [12, 24, 40])
def test_blocks_that_end_pages_only_now_and_then_are_matched_to_the_block(size):
    index = BlockIndex()
    ids = tuple(range(20 * size))
    assert put(index, ids, size=size)
    assert depth(index, ids) == 20 * size
    two = other(ids, 7 * size, 11 * size)
    assert put(index, two, 7 * size, size=size)
    assert depth(index, two) == 11 * size
    assert depth(index, two[:-1]) == 10 * size
    take(index, two, 8 * size, size=size)
    assert depth(index, ids) == 20 * size
    index.check()


def test_many_thousands_of_pages_stored_and_removed_keep_the_slab_bounded():
    index = BlockIndex()
    rng = random.Random(5)
    held: list[tuple[int, int]] = []
    slab, most = None, 0
    for number in range(4000):
        ids = (number, *range(rng.randrange(20, 90)))
        names = range(number * 100 + 1, number * 100 + 1 + len(ids))
        assert index.store(0, names, None, ids, 1)
        held.append((names[0], len(ids)))
        most = max(most, sum(-(-length // 16) for _, length in held))
        if len(held) > 20:
            first, length = held.pop(rng.randrange(len(held)))
            index.remove(0, range(first, first + length))
        slab = index._targets[0].groups[0].slab
        assert slab is not None
        assert len(slab) <= 2 * most + SPARE + 1
    for first, length in held:
        index.remove(0, range(first, first + length))
    assert index.entries == 0
    assert len(slab._ends) <= len(slab)
    assert len(slab._splits) <= SPLITS
    assert sum(map(len, slab._after.values())) <= len(slab)
    index.check()


def test_slots_taken_anew_tell_nothing_of_what_they_held():
    slab = Slab(1, 16)
    for number in range(3 * SPARE):
        page = packed([number] * 16)
        hashes = range(number * 16 + 1, number * 16 + 17)
        slab.put(7, page, hashes, 16, number + 1)
        assert slab.place(hashes[-1]) == (number + 1, b"")
        slab.scanned = 0
        assert slab.place(hashes[4]) == (7, page[:20])
        slab.drop(hashes[-1])
        assert slab.beyond(7, page) == 0
    assert len(slab) <= SPARE + 2
    assert slab.place(5) is None
    assert slab.place(16) is None


def test_unaligned_bytes_of_other_hashes_are_not_taken_for_a_hash():
    slab = Slab(1, 16)
    slab.put(0, packed([1, 2]), [0x11223344, 0x55667788], 2, 0)
    assert slab.place(0x77881122) is None
    assert slab.place(0x66778811) is None
    assert slab.place(0x11223344) == (0, packed([1]))
    assert slab.place(0x55667788) == (0, packed([1, 2]))


def test_more_places_inside_pages_than_are_remembered_are_all_found():
    index = BlockIndex()
    ids = tuple(range(SPLITS // 2))
    put(index, ids)
    names = [hashed(0, key) for key in keys(ids, 1)]
    slab = index._targets[0].groups[0].slab
    assert slab is not None
    for at in [*range(0, len(ids), 3), 0, 1]:
        before, rest = slab.place(names[at]) or (None, b"")
        assert rest == packed(ids[at // 16 * 16 : at + 1] if at % 16 < 15 else ())
        assert before is not None
    assert len(slab._splits) <= SPLITS


# -- more of what must not happen -------------------------------------------------------------------------------------


def test_a_run_on_a_lower_tier_is_placed_behind_one_there():
    index = BlockIndex()
    assert put(index, TRUNK[:32], tier=Tier.HOST)
    assert put(index, TRUNK, 32, tier=Tier.HOST)
    assert index.match(symbols(TRUNK), packed(TRUNK)) == ({0: 48}, {0: (48, 0, 0)})


def test_of_two_full_groups_of_small_blocks_the_shorter_counts_to_the_token():
    index = BlockIndex()
    for group, end in ((0, 30), (1, 20)):
        names = [hashed(0, key) for key in keys(TRUNK[:end], 1)]
        index.store(0, names, None, TRUNK[:end], 1, group=group, kind=Kind.FULL)
    assert depth(index, TRUNK) == 20


def test_a_run_without_hashes_and_shorter_than_a_block_changes_nothing():
    index = BlockIndex()
    put(index, TRUNK[:6], size=2)
    index.store(0, [], hashed(0, keys(TRUNK, 2)[2]), [7], 2)
    assert depth(index, TRUNK) == 6


def test_a_run_stored_and_removed_again_and_again_costs_no_more():
    index = BlockIndex()
    for _ in range(3 * SPARE):
        put(index, TRUNK[:16])
        take(index, TRUNK[:16])
    slab = index._targets[0].groups[0].slab
    assert slab is not None
    assert len(slab) == 1
    assert len(slab._gone) <= 2 * SPARE


def test_ends_of_runs_that_are_gone_leave_room():
    index = BlockIndex(max_bytes=10_000)
    number = 0
    while not index.full:
        index.store(0, range(8 * number + 1, 8 * number + 6), None, [number, 2, 3, 4, 5], 1)
        number += 1
    index.remove(0, range(1, 8 * number))
    assert index.entries == 0
    index.sweep()
    assert index.footprint == 0
    assert put(index, TRUNK)
    assert depth(index, TRUNK) == 48
