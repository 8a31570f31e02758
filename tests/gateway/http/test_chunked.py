"""The decoder of chunked bodies: any split equals the whole, and only the grammar's plain case is taken."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from gateway.errors import BadRequest, Fault, HeadTooLarge, TooLarge
from gateway.http.chunked import DONE, Chunked

LIMIT = 1 << 20


def encode(pieces: list[bytes], extension: bytes = b"", trailers: bytes = b"", upper: bool = False) -> bytes:
    """An encoder of our own, of RFC 9112 section 7.1."""
    size = "%X" if upper else "%x"
    body = b"".join((size % len(p)).encode() + extension + b"\r\n" + p + b"\r\n" for p in pieces if p)
    return body + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def decode(data: bytes, cuts: list[int]) -> tuple[bytes, bytes]:
    decoder = Chunked(LIMIT)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    rest = b""
    for start, end in pairwise(places):
        if decoder.phase == DONE:
            rest += data[start:end]
        elif decoder.feed(data[start:end]):
            rest = decoder.rest
    assert decoder.phase == DONE
    return decoder.body, rest


def feed(decoder: Chunked, pieces: list[bytes]) -> None:
    """Feed a body that must not end."""
    for piece in pieces:
        assert not decoder.feed(piece)


pieces = st.lists(st.binary(max_size=300), max_size=8)
extensions = st.sampled_from([b"", b";a", b";a=b", b' ; a="q;q"', b";x=1;y=2"])
trailers = st.sampled_from([b"", b"X-Sum: 1\r\n", b"A:\r\nB: c, d\r\n"])


@given(pieces, extensions, trailers, st.booleans(), st.binary(max_size=40), st.lists(st.integers(0, 3000), max_size=12))
@settings(max_examples=300, deadline=None)
def test_round_trip_however_it_is_split(
    pieces: list[bytes], extension: bytes, trailer: bytes, upper: bool, after: bytes, cuts: list[int]
) -> None:
    whole = encode(pieces, extension, trailer, upper)
    assert decode(whole + after, cuts) == (b"".join(pieces), after)


@given(st.binary(max_size=60), st.integers(1, 7))
@settings(max_examples=500, deadline=None)
def test_any_bytes_give_the_same_verdict_however_they_are_split(data: bytes, step: int) -> None:
    def verdict(pieces: list[bytes]) -> tuple[str, bytes]:
        decoder = Chunked(LIMIT)
        try:
            for piece in pieces:
                if decoder.feed(piece):
                    return "done", decoder.body
        except Fault as fault:
            return type(fault).__name__, b""
        return "more", decoder.body

    # What was refused of a prefix is refused of the whole, and the other way round.
    assert verdict([data]) == verdict([data[at : at + step] for at in range(0, len(data), step)])


def test_byte_by_byte() -> None:
    whole = encode([b"hello", b" ", b"world" * 50], b";e=1", b"X: y\r\n")
    assert decode(whole + b"GET", list(range(len(whole) + 3))) == (b"hello " + b"world" * 50, b"GET")


@pytest.mark.parametrize(
    "data",
    [
        b"zz\r\n",
        b"-1\r\n",
        b"+5\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b" 5\r\nhello\r\n",
        b"5\nhello\n0\n\n",
        b"5\rhello\r0\r\r\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello!0\r\n\r\n",
        b"5\r\nhello\n0\r\n\r\n",
        b"5\r\nhello\r0\r\n\r\n",
        b"5\r\nhello\r\n0\n\n",
        b"\r\n",
        b";a\r\n",
        b"5;a\x00b\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"5;a\nb\r\nhello\r\n",
        b"5 5\r\nhello\r\n",
        b"5,5\r\nhello\r\n",
        b"5\x0b\r\nhello\r\n",
        b"\xef\xbc\x95\r\nhello\r\n",
        b"FFFFFFFFFFFFFFFF\r\n",
        b"10000000000000005\r\nhello\r\n",
        b"00000000000000000000005\r\nhello\r\n",
        b"5;" + b"x" * 5000 + b"\r\n",
        b"5" * 5000,
        b"0\r\nnot a field\r\n\r\n",
        b"0\r\n: nameless\r\n\r\n",
        b"0\r\nA : b\r\n\r\n",
        b"0\r\nA: b\x00\r\n\r\n",
        b"0\r\nA: b\nC: d\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\n\n",
    ],
)
def test_what_is_not_plain_is_refused(data: bytes) -> None:
    for step in (len(data), 1, 3):
        with pytest.raises((BadRequest, TooLarge)):
            feed(Chunked(LIMIT), [data[at : at + step] for at in range(0, len(data), step)])


@pytest.mark.parametrize("sizes", [[101], [50, 51], [100, 1], [0xFFFFFFFFFFFFFFF]])
def test_the_limit_holds_for_the_sum_and_is_noticed_from_the_size_line(sizes: list[int]) -> None:
    decoder = Chunked(100)
    written = [b"%x\r\n" % size + b"x" * min(size, 200) + b"\r\n" for size in sizes]
    with pytest.raises(TooLarge):
        feed(decoder, written)
    assert len(decoder.body) <= 100


def test_the_limit_itself_is_allowed() -> None:
    decoder = Chunked(100)
    assert decoder.feed(b"64\r\n" + b"x" * 100 + b"\r\n0\r\n\r\n")


def test_trailers_without_end_are_refused() -> None:
    decoder = Chunked(100)
    decoder.feed(b"0\r\n")
    with pytest.raises(HeadTooLarge):
        feed(decoder, [b"X: " + b"y" * 1000 + b"\r\n"] * 100)
    decoder = Chunked(100)
    decoder.feed(b"0\r\n")
    with pytest.raises(HeadTooLarge):
        decoder.feed(b"X: " + b"y" * 70_000)


def test_small_chunks_do_not_cost_many_times_their_size() -> None:
    decoder = Chunked(1 << 22)
    tracemalloc.start()
    try:
        for _ in range(100):
            decoder.feed(b"2\r\nab\r\n" * 500)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decoder.body) == 100_000
    assert held < 1_000_000
