"""Prompt -> symbols.

A prompt is cut into fixed pages; the symbol of a page is the 64-bit xxh3 of its bytes, so the symbols of a prompt are
8 bytes a page and comparing two prompts is one memcmp. A symbol covers its own page only: what stands before it is told
by its place in the index, not by the hash.

Token ids are chained instead (`chain`): the symbol of a page covers all pages before it, seeded with what separates caches,
so that it is also the name of a prefix, by which engines' own blocks are found (`kv_index.blocks`). To the radix tree both
kinds are the same.

The last, partly filled page has no symbol: engines cache whole blocks and a hit never covers the last token.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest, xxh3_128_digest

TEXT_PAGE = 256
"""Bytes of text in one page: hashing costs a call a page, and routing needs no finer grain."""

PAGE_TOKENS = 16
"""Tokens in one page of token ids."""

TOKEN_PAGE = 4 * PAGE_TOKENS
"""Bytes of little-endian u32 token ids in one page."""

PREFIX_BITS = (1 << 60) - 1
"""Chained symbols use 60 bits: such integers are a third smaller in memory, and there are millions."""

SYMBOL = 8
"""Bytes of one symbol."""

LITTLE = Struct("=Q").pack(1) == Struct("<Q").pack(1)
"""Whether this machine's own integers are as symbols are."""


class Pages(NamedTuple):
    """The symbols of one prompt, and what is needed to extend them without hashing the old part again."""

    symbols: bytes
    """SYMBOL bytes for each full page."""
    covered: int
    """Bytes of the prompt that the symbols cover (a multiple of the page)."""
    digest: bytes
    """xxh3-128 of the covered bytes: proves that a later prompt really starts with them."""

    @property
    def full(self) -> int:
        """Full pages."""
        return len(self.symbols) // SYMBOL


EMPTY = Pages(b"", 0, xxh3_128_digest(b""))


def paginate(prompt: bytes, previous: Pages | None = None, page: int = TEXT_PAGE) -> Pages:
    """Symbols of ``prompt``; pages that ``previous`` already covers are not hashed again.

    ``previous`` may come from any prompt: its symbols are reused only if ``prompt`` starts with the very bytes that it
    covers (checked over their whole length, about 2 us for 100 KB), otherwise everything is hashed.
    """
    end = len(prompt) // page * page
    view = memoryview(prompt)[:end]
    start, head = 0, b""
    if previous is not None and 0 < previous.covered <= end and previous.full * page == previous.covered:
        covered = previous.covered
        if xxh3_128_digest(view[:covered]) == previous.digest:
            if covered == end:
                return previous
            start, head = covered, previous.symbols
    # No loop of ours: a page costs a copy and its hash, both called from C.
    symbols = head
    for at in range(start, end, LONGEST_CUT * page):
        some = view[at : at + LONGEST_CUT * page]
        symbols += b"".join(map(xxh3_64_digest, _cutter(len(some) // page, page)(some)))
    return Pages(symbols, end, xxh3_128_digest(view))


def root(*parts: bytes) -> int:
    """Where the chain of a namespace begins; 0 for no namespace at all."""
    if not any(parts):
        return 0
    return xxh3_64_intdigest(b"".join([len(part).to_bytes(4, "little") + part for part in parts])) & PREFIX_BITS


def chain(ids: bytes, start: int = 0, previous: Pages | None = None) -> Pages:
    """Chained symbols of ``ids`` (little-endian u32 token ids), from ``start`` (see `root`) on.

    Pages that ``previous`` covers are not hashed again; it counts only if it was made of the same ids from the same start.
    """
    end = len(ids) // TOKEN_PAGE * TOKEN_PAGE
    view = memoryview(ids)[:end]
    at, symbols, seed = 0, b"", start
    if previous is not None and 0 < previous.covered <= end and previous.full * TOKEN_PAGE == previous.covered:
        covered = previous.covered
        if xxh3_128_digest(view[:covered], CHAINED | start) == previous.digest:
            if covered == end:
                return previous
            at, symbols = covered, previous.symbols
            seed = int.from_bytes(symbols[-SYMBOL:], "little")
    values = prefixes(view[at:], seed)
    return Pages(symbols + Struct(f"<{len(values)}Q").pack(*values), end, xxh3_128_digest(view, CHAINED | start))


def prefixes(ids: bytes | memoryview, start: int) -> list[int]:
    """Chained symbols of whole pages of token ids, as integers, behind a prefix called ``start``."""
    values = []
    view = memoryview(ids)
    for at in range(0, len(view), LONGEST_CUT * TOKEN_PAGE):
        some = view[at : at + LONGEST_CUT * TOKEN_PAGE]
        for page in _cutter(len(some) // TOKEN_PAGE, TOKEN_PAGE)(some):
            start = xxh3_64_intdigest(page, start) & PREFIX_BITS
            values.append(start)
    return values


def names(symbols: bytes) -> Sequence[int]:
    """Chained symbols as integers: those that are looked at, no copy of all."""
    if LITTLE:
        return memoryview(symbols).cast("Q")
    return Struct(f"<{len(symbols) // SYMBOL}Q").unpack(symbols)


CHAINED = 1 << 63
"""Seeds the digests of chained symbols: those of the same bytes that are not chained are others."""

LONGEST_CUT = 512
"""Pages that are cut at once; bounds how many cutters there can be."""


@lru_cache(maxsize=2 * LONGEST_CUT)
def _cutter(pages: int, page: int) -> Callable[[memoryview], tuple[bytes, ...]]:
    return Struct(f"{page}s" * pages).unpack
