"""Circuit breaker of one target.

Closed -> open after ``threshold`` faults in a row -> half open after a pause -> one trial: closed again, or open for longer.
The pause doubles with every opening, and is short again only once the target has served for ``calm`` seconds: one that fails
anew after each good trial is left alone for longer and longer too. Whoever does far worse than its peers is put out the same
way, and comes back by a trial. Backpressure and clients' faults are not told to it.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Times are seconds on the caller's clock."""

    threshold: int = 5
    pause: float = 5.0
    longest: float = 60.0
    calm: float = 60.0
    faults: int = 0
    """In a row."""
    openings: int = 0
    """Of late: without `calm` between them."""
    open_until: float | None = None
    reason: str | None = None
    """Why it is open: ``faults`` in a row, or how it is worse than its peers; ``None``: it is not."""
    trying: bool = False
    """The one trial of the half-open state is under way."""
    _last: float | None = None
    """When its last pause was over."""

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.open_until is None or (now >= self.open_until and not self.trying)

    def sent(self) -> bool:
        """A request is being sent; true if it is the trial, after which nothing else is allowed until it ends."""
        if self.open_until is None:
            return False
        self.trying = True
        return True

    def succeeded(self) -> bool:
        """A request was answered; true if that closed the breaker."""
        changed = self.open_until is not None
        self.faults = 0
        self.open_until = self.reason = None
        self.trying = False
        return changed

    def failed(self, now: float) -> bool:
        """A worker's fault; true if that opened the breaker."""
        self.faults += 1
        if not self.trying and (self.open_until is not None or self.faults < self.threshold):
            return False
        self._open(now, self.pause, self.longest, "faults" if self.reason is None else self.reason)
        return True

    def put_out(self, now: float, pause: float, longest: float, reason: str) -> None:
        """It does worse than its peers, by ``reason``: it is left alone for ``pause`` seconds, for longer each time."""
        self._open(now, pause, longest, reason)

    def _open(self, now: float, pause: float, longest: float, reason: str) -> None:
        if self._last is not None and now - self._last > self.calm:
            self.openings = 0
        self.trying = False
        self.reason = reason
        self.open_until = self._last = now + min(longest, pause * 2**self.openings)
        self.openings = min(self.openings + 1, 10)

    def undecided(self) -> None:
        """The trial ended without telling anything (its client left): another may be made."""
        self.trying = False

    @property
    def judged(self) -> bool:
        """Whether it was put out for being worse than its peers: only a trial ends that."""
        return self.open_until is not None and self.reason not in (None, "faults")

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half_open``."""
        if self.open_until is None:
            return "closed"
        return "half_open" if self.trying else "open"
