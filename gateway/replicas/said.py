"""What there is to say: gathered as it happens, said in batches.

Of what happened twice before it was said only the last counts. Nothing is kept for those who do not hear: homes that could not
be said are said when they can be, as many as there are sessions; of what was sent where, and used, the oldest is let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from struct import pack
from time import time
from typing import NamedTuple

from gateway.asks import Ask
from gateway.fleet import Fleet
from gateway.meters import Meters
from gateway.replicas.words import Flight, Home, Pinned, Placed, Told, Used, encode
from gateway.sessions import Session
from gateway.workers import Target
from kv_index.heard import Heard, marks, seed_of
from kv_index.index import PrefixIndex
from kv_index.pages import SYMBOL

MOST = 20_000
"""Prompts, and pins, that wait to be said."""
BATCH = 500
"""Of each kind in one batch."""
REFRESH = 0.25
"""Part of the idle time after which it is said of a session that it still goes on."""


class Names:
    """Names of targets in one batch, each told once."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}

    def of(self, name: str) -> int:
        """Its place."""
        return self._at.setdefault(name, len(self._at))

    @property
    def all(self) -> tuple[str, ...]:
        """In their places."""
        return tuple(self._at)


class _Sent(NamedTuple):
    """A prompt that was sent; lengths are pages."""

    target: Target
    symbols: bytes
    held: int
    """That the target had."""
    own: int
    """Of those, what is not known by hearsay only."""
    namespace: bytes
    chained: bool


class Said:
    """See the module's head; ``wake`` is called when there is something to say."""

    def __init__(
        self, fleet: Fleet, index: PrefixIndex, heard: Heard, meters: Meters, wake: Callable[[], None]
    ) -> None:
        self.fleet = fleet
        self.index = index
        self.heard = heard
        self.meters = meters
        self.wake = wake
        self.idle = 1800.0
        """Seconds after which sessions are forgotten."""
        self.hearing = False
        """What happens now was said by another."""
        self._homes: dict[bytes, Session] = {}
        self._ended: deque[bytes] = deque(maxlen=MOST)
        self._sent: deque[_Sent] = deque(maxlen=MOST)
        self._pinned: deque[Pinned] = deque(maxlen=MOST)
        self._told: set[str] = set()
        """Tenants of which it was said that some of their requests run."""

    # -- what happens -----------------------------------------------------------------------------------------------

    def bound(self, session: Session) -> None:
        """Its home is another."""
        if not self.hearing and not session.gone:
            self._homes[session.key] = session
            self.wake()

    def ended(self, session: Session) -> None:
        """Somebody ended it."""
        self._homes.pop(session.key, None)
        if not self.hearing:
            self._ended.append(session.key)
            self.wake()

    def turned(self, session: Session, now: float) -> None:
        """A turn of it ended."""
        if session.ends or session.asked or now - session.spoken > REFRESH * self.idle:
            self.bound(session)

    def pinned(self, tenant: str, name: str, worker: str, session: bytes | None) -> None:
        """A worker has some state."""
        self._pinned.append(Pinned(tenant, name, worker, session))
        self.wake()

    def sent(self, ask: Ask, target: Target) -> None:
        """Its prompt is being sent to a target that keeps it. What there is to say of it is made later, of many at a time: what
        is in the processor's caches then costs half."""
        held = ask.depth.get(target.id, 0)
        own = ask.own.get(target.id, held) if ask.own else held
        self._sent.append(_Sent(target, ask.pages.symbols, held, own, ask.namespace, ask.ids is not None))
        self.wake()

    @property
    def waiting(self) -> int:
        """Words."""
        return len(self._homes) + len(self._ended) + len(self._sent) + len(self._pinned)

    # -- saying it --------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether there is something to say."""
        return bool(self._homes or self._sent or self._ended or self._pinned or self.fleet.touched)

    def homes(self) -> list[Told]:
        """Of sessions that moved, or ended."""
        told = [Told(self._ended.popleft(), b"", b"") for _ in range(min(BATCH, len(self._ended)))]
        for key in list(islice(self._homes, BATCH)):
            session = self._homes.pop(key)
            if not session.gone:
                told.append(self.told(session))
        return told

    def told(self, session: Session) -> Told:
        """All of one session."""
        session.spoken = now = self.fleet.clock()
        home = Home(
            session.key,
            session.tenant,
            session.model,
            session.source,
            self._name(session.home),
            self._name(session.partner),
            session.why,
            session.moves,
            session.bound_at,
            time() - (now - session.used),
            session.turns,
            session.prompt_bytes,
            session.prompt_tokens,
            session.tail_tokens,
            session.parent,
            session.inner,
            session.root,
            session.ends,
            session.asked,
            session.last,
            tuple(session.told or ()),
            session.pins,
        )
        return Told(session.key, session.last, encode(home))

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name

    def placed(self, names: Names) -> list[Placed]:
        """What was sent where."""
        told = []
        for _ in range(min(BATCH, len(self._sent))):
            target, symbols, held, own, namespace, chained = self._sent.popleft()
            if target.id not in self.fleet.targets:
                continue
            full = len(symbols) // SYMBOL
            self.heard.sends(target.id, max(0, full - own), max(0, held - own))
            trust = self.index.trust.get(target.id)
            if trust is not None and trust.exact and trust.whole:
                # Its events tell the others more than this could.
                continue
            said = marks(symbols, held, seed_of(namespace), chained)
            if said:
                self.heard.says(target.id, said)
                told.append(Placed(names.of(target.name), max(0, full - held), pack(f"<{len(said)}Q", *said)))
        return told

    def pins(self) -> list[Pinned]:
        """What workers have."""
        return [self._pinned.popleft() for _ in range(min(BATCH, len(self._pinned)))]

    def flight(self, names: Names, whole: bool, now: float) -> list[Flight]:
        """What is in flight where something changed; ``whole``: everywhere."""
        targets = self.fleet.targets
        some: Iterable[Target | None] = targets.values() if whole else map(targets.get, self.fleet.touched)
        found = [
            Flight(
                names.of(each.name), each.running, round(max(0.0, each.ours(now)), 4), each.homes - each.homes_beside
            )
            for each in some
            if each is not None and (not whole or each.running or each.homes or each.id in self.fleet.touched)
        ]
        self.fleet.touched.clear()
        return found

    def used(self) -> list[Used]:
        """By tenants."""
        found = []
        for tenant, meter in self.meters.all():
            requests, prompt, computed = meter.unsaid()
            if requests or prompt or computed or meter.running or tenant in self._told:
                found.append(Used(tenant, requests, prompt, computed, meter.running))
                (self._told.add if meter.running else self._told.discard)(tenant)
        return found

    def everything(self, sessions: Iterable[Session]) -> Iterator[list[Told]]:
        """Of ``sessions``, for a newcomer."""
        waiting = iter(sessions)
        while some := list(islice(waiting, BATCH)):
            yield [self.told(each) for each in some if not each.gone and each.home is not None]
