"""The clock: requests that arrive, engines whose runs end, and the router between them.

Events happen in order of time, those of one time in order of being planned, so that a seed tells everything. A request
reaches its engine and a token its client at once: a network would add the same to all policies. A request whose engine
dies is sent again, to another.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf
from random import Random

from load_tests.simulate.admitting import Admitting, Refused
from load_tests.simulate.cache import Move
from load_tests.simulate.conditions import Change, Conditions, Fate
from load_tests.simulate.engine import Engine, Options, Work
from load_tests.simulate.places import Reported, Sent
from load_tests.simulate.router import Router
from load_tests.simulate.traffic import Chain, Traffic, Turn
from policies.base import Policy

PUMP = 0.02
"""Seconds between two looks at what waits, while anything does."""


class BadTraffic(ValueError):
    """A request that no engine of this size can serve; the message names field and cure."""


@dataclass(slots=True, eq=False)
class Asked:
    """One request of a chain, from its arrival to its end. Seconds; infinite until it happens."""

    chain: Chain
    place: int
    """Of its chain in the traffic."""
    turn: int
    arrived: float
    router: Router
    sent: Sent
    worker: int
    decoder: int | None = None
    """Who generates, if that is somebody else."""
    first: float = inf
    ended: float = inf
    cached: int = 0
    again: int = 0
    """How often it had to be sent again."""

    @property
    def asks(self) -> Turn:
        """What is asked."""
        return self.chain.turns[self.turn]


@dataclass(slots=True)
class Outcome:
    """What one policy did with one traffic."""

    policy: str
    engines: list[Engine]
    routers: list[Router]
    prefill: int = 0
    """So many of the engines only compute prompts; 0: all do both."""
    asked: list[Asked] = field(default_factory=list)
    """In the order in which they were sent: that of arrival, where nobody waits for admission."""
    refused: list[Refused] = field(default_factory=list)
    seconds: float = 0.0
    """Virtual time until the last answer."""


class Simulation:
    """One traffic on one fleet under one policy; `run` it once."""

    def __init__(
        self,
        traffic: Traffic,
        policy: Policy,
        workers: int,
        options: Options,
        *,
        seed: int = 0,
        conditions: Conditions | None = None,
        learn: bool = True,
        admitting: Admitting | None = None,
    ) -> None:
        """``admitting``: the queue in front of the fleet; without one every request is sent when it arrives."""
        self.conditions = conditions = conditions or Conditions()
        self.admitting = admitting
        self._pumps = False
        if workers < 1 or not 0 <= conditions.prefill < max(workers, 1):
            raise ValueError(
                f"workers must be at least 1, and some must be left to generate, not {workers} and {conditions.prefill}"
            )
        conditions.check(workers)
        if options.block != traffic.block:
            raise ValueError(f"block must be that of the traffic, {traffic.block}, not {options.block}")
        check(traffic, options)
        self.traffic = traffic
        rates = options.rates
        self._options = [
            replace(options, events=conditions.events, rates=rates.scaled(1 / conditions.speeds.get(number, 1.0)))
            for number in range(workers)
        ]
        self.engines = [Engine(each) for each in self._options]
        if getattr(policy, "shares_everything", False):
            everything: OrderedDict[int, None] = OrderedDict()
            for engine in self.engines:
                engine.cache.share(everything)
        self._told = range(workers - conditions.silent if conditions.events else 0)
        answers = any(turn.after for chain in traffic.chains for turn in chain.turns)
        self.routers = [
            Router(
                policy, workers, options, conditions, told=self._told, seed=seed + number, answers=answers, learn=learn
            )
            for number in range(conditions.routers)
        ]
        self._random = Random(seed)
        self._asked: list[Asked] = []
        self._events: list[tuple[float, int, Callable[[float], int]]] = []
        """(time, order, what happens; it returns how many requests ended)."""
        self._order = 0
        self._polled = 0.0
        self._followers: dict[tuple[int, int], list[int]] = {}
        self._over: set[int] = set()
        self._waiting: dict[int, list[tuple[int, int]]] = {}
        """Chain that must end -> (chain, turn) that wait for it."""

    def run(self, tick: Callable[[int], None] = lambda done: None) -> Outcome:
        """Until everything is answered; ``tick`` gets the number of answers after each."""
        for change in self.conditions.changes:
            self._at(change.at, lambda now, change=change: self._change(change, now))  # type: ignore[misc]
        for place, chain in enumerate(self.traffic.chains):
            if chain.follows is None:
                self._arrival(chain.at, place, 0)
            else:
                self._followers.setdefault(chain.follows, []).append(place)
        now, done = 0.0, 0
        while self._events:
            now, _, happens = heappop(self._events)
            if now - self._polled >= self.conditions.poll:
                self._poll(now)
            ended = happens(now)
            if ended:
                done += ended
                tick(done)
        policy = self.routers[0].policy.name
        refused = [] if self.admitting is None else self.admitting.refused
        return Outcome(policy, self.engines, self.routers, self.conditions.prefill, self._asked, refused, now)

    def _at(self, at: float, happens: Callable[[float], int]) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, happens))

    def _poll(self, now: float) -> None:
        self._polled = now
        loads = [Reported(*engine.load, engine.cache.used / engine.cache.capacity) for engine in self.engines]
        for router in self.routers:
            router.polled(loads, now)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _arrival(self, at: float, place: int, turn: int) -> None:
        self._at(at, lambda now: self._arrive(place, turn, now))

    def _arrive(self, place: int, number: int, now: float) -> int:
        chain = self.traffic.chains[place]
        router = self.routers[0] if len(self.routers) == 1 else self._random.choice(self.routers)
        name = chain.session if self.conditions.named else None
        if self.admitting is None:
            self._dispatch(place, number, router, router.send(chain.turns[number], name, now), now, now)
            return 0
        sent = self.admitting.arrives(router, place, number, chain, name, now)
        if sent is not None:
            self._dispatch(place, number, router, sent, now, now)
        self._pump_later(now)
        return 0

    def _dispatch(self, place: int, number: int, router: Router, sent: Sent, arrived: float, now: float) -> None:
        asked = Asked(self.traffic.chains[place], place, number, arrived, router, sent, sent.target)
        self._asked.append(asked)
        self._submit(asked, now)

    def _pump(self, now: float) -> None:
        """Send what can be sent of what waits."""
        if self.admitting is not None:
            while (left := self.admitting.leaves(now)) is not None:
                owner, sent = left
                self._dispatch(owner.place, owner.number, owner.router, sent, owner.arrived, now)
            self._pump_later(now)

    def _pump_later(self, now: float) -> None:
        """What passes of the work in front of targets makes room too."""
        if self.admitting is None or not len(self.admitting.queue) or self._pumps:
            return
        self._pumps = True

        def pump(now: float) -> int:
            self._pumps = False
            self._pump(now)
            return 0

        self._at(now + PUMP, pump)

    def _submit(self, asked: Asked, now: float) -> None:
        turn = asked.asks
        # Prefill engines compute prompts, and one token to end with.
        alone = asked.sent.decoder is None
        ids = (*turn.blocks, *turn.after) if turn.after and alone else turn.blocks
        work = Work(turn.tokens, turn.output if alone else 1, ids, asked)
        if self.conditions.held:
            work.kept = asked.chain.session
        self._give(asked.worker, work, now)

    def _give(self, worker: int, work: Work, now: float) -> None:
        engine = self.engines[worker]
        before = engine.due
        engine.submit(work, now)
        if engine.due != before:
            self._run(worker, now)

    def _run(self, worker: int, now: float) -> None:
        """The engine's present run ends when it says; until then its events are told."""
        engine = self.engines[worker]
        if engine.due is not None:
            self._at(engine.due, lambda now: self._advance(worker, engine, now))
        journal = engine.cache.journal
        if journal:
            told, engine.cache.journal = journal, []
            if worker in self._told:
                self._at(now + self.conditions.lag, lambda now: self._tell(worker, engine, told))

    def _tell(self, worker: int, engine: Engine, told: list[Move]) -> int:
        if self.engines[worker] is engine:
            for router in self.routers:
                router.heard(worker, told)
        return 0

    def _advance(self, worker: int, engine: Engine, now: float) -> int:
        if engine.due != now or self.engines[worker] is not engine:
            return 0
        begun, ended = engine.advance()
        whole = self.conditions.prefill == 0
        for work in begun:
            asked: Asked = work.owner
            if whole or worker >= self.conditions.prefill:
                if asked.first == inf:
                    asked.first = now
                asked.router.begun(asked.sent, now)
        done = 0
        for work in ended:
            if whole or worker >= self.conditions.prefill:
                self._end(work.owner, work, now)
                done += 1
            else:
                self._transfer(work.owner, work, now)
        self._run(worker, now)
        if begun or ended:
            self._pump(now)
        return done

    def _transfer(self, asked: Asked, work: Work, now: float) -> None:
        """The prompt is computed; its KV goes to an engine that generates, as far as it is not there."""
        turn = asked.asks
        asked.cached = work.cached or 0
        asked.decoder = asked.router.handed(asked.sent, asked.cached, now)
        ids = (*turn.blocks, *turn.after) if turn.after else turn.blocks
        engine = self.engines[asked.decoder]
        held = engine.cache.match(ids, len(turn.blocks)) * engine.options.block
        moved = Work(turn.tokens, turn.output, ids, asked, transferred=True)
        decoder = asked.decoder
        rates = engine.options.rates
        seconds = rates.handshake + (turn.tokens - held) * rates.transfer

        def arrived(now: float) -> int:
            self._give(decoder, moved, now)
            return 0

        self._at(now + seconds, arrived)

    def _end(self, asked: Asked, work: Work, now: float) -> None:
        asked.ended = now
        if asked.decoder is None:
            asked.cached = work.cached or 0
        asked.router.ended(asked.sent, asked.cached, now)
        if self.admitting is not None:
            self.admitting.ended(asked.sent, asked.asks.output)
        following = asked.turn + 1
        for place in self._followers.get((asked.place, asked.turn), ()):
            self._next(place, 0, now)
        if following < len(asked.chain.turns):
            self._next(asked.place, following, now)
            return
        self._over.add(asked.place)
        if asked.chain.session is not None and self.conditions.held:
            for engine in self.engines:
                engine.left(asked.chain.session)
        for place, number in self._waiting.pop(asked.place, ()):
            self._next(place, number, now)

    def _next(self, place: int, number: int, now: float) -> None:
        """The turn comes its think time (a chain that follows: its delay) after everything that it awaits."""
        chain = self.traffic.chains[place]
        turn = chain.turns[number]
        for other in turn.awaits:
            if other not in self._over:
                self._waiting.setdefault(other, []).append((place, number))
                return
        self._arrival(now + (turn.think if number else chain.at), place, number)

    # -- engines ----------------------------------------------------------------------------------------------------

    def _change(self, change: Change, now: float) -> int:
        worker = change.worker
        if change.fate is Fate.JOINS:
            for router in self.routers:
                router.joined(worker, now)
            return 0
        lost = self.engines[worker].unfinished
        totals = self.engines[worker].totals
        self.engines[worker] = Engine(self._options[worker])
        # What it did stays counted.
        self.engines[worker].totals = totals
        for router in self.routers:
            router.died(worker)
        for work in lost:
            asked: Asked = work.owner
            asked.router.failed(asked.sent)
            asked.sent = asked.router.send(asked.asks, asked.chain.session if self.conditions.named else None, now)
            asked.worker, asked.again = asked.sent.target, asked.again + 1
            self._submit(asked, now)
        return 0


def check(traffic: Traffic, options: Options) -> None:
    """Raises `BadTraffic` for a request that does not fit into an engine's KV."""
    size, most = options.block, options.kv_tokens // options.block
    largest = max((turn.tokens + turn.output for chain in traffic.chains for turn in chain.turns), default=0)
    if -(-largest // size) > most:
        needed = -(-largest // size) * size
        raise BadTraffic(
            f"--kv-tokens {options.kv_tokens} is too small: a request of {traffic.name} has {largest} tokens, prompt and "
            f"answer; give at least --kv-tokens {needed}"
        )
