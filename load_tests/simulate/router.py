"""What the gateway knows of a fleet, and where it sends a request: `gateway.routing` without HTTP.

The policy, the index and the learning of rates are those that ship. The rest mirrors the gateway and imports none of it:
sessions with homes that expire, charges that end at the first byte, rates learned from idle targets, beliefs corrected by
what answers report, load reports that are as old as the last poll. Only what the gateway could see goes in: never an
engine's cache.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from struct import pack

from xxhash import xxh3_64_intdigest

from kv_index.blocks import BlockIndex
from kv_index.index import DOUBTED, PrefixIndex, Report
from kv_index.pages import SYMBOL
from kv_index.radix import Node, RadixIndex
from load_tests.simulate.traffic import Turn
from policies.base import Fleet, Policy, Rates, Request, Target
from policies.calibrate import Calibration

IDLE = 1800.0
"""Seconds after which an unused session is forgotten, as the gateway has it by default."""

START_TOKENS = 256
"""Tokens of a prompt's start that `prefix_hash` hashes: about a kilobyte."""

NAMESPACE = b"simulated"


class Place(Target):
    """One target with its charges."""

    __slots__ = ("charged", "queued")

    def __init__(self, id: int, rates: Rates) -> None:
        super().__init__(id=id, name=f"worker-{id}", rates=rates)
        self.charged = 0.0
        self.queued = 0.0

    def recount(self) -> None:
        """An idle target is exactly idle, so that idle targets tie."""
        if not self.running:
            self.charged = 0.0
            self.busy = self.foreign
        self.wait = self.charged + self.queued


@dataclass(slots=True, eq=False)
class Session:
    """A chain of requests as the gateway knows it."""

    hash: int
    home: int | None = None
    running: int = 0
    used: float = 0.0
    sent: float = 0.0
    sent_to: int | None = None
    symbols: bytes = b""
    tokens: int | None = None
    tail: int = 0
    """Tokens generated behind its last prompt, at ``tail_at``."""
    tail_at: int | None = None


@dataclass(slots=True, eq=False)
class Sent:
    """One request in flight."""

    target: int
    turn: Turn
    at: float
    reason: str
    session: Session | None
    home_before: int | None
    seconds: float
    alone: bool
    predicted: int | None = None
    routed: int = 0
    used: float | None = None
    symbols: bytes = b""
    pin: Node | None = None
    first: float | None = None


@dataclass(slots=True)
class Decisions:
    """What the router decided so far."""

    reasons: dict[str, int] = field(default_factory=dict)
    rehomed: int = 0
    """Times that a session's home changed."""


