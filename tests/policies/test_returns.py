"""When sessions come back, and whether their KV is still there then."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, strategies as st

from kv_index.radix import RadixIndex
from policies.returns import ENOUGH, FIRST_GAP, GapBook, Gaps, Inflow, horizon

SECONDS = st.lists(st.floats(0.01, 3000.0), min_size=ENOUGH, max_size=60)


def test_a_gap_is_what_is_fixed_until_there_is_evidence() -> None:
    gaps = Gaps()
    for _ in range(ENOUGH - 1):
        gaps.add(600.0)
        assert gaps.quantile(0.5) == FIRST_GAP
        assert (gaps.within(FIRST_GAP - 0.1), gaps.within(FIRST_GAP)) == (0.0, 1.0)
    gaps.add(600.0)
    assert gaps.quantile(0.5) == pytest.approx(600.0, rel=0.3)
    assert gaps.within(60.0) == 0.0


@given(SECONDS)
def test_quantiles_are_those_of_what_was_seen_to_a_bucket(seen: list[float]) -> None:
    gaps = Gaps()
    for each in seen:
        gaps.add(each)
    # The newest weigh a little more: half a bucket, and one place among so few.
    ranked = sorted(seen)
    low = ranked[max(0, int(len(seen) * 0.4) - 2)]
    high = ranked[min(len(seen) - 1, int(len(seen) * 0.6) + 2)]
    assert low / 1.5 <= gaps.quantile(0.5) <= max(0.05, high * 1.5)
    assert gaps.within(0.001) <= gaps.within(1.0) <= gaps.within(100.0) <= gaps.within(1e9) == 1.0


@given(SECONDS, st.floats(0.05, 0.95))
def test_the_share_within_a_quantile_is_that_share(seen: list[float], share: float) -> None:
    gaps = Gaps()
    for each in seen:
        gaps.add(each)
    assert gaps.within(gaps.quantile(share)) == pytest.approx(share, abs=0.02)


def test_one_lunch_break_moves_nothing_and_another_habit_does() -> None:
    gaps = Gaps()
    for _ in range(100):
        gaps.add(2.0)
    gaps.add(3600.0)
    assert gaps.quantile(0.5) == pytest.approx(2.0, rel=0.3)
    for _ in range(200):
        gaps.add(60.0)
    assert gaps.quantile(0.5) == pytest.approx(60.0, rel=0.3)


def test_a_million_gaps_stay_finite() -> None:
    gaps = Gaps()
    for _ in range(100_000):
        gaps.add(1.0)
    assert gaps.quantile(0.5) == pytest.approx(1.0, rel=0.3)
    assert gaps.within(10.0) == pytest.approx(1.0)


def test_gaps_are_told_by_tenant_and_tool_and_else_by_what_is_known() -> None:
    book = GapBook()
    for _ in range(ENOUGH):
        book.add("a", "build", 120.0)
        book.add("a", "look", 0.5)
    assert book.expected("a", "build").quantile(0.5) == pytest.approx(120.0, rel=0.3)
    assert book.expected("a", "look").quantile(0.5) == pytest.approx(0.5, rel=0.3)
    # An unknown tool of a known tenant, and an unknown tenant.
    assert book.expected("a", "new").within(60.0) == pytest.approx(0.5, abs=0.1)
    assert book.expected("b", "look") is book.all


def test_names_of_tools_do_not_fill_the_memory() -> None:
    book = GapBook(most=10)
    for number in range(1000):
        book.add("a", f"tool {number}", 1.0)
        book.add("a", "look", 1.0)
    assert len(book) == 10
    assert book.expected("a", "look").known


def test_inflow_is_what_came_in_lately() -> None:
    inflow = Inflow()
    assert inflow.rate(0.0) == 0.0
    for step in range(600):
        inflow.add(1000.0, step * 0.1)
        if step >= 20:
            assert inflow.rate(step * 0.1) == pytest.approx(10_000, rel=0.1)
    assert inflow.rate(60.0 + 200.0) < 1.0


def test_nothing_that_comes_in_leaves_all_the_time() -> None:
    assert horizon(1000.0, 0.0) == inf
    assert horizon(1000.0, 100.0) == 10.0


def test_a_cache_of_40_gb_cannot_hold_sessions_that_need_100_and_it_is_said_before() -> None:
    """5 s tools at 100 steps a second, 2,000 tokens a step, 100 KB a token: 100 GB are needed between two turns."""
    kv_bytes, room, steps, tokens, gap = 100_000, 400_000, 100, 2_000, 5.0
    random, inflow, gaps = Random(1), Inflow(), Gaps()
    cache = RadixIndex(1 << 30)
    cache.set_capacity(0, room // 16)
    said: float | None = None
    evicted: float | None = None
    for step in range(10 * steps):
        now = step / steps
        cache.insert(b"s%d" % step, random.randbytes(8 * (tokens // 16)), 0, now)
        inflow.add(tokens, now)
        if now >= gap:
            gaps.add(gap)
        if said is None and now >= 1.0 and inflow.rate(now) * gaps.quantile(0.5) > room:
            said = now
            needed = inflow.rate(now) * gaps.quantile(0.5) * kv_bytes
            assert needed == pytest.approx(100e9, rel=0.05)
        if evicted is None and cache.evicted(0):
            evicted = now
    assert said is not None
    assert evicted is not None
    assert said < evicted
    # It was right: of what was there when a session left, nothing is left when it returns.
    assert inflow.rate(10.0) * gaps.quantile(0.5) > 2 * room
