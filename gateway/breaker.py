"""Circuit breaker of one target.

Closed -> open after ``threshold`` faults in a row -> half open after a pause that doubles with every failed trial -> one
trial: closed again, or open for longer. Backpressure and clients' faults are not told to it.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Times are seconds on the caller's clock."""

    threshold: int = 5
    pause: float = 5.0
    longest: float = 60.0
    faults: int = 0
    """In a row."""
    openings: int = 0
    """In a row, without a success between."""
    open_until: float | None = None
    trying: bool = False
    """The one trial of the half-open state is under way."""

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
        self.faults = self.openings = 0
        self.open_until = None
        self.trying = False
        return changed

    def failed(self, now: float) -> bool:
        """A worker's fault; true if that opened the breaker."""
        self.faults += 1
        if not self.trying and (self.open_until is not None or self.faults < self.threshold):
            return False
        self.trying = False
        self.open_until = now + min(self.longest, self.pause * 2**self.openings)
        self.openings = min(self.openings + 1, 10)
        return True

    def undecided(self) -> None:
        """The trial ended without telling anything (its client left): another may be made."""
        self.trying = False

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half_open``."""
        if self.open_until is None:
            return "closed"
        return "half_open" if self.trying else "open"
