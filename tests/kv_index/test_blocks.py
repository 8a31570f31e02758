"""BlockIndex against a model of sets and counters, and the traps in engines' events one by one."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_index.blocks import BlockIndex, Held
from kv_index.groups import Kind, Tier
from kv_index.pages import root
from tests.kv_index.block_model import Ids, Key, Model, hashed, keys, pages, symbols

HALF = 1 << 64
TENANT = root(b"tenant")

SIZES = (16, 32, 48, 64)
TRUNK = tuple(range(12))


def branch(*at: int) -> Ids:
    """The trunk's 12 pages, of which those in ``at`` are others."""
    return pages(*[number + 100 * (number in at) for number in TRUNK])


PROMPTS = [
    branch(),
    branch(0),
    branch(1),
    branch(2),
    branch(3),
    branch(4),
    branch(6),
    branch(9),
    branch(11),
    branch(4, 9),
]
PROMPT = st.integers(0, len(PROMPTS) - 1)
TARGET = st.integers(0, 3)
TIER = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.SHARED])
START = st.sampled_from([0, 0, TENANT])
VARIANT = st.sampled_from([0, 0, 0, 1])
BLOCK = st.integers(0, 11)
COUNT = st.integers(1, 12)


# -- the order of events, one trap at a time --------------------------------------------------------------------------

LONG = tuple(range(1, 9))
"""Engine hashes of the eight blocks of `EIGHT`."""
EIGHT = pages(*range(8))


def eight(target: int = 0) -> BlockIndex:
    index = BlockIndex()
    index.store(target, LONG, None, EIGHT, 16)
    return index


def depth(index: BlockIndex, ids: Ids, target: int = 0, start: int = 0) -> int:
    return index.match(symbols(ids, start)).tokens.get(target, 0)


def test_a_middle_block_removed_hides_what_follows_and_stored_again_reveals_all():
    index = eight()
    index.remove(0, [4])
    assert depth(index, EIGHT) == 48
    assert index.store(0, [4], 3, pages(3), 16)
    assert depth(index, EIGHT) == 128
    index.check()


@pytest.mark.parametrize("order", [(3, 6), (6, 3)])
def test_two_holes_are_closed_in_either_order(order):
    index = eight()
    index.remove(0, order)
    assert depth(index, EIGHT) == 32
    first, second = order
    for at, expected in ((first, 80 if first == 3 else 32), (second, 128)):
        assert index.store(0, [at], at - 1, pages(at - 1), 16)
        assert depth(index, EIGHT) == expected
    index.check()


def test_a_hole_at_the_first_block_hides_all_until_it_returns():
    index = eight()
    index.remove(0, [1])
    assert index.match(symbols(EIGHT)) == ({}, {})
    assert index.store(0, [1], None, pages(0), 16)
    assert depth(index, EIGHT) == 128


@pytest.mark.parametrize("followers", [(5, 6, 7, 8), (8, 7, 6, 5), (6, 8, 5, 7)])
def test_a_hole_whose_followers_go_too_is_a_hole_no_more(followers):
    index = eight()
    index.remove(0, [4])
    index.remove(0, followers)
    assert depth(index, EIGHT) == 48
    assert index.store(0, [4], 3, pages(3), 16)
    assert depth(index, EIGHT) == 64
    index.check()


def test_two_holes_side_by_side_in_any_order():
    for order in ((4, 5), (5, 4)):
        index = eight()
        index.remove(0, order)
        assert depth(index, EIGHT) == 48
        assert index.store(0, [4], 3, pages(3), 16)
        assert depth(index, EIGHT) == 64
        assert index.store(0, [5], 4, pages(4), 16)
        assert depth(index, EIGHT) == 128


def test_a_hole_is_of_one_target():
    index = eight()
    for target in (1, 2):
        index.store(target, LONG, None, EIGHT, 16)
    index.remove(1, [4])
    assert index.match(symbols(EIGHT)).tokens == {0: 128, 1: 48, 2: 128}
    index.remove(2, [2])
    index.store(1, [4], 3, pages(3), 16)
    assert index.match(symbols(EIGHT)).tokens == {0: 128, 1: 128, 2: 16}
    index.drop(0)
    assert index.match(symbols(EIGHT)).tokens == {1: 128, 2: 16}


def test_a_block_is_held_while_any_of_its_copies_is():
    index = eight()
    index.store(0, [4], 3, pages(3), 16)
    index.store(0, [4, 5], 3, pages(3, 4), 16)
    for expected in (128, 128, 48):
        index.remove(0, [4])
        assert depth(index, EIGHT) == expected
    index.remove(0, [4])
    index.store(0, [4], 3, pages(3), 16)
    assert depth(index, EIGHT) == 128, "what was removed too often is not owed"


def test_copies_of_the_same_tokens_by_other_hashes_are_one_prefix():
    index = eight()
    index.store(0, [40], 3, pages(3), 16)
    index.remove(0, [4])
    assert depth(index, EIGHT) == 128
    index.remove(0, [40])
    assert depth(index, EIGHT) == 48
    index.check()


