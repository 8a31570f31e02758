"""A panel as a picture, as Grafana would draw its lines: SVG, from what its queries answered over some seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 300, 64, 40, 64
COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#c4162a", "#8f3bb8", "#b58900", "#37872d", "#e02f44")
Points = Sequence[tuple[float, float]]


def drawn(title: str, unit: str, series: Mapping[str, Points], marks: Mapping[str, float]) -> str:
    """``series``: legend -> (seconds, value). ``marks``: what happened -> when."""
    points = [point for each in series.values() for point in each if isfinite(point[1])]
    first, last = min(at for at, _ in points), max(at for at, _ in points)
    top = 1.0 if unit == "percentunit" else max(value for _, value in points) * 1.1 or 1.0

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * (at - first) / max(last - first, 1e-9)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(value, 0.0), top) / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="16" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level = y(top * share)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{level:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end" fill="#555">{_told(top * share, unit)}</text>'
        )
    for name, at in marks.items():
        parts.append(
            f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#c4162a" '
            f'stroke-dasharray="4 3"/>'
            f'<text x="{x(at) + 4:.1f}" y="{TOP + 10}" fill="#c4162a">{escape(name)}</text>'
        )
    across, down = 16.0, HEIGHT - BOTTOM + 24.0
    for place, (legend, each) in enumerate(sorted(series.items())):
        colour = COLOURS[place % len(COLOURS)]
        line = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in each if isfinite(value))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        size = 24 + 7 * len(legend)
        if across + size > WIDTH:
            across, down = 16.0, down + 18
        parts.append(f'<rect x="{across:.0f}" y="{down - 9:.0f}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{across + 16:.0f}" y="{down:.0f}">{escape(legend)}</text>')
        across += size
    return "\n".join([*parts, "</svg>"]) + "\n"


def _told(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.2g} s" if value else "0"
    return f"{value / 1000:.3g} k" if value >= 1000 else f"{value:.3g}"
