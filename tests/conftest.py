"""Parts of the machine that some tests need and not every machine has."""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.qwen import Files, qwen_files

# How long a machine takes to make an example says nothing of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

REQUIRED = frozenset(name.strip() for name in os.environ.get("WARMROUTE_REQUIRE", "").split(",") if name.strip())
"""Parts whose absence is a failure here: comma separated in the environment's WARMROUTE_REQUIRE."""

LONGEST = "tests/load_tests/test_soak.py"
"""Its tests may take minutes: they begin first, or all that run beside them would end long before."""

Require = Callable[[str, bool, str], None]


@pytest.fixture(scope="session")
def require() -> Require:
    """``require(name, found, cure)``: go on if ``found``; otherwise the test is reported as not run, or fails if
    WARMROUTE_REQUIRE names the part. ``cure`` tells how to get it."""

    def decide(name: str, found: bool, cure: str) -> None:
        if found:
            return
        if name in REQUIRED:
            pytest.fail(f"{name} is required here and missing: {cure}")
        pytest.skip(f"not run, {name} is missing: {cure}")

    return decide


@pytest.fixture(scope="session")
def qwen(require: Require) -> Files:
    """Where the real Qwen3.5 tokenizer and chat template lie."""
    return qwen_files(require)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
