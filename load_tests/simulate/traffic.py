"""What clients ask, as the simulation reads it: chains of turns, prompts as ids of blocks.

Only shapes: whoever makes such traffic need not know of the simulation (`load_tests.workloads.chains` does).

An id names a block of ``block`` tokens *and* all blocks before it: two prompts share a prefix exactly as far as their ids
agree, and an id has one parent only.
"""

from collections.abc import Sequence
from typing import Protocol


class Turn(Protocol):
    """One request."""

    @property
    def blocks(self) -> Sequence[int]:
        """Ids of the prompt's full blocks."""

    @property
    def tokens(self) -> int:
        """Prompt tokens, at least 1; the last, partly filled block has no id."""

    @property
    def output(self) -> int:
        """Tokens that are generated."""

    @property
    def after(self) -> Sequence[int]:
        """Ids of the blocks that the answer fills, behind ``blocks``; empty where the next prompt does not carry it."""

    @property
    def think(self) -> float:
        """Seconds after the end of the turn before it, and of the chains that it awaits."""

    @property
    def awaits(self) -> Sequence[int]:
        """Places of chains in the traffic that must have ended before."""


class Chain(Protocol):
    """Turns one after another: each begins its think time after the one before it ended."""

    @property
    def at(self) -> float:
        """When the first begins, in seconds: since the traffic's begin, or since the end of what it follows."""

    @property
    def follows(self) -> tuple[int, int] | None:
        """The turn that must have ended before: its chain's place in the traffic, and its number there."""

    @property
    def turns(self) -> Sequence[Turn]:
        """At least one."""

    @property
    def session(self) -> str | None:
        """The session's name, which other chains may share; ``None``: these requests belong to none."""


class Traffic(Protocol):
    """All of it."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def block(self) -> int:
        """Tokens of one block."""

    @property
    def chains(self) -> Sequence[Chain]:
        """In any order."""


def ceiling(traffic: Traffic) -> float:
    """Share of all prompt tokens that one cache without bounds would have: what no policy can beat.

    Causal turns are taken at the times they would have if answers took no time.
    """
    asked = []
    for place, chain in enumerate(traffic.chains):
        at = chain.at
        for number, turn in enumerate(chain.turns):
            at += turn.think if number else 0.0
            asked.append((at, place, number, turn))
    asked.sort(key=lambda each: each[:3])
    seen: set[int] = set()
    cached = total = 0
    for _, _, _, turn in asked:
        blocks = turn.blocks
        # The last token is always computed.
        low, high = 0, min(len(blocks), (turn.tokens - 1) // traffic.block)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in seen:
                low = middle
            else:
                high = middle - 1
        cached += low * traffic.block
        total += turn.tokens
        seen.update(blocks)
        seen.update(turn.after)
    return cached / total if total else 0.0
