"""The table in a terminal."""

from __future__ import annotations

import re
from io import StringIO
from typing import Any

from rich.console import Console

from load_tests.simulate.table import COLUMNS, best, columns, tables


def row(**figures: Any) -> dict[str, Any]:
    """One policy's figures, those not given as nothing tells them."""
    return {"requests": 5, "ceiling": 0.5} | {column.key: None for column in COLUMNS} | figures


def printed(rows: dict[str, dict[str, Any]], width: int = 160) -> str:
    """As a terminal gets it."""
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="standard")
    for each in tables("a title", rows, width):
        console.print(each)
    return file.getvalue()


def test_the_best_of_a_column_is_bold() -> None:
    said = printed({"one": row(token_hit_rate=0.25, imbalance=1.5), "two": row(token_hit_rate=0.75, imbalance=2.5)})
    bold = {cell.strip() for cell in re.findall(r"\x1b\[1m([^\x1b]*)", said)}
    assert {"75.0%", "1.50"} <= bold
    assert not {"25.0%", "2.50"} & bold
    assert "25.0%" in said


def test_more_or_less_is_better_and_where_nothing_differs_nothing_is_best() -> None:
    assert best([1.0, 3.0, None, 3.0], more=True) == [False, True, False, True]
    assert best([1.0, 3.0, None, 3.0], more=False) == [True, False, False, False]
    assert best([2.0, 2.0], more=True) == [False, False]
    assert best([2.0, None], more=False) == [False, False]
    assert best([1.0, 2.0], more=None) == [False, False]


def test_a_column_is_in_seconds_where_milliseconds_would_be_long() -> None:
    found = {each.title: each for each in columns({"one": row(ttft_p50_ms=9999.0, ttft_p99_ms=10000.0)})}
    assert found["TTFT\np50 ms"].cells == ["9,999"]
    assert found["TTFT\np99 s"].cells == ["10.00"]


def test_what_nobody_asked_for_is_left_out_and_what_is_not_known_a_dash() -> None:
    titles = [each.title for each in columns({"one": row()})]
    assert not any("cost" in title or "good" in title for title in titles)
    assert all(each.cells == ["-"] for each in columns({"one": row()}))
    assert any("good" in each.title for each in columns({"one": row(goodput=0.5)}))


def test_a_deviation_stands_beside_its_mean() -> None:
    shown = next(columns({"one": row(token_hit_rate=0.5, spread={"token_hit_rate": 0.01})}))
    assert shown.cells == ["50.0% ±1.0%"]


def test_markup_in_a_name_is_text() -> None:
    assert "[bold]x" in printed({"[bold]x": row(token_hit_rate=0.5)})
