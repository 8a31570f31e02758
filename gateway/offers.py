"""KV that decode engines offer to hand back: for whom, for which tokens, until when.

A decode engine with ``bidirectional_kv_xfer`` ends its answer with parameters by which the prefill engine of the session's
next turn can fetch the prompt *and the answer*. Engines believe those parameters by the number of tokens, not by their
content: with a prompt that does not go on from exactly those tokens the answer is wrong, with status 200, and so is the prefill
engine's cache for everybody after. So an offer is kept with a digest of the tokens that the engine computed, taken at most
once, and only for a prompt that begins with them.
"""

from collections import OrderedDict
from typing import NamedTuple

from xxhash import xxh3_128_digest

MOST = 64 * 1024 * 1024
"""Bytes of all parameters together."""
LARGEST = 256 * 1024
"""Bytes of the longest parameters that are kept."""


class Offer(NamedTuple):
    """What one decode engine offers to one session."""

    target: int
    epoch: int
    """Of the target's engine: a restart voids it."""
    params: bytes
    tokens: int
    """Leading tokens whose KV it has."""
    digest: bytes
    """Of those tokens' ids."""
    until: float


class Offers:
    """The bounded store, by session. Times are seconds on the loop's clock."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.size = 0
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offers)

    def put(
        self, session: bytes, target: int, epoch: int, params: bytes, ids: bytes, tokens: int, until: float
    ) -> None:
        """Keep an offer, in place of an earlier one. ``ids``: of the prompt and the answer, little-endian u32 each, at least
        ``tokens`` of them."""
        self.drop(session)
        if not 0 < tokens <= len(ids) // 4 or len(params) > LARGEST:
            return
        digest = xxh3_128_digest(memoryview(ids)[: 4 * tokens])
        self._offers[session] = Offer(target, epoch, params, tokens, digest, until)
        self.size += len(params)
        while self.size > self.most:
            self.drop(next(iter(self._offers)))

    def fits(self, session: bytes, ids: bytes, now: float) -> Offer | None:
        """The offer that a prompt of these ids may take; it must have more tokens than the offer."""
        offer = self._offers.get(session)
        if offer is None or offer.until <= now or len(ids) // 4 <= offer.tokens:
            return None
        same = xxh3_128_digest(memoryview(ids)[: 4 * offer.tokens]) == offer.digest
        return offer if same else None

    def drop(self, session: bytes) -> None:
        """It was taken, or is void."""
        offer = self._offers.pop(session, None)
        if offer is not None:
            self.size -= len(offer.params)

    def sweep(self, now: float) -> None:
        """Forget those that are over: offers are kept for the same time each, so the oldest end first."""
        while self._offers:
            key, offer = next(iter(self._offers.items()))
            if offer.until > now:
                return
            self.drop(key)