def test_forty_sessions_are_found_at_full_depth_by_their_own_target_whatever_the_seeds():
    rng = random.Random(11)
    index = BlockIndex()
    system = tuple(rng.randrange(1 << 32) for _ in range(160))
    sessions, holders = [], {}
    for session in range(40):
        target = session % 8
        ids = system + tuple(rng.randrange(1 << 32) for _ in range(16 * rng.randrange(5, 300)))
        names: dict[Key, int] = holders.setdefault(target, {})
        all = keys(ids, 16)
        for turn in range(0, len(all), 40):
            some = all[turn : turn + 40]
            new = [key for key in some if key not in names]
            for key in new:
                names[key] = rng.randrange(-(1 << 63), 1 << 63)
            if new:
                first = len(new[0].ids) - 16
                parent = names[Key(new[0].ids[:-16])] if first else None
                assert index.store(target, [names[key] for key in new], parent, new[-1].ids[first:], 16)
        sessions.append((target, ids))
    index.check()
    for target, ids in sessions:
        expected = dict.fromkeys(range(8), 160)
        expected[target] = len(ids)
        assert index.match(symbols(ids)) == (expected, {})


@pytest.mark.parametrize("first", [5, -5, (1 << 59) + 7, -(1 << 63), (1 << 64) - 1])
def test_a_hash_is_the_same_signed_or_not_and_however_wide(first):
    index = BlockIndex()
    low = first % HALF
    signed = low - HALF if low >> 63 else low
    wide = low + (12345 << 64)
    top = low + (1 << 255)
    for stored, parent, removed in (
        (signed, low, wide),
        (low, wide, signed),
        (wide, top, low),
        (top, signed, top - (1 << 256)),
    ):
        assert index.store(0, [stored], None, pages(0), 16)
        assert index.store(0, [77], parent, pages(1), 16)
        assert depth(index, pages(0, 1)) == 32
        index.remove(0, [removed])
        assert depth(index, pages(0, 1)) == 0
        index.remove(0, [77])
        assert index.entries == 0


# -- tiers ------------------------------------------------------------------------------------------------------------


def test_removal_on_one_tier_is_not_removal_on_another():
    index = eight()
    index.store(0, LONG, None, EIGHT, 16, tier=Tier.HOST)
    index.remove(0, LONG, Tier.DISK)
    assert index.match(symbols(EIGHT)) == ({0: 128}, {})
    index.remove(0, LONG, Tier.HOST)
    assert index.match(symbols(EIGHT)) == ({0: 128}, {})
    index.store(0, LONG, None, EIGHT, 16, tier=Tier.HOST)
    index.remove(0, LONG)
    assert index.match(symbols(EIGHT)) == ({0: 128}, {0: (128, 0, 0)})
    index.check()


@pytest.mark.parametrize(
    ("tier", "expected"), [(Tier.HOST, (64, 0, 0)), (Tier.DISK, (0, 64, 0)), (Tier.SHARED, (0, 0, 64))]
)
def test_what_left_the_device_is_held_and_must_be_restored(tier, expected):
    index = eight()
    assert index.store(0, LONG[4:], None, (), 0, tier=tier), "placed by hash alone"
    assert index.match(symbols(EIGHT)) == ({0: 128}, {})
    index.remove(0, reversed(LONG[4:]))
    assert index.match(symbols(EIGHT)) == ({0: 128}, {0: expected})
    assert index.blocks(0) == 4
    assert index.blocks(0, tier) == 4
    assert index.tokens(0, tier) == 64
    index.remove(0, LONG[4:], tier)
    assert index.match(symbols(EIGHT)) == ({0: 64}, {})
    index.check()


def test_a_block_told_by_hash_alone_is_not_placed_where_nothing_is_known_of_it():
    index = eight()
    assert not index.store(0, [99], None, (), 0, tier=Tier.HOST)
    assert not index.store(1, [1], None, (), 0, tier=Tier.HOST), "other targets' hashes are other hashes"
    assert not index.store(0, [1, 99], None, (), 0, tier=Tier.HOST)
    assert not index.store(0, [], None, (), 0, tier=Tier.HOST)
    index.remove(0, LONG)
    assert index.match(symbols(EIGHT)) == ({0: 16}, {0: (16, 0, 0)})
    index.check()


def test_tiers_may_take_turns_along_a_prompt():
    index = eight()
    for tier, some in ((Tier.HOST, (2, 5)), (Tier.DISK, (3,)), (Tier.SHARED, (4, 5, 6, 8))):
        assert index.store(0, some, None, (), 0, tier=tier)
    index.remove(0, [2, 3, 4, 5, 6, 8])
    assert index.match(symbols(EIGHT)) == ({0: 128}, {0: (32, 16, 48)})
    assert index.match(symbols(EIGHT[:48])) == ({0: 48}, {0: (16, 16, 0)})
    index.remove(0, [3], Tier.DISK)
    assert index.match(symbols(EIGHT)) == ({0: 32}, {0: (16, 0, 0)})
    index.store(0, [3], 2, pages(2), 16)
    assert index.match(symbols(EIGHT)) == ({0: 128}, {0: (32, 0, 48)})
    index.check()


