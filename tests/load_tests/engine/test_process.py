"""The engine as a process, its options, and its independence of what it is a witness of."""

from __future__ import annotations

import ast
import asyncio
import re
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import load_tests.engine
from load_tests.engine import EngineOptions
from load_tests.engine.__main__ import main
from load_tests.engine.options import OptionError
from tests.load_tests.engine.talk import user

ROOT = Path(load_tests.engine.__file__).parent
PURE = ("physics", "cache", "blocks", "radix", "slots", "scheduler", "work", "tokens", "template", "replies")


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module or "")
    return names


def test_it_imports_nothing_of_what_it_bears_witness_of() -> None:
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 20
    for path in files:
        for name in imports(path):
            top = name.split(".")[0]
            assert top not in ("gateway", "policies", "kv_index", "tests"), (path.name, name)
            assert top != "load_tests" or name.startswith("load_tests.engine"), (path.name, name)


def test_the_pure_parts_do_no_io_and_read_no_clock() -> None:
    for module in PURE:
        assert not imports(ROOT / f"{module}.py") & {"asyncio", "time", "socket", "aiohttp", "datetime"}, module


async def test_a_process_says_where_it_listens_serves_and_stops() -> None:
    command = [sys.executable, "-m", "load_tests.engine", "--dialect", "sglang", "--model", "m", "--time-scale", "0.05"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found
        async with aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": [user("hi")]}
            async with http.post(found[1] + "/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dialect", "tgi"], "invalid choice: 'tgi'"),
        (["--kv-tokens", "0"], "kv_tokens must be at least 1"),
        (["--kv-tokens", "64", "--context-length", "1000"], "does not fit the KV of 64 tokens"),
        (["--port", "99999"], "port must be between"),
        (["--time-scale", "-1"], "time_scale must not be negative"),
        (["--max-queued", "-1"], "max_queued must not be negative"),
    ],
)
def test_wrong_flags_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"dialect": "x"}, {"role": "x"}, {"models": []}, {"block_size": -1}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        EngineOptions(**wrong)
