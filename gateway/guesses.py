"""How many unknown credentials an address may send before it is made to wait.

An address that guesses is slowed to so many guesses a minute; what it sends beyond is refused without being looked at. But
behind one address may be a whole company with one misconfigured script in it, so credentials that were good lately are not
guesses: they pass whatever their neighbours do. Both tables are bounded, and the one that was not seen for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from os import urandom
from time import monotonic
from typing import Generic, TypeVar

from gateway.errors import GuessedTooOften

ADDRESSES = 10_000
GOOD = 10_000
MINUTE = 60.0

T = TypeVar("T")


class Guesses(Generic[T]):
    """See the module's head. ``a_minute``: unknown credentials of one address; 0: no limit. ``T``: whose a credential is."""

    def __init__(self, a_minute: float = 60.0, clock: Callable[[], float] = monotonic) -> None:
        self.a_minute = a_minute
        self.clock = clock
        self._secret = urandom(32)
        self._good: OrderedDict[bytes, T] = OrderedDict()
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Address -> guesses that count against it, and when that was so; they fade within a minute."""

    def digest(self, credential: bytes) -> bytes:
        """What a credential is remembered by."""
        return blake2b(credential, key=self._secret, digest_size=16).digest()

    def good(self, digest: bytes) -> T | None:
        """Whose credential that is, if it was good lately."""
        found = self._good.get(digest)
        if found is not None:
            self._good.move_to_end(digest)
        return found

    def passed(self, digest: bytes, owner: T) -> None:
        """The credential is good."""
        self._good[digest] = owner
        self._good.move_to_end(digest)
        if len(self._good) > GOOD:
            self._good.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        """The credential is good no longer."""
        self._good.pop(digest, None)

    def check(self, address: str) -> None:
        """Before a credential that was not good lately is looked at. Raises `GuessedTooOften`."""
        over = self._level(network(address)) - self.a_minute + 1
        if self.a_minute and over > 0:
            wait = max(1.0, over * MINUTE / self.a_minute)
            raise GuessedTooOften("too many unknown keys came from this address: wait, then send a good one", wait)

    def failed(self, address: str, digest: bytes) -> None:
        """The credential is nobody's."""
        self._good.pop(digest, None)
        where = network(address)
        self._levels[where] = (self._level(where) + 1, self.clock())
        self._levels.move_to_end(where)
        if len(self._levels) > ADDRESSES:
            self._levels.popitem(last=False)

    def _level(self, where: str) -> float:
        level, at = self._levels.get(where, (0.0, 0.0))
        return max(0.0, level - (self.clock() - at) * self.a_minute / MINUTE)


def network(address: str) -> str:
    """Who is one guesser: an address, of IPv6 the 64 bits that a customer is given."""
    if ":" not in address:
        return address
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(found, IPv6Address):
        return address
    return str(found.ipv4_mapped) if found.ipv4_mapped else str(IPv6Address(int(found) >> 64 << 64))