# -- groups -----------------------------------------------------------------------------------------------------------

SIX = pages(*range(24))
"""Six blocks of 64 tokens."""
BLOCKS = (301, 302, 303, 304, 305, 306)


def states(
    index: BlockIndex, hashes: Sequence[int], parent: int | None, tokens: Ids, groups: Sequence[int] = (0, 1, 2)
) -> None:
    for group in groups:
        assert index.store(0, hashes, parent, tokens, 64, group=group, kind=Kind.STATE)


def test_states_come_before_the_blocks_and_while_decoding_not_at_all():
    """One hash for all the tokens of a prompt, at its last block; a parent that only the full group ever told."""
    index = BlockIndex()
    states(index, BLOCKS[2:3], None, SIX[:192])
    assert depth(index, SIX) == 0, "states alone are of no use"
    index.store(0, BLOCKS[:3], None, SIX[:192], 64, group=3)
    assert depth(index, SIX) == 192
    assert depth(index, SIX[:191]) == 0, "no state lies further in front"
    states(index, [], BLOCKS[2], SIX[192:256])
    index.store(0, BLOCKS[3:4], BLOCKS[2], SIX[192:256], 64, group=3)
    assert depth(index, SIX) == 192
    states(index, BLOCKS[5:], BLOCKS[3], SIX[256:])
    index.store(0, BLOCKS[4:], BLOCKS[3], SIX[256:], 64, group=3)
    assert depth(index, SIX) == 384
    assert depth(index, SIX[:320]) == 192
    index.check()


def test_a_prompt_is_resumed_only_where_every_state_group_has_its_state():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=3)
    assert depth(index, SIX) == 384
    states(index, BLOCKS[1:2], None, SIX[:128])
    states(index, BLOCKS[3:4], BLOCKS[1], SIX[128:256], (0, 2))
    assert depth(index, SIX) == 128
    states(index, BLOCKS[3:4], BLOCKS[1], SIX[128:256], (1,))
    assert depth(index, SIX) == 256
    index.remove(0, BLOCKS[3:4], group=0)
    assert depth(index, SIX) == 128
    index.remove(0, BLOCKS[3:4])
    index.remove(0, BLOCKS[:1], group=3)
    assert depth(index, SIX) == 0
    index.store(0, BLOCKS[:1], None, SIX[:64], 64, group=3)
    assert depth(index, SIX) == 128
    index.check()


def test_a_state_stored_twice_is_there_until_it_is_removed_twice():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=1)
    for _ in range(2):
        states(index, BLOCKS[5:], None, SIX, (0,))
    for expected in (384, 0):
        index.remove(0, BLOCKS[5:], group=0)
        assert depth(index, SIX) == expected


@pytest.mark.parametrize(("window", "needed"), [(0, 0), (1, 0), (2, 1), (64, 1), (65, 1), (66, 2), (128, 2), (130, 3)])
def test_a_window_needs_the_blocks_that_it_reaches_back_to(window, needed):
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=0)
    index.store(0, BLOCKS, None, SIX, 64, group=1, kind=Kind.WINDOW, window=window)
    assert depth(index, SIX) == 384
    for at in range(6):
        index.remove(0, BLOCKS[at : at + 1], group=1)
        left = 5 - at
        assert depth(index, SIX) == (384 if left >= needed else 0)
    index.check()


def test_a_window_with_a_gap_is_resumed_in_front_of_it():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=0)
    index.store(0, BLOCKS, None, SIX, 64, group=1, kind=Kind.WINDOW, window=128)
    index.remove(0, BLOCKS[4:5], group=1)
    assert depth(index, SIX) == 256
    index.remove(0, BLOCKS[2:3], group=1)
    assert depth(index, SIX) == 128
    index.store(0, BLOCKS[4:], BLOCKS[3], SIX[256:], 64, group=1, kind=Kind.WINDOW, window=128)
    assert depth(index, SIX) == 384


def test_a_window_is_told_by_its_last_blocks():
    index = BlockIndex()
    index.store(0, BLOCKS[4:], None, SIX, 64, group=0, kind=Kind.WINDOW, window=128)
    index.store(0, BLOCKS, None, SIX, 64, group=1)
    assert depth(index, SIX) == 384
    assert depth(index, SIX[:320]) == 0


def test_of_two_full_groups_the_shorter_counts():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=0)
    index.store(0, BLOCKS[:4], None, SIX[:256], 64, group=1)
    assert depth(index, SIX) == 256
    index.remove(0, BLOCKS[1:2], group=0)
    assert depth(index, SIX) == 64
    index.store(0, BLOCKS[1:2], BLOCKS[0], SIX[64:128], 64, group=0)
    index.remove(0, BLOCKS[:1], group=1)
    assert depth(index, SIX) == 0
    assert index.blocks(0) == 6
    index.check()


