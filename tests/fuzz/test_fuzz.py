"""Every target for a moment: with its seeds, with what hypothesis makes of its words, and guided by coverage."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.conftest import Require
from tests.fuzz.targets import all_targets

TARGETS = all_targets()
RUNS = 3000
names = pytest.mark.parametrize("name", sorted(TARGETS))


@names
def test_seeds(name: str) -> None:
    target = TARGETS[name]
    for data in (*target.seeds, *target.words, b""):
        target.run(data)
        for at in range(0, len(data), max(1, len(data) // 50)):
            target.run(data[:at])
            target.run(data[at:] + data[:at])


@names
@settings(max_examples=150, derandomize=True)
@given(st.data())
def test_words_in_any_order(name: str, data: st.DataObject) -> None:
    target = TARGETS[name]
    seed = data.draw(st.sampled_from([b"", *target.seeds]))
    at = data.draw(st.integers(0, len(seed)))
    inserted = b"".join(data.draw(st.lists(st.sampled_from(target.words) | st.binary(max_size=6), max_size=12)))
    target.run(seed[:at] + inserted + seed[at + data.draw(st.integers(0, 20)) :])


@names
async def test_guided_by_coverage(name: str, require: Require, tmp_path: Path) -> None:
    require("atheris", importlib.util.find_spec("atheris") is not None, "pip install 'warmroute[fuzz]'")
    root = Path(__file__).parent.parent.parent
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fuzz", name, "--runs", str(RUNS), "--seed", "1"),
        cwd=root,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        told, _ = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, told.decode("utf-8", "replace")[-4000:]
    assert f"Done {RUNS} runs" in told.decode("utf-8", "replace")
