"""The page with plots: what stands in it, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from load_tests.simulate.curves import WINDOWS, Curve, Seen, curve, distribution, hits, load
from load_tests.simulate.engine import Options
from load_tests.simulate.figures import row
from load_tests.simulate.fleet import Simulation
from load_tests.simulate.page import Page, page
from load_tests.simulate.plots import Axis, logarithmic, of_time
from load_tests.workloads.catalogue import find
from policies.base import load as policy

VOID = {"meta", "br", "path", "input"}


class Parsed(HTMLParser):
    """Elements that are open, texts by the element around them, and attributes of all."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[str]:
        """Texts right inside elements of that kind."""
        return [text for around, text in self.texts if around == tag]


def made(
    name: str = "agents", title: str | None = None, policies: Iterable[str] = ("round_robin", "cache_aware")
) -> Page:
    """A page's contents, of a real run."""
    traffic = find(name, workers=3, limit=200)
    rows, curves = {}, []
    for each in policies:
        outcome = Simulation(traffic, policy(each), 3, Options(block=traffic.block)).run()
        rows[each] = row(outcome, 0.9)
        curves.append(curve(each, outcome))
    return Page(title or traffic.name, "3 workers", 0.9, (0,), rows, curves)


@pytest.fixture(scope="module")
def shown() -> Page:
    return made()


@pytest.fixture(scope="module")
def text(shown: Page) -> str:
    return page(shown)


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    decoded: dict[str, Any] = json.loads(found.group(1))
    return decoded


def test_it_is_well_formed_and_its_plots_are_xml(text: str) -> None:
    assert Parsed(text).open == []
    plots = re.findall(r"<svg.*?</svg>", text, re.S)
    assert sum('class="plot"' in each for each in plots) == 3 + 2
    for each in plots:
        assert ElementTree.fromstring(each).tag == "svg"


def test_it_needs_nothing_from_elsewhere(text: str) -> None:
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    for tag, attributes in Parsed(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "href", "xlink:href", "srcset"} & attributes.keys()
    assert "default-src 'none'" in text


def test_each_plot_has_a_title_and_a_description(text: str) -> None:
    for each in re.findall(r'<svg class="plot".*?</svg>', text, re.S):
        root = ElementTree.fromstring(each)
        assert root.get("role") == "img"
        named = {child.get("id"): child.text for child in root if child.tag in ("title", "desc")}
        assert root.get("aria-labelledby", "").split() == list(named)
        assert all(named.values())


def test_names_are_text_wherever_they_stand() -> None:
    name = "</script><script>alert(1)</script><b>\"'&"
    shown = made(title=name, policies=["random"])
    only = next(iter(shown.rows.values()))
    curves = [Curve(name, each.engines, each.seconds, each.requests) for each in shown.curves]
    text = page(Page(name, name, 0.9, (0,), {name: only}, curves))
    parsed = Parsed(text)
    assert parsed.open == []
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "b" not in [tag for tag, _ in parsed.tags]
    assert parsed.of("h1") == [name]
    assert parsed.of("button") == [name]
    assert data(text)["policies"] == [name]


def test_the_table_has_all_policies_and_their_best_in_bold(shown: Page, text: str) -> None:
    parsed = Parsed(text)
    assert [name for name in parsed.of("th") if name in shown.rows] == list(shown.rows)
    assert f"{shown.rows['cache_aware']['token_hit_rate']:.1%}" in parsed.of("strong")
    assert f"{shown.rows['round_robin']['token_hit_rate']:.1%}" in parsed.of("td")


def test_every_policy_can_be_told_without_its_colour(text: str) -> None:
    dashes = re.findall(r'<g class="series p\d"><path class="line" stroke-dasharray="([^"]*)"', text)
    assert len(set(dashes[:2])) == 2
    swatches = re.findall(r'<button.*?class="mark"[^>]* d="([^"]*)"', text)
    assert len(set(swatches)) == 2


