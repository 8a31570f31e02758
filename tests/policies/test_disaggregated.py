"""A pair, one engine's own prefill, or a unified engine: whichever answers soonest."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

from policies.base import Choice, Fleet, Rates, Request, Role, Target, Terms, load
from policies.cost import EXPECTED_OUTPUT, homed, memory, terms, turn
from tests.policies.fleets import (
    KIND,
    asked,
    decoder,
    everyone,
    prefiller,
    said,
    split,
    split_asked,
    state,
    target,
)

POLICY = load("disaggregated")
LEAST_LENT = 64


def choose(request: Request, targets: Fleet, now: float = 0.0) -> Choice:
    return POLICY.choose(request, targets, now)


def ids(choice: Choice) -> tuple[int, int | None]:
    """Who generates, who computes the prompt."""
    return choice.target.id, None if choice.prefill is None else choice.prefill.id


def total(choice: Choice) -> float:
    assert choice.terms is not None
    return choice.terms.total


# -- an independent price of every way to serve a request ---------------------------------------------------------------


class Way(NamedTuple):
    target: Target
    prefill: Target | None
    source: int | None
    seconds: float
    first: float
    """Seconds of these that the prefill engine costs."""


def least(request: Request, side: Fleet) -> float | None:
    if request.session is None or request.siblings:
        return None
    return min(homed(request, each) for each in side.targets)


def firsts(request: Request, side: Fleet, now: float) -> list[tuple[Target, int | None, Terms]]:
    """Each prefill engine with what it holds, and with what home lends it."""
    bound = replace(request, home=request.partner)
    found: list[tuple[Target, int | None, Terms]] = []
    for each in side.targets:
        found.append((each, None, terms(bound, each, least(bound, side), now)))
        held = min(request.holdings.get(each.id, 0), request.tokens or 0)
        if request.lent >= held + LEAST_LENT:
            lent = replace(bound, holdings={**request.holdings, each.id: request.lent})
            moved = each.rates.handshake + (request.lent - held) * each.rates.transfer
            found.append((each, request.home, terms(lent, each, least(bound, side), now)._replace(transfer=moved)))
    return found


def ways(request: Request, targets: Fleet, now: float) -> list[Way]:
    assert targets.prefill is not None
    found, tokens = [], request.tokens or 0
    computed = firsts(request, targets.prefill, now)
    decoding = [each.busy for each in targets.targets if each.role is Role.DECODE]
    usual = sum(decoding) / max(1, len(decoding))
    for each in targets.targets:
        alone = terms(request, each, least(request, targets), now)
        full = memory(request, each)
        generating = each.busy * 128 * each.rates.decode
        if each.role is Role.UNIFIED:
            found.append(Way(each, None, None, alone.total + full, 0.0))
            continue
        lacking = tokens - min(request.holdings.get(each.id, 0), tokens)
        hands_over = each.rates.handshake + lacking * each.rates.transfer if lacking else 0.0
        for engine, source, first in computed:
            if engine.pool == each.pool:
                ready = max(first.wait + first.prefill, each.waits(now))
                rest = first.total - first.wait - first.prefill
                late = alone.wait - each.waits(now)
                seconds = ready + late + rest + hands_over + generating + alone.placement + alone.restore + full
                found.append(Way(each, engine, source, seconds, first.total))
        if each.whole:
            # Of those that come while the prompt is computed each waits half of it.
            # A step is made anyway.
            more = max(0.0, alone.prefill - each.rates.base)
            coming = usual * more / (128 * (each.rates.base + usual * each.rates.decode))
            drag = 0.2 * more * (each.busy + coming / 2) + generating
            found.append(Way(each, None, None, alone.total - alone.interference + drag + full, 0.0))
    return found


def slack(request: Request, rates: Rates) -> float:
    return 0.0 if request.siblings else turn(rates)


def check_against(found: list[Way], request: Request, targets: Fleet, choice: Choice) -> None:
    """The choice is one of ``found``, costs what that costs, and is the cheapest but for what a margin forgives."""
    near = 1e-9 * max(1.0, *(way.seconds for way in found))
    source = None if choice.source is None else choice.source.id
    mine = [way for way in found if (way.target, way.prefill, way.source) == (choice.target, choice.prefill, source)]
    assert len(mine) == 1
    assert total(choice) == pytest.approx(mine[0].seconds, rel=1e-9, abs=near)
    cheapest = min(way.seconds for way in found)
    if choice.reason == "home":
        assert choice.target.id == request.home
        assert total(choice) - cheapest <= slack(request, choice.target.rates) + near
    else:
        assert total(choice) <= cheapest + near
        at = targets.positions.get(-1 if request.home is None else request.home)
        if at is not None:
            home = min(way.seconds for way in found if way.target is targets.targets[at])
            assert home - total(choice) > slack(request, targets.targets[at].rates) - near


@given(split_asked(queues=False))
@settings(max_examples=300)
def test_the_choice_is_the_cheapest_of_all_pairs_and_all_single_engines(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    request.partner = None
    check_against(ways(request, targets, 5.0), request, targets, POLICY.choose(request, targets, 5.0))


@given(split_asked())
@settings(max_examples=300)
def test_with_a_partner_or_queues_it_is_the_cheapest_with_each_pools_own_prefill_engine(
    case: tuple[Fleet, Request],
) -> None:
    targets, request = case
    choice = POLICY.choose(request, targets, 5.0)
    found = ways(request, targets, 5.0)
    used: dict[str, set[int]] = {}
    for pool in {way.prefill.pool for way in found if way.prefill}:
        firsts_of = [way for way in found if way.prefill and way.prefill.pool == pool]
        near = 1e-9 * max(1.0, *(way.seconds for way in firsts_of))
        low = min(way.first for way in firsts_of)
        own = [way for way in firsts_of if way.prefill and way.prefill.id == request.partner]
        keep = [way for way in own if way.prefill and way.first - low <= slack(request, way.prefill.rates) + near]
        # The session's own prefill engine where it may keep it, else whoever costs least; each by its cheaper means.
        best = min(way.first for way in keep) if keep else low
        used[pool] = {id(way) for way in keep or firsts_of if way.first <= best + near}
    some = [way for way in found if way.prefill is None or id(way) in used[way.prefill.pool]]
    check_against(some, request, targets, choice)


@given(split_asked())
@settings(max_examples=200)
def test_it_changes_nothing_and_explains_its_choice_first(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    before, words = [state(each) for each in everyone(targets)], said(request)
    choice = POLICY.choose(request, targets, 5.0)
    rows = POLICY.explain(request, targets, 5.0)
    assert POLICY.choose(request, targets, 5.0) == choice
    assert load("disaggregated").choose(request, targets, 5.0) == choice, "nothing is remembered in the policy"
    assert [state(each) for each in everyone(targets)] == before
    assert said(request) == words
    assert rows[0].target is choice.target
    assert rows[0].prefill is choice.prefill
    assert rows[0].terms == choice.terms
    assert {row.target.id for row in rows} == set(targets.positions)
    totals = []
    for row in rows:
        assert row.terms is not None
        assert min(row.terms) >= -1e-9, "no cost is negative"
        assert row.terms.total == pytest.approx(sum(row.terms))
        assert row.holding == request.holdings.get(row.target.id, 0)
        totals.append(row.terms.total)
    assert totals[1:] == sorted(totals[1:])
    assert len({(row.target.id, row.prefill and row.prefill.id) for row in rows}) == len(rows)
    if choice.runner_up is not None:
        assert choice.runner_up is not choice.target
        assert choice.runner_up_terms is not None
        assert choice.runner_up_terms.total == min(
            row.terms.total for row in rows if row.terms and row.target is not choice.target
        )


@given(split_asked())
@settings(max_examples=200)
def test_a_pair_is_of_one_pool_and_of_the_right_roles(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    assert targets.prefill is not None
    choice, rows = POLICY.choose(request, targets, 5.0), POLICY.explain(request, targets, 5.0)
    fed = {each.pool for each in targets.prefill.targets}
    for one, first in [(choice.target, choice.prefill), *[(row.target, row.prefill) for row in rows]]:
        assert any(one is each for each in targets.targets)
        if first is not None:
            assert any(first is each for each in targets.prefill.targets)
            assert first.pool == one.pool
            assert one.role is Role.DECODE, "a unified engine takes no pair"
        elif one.role is Role.DECODE and one.pool in fed:
            assert one.whole, "one that cannot serve whole is given a prefill engine"
    if choice.source is not None:
        assert choice.prefill is not None
        assert choice.source.id == request.home
        held = request.holdings.get(choice.prefill.id, 0)
        assert request.lent - held >= LEAST_LENT


@given(split_asked(), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_the_order_of_targets_decides_nothing(case: tuple[Fleet, Request], draws: Random) -> None:
    targets, request = case
    assert targets.prefill is not None
    decode, prefill = list(targets.targets), list(targets.prefill.targets)
    draws.shuffle(decode)
    draws.shuffle(prefill)
    one, other = POLICY.choose(request, targets, 5.0), POLICY.choose(request, split(decode, prefill), 5.0)
    assert (ids(one), one.reason, one.source, one.terms) == (ids(other), other.reason, other.source, other.terms)


@given(asked())
@settings(max_examples=200)
def test_without_prefill_engines_it_is_cache_aware(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    for options in ({}, {"margin": 0.0}, {"margin": 2.0, "thrift": 1.5}):
        one, other = load("disaggregated", options), load("cache_aware", options)
        assert one.choose(request, targets, 5.0) == other.choose(request, targets, 5.0)
        assert one.explain(request, targets, 5.0) == other.explain(request, targets, 5.0)
    assert (POLICY.needs_prefix, POLICY.needs_session) == (True, True)


# -- queues, load and memory decide, not a number of tokens -------------------------------------------------------------


@pytest.mark.parametrize("new", [200, 2_000, 20_000])
def test_the_same_new_tokens_take_a_pair_or_none_as_the_queues_are(new: int) -> None:
    request = Request(7, tokens=new)
    busy, free = decoder(0, busy=8.0), prefiller(100)
    assert ids(choose(request, split([busy], [free]))) == (0, 100), "a free prefill engine spares those who generate"
    queue = 40 * KIND.prefill(new, 0)
    assert ids(choose(request, split([busy], [prefiller(100, wait=queue)]))) == (0, None), "its queue is too long"
    assert ids(choose(request, split([decoder(0)], [free]))) == (0, None), "nobody is disturbed: no transfer is needed"
    waiting = decoder(0, wait=queue)
    assert ids(choose(request, split([waiting], [free]))) == (0, 100), "the decode engine's queue passes meanwhile"
    both = split([waiting], [prefiller(100, wait=3 * queue)])
    assert ids(choose(request, both)) == (0, None)


def test_what_is_done_of_a_queue_is_no_wait_any_more() -> None:
    targets = split([decoder(0, busy=8.0)], [prefiller(100, wait=9.0, head=9.0, since=0.0)])
    assert ids(choose(Request(7, tokens=2_000), targets, 0.0)) == (0, None)
    assert ids(choose(Request(7, tokens=2_000), targets, 9.0)) == (0, 100)


def test_more_running_answers_make_prefill_on_the_decode_engine_dearer() -> None:
    request, seen = Request(7, tokens=3_000, session=5, home=0, partner=100, holdings={0: 1_000, 100: 900}), []
    for busy in range(60):
        rows = POLICY.explain(request, split([decoder(0, busy=float(busy))], [prefiller(100)]), 0.0)
        local = next(row.terms for row in rows if row.prefill is None)
        pair = next(row.terms for row in rows if row.prefill is not None)
        assert local is not None
        assert pair is not None
        here = KIND.prefill(2_000, 1_000)
        more = here - KIND.base
        coming = busy * more / (EXPECTED_OUTPUT * (KIND.base + busy * KIND.decode))
        disturbed = 0.2 * more * (busy + coming / 2)
        assert local.interference == pytest.approx(disturbed + busy * EXPECTED_OUTPUT * KIND.decode)
        assert pair.interference == pytest.approx(busy * EXPECTED_OUTPUT * KIND.decode)
        seen.append(rows[0].prefill is not None)
    assert seen == sorted(seen), "once a pair is worth it, more load keeps it so"
    assert set(seen) == {False, True}


def test_a_unified_engine_is_one_more_way() -> None:
    request = Request(7, tokens=4_000)
    pair = [decoder(0, whole=False)]
    assert ids(choose(request, split([*pair, target(50)], [prefiller(100)]))) == (50, None), "it needs no transfer"
    assert ids(choose(request, split([*pair, target(50, wait=1.0)], [prefiller(100)]))) == (0, 100)
    held = Request(7, tokens=4_000, holdings={50: 3_900})
    assert ids(choose(held, split([*pair, target(50, wait=0.2)], [prefiller(100)]))) == (50, None)


def test_a_transfer_costs_a_handshake_and_the_tokens_that_the_decode_engine_lacks() -> None:
    rates = Rates(handshake=0.5, transfer=1e-3)
    for held, moved in ((0, 0.5 + 4.0), (1_000, 0.5 + 3.0), (3_999, 0.5 + 0.001), (4_000, 0.0), (9_000, 0.0)):
        request = Request(7, tokens=4_000, holdings={0: held})
        choice = choose(request, split([decoder(0, whole=False, rates=rates)], [prefiller(100)]))
        assert choice.terms is not None
        assert choice.terms.transfer == pytest.approx(moved)


def test_the_decode_engine_is_chosen_by_what_it_holds_by_load_and_by_memory() -> None:
    request, first = Request(7, tokens=4_000), [prefiller(100)]
    for favoured in (0, 1):
        other = 1 - favoured

        def pair(**fields: Any) -> Fleet:
            dear = decoder(other, whole=False, **fields)  # noqa: B023
            return split([dear, decoder(favoured, whole=False)], first)  # noqa: B023

        holding = replace(request, holdings={favoured: 3_000})
        assert choose(holding, pair()).target.id == favoured
        assert choose(request, pair(busy=3.0)).target.id == favoured
        assert choose(request, pair(wait=5.0)).target.id == favoured
        assert choose(request, pair(room=50_000, active=49_000.0)).target.id == favoured
        assert choose(replace(request, session=3), pair(homes=2)).target.id == favoured


def test_the_prefill_engine_is_chosen_by_what_it_holds_and_by_its_queue() -> None:
    request, second = Request(7, tokens=4_000), [decoder(0, whole=False)]
    for favoured in (100, 101):
        other = 201 - favoured
        held = replace(request, holdings={favoured: 3_000})
        assert ids(choose(held, split(second, [prefiller(other), prefiller(favoured)]))) == (0, favoured)
        queued = split(second, [prefiller(other, wait=0.1), prefiller(favoured)])
        assert ids(choose(request, queued)) == (0, favoured)
        # A holding is worth what it saves, and no more.
        saved = KIND.prefill(4_000, 0) - KIND.prefill(1_000, 3_000)
        for wait, chosen in ((0.9 * saved, favoured), (1.1 * saved, other)):
            queued = split(second, [prefiller(other), prefiller(favoured, wait=wait)])
            assert ids(choose(held, queued)) == (0, chosen)


@pytest.mark.parametrize("full", [decoder(0, whole=False), decoder(0), target(50)], ids=["pair", "local", "whole"])
def test_memory_counts_in_each_way(full: Target) -> None:
    full.room, full.active = 10_000, 9_990.0
    request = Request(7, tokens=3_000)
    rows = POLICY.explain(request, split([full], [prefiller(100)]), 0.0)
    for row in rows:
        assert row.terms is not None
        assert row.terms.memory == memory(request, full) > 0.0


def test_prices_differ_by_the_tokens_that_only_the_decode_engine_holds() -> None:
    """A prefill engine holds prompts; a decode engine answers as well: 506 of 580 reusable tokens, and 580."""
    request = Request(7, tokens=773, session=5, home=0, partner=100, holdings={0: 580, 100: 506})
    rows = POLICY.explain(request, split([decoder(0)], [prefiller(100)]), 0.0)
    local = next(row.terms for row in rows if row.prefill is None)
    pair = next(row.terms for row in rows if row.prefill is not None)
    assert local is not None
    assert pair is not None
    answers = 74 * (KIND.token + KIND.attention * (506 + 37))
    assert pair.prefill - local.prefill == pytest.approx(answers)
    assert pair.total - local.total == pytest.approx(answers + KIND.handshake + (773 - 580) * KIND.transfer)


def test_nothing_is_lent_to_another_pool_nor_by_a_home_that_is_not_there() -> None:
    request = Request(7, tokens=20_000, session=5, home=0, holdings={0: 20_000}, lent=19_000, siblings=1)
    two = split(
        [decoder(0, wait=60.0), decoder(1, pool="b", whole=False)],
        [prefiller(100, wait=60.0), prefiller(101, pool="b")],
    )
    choice = choose(request, two)
    assert (ids(choice), choice.source) == ((1, 101), None)
    gone = Request(7, tokens=20_000, session=5, home=9, lent=19_000)
    alone = split([decoder(0, whole=False)], [prefiller(100)])
    assert total(choose(gone, alone)) == pytest.approx(total(choose(Request(7, tokens=20_000, session=5), alone)))


def test_no_more_is_lent_than_the_prompt_has() -> None:
    request = Request(7, tokens=500, session=5, home=0, holdings={100: 490}, lent=1_000)
    rates = Rates(token=1e-2)
    assert choose(request, split([decoder(0, whole=False)], [prefiller(100, rates=rates)])).source is None


def test_a_decode_engine_that_starts_slowly_gets_less_than_its_share_of_pairs() -> None:
    engines = [decoder(at, whole=False, share=0.1 if at == 0 else 1.0) for at in range(4)]
    targets, draws, seen = split(engines, [prefiller(100)]), Random(5), [0] * 4
    for _ in range(200):
        choice = choose(Request(draws.getrandbits(64), tokens=2_000), targets)
        choice.target.running += 1
        choice.target.busy += 1
        seen[choice.target.id] += 1
    assert seen[0] < 40 < min(seen[1:])


def test_what_the_decode_engine_must_bring_back_counts_in_a_pair_too() -> None:
    request = Request(7, tokens=10_000, holdings={0: 9_900}, restored={0: (0, 0, 9_900)})
    targets = split([decoder(0, whole=False), decoder(1, whole=False)], [prefiller(100)])
    assert choose(request, targets).target.id == 1
