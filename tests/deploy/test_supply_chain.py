"""What the image is installed from is pinned with hashes, covers what the package needs, and is told in a bill of materials."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [each for extra in ("tokens", "jwt", "tracing", "dns") for each in PROJECT["optional-dependencies"][extra]]
"""What the image has beyond what everybody has."""


def pins(path: Path) -> dict[str, tuple[str, list[str]]]:
    """Name -> (version, hashes) of a lock that has nothing but pins."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    found: dict[str, tuple[str, list[str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        first, *rest = line.split()
        name, equals, version = first.partition("==")
        assert equals, line
        assert re.fullmatch(r"[0-9][0-9A-Za-z.]*", version), line
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in rest), line
        assert rest, f"{name} has no hash"
        assert canonicalize_name(name) not in found, f"{name} twice"
        found[canonicalize_name(name)] = (version, rest)
    return found


def test_the_lock_covers_what_the_package_needs_in_versions_that_it_takes() -> None:
    locked = pins(DEPLOY / "requirements.lock")
    for text in (*PROJECT["dependencies"], *EXTRAS):
        wanted = Requirement(text)
        version, _ = locked[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), text


def test_the_lock_holds_nothing_that_only_tests_need() -> None:
    locked = pins(DEPLOY / "requirements.lock")
    assert not {"pytest", "hypothesis", "mypy", "ruff", "anthropic", "openai", "pip", "setuptools"} & set(locked)


def test_what_builds_the_wheel_is_pinned_too() -> None:
    (text,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    version, _ = pins(DEPLOY / "build.lock")["setuptools"]
    assert Requirement(text).specifier.contains(version)


def test_nothing_is_installed_in_the_image_without_a_hash_or_from_elsewhere() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [line for line in text.splitlines() if re.search(r"\bpip\b.*\b(install|wheel)\b", line)]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes --only-binary=:all:" in line or "--no-deps" in line, line
        assert "--require-hashes" in line or "--no-index" in line, line
    assert not re.search(r"curl|wget|ADD |apt-get", text)


def test_the_bill_tells_of_all_that_is_locked_and_is_the_same_each_time() -> None:
    made = [subprocess.check_output([sys.executable, DEPLOY / "sbom.py"], timeout=30) for _ in range(2)]
    assert made[0] == made[1]
    bill = json.loads(made[0])
    locked = pins(DEPLOY / "requirements.lock")
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {canonicalize_name(each["name"]): each["version"] for each in bill["components"]} == {
        name: version for name, (version, _) in locked.items()
    }
    for each in bill["components"]:
        told = {f"--hash=sha256:{one['content']}" for one in each["hashes"]}
        assert told == set(locked[canonicalize_name(each["name"])][1])
        assert each["purl"] == f"pkg:pypi/{canonicalize_name(each['name'])}@{each['version']}"
    refs = [each["bom-ref"] for each in bill["components"]]
    assert len(set(refs)) == len(refs)
    (own,) = bill["dependencies"]
    assert own["ref"] == bill["metadata"]["component"]["bom-ref"]
    assert len(own["dependsOn"]) == len(PROJECT["dependencies"]) + len(EXTRAS)
    assert set(own["dependsOn"]) <= set(refs)


def test_no_container_can_gain_rights_or_write_to_its_image() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service.get("read_only") is True or service["image"] != "warmroute", name
        assert "docker.sock" not in json.dumps(service), name
        assert service.get("user", "").split(":")[0] not in ("0", "root"), name
    deployment = yaml.safe_load((DEPLOY / "kubernetes" / "deployment.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & {key for key, value in pod.items() if value}
    for container in pod["containers"]:
        allowed = container["securityContext"]
        assert allowed["readOnlyRootFilesystem"] is True
        assert allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
