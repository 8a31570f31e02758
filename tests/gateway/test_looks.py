"""Numbers and names as people read them in a terminal."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from rich.cells import cell_len

from gateway.console.looks import NOTHING, amount, count, duration, percent, pick, plain, size


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (9_994, "9.99k"),
        (12_345, "12.3k"),
        (131_072, "131k"),
        (999_500, "1M"),
        (2e6, "2M"),
    ],
)
def test_amounts_have_three_digits(value: float, shown: str) -> None:
    assert amount(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (75 << 20, "75 MiB")])
def test_sizes_are_those_of_memory(value: float, shown: str) -> None:
    assert size(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 ms"),
        (0.0004, "0.4 ms"),
        (0.012, "12 ms"),
        (3.24, "3.2 s"),
        (59, "59 s"),
        (180, "3 min"),
        (9000, "2.5 h"),
        (3e5, "3.5 d"),
    ],
)
def test_durations_are_in_their_own_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_what_is_not_known_is_no_number() -> None:
    assert {show(None) for show in (amount, count, duration, percent, size)} == {NOTHING}


@given(st.text(max_size=300))
def test_whatever_a_name_is_it_stays_on_its_line(name: str) -> None:
    assert plain(name).isprintable()


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=80).map(plain), st.integers(3, 60))
def test_a_name_is_cut_in_its_middle(name: str, width: int) -> None:
    short = pick(name, width)
    assert cell_len(short) <= width
    if cell_len(name) <= width:
        assert short == name
    else:
        head, tail = short.split("…", 1) if "…" not in name else ("", "")
        assert name.startswith(head) and name.endswith(tail)
