"""The flagship: least expected seconds."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import assume, given, settings, strategies as st
from xxhash import xxh3_64_digest

from kv_index.radix import RadixIndex
from policies.base import Fleet, Rates, Request, Target, load
from policies.cost import homed, terms, turn
from tests.policies.fleets import asked, bits, fleet, fleets, target

POLICY = load("cache_aware")


def priced(request: Request, targets: Fleet, now: float = 5.0) -> dict[int, float]:
    """The total of each candidate, one by one."""
    places = request.session is not None and not request.siblings
    least = min(homed(request, each) for each in targets.targets) if places else None
    return {each.id: terms(request, each, least, now).total for each in targets.targets}


@given(asked())
@settings(max_examples=400)
def test_the_choice_is_that_of_pricing_each_candidate(case: tuple[Fleet, Request]) -> None:
    """Pricing all at once, where rates are equal, is only a faster way."""
    targets, request = case
    totals = priced(request, targets)
    scale = max(1.0, *totals.values())
    choice = POLICY.choose(request, targets, 5.0)
    cost, least = totals[choice.target.id], min(totals.values())
    if choice.reason == "home":
        # What runs beside others of its session moves nobody.
        margin = 0.0 if request.siblings else turn(choice.target.rates)
        assert choice.target.id == request.home
        assert cost - least <= margin + 1e-9 * scale
    else:
        assert cost <= least + 1e-9 * scale
        if request.home in totals:
            margin = 0.0 if request.siblings else turn(targets.targets[targets.positions[request.home]].rates)
            assert totals[request.home] - cost > margin - 1e-9 * scale
    assert choice.terms is not None
    assert choice.terms.total == pytest.approx(cost)
    if len(totals) > 1:
        assert choice.runner_up is not None
        rest = min(total for id, total in totals.items() if id != choice.target.id)
        assert totals[choice.runner_up.id] <= rest + 1e-9 * scale
    else:
        assert choice.runner_up is None


@given(asked(slow=False, equal_rates=True), bits)
def test_the_fast_path_agrees_with_the_slow_one(case: tuple[Fleet, Request], key: int) -> None:
    """The same numbers under rates that are equal but not the same object take the other path."""
    targets, request = case
    rates = targets.targets[0].rates
    copies = [
        target(
            each.id,
            rates=Rates(rates.base, rates.token, rates.attention, rates.decode),
            wait=each.wait,
            head=each.head,
            since=each.since,
            running=each.running,
            foreign=each.foreign,
            busy=each.busy,
            homes=each.homes,
        )
        for each in targets.targets
    ]
    apart = Fleet(copies)
    assume(len(copies) > 1)
    assert targets.uniform
    assert not apart.uniform
    one, other = POLICY.choose(request, targets, 0.0), POLICY.choose(request, apart, 0.0)
    totals = priced(request, targets)
    assert totals[one.target.id] == pytest.approx(totals[other.target.id], rel=1e-9, abs=1e-9)


@given(asked())
def test_no_target_is_chosen_that_is_worse_in_everything_than_another(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    assume(request.session is None or request.home is None)
    kind = targets.targets[0].rates
    for each in targets.targets:
        each.rates, each.homes, each.share = kind, 3, 1.0
    targets = Fleet(targets.targets)
    chosen = POLICY.choose(request, targets, 0.0).target
    tokens = request.tokens or 0

    def held(each: Target) -> int:
        return min(tokens, request.holdings.get(each.id, 0))

    for each in targets.targets:
        worse = chosen.waits(0.0) > each.waits(0.0) + 1e-6 and held(chosen) <= held(each) and chosen.busy >= each.busy
        assert not worse, "it waits longer, holds no more and is no less busy"
        if request.tokens is not None and held(each) > held(chosen):
            assert not (chosen.waits(0.0) >= each.waits(0.0) + 1e-6 and chosen.busy >= each.busy)


@given(fleets(slow=False, equal_rates=True), st.integers(1, 60_000), st.integers(0, 60_000), bits)
def test_a_prefix_that_all_hold_attracts_nobody(targets: Fleet, tokens: int, held: int, key: int) -> None:
    for each in targets.targets:
        # What is computed delays those who generate: with less to compute that matters less, rightly.
        each.busy = 2.0
    holdings = dict.fromkeys(targets.positions, held)
    with_it = POLICY.choose(Request(key, tokens=tokens, holdings=holdings), targets, 0.0).target
    without = POLICY.choose(Request(key, tokens=tokens), targets, 0.0).target
    totals = priced(Request(key, tokens=tokens), targets)
    assert totals[with_it.id] == pytest.approx(totals[without.id], abs=1e-9)


def test_a_prefix_that_all_hold_leaves_ties_where_they_were() -> None:
    draws = Random(9)
    targets = fleet(8)
    for _ in range(300):
        key = draws.getrandbits(64)
        for session in (None, key):
            plain = Request(key, tokens=3000, session=session)
            shared = Request(key, tokens=3000, session=session, holdings=dict.fromkeys(range(8), 2000))
            assert POLICY.choose(plain, targets, 0.0).target is POLICY.choose(shared, targets, 0.0).target


def test_the_holder_is_chosen_while_its_queue_is_shorter_than_what_it_saves() -> None:
    rates = Rates()
    saved = rates.prefill(8000, 0) - rates.prefill(1000, 7000)
    for wait, chosen in ((0.0, 1), (0.9 * saved, 1), (1.1 * saved, None)):
        targets = fleet(4)
        targets.targets[1].wait = wait
        choice = POLICY.choose(Request(7, tokens=8000, holdings={1: 7000}), targets, 0.0)
        if chosen is None:
            assert choice.target.id != 1
            assert choice.reason == "load"
        else:
            assert choice.target.id == chosen
            assert choice.reason == "prefix"


@given(st.floats(0, 3), st.floats(0, 3), st.integers(1, 50_000), st.floats(0, 2) | st.none())
def test_a_session_stays_home_unless_the_difference_exceeds_the_margin(
    here: float, there: float, tokens: int, margin: float | None
) -> None:
    policy = load("cache_aware", {"margin": margin})
    targets = Fleet([target(0, wait=here, homes=4), target(1, wait=there, homes=4)])
    request = Request(3, tokens=tokens, session=5, home=0, holdings={0: tokens - 1})
    totals = priced(request, targets)
    wide = turn(targets.targets[0].rates) if margin is None else margin
    assume(abs(totals[0] - totals[1] - wide) > 1e-6)
    choice = policy.choose(request, targets, 0.0)
    assert choice.target.id == (1 if totals[0] - totals[1] > wide else 0)
    assert choice.reason == ("moved" if choice.target.id else "home")
    assert choice.moves_home


def test_a_deep_queue_at_home_moves_the_session_and_a_sibling_only_spills() -> None:
    targets = Fleet([target(0, wait=30.0), target(1)])
    request = Request(3, tokens=2000, session=5, home=0, holdings={0: 1900})
    moved = POLICY.choose(request, targets, 0.0)
    assert (moved.target.id, moved.reason, moved.moves_home) == (1, "moved", True)
    request.siblings = 1
    spilled = POLICY.choose(request, targets, 0.0)
    assert (spilled.target.id, spilled.reason, spilled.moves_home) == (1, "spill", False)


def test_warm_sessions_never_move_on_an_idle_fleet() -> None:
    draws = Random(12)
    for _ in range(300):
        targets = Fleet([target(id, homes=draws.randrange(60)) for id in range(8)])
        home = draws.randrange(8)
        tokens = draws.randrange(50, 100_000)
        request = Request(draws.getrandbits(64), tokens=tokens, session=draws.getrandbits(64), home=home)
        request.holdings = {home: tokens * 9 // 10, **dict.fromkeys(range(8), 10)}
        choice = POLICY.choose(request, targets, 0.0)
        assert (choice.target.id, choice.reason) == (home, "home")


def test_a_session_whose_home_is_gone_is_placed_anew() -> None:
    choice = POLICY.choose(Request(3, tokens=900, session=5, home=77), fleet(3), 0.0)
    assert choice.reason == "home_gone"
    assert choice.moves_home


def test_ties_spread_by_key_and_agree_between_replicas() -> None:
    draws = Random(4)
    names = [f"engine-{at}:8000" for at in range(8)]
    count: Counter[str] = Counter()
    for _ in range(1600):
        key = draws.getrandbits(64)
        request = Request(draws.getrandbits(64), tokens=1000, session=key)
        chosen = set()
        for _ in range(2):
            draws.shuffle(names)
            targets = Fleet([Target(draws.randrange(10**6) * 8 + at, name) for at, name in enumerate(names)])
            chosen.add(POLICY.choose(request, targets, 0.0).target.name)
        assert len(chosen) == 1
        count.update(chosen)
    assert len(count) == 8
    assert max(count.values()) < 1.3 * 200


def test_a_target_that_starts_slowly_gets_less_than_its_share_and_is_not_starved() -> None:
    draws = Random(5)
    targets = Fleet([target(id, share=0.1 if id == 0 else 1.0) for id in range(4)])
    for _ in range(200):
        chosen = POLICY.choose(Request(draws.getrandbits(64), tokens=2000), targets, 0.0).target
        chosen.wait += chosen.rates.prefill(2000, 0)
        chosen.running += 1
    assert 0 < targets.targets[0].running < 20
    assert min(each.running for each in targets.targets[1:]) > 50


SHARED = b"".join(xxh3_64_digest(b"start %d" % at) for at in range(125))
"""2,000 tokens in pages of 16."""


@pytest.mark.parametrize("own", [160, 640, 2560])
@pytest.mark.parametrize(("burst", "sessions"), [(True, True), (True, False), (False, True)])
def test_four_hundred_sessions_with_one_start_spread_over_eight_targets(burst: bool, sessions: bool, own: int) -> None:
    draws, index, targets = Random(own), RadixIndex(), fleet(8)
    computed: Counter[int] = Counter()
    chosen: Counter[int] = Counter()
    for number in range(400):
        symbols = SHARED + b"".join(xxh3_64_digest(b"%d %d" % (number, at)) for at in range(own // 16))
        tokens = len(symbols) * 2
        depths = index.match(b"", symbols).depths
        holdings = {at: min(pages * 16, tokens - 1) for at, pages in depths.items()}
        key = draws.getrandbits(64)
        request = Request(key, number, tokens, holdings, key if sessions else None)
        found = POLICY.choose(request, targets, float(number)).target
        uncached = tokens - holdings.get(found.id, 0)
        index.insert(b"", symbols, found.id, float(number))
        computed[found.id] += uncached
        chosen[found.id] += 1
        found.homes += sessions
        if burst:
            found.wait += found.rates.prefill(uncached, tokens - uncached)
            found.running += 1
    assert max(chosen.values()) <= 1.3 * 400 / 8
    assert max(computed.values()) <= 1.3 * computed.total() / 8
    # And the shared start is not computed for everybody.
    assert computed.total() < 400 * own + 8 * 3 * 2000


def test_an_empty_newcomer_does_not_draw_sessions_past_a_real_queue() -> None:
    for share in (0.1, 1.0):
        targets = Fleet([target(0, share=share, wait=60.0), *[target(id, homes=1000) for id in range(1, 4)]])
        assert POLICY.choose(Request(7, tokens=2000, session=5), targets, 0.0).target.id != 0
    slow = Fleet([target(0, share=0.1), *[target(id, homes=1000) for id in range(1, 4)]])
    assert POLICY.choose(Request(7, tokens=2000, session=5), slow, 0.0).target.id != 0, "slow start holds"
    ready = Fleet([target(0), *[target(id, homes=1000) for id in range(1, 4)]])
    assert POLICY.choose(Request(7, tokens=2000, session=5), ready, 0.0).target.id == 0


def test_a_long_shared_start_does_not_herd() -> None:
    """Fifteen thousand tokens of tools and system prompt, sessions one by one with nothing in flight."""
    targets = Fleet([target(id) for id in range(8)])
    holders: set[int] = set()
    for number in range(400):
        request = Request(number * 7919, tokens=15_500, session=number + 1, holdings=dict.fromkeys(holders, 15_000))
        found = POLICY.choose(request, targets, 0.0).target
        found.homes += 1
        holders.add(found.id)
    homes = [each.homes for each in targets.targets]
    assert max(homes) * 8 / sum(homes) < 1.3, homes


def test_a_slow_engine_is_promised_as_much_work_not_as_many_sessions() -> None:
    fast = Rates()
    slow = Rates(base=4 * fast.base, token=4 * fast.token)
    targets = Fleet([target(0, rates=fast), target(1, rates=slow)])
    for number in range(400):
        POLICY.choose(Request(number * 7919, tokens=700, session=number + 1), targets, 0.0).target.homes += 1
    first, second = (each.homes for each in targets.targets)
    assert 2.5 < first / second < 6


def test_a_home_that_rests_keeps_its_sessions() -> None:
    targets = Fleet([target(1), target(2)])
    request = Request(3, tokens=2000, session=5, home=0, away=True)
    for policy in (POLICY, load("session")):
        choice = policy.choose(request, targets, 0.0)
        assert (choice.reason, choice.moves_home) == ("spill", False)


def test_thrift_waits_longer_for_what_is_cached() -> None:
    targets = Fleet([target(0, wait=1.0), target(1)])
    held = Request(tokens=10_000, holdings={0: 8_000})
    assert POLICY.choose(held, targets, 0.0).target.id == 1
    assert load("cache_aware", {"thrift": 1.0}).choose(held, targets, 0.0).target.id == 0


@given(asked(slow=False, equal_rates=True))
def test_thrift_is_priced_at_once_as_one_by_one(case: tuple[Fleet, Request]) -> None:
    targets, request = case
    choice = load("cache_aware", {"thrift": 2.0, "margin": 0.0}).choose(request, targets, 5.0)
    places = request.session is not None and not request.siblings
    least = min(homed(request, each) for each in targets.targets) if places else None
    totals = [terms(request, each, least, 5.0, 2.0).total for each in targets.targets]
    assert choice.terms is not None
    assert choice.terms.total == pytest.approx(min(totals), rel=1e-9, abs=1e-9)
