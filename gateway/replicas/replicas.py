"""One gateway's part among several: who else is there, who is silent, what was missed.

Each batch is numbered. A number that is missing is a batch that is lost: what is in flight is told whole from time to time,
and for the rest the speaker is asked for all that it knows, which a newcomer asks of whomever it hears first. Who is silent for
some seconds is gone, with all that it had in flight; what it said of homes and caches stays true.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from os import urandom
from struct import Struct
from typing import Protocol

import msgspec

from gateway.fleet import Fleet
from gateway.meters import Meters
from gateway.metrics import Metrics
from gateway.pins import Pins
from gateway.replicas.elsewhere import Elsewhere
from gateway.replicas.said import BATCH, Names, Said
from gateway.replicas.taken import Taken
from gateway.replicas.words import VERSION, Batch, Placed, Told, decode, encode, home_of
from gateway.sessions import Session, Sessions
from gateway.workers import Target
from kv_index.heard import Heard
from kv_index.index import PrefixIndex

log = logging.getLogger("warmroute")

FLUSH = 0.04
"""Seconds for which what there is to say is gathered."""
BEAT = 0.5
"""Seconds after which something is said in any case, ..."""
WHOLE = 4
"""... and once in so many times all that is in flight."""
SILENT = 3.0
"""Seconds without a word after which a speaker is gone."""
ALONE = 1.5
"""Seconds after which it is said that nobody is there to be asked."""
ASKED = 10.0
"""Seconds that an answer to a newcomer may take, and between two questions."""
SESSIONS, MARKS = 20_000, 50_000
"""That a newcomer is told of: those used last."""


class Bus(Protocol):
    """A way to the others."""

    name: str

    async def start(self) -> None:
        """Raises `OSError` if it cannot be had at all."""
        ...

    async def stop(self) -> None:
        """No more."""
        ...

    def say(self, data: bytes, to: bytes | None, batch: Batch) -> None:
        """``data`` is ``batch``: to one, or to all, soon; waits for nobody."""
        ...

    @property
    def troubled(self) -> str | None:
        """Why nobody can be heard now; ``None``: they can."""
        ...


@dataclass(slots=True)
class Peer:
    """Another speaker."""

    who: bytes
    host: bytes
    number: int
    """Of its last batch."""
    at: float
    """When that came."""
    flight: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """target -> what it has in flight there: requests, seconds, and homes."""
    running: dict[str, int] = field(default_factory=dict)
    """By tenants."""
    asked_at: float = -ASKED
    missed: bool = False


class Replicas:
    """See the module's head. ``await start()``, ``await stop()``."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        meters: Meters,
        pins: Pins,
        metrics: Metrics,
        *,
        busy: Callable[[], bool],
        host: bytes,
        alone: bool,
    ) -> None:
        """``busy``: whether something is in flight here. ``host``: what gateways of one host have in common. ``alone``: that
        nobody else is there is no trouble."""
        self.who = urandom(8)
        self.host = host
        self.alone = alone
        self._busy = busy
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.meters = meters
        self.heard = Heard(index.size)
        self.said = Said(fleet, index, self.heard, meters, self.wake)
        self.said.idle = sessions.idle
        self.elsewhere = Elsewhere(max(1000, sessions.most // 2))
        self.taken = Taken(
            fleet, sessions, self.heard, meters, pins, self.said, self.elsewhere, metrics.replicas_conflicts
        )
        self.buses: list[Bus] = []
        self.peers: dict[bytes, Peer] = {}
        self.deaf: str | None = None
        """Why others are not heard; ``None``: they are, or there need not be any."""
        self._batches, self._bytes = metrics.replicas_batches, metrics.replicas_bytes
        self._left = metrics.replicas_left
        self._number = 0
        self._asks = b""
        self._began = fleet.clock()
        self._caught_up = False
        self._beats = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self._answered: dict[bytes, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises `OSError` if a bus cannot be had."""
        self._loop = asyncio.get_running_loop()
        self._began = self.fleet.clock()
        for bus in self.buses:
            await bus.start()
        self._task = self._loop.create_task(self._beat(), name="replicas")

    async def stop(self) -> None:
        """Leave: the others count it no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        if self._task is None:
            return
        for task in (self._task, *self._answers):
            task.cancel()
        await asyncio.gather(self._task, *self._answers, return_exceptions=True)
        self._task = None
        while self.said.waits:
            self._say(self._batch())
        self._say(self._batch(last=True))
        for bus in self.buses:
            await bus.stop()

    @property
    def newcomer(self) -> bool:
        """It may not know yet what others know."""
        return not self._caught_up and (bool(self.peers) or self.fleet.clock() - self._began < ALONE)

    # -- saying -----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """There is something to say."""
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(FLUSH, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self.said.waits:
            self._say(self._batch())
        if self.said.waits or self._busy():
            # What ends is said as soon as what begins.
            self.wake()

    def _batch(self, whole: bool = False, last: bool = False) -> Batch:
        names, said = Names(), self.said
        self._number += 1
        placed, flight = said.placed(names), said.flight(names, whole, self.fleet.clock())
        return Batch(
            VERSION,
            self.who,
            self.host,
            self._number,
            self._asks,
            names.all,
            said.homes(),
            placed,
            said.pins(),
            flight,
            said.used(),
            last,
        )

    def _say(self, batch: Batch, to: bytes | None = None) -> None:
        data = encode(batch)
        self._batches.add(("said",))
        self._bytes.add(("said",), len(data))
        peer = None if to is None else self.peers.get(to)
        near = peer is not None and peer.host == self.host and bool(self.host)
        for bus in self.buses[:1] if near else self.buses:
            bus.say(data, to, batch)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                now = self.fleet.clock()
                self._beats += 1
                self._sweep(now)
                self._ask(now)
                self._say(self._batch(whole=self._beats % WHOLE == 0))
            except Exception:
                log.exception("telling other gateways failed")

    # -- hearing ----------------------------------------------------------------------------------------------------

    def hear(self, data: bytes) -> None:
        """A batch came, from whomever."""
        try:
            batch = decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._batches.add(("unread",))
            return
        if batch.who == self.who:
            return
        if batch.version != VERSION:
            self._batches.add(("unread",))
            return
        now = self.fleet.clock()
        if batch.number and not self._counts(batch, now):
            return
        self._batches.add(("heard",))
        self._bytes.add(("heard",), len(data))
        try:
            self.taken.take(batch)
            if batch.number:
                self._flying(self.peers[batch.who], batch)
        except Exception:
            # Of another's making: it must not end what brings the next ones.
            self._batches.add(("unread",))
            log.exception("what another gateway said cannot be taken")
        if batch.asks == self.who:
            self._answer(batch.who, now)
        if not batch.number and batch.last:
            self._asks, self._caught_up = b"", True
        elif batch.last:
            self._gone(self.peers[batch.who])

    def _counts(self, batch: Batch, now: float) -> bool:
        """Whether it is new."""
        peer = self.peers.get(batch.who)
        if peer is None:
            peer = self.peers[batch.who] = Peer(batch.who, batch.host, batch.number - 1, now)
            self._shared()
        elif batch.number <= peer.number:
            return False
        elif batch.number > peer.number + 1:
            self._batches.add(("lost",), batch.number - peer.number - 1)
            peer.missed = True
        peer.number, peer.at = batch.number, now
        return True

    def _flying(self, peer: Peer, batch: Batch) -> None:
        for at, running, waits, homes in batch.flight:
            target = self.taken.target(batch.names[at])
            if target is None:
                continue
            if running or homes or waits:
                peer.flight[target.id] = running, waits, homes
            else:
                peer.flight.pop(target.id, None)
            self._sum(target)
        if batch.used:
            for used in batch.used:
                peer.running[used.tenant] = used.running
                meter = self.meters.get(used.tenant)
                if meter is not None:
                    meter.beside = sum(each.running.get(used.tenant, 0) for each in self.peers.values())

    def _sum(self, target: Target) -> None:
        """What all the others have in flight on it."""
        told = [each.flight[target.id] for each in self.peers.values() if target.id in each.flight]
        homes = sum(each[2] for each in told)
        target.homes += homes - target.homes_beside
        target.homes_beside = homes
        target.beside = float(sum(each[0] for each in told)), sum(each[1] for each in told)
        target.others()

    def remember(self, homes: dict[bytes, bytes]) -> None:
        """Sessions as they were said once."""
        told = []
        for key, home in homes.items():
            with suppress(msgspec.DecodeError):
                told.append(Told(key, home_of(home).last, home))
        self.taken.take(Batch(VERSION, b"", b"", 0, homes=told))

    def removed(self, target: int) -> None:
        """It is there no more."""
        self.heard.remove(target)
        for peer in self.peers.values():
            peer.flight.pop(target, None)

    # -- who is there -----------------------------------------------------------------------------------------------

    def _gone(self, peer: Peer) -> None:
        if self.peers.pop(peer.who, None) is None:
            return
        self._left.add()
        for id_ in peer.flight:
            target = self.fleet.targets.get(id_)
            if target is not None:
                self._sum(target)
        for tenant in peer.running:
            meter = self.meters.get(tenant)
            if meter is not None:
                meter.beside = sum(each.running.get(tenant, 0) for each in self.peers.values())
        self._shared()

    def _shared(self) -> None:
        """How many count for the tenants' limits."""
        for _, meter in self.meters.all():
            meter.sharing = 1 + len(self.peers)

    def _sweep(self, now: float) -> None:
        for peer in [peer for peer in self.peers.values() if now - peer.at > SILENT]:
            log.warning("another gateway (%s) is silent: what it had in flight counts no more", peer.who.hex())
            self._gone(peer)
        self._shared()
        for target in self.fleet.targets.values():
            self.index.crowd(target.id, self.heard.ours(target.id))
        troubles = [f"{bus.name}: {told}" for bus in self.buses if (told := bus.troubled) is not None]
        if not self.alone and not self.peers and now - self._began > SILENT:
            troubles.append("nobody is heard")
        told = "; ".join(troubles) or None
        if (told is None) != (self.deaf is None):
            if told is None:
                log.warning("other gateways are heard again")
            else:
                log.warning("other gateways are not heard (%s): this one goes on alone", told)
        self.deaf = told

    # -- catching up ------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Whom to ask for what was missed."""
        if self._asks:
            peer = self.peers.get(self._asks)
            if peer is not None and now - peer.asked_at < ASKED:
                return
            self._asks = b""
        wanted = [peer for peer in self.peers.values() if peer.missed and now - peer.asked_at >= ASKED]
        if not wanted and not self._caught_up and self.peers:
            wanted = [min(self.peers.values(), key=lambda each: (each.asked_at, each.who))]
        if wanted:
            peer = wanted[0]
            peer.asked_at, peer.missed = now, False
            self._asks = peer.who

    def _answer(self, who: bytes, now: float) -> None:
        if self._loop is None or now - self._answered.get(who, -ASKED) < ASKED:
            return
        self._answered = {each: at for each, at in self._answered.items() if now - at < ASKED} | {who: now}
        task = self._loop.create_task(self._tell(who), name="answer")
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _tell(self, who: bytes) -> None:
        try:
            await self._tell_all(who)
        except Exception:
            log.exception("telling another gateway what it missed failed")

    async def _tell_all(self, who: bytes) -> None:
        """All that a newcomer needs, a little at a time."""

        def chunk(**told: object) -> Batch:
            return Batch(VERSION, self.who, self.host, 0, **told)  # type: ignore[arg-type]

        sessions: list[Session] = self.sessions.recent(SESSIONS)
        for some in self.said.everything(reversed(sessions)):
            self._say(chunk(homes=some), who)
            await asyncio.sleep(0.002)
        marks = list(self.heard.recent(MARKS))
        one = Struct("<Q").pack
        for at in range(0, len(marks), BATCH):
            names, targets = Names(), self.fleet.targets
            placed = [
                Placed(names.of(targets[target].name), 0, one(said))
                for said, holding in marks[at : at + BATCH]
                for target in holding
                if target in targets
            ]
            self._say(chunk(names=names.all, placed=placed), who)
            await asyncio.sleep(0.002)
        self._say(chunk(last=True), who)
