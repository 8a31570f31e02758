"""A target with the prefill work that was sent to it: who keeps targets current charges them here.

Work is charged when it is sent and taken off when its answer begins. Engines compute prompts in the order in which they come,
so the oldest charge is the one at work: what passed of it is no wait any more (`Target.waits`).
"""

from policies.base import Rates, Target
from policies.calibrate import Calibration, Pace

EACH = 0.1
"""Weight of one answer in `Target.haste`."""
LEAST = 0.005
"""Seconds that must have been expected for an answer to tell anything of it."""
MOST = 2.0
HASTIEST = 1e-4


class Charged(Target):
    """See the module's head; seconds on whatever clock ``now`` is."""

    __slots__ = ("ahead", "charged", "pace", "queued")

    def __init__(self, id: int, name: str, rates: Rates | None = None) -> None:
        super().__init__(id=id, name=name, rates=rates or Rates())
        self.ahead: dict[object, float] = {}
        """Charges by whoever was charged, the oldest first."""
        self.charged = 0.0
        """Their sum."""
        self.queued = 0.0
        """Seconds that others' waiting requests put in front, as the engine reported."""
        self.pace = Pace()

    def charge(self, whom: object, seconds: float, now: float) -> None:
        """Work of ``seconds`` was sent for ``whom``, who was not charged yet."""
        if not self.ahead:
            self.head, self.since = seconds, now
        self.ahead[whom] = seconds
        self.charged += seconds
        self.wait = self.charged + self.queued

    def discharge(self, whom: object, now: float) -> None:
        """It is done, or will not be; safe to call again."""
        ahead = self.ahead
        if whom not in ahead:
            return
        was_head = next(iter(ahead)) is whom
        seconds = ahead.pop(whom)
        if ahead:
            self.charged -= seconds
            if was_head:
                self.head, self.since = next(iter(ahead.values())), now
        else:
            # Sums of floats drift; an idle target is exactly idle, so that idle targets tie.
            self.charged = self.head = 0.0
        self.wait = self.charged + self.queued

    def began(self, seconds: float, expected: float) -> None:
        """An answer began after ``seconds``, and was expected to after ``expected``."""
        if expected > LEAST:
            told = seconds / expected
            self.haste = min(1.0, max(HASTIEST, self.haste + EACH * ((told if told < MOST else MOST) - self.haste)))

    def learn(self, kind: Calibration, uncached: float, context: float, seconds: float, now: float) -> bool:
        """A prompt with nothing in front of it took ``seconds``; its ``kind`` learns from it too. Whether the target is priced
        by other rates now than before: by its own, or by those of its kind again."""
        before = self.rates
        kind.first_byte(uncached, context, seconds)
        self.rates = self.pace.first_byte(kind.rates, uncached, context, seconds, now)
        return self.rates is not before

    def forgive(self, kind: Calibration, now: float, always: bool = False) -> bool:
        """Price it as its ``kind`` if its pace is too old, or forget that altogether if it is another engine now (``always``).
        Whether its rates are others than before."""
        if always:
            self.pace = Pace()
        elif not self.pace.doubted(now):
            return False
        before = self.rates
        self.rates = kind.rates
        return self.rates is not before

    def recount(self) -> None:
        """Bring what policies see in line with the accounting."""
        if not self.running:
            self.ahead.clear()
            self.charged = self.head = 0.0
            self.busy = self.foreign
        self.wait = self.charged + self.queued
