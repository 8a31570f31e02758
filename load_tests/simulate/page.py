"""The comparison as one page that needs nothing else: no network, no script or font from elsewhere.

Everything stands in it without a script; the script only adds what a pointer shows, and hiding of policies.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from load_tests.simulate.curves import WINDOWS, Curve
from load_tests.simulate.look import SCRIPT, style
from load_tests.simulate.plots import (
    BOTTOM,
    HEIGHT,
    LEFT,
    LEVELS,
    RIGHT,
    TOP,
    WIDTH,
    Plot,
    by_turn,
    first_tokens,
    hit_rates,
    maps,
    swatch,
)
from load_tests.simulate.table import columns


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown of the traffic ``name`` on a ``fleet`` in words: figures by policy, means over ``seeds``, and ``curves``
    of the first seed, in the same order; ``ceiling`` is that seed's share."""

    name: str
    fleet: str
    ceiling: float
    seeds: Sequence[int]
    rows: Mapping[str, Mapping[str, Any]]
    curves: Sequence[Curve]


def page(shown: Page) -> str:
    """The whole page as HTML."""
    seconds = max((curve.seconds for curve in shown.curves), default=0.0)
    charts: dict[str, Plot] = {
        "cdf": first_tokens(shown.curves),
        "hits": hit_rates(shown.curves, seconds, shown.ceiling),
    }
    turns = by_turn(shown.rows)
    if turns is not None:
        charts["turns"] = turns
    drawn, most = maps(shown.curves, seconds)
    named = {f"map{place}": plot for place, plot in enumerate(drawn)}
    body = "".join(_parts(shown, charts, drawn, most, turns is not None))
    title = f"{escape(shown.name)}: policies compared"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{style(len(shown.rows))}</style></head><body>{body}"
        f'<script type="application/json" id="data">{_data(shown, charts | named, seconds)}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _parts(
    shown: Page, charts: Mapping[str, Plot], drawn: Sequence[Plot], most: float, sessions: bool
) -> Iterator[str]:
    some = next(iter(shown.rows.values()))
    yield f"<header><h1>{escape(shown.name)}</h1><p>{escape(shown.fleet)}; {some['requests']:,.0f} requests."
    if len(shown.seeds) > 1:
        yield f" Figures are means of {len(shown.seeds)} seeds ± standard deviation; plots are of seed {shown.seeds[0]}."
    yield '</p></header><nav aria-label="Policies">'
    for place, name in enumerate(shown.rows):
        yield f'<button type="button" data-p="{place}" aria-pressed="true">{swatch(place)}{escape(name)}</button>'
    yield f"</nav><main><section><h2>Figures</h2>{_table(shown)}</section>"
    yield '<section class="plots">'
    yield _figure("Time to first token", "Share of requests whose first token had come by then.", charts["cdf"])
    yield _figure(
        "Hit rate over time",
        f"Share of prompt tokens found cached, by arrival; dotted: a cache without bounds, {shown.ceiling:.1%}.",
        charts["hits"],
    )
    if sessions:
        yield _figure(
            "Time to first token by turn", "Mean, by the request's number within its session.", charts["turns"]
        )
    yield "</section><h2>Load by engine</h2><p>Prompt tokens that each engine had to compute, by time. "
    shades = "".join(f'<i class="h{at}"></i>' for at in range(LEVELS + 1))
    yield f'<span class="scale">0 {shades} {most:,.0f} tokens and more, by squares</span></p><section class="plots">'
    for place, ((name, row), plot) in enumerate(zip(shown.rows.items(), drawn, strict=True)):
        imbalance = "" if row["imbalance"] is None else f"The busiest engine has {row['imbalance']:.2f} times the mean."
        yield _figure(name, imbalance, plot, f"series p{place}")
    yield '</section></main><div id="tip" role="status" hidden></div>'


def _figure(title: str, told: str, plot: Plot, kind: str = "") -> str:
    return f'<figure class="{kind}"><h3>{escape(title)}</h3>{plot.svg}<figcaption>{escape(told)}</figcaption></figure>'


def _table(shown: Page) -> str:
    found = list(columns(shown.rows))
    heads = "".join(f'<th scope="col">{escape(each.title.replace("-" + chr(10), "").strip())}</th>' for each in found)
    lines = []
    for place, name in enumerate(shown.rows):
        cells = "".join(
            f"<td>{'<strong>' if each.best[place] else ''}{escape(each.cells[place])}"
            f"{'</strong>' if each.best[place] else ''}</td>"
            for each in found
        )
        lines.append(f'<tr class="series p{place}"><th scope="row">{swatch(place)}{escape(name)}</th>{cells}</tr>')
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Figures by policy"><table><thead><tr>'
        f'<th scope="col">policy</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        "<p>Bold: the best of a column.</p>"
    )


def _data(shown: Page, plots: Mapping[str, Plot], seconds: float) -> str:
    """For the script; a ``<`` inside would end the element."""
    data = {
        "policies": list(shown.rows),
        "seconds": seconds,
        "windows": WINDOWS,
        "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "plots": {name: plot.data for name, plot in plots.items()},
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
