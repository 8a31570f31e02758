"""The words of the bus: msgpack arrays."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

VERSION = 1
"""Batches of another are not read: both sides go on alone until all are of one."""


class Home(msgspec.Struct, array_like=True, gc=False):
    """A session: who it is, and where its KV is. Names of targets are ``None`` where it has none."""

    key: bytes
    tenant: str
    model: str
    source: str
    home: str | None
    partner: str | None
    why: str
    moves: int
    """How often its home changed; of two, the one that changed more often is right, ..."""
    bound: float
    """... and of equals the one that was there first. Unix seconds."""
    used: float
    """Unix seconds."""
    turns: int
    prompt_bytes: int
    prompt_tokens: int | None
    tail_tokens: int
    parent: bytes | None = None
    inner: bool = False
    root: bytes | None = None
    ends: tuple[bytes, ...] = ()
    asked: tuple[bytes, ...] = ()
    last: bytes = b""
    told: tuple[str, ...] = ()
    pins: tuple[tuple[str, str], ...] = ()


class Told(NamedTuple):
    """What of a session is needed to find it; the rest is read when somebody does."""

    key: bytes
    end: bytes
    """By which its content is known now; empty: it is named."""
    home: bytes
    """`Home`; empty: it was ended."""


class Placed(NamedTuple):
    """A prompt was sent."""

    target: int
    """Place among the batch's names."""
    pages: int
    """That the target did not have, as far as the speaker knew."""
    marks: bytes
    """See `kv_index.heard`; 8 bytes each, little-endian."""


class Pinned(NamedTuple):
    """A worker alone has some state: a stored response, a conversation."""

    tenant: str
    name: str
    worker: str
    session: bytes | None


class Flight(NamedTuple):
    """What the speaker has in flight on a target now."""

    target: int
    running: int
    waits: float
    """Seconds of prefill."""
    homes: int
    """Of sessions that it served last."""


class Used(NamedTuple):
    """What a tenant used since the last batch, and has running now."""

    tenant: str
    requests: float
    prompt: float
    computed: float
    running: int


class Batch(msgspec.Struct, array_like=True, gc=False):
    """All that one says at a time."""

    version: int
    who: bytes
    """The speaker: 8 bytes, made at its start."""
    host: bytes
    """Speakers of one host have it in common."""
    number: int
    """Of its batches in turn, from 1; 0: not one of them, but an answer to a newcomer."""
    asks: bytes = b""
    """Whom the speaker asks for all that it missed; empty: nobody."""
    names: tuple[str, ...] = ()
    """Of targets."""
    homes: list[Told] = []
    placed: list[Placed] = []
    pinned: list[Pinned] = []
    flight: list[Flight] = []
    used: list[Used] = []
    last: bool = False
    """It is the last one of an answer, or of a speaker that leaves."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Batch).decode
home_of = msgspec.msgpack.Decoder(Home).decode
