"""Compose file, Kubernetes manifests and example configurations agree with their schemas and with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import Config, parse

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
SECRETS = {
    name: f"value-of-{name}"
    for name in ("WARMROUTE_ADMIN_TOKEN", "ENGINE_KEY", "AGENTS_KEY", "AGENTS_KEY_NEXT", "BATCH_KEY", "GUESTS_KEY")
}


def documents() -> dict[str, dict[str, Any]]:
    """Kind -> manifest; each file has one."""
    found = [yaml.safe_load(path.read_text()) for path in MANIFESTS]
    return {document["kind"]: document for document in found}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_satisfy_the_schema_strictly(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_manifests_fit_together() -> None:
    found = documents()
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert found[kind]["spec"][key]["matchLabels"].items() <= labels.items()
    pod = deployment["template"]["spec"]
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"]
    assert pod["volumes"][0]["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    config = parse(found["ConfigMap"]["data"]["warmroute.yaml"], {})
    assert ports == {"http": config.listen.port, "metrics": config.metrics.port if config.metrics else None}
    assert config.drain + config.drain_limit < pod["terminationGracePeriodSeconds"]


def test_the_compose_file_names_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert {"gateway", "engine-a", "engine-b", "prometheus", "grafana"} == services.keys()
    for name, service in services.items():
        assert "image" in service, name
        assert set(service.get("depends_on", ())) <= services.keys(), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
            assert known, volume
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    config = parse((DEPLOY / "examples/compose.yaml").read_text(), {})
    assert {worker.url for worker in config.workers} == {"http://engine-a:8000", "http://engine-b:8000"}
    jobs = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    scraped = {target for job in jobs for each in job["static_configs"] for target in each["targets"]}
    assert {target.split(":")[0] for target in scraped} <= services.keys()
    assert config.metrics is not None
    assert f"gateway:{config.metrics.port}" in scraped


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    config = parse(path.read_text(), SECRETS)
    assert isinstance(config, Config)
    assert config.workers
    config.make_policy(config.policy)
    for tenant in config.tenants:
        if tenant.policy is not None:
            config.make_policy(tenant.policy)


def test_the_image_s_command_takes_the_file_that_is_mounted() -> None:
    path = "/etc/warmroute/warmroute.yaml"
    assert path in (DEPLOY / "Dockerfile").read_text()
    (container,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == path
    assert any(
        path in volume
        for volume in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gateway"]["volumes"]
    )
