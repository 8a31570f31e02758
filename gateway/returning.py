"""When sessions are expected back, and whether their KV will be there: what `policies.returns` learns, joined to the fleet."""

from typing import Any

from gateway.fleet import Fleet
from gateway.sessions import Session
from gateway.workers import Target
from policies.returns import GapBook, horizon

LIKELY = 0.5
"""Chance of survival below which KV is said to be lost before its session returns."""
MOSTLY = 0.9
"""The share of returns for whose time KV is asked to be kept."""


class Returning:
    """See the module's head. Times are seconds on the loop's clock."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.book = GapBook()

    def came(self, session: Session, tool: str, now: float) -> None:
        """A session's next turn is here, with a result of ``tool``."""
        gap = now - session.ended
        if session.ended and not session.running and gap >= 0.0:
            self.book.add(session.tenant, tool, gap)
            home = None if session.tail_target is None else self.fleet.targets.get(session.tail_target)
            if home is not None:
                home.gaps.add(gap)

    def room(self, target: Target) -> float | None:
        """Tokens of its cache that are not taken by what runs; ``None``: not known."""
        return None if target.room is None else max(0.0, target.room - target.active)

    def needed(self, target: Target, now: float) -> float:
        """Tokens that come in at ``target`` until an ordinary session of its own returns."""
        return target.inflow.rate(now) * target.gaps.quantile(0.5)

    def crowded(self, target: Target, now: float) -> bool:
        """Whether its cache is too small for what its sessions bring in between two turns of each; only of sessions that were
        seen to return."""
        room = self.room(target)
        return room is not None and target.gaps.known and self.needed(target, now) > room

    def in_danger(self, session: Session, target: Target, now: float) -> float | None:
        """Seconds within which the session returns as a rule, if its KV is not likely to last that long at ``target``."""
        room, inflow = self.room(target), target.inflow.rate(now)
        if room is None or not inflow:
            return None
        gaps = self.book.expected(session.tenant, session.tool)
        return gaps.quantile(MOSTLY) if gaps.known and gaps.within(horizon(room, inflow)) < LIKELY else None

    def forecast(self, session: Session, target: Target, now: float, bytes_per_token: int | None) -> dict[str, Any]:
        """Whether the session's KV will survive at ``target`` until it returns, for people and scripts."""
        gaps = self.book.expected(session.tenant, session.tool)
        gap = gaps.quantile(0.5)
        inflow, room = target.inflow.rate(now), self.room(target)
        needed = inflow * gap
        lasts = None if room is None else horizon(room, inflow)
        chance = None if lasts is None else gaps.within(lasts)
        return {
            "tool": session.tool or None,
            "expected_seconds": round(gap, 3),
            "learned": gaps.known,
            "inflow_tokens_per_second": round(inflow, 1),
            "needed_tokens": round(needed),
            "room_tokens": None if room is None else round(room),
            "needed_bytes": None if bytes_per_token is None else round(needed * bytes_per_token),
            "room_bytes": None if bytes_per_token is None or room is None else round(room * bytes_per_token),
            "lasts_seconds": None if lasts is None or lasts > 1e9 else round(lasts, 3),
            "chance": None if chance is None else round(chance, 3),
            "survives": None if chance is None else chance >= LIKELY,
            "says": says(gap, needed, room, bytes_per_token),
        }

    def says_of(self, target: Target, now: float, bytes_per_token: int | None) -> str | None:
        """One sentence where its cache is too small; ``None`` where it is not."""
        if not self.crowded(target, now):
            return None
        return says(target.gaps.quantile(0.5), self.needed(target, now), self.room(target), bytes_per_token)


def says(gap: float, needed: float, room: float | None, bytes_per_token: int | None) -> str:
    """The forecast in one sentence."""
    back = f"back after about {gap:.3g} s, in which {_amount(needed, bytes_per_token)} come in"
    if room is None:
        return f"{back}; the size of its cache is not known"
    if needed > room:
        return f"{back}, and the cache has room for {_amount(room, bytes_per_token)}: it cannot survive"
    return f"{back}, and the cache has room for {_amount(room, bytes_per_token)}: it survives"


def _amount(tokens: float, bytes_per_token: int | None) -> str:
    text = f"{tokens:,.0f} tokens"
    return text if bytes_per_token is None else f"{text} ({tokens * bytes_per_token / 1e9:.3g} GB)"
