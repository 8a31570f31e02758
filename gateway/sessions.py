"""Where sessions are at home: the bounded store of them.

A session is found by the name that a request gives it (`gateway.naming`), or by its content: a request whose messages extend
those of a recent request belongs to its session. Keys are scoped by tenant and model, and hashed before they are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from os import urandom
from time import time
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from gateway.content import Ends
from gateway.dialects import Reading
from gateway.naming import Found, Naming
from gateway.prompt import Prompt
from gateway.sticky import Sticky
from kv_index.pages import EMPTY, Pages

if TYPE_CHECKING:
    from gateway.asks import Ask

MOST_SYMBOLS = 512 * 1024 * 1024
"""Bytes of symbols that all sessions together keep: of prompts, 32 times as much."""

SWEPT = 5000
"""Sessions that are forgotten in one sweep."""
KEPT = 8
"""Turns of a session whose hits are remembered."""


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
    root: bytes | None = None
    """What its tokens carry; `_key` makes its key of that and its model, so that one token serves for several models and
    gateways. ``None`` where it is named otherwise."""
    pins: tuple[tuple[str, str], ...] = ()
    """(name, worker) of the latest of its stored responses and conversations."""
    inner: bool = False
    """It goes by its parent's name, and ends with it."""
    pages: Pages = EMPTY
    """Symbols of the last prompt."""
    namespace: bytes = b""
    """In which they were looked up."""
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
    ends: tuple[bytes, ...] = ()
    """Digests by which its content is known (`gateway.content`): up to an answer or a tool's result."""
    asked: tuple[bytes, ...] = ()
    """The same, up to a user's message."""
    last: bytes = b""
    """The latest of them."""
    why: str = ""
    """Why its home is where it is: the reason of the choice that bound it."""
    moves: int = 0
    """How often it was given a home."""
    bound_at: float = 0.0
    """When it last was; Unix seconds, for others to compare."""
    spoken: float = 0.0
    """When other gateways were last told of it."""
    hits: tuple[tuple[int, int | None], ...] = ()
    """(prompt tokens, cached tokens) of its last `KEPT` turns, as the engine reported."""
    told: dict[str, int] | None = None
    """Workers that keep a reference of it until they are told that it ended -> its requests that run there."""
    tool: str = ""
    """The tool whose result its last turn brought; empty: a user spoke, or nothing is known."""
    gone: bool = False
    """It was forgotten."""
    live: tuple[Ask, ...] = ()
    """Its requests that run."""
    saved: float = 0.0
    """When it was last saved, where sessions are kept over restarts."""
    awaited: tuple[str | None, str | None] | None = None
    """Names of the home and the partner that it had before a restart."""
    _token: bytes | None = None
    _token_home: int = 0


