"""The Helm chart, rendered by Helm: what is recorded, by the schemas, with a configuration that the gateway takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import Config, parse
from tests.conftest import Require
from tests.deploy.helm import CHART, COPIES, CURE, RENDERED, cases, helm, objects, render, run
from tests.deploy.test_prometheus import promtool

SECRETS = {"WARMROUTE_REDIS": "redis://:secret@redis:6379/0", "ISOLATION_KEY": "some-long-key-for-salts"}
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself does not know."""


@pytest.fixture(scope="module")
def program(require: Require) -> str:
    found = helm()
    require("helm", found is not None, CURE)
    assert found is not None
    return found


def recorded(name: str) -> dict[tuple[str, str], dict[str, Any]]:
    return objects((RENDERED / f"{name}.yaml").read_text())


def configuration(found: dict[tuple[str, str], dict[str, Any]]) -> Config:
    """As the pods would read it."""
    return parse(found["ConfigMap", "warmroute"]["data"]["warmroute.yaml"], SECRETS)


def pod(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    spec = found["Deployment", "warmroute"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.mark.parametrize("name", cases())
def test_it_gives_what_is_recorded(name: str, program: str) -> None:
    """``python -m tests.deploy.helm`` records it."""
    assert objects(render(program, *cases()[name])) == recorded(name)


def test_helm_finds_nothing_wrong(program: str) -> None:
    done = run(program, "lint", "--strict", CHART, "--values", RENDERED / "full.values.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", cases())
def test_objects_satisfy_the_schemas_strictly(name: str) -> None:
    for (kind, _), each in recorded(name).items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", cases())
def test_objects_fit_together(name: str) -> None:
    found = recorded(name)
    config, spec = configuration(found), pod(found)
    (container,) = spec["containers"]
    assert config.metrics is not None
    assert config.health is not None
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.listen.port, "metrics": config.metrics.port, "health": config.health.port}
    assert config.drain + config.drain_limit + 30 < spec["terminationGracePeriodSeconds"]
    labels = found["Deployment", "warmroute"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service", "warmroute"]["spec"]["selector"].items() <= labels.items()
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert found[kind, "warmroute"]["spec"][key]["matchLabels"].items() <= labels.items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_without_redis_clients_stay_and_with_it_they_need_not() -> None:
    alone, together = recorded("default"), recorded("full")
    assert configuration(alone).replicas.redis is None
    assert alone["Service", "warmroute"]["spec"]["sessionAffinity"] == "ClientIP"
    assert configuration(together).replicas.redis == SECRETS["WARMROUTE_REDIS"]
    assert configuration(together).replicas.scope == "llm-warmroute"
    assert together["Service", "warmroute"]["spec"]["sessionAffinity"] == "None"
    (container,) = pod(together)["containers"]
    assert container["args"][-2:] == ["--processes", "2"]
    assert container["env"][0] == {
        "name": "WARMROUTE_REDIS",
        "valueFrom": {"secretKeyRef": {"name": "warmroute-redis", "key": "url"}},
    }


def test_rights_are_given_for_discovery_alone() -> None:
    alone, finding = recorded("default"), recorded("full")
    assert not {"Role", "RoleBinding"} & {kind for kind, _ in alone}
    assert pod(alone)["automountServiceAccountToken"] is False
    assert pod(finding)["automountServiceAccountToken"] is True
    plain = yaml.safe_load((CHART.parents[1] / "kubernetes/role.yaml").read_text())
    role, binding = finding["Role", "warmroute-discovery"], finding["RoleBinding", "warmroute-discovery"]
    assert role["rules"] == plain["rules"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "warmroute", "namespace": "llm"}]


def test_what_the_chart_has_copies_of_is_the_same() -> None:
    """``python -m tests.deploy.helm`` makes them."""
    for name, source in COPIES.items():
        copied = {path.name: path.read_text() for path in (CHART / "files" / name).iterdir()}
        assert copied == {path.name: path.read_text() for path in source.iterdir()}


def test_rules_and_dashboards_come_through_whole(program: str, require: Require, tmp_path: Path) -> None:
    found = objects(render(program, "--set", "prometheusRule.enabled=true,dashboards.enabled=true"))
    for path in COPIES["rules"].iterdir():
        spec = found["PrometheusRule", f"warmroute-{path.stem}"]["spec"]
        assert spec == yaml.safe_load(path.read_text())
        rules = tmp_path / path.name
        rules.write_text(yaml.safe_dump(spec))
        assert "SUCCESS" in promtool(require, "check", "rules", rules)
    for path in COPIES["dashboards"].iterdir():
        each = found["ConfigMap", f"warmroute-dashboard-{path.stem}"]
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(each["data"][f"warmroute-{path.name}"]) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("processes=0", "processes"),
        ("redis.url=http://redis", "redis"),
        ("service.type=Internal", "service"),
        ("redis.existingSecrets=a", "existingSecrets"),
    ],
)
def test_wrong_values_are_refused_by_name(wrong: str, named: str, program: str) -> None:
    done = run(program, "template", "warmroute", CHART, "--set", wrong)
    assert done.returncode != 0
    assert named in done.stderr


def test_every_value_is_told_and_known_to_the_schema() -> None:
    text = (CHART / "values.yaml").read_text()
    values, schema = yaml.safe_load(text), json.loads((CHART / "values.schema.json").read_text())
    assert values.keys() | {"global"} == schema["properties"].keys()
    for name, value in values.items():
        known = schema["properties"][name].get("properties")
        if known is not None:
            assert value.keys() == known.keys(), name
    used = set(re.findall(r"\.Values\.(\w+)", "".join(path.read_text() for path in CHART.glob("templates/*"))))
    assert used == values.keys()
