"""What tenants use, against what they are granted: requests, prompt tokens and computed tokens in any minute, and how many at
once.

A minute slides: its seconds are counted one by one, so that in no minute more is granted than the limit, and how long to wait
is known to the second. Tokens are counted as estimated when a request comes and put right by what its engine reports, in the
second in which they were counted: what is taken back elsewhere would be granted twice once that second is over. Counts belong
to a tenant's name, not to its configuration: they outlive a change of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.errors import RateLimited

SLACK = 0.04
"""Of a limit, what several gateways together may grant too much before they hear of each other."""
SECONDS = 61
"""That are counted: a minute, and what of the second in which it began was before it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant is granted; ``None``: as much as it likes."""

    requests_per_minute: int | None = None
    prompt_tokens_per_minute: int | None = None
    computed_tokens_per_minute: int | None = None
    concurrency: int | None = None


class Minute:
    """A sum over the last sixty seconds, and less than one more."""

    __slots__ = ("_last", "_slots", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._slots = [0.0] * SECONDS
        self._last = 0

    def _slide(self, now: float) -> None:
        second = int(now)
        passed = second - self._last
        if passed <= 0:
            return
        if passed >= SECONDS:
            self._slots = [0.0] * SECONDS
            self.total = 0.0
        else:
            for at in range(self._last + 1, second + 1):
                self.total -= self._slots[at % SECONDS]
                self._slots[at % SECONDS] = 0.0
        self._last = second

    def now(self, now: float) -> float:
        """The sum as it is then."""
        self._slide(now)
        return self.total

    def add(self, amount: float, now: float) -> None:
        """Count ``amount``."""
        self._slide(now)
        self._slots[self._last % SECONDS] += amount
        self.total += amount

    def correct(self, amount: float, counted: float, now: float) -> None:
        """What was counted at ``counted`` was so much too little, or, below nothing, too much."""
        self._slide(now)
        second = min(int(counted), self._last)
        if self._last - second >= SECONDS:
            # It does not count any more.
            return
        at = second % SECONDS
        amount = max(amount, -self._slots[at])
        self._slots[at] += amount
        self.total += amount

    def wait(self, amount: float, limit: float, now: float) -> float:
        """Seconds until ``amount`` more would be within ``limit``; 0: it is. What is larger than the limit fits once nothing
        else is counted."""
        self._slide(now)
        spare = max(limit - amount, 0.0)
        if self.total <= spare:
            return 0.0
        left = self.total
        for passed in range(1, SECONDS):
            # The oldest second goes first.
            left -= self._slots[(self._last + passed) % SECONDS]
            if left <= spare + 1e-9:
                return self._last + passed - now
        return self._last + SECONDS - now


class Meter:
    """Of one tenant. Times are seconds on the gateway's clock."""

    __slots__ = (
        "_unsaid",
        "beside",
        "computed",
        "limits",
        "prompt",
        "requests",
        "running",
        "said",
        "sharing",
        "tenant",
    )

    def __init__(self, tenant: str, limits: Limits) -> None:
        self.tenant = tenant
        self.limits = limits
        self.running = 0
        """Requests that were sent and did not end."""
        self.requests = Minute()
        self.prompt = Minute()
        self.computed = Minute()
        self.sharing = 1
        """Gateways that count for it, this one among them."""
        self.beside = 0
        """Requests that run at the others."""
        self.said = 0
        """Of ours, as the others know."""
        self._unsaid = [0.0, 0.0, 0.0]
        """Requests, prompt tokens and computed tokens that the others do not know of."""

    @property
    def free(self) -> bool:
        """Whether one more may run."""
        most = self.limits.concurrency
        if most is None:
            return True
        left = most - self.running - self.beside
        if left <= 0 or self.sharing == 1:
            return left > 0
        # What is left now, each of the others may be giving away too.
        return self.running - self.said < max(1.0, (most - self.said - self.beside) / self.sharing)

    def comes(self, now: float) -> None:
        """A request comes. Raises `RateLimited` if it is one too many, and does not count it then."""
        most = self.limits.requests_per_minute
        if most is not None:
            self._check(0, 1, most, "requests", now)
            self._add(0, 1, now)

    def asks(self, tokens: int, computed: int, now: float) -> None:
        """It has so many prompt tokens, of which so many will have to be computed. Raises `RateLimited`, and counts nothing
        then, if they are too many."""
        limits = self.limits
        if limits.prompt_tokens_per_minute is not None:
            self._check(1, tokens, limits.prompt_tokens_per_minute, "prompt tokens", now)
        if limits.computed_tokens_per_minute is not None:
            self._check(2, computed, limits.computed_tokens_per_minute, "computed tokens", now)
            self._add(2, computed, now)
        if limits.prompt_tokens_per_minute is not None:
            self._add(1, tokens, now)

    def corrects(self, tokens: int, computed: int, asked: float, now: float) -> None:
        """There were so many more, or fewer, than `asks` was told at ``asked``."""
        if self.limits.prompt_tokens_per_minute is not None:
            self._correct(1, tokens, asked, now)
        if self.limits.computed_tokens_per_minute is not None:
            self._correct(2, computed, asked, now)

    def refused(self, came: float, now: float) -> None:
        """A request that came then was refused before anything was done for it."""
        if self.limits.requests_per_minute is not None:
            self._correct(0, -1, came, now)

    # -- what other gateways count ----------------------------------------------------------------------------------

    def unsaid(self) -> tuple[float, float, float]:
        """Requests, prompt tokens and computed tokens since it was last asked; what runs counts as said with them."""
        requests, prompt, computed = self._unsaid
        self._unsaid = [0.0, 0.0, 0.0]
        self.said = self.running
        return requests, prompt, computed

    def hears(self, requests: float, prompt: float, computed: float, now: float) -> None:
        """Another counted so much."""
        for minute, amount in ((self.requests, requests), (self.prompt, prompt), (self.computed, computed)):
            if amount > 0:
                minute.add(amount, now)
            elif amount:
                minute.correct(amount, now, now)

    # -- counting ---------------------------------------------------------------------------------------------------

    def _minute(self, which: int) -> Minute:
        return (self.requests, self.prompt, self.computed)[which]

    def _add(self, which: int, amount: float, now: float) -> None:
        self._minute(which).add(amount, now)
        self._unsaid[which] += amount

    def _correct(self, which: int, amount: float, counted: float, now: float) -> None:
        self._minute(which).correct(amount, counted, now)
        self._unsaid[which] += amount

    def _check(self, which: int, amount: float, limit: float, what: str, now: float) -> None:
        minute = self._minute(which)
        wait = minute.wait(amount, limit, now)
        if not wait and self.sharing > 1:
            # What is left now, each of the others may be giving away too, until they hear of it.
            unsaid = self._unsaid[which]
            left = limit - minute.total + unsaid
            if unsaid and unsaid + amount > left / self.sharing + SLACK * limit / self.sharing:
                wait = 1.0
        if wait > 0:
            raise RateLimited(
                f"this key is granted {limit:g} {what} a minute: try again in {wait:.0f} s",
                retry_after=max(1.0, wait),
                tenant=self.tenant,
                limit=what.replace(" ", "_"),
            )


class Meters:
    """Of all tenants that have limits, by name: as many as the configuration names."""

    def __init__(self) -> None:
        self._of: dict[str, Meter] = {}

    def of(self, tenant: str, limits: Limits) -> Meter | None:
        """The tenant's meter with these limits, which goes on with what it counted; ``None`` where nothing is limited."""
        meter = self._of.get(tenant)
        if limits == Limits():
            if meter is not None:
                # Those that wait still ask it.
                meter.limits = limits
            return None
        if meter is None:
            meter = self._of[tenant] = Meter(tenant, limits)
        meter.limits = limits
        return meter

    def get(self, tenant: str) -> Meter | None:
        """The tenant's meter, if it has limits."""
        return self._of.get(tenant)

    def all(self) -> list[tuple[str, Meter]]:
        """Names and meters."""
        return list(self._of.items())

    def keep(self, names: set[str]) -> None:
        """Forget the tenants that are not among ``names`` and have nothing running."""
        for name in [name for name, meter in self._of.items() if name not in names and not meter.running]:
            del self._of[name]
