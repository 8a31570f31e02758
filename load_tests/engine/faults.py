"""Faults on order: each applies to the next ``count`` requests for inference, or to all until cleared.

    refuse        connections are refused (count None or seconds) or reset as they are accepted (count)
    stall_before  nothing is answered for ``seconds`` (None: for ever)
    stall_during  after ``after_events`` events the answer pauses for ``seconds`` (None: for ever)
    reset         after ``after_events`` events the connection is reset; 0: before any byte
    half_close    after ``after_events`` events the engine sends FIN, in the middle of the body
    garbage       after ``after_events`` events come bytes that are no HTTP, and the connection is closed
    error500, error503, queue_full    that answer, at once, in the engine's own words
    slow_health   health checks take ``seconds`` longer
    transfer_stall   KV that this engine gives or brings takes ``seconds`` longer (None: never comes)
    transfer_fail    KV that this engine gives or brings does not arrive
    notify_lost      another engine does not hear that its KV is not needed any more
    forget           KV that is to be kept for another engine is given up at once
    lost_answer      the work is done, and the connection is reset instead of being answered
    out_of_memory    a decode engine of sglang gives a request up after ``after_events`` tokens, under memory pressure

A JSON answer counts as one event, whose first half is sent before a fault with ``after_events`` of 1 or more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal[
    "refuse",
    "stall_before",
    "stall_during",
    "reset",
    "error500",
    "error503",
    "queue_full",
    "slow_health",
    "garbage",
    "half_close",
    "transfer_stall",
    "transfer_fail",
    "notify_lost",
    "forget",
    "lost_answer",
    "out_of_memory",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
BEFORE_ANSWER: tuple[Kind, ...] = ("stall_before", "error500", "error503", "queue_full")
DURING_ANSWER: tuple[Kind, ...] = ("stall_during", "reset", "half_close", "garbage")


@dataclass(slots=True)
class Fault:
    """count: requests it still applies to, None until cleared. after_events: events of the answer that pass first."""

    kind: Kind
    count: int | None = 1
    after_events: int = 0
    seconds: float | None = None


def parse_fault(body: Any) -> Fault:
    """A fault from JSON; ValueError says what is wrong."""
    if not isinstance(body, dict):
        raise ValueError("a fault is a JSON object")
    unknown = set(body) - {"kind", "count", "after_events", "seconds"}
    if unknown:
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
    kind, count = body.get("kind"), body.get("count", 1)
    after, seconds = body.get("after_events", 0), body.get("seconds")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError("count must be a positive integer or null")
    if not isinstance(after, int) or after < 0:
        raise ValueError("after_events must be an integer of at least 0")
    if seconds is not None and (not isinstance(seconds, int | float) or seconds < 0):
        raise ValueError("seconds must be a number of at least 0")
    return Fault(kind, count, after, seconds)


class Faults:
    """The orders that stand, oldest first. ``changed`` is called after each change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._orders: list[Fault] = []
        self._changed = changed

    def add(self, kind: Kind, *, count: int | None = 1, after_events: int = 0, seconds: float | None = None) -> None:
        """Order one fault; see the head of the module for the kinds."""
        self.order(Fault(kind, count, after_events, seconds))

    def order(self, fault: Fault) -> None:
        self._orders.append(fault)
        self._changed()

    def clear(self) -> None:
        self._orders.clear()
        self._changed()

    def remove(self, fault: Fault) -> None:
        if fault in self._orders:
            self._orders.remove(fault)
            self._changed()

    def standing(self, *kinds: Kind) -> Fault | None:
        """The oldest order among ``kinds``, without using it up."""
        return next((fault for fault in self._orders if fault.kind in kinds), None)

    def take(self, *kinds: Kind) -> Fault | None:
        """The oldest order among ``kinds``, with one of its requests used up."""
        fault = self.standing(*kinds)
        if fault is not None and fault.count is not None:
            fault.count -= 1
            if fault.count == 0:
                self.remove(fault)
        return fault

    def listing(self) -> list[dict[str, Any]]:
        return [
            {"kind": f.kind, "count": f.count, "after_events": f.after_events, "seconds": f.seconds}
            for f in self._orders
        ]
