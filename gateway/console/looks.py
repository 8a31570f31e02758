"""How things look in a terminal: numbers as people read them, tables that keep names whole, and no control characters.

Names of workers, tenants, models and sessions are what a configuration, an engine or a client made them. `plain` shows what a
terminal would obey as an escape; `said` makes text of it that is no markup either. Nothing else may put a name on the screen.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Generic, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

NOTHING = "-"
"""For what is not known."""
LONGEST = 200
"""Characters of a name."""
GAP = 2
"""Between two columns."""
STYLES = {
    "ready": "green",
    "joining": "yellow",
    "draining": "yellow",
    "down": "red",
    "exact": "green",
    "session": "yellow",
    "none": "red",
}
"""Of states of workers and rungs of belief."""

_OBEYED = re.compile("[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""What a terminal may obey of JSON, which escapes the rest itself."""

Row = TypeVar("Row")


class Output(Console):
    """A console whose reader may leave, which is for the command to judge."""

    def on_broken_pipe(self) -> None:
        """Not to end the process."""
        raise BrokenPipeError


def console() -> Console:
    """Standard output: colours on a terminal only, and characters that it cannot show as escapes."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Output(highlight=False, markup=False, emoji=False)


def plain(text: str) -> str:
    """``text`` with what does not print, or turns the direction of what follows, as escapes."""
    shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return _visible(shown)


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def sentence(text: str) -> str:
    """The same for a text of any length."""
    return _visible(text)


def said(text: str | None, style: str = "") -> Text:
    """A name."""
    return Text(NOTHING if text is None else plain(text), style)


def state(text: str) -> Text:
    """The state of a worker, or a rung."""
    return said(text, STYLES.get(text, ""))


def say(out: Console, *parts: str | Text) -> None:
    """A line for people: broken between words on a terminal, and nowhere else. Strings are ours, names are `said`."""
    out.print(Text.assemble(*parts), soft_wrap=not out.is_terminal)


def raw(told: bytes) -> None:
    """Print JSON as it came; on a terminal what that would obey is escaped, which is the same JSON."""
    text = told.decode("utf-8", "replace")
    if sys.stdout.isatty():
        text = _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    print(text)


# -- numbers ------------------------------------------------------------------------------------------------------------


def count(value: float | None) -> str:
    """A whole number."""
    return NOTHING if value is None else f"{value:,.0f}"


def amount(value: float | None) -> str:
    """A number in three digits: 950, 12.3k, 1.5M."""
    if value is None:
        return NOTHING
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T"))


def size(value: float | None) -> str:
    """Bytes: 950 B, 1.5 MiB."""
    if value is None:
        return NOTHING
    return _scaled(value, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB"))


def _scaled(value: float, step: float, units: Sequence[str]) -> str:
    at = 0
    # Not to become 1000k by rounding.
    while abs(value) >= step * 0.9995 and at < len(units) - 1:
        value /= step
        at += 1
    digits = 0 if not at or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    number = f"{value:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number}{units[at]}"


def duration(seconds: float | None) -> str:
    """950 us, 12 ms, 3.2 s, 4 min, 2.5 h, 3 d."""
    if seconds is None:
        return NOTHING
    for most, unit, name in ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < most * 0.9995:
            return f"{_short(seconds / unit)} {name}"
    return f"{_short(seconds / 86400.0)} d"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def milliseconds(value: float | None) -> str:
    """Of a cost."""
    return NOTHING if value is None else f"{value:,.1f}"


def percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share * 100:.1f} %"


def number(value: int, what: str) -> str:
    """1 session, 2 sessions."""
    return f"{value:,} {what}" if value == 1 else f"{value:,} {what}s"


def pick(text: str, width: int) -> str:
    """A name in so many cells: its beginning and its end, which tell names of one fleet apart."""
    if cell_len(text) <= width:
        return text
    head, tail = text[: max(1, (width - 1) // 3)], ""
    for each in reversed(text[len(head) :]):
        if cell_len(head) + 1 + cell_len(each + tail) > width:
            break
        tail = each + tail
    return f"{head}…{tail}"


# -- tables -------------------------------------------------------------------------------------------------------------


class Column(NamedTuple, Generic[Row]):
    """One column of a table; ``spare``: it is left out where a terminal is too narrow, the last of those first."""

    head: str
    cell: Callable[[Row], str | Text]
    right: bool = False
    spare: bool = False


def table(out: Console, columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    """Print ``rows``. Names stay whole: where a terminal is too narrow columns are left out, and what is left may be wider."""
    cells = [[_text(column.cell(row)) for row in rows] for column in columns]
    widths = [
        max(cell_len(column.head), *(each.cell_len for each in found))
        for column, found in zip(columns, cells, strict=True)
    ]
    shown = list(range(len(columns)))
    wide = _wide(widths, shown)
    while out.is_terminal and wide > out.width:
        spare = [at for at in shown if columns[at].spare]
        if not spare:
            break
        shown.remove(spare[-1])
        wide = _wide(widths, shown)
    grid = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for at in shown:
        justify = "right" if columns[at].right else "left"
        grid.add_column(columns[at].head, justify=justify, no_wrap=True, min_width=widths[at])  # type: ignore[arg-type]
    for row in range(len(rows)):
        grid.add_row(*(cells[at][row] for at in shown))
    before = out.width
    out.width = max(before, wide)
    try:
        out.print(grid, crop=False)
    finally:
        out.width = before


def _wide(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + GAP * (len(shown) - 1)


def _text(cell: str | Text) -> Text:
    return cell if isinstance(cell, Text) else said(cell)
