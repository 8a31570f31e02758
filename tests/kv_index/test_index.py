"""The ladder of belief: what moves a target, and how hard; what is in flight; how large a cache seems to be."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from random import Random

import pytest

from kv_index.blocks import BlockIndex
from kv_index.groups import Tier
from kv_index.index import (
    AGREED,
    DOUBTED,
    JUDGED,
    NOTHING,
    PATIENCE,
    SETTLED,
    UNHEARD,
    WRONG,
    PrefixIndex,
    Report,
    Rung,
)
from kv_index.pages import PAGE_TOKENS, chain
from kv_index.radix import RadixIndex

SPACE = b"space"


class Ladder:
    """An index whose moves are kept."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, str, str]] = []
        self.index = PrefixIndex(
            RadixIndex(), BlockIndex(), lambda target, before, after, why: self.moves.append((before, after, why))
        )
        self.index.set_size(1, None)

    def report(
        self,
        predicted: int,
        cached: int,
        prompt: int = 4000,
        routed: int | None = None,
        exact: int | None = None,
        at_home: bool = False,
        times: int = 1,
        now: float = 0.0,
    ) -> None:
        for _ in range(times):
            self.index.report(
                1, Report(predicted, cached, prompt, predicted if routed is None else routed, exact, at_home), now
            )

    @property
    def rung(self) -> str:
        return self.index.of(1).rung.value

    def fed(self, whole: bool = True) -> None:
        self.index.fed(1, 16)
        self.index.heard(1, whole, False)


@pytest.fixture
def ladder() -> Ladder:
    return Ladder()


def pages(ids: list[int]) -> tuple[bytes, bytes]:
    packed = array("I", ids).tobytes()
    return packed, chain(packed, 0).symbols


# -- every move -------------------------------------------------------------------------------------------------------


def test_a_target_starts_with_what_was_sent_there(ladder: Ladder) -> None:
    assert (ladder.rung, ladder.index.of(1).reason) == ("predicted", "start")
    assert not ladder.index.of(1).exact
    assert ladder.moves == []


def test_events_that_tell_all_make_it_exact_and_those_that_do_not_leave_it(ladder: Ladder) -> None:
    ladder.fed(whole=False)
    assert ladder.moves == []
    ladder.index.heard(1, True, False)
    assert ladder.moves == [("predicted", "exact", "events")]
    ladder.index.heard(1, True, False)
    assert len(ladder.moves) == 1


@pytest.mark.parametrize("reason", ["gap", "disconnected", "flooded", "restarted"])
def test_events_that_cannot_be_relied_on_make_it_predicted(ladder: Ladder, reason: str) -> None:
    ladder.fed()
    ladder.index.silenced(1, reason, reason == "gap")
    assert ladder.moves[1:] == [("exact", "predicted", reason)]
    ladder.index.silenced(1, "again", False)
    assert len(ladder.moves) == 2
    ladder.index.heard(1, False, False)
    assert ladder.rung == "predicted"
    ladder.index.heard(1, True, False)
    assert ladder.moves[2:] == [("predicted", "exact", "events")]


def test_nobody_who_listens_leaves_it_predicted_for_good(ladder: Ladder) -> None:
    ladder.fed()
    ladder.index.deaf(1)
    assert ladder.moves[1:] == [("exact", "predicted", "not_subscribed")]
    ladder.report(2000, 2000, exact=2000, times=3 * AGREED)
    ladder.index.heard(1, True, False)
    assert ladder.rung == "predicted"


def test_reports_that_contradict_events_move_it_down_and_few_do_not(ladder: Ladder) -> None:
    ladder.fed()
    ladder.report(2000, 1000, exact=2000, times=WRONG - 1)
    assert ladder.rung == "exact"
    ladder.report(2000, 2000, exact=2000, times=JUDGED - WRONG + 1)
    ladder.report(2000, 1000, exact=2000)
    assert ladder.rung == "exact", "seven of the last sixteen"
    ladder.report(2000, 2000, exact=2000, times=JUDGED)
    ladder.report(2000, 1000, exact=2000, times=WRONG)
    assert ladder.moves[1:] == [("exact", "predicted", "reports_disagree")]


