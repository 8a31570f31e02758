"""What other gateways sent, against a small model of it."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from kv_index.heard import IDS_STEP, TEXT_STEP, Heard, mark, marks, seed_of
from kv_index.pages import SYMBOL, chain, paginate


def text(*parts: str) -> bytes:
    return paginate("".join(parts).encode()).symbols


SEED = seed_of(b"model")
LONG = "a start that many share, and that is long " * 800
PAGES = len(text(LONG)) // SYMBOL


def hear(heard: Heard, target: int, symbols: bytes, above: int = 0, seed: int = SEED) -> None:
    heard.hear(target, marks(symbols, above, seed, False), len(symbols) // SYMBOL - above)


def test_a_prompt_that_goes_on_from_one_that_was_heard_is_found_to_its_end() -> None:
    heard = Heard(lambda target: None)
    before = text(LONG, "one")
    hear(heard, 7, before)
    found = heard.match(text(LONG, "one", "and on " * 300), SEED, False, 0, None)
    pages = len(before) // SYMBOL
    assert found == {7: pages // TEXT_STEP * TEXT_STEP}
    assert heard.match(text("something else " * 900), SEED, False, 0, None) == {}
    assert heard.match(before, seed_of(b"another model"), False, 0, None) == {}


def test_each_turn_of_a_session_is_found_although_only_what_is_new_was_said() -> None:
    heard = Heard(lambda target: None)
    said = ""
    known = 0
    for turn in range(40):
        said += f"turn {turn} " * 160
        symbols = text(said)
        found = heard.match(symbols, SEED, False, 0, None)
        if turn:
            assert known - found.get(3, 0) < TEXT_STEP
        told = marks(symbols, known, SEED, False)
        assert len(told) <= 4
        known = len(symbols) // SYMBOL
        heard.hear(3, told, 1)


def test_by_token_ids_too() -> None:
    heard = Heard(lambda target: None)
    ids = b"".join(number.to_bytes(4, "little") for number in range(3000))
    symbols = chain(ids, 5).symbols
    heard.hear(1, marks(symbols, 0, SEED, True), 100)
    more = chain(ids + ids, 5).symbols
    assert heard.match(more, SEED, True, 0, None) == {1: len(symbols) // SYMBOL // IDS_STEP * IDS_STEP}


def test_what_others_sent_since_then_pushes_it_out() -> None:
    heard = Heard(lambda target: 1000)
    hear(heard, 1, text(LONG))
    assert heard.match(text(LONG), SEED, False, 0, None)
    heard.hear(1, (), 1000 - PAGES)
    assert heard.match(text(LONG), SEED, False, 0, None)
    heard.sends(1, PAGES + 1, 0)
    assert not heard.match(text(LONG), SEED, False, 0, None)


def test_one_that_holds_nothing_any_more_is_not_found_and_is_again_when_it_is_said() -> None:
    heard = Heard(lambda target: None)
    hear(heard, 1, text(LONG))
    hear(heard, 2, text(LONG))
    assert set(heard.match(text(LONG), SEED, False, 0, None)) == {1, 2}
    heard.empty(1)
    assert set(heard.match(text(LONG), SEED, False, 0, None)) == {2}
    heard.remove(2)
    assert heard.match(text(LONG), SEED, False, 0, None) == {}
    hear(heard, 1, text(LONG))
    assert set(heard.match(text(LONG), SEED, False, 0, None)) == {1}


def test_what_is_ours_of_a_cache_follows_what_was_sent_there() -> None:
    heard = Heard(lambda target: 10_000)
    assert heard.ours(1) == 1.0
    heard.sends(1, 300, 0)
    assert heard.ours(1) == 1.0
    heard.hear(1, (), 100)
    assert heard.ours(1) == 0.75
    # What of theirs is sent from here too is ours from then on.
    heard.sends(1, 100, 100)
    assert heard.ours(1) == 1.0


def test_it_has_a_bound() -> None:
    heard = Heard(lambda target: None, most=100)
    for number in range(2000):
        hear(heard, 1, text(f"{number} " * 2000))
        assert len(heard) <= 2 * 100 + 32
    said = [number for number in range(2000) if heard.match(text(f"{number} " * 2000), SEED, False, 0, None)]
    assert said
    assert said == list(range(said[0], 2000)), "those that were said last stay"


def test_a_newcomer_is_told_what_was_said_last_by_anybody() -> None:
    heard, newcomer = Heard(lambda target: None), Heard(lambda target: None)
    hear(heard, 0, text(LONG))
    own = text("ours " * 3000)
    heard.says(4, marks(own, 0, SEED, False))
    for said, holding in heard.recent(1000):
        for target in holding:
            newcomer.hear(target, [said], 0)
    assert set(newcomer.match(text(LONG), SEED, False, 0, None)) == {0}
    assert set(newcomer.match(own, SEED, False, 0, None)) == {4}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 6)),
        max_size=25,
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_it_never_tells_more_than_was_sent(sent: list[tuple[int, list[int], int]], asked: list[int]) -> None:
    """Prompts are of blocks that are alike or differ from their first page on."""
    blocks = ["abc"[number] * 256 * 9 for number in range(3)]
    heard = Heard(lambda target: None)
    true: dict[int, int] = {}
    prompt = text(*[blocks[number] for number in asked])
    for target, parts, above in sent:
        symbols = text(*[blocks[number] for number in parts])
        heard.hear(target, marks(symbols, above, SEED, False), 1)
        shared = 0
        while shared < min(len(symbols), len(prompt)) and symbols[: shared + SYMBOL] == prompt[: shared + SYMBOL]:
            shared += SYMBOL
        true[target] = max(true.get(target, 0), shared // SYMBOL)
    for target, pages in heard.match(prompt, SEED, False, 0, None).items():
        assert pages <= true[target]


def test_marks_of_lengths_are_what_they_are_said_to_be() -> None:
    symbols = text(LONG)
    told = marks(symbols, 0, SEED, False)
    assert told[0] == mark(symbols, TEXT_STEP, SEED, False)
    assert told[-1] == mark(symbols, PAGES // TEXT_STEP * TEXT_STEP, SEED, False)
    assert marks(symbols, PAGES, SEED, False) == []
    assert len(told) <= 12
