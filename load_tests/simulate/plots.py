"""Plots as inline SVG: lines by policy, and maps of load by engine and time.

A plot is drawn once, here; what a pointer shows over it goes along as numbers (`Plot.data`), in the plot's own coordinates.
Policies are told apart by colour and dash or mark, and times that differ by orders stand on logarithmic axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any

from load_tests.simulate.curves import WINDOWS, Curve, distribution, hits, level, load

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 10, 40
DASHES = ("", "7 3", "2 3", "9 3 2 3", "14 4", "4 2 1 2", "1 4", "6 7")
MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-3.5-3.5h7v7h-7z",
    "M0-5L4.5 3.5h-9z",
    "M0-5L4.5 0L0 5L-4.5 0z",
    "M0 5L4.5-3.5h-9z",
    "M-4-1.5h2.5v-2.5h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5z",
    "M-5-2h10v4h-10z",
    "M-2-5h4v10h-4z",
)
LEVELS = 8
"""Shades of a map, from none to most."""


@dataclass(frozen=True, slots=True)
class Plot:
    """``svg``, and what a pointer shows over it."""

    svg: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """From ``low`` to ``high``, drawn from pixel ``start`` to ``end``; ``ticks`` are values with their texts."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = (log10(self.low), log10(self.high)) if self.log else (self.low, self.high)
        at = log10(max(value, self.low)) if self.log else value
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)


def milliseconds(value: float) -> str:
    """For people."""
    return f"{value:,.0f} ms" if value < 1e4 else f"{value / 1e3:,.1f} s"


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def logarithmic(values: Iterable[float], start: float, end: float) -> Axis:
    """An axis of milliseconds with decades, and what is between them where they are few."""
    told = [max(value, 0.1) for value in values]
    low, high = min(told, default=1.0), max(told, default=10.0)
    first, last = floor(log10(low)), ceil(log10(high))
    last += last == first
    steps = (1, 2, 5) if last - first < 4 else (1,)
    marks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = max((mark for mark in marks if mark <= low), default=marks[0])
    above = min((mark for mark in marks if mark >= high and mark > below), default=marks[-1])
    ticks = [(mark, _short(mark)) for mark in marks if below <= mark <= above]
    return Axis(below, above, start, end, ticks, log=True)


def _short(value: float) -> str:
    return f"{value:g}ms" if value < 1e3 else f"{value / 1e3:g}s"


