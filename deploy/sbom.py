"""The image's bill of materials, CycloneDX 1.6 in JSON, out of the lock that it is installed from: ``sbom.py > FILE``.

The same lock gives the same bytes: nothing in it depends on when and where it is made.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

HERE = Path(__file__).parent
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)((?:[^\n]*\\\n)*[^\n]*)", re.M)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def locked(text: str) -> list[tuple[str, str, list[str]]]:
    """(name, version, SHA-256 of each file) of every package in a lock."""
    return [(name, version, _HASH.findall(rest)) for name, version, rest in _PIN.findall(text)]


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    """One package. Its hashes are those of the files that it may have been installed from."""
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{version}"
    sums = [{"alg": "SHA-256", "content": each} for each in hashes]
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "hashes": sums,
    }


def bill(lock: str, project: dict[str, Any]) -> dict[str, Any]:
    """The whole document."""
    components = [component(*each) for each in locked(lock)]
    purls = {each["name"].lower().replace("_", "-"): each["bom-ref"] for each in components}
    own = f"pkg:pypi/{project['name']}@{project['version']}"
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["tokens"], *extras["jwt"], *extras["tracing"], *extras["dns"]]
    direct = sorted(
        purls[re.split(r"[^A-Za-z0-9._-]", name, maxsplit=1)[0].lower().replace("_", "-")] for name in wanted
    )
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, own + lock)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "purl": own,
                "licenses": [{"license": {"id": project["license"]}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": direct}],
    }


if __name__ == "__main__":
    described = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    print(json.dumps(bill((HERE / "requirements.lock").read_text(), described), indent=1))
