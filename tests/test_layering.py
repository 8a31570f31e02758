"""Imports go one way: kv_index <- policies <- gateway; the simulated engine is an independent witness."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPURE = {
    "asyncio",
    "aiohttp",
    "datetime",
    "http",
    "httptools",
    "httpx",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "requests",
    "secrets",
    "socket",
    "ssl",
    "subprocess",
    "sys",
    "threading",
    "time",
    "urllib",
    "uvloop",
    "yaml",
    "zmq",
}


def imported(path: Path) -> set[str]:
    """Full names of every module that ``path`` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


ALLOWED = {
    "kv_index": set(),
    "policies": {"kv_index"},
    "gateway": {"kv_index", "policies"},
    "load_tests/engine": set(),
    "load_tests/workloads": set(),
    "load_tests/simulate": {"kv_index", "policies"},
}
OURS = {"kv_index", "policies", "gateway", "load_tests"}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_one_way(package: str) -> None:
    own = package.replace("/", ".")
    for path in files(package):
        for name in imported(path):
            top = name.split(".")[0]
            if top not in OURS or name == own or name.startswith(own + "."):
                continue
            if path.name == "cli.py" and top == "load_tests":
                continue
            if top == "load_tests" and package != "load_tests/engine" and name.startswith("load_tests.engine.physics"):
                continue
            assert top in ALLOWED[package], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", ["kv_index", "policies"])
def test_index_and_policies_do_no_io_and_read_no_clock(package: str) -> None:
    for path in files(package):
        impure = {name for name in imported(path) if name.split(".")[0] in IMPURE}
        assert not impure, f"{path.relative_to(ROOT)} imports {impure}"


def test_the_command_imports_load_tests_only_when_asked() -> None:
    tree = ast.parse((ROOT / "gateway/cli.py").read_text())
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not any(name and name.startswith("load_tests") for name in names)
