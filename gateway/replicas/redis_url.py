"""Connecting to a Redis, be it one server, a set that Sentinels watch, or a cluster.

    redis://[user:password@]host:port/db            rediss:// with TLS, unix:///path
    redis+sentinel://[user:password@]host:port,host:port/name[/db]
    redis+cluster://[user:password@]host:port,host:port

and both of the latter with ``rediss`` for TLS.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

PLAIN = ("redis", "rediss", "unix")
SENTINEL_PORT, PORT = 26379, 6379


class Place(NamedTuple):
    """What a URL says."""

    kind: str
    """plain, sentinel, cluster."""
    hosts: list[tuple[str, int]]
    name: str
    """Of the set that Sentinels watch."""
    db: int
    user: str | None
    password: str | None
    tls: bool


def place_of(url: str) -> Place:
    """Raises `ValueError` for what is none."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    kind = kind or "plain"
    if scheme not in PLAIN or kind not in ("plain", "sentinel", "cluster") or (kind != "plain" and scheme == "unix"):
        raise ValueError(
            "a URL of Redis begins with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://"
        )
    if kind == "plain":
        return Place(kind, [], "", 0, None, None, scheme == "rediss")
    account, _, where = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    hosts = [_host(each, SENTINEL_PORT if kind == "sentinel" else PORT) for each in where.split(",") if each]
    name, _, db = parts.path.strip("/").partition("/")
    if not hosts or (kind == "sentinel" and not name) or (db and not db.isdecimal()):
        raise ValueError(
            "Sentinels are told as redis+sentinel://host:port,host:port/name/db, a cluster as redis+cluster://host:port"
        )
    return Place(kind, hosts, name, int(db or 0), unquote(user) or None, unquote(password) or None, scheme == "rediss")


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is not host:port")
    return parts.hostname, parts.port or port


def connect(url: str, seconds: float, blocking: bool = False) -> Any:
    """A client of redis-py's asyncio, or of its ``blocking`` one; ``seconds``: that an answer may take. Connects when it is
    used. Raises `ValueError`."""
    place = place_of(url)
    told: dict[str, Any] = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    if place.kind == "plain":
        return import_module("redis" if blocking else "redis.asyncio").Redis.from_url(url, **told)
    told |= {"username": place.user, "password": place.password, "ssl": place.tls}
    kinds: Any
    if place.kind == "cluster":
        kinds = import_module("redis.cluster" if blocking else "redis.asyncio.cluster")
        return kinds.RedisCluster(startup_nodes=[kinds.ClusterNode(*each) for each in place.hosts], **told)
    kinds = import_module("redis.sentinel" if blocking else "redis.asyncio.sentinel")
    watched = kinds.Sentinel(place.hosts, sentinel_kwargs={"socket_timeout": seconds, "ssl": place.tls})
    return watched.master_for(place.name, db=place.db, **told)
