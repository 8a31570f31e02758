"""Compose file, Kubernetes manifests and example configurations agree with their schemas and with each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gateway.cli import main
from gateway.config import Config, parse
from gateway.discovery.inference_pool import OLDER, V1
from gateway.discovery.kubernetes import SLICES
from gateway.templates import Template
from gateway.tokens import Tokenizer as TokenFile
from load_tests.engine.__main__ import options_from, parser as engine_parser

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OPERATOR = DEPLOY / "kubernetes/prometheus-operator"
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))
SECRETS = {
    name: f"value-of-{name}"
    for name in (
        "WARMROUTE_ADMIN_TOKEN",
        "ENGINE_KEY",
        "AGENTS_KEY",
        "AGENTS_KEY_NEXT",
        "BATCH_KEY",
        "GUESTS_KEY",
        "CODING_KEY",
        "CHAT_KEY",
        "TOKEN_KEY",
        "ISOLATION_KEY",
        "REDIS_PASSWORD",
    )
}


GATEWAYS = ("gateway-a", "gateway-b")
"""Of the compose file."""


def minutes(text: str) -> float:
    """Seconds of a number of minutes."""
    return 60.0 * float(text.removesuffix("m"))


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
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert "/tmp" in mounts
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod["securityContext"]["runAsNonRoot"] is True
    config = parse(found["ConfigMap"]["data"]["warmroute.yaml"], {})
    assert config.metrics is not None
    assert config.health is not None
    assert ports == {"http": config.listen.port, "metrics": config.metrics.port, "health": config.health.port}
    assert config.drain + config.drain_limit < pod["terminationGracePeriodSeconds"]


def test_the_autoscaler_scales_the_deployment_and_is_slow_to_take_away() -> None:
    found = documents()
    spec = found["HorizontalPodAutoscaler"]["spec"]
    deployment = found["Deployment"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": deployment["apiVersion"],
        "kind": deployment["kind"],
        "name": deployment["metadata"]["name"],
    }
    assert spec["minReplicas"] > found["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    behavior = spec["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] > behavior["scaleUp"]["stabilizationWindowSeconds"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    # Of which a share is asked for.
    assert "cpu" in container["resources"]["requests"]


def test_the_operator_finds_the_metrics_under_the_job_that_alerts_know() -> None:
    service, monitor = (
        yaml.safe_load((OPERATOR / f"{name}.yaml").read_text()) for name in ("service", "servicemonitor")
    )
    kubernetes_validate.validate(service, kubernetes_validate.latest_version(), strict=True)
    (container,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "warmroute"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    # Not those of the other Service, which has no such port.
    clients = documents()["Service"]["metadata"]["labels"]
    assert not monitor["spec"]["selector"]["matchLabels"].items() <= clients.items()
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_what_discovery_may_do_is_what_it_does() -> None:
    found = documents()
    role, binding = found["Role"], found["RoleBinding"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", role["metadata"]["name"])
    assert [each["name"] for each in binding["subjects"]] == [found["ServiceAccount"]["metadata"]["name"]]
    allowed = {
        (f"{group}/{resource}".lstrip("/"), verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    collections = [("v1", "pods"), (SLICES, "endpointslices"), (V1, "inferencepools"), (OLDER, "inferencepools")]
    asked = {
        (f"{'' if group == 'v1' else group.split('/')[0]}/{resource}".lstrip("/"), verb)
        for group, resource in collections
        for verb in ("list", "watch")
    }
    assert allowed == asked


def test_the_compose_file_names_what_exists() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    assert {"gateway-a", "gateway-b", "redis", "engine-a", "engine-b", "prometheus", "grafana"} == services.keys()
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
    assert {f"{name}:{config.metrics.port}" for name in GATEWAYS} <= scraped
    assert config.replicas.redis is not None
    place = urlsplit(config.replicas.redis)
    assert place.hostname in services
    for name in GATEWAYS:
        # Processes of one gateway meet in a folder, and its own files it cannot write.
        assert config.replicas.processes == 1 or services[name]["tmpfs"] == ["/tmp"]
        (port,) = services[name]["ports"]
        assert port.split(":")[1] == str(config.listen.port)
        assert config.drain + config.drain_limit < minutes(services[name]["stop_grace_period"])


def here(text: str, folder: Path) -> str:
    """An example whose files under /models and /etc lie in ``folder``: a small tokenizer and a template, keys, certificates."""
    for name in re.findall(r"/etc/([\w./-]+)", text):
        place = folder / "etc" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("# keys\nsome-long-key-of-somebody\n" if place.suffix == ".keys" else "a certificate")
    text = text.replace("/etc/", f"{folder}/etc/")
    for name in re.findall(r"/models/(\S+)", text):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.name == "tokenizer.json":
            Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(place))
        else:
            place.write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return text.replace("/models/", f"{folder}/")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / path.name
    file.write_text(here(path.read_text(), tmp_path))
    assert main(["check", str(file)]) == 0
    config = parse(file.read_text())
    assert isinstance(config, Config)
    assert config.workers or config.discovery
    config.make_policy(config.policy)
    for tenant in config.tenants:
        if tenant.policy is not None:
            config.make_policy(tenant.policy)
    for model in config.models.values():
        if model.tokenizer not in (None, "engine"):
            assert TokenFile(model.tokenizer).ids("a")
            assert Template.load(model.template or "").render({"messages": [{"role": "user", "content": "b"}]}) == "b"
    for worker in config.workers:
        source = worker.spec().events
        assert source is None or source.replay is not None


def test_engines_publish_where_the_network_policy_lets_the_gateway_connect() -> None:
    open_ports = [
        range(port["port"], port.get("endPort", port["port"]) + 1)
        for rule in documents()["NetworkPolicy"]["spec"]["egress"]
        for port in rule["ports"]
    ]
    command = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["engine-a"]["command"]
    options = options_from(engine_parser().parse_args(command[3:]))
    assert options.publishes
    told = [*map(str, (options.events_port, options.replay_port))]
    files = [path for path in DEPLOY.rglob("*.yaml") if "tcp://*:" in path.read_text()]
    assert {path.name for path in files} == {"events.yaml", "sglang.yaml", "configmap.yaml"}
    for path in files:
        found = re.findall(r'endpoint": "tcp://\*:(\d+)"', path.read_text())
        assert set(found) == set(told), path
    for port in map(int, told):
        assert any(port in ports and port + 7 in ports for ports in open_ports)


def test_the_image_s_command_takes_the_file_that_is_mounted() -> None:
    path = "/etc/warmroute/warmroute.yaml"
    assert path in (DEPLOY / "Dockerfile").read_text()
    (container,) = documents()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == path
    assert any(
        path in volume
        for volume in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["gateway-a"]["volumes"]
    )