def test_what_a_pointer_shows_goes_along(shown: Page, text: str) -> None:
    found = data(text)
    assert list(found["plots"]) == ["cdf", "hits", "turns", "map0", "map1"]
    cells = found["plots"]["map1"]["cells"]
    assert [len(line) for line in cells] == [WINDOWS] * 3
    assert sum(map(sum, cells)) == sum(each.prompt - each.cached for each in shown.curves[1].requests)
    assert found["plots"]["cdf"]["series"][0][-1][2].startswith("100.0% by ")


def test_where_there_are_no_sessions_there_are_no_turns() -> None:
    assert "turns" not in data(page(made("load", policies=["random"])))["plots"]


def test_it_says_of_how_many_seeds_its_figures_are() -> None:
    shown = made(policies=["random"])
    text = page(Page(shown.name, shown.fleet, shown.ceiling, (3, 4), shown.rows, shown.curves))
    assert "means of 2 seeds ± standard deviation; plots are of seed 3" in text


def test_a_long_run_of_many_engines_and_policies_stays_small(shown: Page) -> None:
    requests = [Seen(at / 10, at / 10 + at % 97 / 50, 1000, at % 991, at * 7919 % 200) for at in range(12_000)]
    curves = [Curve(f"policy {at}", 200, 1300.0, requests) for at in range(5)]
    only = shown.rows["round_robin"]
    text = page(Page("long", "200 workers", 0.5, (0,), {each.policy: only for each in curves}, curves))
    assert len(text.encode()) < 1_000_000
    assert data(text)["plots"]["map0"]["names"][:2] == ["0-4", "5-9"]


def test_a_window_that_stands_alone_is_a_mark() -> None:
    requests = [Seen(float(at), at + 0.5, 100, 50, 0) for at in (0, 50, 51, 52, 53)]
    only = next(iter(made(policies=["random"]).rows.values()))
    text = page(Page("gaps", "one", 0.9, (0,), {"one": only}, [Curve("one", 1, 60.0, requests)]))
    (plot,) = re.findall(r'<svg class="plot" data-plot="hits".*?</svg>', text, re.S)
    assert plot.count('class="mark"') == 1


# -- numbers ------------------------------------------------------------------------------------------------------------

FOUR = Curve(
    "one",
    2,
    8.0,
    [Seen(0, 0.5, 100, 0, 0), Seen(1, 1.1, 100, 50, 0), Seen(5, 7.0, 300, 300, 1), Seen(5, 7.9, 100, 0, 1)],
)


def test_a_distribution_ends_with_the_slowest() -> None:
    assert distribution(FOUR) == [
        (pytest.approx(100), 0.25),
        (pytest.approx(500), 0.5),
        (pytest.approx(2000), 0.75),
        (pytest.approx(2900), 1.0),
    ]
    assert distribution(Curve("none", 1, 0.0, [])) == []


def test_hit_rates_are_weighted_by_tokens_and_have_gaps() -> None:
    assert hits(FOUR, 8.0, 4) == [0.25, None, 0.75, None]


def test_load_is_what_was_computed_when_it_was_done() -> None:
    assert load(FOUR, 8.0, 4) == [[150, 0, 0, 0], [0, 0, 0, 100]]


def test_of_a_group_of_engines_the_busiest_is_shown() -> None:
    assert load(FOUR, 8.0, 4, rows=1) == [[150, 0, 0, 100]]


def test_axes_reach_round_both_ends() -> None:
    axis = logarithmic([3.0, 70.0, 800.0], 0, 300)
    assert (axis.low, axis.high) == (2.0, 1000.0)
    assert axis(2.0) == 0
    assert axis(1000.0) == 300
    assert [text for _, text in axis.ticks] == ["2ms", "5ms", "10ms", "20ms", "50ms", "100ms", "200ms", "500ms", "1s"]
    assert [text for _, text in of_time(7100.0, 0, 100).ticks] == ["0 min", "50 min", "100 min"]
    assert Axis(0, 10, 100, 0, ())(5) == 50
    same = logarithmic([10.0, 10.0], 0, 100)
    assert same.low <= 10 < same.high