def test_groups_of_one_target_go_with_it():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64, group=3)
    states(index, BLOCKS[5:], None, SIX)
    index.store(0, BLOCKS, None, SIX, 64, group=4, kind=Kind.WINDOW, window=64)
    index.clear(0)
    assert index.match(symbols(SIX)) == ({}, {})
    index.store(0, BLOCKS, None, SIX, 64, group=3)
    assert depth(index, SIX) == 384, "the groups that limited it are gone"
    index.drop(0)
    while index.sweep(1):
        index.check()
    assert index.footprint == 0


# -- what is no block, or cannot be placed ----------------------------------------------------------------------------


def test_fewer_hashes_than_blocks_are_those_of_the_last_ones():
    index = BlockIndex()
    index.store(0, [3, 4], None, pages(0, 1, 2, 3), 16)
    assert depth(index, EIGHT) == 0
    index.store(0, [1, 2], None, pages(0, 1), 16)
    assert depth(index, EIGHT) == 64
    assert index.store(0, [5], 4, pages(4), 16)
    assert depth(index, EIGHT) == 80
    index.check()


@pytest.mark.parametrize(
    ("hashes", "tokens", "size"),
    [
        ([1, 2], pages(0), 16),
        ([1], pages(0)[:15], 16),
        ([1], pages(0), 17),
        ([1], pages(0), 0),
        ([1], pages(0), -16),
        ([], pages(0), 0),
    ],
)
def test_more_hashes_than_blocks_and_blocks_without_size_are_refused(hashes, tokens, size):
    index = BlockIndex()
    with pytest.raises(ValueError, match="blocks of"):
        index.store(0, hashes, None, tokens, size)
    index.store(0, LONG, None, EIGHT, 16)
    with pytest.raises(ValueError, match="blocks of"):
        index.store(0, hashes, 8, tokens, size)
    assert depth(index, EIGHT) == 128
    assert index.entries == 8
    index.check()


@pytest.mark.parametrize("bad", [-1, 1 << 32, 1 << 80, 1.5, None, "1", (1, 2)])
def test_token_ids_that_are_not_u32_are_refused_and_change_nothing(bad):
    index = eight()
    before = index.footprint
    for size in (16, 8):
        with pytest.raises(ValueError, match="token ids"):
            index.store(size, [9], None, (*pages(8)[:-1], bad)[-size:], size)
    with pytest.raises(ValueError, match="token ids"):
        index.store(0, [9], 8, (*pages(8)[:-1], bad), 16)
    assert index.footprint == before
    assert index.match(symbols(EIGHT)) == ({0: 128}, {})
    index.check()


def test_token_ids_may_be_any_u32():
    index = BlockIndex()
    ids = (0, (1 << 32) - 1) * 8
    assert index.store(0, [1], None, ids, 16)
    assert depth(index, ids) == 16


def test_tokens_behind_the_last_whole_block_are_passed_over():
    index = BlockIndex()
    assert index.store(0, LONG[:7], None, EIGHT[:127], 16)
    assert depth(index, EIGHT) == 112
    assert index.store(0, [8], 7, EIGHT[112:], 16)
    assert depth(index, EIGHT) == 128


def test_short_blocks_are_passed_over():
    index = eight()
    assert index.store(0, [9], 8, pages(8)[:5], 5)
    assert index.store(0, [10], None, pages(70)[:8], 8)
    assert index.block_size(0) == 16
    assert index.entries == 8
    assert depth(index, EIGHT + pages(8)) == 128
    index.remove(0, [9])
    assert index.store(0, [11], 8, pages(8), 16)
    assert depth(index, EIGHT + pages(8)) == 144
    index.check()


def test_a_first_event_that_is_short_does_not_fix_the_size():
    index = BlockIndex()
    index.store(0, [1], None, pages(0)[:9], 9)
    assert index.block_size(0) == 9
    assert index.store(0, [2, 3], None, pages(0, 1, 2, 3), 32)
    assert index.block_size(0) == 32
    assert depth(index, pages(0, 1, 2, 3)) == 64
    assert index.store(0, [4], 3, pages(4), 16), "short again"
    assert depth(index, pages(0, 1, 2, 3, 4)) == 64
    assert not index.sweep()
    index.check()
    assert index.entries == 2


def test_a_size_that_is_told_beforehand_makes_the_first_short_block_short():
    index = BlockIndex()
    index.add(0, 32)
    assert index.block_size(0) == 32
    assert index.store(0, [1], None, pages(0), 16)
    assert index.entries == 0
    assert depth(index, pages(0)) == 0
    assert index.store(0, [2], None, pages(0, 1), 32)
    assert depth(index, pages(0, 1)) == 32


def test_an_unknown_parent_changes_nothing():
    index = eight()
    index.store(1, [90], None, pages(0), 16)
    assert not index.store(0, [9], 90, pages(8), 16), "another target's hash is no parent"
    assert not index.store(0, [9], 91, pages(8), 16)
    assert not index.store(0, [10], 9, pages(9), 16)
    assert not index.store(7, [10], 9, pages(9), 16)
    index.remove(0, [8])
    assert not index.store(0, [9], 8, pages(8), 16), "what is gone is no parent"
    assert index.entries == 8
    assert index.match(symbols(EIGHT + pages(8))).tokens == {0: 112, 1: 16}
    index.check()


