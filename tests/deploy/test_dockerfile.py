"""The Dockerfile, as far as it goes without a Docker engine: its sources exist and its build steps work."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, str]]:
    """(instruction, rest) of every line, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "deploy/Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for instruction, rest in steps():
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, rest))
    return found


def test_the_final_stage_is_lean_and_not_root() -> None:
    build, final = stages()
    assert build[0][1].endswith(" AS build")
    said = dict(final)
    assert said["USER"] == "10001:10001"
    assert said["EXPOSE"].split() == ["8080", "9464"]
    assert "/healthz" in said["HEALTHCHECK"]
    assert [rest for instruction, rest in final if instruction == "COPY"] == [
        "--from=build /opt/warmroute /opt/warmroute"
    ]
    assert not any("pip" in rest for _, rest in final)


def test_the_context_lets_every_source_through() -> None:
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    for instruction, rest in stages()[0]:
        if instruction == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


@pytest.mark.slow
def test_the_build_steps_give_a_working_command(tmp_path: Path) -> None:
    places = {"/src": tmp_path / "src", "/wheels": tmp_path / "wheels", "/opt/warmroute": tmp_path / "opt"}
    places["/build"] = tmp_path / "build"
    where = tmp_path
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for instruction, rest in stages()[0][1:]:
        if instruction == "WORKDIR":
            where = places[rest]
            where.mkdir()
        elif instruction == "COPY":
            *sources, place = rest.split()
            for source in sources:
                if place.endswith("/") and place != "./":
                    (where / place).mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, where / place)
                elif (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, where / source, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, where / source)
        else:
            assert instruction == "RUN"
            command = rest
            for place, instead in places.items():
                command = command.replace(f"{place}/", f"{instead}/").replace(f"{place} ", f"{instead} ")
                command = re.sub(f"{place}$", str(instead), command)
            done = subprocess.run(command, shell=True, cwd=where, env=environment, capture_output=True, timeout=120)
            assert done.returncode == 0, f"{shlex.quote(command)}: {done.stderr.decode()[-2000:]}"
    shutil.rmtree(places["/src"])
    for program in (["warmroute", "--help"], ["python", "-m", "load_tests.engine", "--help"]):
        ran = subprocess.run(
            [tmp_path / "opt/bin" / program[0], *program[1:]], cwd=tmp_path, capture_output=True, timeout=30
        )
        assert ran.returncode == 0, ran.stderr
        assert b"usage" in ran.stdout
    bill = json.loads((tmp_path / "opt/sbom.cdx.json").read_text())
    script = (
        "import json, importlib.metadata as m; print(json.dumps([f'{d.name}=={d.version}' for d in m.distributions()]))"
    )
    ran = subprocess.run([tmp_path / "opt/bin/python", "-c", script], cwd=tmp_path, capture_output=True, timeout=30)
    installed = {
        re.sub("[-_.]+", "-", name.lower()) for name in json.loads(ran.stdout) if not name.startswith("warmroute==")
    }
    assert installed == {
        re.sub("[-_.]+", "-", f"{each['name'].lower()}=={each['version']}") for each in bill["components"]
    }
    script = "import gateway.templates, gateway.tokens, jwt, cryptography"
    ran = subprocess.run([tmp_path / "opt/bin/python", "-c", script], cwd=tmp_path, capture_output=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
