"""What the gateway knows of a fleet, and where it sends a request: `gateway.routing` without HTTP.

The policy, the index and the learning of rates are those that ship. The rest mirrors the gateway and imports none of it:
sessions with homes that expire, charges that end at the first byte, rates learned from idle targets, beliefs corrected by
what answers report (`beliefs`), load reports that are as old as the last poll. Only what the gateway could see goes in: never
an engine's cache.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from load_tests.simulate.beliefs import Beliefs
from load_tests.simulate.cache import Move
from load_tests.simulate.conditions import Conditions
from load_tests.simulate.engine import Options
from load_tests.simulate.places import Asking, Decisions, Place, Reported, Sent, Session
from load_tests.simulate.traffic import Turn
from policies.base import Choice, Fleet, Policy, Rates, Role
from policies.calibrate import Calibration
from policies.demand import Demand
from policies.disaggregated import Sides, paired
from policies.least_load import LeastLoad

IDLE = 1800.0
"""Seconds after which an unused session is forgotten, as the gateway has it by default."""

SLOW_START = 30.0
FIRST_SHARE = 0.1
"""How fast a newcomer is trusted with its share, as the gateway has it."""

REUSED = 0.02
"""Weight of one request in the share of tokens that were found cached."""


class Looked(NamedTuple):
    """A request with what would be chosen for it."""

    request: Asking
    session: Session | None
    symbols: bytes
    depths: Mapping[int, int]
    choice: Choice


class Router:
    """``told``: engines whose events are heard. ``answers``: whether a session's next prompt carries the answer before it.
    ``learn`` False keeps the priors."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        options: Options,
        conditions: Conditions | None = None,
        *,
        told: Collection[int] = (),
        seed: int = 0,
        answers: bool = True,
        learn: bool = True,
        idle: float = IDLE,
    ) -> None:
        self.policy = policy
        self._decides = _in_pairs(policy) if conditions is not None and conditions.prefill else policy
        self.idle = idle
        self.learning = Calibration() if learn else None
        rates = self.learning.rates if self.learning else Rates()
        self.places = [Place(id_, rates) for id_ in range(workers)]
        conditions = conditions or Conditions()
        self._absent = conditions.joins()
        self._prefill = conditions.prefill
        for place in self.places:
            place.room = options.kv_tokens
            place.most_running = options.max_running
            if conditions.prefill:
                place.role = Role.PREFILL if place.id < conditions.prefill else Role.DECODE
        self.beliefs = Beliefs(workers, options, told, answers)
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.decisions = Decisions()
        self.demand = Demand()
        self._committed: Callable[[Asking, Choice], None] | None = getattr(policy, "committed", None)
        self._random = Random(seed)
        self._ordinal = 0
        self._see()

    def _see(self) -> None:
        """Who may be used."""
        able = [place for place in self.places if place.id not in self._absent]
        first = Fleet(able[: self._prefill]) if self._prefill else None
        self.fleet = Fleet(able[self._prefill :], first)

    # -- deciding ---------------------------------------------------------------------------------------------------

    def send(self, turn: Turn, name: str | None, now: float) -> Sent:
        """Choose a target for a request of the session ``name``, and commit the choice."""
        return self.commit(self.look(turn, name, now), now)

    def look(self, turn: Turn, name: str | None, now: float, queued: float = 0.0) -> Looked:
        """What would be chosen for a request of the session ``name``; ``queued``: as `Request` has it."""
        policy = self._decides
        request = Asking(draw=self._random.getrandbits(64), ordinal=self._ordinal, turn=turn, name=name, queued=queued)
        session = self._session(name, now) if name is not None and policy.needs_session else None
        if session is not None:
            request.session, request.home, request.siblings = session.hash, session.home, session.running
            request.partner = session.partner
        computing = self.fleet.targets if self.fleet.prefill is None else self.fleet.prefill.targets
        request.crowd, request.turns = self.demand.crowd(len(computing), now), self.demand.turns
        symbols, depths = self.beliefs.match(request, turn, session, now) if policy.needs_prefix else (b"", {})
        return Looked(request, session, symbols, depths, policy.choose(request, self.fleet, now))

    def commit(self, looked: Looked, now: float) -> Sent:
        """Make a choice true."""
        policy = self._decides
        request, session, symbols, depths, choice = looked
        turn = request.turn
        assert turn is not None, "made by `look`"
        self._ordinal += 1
        generates = self.places[choice.target.id]
        place = generates if choice.prefill is None else self.places[choice.prefill.id]
        reasons = self.decisions.reasons
        reasons[choice.reason] = reasons.get(choice.reason, 0) + 1
        self.decisions.pairs += place is not generates
        held = min(request.holdings.get(place.id, 0), turn.tokens)
        seconds = place.rates.prefill(turn.tokens - held, held)
        alone = not place.running and not place.foreign
        uncached = turn.tokens - held
        sent = Sent(place.id, turn, now, choice.reason, session, request.home, seconds, uncached, alone, depths)
        self.demand.sent(seconds, now)
        if session is not None:
            self.demand.turn(request.home is None)
            session.running += 1
            if session.home is None or choice.moves_home:
                self._bind(session, generates.id)
            if place is not generates and (session.partner is None or not request.siblings):
                self._bind_partner(session, place.id)
        if place is not generates:
            sent.decoder = generates.id
            sent.moved = turn.tokens - min(request.holdings.get(generates.id, 0), turn.tokens)
            generates.running += 1
            generates.active += turn.tokens
        if policy.needs_prefix:
            sent.symbols = symbols
            self.beliefs.sent(sent, request, now)
        if self._committed is not None:
            self._committed(request, choice)
        sent.expected = place.waits(now) + seconds
        place.running += 1
        place.charge(sent, seconds, now)
        place.pending += uncached
        place.active += turn.tokens
        return sent

    def _session(self, name: str, now: float) -> Session:
        sessions = self.sessions
        while sessions:
            oldest = next(iter(sessions))
            if sessions[oldest].used > now - self.idle:
                break
            gone = sessions.pop(oldest)
            self._bind(gone, None)
            self._bind_partner(gone, None)
        session = sessions.get(name)
        if session is None:
            session = sessions[name] = Session(xxh3_64_intdigest(name.encode()))
        session.used = now
        sessions.move_to_end(name)
        return session

    def _bind(self, session: Session, home: int | None) -> None:
        if session.home == home:
            return
        if session.home is not None:
            self.places[session.home].homes -= 1
            self.decisions.rehomed += home is not None
        session.home = home
        if home is not None:
            self.places[home].homes += 1

    def _bind_partner(self, session: Session, partner: int | None) -> None:
        if session.partner == partner:
            return
        if session.partner is not None:
            self.places[session.partner].homes -= 1
        session.partner = partner
        if partner is not None:
            self.places[partner].homes += 1

    # -- what comes back --------------------------------------------------------------------------------------------

    def handed(self, sent: Sent, cached: int, now: float) -> int:
        """The prompt is computed, but for what was ``cached``; who generates now."""
        assert sent.decoder is not None, "one of a pair"
        place = self.places[sent.target]
        alone = sent.alone and place.running == 1
        place.discharge(sent, now)
        place.pending -= sent.uncached
        place.running -= 1
        place.active -= sent.turn.tokens
        if alone and self.learning is not None:
            computed = sent.turn.tokens - cached
            if place.learn(self.learning, computed, cached, now - sent.at, now):
                self._see()
        place.recount()
        sent.handed = now
        sent.alone = self.places[sent.decoder].running == 1
        return sent.decoder

    def begun(self, sent: Sent, now: float) -> None:
        """The first byte came: the prefill is over."""
        sent.first = now
        place = self.places[sent.target if sent.decoder is None else sent.decoder]
        place.busy += 1
        if sent.decoder is not None:
            if sent.alone and sent.moved and self.learning is not None:
                self.learning.moved(sent.moved, now - sent.handed)
            sent.alone = False
        else:
            place.began(now - sent.at, sent.expected)
            sent.alone = sent.alone and place.running == 1
            place.discharge(sent, now)
            place.pending -= sent.uncached

    def ended(self, sent: Sent, cached: int, now: float) -> None:
        """The answer is complete, and says how much of the prompt was ``cached``."""
        assert sent.first is not None, "an answer ends after it began"
        place = self.places[sent.target if sent.decoder is None else sent.decoder]
        place.running -= 1
        place.busy -= 1
        place.active -= sent.turn.tokens
        place.reused += REUSED * (cached / sent.turn.tokens - place.reused)
        place.filled = self.beliefs.filled(place.id)
        place.recount()
        self.beliefs.ended(sent, cached, now)
        if sent.session is not None:
            sent.session.running = max(0, sent.session.running - 1)
        if sent.alone and self.learning is not None:
            uncached = sent.turn.tokens - cached
            if place.learn(self.learning, uncached, cached, sent.first - sent.at, now):
                self._see()

    def failed(self, sent: Sent) -> None:
        """Its engine died, and with it the request; `died` has been told."""
        self.beliefs.undone(sent)
        if sent.session is not None:
            sent.session.running = max(0, sent.session.running - 1)

    def polled(self, loads: Sequence[Reported], now: float) -> None:
        """Load reports of all targets; what is not ours is somebody else's."""
        shares = False
        for place, reported in zip(self.places, loads, strict=True):
            place.reported = reported
            running, waiting = reported.running, reported.waiting
            ours = place.running
            foreign = float(max(0, running + waiting - ours))
            others = max(0, waiting - (ours - int(place.busy - place.foreign)))
            place.queued = min(others, foreign) * place.rates.prefill(1000, 0)
            place.busy += foreign - place.foreign
            place.foreign = foreign
            place.recount()
            if place.joined is not None and place.share < 1.0:
                passed = (now - place.joined) / SLOW_START
                place.share = min(1.0, FIRST_SHARE + (1 - FIRST_SHARE) * passed)
                shares = True
            if self.learning is not None and place.forgive(self.learning, now):
                shares = True
        if shares:
            self._see()

    def heard(self, target: int, told: Sequence[Move]) -> None:
        """Events of ``target``."""
        self.beliefs.heard(target, told)

    # -- engines ----------------------------------------------------------------------------------------------------

    def joined(self, target: int, now: float) -> None:
        """A new engine serves, with an empty cache."""
        place = self.places[target]
        place.joined, place.share = now, FIRST_SHARE
        self._absent.discard(target)
        self._see()

    def died(self, target: int) -> None:
        """Its engine is gone, with everything that it held and ran."""
        self._absent.add(target)
        self.places[target].emptied()
        if self.learning is not None:
            self.places[target].forgive(self.learning, 0.0, always=True)
        self.beliefs.forget(target)
        self._see()


def _in_pairs(policy: Policy) -> Policy:
    """What ``policy`` does with prefill apart. One that does not ship is a router's rule for prefill engines: who generates is
    the least busy then."""
    shipped = paired(policy)
    return (
        shipped if type(policy).__module__.startswith("policies.") or shipped is policy else Sides(policy, LeastLoad())
    )
