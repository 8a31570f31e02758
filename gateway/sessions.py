"""Who a request belongs to, and where that session is at home.

Identity is looked for in a fixed order: configured headers, the gateway's own sticky token, state that lives on one
worker, the headers of the common clients, body fields, and last the content: a request whose messages extend those of a
recent request belongs to its session. A credential, an address, a trace or a request id never names a session.

Keys are scoped by tenant and model, checked for length and characters, and hashed before they are stored.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import urandom

from xxhash import xxh3_64_intdigest, xxh3_128, xxh3_128_digest

from gateway.dialects import Reading
from gateway.prompt import Prompt
from kv_index.pages import EMPTY, Pages

ENDS = 3
"""Ends of each kind that are kept for a session."""

MOST_SYMBOLS = 512 * 1024 * 1024
"""Bytes of symbols that all sessions together keep: of prompts, 32 times as much."""

NEAR = 4
"""Earlier ends that are tried one by one, latest first: an ordinary turn is found by the second."""

LONGEST = 256
"""Bytes of the longest key that is believed."""

STICKY = b"x-warmroute-session"

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
_ANY = re.compile(rb"x-[a-z0-9-]*session-id\Z")
_NEVER = frozenset((b"x-parent-session-id",))
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(slots=True)
class Found:
    """The name of a session as a request gives it."""

    source: str
    value: bytes
    child: bytes = b""
    """Which sub-agent of it; a child session of its own."""


@dataclass(slots=True, eq=False)
class Session:
    """One chain of requests."""

    key: bytes
    """16 bytes: digest of tenant, model and name."""
    source: str
    tenant: str
    model: str
    hash: int
    """64 bits for rendezvous and display."""
    home: int | None = None
    """target id."""
    partner: int | None = None
    """target id of the prefill engine, where its home is a pair."""
    parent: bytes | None = None
    pages: Pages = EMPTY
    """Symbols of the last prompt."""
    prompt_bytes: int = 0
    prompt_tokens: int | None = None
    """As the engine reported for the last prompt."""
    tail_tokens: int = 0
    """Tokens generated after the last prompt, held by ``tail_target`` but not yet known as text."""
    tail_target: int | None = None
    sent: float = 0.0
    """When its last prompt was sent."""
    sent_to: int | None = None
    ended: float = 0.0
    """When its last answer ended."""
    awaits: int = 0
    """Blocks that its last target will have stored, by its events, when they have told all of that answer."""
    used: float = 0.0
    turns: int = 0
    running: int = 0
    ends: list[bytes] = field(default_factory=list)
    """Digests under which its content is known to `Sessions.by_content`: up to an answer or a tool's result."""
    asked: list[bytes] = field(default_factory=list)
    """The same, up to a user's message."""


