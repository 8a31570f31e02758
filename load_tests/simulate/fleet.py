"""The clock: requests that arrive, engines whose runs end, and the router between them.

Events happen in order of time, those of one time in order of being planned, so that a seed tells everything. A request
reaches its engine and a token its client at once: a network would add the same to all policies.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

from load_tests.simulate.engine import Engine, Options, Work
from load_tests.simulate.router import Router, Sent
from load_tests.simulate.traffic import Chain, Traffic
from policies.base import Policy

POLL = 1.0
"""Seconds between two load reports, which is how stale the router's last one may be."""


class BadTraffic(ValueError):
    """A request that no engine of this size can serve; the message names field and cure."""


@dataclass(slots=True, eq=False)
class Asked:
    """One request of a chain, from its arrival to its end. Seconds."""

    chain: Chain
    turn: int
    arrived: float
    sent: Sent
    worker: int
    router: Router
    first: float = 0.0
    ended: float = 0.0
    cached: int = 0


@dataclass(slots=True)
class Outcome:
    """What one policy did with one traffic."""

    policy: str
    engines: list[Engine]
    routers: list[Router]
    asked: list[Asked] = field(default_factory=list)
    """In order of arrival."""
    seconds: float = 0.0
    """Virtual time until the last answer."""


class Simulation:
    """One traffic on one fleet under one policy; `run` it once. ``routers``: gateways that share the fleet and tell each other
    nothing: each request comes to any of them, and what the others have in flight is known from load reports alone."""

    def __init__(
        self, traffic: Traffic, policy: Policy, workers: int, options: Options, *, seed: int = 0, routers: int = 1
    ) -> None:
        if workers < 1 or routers < 1:
            raise ValueError(f"workers and routers must be at least 1, not {workers} and {routers}")
        if options.block != traffic.block:
            raise ValueError(f"block must be that of the traffic, {traffic.block}, not {options.block}")
        check(traffic, options)
        self.traffic = traffic
        self.engines = [Engine(options) for _ in range(workers)]
        answers = any(turn.after for chain in traffic.chains for turn in chain.turns)
        self.routers = [
            Router(
                policy, workers, block=options.block, kv_tokens=options.kv_tokens, seed=seed + number, answers=answers
            )
            for number in range(routers)
        ]
        self._random = Random(seed)
        self._asked: list[Asked] = []
        self._events: list[tuple[float, int, int, Chain | None]] = []
        """(time, order, turn or engine, the turn's chain or ``None`` for an engine)."""
        self._order = 0
        self._polled = 0.0

    def run(self, tick: Callable[[int], None] = lambda done: None) -> Outcome:
        """Until everything is answered; ``tick`` gets the number of answers after each."""
        for each in self.traffic.chains:
            self._later(each.at, 0, each)
        now, done = 0.0, 0
        while self._events:
            now, _, number, chain = heappop(self._events)
            if now - self._polled >= POLL:
                self._poll(now)
            if chain is not None:
                self._arrive(chain, number, now)
            elif self.engines[number].due == now:
                ended = self._advance(number, now)
                if ended:
                    done += ended
                    tick(done)
        return Outcome(self.routers[0].policy.name, self.engines, self.routers, self._asked, now)

    def _later(self, at: float, number: int, chain: Chain | None) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, number, chain))

    def _arrive(self, chain: Chain, number: int, now: float) -> None:
        turn = chain.turns[number]
        router = self.routers[0] if len(self.routers) == 1 else self._random.choice(self.routers)
        sent = router.send(turn, chain.session, now)
        asked = Asked(chain, number, now, sent, sent.target, router)
        self._asked.append(asked)
        ids = (*turn.blocks, *turn.after) if turn.after else turn.blocks
        engine = self.engines[sent.target]
        before = engine.due
        engine.submit(Work(turn.tokens, turn.output, ids, asked), now)
        if engine.due is not None and engine.due != before:
            self._later(engine.due, sent.target, None)

    def _advance(self, number: int, now: float) -> int:
        engine = self.engines[number]
        begun, ended = engine.advance()
        for work in begun:
            work.owner.first = now
            work.owner.router.begun(work.owner.sent, now)
        for work in ended:
            asked: Asked = work.owner
            asked.ended, asked.cached = now, work.cached or 0
            asked.router.ended(asked.sent, asked.cached, now)
            following = asked.turn + 1
            if following < len(asked.chain.turns):
                self._later(now + asked.chain.turns[following].think, following, asked.chain)
        if engine.due is not None:
            self._later(engine.due, number, None)
        return len(ended)

    def _poll(self, now: float) -> None:
        self._polled = now
        loads = [engine.load for engine in self.engines]
        for router in self.routers:
            router.polled(loads)


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
