"""What is asked of a model, learned online: how crowded its targets are, and how long its sessions last.

A second of prefill on a target delays whoever comes to it before its work is done. With requests coming at a rate of L to a
target that is busy for a share R of the time, work of x seconds behind a wait of W keeps it busy for about (W + x/2)/(1 - R)
seconds more on average over that work, in which L times as many requests come: so x seconds cost others

    crowd * x * (W + x/2) seconds,    crowd = SHARED * L / (1 - R).

`SHARED` is less than one because who comes later is routed too, and goes elsewhere if it can.
"""

from dataclasses import dataclass
from math import exp

WINDOW = 60.0
"""Seconds over which arrivals and work are averaged."""
SHARED = 0.5
BUSIEST = 0.8
"""Share of time beyond which a target counts as no busier: averages of it are noise there."""
EARLIEST = 0.2
"""Part of a window after which averages are taken as they are."""
MOMENT = 0.05
"""Seconds within which averages are taken for unchanged."""
FADE = 0.999
"""Weight that a session loses with each later one: about a thousand count."""
FIRST_TURNS = 4.0
"""Turns of a session, as long as that is not known; counts as so many sessions."""


@dataclass(slots=True, eq=False)
class Demand:
    """Of one model. Seconds on whatever clock ``now`` is."""

    turns: float = FIRST_TURNS
    """Requests of an ordinary session."""
    _arrivals: float = 0.0
    _work: float = 0.0
    _at: float = 0.0
    _began: float | None = None
    _crowd: float = 0.0
    """What was last told, of how many targets, and when."""
    _among: float = 0.0
    _told: float = 0.0
    _sessions: float = FIRST_TURNS
    _asked: float = FIRST_TURNS * FIRST_TURNS

    def sent(self, seconds: float, now: float) -> None:
        """A request with ``seconds`` of prefill was sent."""
        if self._began is None:
            self._began = self._at = now
        if now - self._at > MOMENT:
            faded = exp((self._at - now) / WINDOW)
            self._at = now
            self._arrivals *= faded
            self._work *= faded
        self._arrivals += 1.0
        self._work += seconds

    def turn(self, new: bool) -> None:
        """A request of a session was sent; ``new``: its first."""
        if new:
            self._sessions = self._sessions * FADE + 1.0
            self._asked *= FADE
        self._asked += 1.0
        self.turns = self._asked / self._sessions

    def crowd(self, targets: float, now: float) -> float:
        """Requests a second that a second of prefill on one of so many targets delays; see the module's head. Where several
        gateways share the targets, ``targets`` is this one's part of them."""
        if self._began is None:
            return 0.0
        if targets == self._among and -MOMENT < now - self._told < MOMENT:
            return self._crowd
        self._among, self._told = targets, now
        seen = max(EARLIEST, 1.0 - exp((self._began - now) / WINDOW))
        faded = exp((self._at - now) / WINDOW) if now > self._at else 1.0
        share = faded / (WINDOW * seen * targets)
        self._crowd = SHARED * self._arrivals * share / (1.0 - min(BUSIEST, self._work * share))
        return self._crowd
