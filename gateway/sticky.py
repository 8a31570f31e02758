"""The token by which a client that names no session can name one: signed, opaque, and without a store behind it.

It carries the session's key and its home, so that a gateway that never saw the session sends it where its cache is: another
replica with the same secret, or this one after a restart. A tag of keyed BLAKE2b makes sure that it was made here, for that
tenant. The payload is masked with a stream made from that tag and the secret (as with a synthetic initial vector, RFC 5297): it
is a hash and a name's hash, and the mask keeps clients from reading into them, such as who shares a home.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

_PAYLOAD = Struct("<16sQ")
_SCOPE = Struct("<Q")
_SEEDS = Struct("<QQ")
_TAG = 8
LENGTH = 43
"""Characters of a token: 32 bytes without padding."""


class Carried(NamedTuple):
    """What a token says."""

    key: bytes
    """16 bytes: what names the session, whatever its model."""
    home: int
    """Seed of the home's name; 0: none."""


class Sticky:
    """Makes and reads tokens with one secret of any length."""

    def __init__(self, secret: bytes) -> None:
        # Copied for each token: hashing a key costs more than hashing so little text.
        self._tagging = blake2b(key=blake2b(secret, person=b"warmroute tag").digest(), digest_size=_TAG)
        self._first, self._second = _SEEDS.unpack(blake2b(secret, person=b"warmroute mask", digest_size=16).digest())

    def seal(self, tenant: int, key: bytes, home: int) -> bytes:
        """A token for the tenant of that seed."""
        payload = _PAYLOAD.pack(key, home)
        tag = self._tag(tenant, payload)
        return urlsafe_b64encode(tag + self._crypt(tag, payload)).rstrip(b"=")

    def open(self, tenant: int, token: bytes) -> Carried | None:
        """What it says; ``None`` for one that was not made here, or for another tenant."""
        if len(token) != LENGTH:
            return None
        try:
            raw = urlsafe_b64decode(token + b"=")
        except (Error, ValueError):
            return None
        if len(raw) != _TAG + _PAYLOAD.size:
            return None
        tag = raw[:_TAG]
        payload = self._crypt(tag, raw[_TAG:])
        if not compare_digest(tag, self._tag(tenant, payload)):
            return None
        return Carried(*_PAYLOAD.unpack(payload))

    def _tag(self, tenant: int, payload: bytes) -> bytes:
        hashed = self._tagging.copy()
        hashed.update(_SCOPE.pack(tenant) + payload)
        return hashed.digest()

    def _crypt(self, tag: bytes, text: bytes) -> bytes:
        mask = xxh3_128_intdigest(tag, self._first) << 64 | xxh3_64_intdigest(tag, self._second)
        return (int.from_bytes(text, "little") ^ mask).to_bytes(_PAYLOAD.size, "little")
