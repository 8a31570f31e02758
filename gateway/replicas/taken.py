"""Making true here what others said."""

from __future__ import annotations

from time import time

from xxhash import xxh3_64_intdigest

from gateway.fleet import Fleet
from gateway.meters import Meters
from gateway.pins import Pins
from gateway.replicas.elsewhere import Elsewhere
from gateway.replicas.said import Said
from gateway.replicas.words import Batch, Home, Told, home_of
from gateway.series import Counter
from gateway.sessions import Session, Sessions
from gateway.workers import Target
from kv_index.heard import Heard


class Taken:
    """See the module's head."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        heard: Heard,
        meters: Meters,
        pins: Pins,
        said: Said,
        elsewhere: Elsewhere,
        conflicts: Counter,
    ) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.heard = heard
        self.meters = meters
        self.pins = pins
        self.said = said
        self.elsewhere = elsewhere
        self._conflicts = conflicts
        """Homes that two gave to one session, of which one had to yield."""
        self._targets: dict[str, Target] = {}

    def take(self, batch: Batch) -> None:
        """All of it but what is the speaker's alone: what it has in flight."""
        targets = [self.target(name) for name in batch.names]
        now = self.fleet.clock()
        self.said.hearing = True
        try:
            for told in batch.homes:
                self._home(told, now)
        finally:
            self.said.hearing = False
        for placed in batch.placed:
            target = targets[placed.target]
            if target is not None:
                self.heard.hear(target.id, memoryview(placed.marks).cast("Q"), placed.pages)
        for tenant, name, worker, session in batch.pinned:
            self.pins.put(tenant, name, worker, session)
        for used in batch.used:
            meter = self.meters.get(used.tenant)
            if meter is not None:
                meter.hears(used.requests, used.prompt, used.computed, now)

    def target(self, name: str) -> Target | None:
        """By name; ``None``: it is not here, or not yet."""
        found = self._targets.get(name)
        if found is not None and self.fleet.targets.get(found.id) is found:
            return found
        for target in self.fleet.targets.values():
            if target.name == name:
                self._targets[name] = target
                return target
        self._targets.pop(name, None)
        return None

    # -- homes ------------------------------------------------------------------------------------------------------

    def _home(self, told: Told, now: float) -> None:
        here = self.sessions.get(told.key)
        if not told.home:
            self.elsewhere.drop(told.key)
            if here is not None and not here.running:
                self.sessions.end(here)
        elif here is None:
            self.elsewhere.put(told.key, told.end, told.home)
        else:
            self._merge(here, home_of(told.home), now)

    def _merge(self, session: Session, home: Home, now: float) -> None:
        """It is known here, and goes on elsewhere."""
        used = now - max(0.0, time() - home.used)
        if used > session.used:
            self.sessions.touch(session, used)
        if (home.moves, -home.bound) > (session.moves, -session.bound_at):
            self._settle(session, home)
        if home.turns > session.turns or used > session.used:
            _learn(session, home)
            for ends, asks in ((home.ends, False), (home.asked, True)):
                for end in ends:
                    if end not in session.ends and end not in session.asked:
                        self.sessions.ends.remember(session, end, asks)
            session.last = home.last or session.last
            session.tail_target = session.home

    def _settle(self, session: Session, home: Home) -> None:
        """Its home is where the other says."""
        target = None if home.home is None else self.target(home.home)
        if home.home is not None and target is None:
            # It is nobody's here: what this one believes is as good.
            return
        if (
            session.home is not None
            and target is not None
            and target.id != session.home
            and session.moves == home.moves
        ):
            self._conflicts.add()
        if target is None:
            self.sessions.unbind(session)
        else:
            self.sessions.bind(session, target.id, home.why)
        partner = None if home.partner is None else self.target(home.partner)
        if partner is not None or home.partner is None:
            self.sessions.bind_partner(session, None if partner is None else partner.id)
        session.moves, session.bound_at = home.moves, home.bound

    # -- sessions of others that come here --------------------------------------------------------------------------

    def by_key(self, key: bytes, dry: bool) -> Session | None:
        """The session of a key, if another gateway has it."""
        return self._adopt(self.elsewhere.get(key), dry)

    def by_end(self, end: bytes) -> Session | None:
        """The session that said so much, if another gateway has it."""
        home = self.elsewhere.ends_with(end)
        if home is None:
            return None
        here = self.sessions.get(home.key)
        return here if here is not None else self._adopt(home, False)

    def _adopt(self, home: Home | None, dry: bool) -> Session | None:
        now, wall = self.fleet.clock(), time()
        if home is None or wall - home.used > self.sessions.idle:
            return None
        session = Session(
            home.key, home.source, home.tenant, home.model, xxh3_64_intdigest(home.key), parent=home.parent
        )
        session.inner, session.root, session.pins = home.inner, home.root, home.pins
        _learn(session, home)
        session.used = session.spoken = now - max(0.0, wall - home.used)
        if dry:
            target = None if home.home is None else self.target(home.home)
            session.home = None if target is None else target.id
            return session
        self.elsewhere.drop(home.key)
        session.ends, session.asked, session.last = home.ends, home.asked, home.last
        self.sessions.adopt(session)
        before, self.said.hearing = self.said.hearing, True
        try:
            self._settle(session, home)
        finally:
            self.said.hearing = before
        session.tail_target = session.home
        return session


def _learn(session: Session, home: Home) -> None:
    """How far it is."""
    session.turns = home.turns
    session.prompt_bytes, session.prompt_tokens = home.prompt_bytes, home.prompt_tokens
    session.tail_tokens = home.tail_tokens
