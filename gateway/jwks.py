"""The public keys of whoever issues tokens: fetched beside requests, never because of what a token says.

The set is read from one configured place, a URL or a file, at the start and from time to time. A token can only name a key of
the set; of one that is not in it the set is read again, once a minute at most, since issuers sign with a new key as soon as
they publish it. While the place cannot be read the last set stays, and its age is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from gateway.metrics import Metrics
from gateway.series import Gauge
from gateway.source import stat_of

log = logging.getLogger("warmroute")

LARGEST = 256 * 1024
"""Bytes of a set."""
MOST = 100
"""Keys of a set."""
SHORTEST = 2048 // 6
"""Characters of an RSA key's modulus, of six bits each: shorter keys are no good any more."""
SECONDS = 10.0
"""That fetching it may take."""
AGAIN = 5.0
"""Seconds until it is tried again while nothing is known yet, and between two looks at a file."""
ASKED = 60.0
"""Seconds between two times that tokens have it read again."""
FAMILIES = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""First letters of an algorithm -> the kind of key that it takes."""


class BadKeySet(ValueError):
    """What was read is no set of keys."""


@dataclass(frozen=True, slots=True)
class Key:
    """One public key."""

    kid: str | None
    kind: str
    algorithm: str | None
    """The only one that it is for, if it says so."""
    told: dict[str, Any]

    def fits(self, algorithm: str) -> bool:
        """Whether it may have made a signature of that algorithm."""
        return FAMILIES.get(algorithm[:2]) == self.kind and self.algorithm in (None, algorithm)


def parse(data: bytes) -> tuple[Key, ...]:
    """Public keys for signatures out of a JWK set (RFC 7517); secret ones and others are left out. Raises `BadKeySet`."""
    try:
        told = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadKeySet("it is not JSON") from None
    members = told.get("keys") if isinstance(told, dict) else None
    if not isinstance(members, list):
        raise BadKeySet("it has no list of keys")
    if len(members) > MOST:
        raise BadKeySet(f"it has {len(members)} keys, more than {MOST}")
    found = []
    for each in members:
        if not isinstance(each, dict) or each.get("use", "sig") != "sig" or each.get("kty") not in FAMILIES.values():
            continue
        if each["kty"] == "RSA" and len(str(each.get("n", ""))) < SHORTEST:
            continue
        kid, algorithm = each.get("kid"), each.get("alg")
        public = {name: value for name, value in each.items() if name in ("kty", "crv", "x", "y", "n", "e")}
        found.append(
            Key(
                kid if isinstance(kid, str) else None,
                each["kty"],
                algorithm if isinstance(algorithm, str) else None,
                public,
            )
        )
    if not found:
        raise BadKeySet("it has no public key for signatures")
    return tuple(found)


class KeySet:
    """See the module's head. ``place``: a URL or a file; ``seconds``: between two readings; `changed` is told a new set."""

    def __init__(self, place: str, seconds: float, metrics: Metrics) -> None:
        self.place = place
        self.seconds = seconds
        self.changed: Callable[[], None] = lambda: None
        self.keys: tuple[Key, ...] = ()
        self.read_at: float | None = None
        """When the set was read last, on the loop's clock."""
        self._metrics = metrics
        self._asked = asyncio.Event()
        self._may_ask = 0.0
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_url(self) -> bool:
        """Whether it is fetched."""
        return self.place.startswith(("http://", "https://"))

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="jwks")

    async def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def missed(self) -> None:
        """A token names a key that is not in the set: it may be a new one."""
        now = monotonic()
        if now >= self._may_ask:
            self._may_ask = now + ASKED
            self._asked.set()

    def gauges(self) -> list[Gauge]:
        """For the metrics."""
        return [
            Gauge(
                "warmroute_jwks_age_seconds",
                "Since the keys of tokens' issuer were read; absent while they never were.",
                lambda: [] if self.read_at is None else [((), monotonic() - self.read_at)],
            ),
            Gauge("warmroute_jwks_keys", "Keys of tokens' issuer.", lambda: [((), len(self.keys))]),
        ]

    async def _run(self) -> None:
        while True:
            stat = None if self.is_url else stat_of(self.place)
            try:
                await self._renew()
            except Exception:
                log.exception("reading the keys of tokens failed")
            self._asked.clear()
            until = monotonic() + (self.seconds if self.keys else AGAIN)
            while monotonic() < until and not self._asked.is_set():
                try:
                    async with asyncio.timeout(min(AGAIN, max(0.0, until - monotonic()))):
                        await self._asked.wait()
                except TimeoutError:
                    pass
                if not self.is_url and stat_of(self.place) != stat:
                    break

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                data = await (self._fetch() if self.is_url else asyncio.to_thread(self._read))
            keys = parse(data)
        except (BadKeySet, OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
            self._failed(error)
            return
        self._metrics.jwks_reads.add(("read",))
        if self._trouble:
            log.info("the keys of tokens can be read again from %s", self.place)
            self._trouble = ""
        self.read_at = monotonic()
        if keys != self.keys:
            self.keys = keys
            self.changed()

    def _failed(self, error: Exception) -> None:
        self._metrics.jwks_reads.add(("failed",))
        told = str(error) if isinstance(error, BadKeySet) else type(error).__name__
        if told != self._trouble:
            self._trouble = told
            log.error(
                "the keys of tokens cannot be read from %s, so the %d known stay: %s", self.place, len(self.keys), told
            )

    def _read(self) -> bytes:
        with Path(self.place).open("rb") as file:
            return _bounded(file.read(LARGEST + 1))

    async def _fetch(self) -> bytes:
        async with (
            aiohttp.ClientSession(auto_decompress=False, trust_env=False) as http,
            http.get(self.place, allow_redirects=False, headers={"accept": "application/json"}) as answer,
        ):
            if answer.status != 200:
                raise BadKeySet(f"it answers {answer.status}")
            found = bytearray()
            async for piece in answer.content.iter_any():
                found += piece
                _bounded(found)
            return bytes(found)


def _bounded(data: bytes | bytearray) -> bytes:
    if len(data) > LARGEST:
        raise BadKeySet(f"it has more than {LARGEST} bytes")
    return bytes(data)
