"""What has passed between engines, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Totals since the engine was made. in is KV that came, out KV that was given; seconds are those of the transfers
    that came. expired: kept KV that nobody came for in time. late_notes: notifications for KV that was not here any
    more. lost_notes: notifications that did not arrive. aborts: requests with a part elsewhere that were aborted."""

    in_count: int = 0
    in_tokens: int = 0
    in_failed: int = 0
    in_seconds: float = 0.0
    out_count: int = 0
    out_tokens: int = 0
    out_failed: int = 0
    out_seconds: float = 0.0
    expired: int = 0
    late_notes: int = 0
    lost_notes: int = 0
    aborts: int = 0
    bootstrap_failed: int = 0
