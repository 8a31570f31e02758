"""What a simulation came to over time and by share, as numbers that plots draw."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from load_tests.simulate.fleet import Outcome

POINTS = 160
"""Of a distribution, at most."""

WINDOWS = 48
"""Of the time that all policies took together."""

ROWS = 40
"""Engines that are drawn apart, at most; of more, groups."""


class Seen(NamedTuple):
    """One request: when it arrived and when its prompt was computed, in seconds; its prompt's tokens, and how many of them
    were cached; the engine."""

    arrived: float
    first: float
    prompt: int
    cached: int
    worker: int


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's requests, in order of arrival, on so many ``engines`` that compute prompts, for ``seconds``."""

    policy: str
    engines: int
    seconds: float
    requests: Sequence[Seen]


def curve(policy: str, outcome: Outcome) -> Curve:
    """Of one run; ``policy`` is how the user calls it."""
    seen = [Seen(each.arrived, each.first, each.asks.tokens, each.cached, each.worker) for each in outcome.asked]
    return Curve(policy, outcome.prefill or len(outcome.engines), outcome.seconds, seen)


def distribution(curve: Curve, points: int = POINTS) -> list[tuple[float, float]]:
    """(milliseconds, share of requests whose first token came by then), the fastest and the slowest among them."""
    waited = sorted([(each.first - each.arrived) * 1e3 for each in curve.requests])
    last = len(waited) - 1
    if last < 0:
        return []
    places = sorted({round(last * at / (points - 1)) for at in range(points)} | {int(0.99 * last), int(0.999 * last)})
    return [(waited[place], (place + 1) / len(waited)) for place in places]


def hits(curve: Curve, seconds: float, windows: int = WINDOWS) -> list[float | None]:
    """Share of the prompt tokens that arrived in each window of ``seconds`` which were cached; ``None`` where none came."""
    prompt, cached = [0] * windows, [0] * windows
    for each in curve.requests:
        window = _window(each.arrived, seconds, windows)
        prompt[window] += each.prompt
        cached[window] += each.cached
    return [there / all_ if all_ else None for there, all_ in zip(cached, prompt, strict=True)]


def load(curve: Curve, seconds: float, windows: int = WINDOWS, rows: int = ROWS) -> list[list[int]]:
    """Prompt tokens that each engine computed in each window of ``seconds``, by when they were done.

    Of more engines than ``rows``, neighbours are a group, of which each window has the busiest: a mean would hide it.
    """
    found = [[0] * windows for _ in range(curve.engines)]
    for each in curve.requests:
        found[each.worker][_window(each.first, seconds, windows)] += each.prompt - each.cached
    size = -(-curve.engines // rows)
    if size == 1:
        return found
    groups = [found[at : at + size] for at in range(0, curve.engines, size)]
    return [[max(column) for column in zip(*group, strict=True)] for group in groups]


def _window(at: float, seconds: float, windows: int) -> int:
    return min(windows - 1, int(at / seconds * windows)) if seconds > 0 else 0


def level(value: float, bounds: Sequence[float]) -> int:
    """How many of the ascending ``bounds`` a value has reached."""
    return bisect_right(bounds, value)