def test_it_takes_more_to_rise_than_to_stay(ladder: Ladder) -> None:
    ladder.fed()
    ladder.report(2000, 1000, exact=2000, times=WRONG)
    assert ladder.rung == "predicted"
    ladder.report(2000, 2000, exact=2000, times=AGREED)
    assert ladder.rung == "predicted", "too many of the last sixteen disagreed"
    ladder.report(2000, 2000, exact=2000, times=JUDGED - 2 - AGREED)
    assert ladder.rung == "exact"
    assert ladder.moves[2:] == [("predicted", "exact", "reports_agree")]


def test_one_that_disagrees_begins_the_count_anew(ladder: Ladder) -> None:
    ladder.fed(whole=False)
    for _ in range(5):
        ladder.report(2000, 2000, exact=2000, times=AGREED - 1)
        ladder.report(2000, 1000, exact=2000)
    assert ladder.rung == "predicted"
    ladder.report(2000, 2000, exact=2000, times=AGREED)
    assert ladder.rung == "exact"


def test_agreeing_on_nothing_is_no_evidence(ladder: Ladder) -> None:
    ladder.fed(whole=False)
    ladder.report(0, 0, exact=0, times=100)
    assert ladder.rung == "predicted"


@pytest.mark.parametrize(("off", "agrees"), [(0, True), (16, True), (32, True), (33, False), (-16, True), (-17, False)])
def test_a_block_or_two_are_no_difference(ladder: Ladder, off: int, agrees: bool) -> None:
    ladder.fed(whole=False)
    ladder.report(1000, 1000, exact=1000 + off, times=AGREED)
    assert (ladder.rung == "exact") is agrees


def test_without_events_reports_never_make_it_exact(ladder: Ladder) -> None:
    ladder.report(2000, 2000, exact=2000, times=50)
    assert ladder.rung == "predicted"


def test_computed_prompts_without_any_event_move_it_down_and_the_next_event_up(ladder: Ladder) -> None:
    ladder.fed()
    now = 0.0
    for _ in range(UNHEARD):
        assert ladder.rung == "exact"
        ladder.report(0, 0, now=now)
        now += PATIENCE + 0.1
        ladder.index.sweep(now)
    assert ladder.moves[1:] == [("exact", "predicted", "no_events")]
    ladder.index.heard(1, True, False)
    assert ladder.moves[2:] == [("predicted", "exact", "events")]


def test_prompts_that_had_nothing_to_compute_are_not_waited_for(ladder: Ladder) -> None:
    ladder.fed()
    for at in range(5 * UNHEARD):
        ladder.report(3990, 3984, now=10.0 * at)
        ladder.index.sweep(10.0 * at + 5)
    assert ladder.rung == "exact"


def test_finding_nothing_three_times_where_much_was_believed_is_a_verdict(ladder: Ladder) -> None:
    ladder.report(2000, 0, times=NOTHING - 1)
    ladder.report(2000, 1500)
    ladder.report(2000, 0, times=NOTHING - 1)
    assert ladder.rung == "predicted"
    ladder.report(2000, 0)
    assert ladder.moves == [("predicted", "none", "finds_nothing")]
    assert ladder.index.low == {1: Rung.NONE}
    assert not ladder.index.believed(1, 1)
    ladder.report(0, 0, times=100)
    assert ladder.rung == "none"
    ladder.report(0, 100)
    assert ladder.moves[1:] == [("none", "predicted", "finds_something")]
    assert ladder.index.low == {}


def test_little_that_was_not_found_says_nothing(ladder: Ladder) -> None:
    ladder.report(DOUBTED - 1, 0, times=50)
    assert ladder.rung == "predicted"