class Sessions:
    """The bounded store of sessions. Times are seconds on the loop's clock."""

    def __init__(
        self,
        *,
        most: int = 200_000,
        idle: float = 1800.0,
        headers: Iterable[str] = (),
        fields: Iterable[str] = (),
        cookie: bool = False,
        secret: bytes | None = None,
        homes: Callable[[int, int], None] = lambda target, change: None,
        dropped: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.most = most
        self.idle = idle
        self.sticky = Sticky(secret or urandom(32))
        self.naming = Naming(self.sticky, headers, fields, cookie)
        self._homes = homes
        """Told when a target gains or loses a home."""
        self._dropped = dropped
        """Told when a session is forgotten."""
        self.bound: Callable[[Session], None] | None = None
        """Told when a session's home changes, and of its end."""
        self.turned: Callable[[Session, float], None] | None = None
        """Told when a turn of a session ended."""
        self.ended: Callable[[Session], None] | None = None
        """Told when somebody ends a session."""
        self.elsewhere: Callable[[bytes, bool], Session | None] | None = None
        """The session of a key that is not known here, if another gateway has it; made a part of the store, unless the second
        argument is set."""
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        """In the order of their last use."""
        self._children: dict[bytes, set[bytes]] = {}
        """Key of a parent -> keys of its children."""
        self.ends = Ends()
        self._made = 0
        self._secret = int.from_bytes(urandom(8), "little")
        self.symbol_bytes = 0
        self.dropped = 0
        """Sessions forgotten because the store was full."""
        self.expired = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def reconfigure(self, most: int, idle: float, headers: list[str], fields: list[str], cookie: bool) -> None:
        """Other bounds, and other names, from here on."""
        self.most, self.idle = most, idle
        naming = Naming(self.sticky, headers, fields, cookie)
        if naming.told != self.naming.told:
            self.naming = naming

    # -- identity ---------------------------------------------------------------------------------------------------

    def name(
        self, named: Mapping[bytes, bytes], reading: Reading, memo: dict[object, object] | None = None, tenant: int = 0
    ) -> Found | None:
        """The session that a request names; see `Naming.of`."""
        return self.naming.of(named, reading, memo, tenant)

    def find(self, found: Found, tenant: str, model: str, now: float, dry: bool = False) -> Session:
        """The session of that name, made if it is new. ``dry``: nothing is stored or touched."""
        key, parent = keys_of(found, tenant, model)
        session = self.get(key)
        if session is None and self.elsewhere is not None:
            session = self.elsewhere(key, dry)
        if session is None:
            session = Session(key, found.source, tenant, model, xxh3_64_intdigest(key), parent=parent)
            session.inner = bool(found.child)
            session.root = None if found.carried is None else found.carried.key
            if not dry:
                self._add(session)
            if parent is not None and (mother := self.get(parent)) is not None:
                session.pages = mother.pages
                self.symbol_bytes += 0 if dry else len(mother.pages.symbols)
        if not dry:
            self.touch(session, now)
            self._bound()
        return session

    def named(self, value: bytes, tenant: str, model: str) -> Session | None:
        """The session of a name, without touching it."""
        return self.get(_key(tenant, model, b"named", value))

    def by_content(
        self, prompt: Prompt, scope: int, tenant: str, model: str, now: float, dry: bool = False
    ) -> Session | None:
        """The session whose last messages ``prompt`` extends, or a new one; ``None`` for a prompt without messages.

        ``scope``: 64 bits of what keeps sessions apart: tenant, model, namespace. See `gateway.content`.
        """
        if not prompt.messages:
            return None
        session = self.ends.find(prompt, scope)
        if session is None:
            # A dry run sees the very session that the next request would make, and leaves it to be made.
            root = xxh3_128_digest(b"%d %d" % (scope, self._made), self._secret)
            key = _key(tenant, model, b"sticky", root)
            session = Session(key, "content", tenant, model, xxh3_64_intdigest(key), root=root)
            if not dry:
                self._made += 1
                self._add(session)
        if not dry:
            self.touch(session, now)
        return session

    def remember_content(self, session: Session, said: tuple[bytes, bool]) -> None:
        """Make ``session`` findable by what it said so far; one that was forgotten meanwhile stays so."""
        if not session.gone:
            self.ends.remember(session, *said)

    def keep_pages(self, session: Session, pages: Pages) -> None:
        """Remember the symbols of the session's last prompt, within a bound for all of them."""
        if session.gone:
            return
        self.symbol_bytes += len(pages.symbols) - len(session.pages.symbols)
        session.pages = pages
        self._bound()

    def token(self, session: Session, seed: int, home: int) -> bytes:
        """The token that names ``session`` to its client, and its home; ``seed`` and ``home``: of tenant and target."""
        if session._token is None or session._token_home != home:
            session._token, session._token_home = self.sticky.seal(seed, session.root or session.key, home), home
        return session._token

    def _bound(self) -> None:
        """Forget the oldest sessions until the symbols of the others are within their bound."""
        while self.symbol_bytes > MOST_SYMBOLS and len(self) > 1:
            self.dropped += 1
            self.drop(self._oldest())

    # -- homes and life ---------------------------------------------------------------------------------------------

    def bind(self, session: Session, target: int, why: str = "") -> None:
        """``target`` is the session's home from now on; one that was forgotten meanwhile gets none."""
        if session.home == target or session.gone:
            return
        if session.home is not None:
            self._homes(session.home, -1)
        session.home, session.why = target, why
        session.moves, session.bound_at = session.moves + 1, time()
        self._homes(target, 1)
        if self.bound is not None:
            self.bound(session)

    def unbind(self, session: Session) -> None:
        """The session has no home now."""
        if session.home is not None:
            self._homes(session.home, -1)
            session.home = None
            if self.bound is not None and not session.gone:
                self.bound(session)

    def bind_partner(self, session: Session, target: int | None) -> None:
        """``target`` computes the session's prompts from now on; ``None``: nobody in particular."""
        if session.partner == target or (target is not None and session.gone):
            return
        if session.partner is not None:
            self._homes(session.partner, -1)
        session.partner = target
        if target is not None:
            self._homes(target, 1)
        if self.bound is not None and not session.gone:
            self.bound(session)

    def unbind_all(self, target: int) -> None:
        """``target`` is gone: sessions at home there have none now. Costs the store."""
        for session in self.all():
            if session.home == target:
                self.unbind(session)
            if session.partner == target:
                self.bind_partner(session, None)
            if session.tail_target == target:
                session.tail_target = None

    def at_home(self, target: int) -> list[Session]:
        """Sessions whose home, or whose prefill engine, ``target`` is. Costs the store."""
        return [session for session in self.all() if target in (session.home, session.partner)]

    def children(self, session: Session) -> list[Session]:
        """Sessions that name it as their parent."""
        keys = self._children.get(session.key, ())
        return [child for key in list(keys) if (child := self._sessions.get(key)) is not None]

    def sweep(self, now: float) -> None:
        """Forget sessions that were idle for too long, or are too many; the oldest stand first."""
        until = now - self.idle
        # As many as were made in a busy half second, not all that a night left.
        for _ in range(min(len(self), SWEPT)):
            oldest = self._oldest()
            if len(self) > self.most:
                self.dropped += 1
                self.drop(oldest)
                continue
            if oldest.used > until:
                break
            if oldest.running:
                self.touch(oldest, now)
                continue
            self.expired += 1
            self.drop(oldest)

    def drop(self, session: Session) -> None:
        """Forget one session; one that was forgotten before takes its successor of the same name not with it."""
        if session.gone:
            return
        del self._sessions[session.key]
        if session.parent is not None:
            others = self._children[session.parent]
            others.discard(session.key)
            if not others:
                del self._children[session.parent]
        session.gone = True
        self.symbol_bytes -= len(session.pages.symbols)
        session.pages = EMPTY
        self.ends.forget(session)
        self.unbind(session)
        self.bind_partner(session, None)
        if self.bound is not None:
            self.bound(session)
        self._dropped(session)

    def restore(self, session: Session, used: float) -> bool:
        """Take a session back that was kept over a restart, as the longest unused.

        Whether there was room, and none of its key.
        """
        if session.key in self._sessions or len(self) >= self.most:
            return False
        session.used = used
        self._sessions[session.key] = session
        self._sessions.move_to_end(session.key, last=False)
        self._adopt(session)
        self.ends.restore(session)
        return True

    def adopt(self, session: Session) -> None:
        """Take in one that another gateway had, whose key is not known here."""
        self._add(session)
        self.ends.restore(session)

    def end(self, session: Session) -> None:
        """Forget one session with its sub-agents that go by its name; one that was forgotten before had its own."""
        left = [session]
        while left:
            each = left.pop()
            if each.gone:
                continue
            left += [child for child in self.children(each) if child.inner]
            self.drop(each)
            if self.ended is not None:
                self.ended(each)

    def get(self, key: bytes) -> Session | None:
        """By key, without touching it."""
        return self._sessions.get(key)

    def all(self) -> Iterable[Session]:
        """Every session, the longest unused first. The store must not change meanwhile."""
        return self._sessions.values()

    def recent(self, limit: int) -> list[Session]:
        """The most recently used, newest first."""
        return list(islice(reversed(self._sessions.values()), limit))

    def _oldest(self) -> Session:
        return next(iter(self._sessions.values()))

    def _add(self, session: Session) -> None:
        # Two at most: where the bound was made smaller, the rest goes some at a time.
        for _ in range(min(2, len(self) - self.most + 1)):
            self.dropped += 1
            self.drop(self._oldest())
        self._sessions[session.key] = session
        self._adopt(session)

    def _adopt(self, session: Session) -> None:
        if session.parent is not None:
            self._children.setdefault(session.parent, set()).add(session.key)

    def touch(self, session: Session, now: float) -> None:
        """It is in use."""
        session.used = now
        self._sessions.move_to_end(session.key)


def keys_of(found: Found, tenant: str, model: str) -> tuple[bytes, bytes | None]:
    """Keys of the session and of its parent, if it has one."""
    if found.carried is not None:
        return _key(tenant, model, b"sticky", found.value), None
    key = _key(tenant, model, b"named", found.value)
    if found.child:
        # One that is said to be its own parent has none but the session.
        of = found.parent if found.parent != found.child else b""
        parent = _key(tenant, model, b"child", key + of) if of else key
        return _key(tenant, model, b"child", key + found.child), parent
    return key, _key(tenant, model, b"named", found.parent) if found.parent else None


def _key(tenant: str, model: str, space: bytes, value: bytes) -> bytes:
    return xxh3_128_digest(b"\x00".join((tenant.encode(), model.encode("utf-8", "replace"), space, value)))
