"""What a fleet goes through: how fresh the gateway's view is, and what happens to engines meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Fate(StrEnum):
    """What happens to an engine."""

    DIES = "dies"
    JOINS = "joins"


class Change(NamedTuple):
    """At ``at`` seconds something happens to ``worker``. One that joins was not there before."""

    at: float
    worker: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class Conditions:
    """Seconds and counts; the defaults are those of one gateway in front of a healthy fleet.

    ``routers``: gateways that share the fleet and tell each other nothing. ``poll``: between two load reports. ``events``:
    engines tell what they hold, ``lag`` seconds late, but the last ``silent`` of them do not. ``speeds``: engine -> how many
    times as fast as the others it is. ``prefill``: how many of the engines only compute prompts, while the others only
    generate; 0: all do both. ``held``: engines keep a session's KV between its turns (streaming sessions). ``named``: requests
    carry the name of their session.
    """

    routers: int = 1
    poll: float = 1.0
    events: bool = False
    lag: float = 0.01
    silent: int = 0
    speeds: Mapping[int, float] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    prefill: int = 0
    held: bool = False
    named: bool = True

    def __post_init__(self) -> None:
        if self.routers < 1:
            raise ValueError(f"routers must be at least 1, not {self.routers}")
        if self.poll <= 0 or self.lag < 0:
            raise ValueError(f"poll must be positive and lag not negative, not {self.poll} and {self.lag}")
        if any(speed <= 0 for speed in self.speeds.values()):
            raise ValueError("speeds must be positive")
        if self.prefill and self.changes:
            raise ValueError("changes of engines are simulated for engines that do both, not with prefill")

    def check(self, workers: int) -> None:
        """Raises `ValueError` for what cannot happen to so many engines."""
        named = [change.worker for change in self.changes]
        unknown = [worker for worker in [*named, *self.speeds] if not 0 <= worker < workers]
        if unknown:
            raise ValueError(f"changes and speeds name engine {unknown[0]}, but there are {workers}, from 0 on")
        if len(set(named)) < len(named):
            raise ValueError("changes: an engine dies or joins once")
        if len(set(named)) >= workers:
            raise ValueError("changes: one engine at least must be there all the time")
        if not 0 <= self.silent <= workers:
            raise ValueError(f"silent must be from 0 to the {workers} engines, not {self.silent}")

    def joins(self) -> set[int]:
        """Engines that are not there at the beginning."""
        return {change.worker for change in self.changes if change.fate is Fate.JOINS}
