"""Traffic as chains of turns, prompts as ids of blocks: what the simulation reads, made of traces and generators.

Two ways of arriving: *open*, each request at its own time whatever became of the others, and *causal*, each turn its think
time after the one before it ended. An open request is a chain of one turn. Chains may hang on each other: one `Chain.follows`
a turn of another (a sub-agent that is called, a burst that goes on from a result), a turn `Turn.awaits` whole chains.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import ceil, floor


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: ``blocks`` of its prompt's full blocks, ``tokens`` of the whole prompt, ``output`` tokens generated,
    ``after`` the blocks that the answer fills, ``think`` seconds after the turn before it ended."""

    blocks: tuple[int, ...]
    tokens: int
    output: int
    after: tuple[int, ...] = ()
    think: float = 0.0
    awaits: tuple[int, ...] = ()
    """Places of chains in the traffic, all of whose turns must have ended too before the think time begins; of a first turn
    that follows, before the chain's delay begins."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Turns one after another, the first at ``at`` seconds."""

    at: float
    turns: tuple[Turn, ...]
    session: str | None = None
    parent: str | None = None
    """The session that called this one, for sub-agents."""
    follows: tuple[int, int] | None = None
    """Place of a chain in the traffic and number of its turn after whose end, ``at`` seconds later, this one begins."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """All chains, with the tokens of one ``block``."""

    name: str
    block: int
    chains: Sequence[Chain]

    @property
    def requests(self) -> int:
        """Turns of all chains."""
        return sum(len(chain.turns) for chain in self.chains)

    def limited(self, limit: int | None) -> "Traffic":
        """Chains by their begin until they have ``limit`` requests; the last may be cut short.

        A chain whose turn to follow was cut falls away, and nobody awaits what is gone.
        """
        if limit is None or limit >= self.requests:
            return self
        turns: dict[int, tuple[Turn, ...]] = {}
        left = limit
        for place in begun(self.chains):
            if left <= 0:
                break
            chain = self.chains[place]
            if chain.follows is None or chain.follows[1] < len(turns.get(chain.follows[0], ())):
                turns[place] = chain.turns[:left]
                left -= len(turns[place])
        moved = {place: number for number, place in enumerate(turns)}
        return Traffic(self.name, self.block, [_moved(self.chains[place], turns[place], moved) for place in turns])


def _moved(chain: Chain, turns: tuple[Turn, ...], moved: dict[int, int]) -> Chain:
    """``chain`` with some of its turns, in a traffic whose chains have other places."""
    kept = tuple(
        replace(turn, awaits=tuple(moved[place] for place in turn.awaits if place in moved)) if turn.awaits else turn
        for turn in turns
    )
    follows = None if chain.follows is None else (moved[chain.follows[0]], chain.follows[1])
    return replace(chain, turns=kept, follows=follows)


def begun(chains: Sequence[Chain]) -> list[int]:
    """Places of ``chains`` in the order in which they would begin if answers took no time: what follows comes after what it
    follows. A chain that waits for itself never begins, and is left out."""
    ready: list[tuple[float, int, int, int]] = []
    hangs: dict[tuple[int, int], list[int]] = {}
    """By the turn that has to end: places of chains that follow it."""
    awaited: dict[int, list[tuple[int, int]]] = {}
    """By the chain that has to end: turns that await it."""
    missing: dict[tuple[int, int], int] = {}
    for place, chain in enumerate(chains):
        if chain.follows is None:
            ready.append((chain.at, place, place, -1))
        else:
            hangs.setdefault(chain.follows, []).append(place)
        for number, turn in enumerate(chain.turns):
            missing[place, number] = 1 + len(set(turn.awaits))
            for other in set(turn.awaits):
                awaited.setdefault(other, []).append((place, number))
    heapify(ready)
    found: list[int] = []
    order = len(chains)
    while ready:
        now, _, place, number = heappop(ready)
        if number == 0:
            found.append(place)
        freed = [(place, number + 1)] if number + 1 < len(chains[place].turns) else awaited.get(place, [])[:]
        freed += [(other, 0) for other in hangs.get((place, number), ())]
        for other, next_ in freed:
            missing[other, next_] -= 1
            if not missing[other, next_]:
                follows = chains[other].follows is not None
                delay = chains[other].turns[next_].think if next_ else chains[other].at if follows else 0.0
                order += 1
                heappush(ready, (now + delay, order, other, next_))
    return found


FACTORS = (0.001, 1000.0)
"""What traffic may be scaled by, at least and at most."""


class BadScale(ValueError):
    """A factor that scales nothing; the message names it and the cure."""


def scaled(traffic: Traffic, *, tokens: float = 1.0, think: float = 1.0, rate: float = 1.0) -> Traffic:
    """The same traffic with prompts and answers ``tokens`` times as long, pauses ``think`` times as long (think times and the
    delays of what follows), and ``rate`` times as many arrivals a second. Raises `BadScale`.

    Prompts share prefixes as before: which blocks go, or are many, depends on their place alone.
    """
    for name, factor in (("tokens", tokens), ("think", think), ("rate", rate)):
        if not FACTORS[0] <= factor <= FACTORS[1]:
            raise BadScale(f"{name}={factor:g}: give a number above 0, like {name}=0.5, from 0.001 to 1000")
    if tokens == think == rate == 1.0:
        return traffic
    chains = [
        replace(
            chain,
            at=chain.at / rate if chain.follows is None else chain.at * think,
            turns=tuple(_scaled(turn, traffic.block, tokens, think) for turn in chain.turns),
        )
        for chain in traffic.chains
    ]
    return Traffic(traffic.name, traffic.block, chains)


def _scaled(turn: Turn, block: int, tokens: float, think: float) -> Turn:
    if tokens == 1.0:
        return replace(turn, think=turn.think * think)
    blocks = _stretched(turn.blocks, 0, tokens)
    after = _stretched(turn.after, len(turn.blocks), tokens)
    size = max(1, floor(turn.tokens * tokens), len(blocks) * block)
    if len(turn.blocks) == turn.tokens // block:
        # What stands behind the last full block must not have become a block: it has no id.
        size = max(1, min(size, (len(blocks) + 1) * block - 1))
    output = max(round(turn.output * tokens), min(1, turn.output))
    if after:
        output = max(output, (len(blocks) + len(after)) * block - size)
    return replace(turn, blocks=blocks, tokens=size, output=output, after=after, think=turn.think * think)


def _stretched(blocks: tuple[int, ...], first: int, factor: float) -> tuple[int, ...]:
    """``blocks``, of which the foremost is the prompt's number ``first``, as often as its place says."""
    most = ceil(factor)
    return tuple(
        id_ * most + copy
        for place, id_ in enumerate(blocks, first)
        for copy in range(floor((place + 1) * factor) - floor(place * factor))
    )


@dataclass(slots=True)
class Naming:
    """Ids for blocks such that an id tells all that stands before it."""

    _known: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    _next: int = 0

    def fresh(self, blocks: int) -> tuple[int, ...]:
        """Ids that nothing else has, for blocks that nobody else asks for."""
        first, self._next = self._next, self._next + blocks
        return tuple(range(first, self._next))

    def chained(self, names: Iterable[Hashable]) -> tuple[int, ...]:
        """Ids for blocks that a trace names by content alone: the same for the same names from the start on."""
        before, found = -1, []
        for name in names:
            id_ = self._known.get((before, name))
            if id_ is None:
                id_ = self._known[before, name] = self._next
                self._next += 1
            found.append(id_)
            before = id_
        return tuple(found)
