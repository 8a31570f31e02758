"""A few of the requests that ended, for whoever watches; nothing is kept while nobody does."""

from __future__ import annotations

from time import time
from typing import TYPE_CHECKING, Any

from gateway.dialects import Usage

if TYPE_CHECKING:
    from gateway.exchange import Exchange

MOST = 50
"""Of the requests between two looks."""
LONGEST = 64
"""Characters of a request's id."""


class Sample:
    """The first `MOST` requests that ended since it was last taken, and how many there were."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._count = 0

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None, seconds: float) -> None:
        """A request ended in a metrics' ``outcome``, ``seconds`` after it came."""
        self._count += 1
        if len(self._rows) >= MOST:
            return
        ask, choice, target, session = exchange.ask, exchange.choice, exchange.target, exchange.ask.session
        first = exchange.first_at - exchange.started if exchange.events and exchange.first_at else None
        self._rows.append(
            {
                "time": round(time(), 3),
                "id": exchange.request_id[:LONGEST].decode("utf-8", "replace"),
                "tenant": ask.tenant.name,
                "model": ask.model_name,
                "session": None if session is None else session.key.hex(),
                "turn": ask.turn or None,
                "policy": ask.policy.name,
                "reason": None if choice is None else choice.reason,
                "target": None if target is None else target.name,
                "prefill": None if choice is None or choice.prefill is None else choice.prefill.name,
                "outcome": outcome,
                "status": exchange.status or None,
                "prompt_tokens": None if usage is None else usage.prompt,
                "cached_tokens": None if usage is None else usage.cached,
                "completion_tokens": None if usage is None else usage.completion,
                "ttft_ms": None if first is None else round(first * 1e3, 1),
                "ms": round(seconds * 1e3, 1),
            }
        )

    def take(self) -> dict[str, Any]:
        """What there is, which is not there any more."""
        rows, count = self._rows, self._count
        self._rows, self._count = [], 0
        return {"ended": count, "shown": rows}
