"""What SECURITY.md says proves something is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_test_that_is_named_exists_and_has_tests() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)`", TEXT))
    assert len(named) > 12
    for name in named:
        path = ROOT / name
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        assert files, name
        assert all(re.search(r"^(async )?def test_", file.read_text(), re.M) for file in files), name


def test_every_attempt_has_a_proof() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and line.count("|") == 4]
    told = [row for row in rows if not re.match(r"\| (attempt|---)", row)]
    assert len(told) > 15
    assert all("`tests/" in row for row in told)
