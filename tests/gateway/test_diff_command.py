"""``warmroute diff``: what would change, with no secret in it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.config import Config, Secret, parse
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.test_tenants import having, tenant

OLD: dict[str, Any] = {
    "listen": {"port": 8080},
    "models": {"qwen3.5": {"aliases": ["a"]}},
    "workers": [{"url": "http://10.0.0.1:8000", "api_key": "engine-secret"}, {"url": "http://10.0.0.2:8000"}],
    "tenants": [{"name": "a", "keys": ["secret-a"]}, {"name": "b", "keys": ["secret-b"]}],
    "sessions": {"redis": "redis://:redis-secret@h/0"},
}
NEW: dict[str, Any] = {
    "listen": {"port": 8081, "idle": "1m"},
    "models": {"qwen3.5": {"aliases": ["b"], "tokenizer": "engine"}},
    "workers": [{"url": "http://10.0.0.2:8000"}, {"url": "http://10.0.0.3:8000", "api_key": "other-secret"}],
    "tenants": [{"name": "b", "keys": ["secret-b2", "secret-b"]}, {"name": "a", "keys": ["secret-a"]}],
    "sessions": {"redis": "redis://:redis-secret2@h/0"},
    "retries": {"attempts": 2},
}
TOLD = {
    "listen.port": ("8080 -> 8081", True),
    "listen.idle": ("120.0 -> 60.0", False),
    "models.qwen3.5.aliases": ('["a"] -> ["b"]', False),
    "models.qwen3.5.tokenizer": ('null -> "engine"', True),
    "workers[http://10.0.0.1:8000]": ("taken out", False),
    "workers[http://10.0.0.3:8000]": ("added", False),
    "tenants[b].keys": ("changed", False),
    "sessions.redis": ("changed", True),
    "retries.attempts": ("3 -> 2", False),
}


def file(folder: Path, name: str, says: dict[str, Any]) -> str:
    (folder / name).write_text(yaml.safe_dump(says))
    return str(folder / name)


def test_what_would_change_is_told_by_key_and_no_secret_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = file(tmp_path, "old", OLD), file(tmp_path, "new", NEW)
    assert main(["diff", old, new]) == 1
    shown = capsys.readouterr().out
    lines = dict(line.split(": ", 1) for line in shown.splitlines()[:-1])
    assert lines == {key: what + ("  (needs a restart)" if restart else "") for key, (what, restart) in TOLD.items()}
    assert shown.splitlines()[-1] == "9 changes, of which 3 need a restart"
    assert "secret" not in shown
    assert main(["diff", old, new, "--json"]) == 1
    text = capsys.readouterr().out
    changes = json.loads(text)["changes"]
    assert {each["key"]: each["needs_restart"] for each in changes} == {key: told[1] for key, told in TOLD.items()}
    assert "secret" not in text
    (keys,) = [each for each in changes if each["key"] == "tenants[b].keys"]
    assert (keys["before"], keys["after"]) == (["***"], ["***", "***"])


def test_the_same_in_another_order_is_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turned = {**OLD, "workers": OLD["workers"][::-1], "tenants": OLD["tenants"][::-1]}
    assert main(["diff", file(tmp_path, "old", OLD), file(tmp_path, "new", turned)]) == 0
    assert capsys.readouterr().out == "no change\n"


def test_what_cannot_be_compared_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, bad = file(tmp_path, "old", OLD), file(tmp_path, "bad", {"polcy": "x"})
    for arguments, words in (
        ([old, bad], "did you mean 'policy'"),
        ([bad, old], "did you mean 'policy'"),
        ([old], "--admin URL"),
        ([old, old, old], "two files"),
        ([old, old, "--admin", "http://127.0.0.1:1"], "one file"),
        ([old, "--admin", "http://127.0.0.1:1"], "does not answer"),
        ([old, "--admin", "nonsense"], "does not answer"),
        ([old, "--admin", "http://127.0.0.1:1", "--token-env", "NOT_SET_ANYWHERE"], "NOT_SET_ANYWHERE"),
        ([old, str(tmp_path / "none")], "cannot be read"),
    ):
        assert main(["diff", *arguments]) == 2, arguments
        told = capsys.readouterr()
        assert words in told.err
        assert "secret" not in told.err + told.out


async def test_a_file_is_compared_with_what_runs(
    gateway: Begin,
    engine: StartEngine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = await engine()

    def change(config: Config) -> None:
        having(tenant("a", "secret-a"), tenant("b", "secret-b"))(config)
        config.admin.token = Secret("admin-secret")
        config.isolation_key = Secret("isolation-secret")

    running = await gateway(started, change=change)
    says: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0, "token": "admin-secret"},
        "policy": "round_robin",
        "pressure": {"lag": 10},
        "probes": {"join": 0.1, "health": 0.1},
        "drain": 0,
        "drain_limit": "500ms",
        "workers": [{"url": started.url}],
        "tenants": [{"name": "a", "keys": ["secret-a"]}, {"name": "b", "keys": ["secret-b"]}],
        "isolation_key": "isolation-secret",
    }
    url = f"http://127.0.0.1:{running.admin.port}"
    monkeypatch.setenv("ADMIN", "admin-secret")
    monkeypatch.setenv("WRONG", "wrong-secret")

    async def diff(name: str, *more: str) -> int:
        return await asyncio.to_thread(
            main, ["diff", str(tmp_path / "new"), "--admin", url, "--token-env", name, *more]
        )

    file(tmp_path, "new", says)
    assert await diff("ADMIN") == 0, capsys.readouterr().out
    assert await diff("WRONG") == 2
    assert "--token-env" in capsys.readouterr().err
    says["tenants"][1]["keys"] = ["secret-b-rotated"]
    says["isolation_key"] = "isolation-secret-2"
    file(tmp_path, "new", says)
    assert await diff("ADMIN", "--json") == 1
    told = capsys.readouterr()
    assert [(each["key"], each["needs_restart"]) for each in json.loads(told.out)["changes"]] == [
        ("tenants[b].keys", False),
        ("isolation_key", True),
    ]
    assert "secret" not in told.out + told.err


def test_what_is_given_as_a_file_is_a_configuration() -> None:
    for says in (OLD, NEW):
        parse(yaml.safe_dump(says))