def of_time(seconds: float, start: float, end: float) -> Axis:
    """An axis from 0 to ``seconds``."""
    seconds = seconds or 1.0
    unit, name = next(((size, name) for size, name in ((3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    rough = seconds / unit / 5
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    count = floor(seconds / unit / step + 1e-9)
    return Axis(0, seconds, start, end, [(at * step * unit, f"{at * step:g} {name}") for at in range(count + 1)])


SHARES = Axis(0, 1, HEIGHT - BOTTOM, TOP, [(at / 4, f"{at * 25}%") for at in range(5)])


def framed(name: str, title: str, told: str, axes: tuple[Axis, Axis], labels: tuple[str, str], body: str) -> str:
    """A plot with its axes; ``told`` says in words what it shows."""
    across, up = axes
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    lines = "".join(f"M{across(value)} {TOP}V{bottom}" for value, _ in across.ticks)
    lines += "".join(f"M{LEFT} {up(value)}H{right}" for value, _ in up.ticks)
    texts = "".join(f'<text x="{across(value)}" y="{bottom + 15}">{text}</text>' for value, text in across.ticks)
    texts += "".join(f'<text class="left" x="{LEFT - 5}" y="{up(value) + 4}">{text}</text>' for value, text in up.ticks)
    texts += f'<text class="axis" x="{(LEFT + right) / 2}" y="{HEIGHT - 6}">{escape(labels[0])}</text>'
    return (
        f'<svg class="plot" data-plot="{name}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(told)}</desc><path class="grid" d="{lines}"/>{texts}{body}'
        f'<path class="hair" d=""/></svg>'
    )


Point = tuple[float, float, str]
"""Pixels across and down, and what is said there."""


def _line(place: int, runs: Sequence[Sequence[Point]], marks: bool = False) -> str:
    path = "".join("M" + "L".join(f"{x} {y}" for x, y, _ in run) for run in runs if len(run) > 1)
    dash = DASHES[place % len(DASHES)]
    shown = f'<g class="series p{place}"><path class="line" stroke-dasharray="{dash or "none"}" d="{path}"/>'
    mark = MARKS[place % len(MARKS)]
    # What stands alone between two gaps is no line.
    marked = [point for run in runs if marks or len(run) == 1 for point in run]
    shown += "".join(f'<path class="mark" transform="translate({x} {y})" d="{mark}"/>' for x, y, _ in marked)
    return shown + "</g>"


def _lines(
    name: str,
    heads: tuple[str, str],
    axes: tuple[Axis, Axis],
    labels: tuple[str, str],
    runs: Sequence[Sequence[Sequence[Point]]],
    more: str = "",
    marks: bool = False,
) -> Plot:
    body = more + "".join(_line(place, each, marks) for place, each in enumerate(runs))
    data = [[point for run in each for point in run] for each in runs]
    return Plot(framed(name, *heads, axes, labels, body), {"series": data})


def first_tokens(curves: Sequence[Curve]) -> Plot:
    """How many requests had their first token by when."""
    found = [distribution(curve) for curve in curves]
    across = logarithmic((ms for each in found for ms, _ in each), LEFT, WIDTH - RIGHT)
    runs = [
        [[(across(ms), SHARES(share), f"{share:.1%} by {milliseconds(ms)}") for ms, share in each]] for each in found
    ]
    told = "; ".join(
        f"{curve.policy}: half by {milliseconds(each[len(each) // 2][0])}"
        for curve, each in zip(curves, found, strict=True)
        if each
    )
    heads = ("Time to first token", f"Share of requests whose first token had come, by time. {told}")
    return _lines("cdf", heads, (across, SHARES), ("time to first token (log)", "requests"), runs)


def hit_rates(curves: Sequence[Curve], seconds: float, ceiling: float) -> Plot:
    """Share of prompt tokens that were cached, by time."""
    across = of_time(seconds, LEFT, WIDTH - RIGHT)
    runs = []
    for each in curves:
        points = [
            None
            if share is None
            else (across((at + 0.5) * seconds / WINDOWS), SHARES(share), f"{share:.1%} {_when(at, seconds)}")
            for at, share in enumerate(hits(each, seconds))
        ]
        runs.append(_runs(points))
    line = f'<path class="bound" d="M{LEFT} {SHARES(ceiling)}H{WIDTH - RIGHT}"/>'
    heads = (
        "Cached share of prompt tokens over time",
        f"By time of arrival; one cache without bounds would have {ceiling:.1%} of all of them",
    )
    return _lines("hits", heads, (across, SHARES), ("time of arrival", "cached"), runs, line)


def _runs(points: Iterable[Point | None]) -> list[list[Point]]:
    """What stands together without a gap."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _when(window: int, seconds: float) -> str:
    return f"at {duration(window * seconds / WINDOWS)} to {duration((window + 1) * seconds / WINDOWS)}"


def by_turn(rows: Mapping[str, Mapping[str, Any]]) -> Plot | None:
    """Mean time to first token by the number of the request in its session; ``None`` where there are no sessions."""
    tables = [row["ttft_by_turn"] for row in rows.values()]
    told = [each for table in tables if table for each in table if each["ttft_mean_ms"] is not None]
    if not told:
        return None
    names = [each["turn"] for each in next(table for table in tables if table)]
    ends = (LEFT, WIDTH - RIGHT)
    across = Axis(-0.4, len(names) - 0.6, *ends, list(enumerate(names)))
    up = logarithmic((each["ttft_mean_ms"] for each in told), HEIGHT - BOTTOM, TOP)
    runs = [
        _runs(
            None
            if each["ttft_mean_ms"] is None
            else (
                across(at),
                up(each["ttft_mean_ms"]),
                f"{milliseconds(each['ttft_mean_ms'])} in turn {each['turn']} ({each['requests']:,.0f} requests)",
            )
            for at, each in enumerate(table or ())
        )
        for table in tables
    ]
    heads = ("Time to first token by turn", "Mean, by the number of the request within its session")
    return _lines("turns", heads, (across, up), ("request of the session", "mean TTFT (log)"), runs, marks=True)


def maps(curves: Sequence[Curve], seconds: float) -> tuple[list[Plot], float]:
    """For each policy which engine computed how many prompt tokens when, in shades that are the same for all; and the tokens
    of the darkest."""
    found = [load(curve, seconds) for curve in curves]
    cells = sorted(value for table in found for line in table for value in line if value)
    # The very busiest few would leave all others pale.
    most = float(cells[int(0.98 * (len(cells) - 1))]) if cells else 1.0
    # Squares: what little warm engines compute can be told apart beside what cold ones do.
    bounds = [1.0] + [most * (at / (LEVELS - 1)) ** 2 for at in range(1, LEVELS)]
    across = of_time(seconds, LEFT, WIDTH - RIGHT)
    return [
        _map(place, curve, table, bounds, across)
        for place, (curve, table) in enumerate(zip(curves, found, strict=True))
    ], most


def _map(place: int, curve: Curve, table: Sequence[Sequence[int]], bounds: Sequence[float], across: Axis) -> Plot:
    tall = (HEIGHT - BOTTOM - TOP) / len(table)
    wide = (WIDTH - RIGHT - LEFT) / WINDOWS
    shades: list[list[str]] = [[] for _ in range(LEVELS + 1)]
    for row, line in enumerate(table):
        levels = [level(value, bounds) for value in line]
        # Equal neighbours are one bar.
        edges = [0, *(at for at, (a, b) in enumerate(pairwise(levels), 1) if a != b), len(levels)]
        for start, end in pairwise(edges):
            shades[levels[start]].append(f"M{start} {row}h{end - start}v1h{start - end}z")
    paths = "".join(f'<path class="heat h{at}" d="{"".join(bars)}"/>' for at, bars in enumerate(shades) if at and bars)
    size = -(-curve.engines // len(table))
    body = f'<g transform="translate({LEFT} {TOP}) scale({wide:.5f} {tall:.5f})">{paths}</g>'
    last = len(table) - 1
    marks = [(row + 0.5, _engines(row, size, curve.engines)) for row in sorted({0, last // 2, last})]
    up = Axis(0, len(table), TOP, HEIGHT - BOTTOM, marks)
    title = f"Computed prompt tokens by engine and time: {curve.policy}"
    grouped = "" if size == 1 else f" Rows are groups of {size} engines, and show the busiest."
    svg = framed(
        f"map{place}", title, f"The stronger the shade, the more.{grouped}", (across, up), ("time", "engine"), body
    )
    return Plot(svg, {"cells": table, "names": [_engines(row, size, curve.engines) for row in range(len(table))]})


def _engines(row: int, size: int, engines: int) -> str:
    first, last = row * size, min((row + 1) * size, engines) - 1
    return str(first) if first == last else f"{first}-{last}"


def swatch(place: int) -> str:
    """The line and mark of a policy, for its legend."""
    dash = DASHES[place % len(DASHES)] or "none"
    return (
        f'<svg class="swatch p{place}" viewBox="0 0 40 12" aria-hidden="true"><path class="line" stroke-dasharray="{dash}" '
        f'd="M1 6H39"/><path class="mark" transform="translate(20 6)" d="{MARKS[place % len(MARKS)]}"/></svg>'
    )