def test_prompts_that_share_nothing_although_they_should_leave_sessions_their_own(ladder: Ladder) -> None:
    ladder.report(2000, 300, times=JUDGED * 3 // 4)
    assert ladder.rung == "predicted"
    ladder.report(2000, 300)
    assert ladder.moves == [("predicted", "session", "shares_nothing")]
    assert ladder.index.believed(1, 1)
    assert not ladder.index.believed(1, 2)
    assert not ladder.index.believed(1, None)
    ladder.report(0, 2000, routed=2000, times=JUDGED)
    assert ladder.moves[1:] == [("session", "predicted", "shares_again")]
    assert ladder.index.believed(1, None)


def test_what_sessions_find_at_home_says_nothing_of_what_others_would(ladder: Ladder) -> None:
    ladder.report(2000, 300, at_home=True, times=100)
    assert ladder.rung == "predicted"


def test_one_that_is_gone_leaves_nothing(ladder: Ladder) -> None:
    ladder.fed()
    ladder.report(2000, 1000, exact=2000, times=WRONG)
    ladder.index.remove(1)
    assert ladder.index.trust == {}
    assert 1 not in ladder.index.blocks
    assert ladder.rung == "predicted"


# -- matching ---------------------------------------------------------------------------------------------------------


def test_on_exact_events_count_and_what_was_sent_does_not(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    place = index.sent(SPACE, symbols, 1, 1.0, True)
    index.landed(SPACE, symbols, 1, place, 1.0, 2.0)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}
    ladder.fed()
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {}
    index.blocks.store(1, [1, 2, 3], None, list(range(48)), 16)
    index.heard(1, True, False)
    found = index.match(SPACE, symbols, ids, 0, None)
    assert found.tokens == {1: 48}
    assert found.depths == {1: 10}
    assert found.exact == {1: 48}
    index.silenced(1, "disconnected", False)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}


def test_caches_that_events_do_not_tell_apart_are_predicted(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    ladder.fed()
    ladder.index.blocks.store(1, [1, 2, 3], None, list(range(48)), 16)
    found = ladder.index.match(SPACE, symbols, ids, 0, None, events=False)
    assert found.tokens == {}
    assert found.exact == {}


def test_what_lies_below_the_device_is_told_apart(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    ladder.fed()
    ladder.index.blocks.store(1, [1, 2, 3], None, list(range(48)), 16)
    ladder.index.blocks.store(1, [1, 2, 3], None, [], 0, tier=Tier.HOST)
    ladder.index.blocks.remove(1, [2, 3])
    found = ladder.index.match(SPACE, symbols, ids, 0, None)
    assert found.tokens == {1: 48}
    assert found.restored == {1: (32, 0, 0)}


def test_a_prompt_is_held_where_it_was_sent_before_events_say_so(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    ladder.fed()
    place = index.sent(SPACE, symbols, 1, 1.0, True)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}
    index.landed(SPACE, symbols, 1, place, 1.0, 2.0)
    index.sweep(2.0 + SETTLED / 2)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}, "its events may be on their way"
    index.sweep(2.0 + SETTLED + 0.1)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {}, "no event told of it"


def test_a_prompt_that_was_answered_is_what_events_say(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    ladder.fed()
    place = index.sent(SPACE, symbols, 1, 1.0, True)
    index.landed(SPACE, symbols, 1, place, 1.0, 2.0)
    index.blocks.store(1, list(range(10)), None, list(range(160)), 16)
    index.heard(1, True, False)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}
    index.blocks.remove(1, [9])
    index.heard(1, True, False)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 144}, "nothing of it is in flight any more"