@pytest.mark.parametrize("size", [1, 4, 16, 32])
def test_when_full_nothing_is_stored_and_all_else_works(size):
    index = BlockIndex(max_bytes=20_000)
    runs = 0
    while True:
        ids = pages(runs, 1, 2, 3)
        names = range(1 + 64 * runs, 1 + 64 * runs + 64 // size)
        if not index.store(0, names, None, ids, size):
            break
        runs += 1
    assert index.full
    assert index.footprint < 20_000 + 64 * 1000
    assert not index.store(1, [5], None, pages(0, 1), 32)
    assert depth(index, pages(0, 1, 2, 3)) == 64
    index.remove(0, range(1, 1 + 64 // size))
    assert depth(index, pages(0, 1, 2, 3)) == 0
    index.check()
    index.clear(0)
    while index.sweep(3):
        index.check()
    assert index.footprint == 0
    assert index.store(0, names, None, ids, size)
    assert depth(index, ids) == 64


def test_an_index_without_room_is_refused():
    with pytest.raises(ValueError, match="positive"):
        BlockIndex(0)


def test_what_is_not_known_is_passed_over():
    index = BlockIndex()
    index.remove(0, [1])
    index.clear(0)
    index.drop(0)
    assert 0 not in index
    assert not index.sweep()
    assert index.match(b"") == ({}, {})
    assert index.match(symbols(EIGHT)) == ({}, {})
    assert index.block_size(0) is None
    assert index.blocks(0) == index.tokens(0) == 0
    index.add(0)
    assert 0 in index
    assert index.block_size(0) is None
    assert index.match(symbols(EIGHT)) == ({}, {})
    index.remove(0, [1], group=5)


# -- ends and beginnings ----------------------------------------------------------------------------------------------


def test_clearing_keeps_the_block_size_and_dropping_does_not():
    index = BlockIndex()
    index.store(0, BLOCKS, None, SIX, 64)
    index.clear(0)
    assert index.block_size(0) == 64
    assert index.match(symbols(SIX)) == ({}, {})
    assert index.store(0, [1], None, SIX[:16], 16), "short"
    assert depth(index, SIX) == 0
    index.clear(0)
    assert index.block_size(0) == 64
    assert not index.store(0, BLOCKS[1:2], BLOCKS[0], SIX[64:128], 64), "hashes from before are gone"
    index.drop(0)
    assert 0 not in index
    assert index.block_size(0) is None
    index.store(0, [1], None, SIX[:16], 16)
    assert depth(index, SIX) == 16


@pytest.mark.parametrize("size", [4, 16, 64])
def test_places_are_used_again_without_ghosts(size):
    rng = random.Random(size)
    index = BlockIndex()
    prompts = [(pages(number, *range(3)), symbols(pages(number, *range(3)))) for number in range(6)]
    alive: dict[int, int] = {}
    for number in range(2500):
        target = number % 50
        index.drop(target)
        alive.pop(target, None)
        if number % 3:
            index.add(target, size)
            at = rng.randrange(6)
            names = [rng.getrandbits(64) for _ in range(64 // size)]
            index.store(target, names, None, prompts[at][0], size)
            alive[target] = at
        if len(alive) > 5:
            gone = rng.choice(list(alive))
            index.drop(gone)
            del alive[gone]
        index.sweep(rng.randrange(0, 200 // size))
        at = rng.randrange(6)
        assert index.match(prompts[at][1]).tokens == {target: 64 for target, held in alive.items() if held == at}
        if not number % 100:
            index.check()
    assert len(index._places) <= 60
    for target in range(50):
        index.drop(target)
    while index.sweep(5):
        pass
    index.check()
    assert index.entries == 0
    assert index.footprint == 0
    assert set(index._places) == {None}


def test_sweeping_takes_no_more_than_it_may_at_once():
    index = eight()
    index.drop(0)
    assert index.match(symbols(EIGHT)) == ({}, {})
    for left in (5, 2):
        assert index.sweep(3)
        assert index.entries == left
    assert not index.sweep(3)
    assert index.entries == 0


# -- more of what must not happen -------------------------------------------------------------------------------------


def test_a_branch_behind_a_block_that_was_away_does_not_hide_the_old_branch():
    """What was stored behind a prefix is remembered while it is there, though the prefix is stored anew."""
    index = eight()
    index.remove(0, [2])
    index.store(0, [2, 90], 1, pages(1, 9), 16)
    index.remove(0, [90, 2])
    index.check()
    assert depth(index, EIGHT) == 16


def test_a_block_that_was_never_told_is_a_hole():
    index = BlockIndex()
    index.store(0, [1], None, pages(0), 16)
    index.store(0, [3, 4], 1, pages(1, 2, 3), 16)
    assert depth(index, EIGHT) == 16
    index.store(0, [2], 1, pages(1), 16)
    assert depth(index, EIGHT) == 64


def test_targets_with_blocks_of_different_sizes_pass_the_check():
    index = BlockIndex()
    for target, size in enumerate(SIZES):
        index.store(target, range(1, 1 + 192 // size), None, branch(), size)
        index.check()
    assert index.match(symbols(branch())).tokens == dict.fromkeys(range(4), 192)


def test_refused_token_ids_in_larger_blocks_change_nothing():
    index = eight()
    with pytest.raises(ValueError, match="token ids"):
        index.store(0, [9], 8, [-1] * 32, 32)
    assert index.block_size(0) == 16
    assert depth(index, EIGHT) == 128


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK, Tier.SHARED])
def test_larger_blocks_on_a_lower_tier_are_not_placed_and_do_not_change_the_size(tier):
    """A lower tier may work in chunks of its own."""
    index = eight()
    assert not index.store(0, [21, 22], None, EIGHT[:64], 32, tier=tier)
    assert not index.store(0, [23], 8, pages(8, 9, 10, 11), 64, tier=tier)
    assert index.block_size(0) == 16
    assert index.entries == 8
    assert index.match(symbols(EIGHT)) == ({0: 128}, {})
    assert index.store(0, LONG, None, EIGHT, 16, tier=tier)
    assert index.blocks(0, tier) == 8
    index.check()


def test_a_size_told_beforehand_is_that_of_the_first_group():
    index = BlockIndex()
    index.add(0, 64)
    assert index.store(0, [1], None, SIX[:32], 32, group=0), "short"
    assert index.store(0, [5, 6], None, SIX[:64], 32, group=1)
    assert index.entries == 2
    assert index.store(0, [1], None, SIX[:64], 64, group=0)
    assert depth(index, SIX) == 64
    index.check()


def test_an_event_without_hashes_and_shorter_than_a_block_changes_nothing():
    index = eight()
    index.store(0, [], 8, pages(8)[:9], 16)
    assert depth(index, EIGHT) == 128


def test_a_hash_twice_in_one_event_leaves_no_ghost():
    """No engine should; but what is wrong of one target must not become a holding of the next."""
    index = BlockIndex()
    for again in (1, 1 - HALF, 1 + HALF):
        with pytest.raises(ValueError, match="twice"):
            index.store(0, [1, again], None, pages(0, 1), 16)
    assert index.entries == 0
    index.check()
    index.drop(0)
    index.sweep()
    index.store(5, [7], None, pages(8), 16)
    assert index.match(symbols(EIGHT)) == ({}, {})


def test_a_hash_that_comes_with_other_tokens_leaves_no_ghost():
    index = BlockIndex()
    index.store(0, [1], None, pages(0), 16)
    try:
        index.store(0, [1], None, pages(1), 16)
        index.check()
    except ValueError:
        pass
    index.drop(0)
    index.sweep()
    index.store(5, [7], None, pages(8), 16)
    assert index.match(symbols(pages(0))) == index.match(symbols(pages(1))) == ({}, {})


@pytest.mark.parametrize("backwards", [False, True])
def test_what_was_stored_behind_what_is_forgotten_when_all_of_it_is_gone(backwards):
    """Engines tell removals from the front as well as from the back."""
    index = BlockIndex()
    for number in range(1000):
        names = range(10 * number + 1, 10 * number + 5)
        index.store(0, names, None, pages(number, 1, 2, 3), 16)
        index.remove(0, reversed(names) if backwards else names)
    assert index.entries == 0
    assert len(index._holders.links) < 200


def test_holes_that_are_gone_cost_no_time_for_ever():
    """Removals told from the front make holes for a moment; a target is matched by bisection again soon after."""
    index = eight()
    for number in range(100, 140):
        names = range(10 * number + 1, 10 * number + 5)
        index.store(0, names, None, pages(number, 1, 2, 3), 16)
        index.remove(0, names)
    index.sweep()
    assert not index._targets[0].groups[0].holes
    assert depth(index, EIGHT) == 128
    index.check()


def test_after_clearing_groups_of_different_sizes_each_is_heard_again():
    index = BlockIndex()
    index.store(0, [1], None, SIX[:64], 64, group=0)
    index.store(0, [5, 6], None, SIX[:64], 32, group=1)
    index.clear(0)
    index.store(0, [5], None, SIX[:32], 32, group=1)
    index.store(0, [1], None, SIX[:64], 64, group=0)
    assert depth(index, SIX) == 32


# -- any order of events ----------------------------------------------------------------------------------------------


class Blocks(RuleBasedStateMachine):
    """Whatever the order of events, every prompt is held exactly as far as the model says."""

    sizes: tuple[int, ...] = SIZES
    """Of each target's blocks."""
    prompts: Sequence[Ids] = PROMPTS

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.chains = {(prompt, start): symbols(prompt, start) for prompt in self.prompts for start in (0, TENANT)}
        self.models: dict[int, Model] = {}
        self.life = 0
        self.seeds = {target: target for target in range(len(self.sizes))}
        self.tiers: Sequence[Tier] = (Tier.DEVICE,)

    def prompt(self, number: int) -> Ids:
        return self.prompts[number % len(self.prompts)]

    def model(self, target: int) -> Model:
        return self.models.setdefault(target, Model(self.sizes[target]))

    def hash(self, target: int, key: Key) -> int:
        """As one engine or another would write it: signed, or of 64 bits, or of 128."""
        whole = hashed(self.seeds[target], key)
        low = whole % HALF
        return (whole, low, low - HALF, whole - (1 << 128))[len(key.ids) // 16 % 4]

    def put(self, target: int, tier: Tier, all: list[Key], first: int, end: int, known: int | None = None) -> None:
        some = all[first:end]
        if not some:
            return
        told = some if known is None else some[-known:]
        parent = all[first - 1] if first else None
        size = self.sizes[target]
        model = self.model(target)
        placed = parent is None or model.known(parent) or all_known(model, told)
        model.store(tier, told, parent)
        result = self.index.store(
            target,
            [self.hash(target, key) for key in told],
            None if parent is None else self.hash(target, parent),
            some[-1].ids[first * size :],
            size,
            tier=tier,
            start=some[0].start,
        )
        assert result == placed

    @rule(engine=TARGET, prompt=PROMPT, first=BLOCK, count=COUNT, start=START)
    def store(self, engine, prompt, first, count, start):
        engine %= len(self.sizes)
        self.put(engine, Tier.DEVICE, keys(self.prompt(prompt), self.sizes[engine], start), first, first + count)

    @rule(engine=TARGET, prompt=PROMPT, start=START)
    def store_all_that_lacks(self, engine, prompt, start):
        """As an engine does: what it holds of the prompt is not told again."""
        engine %= len(self.sizes)
        size = self.sizes[engine]
        depth, _ = self.model(engine).match(self.prompt(prompt), start)
        self.put(engine, Tier.DEVICE, keys(self.prompt(prompt), size, start), depth // size, 12)

    @rule(engine=TARGET, prompt=PROMPT, first=BLOCK, count=COUNT, start=START, data=st.data())
    def remove(self, engine, prompt, first, count, start, data):
        engine %= len(self.sizes)
        tier = data.draw(st.sampled_from(self.tiers))
        gone = keys(self.prompt(prompt), self.sizes[engine], start)[first : first + count]
        if data.draw(st.booleans()):
            gone.reverse()
        self.model(engine).remove(tier, gone)
        self.index.remove(engine, [self.hash(engine, key) for key in gone], tier)

    @rule(engine=TARGET, prompt=PROMPT, at=BLOCK, start=START)
    def remove_one(self, engine, prompt, at, start):
        engine %= len(self.sizes)
        gone = keys(self.prompt(prompt), self.sizes[engine], start)[at : at + 1]
        self.model(engine).remove(Tier.DEVICE, gone)
        self.index.remove(engine, [self.hash(engine, key) for key in gone])

    @rule(engine=TARGET, hashes=st.lists(st.integers(-(1 << 63), 1 << 256), max_size=3))
    def remove_unknown(self, engine, hashes):
        engine %= len(self.sizes)
        self.index.remove(engine, hashes)

    @rule(engine=TARGET, prompt=PROMPT)
    def unknown_parent(self, engine, prompt):
        engine %= len(self.sizes)
        size = self.sizes[engine]
        assert not self.index.store(
            engine, [self.life + 1, self.life + 2], 12345, self.prompt(prompt)[: 2 * size], size
        )

    @rule(engine=TARGET)
    def clear(self, engine):
        engine %= len(self.sizes)
        size = self.index.block_size(engine)
        self.index.clear(engine)
        assert self.index.block_size(engine) == size
        self.models.pop(engine, None)

    @rule(engine=TARGET)
    def restart(self, engine):
        """An engine that is started again names every block anew."""
        engine %= len(self.sizes)
        self.index.drop(engine)
        assert engine not in self.index
        self.models.pop(engine, None)
        self.life += 4
        self.seeds[engine] = self.life + engine

    @rule(most=st.integers(0, 20))
    def sweep(self, most):
        assert self.index.sweep(most) in (True, False)

    @invariant()
    def sound(self):
        self.index.check()
        for (prompt, start), chained in self.chains.items():
            tokens, restored = {}, {}
            for target, model in self.models.items():
                depth, (_, host, disk, shared) = model.match(prompt, start)
                if depth:
                    tokens[target] = depth
                if host or disk or shared:
                    restored[target] = (host, disk, shared)
            assert self.index.match(chained) == Held(tokens, restored)
        for target, model in self.models.items():
            for tier in self.tiers:
                held = sum(at == tier and count > 0 for (at, _), count in model.count.items())
                assert self.index.blocks(target, tier) == held
                assert self.index.tokens(target, tier) == held * self.sizes[target]

    def teardown(self):
        for target in range(len(self.sizes)):
            self.index.drop(target)
        while self.index.sweep(7):
            pass
        self.index.check()
        assert self.index.entries == 0
        assert self.index.footprint == 0, "an index that holds nothing costs nothing"


def all_known(model: Model, told: Sequence[Key]) -> bool:
    return bool(told) and all(model.known(key) for key in told)


class Tiered(Blocks):
    """And on several tiers."""

    def __init__(self) -> None:
        super().__init__()
        self.tiers = tuple(Tier)

    def forget_moves(self):
        """What left the device a moment ago can be placed below it: the model knows only what is held."""
        for cache in self.index._targets.values():
            for group in cache.groups.values():
                group.recalled.clear()

    @rule(engine=TARGET, tier=TIER, prompt=PROMPT, first=BLOCK, count=COUNT, start=START)
    def store_on(self, engine, tier, prompt, first, count, start):
        engine %= len(self.sizes)
        self.forget_moves()
        self.put(engine, tier, keys(self.prompt(prompt), self.sizes[engine], start), first, first + count)

    @rule(engine=TARGET, tier=TIER, prompt=PROMPT, first=BLOCK, count=COUNT, start=START)
    def store_by_hash(self, engine, tier, prompt, first, count, start):
        """Without tokens: what is known from elsewhere is placed."""
        engine %= len(self.sizes)
        self.forget_moves()
        some = keys(self.prompt(prompt), self.sizes[engine], start)[first : first + count]
        model = self.model(engine)
        placed = all_known(model, some)
        model.store(tier, some, Key((), -1))
        assert self.index.store(engine, [self.hash(engine, key) for key in some], None, [], 0, tier=tier) == placed


class Twins(Blocks):
    """And with blocks of the same tokens under several hashes: an image, say, of which the tokens tell nothing."""

    @rule(engine=TARGET, prompt=PROMPT, first=BLOCK, count=COUNT, variant=VARIANT)
    def store_twin(self, engine, prompt, first, count, variant):
        engine %= len(self.sizes)
        self.put(engine, Tier.DEVICE, keys(self.prompt(prompt), self.sizes[engine], 0, variant), first, first + count)

    @rule(engine=TARGET, prompt=PROMPT, first=BLOCK, count=COUNT, variant=VARIANT)
    def remove_twin(self, engine, prompt, first, count, variant):
        engine %= len(self.sizes)
        gone = keys(self.prompt(prompt), self.sizes[engine], 0, variant)[first : first + count]
        self.model(engine).remove(Tier.DEVICE, gone)
        self.index.remove(engine, [self.hash(engine, key) for key in gone])


class Masked(Blocks):
    """And with fewer hashes than blocks: those of the last ones."""

    @rule(engine=TARGET, prompt=PROMPT, first=BLOCK, count=COUNT, told=st.integers(1, 3))
    def store_last(self, engine, prompt, first, count, told):
        engine %= len(self.sizes)
        self.put(engine, Tier.DEVICE, keys(self.prompt(prompt), self.sizes[engine]), first, first + count, told)


class Close:
    """Few prompts and targets of one block size: events meet in the same places."""

    sizes = (16, 16)
    prompts = tuple([prompt[:96] for prompt in (branch(), branch(1), branch(2), branch(3), branch(2, 4))])


class CloseBlocks(Close, Blocks):
    pass


class CloseTwins(Close, Twins):
    pass


class CloseMasked(Close, Masked):
    pass


class CloseTiered(Close, Tiered):
    pass


def cases(machine: type[RuleBasedStateMachine], examples: int) -> type:
    case = machine.TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40)
    return case


TestBlocks = cases(Blocks, 30)
TestTiered = cases(Tiered, 40)
TestTwins = cases(Twins, 30)
TestMasked = cases(Masked, 30)
TestCloseBlocks = cases(CloseBlocks, 30)
TestCloseTiered = cases(CloseTiered, 30)
TestCloseTwins = cases(CloseTwins, 30)
TestCloseMasked = cases(CloseMasked, 30)


@pytest.mark.parametrize("seed", range(8))
def test_many_short_lives_are_mirrored_exactly(seed):
    """Few events each, so that between two holes a target is found by bisection again, which is where errors hide."""
    rng = random.Random(seed)
    for _ in range(200):
        machine = CloseBlocks()
        index, done = machine.index, []
        machine.chains = {case: chain for case, chain in machine.chains.items() if not case[1]}
        for _ in range(rng.randrange(4, 14)):
            target, prompt = rng.randrange(10) // 8, rng.randrange(5)
            ids = machine.prompt(prompt)
            all = keys(ids, 16)
            held = machine.model(target).match(ids)[0] // 16
            [do] = rng.choices(("grow", "repeat", "hint", "cut", "hole"), (8, 2, seed % 2, 3, 4))
            at = rng.randrange(6)
            done.append((do, target, prompt, at))
            if do == "grow":
                machine.put(target, Tier.DEVICE, all, held, rng.randrange(held, 7))
            elif do == "repeat":
                machine.put(target, Tier.DEVICE, all, at, at + 2)
            elif do == "hint":
                machine.put(target, Tier.DEVICE, all, held, 6, rng.randrange(1, 4))
            else:
                gone = all[at:][:: rng.choice((1, -1))] if do == "cut" else all[at : at + 1]
                machine.model(target).remove(Tier.DEVICE, gone)
                index.remove(target, [machine.hash(target, key) for key in gone])
            try:
                machine.sound()
            except AssertionError as error:
                raise AssertionError(f"after {done}") from error
