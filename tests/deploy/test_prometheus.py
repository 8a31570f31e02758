"""Rules and alerts by Prometheus's own tool, and a reference of metrics that is what the code says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import yaml

from gateway.reference import reference, updated
from tests.conftest import Require

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
README = (FOLDER / "README.md").read_text()
ALERTS = [
    rule for group in yaml.safe_load((FOLDER / "rules/alerts.yml").read_text())["groups"] for rule in group["rules"]
]
CURE = "apt-get install prometheus"


def promtool(require: Require, *arguments: str | Path) -> str:
    found = shutil.which("promtool")
    require("prometheus", found is not None, CURE)
    assert found is not None
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rules_say_what_they_should(require: Require) -> None:
    """Every alert fires and is quiet when it should; ratios are right to the number."""
    assert "SUCCESS" in promtool(require, "test", "rules", Path(__file__).with_name("rules.yml"))


def test_every_alert_is_tried() -> None:
    tried = {
        test["alertname"]
        for part in yaml.safe_load(Path(__file__).with_name("rules.yml").read_text())["tests"]
        for test in part.get("alert_rule_test", [])
        if test["exp_alerts"]
    }
    assert tried == {rule["alert"] for rule in ALERTS}


def test_promtool_accepts_the_configuration_with_its_rules(require: Require) -> None:
    told = promtool(require, "check", "config", FOLDER / "prometheus.yml")
    assert "2 rule files found" in told
    assert "FAILED" not in told


def test_every_alert_has_a_severity_and_a_runbook() -> None:
    headings = {re.sub(r"[^a-z0-9-]", "", line[4:].lower()) for line in README.splitlines() if line.startswith("### ")}
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert path == "deploy/prometheus/README.md"
        assert anchor in headings, rule["alert"]
        assert anchor.startswith("warmroute")


async def test_the_reference_is_what_the_code_says() -> None:
    """``python -m gateway.reference deploy/prometheus/README.md`` writes it."""
    assert updated(README, await reference()) == README


async def test_every_metric_that_rules_name_is_told() -> None:
    told = set(re.findall(r"^\| `(\w+)`", await reference(), re.MULTILINE))
    for file in ("rules/recording.yml", "rules/alerts.yml", "README.md"):
        for name in re.findall(r"(?<![:\w])warmroute_\w+(?![:\w*])", (FOLDER / file).read_text()):
            base = re.sub(r"_(bucket|count|sum)$", "", name)
            assert base in told or f"{base}_total" in told, (file, name)