def test_a_prompt_that_did_not_run_is_held_by_nobody(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    for fed in (False, True):
        if fed:
            ladder.fed()
        place = index.sent(SPACE, symbols, 1, 1.0, True)
        index.undone(SPACE, symbols, 1, place, 0, 1.0)
        assert index.match(SPACE, symbols, ids, 0, None).tokens == {}


def test_one_of_two_equal_prompts_in_flight_may_fail(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    ladder.fed()
    index.sent(SPACE, symbols, 1, 1.0, True)
    second = index.sent(SPACE, symbols, 1, 2.0, True)
    index.undone(SPACE, symbols, 1, second, 0, 2.0)
    index.sent(SPACE, symbols, 1, 3.0, True)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {1: 160}


def test_an_engine_that_was_emptied_holds_nothing_of_what_was_sent(ladder: Ladder) -> None:
    ids, symbols = pages(list(range(160)))
    index = ladder.index
    ladder.fed()
    place = index.sent(SPACE, symbols, 1, 1.0, True)
    index.blocks.clear(1)
    index.heard(1, True, True)
    assert index.match(SPACE, symbols, ids, 0, None).tokens == {}
    index.landed(SPACE, symbols, 1, place, 1.0, 2.0)
    index.radix.check()


# -- sizes ------------------------------------------------------------------------------------------------------------


class LRU:
    """A cache of whole prompts' pages: what was used longest ago goes, the end of a prompt before its start."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.kept: OrderedDict[bytes, None] = OrderedDict()

    def use(self, symbols: bytes) -> int:
        """Pages found; all of them are there afterwards."""
        names = [symbols[: at + 8] for at in range(0, len(symbols), 8)]
        found = 0
        while found < len(names) and names[found] in self.kept:
            found += 1
        for name in reversed(names):
            self.kept[name] = None
            self.kept.move_to_end(name)
        while len(self.kept) > self.size:
            self.kept.popitem(last=False)
        return found


@pytest.mark.parametrize("told", [4000, None], ids=["told too much", "told nothing"])
@pytest.mark.parametrize("size", [400, 1000])
def test_how_large_a_cache_is_is_learned_from_what_is_found_in_it(ladder: Ladder, size: int, told: int | None) -> None:
    index, cache, draws = ladder.index, LRU(size), Random(1)
    index.set_size(1, told)
    prompts = [pages([at, *[draws.randrange(1000) for _ in range(799)]]) for at in range(60)]
    last: dict[int, float] = {}
    errors = []
    for step in range(1200):
        now = float(step)
        at = min(int(draws.expovariate(1 / 15)), len(prompts) - 1)
        ids, symbols = prompts[at]
        predicted = index.match(SPACE, symbols, ids, 0, None).tokens.get(1, 0)
        place = index.sent(SPACE, symbols, 1, now, True)
        cached = cache.use(symbols) * PAGE_TOKENS
        index.landed(SPACE, symbols, 1, place, now, now)
        index.report(1, Report(predicted, cached, 800, predicted, used=last.get(at)), now)
        last[at] = now
        errors.append(abs(predicted - cached))
    learned = index.radix.capacity(1)
    assert learned is not None
    assert 0.8 * size < learned < 1.2 * size
    late = errors[-300:]
    assert sum(late) / len(late) < 800 * 0.1


def test_a_cache_never_seems_larger_than_its_engine_says_or_vanishes(ladder: Ladder) -> None:
    ladder.index.set_size(1, 5000)
    ladder.report(0, 4000, times=200)
    assert ladder.index.radix.capacity(1) == 5000
    for at in range(2000):
        ladder.report(4000, 1000, now=float(at), at_home=True)
    assert ladder.index.radix.capacity(1) == 100
    ladder.report(0, 4000, at_home=True, times=500)
    assert ladder.index.radix.capacity(1) == 5000, "and it recovers"


def test_a_share_that_was_learned_stays_when_the_engine_says_another_size(ladder: Ladder) -> None:
    ladder.index.set_size(1, 1000)
    for at in range(23):
        ladder.report(4000, 1000, now=float(at), at_home=True)
    small = ladder.index.radix.capacity(1)
    assert small is not None
    assert 400 < small < 600
    ladder.index.set_size(1, 2000)
    doubled = ladder.index.radix.capacity(1)
    assert doubled is not None
    assert abs(doubled - 2 * small) <= 2
