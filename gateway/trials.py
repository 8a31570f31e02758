"""How requests are routed, and other policies that are tried beside: for a part of the sessions instead, or only to compare.

A *rollout* routes a share of the sessions, each of them for good: which side a session is on follows from its name, so that
neither a restart nor another replica sends it to the other, and a larger share takes more of them over and gives none back.
Requests without a session are shared out one by one.

A *shadow* is asked about a share of the requests after they were routed, on the same snapshot of the fleet. It changes nothing.
What it would have done is counted: whether it agrees, and by how many seconds and computed tokens its choice would have been
better or worse, both choices priced by the same costs (`policies.cost`). What it needs to know is gathered for all of its
tenant's requests, or it would be asked about an index that has seen but a part of them.
"""

from __future__ import annotations

from policies.base import Choice, Policy, Request
from policies.cost import terms

PARTS = 1 << 32


class Part:
    """Another policy, for a share of what is asked."""

    __slots__ = ("_most", "policy", "share")

    def __init__(self, policy: Policy, share: float) -> None:
        self.policy = policy
        self.share = share
        self._most = int(share * PARTS)

    def has(self, number: int) -> bool:
        """Whether ``number``, of 64 evenly spread bits, is in the part."""
        return number & (PARTS - 1) < self._most


class Policies:
    """Of one tenant, or one model. ``needs_prefix``, ``needs_session``: whether any of them does."""

    __slots__ = ("main", "needs_prefix", "needs_session", "rollout", "shadow")

    def __init__(self, main: Policy, rollout: Part | None = None, shadow: Part | None = None) -> None:
        self.main = main
        self.rollout = rollout
        self.shadow = shadow
        self.needs_prefix = any(policy.needs_prefix for policy in self.all())
        # Who routes a part of the sessions has to know which they are.
        self.needs_session = rollout is not None or any(policy.needs_session for policy in self.all())

    def all(self) -> list[Policy]:
        """Each of them."""
        return [self.main, *(part.policy for part in (self.rollout, self.shadow) if part is not None)]


def regret(request: Request, made: Choice, other: Choice, now: float) -> tuple[float, int]:
    """Seconds, and computed tokens, by which ``made`` is dearer than ``other``; less than nothing: it is cheaper."""
    one, two = made.prefill or made.target, other.prefill or other.target
    seconds = terms(request, one, None, now).total - terms(request, two, None, now).total
    return seconds, request.holdings.get(two.id, 0) - request.holdings.get(one.id, 0)
