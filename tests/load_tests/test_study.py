"""The study: what it runs, what each ablation hides, and the report that is made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from load_tests.simulate.places import Place
from load_tests.study import runs as study, tables
from load_tests.study.ablation import WITHOUT, without
from policies.base import Fleet, Rates, Request, load

RATES = Rates(base=0.0, token=1e-3, attention=0.0, decode=0.0)


def two() -> Fleet:
    places = [Place(0, RATES), Place(1, RATES)]
    places[0].charge("a", 1.0, 0.0)
    places[0].homes, places[0].busy = 3, 2.0
    return Fleet(places)


def request() -> Request:
    return Request(tokens=2000, holdings={0: 1500}, session=5, home=0, crowd=0.5, turns=9.0)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_is_hidden_is_put_back(name: str) -> None:
    fleet = two()
    before = [(each.homes, each.wait, each.head, each.busy) for each in fleet.targets]
    asked = request()
    without(name).choose(asked, fleet, 0.5)
    assert [(each.homes, each.wait, each.head, each.busy) for each in fleet.targets] == before
    assert (asked.holdings, asked.home) == ({0: 1500}, 0)


def test_nothing_hidden_is_the_policy_itself() -> None:
    ours, whole = load("cache_aware").choose(request(), two(), 0.5), without("all of it").choose(request(), two(), 0.5)
    assert (ours.target.id, ours.terms) == (whole.target.id, whole.terms)


def test_without_a_prefix_or_a_wait_the_other_is_decisive() -> None:
    held = Request(tokens=2000, holdings={0: 1500})
    fleet = two()
    fleet.targets[0].busy = 0.0
    assert without("all of it").choose(held, fleet, 0.0).target.id == 0
    assert without("no prefix").choose(held, fleet, 0.0).target.id == 1
    little = Request(tokens=2000, holdings={0: 500})
    assert without("all of it").choose(little, fleet, 0.0).target.id == 1
    assert without("no wait").choose(little, fleet, 0.0).target.id == 0


def test_a_study_runs_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {"rollouts": study.Case("rollouts", 2), "tree": study.Case("tree", 4), "load": study.Case("load", 2)}
    for module in (study, tables):
        monkeypatch.setattr(module, "CASES", cases)
    monkeypatch.setattr(study, "POLICIES", ("round_robin", "cache_aware", "lmetric"))
    monkeypatch.setattr(study, "HARSH", ("load",))
    out = tmp_path / "study.json"
    assert (
        study.main(["--out", str(out), "--seeds", "5,6", "--parts", "policies,modes,conditions", "--processes", "1"])
        == 0
    )
    runs: list[dict[str, Any]] = json.loads(out.read_text())
    assert len(runs) == 2 * (3 * 3 + 3 + 2 * len(study.CONDITIONS))
    rows = study.grouped(runs, "policies")["tree"]
    assert 1 <= rows["cache_aware"]["node_computed"] <= 4
    assert (
        study.main(["--out", str(out), "--seeds", "5", "--parts", "policies", "--only", "lmetric", "--processes", "1"])
        == 0
    )
    assert len(json.loads(out.read_text())) == len(runs), "runs of the same name take their place"
    assert tables.main([str(out), "policies", "modes", "conditions"]) == 0
    said = capsys.readouterr().out
    assert "### tree" in said
    assert "| **cache_aware** |" in said
    assert "| streaming session |" in said
    assert "| one engine half as fast |" in said
    assert tables.main([str(tmp_path / "none.json")]) == 2


def test_a_study_without_its_traces_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WARMROUTE_TRACES", raising=False)
    assert study.main(["--parts", "modes"]) == 2
    assert "WARMROUTE_TRACES" in capsys.readouterr().err
