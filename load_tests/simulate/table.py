"""Figures of policies side by side in a terminal: the best of a column stands out, and no figure is cut.

Columns go on in a further table where the terminal is not wide enough for all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

GAP = 2
"""Cells between two columns."""

LONG = 10_000
"""Milliseconds from which a column is in seconds."""


class Column(NamedTuple):
    """A figure: ``title`` in two lines, how it is written, and whether ``more`` of it is better; ``None``: neither."""

    key: str
    title: str
    form: str
    more: bool | None = False


COLUMNS = (
    Column("token_hit_rate", "\nhits", "{:.1%}", True),
    Column("ttft_mean_ms", "TTFT\nmean", "{:,.0f}"),
    Column("ttft_p50_ms", "TTFT\np50", "{:,.0f}"),
    Column("ttft_p90_ms", "TTFT\np90", "{:,.0f}"),
    Column("ttft_p99_ms", "TTFT\np99", "{:,.0f}"),
    Column("tpot_p50_ms", "TPOT\np50", "{:.1f}"),
    Column("tpot_p99_ms", "TPOT\np99", "{:.1f}"),
    Column("imbalance", "imba-\nlance", "{:.2f}"),
    Column("goodput", "good-\nput", "{:.1%}", True),
    Column("cost_per_session", "cost a\nsession", "{:.4f}"),
    Column("cost_per_request", "cost a\nrequest", "{:.5f}"),
    Column("session_p50_s", "session\np50", "{:,.1f}s"),
    Column("session_p90_s", "session\np90", "{:,.1f}s"),
    Column("moved_sessions", "moved\nsessions", "{:,.0f}"),
)
ASKED_FOR = ("goodput", "cost_per_session", "cost_per_request")
"""Left out where nothing was asked about them."""


class Shown(NamedTuple):
    """A column as it is printed, cell by cell."""

    title: str
    cells: Sequence[str]
    best: Sequence[bool]

    @property
    def width(self) -> int:
        """In characters."""
        return max(len(line) for text in (self.title, *self.cells) for line in text.splitlines() or [""])


def tables(title: str, rows: Mapping[str, Mapping[str, Any]], width: int, seeds: int = 1) -> Iterator[Table]:
    """Tables for a terminal of ``width`` columns. ``seeds``: of how many runs ``rows`` are the means."""
    some = next(iter(rows.values()))
    bound = "-" if some["ceiling"] is None else f"{some['ceiling']:.1%}"
    title = f"{title}; {some['requests']:,.0f} requests, hits at best {bound}"
    title += f"; mean ± deviation of {seeds} seeds" if seeds > 1 else ""
    names = max(len(name) for name in rows)
    left: list[Shown] = []
    for column in columns(rows):
        if left and names + sum(each.width + GAP for each in (*left, column)) > width:
            yield _table(title, list(rows), left)
            title, left = "", []
        left.append(column)
    yield _table(title, list(rows), left)


def _table(title: str, names: Sequence[str], columns: Sequence[Shown]) -> Table:
    shown = Table(
        title=Text(title) if title else None,
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - 1, 0, 0),
        title_justify="left",
    )
    shown.add_column("\npolicy", no_wrap=True)
    for column in columns:
        shown.add_column(column.title, justify="right", no_wrap=True, min_width=column.width)
    for place, name in enumerate(names):
        cells = [Text(each.cells[place], "bold" if each.best[place] else "") for each in columns]
        shown.add_row(Text(name), *cells)
    return shown


def columns(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Shown]:
    """All that somebody asked about, ``rows`` one below the other."""
    for column in COLUMNS:
        values = [row[column.key] for row in rows.values()]
        if column.key in ASKED_FOR and all(value is None for value in values):
            continue
        spreads = [row.get("spread", {}).get(column.key) for row in rows.values()]
        title, form, scale = _unit(column, values)
        cells = [_cell(form, scale, value, spread) for value, spread in zip(values, spreads, strict=True)]
        yield Shown(title, cells, best(values, column.more))


def best(values: Sequence[float | None], more: bool | None) -> list[bool]:
    """Which of them are the best there is; none where they do not differ."""
    told = [value for value in values if value is not None]
    if more is None or len(set(told)) < 2:
        return [False] * len(values)
    wanted = max(told) if more else min(told)
    return [value == wanted for value in values]


def _unit(column: Column, values: Sequence[float | None]) -> tuple[str, str, float]:
    if not column.key.endswith("_ms"):
        return column.title, column.form, 1.0
    if max((value for value in values if value is not None), default=0.0) < LONG:
        return f"{column.title} ms", column.form, 1.0
    return f"{column.title} s", "{:,.2f}", 1e-3


def _cell(form: str, scale: float, value: float | None, spread: float | None) -> str:
    if value is None:
        return "-"
    text = form.format(value * scale)
    return text if spread is None else f"{text} ±{form.format(spread * scale)}"
