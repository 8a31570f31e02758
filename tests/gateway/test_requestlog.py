"""The log of requests: a line each, whatever became of it, and nothing of what was said."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.config import Config, ConfigError, RequestLogConfig, TenantConfig, parse
from gateway.config_reader import Secret
from gateway.requestlog import Ended, File, encode
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, start_gateway
from tests.gateway.talk import Raw, admin, chat, long_chat, once, request, settled, until

SAID = "a secret that is nobody's business"


def logs(path: Path, **more: Any) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        config.request_log = RequestLogConfig(str(path), **more)
        config.tenants = [TenantConfig("a", [Secret("key-of-a")])]
        config.anonymous = True

    return change


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text().splitlines()] if path.exists() else []


async def test_each_request_has_a_line(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    running = await gateway(await engine(), policy="cache_aware", change=logs(path))
    body = chat(messages=[{"role": "user", "content": SAID}], stream=True, max_tokens=4)
    named = request({**body, "stream_options": {"include_usage": True}}, "X-Session-Id: " + SAID.replace(" ", "-"))
    assert (await once(running.port, named)).status == 200
    assert (await once(running.port, request(chat(max_tokens=2), "Authorization: Bearer key-of-a"))).status == 200
    assert (await once(running.port, request(chat(), "Authorization: Bearer nobody's"))).status == 401
    assert (await once(running.port, request(chat(), path='/v1/no"thing'))).status == 404
    client = await Raw.connect(running.port)
    await client.send(request(long_chat(stream=True)))
    await client.head()
    client.vanish()
    await settled(running)
    await until(lambda: len(rows(path)) == 5)
    first, second, third, fourth, fifth = rows(path)
    assert first["outcome"] == "ok"
    assert first["status"] == 200
    assert first["completion_tokens"] == 4
    assert first["prompt_tokens"] > first["cached_tokens"] >= 0
    assert first["predicted_cached_tokens"] >= 0
    assert 0 < first["overhead_seconds"] < first["ttft_seconds"] <= first["seconds"]
    assert first["session_source"] == "x-session-id" or first["session_source"]
    listed = [each["id"] for each in (await admin(running, "/sessions"))["sessions"]]
    assert first["session"] in listed
    assert (first["policy"], first["kind"], first["model"], first["tenant"]) == (
        "cache_aware",
        "chat",
        "sim",
        "anonymous",
    )
    assert first["target"] in {target.name for target in running.fleet.targets.values()}
    assert second["tenant"] == "a"
    assert "ttft_seconds" not in second
    assert (third["status"], third["outcome"]) == (401, "refused")
    assert (fourth["status"], fourth["path"]) == (404, '/v1/no"thing')
    assert fifth["outcome"] == "client_gone"
    text = path.read_text()
    assert "secret" not in text
    assert "nobody" not in text
    assert "key-of-a" not in text
    assert first["time"].endswith("Z")


async def test_files_are_rotated_and_so_many_stay(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    running = await gateway(await engine(), change=logs(path, max=4096, keep=2))
    files = [path, Path(f"{path}.1"), Path(f"{path}.2")]
    number = 0
    while not files[2].exists():
        for _ in range(10):
            number += 1
            await once(running.port, request(chat(max_tokens=1), f"X-Request-Id: r{number}"))
        written = number
        await until(lambda written=written: _last(files) == written)
    for _ in range(40):
        number += 1
        await once(running.port, request(chat(max_tokens=1), f"X-Request-Id: r{number}"))
    await until(lambda: _last(files) == number)
    told = [each["id"] for file in reversed(files) for each in rows(file)]
    assert told == [f"r{each}" for each in range(number - len(told) + 1, number + 1)], "in order, with no gap"
    assert len(list(path.parent.glob("requests.log*"))) == 3


def _last(files: list[Path]) -> int:
    """Number of the newest request that is written."""
    found = [int(each["id"][1:]) for file in files for each in rows(file)]
    return max(found, default=0)


async def test_what_waits_is_written_at_the_end(engine: StartEngine, tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    running = await start_gateway(await engine(), change=logs(path, format="text"))
    try:
        await once(running.port, request(chat(max_tokens=1), 'X-Request-Id: a b"c'))
    finally:
        await running.stop()
    (only,) = path.read_text().splitlines()
    told = dict(each.split("=", 1) for each in shlex.split(only))
    assert told["outcome"] == "ok"
    assert told["id"] == 'a b"c'


async def test_a_file_that_cannot_be_opened_is_said_at_the_start(engine: StartEngine, tmp_path: Path) -> None:
    config = Config(request_log=RequestLogConfig(str(tmp_path / "nowhere" / "requests.log")))
    config.listen.host, config.listen.port, config.admin.port = "127.0.0.1", 0, 0
    running = Running(config)
    with pytest.raises(ConfigError, match=r"request_log\.file"):
        await running.start()
    await running.stop()


async def test_a_disk_that_is_full_costs_lines_and_nothing_else(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=logs(Path("/dev/full")))
    for _ in range(3):
        assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    dropped = running.metrics.request_log_dropped
    await until(lambda: dropped.values[()][0] == 3)


def test_what_is_wrong_is_said() -> None:
    for text, field in (
        ("{format: xml}", "format"),
        ("{max: 0}", "max"),
        ("{keep: 0}", "keep"),
        ("{file: ''}", "file"),
    ):
        with pytest.raises(ConfigError, match=f"request_log.{field}"):
            parse(f"request_log: {text}\nworkers: [{{url: 'http://127.0.0.1:1'}}]\n", {})


@given(st.text(max_size=60), st.text(max_size=20), st.booleans())
def test_whatever_clients_say_stays_one_line(path: str, request_id: str, as_json: bool) -> None:
    ended = Ended(
        0.0,
        request_id.encode("utf-8", "replace").decode("latin-1"),
        None,
        "ok",
        path.encode("utf-8", "replace").decode("latin-1"),
    )
    text = encode([ended], as_json).decode()
    assert text.endswith("\n")
    assert len((text[:-1] + "x").splitlines()) == 1
    assert as_json or text.isascii()
    assert "\x1b" not in text
    assert "\x7f" not in text
    if as_json:
        assert json.loads(text)["path"] == ended.path


def test_a_file_that_cannot_be_rotated_goes_on_for_a_while_and_is_rotated_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = File(str(path), 100, 1)
    # Nothing can be renamed to what is a folder with something in it.
    (tmp_path / "log.1" / "in the way").mkdir(parents=True)
    for _ in range(8):
        file.append(b"x" * 24 + b"\n")
    with pytest.raises(IsADirectoryError):
        file.append(b"no more\n")
    assert path.stat().st_size == 200
    (tmp_path / "log.1" / "in the way").rmdir()
    (tmp_path / "log.1").rmdir()
    file.append(b"again\n")
    assert path.read_bytes() == b"again\n"
    assert (tmp_path / "log.1").stat().st_size == 200
    file.close()