class Sessions:
    """The bounded store of sessions. Times are seconds on the loop's clock."""

    def __init__(
        self,
        *,
        most: int = 200_000,
        idle: float = 1800.0,
        headers: Iterable[str] = (),
        homes: Callable[[int, int], None] = lambda target, change: None,
    ) -> None:
        self.most = most
        self.idle = idle
        self.configured = [name.lower().replace("_", "-").encode() for name in headers]
        self._wanted = frozenset((*self.configured, STICKY, *_AGENTS, b"x-claude-code-agent-id", _LAST))
        self._homes = homes
        """Told when a target gains or loses a home."""
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._ends: dict[bytes, Session] = {}
        self._made = 0
        self._secret = int.from_bytes(urandom(8), "little")
        self.symbol_bytes = 0
        self.dropped = 0
        """Sessions forgotten because the store was full."""
        self.expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    # -- identity ---------------------------------------------------------------------------------------------------

    def name(
        self, named: Mapping[bytes, bytes], reading: Reading, memo: dict[object, object] | None = None
    ) -> Found | None:
        """The session that a request names in its headers or body; ``None`` if it names none.

        ``memo`` keeps what was found in headers that come again and again.
        """
        fields = memo.get("naming") if memo is not None else None
        if not isinstance(fields, dict):
            fields = self._naming(named)
            if memo is not None:
                memo["naming"] = fields
        for header in self.configured:
            value = _clean(fields.get(header))
            if value is not None:
                return Found("configured", value)
        value = _clean(fields.get(STICKY))
        if value is not None:
            return Found("sticky", value)
        if reading.conversation is not None:
            value = _clean(reading.conversation.encode("utf-8", "replace"))
            if value is not None:
                return Found("conversation", value)
        if fields:
            value = _clean(fields.get(b"x-session-id"))
            if value is not None:
                return Found("x-session-id", value)
            found = _agent(fields)
            if found is not None:
                return found
        for source, text in reading.session():
            value = _clean(text.encode("utf-8", "replace"))
            if value is not None:
                return Found(source, value)
        value = _clean(fields.get(_LAST))
        if value is not None:
            return Found("x-correlation-id", value)
        return None

    def _naming(self, named: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """Those headers that could name a session, ``_`` read as ``-``: most requests have none."""
        fields: dict[bytes, bytes] = {}
        wanted = self._wanted
        for low, value in named.items():
            plain = low.replace(b"_", b"-") if b"_" in low else low
            if plain in wanted or plain.endswith(b"session-id"):
                fields[plain] = value
        return fields

    def find(self, found: Found, tenant: str, model: str, now: float, dry: bool = False) -> Session:
        """The session of that name, made if it is new. ``dry``: nothing is stored or touched."""
        key = _key(tenant, model, b"named", found.value)
        parent = None
        if found.child:
            parent = key
            key = _key(tenant, model, b"child", key + found.child)
        session = self._sessions.get(key)
        if session is None:
            session = Session(key, found.source, tenant, model, xxh3_64_intdigest(key), parent=parent)
            if not dry:
                self._add(session)
            if parent is not None and (mother := self._sessions.get(parent)) is not None:
                session.pages = mother.pages
                self.symbol_bytes += 0 if dry else len(mother.pages.symbols)
        if not dry:
            self._touch(session, now)
            self._bound()
        return session

    def by_content(
        self, prompt: Prompt, scope: int, tenant: str, model: str, now: float, dry: bool = False
    ) -> Session | None:
        """The session whose last messages ``prompt`` extends, or a new one; ``None`` for a prompt without messages.

        ``scope``: 64 bits of what keeps sessions apart: tenant, model, namespace.

        Only a prompt that adds at least one message to the *whole* of an earlier one joins it, so a start that a fleet
        shares never joins two sessions.
        """
        view = memoryview(prompt.text)
        session = None
        if not prompt.messages:
            return None
        for near, mark in enumerate(prompt.earlier_ends()):
            if near == NEAR:
                session = self._far_back(prompt, view, scope)
                break
            session = self._ends.get(xxh3_128_digest(view[:mark], scope))
            if session is not None:
                break
        if session is None:
            # A dry run sees the very session that the next request would make, and leaves it to be made.
            key = xxh3_128_digest(b"%d %d" % (scope, self._made), self._secret)
            session = Session(key, "content", tenant, model, xxh3_64_intdigest(key))
            if not dry:
                self._made += 1
                self._add(session)
        if not dry:
            self._touch(session, now)
        return session

    def _far_back(self, prompt: Prompt, view: memoryview, scope: int) -> Session | None:
        """The same over all earlier ends, in one pass over the text."""
        hashed, at, found = xxh3_128(seed=scope), 0, None
        for mark in reversed(list(prompt.earlier_ends())):
            hashed.update(view[at:mark])
            at = mark
            found = self._ends.get(hashed.digest()) or found
        return found

    def end_of(self, prompt: Prompt, scope: int) -> tuple[bytes, bool] | None:
        """What a session that said ``prompt`` is found by: a digest, and whether a user's message ends it."""
        return (xxh3_128_digest(prompt.text, scope), prompt.asks) if prompt.says else None

    def remember_content(self, session: Session, said: tuple[bytes, bool]) -> None:
        """Make ``session`` findable by what it said so far; one that was forgotten meanwhile stays so."""
        if self._sessions.get(session.key) is not session:
            return
        end, asks = said
        known = self._ends.get(end)
        if known is session:
            return
        if known is not None:
            (known.ends if end in known.ends else known.asked).remove(end)
        self._ends[end] = session
        # Ends of tool steps come and go; where a user had asked is where the next question may have to go on from.
        ends = session.asked if asks else session.ends
        ends.append(end)
        if len(ends) > ENDS:
            self._ends.pop(ends.pop(0), None)

    def keep_pages(self, session: Session, pages: Pages) -> None:
        """Remember the symbols of the session's last prompt, within a bound for all of them."""
        if self._sessions.get(session.key) is not session:
            return
        self.symbol_bytes += len(pages.symbols) - len(session.pages.symbols)
        session.pages = pages
        self._bound()

    def _bound(self) -> None:
        """Forget the oldest sessions until the symbols of the others are within their bound."""
        while self.symbol_bytes > MOST_SYMBOLS and len(self._sessions) > 1:
            self.dropped += 1
            self.drop(next(iter(self._sessions.values())))

    # -- homes and life ---------------------------------------------------------------------------------------------

    def bind(self, session: Session, target: int) -> None:
        """``target`` is the session's home from now on; one that was forgotten meanwhile gets none."""
        if session.home == target or self._sessions.get(session.key) is not session:
            return
        if session.home is not None:
            self._homes(session.home, -1)
        session.home = target
        self._homes(target, 1)

    def unbind(self, session: Session) -> None:
        """The session has no home now."""
        if session.home is not None:
            self._homes(session.home, -1)
            session.home = None

    def bind_partner(self, session: Session, target: int | None) -> None:
        """``target`` computes the session's prompts from now on; ``None``: nobody in particular."""
        if session.partner == target or (target is not None and self._sessions.get(session.key) is not session):
            return
        if session.partner is not None:
            self._homes(session.partner, -1)
        session.partner = target
        if target is not None:
            self._homes(target, 1)

    def unbind_all(self, target: int) -> None:
        """``target`` is gone: sessions at home there have none now. Costs the store."""
        for session in self._sessions.values():
            if session.home == target:
                self.unbind(session)
            if session.partner == target:
                self.bind_partner(session, None)
            if session.tail_target == target:
                session.tail_target = None

    def sweep(self, now: float) -> None:
        """Forget sessions that were idle for too long; the oldest stand first."""
        until = now - self.idle
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if oldest.used > until:
                return
            self.expired += 1
            self.drop(oldest)

    def drop(self, session: Session) -> None:
        """Forget one session; one that was forgotten before takes its successor of the same name not with it."""
        if self._sessions.get(session.key) is not session:
            return
        del self._sessions[session.key]
        self.symbol_bytes -= len(session.pages.symbols)
        session.pages = EMPTY
        for end in session.ends + session.asked:
            self._ends.pop(end, None)
        session.ends.clear()
        session.asked.clear()
        self.unbind(session)
        self.bind_partner(session, None)

    def get(self, key: bytes) -> Session | None:
        """By key, without touching it."""
        return self._sessions.get(key)

    def recent(self, limit: int) -> list[Session]:
        """The most recently used, newest first."""
        newest = reversed(self._sessions.values())
        return [session for _, session in zip(range(limit), newest, strict=False)]

    def _add(self, session: Session) -> None:
        while len(self._sessions) >= self.most:
            self.dropped += 1
            self.drop(next(iter(self._sessions.values())))
        self._sessions[session.key] = session

    def _touch(self, session: Session, now: float) -> None:
        session.used = now
        self._sessions.move_to_end(session.key)


def _key(tenant: str, model: str, space: bytes, value: bytes) -> bytes:
    return xxh3_128_digest(b"\x00".join((tenant.encode(), model.encode("utf-8", "replace"), space, value)))


def _clean(value: bytes | None) -> bytes | None:
    if not value or len(value) > LONGEST or _CONTROL.search(value):
        return None
    return value


def _agent(fields: Mapping[bytes, bytes]) -> Found | None:
    for header in _AGENTS:
        value = _clean(fields.get(header))
        if value is None:
            continue
        child = b""
        if header == b"x-claude-code-session-id":
            child = _clean(fields.get(b"x-claude-code-agent-id")) or b""
        return Found(header.decode(), value, child)
    for low, value in fields.items():
        if low.startswith(b"x-") and low not in _NEVER and _ANY.match(low):
            cleaned = _clean(value)
            if cleaned is not None:
                return Found("x-*-session-id", cleaned)
    return None
