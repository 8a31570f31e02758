"""KV that decode engines offer: kept within a bound, for a time, given for the very tokens, and once."""

from __future__ import annotations

from struct import pack

from hypothesis import given, strategies as st

from gateway.offers import LARGEST, Offers

SESSION = b"session"


def ids(*tokens: int) -> bytes:
    return pack(f"<{len(tokens)}I", *tokens)


def offers(tokens: int = 3, until: float = 10.0, most: int = 1000) -> Offers:
    made = Offers(most)
    made.put(SESSION, 7, 2, b"params", ids(1, 2, 3, 4), tokens, until)
    return made


def test_it_is_for_a_prompt_that_goes_on_from_those_tokens() -> None:
    made = offers()
    found = made.fits(SESSION, ids(1, 2, 3, 9, 9), 0.0)
    assert found is not None
    assert (found.target, found.epoch, found.params, found.tokens) == (7, 2, b"params", 3)
    for other in (ids(1, 2, 3), ids(1, 2), b"", ids(1, 9, 3, 4), ids(9, 2, 3, 4), ids(1, 2, 9, 4)):
        assert made.fits(SESSION, other, 0.0) is None
    assert made.fits(b"other", ids(1, 2, 3, 4), 0.0) is None


def test_it_is_over_at_its_time() -> None:
    made = offers()
    assert made.fits(SESSION, ids(1, 2, 3, 4), 9.999) is not None
    assert made.fits(SESSION, ids(1, 2, 3, 4), 10.0) is None
    made.sweep(9.0)
    assert len(made) == 1
    made.sweep(10.0)
    assert (len(made), made.size) == (0, 0)


def test_who_takes_it_drops_it() -> None:
    made = offers()
    made.drop(SESSION)
    made.drop(SESSION)
    assert made.fits(SESSION, ids(1, 2, 3, 4), 0.0) is None
    assert (len(made), made.size) == (0, 0)


def test_what_makes_no_sense_is_not_kept_and_voids_what_was() -> None:
    for tokens, params in ((0, b"p"), (-1, b"p"), (5, b"p"), (3, b"x" * (LARGEST + 1))):
        made = offers(most=10**9)
        made.put(SESSION, 7, 2, params, ids(1, 2, 3, 4), tokens, 10.0)
        assert (len(made), made.size) == (0, 0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.sampled_from(["put", "drop", "sweep"])), max_size=60)
)
def test_the_bound_holds(steps: list[tuple[int, int, str]]) -> None:
    made, now = Offers(100), 0.0
    for number, size, what in steps:
        now += 1.0
        key = b"%d" % number
        if what == "put":
            made.put(key, 1, 0, b"x" * size, ids(1, 2), 1, now + 20)
        elif what == "drop":
            made.drop(key)
        else:
            made.sweep(now)
        kept = list(made._offers.values())
        assert made.size == sum(len(each.params) for each in kept) <= 100
        if what == "sweep":
            assert all(each.until > now for each in kept)
