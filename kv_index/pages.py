"""Prompt -> symbols.

A prompt is cut into fixed pages; the symbol of a page is the 64-bit xxh3 of its bytes, so the symbols of a prompt are
8 bytes a page and comparing two prompts is one memcmp. A symbol covers its own page only: what stands before it is told
by its place in the index, not by the hash.

The last, partly filled page has no symbol: engines cache whole blocks and a hit never covers the last token.
"""

from collections.abc import Callable
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_128_digest

TEXT_PAGE = 256
"""Bytes of text in one page: hashing costs a call a page, and routing needs no finer grain."""

TOKEN_PAGE = 64
"""Bytes of little-endian u32 token ids in one page: 16 tokens."""

SYMBOL = 8
"""Bytes of one symbol."""


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
    if previous is not None and 0 < previous.covered <= end and previous.covered % page == 0:
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


LONGEST_CUT = 512
"""Pages that are cut at once; bounds how many cutters there can be."""


@lru_cache(maxsize=2 * LONGEST_CUT)
def _cutter(pages: int, page: int) -> Callable[[memoryview], tuple[bytes, ...]]:
    return Struct(f"{page}s" * pages).unpack
