"""Whether the fleet is well, in a few sentences: what an operator who knows nothing yet should look at first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

MOST = 8
"""Sentences."""
GAP = 0.1
"""Of the prompts' tokens, by which reports may fall behind what was predicted."""
LOST = 0.15
"""Of the prompts' tokens, that may be lost to routing or to eviction before that is said."""
BROKEN = 0.05
"""Of a tenant's hits, that one break of its prompts may cost."""
SPOKEN = 5000
"""Prompt tokens below which a window's hit rate says nothing."""
FAILED = 0.02
"""Of the requests, that may fail."""

Line = tuple[str, str]
"""``bad`` or ``warn``, and the sentence."""


def verdict(told: Mapping[str, Any], tiles: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``told``: an event of the feed; ``tiles``: all of them."""
    lines = [*_gateway(told), *_workers(list(tiles)), *_traffic(told)]
    lines.sort(key=lambda line: line[0] != "bad")
    level = lines[0][0] if lines else "ok"
    return {"level": level, "lines": [{"level": each, "text": text} for each, text in lines[:MOST]]}


def _gateway(told: Mapping[str, Any]) -> Iterable[Line]:
    rung = told["pressure"]["rung"]
    if rung != "none":
        refuses = rung in ("bulk", "all")
        yield "bad" if refuses else "warn", f"The gateway is under pressure and leaves out: {rung}"
    if not told["config"]["last_reload_ok"]:
        yield "warn", "The last change of the configuration was not followed"
    if told["queue"]["waiting"]:
        yield "warn", f"{_count(told['queue']['waiting'], 'request')} waiting: every engine that could serve is full"


def _workers(tiles: list[Mapping[str, Any]]) -> Iterable[Line]:
    states = Counter({tile["worker"]: tile["state"] for tile in tiles}.values())
    total = sum(states.values())
    if not total:
        yield "bad", "There are no workers"
    elif not states["ready"]:
        yield "bad", f"None of {_count(total, 'worker')} is ready"
    elif states["down"]:
        yield "bad", f"{states['down']} of {_count(total, 'worker')} down"
    if states["ready"] and states["joining"]:
        yield (
            "warn" if states["ready"] >= total / 2 else "bad",
            f"{states['joining']} of {_count(total, 'worker')} not joined yet",
        )
    if states["draining"]:
        yield "warn", f"{states['draining']} of {_count(total, 'worker')} draining"
    for what, text in (
        (lambda tile: tile.get("breaker_reason"), "left alone for failing, or for being far slower than its peers"),
        (lambda tile: tile.get("crowded"), "too small a cache for the sessions that will return to it"),
        (
            lambda tile: tile.get("rung") in ("session", "none"),
            "holding less than was believed: its holdings do not count",
        ),
    ):
        found = [tile["name"] for tile in tiles if tile["state"] == "ready" and what(tile)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield "warn", f"{found[0]}{more}: {text}"


def _traffic(told: Mapping[str, Any]) -> Iterable[Line]:
    requests = told["requests"]
    if requests["window"] >= 20 and requests["failed"] > FAILED * requests["window"]:
        yield "bad", f"{_percent(requests['failed'] / requests['window'])} of the requests of the last minute failed"
    doctor = told["doctor"]
    if doctor is not None and (doctor["share_of_hits_lost"] or 0.0) > BROKEN:
        yield "warn", f"The doctor found: {doctor['worst']}"
    hits = told["hits"]
    if hits["prompt_tokens"] < SPOKEN:
        return
    rate, predicted, best, ceiling = (hits[name] for name in ("rate", "predicted", "best", "ceiling"))
    if rate is not None and predicted is not None and predicted - rate > GAP:
        yield (
            "warn",
            f"Engines find {_percent(predicted - rate)} of the prompts less in their caches than was predicted",
        )
    if best is not None and predicted is not None and best - predicted > LOST:
        yield (
            "warn",
            f"{_percent(best - predicted)} of the prompts is cached, but not where it was sent: lost to routing",
        )
    if ceiling is not None and best is not None and ceiling - best > LOST:
        yield "warn", f"{_percent(ceiling - best)} of the prompts was cached, but is not any more: lost to eviction"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