class Router:
    """``answers``: whether a session's next prompt carries the answer before it, as chats do. ``learn`` False keeps the
    priors."""

    def __init__(
        self,
        policy: Policy,
        workers: int,
        *,
        block: int,
        kv_tokens: int,
        seed: int = 0,
        answers: bool = True,
        learn: bool = True,
        idle: float = IDLE,
    ) -> None:
        self.policy = policy
        self.block = block
        self.answers = answers
        self.idle = idle
        self.learning = Calibration() if learn else None
        rates = self.learning.rates if self.learning else Rates()
        self.places = [Place(id_, rates) for id_ in range(workers)]
        self.fleet = Fleet(self.places)
        self.index = PrefixIndex(RadixIndex(), BlockIndex())
        for id_ in range(workers):
            self.index.set_size(id_, kv_tokens // block)
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.decisions = Decisions()
        self._random = Random(seed)
        self._ordinal = 0

    # -- deciding ---------------------------------------------------------------------------------------------------

    def send(self, turn: Turn, name: str | None, now: float) -> Sent:
        """Choose a target for a request of the session ``name``, and commit the choice."""
        policy = self.policy
        request = Request(draw=self._random.getrandbits(64), ordinal=self._ordinal)
        self._ordinal += 1
        session = self._session(name, now) if name is not None and policy.needs_session else None
        if session is not None:
            request.session, request.home, request.siblings = session.hash, session.home, session.running
        symbols = b""
        depths: Mapping[int, int] = {}
        if policy.needs_prefix:
            symbols = pack(f"<{len(turn.blocks)}Q", *turn.blocks)
            depths = self._match(request, turn, symbols, session)
        choice = policy.choose(request, self.fleet, now)
        place = self.places[choice.target.id]
        reasons = self.decisions.reasons
        reasons[choice.reason] = reasons.get(choice.reason, 0) + 1
        held = min(request.holdings.get(place.id, 0), turn.tokens)
        seconds = place.rates.prefill(turn.tokens - held, held)
        alone = not place.running and not place.foreign
        sent = Sent(place.id, turn, now, choice.reason, session, request.home, seconds, alone)
        if session is not None:
            session.running += 1
            if session.home is None or choice.moves_home:
                self._bind(session, place.id)
        if policy.needs_prefix:
            sent.predicted, sent.symbols = held, symbols
            sent.routed = max(held, depths.get(place.id, 0) * self.block)
            sent.pin = self.index.sent(NAMESPACE, symbols, place.id, now, False)
            if session is not None:
                sent.used = session.sent if session.sent_to == place.id else None
                session.sent, session.sent_to = now, place.id
        place.running += 1
        place.charged += seconds
        place.wait = place.charged + place.queued
        return sent

    def _session(self, name: str, now: float) -> Session:
        sessions = self.sessions
        while sessions:
            oldest = next(iter(sessions))
            if sessions[oldest].used > now - self.idle:
                break
            self._bind(sessions.pop(oldest), None)
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

    def _match(self, request: Request, turn: Turn, symbols: bytes, session: Session | None) -> Mapping[int, int]:
        """Fill in what targets are believed to hold; returns it in blocks."""
        start = max(1, START_TOKENS // self.block) * SYMBOL
        if len(symbols) >= start:
            request.prefix = xxh3_64_intdigest(symbols[:start])
        request.tokens = turn.tokens
        depths = self.index.radix.match(NAMESPACE, symbols).depths
        if not depths:
            return depths
        most = turn.tokens - 1
        tokens = {blocks: min(blocks * self.block, most) for blocks in set(depths.values())}
        holdings = {target: tokens[blocks] for target, blocks in depths.items()}
        for target in [target for target in self.index.low if target in holdings]:
            if not self.index.believed(target, request.home):
                del holdings[target]
        if session is not None:
            self._open_tail(session, symbols, depths, holdings, most)
        request.holdings = holdings
        return depths

    def _open_tail(
        self, session: Session, symbols: bytes, depths: Mapping[int, int], holdings: dict[int, int], most: int
    ) -> None:
        """What was generated behind the session's last prompt is held too, where this one goes on from there."""
        at, before = session.tail_at, session.symbols
        if (
            at is not None
            and session.tokens is not None
            and len(symbols) > len(before) > 0
            and depths.get(at, 0) * SYMBOL >= len(before)
            and symbols.startswith(before)
            and self.index.believed(at, at)
        ):
            # Engines find whole blocks.
            tail = (session.tokens + session.tail) // self.block * self.block
            holdings[at] = max(holdings.get(at, 0), min(tail, most))

    # -- what comes back --------------------------------------------------------------------------------------------

    def begun(self, sent: Sent, now: float) -> None:
        """The first byte came: the prefill is over."""
        sent.first = now
        place = self.places[sent.target]
        sent.alone = sent.alone and place.running == 1
        place.charged -= sent.seconds
        place.busy += 1
        place.wait = place.charged + place.queued

    def ended(self, sent: Sent, cached: int, now: float) -> None:
        """The answer is complete, and says how much of the prompt was ``cached``."""
        assert sent.first is not None, "an answer ends after it began"
        place = self.places[sent.target]
        place.running -= 1
        place.busy -= 1
        place.recount()
        session, turn = sent.session, sent.turn
        if sent.pin is not None:
            self.index.landed(NAMESPACE, sent.symbols, sent.target, sent.pin, sent.at, now)
        if sent.predicted is not None:
            self._report(sent, sent.predicted, cached, now)
        if session is not None:
            session.running = max(0, session.running - 1)
            session.symbols, session.tokens = sent.symbols, turn.tokens
            session.tail = max(0, turn.output - 1) if self.answers else 0
            session.tail_at = sent.target if self.answers else None
        if sent.alone and self.learning is not None:
            self.learning.first_byte(turn.tokens - cached, cached, sent.first - sent.at)

    def _report(self, sent: Sent, predicted: int, cached: int, now: float) -> None:
        trust = self.index.trust.get(sent.target)
        if trust is not None and -DOUBTED <= predicted - cached <= DOUBTED and trust.quiet:
            return
        at_home = sent.session is not None and sent.home_before == sent.target
        page = float(self.block)
        told = Report(predicted, cached, sent.turn.tokens, sent.routed, None, at_home, sent.used, page, self.block)
        self.index.report(sent.target, told, now)

    def polled(self, loads: Sequence[tuple[int, int]]) -> None:
        """Load reports of all targets, (running, waiting) each; what is not ours is somebody else's."""
        for place, (running, waiting) in zip(self.places, loads, strict=True):
            ours = place.running
            foreign = float(max(0, running + waiting - ours))
            others = max(0, waiting - (ours - int(place.busy - place.foreign)))
            place.queued = min(others, foreign) * place.rates.prefill(1000, 0)
            place.busy += foreign - place.foreign
            place.foreign = foreign
            place.recount()
