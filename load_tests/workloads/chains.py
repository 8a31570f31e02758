"""Traffic as chains of turns, prompts as ids of blocks: what the simulation reads, made of traces and generators.

Two ways of arriving: *open*, each request at its own time whatever became of the others, and *causal*, each turn its think
time after the one before it ended. An open request is a chain of one turn.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: ``blocks`` of its prompt's full blocks, ``tokens`` of the whole prompt, ``output`` tokens generated,
    ``after`` the blocks that the answer fills, ``think`` seconds after the turn before it ended."""

    blocks: tuple[int, ...]
    tokens: int
    output: int
    after: tuple[int, ...] = ()
    think: float = 0.0


@dataclass(frozen=True, slots=True)
class Chain:
    """Turns one after another, the first at ``at`` seconds."""

    at: float
    turns: tuple[Turn, ...]
    session: str | None = None


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
        """Chains by their begin until they have ``limit`` requests; the last may be cut short."""
        if limit is None or limit >= self.requests:
            return self
        kept: list[Chain] = []
        left = limit
        for chain in sorted(self.chains, key=lambda each: each.at):
            if left <= 0:
                break
            turns = chain.turns[:left]
            kept.append(Chain(chain.at, turns, chain.session))
            left -= len(turns)
        return Traffic(self.name, self.block, kept)


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
