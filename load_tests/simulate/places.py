"""What a simulated gateway keeps: targets with their charges, sessions, requests in flight, and what was decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_index.radix import Node
from load_tests.simulate.traffic import Turn
from policies.base import Rates, Request, Target
from policies.charged import Charged


class Reported(NamedTuple):
    """What an engine said of itself at the last poll."""

    running: int = 0
    waiting: int = 0
    used: float = 0.0
    """Share of its KV cache that running requests have."""


class Place(Charged):
    """One target with its charges, and what other routers' rules count."""

    __slots__ = ("filled", "joined", "pending", "reported", "reused")

    def __init__(self, id: int, rates: Rates) -> None:
        super().__init__(id, f"worker-{id}", rates)
        self.joined: float | None = None
        """When it joined a fleet at work; ``None``: it was there from the beginning."""
        self.pending = 0
        """Uncached tokens of prompts that have not begun to answer."""
        self.reported = Reported()
        self.filled = 0.0
        """Share of its cache that is believed to be in use."""
        self.reused = 0.0
        """Share of recent prompts' tokens that it found cached."""

    def emptied(self) -> None:
        """Its engine died, and everything on it."""
        self.running, self.foreign, self.queued = 0, 0.0, 0.0
        self.pending, self.active = 0, 0.0
        self.recount()


def known(target: Target) -> Place:
    """``target`` as the simulation knows it."""
    assert isinstance(target, Place), "a policy of the simulation"
    return target


@dataclass(slots=True)
class Asking(Request):
    """A request, with what only policies of the simulation may read."""

    turn: Turn | None = None
    """What is asked: its blocks stand for a prompt's text."""
    name: str | None = None
    """The session's name, as the client sends it."""
    exact: Mapping[int, int] = field(default_factory=dict)
    """What engines' events alone tell of holdings."""


@dataclass(slots=True, eq=False)
class Session:
    """A chain of requests as the gateway knows it."""

    hash: int
    home: int | None = None
    partner: int | None = None
    running: int = 0
    used: float = 0.0
    sent: float = 0.0
    sent_to: int | None = None
    symbols: bytes = b""
    tokens: int | None = None
    tail: int = 0
    """Tokens generated behind its last prompt, at ``tail_at``."""
    tail_at: int | None = None
    ended: float = 0.0
    awaits: int = 0
    """How many blocks its last target's events must have told of for its last answer to be among them."""


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
    uncached: int
    alone: bool
    depths: Mapping[int, int] = field(default_factory=dict)
    predicted: int | None = None
    routed: int = 0
    shadow: int | None = None
    """What events alone predicted."""
    stored: int | None = None
    used: float | None = None
    symbols: bytes = b""
    pin: Node | None = None
    first: float | None = None
    expected: float = 0.0
    """Seconds after which its answer was to begin."""
    decoder: int | None = None
    """Who generates, if that is not the target."""
    moved: int = 0
    """Tokens that the decoder is believed to lack."""
    handed: float = 0.0
    """When its prompt was computed."""
    second: Node | None = None
    """The decoder's pin."""


@dataclass(slots=True)
class Decisions:
    """What the router decided so far."""

    reasons: dict[str, int] = field(default_factory=dict)
    pairs: int = 0
    """Requests whose prompt another engine computed than the one that generated."""
    rehomed: int = 0
    """Times that a session's home changed."""
