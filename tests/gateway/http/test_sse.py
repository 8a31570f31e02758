"""Where events end, and what the first one is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from gateway.http.sse import boundary, first_event, payload, spans

lines = st.sampled_from([b"data: x", b"data:", b"event: e", b": comment", b"id: 7", b"data: \xe4\xb8\xad", b"odd"])
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], bytes]:
    """Whole events in one style of line ends, and an unfinished one after them."""
    end = draw(ends)
    blocks = draw(st.lists(st.lists(lines, min_size=1, max_size=4), max_size=5))
    whole = [b"".join(line + end for line in block) + end for block in blocks]
    return whole, draw(st.sampled_from([b"", b"data: unfin", b"d", b"data: x" + end]))


@given(streams())
@settings(max_examples=300, deadline=None)
def test_the_boundary_is_behind_the_last_whole_event(stream: tuple[list[bytes], bytes]) -> None:
    whole, rest = stream
    data = b"".join(whole)
    assert boundary(data + rest) == len(data)


@given(streams())
@settings(max_examples=300, deadline=None)
def test_the_first_event_is_the_first_that_says_something(stream: tuple[list[bytes], bytes]) -> None:
    whole, rest = stream
    telling = [
        event.rstrip(b"\r\n") for event in whole if any(not line.startswith(b":") for line in event.split() if line)
    ]
    telling = [e for e in telling if any(line and line[:1] != b":" for line in e.splitlines())]
    found = first_event(b"".join(whole) + rest)
    assert (found is None) == (not telling)
    if found is not None:
        assert found.rstrip(b"\r\n") == telling[0]


@given(streams(), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_cutting_at_boundaries_loses_and_reorders_nothing(stream: tuple[list[bytes], bytes], step: int) -> None:
    data = b"".join(stream[0]) + stream[1]
    held, passed = b"", []
    for at in range(0, len(data), step):
        held += data[at : at + step]
        cut = boundary(held)
        passed.append(held[:cut])
        held = held[cut:]
    assert b"".join(passed) + held == data
    for piece in passed:
        assert not piece or boundary(piece) == len(piece)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: a", (b"", b"a")),
        (b"data:a", (b"", b"a")),
        (b"data:  a", (b"", b" a")),
        (b"data: a\ndata: b", (b"", b"a\nb")),
        (b"event: error\ndata: {}", (b"error", b"{}")),
        (b"event: error\r\ndata: {}", (b"error", b"{}")),
        (b": only\n: comments", (b"", b"")),
        (b"data", (b"", b"")),
        (b"data: a:b", (b"", b"a:b")),
        (b"\xff\xfe", (b"", b"")),
    ],
)
def test_payload(event: bytes, expected: tuple[bytes, bytes]) -> None:
    assert payload(event) == expected


@given(st.text("\r\na:", max_size=40).map(str.encode))
@settings(max_examples=500, deadline=None)
def test_an_event_ends_at_the_first_blank_line_of_any_kind(data: bytes) -> None:
    found, at = [], 0
    while ends := [
        (data.find(end, at), len(end)) for end in (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n") if end in data[at:]
    ]:
        place, length = min(ends)
        found.append((at, place, place + length))
        at = place + length
    assert list(spans(data)) == found


@pytest.mark.parametrize("event", [b"\n\n", b":\n\n", b"\r\r", b"data: x\n\n"])
def test_a_flood_of_small_events_costs_little(event: bytes) -> None:
    """Were the rest read once for each of them, this would take minutes."""
    assert sum(1 for _ in spans(event * 500_000)) == 500_000
