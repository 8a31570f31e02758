"""What follows a prefix inside the next page of token ids.

Pages are 16 tokens, but some engines cache token by token: where two prompts part inside a page, they share the tokens
before. The last pages seen behind each prefix are kept, within a bound, so that what is shared is known to the token.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kv_index.pages import TOKEN_PAGE

PAGES = 8192
"""Last pages of a prompt that are kept: one prompt must not push all others out."""
SIDES = 4
"""Pages that are kept behind one prefix."""


class Sequels:
    """Prefix (`kv_index.pages.chain`) -> token ids of the pages behind it."""

    def __init__(self, most: int = 100_000) -> None:
        if most <= 0:
            raise ValueError("most must be positive")
        self.most = most
        self._behind: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._behind)

    def put(self, chain: Sequence[int], ids: bytes, start: int) -> None:
        """A prompt of these ids was sent; ``start`` is where its chain begins. Costs what is new of it."""
        behind = self._behind
        for at in range(len(chain), max(-1, len(chain) - PAGES), -1):
            page = ids[at * TOKEN_PAGE : (at + 1) * TOKEN_PAGE]
            if not page:
                continue
            before = chain[at - 1] if at else start
            known = behind.get(before, ())
            if page in known:
                if len(page) == TOKEN_PAGE:
                    # What is before it was put with it.
                    return
                continue
            behind[before] = (*known[1 - SIDES :], page)
            behind.move_to_end(before)
            if len(behind) > self.most:
                behind.popitem(last=False)

    def beyond(self, chain: Sequence[int], pages: int, ids: bytes, start: int) -> int:
        """Tokens behind the first ``pages`` of a prompt that it shares with some page seen there; less than a page."""
        rest = ids[pages * TOKEN_PAGE : (pages + 1) * TOKEN_PAGE]
        best = 0
        for page in self._behind.get(chain[pages - 1] if pages else start, ()):
            same = 0
            while same < len(rest) and same < len(page) and page[same : same + 4] == rest[same : same + 4]:
                same += 4
            best = max(best, same // 4)
        return best
