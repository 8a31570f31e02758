"""The name of a session as a request gives it, in its headers or in its body.

It is looked for in a fixed order: configured headers and fields, the gateway's own token, state that lives on one worker, the
headers of the common clients, body fields. A credential, an address, a trace or a request id never names a session.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gateway.dialects import Reading
from gateway.sticky import Carried, Sticky

LONGEST = 256
"""Bytes of the longest key that is believed."""

STICKY = b"x-warmroute-session"
"""Header, and cookie, of the gateway's own token."""

_AGENTS = (
    b"x-claude-code-session-id",
    b"session-id",
    b"thread-id",
    b"conversation-id",
    b"x-session-affinity",
    b"x-opencode-session",
    b"x-task-id",
    b"x-openwebui-chat-id",
    b"x-litellm-session-id",
    b"x-litellm-trace-id",
    b"x-smg-routing-key",
    b"x-grok-conv-id",
)
"""Headers of the common clients after ``x-session-id``; ``-`` and ``_`` are the same."""

_LAST = b"x-correlation-id"
_PARENT = b"x-parent-session-id"
_CLAUDE_AGENT, _CLAUDE_PARENT = b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id"
_CODEX_AGENT = b"x-openai-subagent"
_ANY = re.compile(rb"x-[a-z0-9-]*session-id\Z")
_NEVER = frozenset((_PARENT,))
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(slots=True)
class Found:
    """The name of a session as a request gives it."""

    source: str
    value: bytes
    child: bytes = b""
    """Which sub-agent of it; a child session of its own."""
    parent: bytes = b""
    """Of whom it is a child: another sub-agent of the same session, or, where ``child`` is empty, another session."""
    carried: Carried | None = None
    """What the gateway's own token says."""


class Naming:
    """Finds the name. ``headers`` and ``fields`` (of the body) are the operator's own and come first; ``cookie``: whether the
    gateway's token may come as a cookie."""

    def __init__(
        self, sticky: Sticky, headers: Iterable[str] = (), fields: Iterable[str] = (), cookie: bool = False
    ) -> None:
        self.sticky = sticky
        self.cookie = cookie
        self._headers = [name.lower().replace("_", "-").encode() for name in headers]
        self._fields = tuple(fields)
        wanted = (STICKY, *_AGENTS, _LAST, _PARENT, _CLAUDE_AGENT, _CLAUDE_PARENT, _CODEX_AGENT)
        self._wanted = frozenset((*self._headers, *wanted, *((b"cookie",) if cookie else ())))

    @property
    def told(self) -> tuple[object, ...]:
        """What it was made with."""
        return self._headers, self._fields, self.cookie

    def of(
        self, named: Mapping[bytes, bytes], reading: Reading, memo: dict[object, object] | None = None, tenant: int = 0
    ) -> Found | None:
        """The session that a request names; ``None`` if it names none.

        ``memo`` keeps what was found in headers that come again and again. ``tenant``: seed of the tenant, to whom alone its
        tokens say anything.
        """
        fields = memo.get(self) if memo is not None else None
        if not isinstance(fields, dict):
            fields = self._naming(named)
            if memo is not None:
                memo[self] = fields
        found = self._told(fields, reading, tenant)
        if found is not None:
            return found
        if fields:
            value = clean(fields.get(b"x-session-id"))
            found = _agent(fields) if value is None else Found("x-session-id", value)
            if found is not None:
                return _with_parent(found, fields)
        for source, text in reading.session():
            value = clean(text.encode("utf-8", "replace"))
            if value is not None:
                return _with_parent(Found(source, value), fields)
        value = clean(fields.get(_LAST)) if fields else None
        return None if value is None else Found("x-correlation-id", value)

    def _told(self, fields: Mapping[bytes, bytes], reading: Reading, tenant: int) -> Found | None:
        """What the operator, the gateway or the API itself says of it."""
        for header in self._headers:
            value = clean(fields.get(header))
            if value is not None:
                return _with_parent(Found("configured", value), fields)
        for name in self._fields:
            text = reading.field(name)
            value = clean(text.encode("utf-8", "replace")) if text is not None else None
            if value is not None:
                return _with_parent(Found("configured", value), fields)
        for token in self._tokens(fields) if fields else ():
            carried = self.sticky.open(tenant, token)
            if carried is not None:
                return Found("sticky", carried.key, carried=carried)
        if reading.conversation is not None:
            value = clean(reading.conversation.encode("utf-8", "replace"))
            if value is not None:
                return Found("conversation", value)
        return None

    def _tokens(self, fields: Mapping[bytes, bytes]) -> Iterator[bytes]:
        """What may be one of the gateway's own tokens."""
        token = fields.get(STICKY)
        if token is not None:
            yield token
        if self.cookie and STICKY in (told := fields.get(b"cookie", b"")):
            for part in told.split(b";"):
                name, _, token = part.strip().partition(b"=")
                if name == STICKY:
                    yield token.strip(b'"')

    def _naming(self, named: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Those headers that could name a session, ``_`` read as ``-``: most requests have none."""
        fields: dict[bytes, bytes] = {}
        wanted = self._wanted
        for low, value in named.items():
            plain = low.replace(b"_", b"-") if b"_" in low else low
            if plain in wanted or plain.endswith(b"session-id"):
                fields[plain] = value
        return fields


def clean(value: bytes | None) -> bytes | None:
    """A name that can be believed, else ``None``."""
    if not value or len(value) > LONGEST or _CONTROL.search(value):
        return None
    return value


def _agent(fields: Mapping[bytes, bytes]) -> Found | None:
    for header in _AGENTS:
        value = clean(fields.get(header))
        if value is None:
            continue
        found = Found(header.decode(), value)
        if header == b"x-claude-code-session-id":
            found.child = clean(fields.get(_CLAUDE_AGENT)) or b""
            found.parent = (clean(fields.get(_CLAUDE_PARENT)) or b"") if found.child else b""
        elif header == b"session-id":
            # A thread of its own, or else a helper of the main one: Codex names both beside the session.
            thread = clean(fields.get(b"thread-id")) or b""
            helper = clean(fields.get(_CODEX_AGENT)) or b""
            found.child = thread if thread != value else b""
            found.child = found.child or helper
        return found
    for low, value in fields.items():
        if low.startswith(b"x-") and low not in _NEVER and _ANY.match(low):
            cleaned = clean(value)
            if cleaned is not None:
                return Found("x-*-session-id", cleaned)
    return None


def _with_parent(found: Found, fields: Mapping[bytes, bytes]) -> Found:
    """With the session that the client says it comes from."""
    if fields and not found.child and _PARENT in fields:
        parent = clean(fields[_PARENT])
        if parent is not None and parent != found.value:
            found.parent = parent
    return found
