"""Prompt -> symbols."""

import pytest
from hypothesis import given, strategies as st

from kv_index.pages import (
    EMPTY,
    LONGEST_CUT,
    PREFIX_BITS,
    SYMBOL,
    TEXT_PAGE,
    TOKEN_PAGE,
    chain,
    names,
    paginate,
    prefixes,
    root,
)

TEXT = st.binary(max_size=4000)


@given(TEXT, TEXT)
def test_incremental_equals_from_scratch(old, new):
    before = paginate(old)
    for prompt in (old + new, new, old[: len(old) // 2] + new):
        assert paginate(prompt, before) == paginate(prompt)


@given(TEXT, TEXT)
def test_a_shared_start_shares_symbols_page_by_page(start, rest):
    one, other = paginate(start), paginate(start + rest)
    shared = len(start) // TEXT_PAGE * SYMBOL
    assert one.symbols[:shared] == other.symbols[:shared]


def test_the_partial_page_has_no_symbol():
    assert paginate(b"x" * (TEXT_PAGE - 1)).full == 0
    assert paginate(b"x" * TEXT_PAGE).full == 1
    assert paginate(b"") == EMPTY


def test_a_changed_byte_changes_its_page_only():
    one = paginate(b"x" * 1024).symbols
    other = paginate(b"x" * 300 + b"y" + b"x" * 723).symbols
    differs = [one[at : at + 8] != other[at : at + 8] for at in range(0, 32, 8)]
    assert differs == [False, True, False, False]


def test_a_previous_prompt_of_other_page_size_is_not_trusted():
    prompt = bytes(range(256)) * 8
    assert paginate(prompt, paginate(prompt[:TOKEN_PAGE], page=TOKEN_PAGE)) == paginate(prompt)


IDS = st.lists(st.integers(0, (1 << 32) - 1), max_size=120).map(
    lambda ids: b"".join([each.to_bytes(4, "little") for each in ids])
)
STARTS = st.integers(0, PREFIX_BITS)


@given(IDS, IDS, STARTS, STARTS)
def test_incremental_chaining_equals_from_scratch(old, new, start, another):
    before = chain(old, start)
    for ids in (old + new, new, old[: len(old) // 2] + new, old):
        for begin in (start, another, 0):
            assert chain(ids, begin, before) == chain(ids, begin)


@given(IDS, IDS, STARTS)
def test_a_chained_symbol_is_the_name_of_all_that_stands_before(head, tail, start):
    """So a run behind a prefix is named alike, whether the prefix is at hand or only its name."""
    head = head[: len(head) // TOKEN_PAGE * TOKEN_PAGE]
    whole = names(chain(head + tail, start).symbols)
    before = names(chain(head, start).symbols)
    assert whole[: len(before)] == before
    rest = tail[: len(tail) // TOKEN_PAGE * TOKEN_PAGE]
    assert list(whole[len(before) :]) == prefixes(rest, before[-1] if before else start)
    assert all(0 <= name <= PREFIX_BITS for name in whole)


def test_a_changed_token_changes_its_page_and_all_behind():
    one = names(chain(bytes(4 * TOKEN_PAGE)).symbols)
    other = names(chain(bytes(TOKEN_PAGE + 5) + b"x" + bytes(3 * TOKEN_PAGE - 6)).symbols)
    assert one[0] == other[0]
    assert not set(one[1:]) & set(other[1:])
    assert len(set(one)) == 4, "the same page at another place is another prefix"


def test_chains_of_different_starts_share_nothing():
    ids = bytes(range(256)) * 4
    one, other = chain(ids), chain(ids, root(b"tenant"))
    assert not set(names(one.symbols)) & set(names(other.symbols))
    assert one.digest != other.digest
    assert chain(ids, root(b"tenant"), one) == other


def test_the_partial_page_of_a_chain_has_no_symbol():
    assert chain(bytes(TOKEN_PAGE - 1)).full == 0
    assert chain(b"")[:2] == EMPTY[:2]
    assert chain(b"").digest != EMPTY.digest, "what is chained is told from what is not"
    assert chain(bytes(TOKEN_PAGE)).covered == TOKEN_PAGE
    assert chain(bytes(2 * TOKEN_PAGE - 4)).full == 1
    assert prefixes(b"", 7) == []
    assert tuple(names(b"")) == ()


@pytest.mark.parametrize("pages", [LONGEST_CUT - 1, LONGEST_CUT, LONGEST_CUT + 1, 2 * LONGEST_CUT + 3])
def test_long_chains_are_cut_without_a_seam(pages):
    ids = b"".join([number.to_bytes(4, "little") for number in range(16 * pages)])
    one = chain(ids)
    assert one.full == pages
    step, start = [], 0
    for at in range(0, len(ids), TOKEN_PAGE):
        [start] = prefixes(ids[at : at + TOKEN_PAGE], start)
        step.append(start)
    assert list(names(one.symbols)) == step
    assert chain(ids, 0, chain(ids[: 100 * TOKEN_PAGE + 12])) == one


def test_an_unchanged_chain_is_handed_back_as_it_is():
    before = chain(bytes(200), 5)
    assert chain(bytes(200), 5, before) is before
    assert chain(bytes(240), 5, before) is before


def test_names_are_the_symbols_as_integers():
    symbols = chain(bytes(range(256)), 3).symbols
    assert [name.to_bytes(SYMBOL, "little") for name in names(symbols)] == [
        symbols[at : at + SYMBOL] for at in range(0, len(symbols), SYMBOL)
    ]


def test_no_namespace_at_all_has_no_root():
    assert root() == root(b"") == root(b"", b"") == 0


@given(st.lists(st.binary(min_size=1, max_size=8), min_size=1, max_size=3))
def test_a_namespace_has_a_root_of_its_own(parts):
    begin = root(*parts)
    assert 0 < begin <= PREFIX_BITS
    assert begin == root(*parts)
    others = [(*parts, b"x"), (b"", *parts), (*parts, b""), (b"x" + parts[0], *parts[1:])]
    assert len({begin, *[root(*each) for each in others]}) == 5


# -- more of what must not happen -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [64, 256, 512])
def test_a_previous_prompt_of_another_kind_is_not_trusted(length):
    """One prompt may be routed by its text and then by its token ids."""
    ids = bytes(range(256)) * 4
    by_bytes = paginate(ids[:length], page=TOKEN_PAGE)
    assert chain(ids, 0, by_bytes) == chain(ids)
    assert paginate(ids, by_bytes) == paginate(ids)
    assert paginate(ids, chain(ids[:length])) == paginate(ids)


def test_parts_of_a_namespace_are_told_apart_whatever_they_contain():
    assert root(b"model\0", b"salt") != root(b"model", b"\0salt")
    assert root(b"model\0salt") != root(b"model", b"salt")
    assert root(b"\0") != 0, "a part of zeros is a part"
