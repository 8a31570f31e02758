"""What must be brought back from below the device has its price: cheaper than computing it, dearer than having it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from policies.base import Fleet, Rates, Request, Target
from policies.cache_aware import CacheAware
from policies.cost import restore, terms
from tests.policies.fleets import KIND, fleet, rates as some_rates, target

TOKENS = 8000
counts = st.integers(0, 4000)
away = st.tuples(counts, counts, counts)


def request(holdings: dict[int, int], restored: dict[int, tuple[int, int, int]], **more: int) -> Request:
    return Request(tokens=TOKENS, holdings=holdings, restored=restored, draw=7, **more)


def chosen(asked: Request, among: Fleet) -> int:
    return CacheAware().choose(asked, among, 0.0).target.id


def prices(asked: Request, among: Fleet) -> dict[int, float]:
    rows = CacheAware().explain(asked, among, 0.0)
    return {row.target.id: row.terms.total for row in rows if row.terms is not None}


@given(told=away)
def test_each_tier_has_its_own_price(told: tuple[int, int, int]) -> None:
    host, disk, shared = told
    one = target(1)
    price = restore(request({1: TOKENS}, {1: told}), one)
    rates = one.rates.restore
    assert price == pytest.approx(host * rates[0] + disk * rates[1] + shared * rates[2])
    assert restore(request({1: TOKENS}, {2: told}), one) == 0.0
    assert terms(request({1: TOKENS}, {1: told}), one, None, 0.0).restore == pytest.approx(price)


def test_what_is_on_the_device_is_preferred_to_what_is_in_host_memory() -> None:
    for device in range(3):
        restored = {id: (4000, 0, 0) for id in range(3) if id != device}
        assert chosen(request(dict.fromkeys(range(3), 4000), restored), fleet(3)) == device


def test_bringing_back_is_preferred_to_computing() -> None:
    for holder in range(3):
        assert chosen(request({holder: 6000}, {holder: (6000, 0, 0)}), fleet(3)) == holder


def test_a_store_that_is_slower_than_computing_is_not_preferred() -> None:
    slow = Rates(restore=(1.0, 1.0, 1.0))
    targets = Fleet([target(id, rates=slow) for id in range(3)])
    for holder in range(3):
        assert chosen(request({holder: 6000}, {holder: (0, 0, 6000)}), targets) != holder


def test_the_nearer_tier_is_preferred() -> None:
    held = dict.fromkeys(range(3), 6000)
    assert chosen(request(held, {0: (0, 6000, 0), 1: (6000, 0, 0), 2: (0, 0, 6000)}), fleet(3)) == 1
    assert chosen(request(held, {0: (0, 6000, 0), 1: (0, 0, 6000), 2: (0, 0, 6000)}), fleet(3)) == 0


def test_more_in_host_memory_beats_less_on_the_device() -> None:
    assert chosen(request({0: 1000, 1: 7000}, {1: (7000, 0, 0)}), fleet(2)) == 1


@given(
    holdings=st.dictionaries(st.integers(0, 5), st.integers(0, TOKENS), max_size=6),
    restored=st.dictionaries(st.integers(0, 5), away, max_size=6),
    waits=st.lists(st.floats(0, 2), min_size=5, max_size=5),
    rates=some_rates,
    home=st.none() | st.integers(0, 5),
)
def test_fleets_of_one_kind_are_priced_as_any(
    holdings: dict[int, int],
    restored: dict[int, tuple[int, int, int]],
    waits: list[float],
    rates: Rates,
    home: int | None,
) -> None:
    """Prices of equal targets are computed at once; those of unequal ones one by one."""
    asked = Request(
        tokens=TOKENS, holdings=holdings, restored=restored, draw=9, session=None if home is None else 5, home=home
    )

    def made(kind: Rates, odd: Rates) -> Fleet:
        kinds = [kind] * 4 + [odd]
        return Fleet([target(id, rates=kinds[id], wait=waits[id]) for id in range(5)])

    alike, apart = made(rates, rates), made(rates, replace(rates))
    assert alike.uniform
    assert not apart.uniform
    first, second = CacheAware().choose(asked, alike, 0.0), CacheAware().choose(asked, apart, 0.0)
    assert first.terms is not None
    assert second.terms is not None
    assert first.terms.total == pytest.approx(second.terms.total, abs=1e-6)
    assert prices(asked, alike) == pytest.approx(prices(asked, apart))


@given(told=away, more=counts)
def test_the_more_must_be_brought_back_the_dearer_it_is(told: tuple[int, int, int], more: int) -> None:
    one: Target = target(1)
    for tier in range(3):
        grown = tuple(count + more * (at == tier) for at, count in enumerate(told))
        before = restore(request({1: TOKENS}, {1: told}), one)
        after = restore(request({1: TOKENS}, {1: grown}), one)  # type: ignore[dict-item]
        assert after >= before


def test_a_session_stays_where_its_tokens_can_be_brought_back() -> None:
    asked = Request(tokens=TOKENS, holdings={1: 7000}, restored={1: (7000, 0, 0)}, session=3, home=1, draw=1)
    assert CacheAware().choose(asked, fleet(4), 0.0).reason == "home"
    assert chosen(asked, fleet(4)) == 1


def test_a_home_whose_tokens_come_from_far_away_loses_to_one_that_has_them() -> None:
    far = Rates(restore=(1e-5, 1e-4, 1e-3))
    targets = Fleet([target(id, rates=far) for id in range(2)])
    asked = Request(tokens=TOKENS, holdings={0: 7000, 1: 7000}, restored={1: (0, 0, 7000)}, session=3, home=1, draw=1)
    choice = CacheAware().choose(asked, targets, 0.0)
    assert (choice.target.id, choice.reason) == (0, "moved")
    assert KIND.restore[0] < KIND.restore[1] < KIND.restore[2]
