"""Sessions in a disaggregated fleet: who keeps them, who lends to whom, where new ones go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, strategies as st

from policies.base import Choice, Fleet, Rates, Request, Role, Target, load
from policies.charged import Charged
from policies.cost import turn
from tests.policies.fleets import KIND, bits, decoder, preferred, prefiller, split, target

POLICY = load("disaggregated")


def choose(request: Request, targets: Fleet, now: float = 0.0) -> Choice:
    return POLICY.choose(request, targets, now)


def ids(choice: Choice) -> tuple[int, int | None]:
    """Who generates, who computes the prompt."""
    return choice.target.id, None if choice.prefill is None else choice.prefill.id


def pairs(decode: int, prefill: int) -> Fleet:
    """Equal engines of one pool; who generates cannot serve whole."""
    return split([decoder(at, whole=False) for at in range(decode)], [prefiller(100 + at) for at in range(prefill)])


# -- home and partner ---------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 0.3), st.floats(0, 1) | st.none())
def test_a_session_leaves_its_home_only_for_more_than_the_margin(
    here: float, busy: float, margin: float | None
) -> None:
    targets = pairs(2, 1)
    home, other = targets.targets
    home.wait, home.busy, home.homes = here, 100 * busy, 3
    request = Request(7, tokens=2_000, session=5, home=0, partner=100, holdings={0: 1_900, 100: 1_900})
    first = KIND.prefill(100, 1_900)
    dearer = max(0.0, here - first) + home.busy * 128 * KIND.decode - (2_000 - 100) * KIND.transfer
    wide = turn(KIND) if margin is None else margin
    assume(abs(dearer - wide) > 1e-6)
    choice = load("disaggregated", {"margin": margin}).choose(request, targets, 0.0)
    assert choice.target is (other if dearer > wide else home)
    assert choice.reason == ("moved" if dearer > wide else "home")
    assert choice.moves_home


@given(st.floats(0, 1), st.floats(0, 1) | st.none(), st.integers(0, 1_900))
def test_a_session_leaves_its_partner_only_for_more_than_the_margin(
    wait: float, margin: float | None, held: int
) -> None:
    targets = pairs(1, 2)
    assert targets.prefill is not None
    targets.prefill.targets[0].wait = wait
    request = Request(7, tokens=2_000, session=5, home=0, partner=100, holdings={0: 1_900, 100: held})
    dearer = wait + KIND.prefill(2_000 - held, held) - KIND.prefill(2_000, 0)
    wide = turn(KIND) if margin is None else margin
    assume(abs(dearer - wide) > 1e-6)
    choice = load("disaggregated", {"margin": margin}).choose(request, targets, 0.0)
    assert ids(choice) == (0, 101 if dearer > wide else 100)
    assert (choice.reason, choice.moves_home) == ("home", True)


def test_a_session_keeps_its_partner_among_equals_and_beside_those_with_fewer_homes() -> None:
    for key in range(40):
        targets = pairs(3, 3)
        assert targets.prefill is not None
        for partner, each in enumerate(targets.prefill.targets):
            each.homes = 5
            targets.targets[partner].homes = 5
            request = Request(key, tokens=2_000, session=key, home=partner, partner=each.id)
            assert ids(choose(request, targets)) == (partner, each.id)
            each.homes = targets.targets[partner].homes = 0


def test_beside_others_of_its_session_a_request_only_spills() -> None:
    request = Request(7, tokens=2_000, session=5, home=0, partner=100, siblings=1)
    request.holdings = {0: 1_900, 1: 1_900, 100: 1_900, 101: 1_900}
    targets = pairs(2, 2)
    assert targets.prefill is not None
    targets.targets[0].wait = targets.prefill.targets[0].wait = 0.9 * turn(KIND)
    spilled = choose(request, targets)
    assert (ids(spilled), spilled.reason, spilled.moves_home) == ((1, 101), "spill", False)
    request.siblings = 0
    kept = choose(request, targets)
    assert (ids(kept), kept.reason, kept.moves_home) == ((0, 100), "home", True)


def test_a_long_queue_at_home_moves_the_session_within_its_pool_or_to_a_unified_engine() -> None:
    request = Request(7, tokens=2_000, session=5, home=0, partner=100, holdings={0: 1_900, 100: 1_900})
    for other in (decoder(1, whole=False), decoder(1), target(1)):
        choice = choose(request, split([decoder(0, wait=30.0), other], [prefiller(100)]))
        assert (choice.target, choice.reason, choice.moves_home) == (other, "moved", True)
        assert (choice.prefill is not None) is (other.role is Role.DECODE)
        assert choice.runner_up is not None
        assert choice.runner_up.id == 0


def test_prefill_goes_on_at_home_behind_what_the_session_left_there() -> None:
    """Append on decode: a short turn after a long answer, that only the decode engine holds."""
    request = Request(7, tokens=9_000, session=5, home=0, partner=100, holdings={0: 8_900, 100: 2_000})
    for busy in (0.0, 4.0, 16.0):
        targets = split([decoder(0, busy=busy), decoder(1)], [prefiller(100)])
        assert ids(choose(request, targets)) == (0, None)
    # A long new text is the prefill engine's where others generate.
    request.tokens = 30_000
    assert ids(choose(request, split([decoder(0, busy=16.0), decoder(1, busy=16.0)], [prefiller(100)]))) == (0, 100)


@pytest.mark.parametrize("away", [True, False])
def test_without_its_home_a_session_is_placed_anew_and_one_that_rests_keeps_it(away: bool) -> None:
    request = Request(7, tokens=2_000, session=5, home=999, partner=101, away=away)
    choice = choose(request, pairs(2, 2))
    assert (choice.reason, choice.moves_home) == (("spill", False) if away else ("home_gone", True))
    assert ids(choice)[1] == 101, "its partner is still there"


# -- pools --------------------------------------------------------------------------------------------------------------


def test_a_pair_is_never_of_two_pools_however_dear_the_own_one_is() -> None:
    far = prefiller(101, pool="b")
    targets = split([decoder(0, whole=False)], [prefiller(100, wait=50.0), far])
    assert ids(choose(Request(7, tokens=2_000, holdings={101: 1_999}), targets)) == (0, 100)
    both = split([decoder(0, whole=False), decoder(1, pool="b", whole=False)], [prefiller(100, wait=50.0), far])
    assert ids(choose(Request(7, tokens=2_000), both)) == (1, 101)
    held = Request(7, tokens=2_000, session=5, home=0, partner=101, holdings={0: 1_990, 101: 1_990})
    assert choose(held, both).prefill is far


def test_what_cannot_serve_whole_gets_nothing_without_a_prefill_engine_and_a_unified_engine_gets_no_pair() -> None:
    request = Request(7, tokens=2_000, session=5, home=0, holdings={0: 1_999})
    targets = split([decoder(0, whole=False), target(50, wait=500.0, pool="a")], [prefiller(100, wait=400.0)])
    assert ids(choose(request, targets)) == (0, 100)
    assert {(row.target.id, row.prefill and row.prefill.id) for row in POLICY.explain(request, targets, 0.0)} == {
        (0, 100),
        (50, None),
    }
    other = split([decoder(0, whole=False), target(50, wait=500.0)], [prefiller(100, pool="b")])
    assert ids(choose(request, other)) == (50, None)


# -- lending ------------------------------------------------------------------------------------------------------------


def lending(lent: int, held: int, rates: Rates = KIND) -> tuple[Request, Fleet]:
    """A busy home that holds all; its prefill engine holds ``held``."""
    request = Request(7, tokens=30_000, session=5, home=0, partner=100, holdings={0: 20_000, 100: held}, lent=lent)
    return request, split([decoder(0, busy=30.0)], [prefiller(100, rates=rates)])


def test_what_home_lends_is_brought_instead_of_computed() -> None:
    request, targets = lending(20_000, 1_000)
    choice = choose(request, targets)
    assert ids(choice) == (0, 100)
    assert choice.source is targets.targets[0]
    assert choice.terms is not None
    assert choice.terms.prefill == pytest.approx(KIND.prefill(10_000, 20_000))
    moved = 2 * KIND.handshake + (19_000 + 10_000) * KIND.transfer
    assert choice.terms.transfer == pytest.approx(moved)
    plain = choose(replace(request, lent=0), targets)
    assert (ids(plain), plain.source) == ((0, 100), None)
    assert plain.terms is not None
    assert plain.terms.total > choice.terms.total


@pytest.mark.parametrize("dear", [Rates(transfer=1.0), Rates(handshake=60.0, transfer=0.0)])
@pytest.mark.parametrize("whole", [True, False])
def test_lending_is_not_taken_where_computing_is_cheaper(dear: Rates, whole: bool) -> None:
    request, targets = lending(20_000, 1_000, dear)
    targets.targets[0].whole = whole
    choice = choose(request, targets)
    assert (choice.target.id, choice.source) == (0, None)
    if not whole:
        assert choice.terms is not None
        assert choice.terms.prefill == pytest.approx(KIND.prefill(29_000, 1_000)), "a pair that computes what it lacks"


@pytest.mark.parametrize(("gained", "taken"), [(-500, False), (0, False), (63, False), (64, True), (2_000, True)])
def test_fewer_than_64_tokens_are_never_lent(gained: int, taken: bool) -> None:
    free = Rates(token=1e-2, handshake=0.0, transfer=0.0)
    request, targets = lending(10_000 + gained, 10_000, free)
    targets.targets[0].whole = False
    choice = choose(request, targets)
    assert ids(choice) == (0, 100)
    assert (choice.source is not None) is taken


def test_home_lends_to_a_pair_with_another_decode_engine_too() -> None:
    request, _ = lending(20_000, 1_000)
    home = decoder(0, wait=100.0, whole=False)
    choice = choose(request, split([home, decoder(1, whole=False)], [prefiller(100)]))
    assert (ids(choice), choice.source, choice.reason) == ((1, 100), home, "moved")


# -- whatever is missing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (1, 3), (3, 1), (5, 4)])
@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(draw=2**64 - 1, ordinal=2**40),
        Request(tokens=0),
        Request(tokens=5_000),
        Request(tokens=0, holdings={0: 900, 100: 900}),
        Request(session=7),
        Request(session=7, home=0, partner=100, holdings={0: 800, 100: 700}),
        Request(session=7, home=0, tokens=5_000, holdings={0: 4_000}),
        Request(session=7, home=999, partner=998, tokens=5_000, holdings={999: 4_000}),
        Request(session=7, home=999, away=True, tokens=5_000),
        Request(session=7, home=0, partner=100, siblings=3, tokens=5_000, crowd=2.0),
        Request(session=7, home=0, partner=998, lent=4_000, tokens=5_000, holdings={0: 4_999}),
        Request(session=7, home=0, lent=4_000, holdings={0: 4_999}),
    ],
)
def test_whatever_is_missing_a_choice_is_made(request_: Request, decode: int, prefill: int, whole: bool) -> None:
    targets = pairs(decode, prefill)
    assert targets.prefill is not None
    for each in targets.targets:
        each.whole = whole
    choice = choose(request_, targets)
    assert choice.target in targets.targets
    assert choice.prefill in targets.prefill.targets or (whole and choice.prefill is None)
    assert choice.reason in ("home", "home_gone", "load", "moved", "prefix", "spill")
    rows = POLICY.explain(request_, targets, 0.0)
    assert len(rows) == decode * (2 if whole else 1)


def test_a_reason_tells_of_prefixes_on_either_side() -> None:
    targets = pairs(1, 1)
    for holdings, reason in (({}, "load"), ({0: 500}, "prefix"), ({100: 500}, "prefix"), ({77: 500}, "load")):
        assert choose(Request(7, tokens=2_000, holdings=holdings), targets).reason == reason


# -- ties and herds -----------------------------------------------------------------------------------------------------


@given(bits, bits, st.booleans(), st.randoms(use_true_random=False))
def test_equals_are_chosen_by_rendezvous_of_the_session(key: int, draw: int, bound: bool, draws: Random) -> None:
    targets = pairs(5, 4)
    assert targets.prefill is not None
    request = Request(draw, tokens=2_000, session=key if bound else None, holdings={0: 0})
    by = key if bound else draw
    expected = preferred(by, targets).id, preferred(by, targets.prefill).id
    assert ids(choose(request, targets)) == expected
    decode, prefill = list(targets.targets), list(targets.prefill.targets)
    draws.shuffle(decode)
    draws.shuffle(prefill)
    assert ids(choose(request, split(decode, prefill))) == expected


def charged(id: int, role: Role, whole: bool) -> Charged:
    made = Charged(id, f"{role}-{id}:8000", KIND)
    made.role, made.whole, made.pool = role, whole, "a"
    return made


@pytest.mark.parametrize("held", [0, 2_000, 15_000])
@pytest.mark.parametrize("burst", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_a_start_that_all_hold_does_not_herd(whole: bool, burst: bool, held: int) -> None:
    """Sessions one by one, each committed as the gateway does; in a burst nothing has begun to answer yet."""
    decode = [charged(at, Role.DECODE, whole) for at in range(8)]
    prefill = [charged(100 + at, Role.PREFILL, False) for at in range(4)]
    side: list[Target] = [*prefill]
    targets = split([*decode], side)
    draws, by_decode, by_prefill = Random(held), Counter[int](), Counter[int]()
    for number in range(400):
        now = 0.0 if burst else 10.0 * number
        holdings = dict.fromkeys([each.id for each in (*decode, *prefill)], held)
        key = draws.getrandbits(64)
        request = Request(draws.getrandbits(64), number, held + 600, holdings, key)
        choice = choose(request, targets, now)
        one, first = choice.target, choice.prefill
        assert isinstance(one, Charged)
        assert choice.terms is not None
        works = one if first is None else first
        assert isinstance(works, Charged)
        works.charge(number, choice.terms.prefill, now)
        if not burst:
            works.discharge(number, now + 5.0)
        one.homes += 1
        one.running += burst
        by_decode[one.id] += 1
        if first is not None:
            first.homes += 1
            by_prefill[first.id] += 1
    assert max(by_decode.values()) <= 1.3 * 400 / 8, by_decode
    if by_prefill or not whole:
        assert max(by_prefill.values()) <= 1.3 * by_prefill.total() / 4, by_prefill
    if whole and burst:
        assert by_prefill.total() > 50, "a burst that decode engines alone would queue up goes to both sides"


def test_many_sessions_with_a_start_that_few_hold_spread_as_well() -> None:
    """The holders are who served it already, as in a fleet that starts cold."""
    targets, holders, draws = pairs(8, 4), set[int](), Random(3)
    homes = Counter[int]()
    for number in range(400):
        key = draws.getrandbits(64)
        request = Request(key, number, 15_500, dict.fromkeys(holders, 15_000), key)
        choice = choose(request, targets)
        assert choice.prefill is not None
        for each in (choice.target, choice.prefill):
            each.homes += 1
            homes[each.id] += 1
            holders.add(each.id)
    decode, prefill = [homes[at] for at in range(8)], [homes[100 + at] for at in range(4)]
    assert max(decode) <= 1.3 * 400 / 8, decode
    assert max(prefill) <= 1.3 * 400 / 4, prefill
