"""API keys: how they are stored, and how the owner of one is found.

A key is a long random string. What guards a stored hash of it is that length, not a slow function: one salted BLAKE2b costs
a microsecond, so a request can afford it, and nobody tries 2**256 keys. What people think up is too short for that, and is
refused where keys are hashed.

A stored hash has a salt of its own, so a credential has to be hashed once for each salt before it is known to be nobody's.
Keys in clear share one salt, random for each process, and are forgotten once they are hashed. Digests are looked up, never
compared: how long that takes says nothing of what was guessed.
"""

from collections.abc import Iterable
from hashlib import blake2b
from os import urandom
from pathlib import Path
from secrets import token_urlsafe
from typing import Generic, NamedTuple, TypeVar

from gateway.config_reader import Secret

FORM = "blake2b:"
DIGEST, SALT = 32, 16
"""Bytes."""
SHORTEST = 20
"""Characters of a key that is long enough for a fast hash."""
LARGEST = 4 * 1024 * 1024
"""Bytes of a file of keys."""
SALTS = 1000
"""Distinct salts of one configuration: each costs every unknown credential a microsecond."""

T = TypeVar("T")


class Stored(NamedTuple):
    """A key's hash."""

    salt: bytes
    digest: bytes


class BadKey(ValueError):
    """What is given is no key, or no hash of one. Its message never holds it."""


def new_key() -> str:
    """A fresh random key."""
    return f"wr-{token_urlsafe(32)}"


def hashed(key: str, salt: bytes | None = None) -> str:
    """The line that stores ``key``. Raises `BadKey` for one that is too short to be guarded by it."""
    if len(key) < SHORTEST:
        raise BadKey(f"the key has {len(key)} characters: a fast hash guards random keys of at least {SHORTEST} only")
    salt = urandom(SALT) if salt is None else salt
    return f"{FORM}{salt.hex()}:{_digest(key.encode(), salt).hex()}"


def parse(text: str) -> Stored | None:
    """A stored hash; ``None`` for a key in clear. Raises `BadKey` for what begins like a hash and is none."""
    if not text.startswith(FORM):
        return None
    salt, _, digest = text[len(FORM) :].partition(":")
    try:
        found = Stored(bytes.fromhex(salt), bytes.fromhex(digest))
    except ValueError:
        found = Stored(b"", b"")
    if len(found.digest) != DIGEST or not 0 < len(found.salt) <= SALT:
        raise BadKey(f"is no stored hash: {FORM}<salt, up to {2 * SALT} hex digits>:<digest, {2 * DIGEST} hex digits>")
    return found


def read_keys(path: str) -> list[Secret]:
    """Keys and hashes out of a file, one a line; blank lines and those that begin with ``#`` say nothing.

    Raises `BadKey` for a file that cannot be read, and for a line that is none.
    """
    try:
        if (size := Path(path).stat().st_size) > LARGEST:
            raise BadKey(f"{path} has {size} bytes, more than {LARGEST}: is it a file of keys?")
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise BadKey(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadKey(f"{path} is not text") from None
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        if not line.isprintable() or " " in line:
            raise BadKey(f"{path}, line {number}: one key or hash a line, without blanks in it")
        try:
            parse(line)
        except BadKey as error:
            raise BadKey(f"{path}, line {number}: {error}") from None
        found.append(Secret(line))
    return found


class Keyring(Generic[T]):
    """Digests of keys -> whose they are. Raises `BadKey` for a hash that is none."""

    def __init__(self, pairs: Iterable[tuple[str, T]] = ()) -> None:
        own = urandom(SALT)
        self._by_salt: dict[bytes, dict[bytes, T]] = {}
        for text, owner in pairs:
            stored = parse(text) or Stored(own, _digest(text.encode(), own))
            self._by_salt.setdefault(stored.salt, {})[stored.digest] = owner

    def __len__(self) -> int:
        return sum(len(digests) for digests in self._by_salt.values())

    @property
    def salts(self) -> int:
        """Distinct salts."""
        return len(self._by_salt)

    def owners(self) -> list[T]:
        """Each of them, once for each key."""
        return [owner for digests in self._by_salt.values() for owner in digests.values()]

    def find(self, key: bytes) -> T | None:
        """Whose key it is."""
        found = None
        for salt, digests in self._by_salt.items():
            # To the end, so that the time does not tell how far it was.
            found = digests.get(_digest(key, salt), found)
        return found


def _digest(key: bytes, salt: bytes) -> bytes:
    return blake2b(key, digest_size=DIGEST, salt=salt.ljust(SALT, b"\0")).digest()
