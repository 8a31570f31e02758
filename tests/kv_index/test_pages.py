"""Prompt -> symbols."""

from hypothesis import given, strategies as st

from kv_index.pages import EMPTY, SYMBOL, TEXT_PAGE, TOKEN_PAGE, paginate

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
