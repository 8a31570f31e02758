"""The systemd unit: systemd's own tools take it, and what it would run is run as it says, readiness, reload and end."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import Config
from gateway.supervisor import GRACE, STARTING
from tests.conftest import Require
from tests.gateway.talk import until

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy/systemd/warmroute.service"
BINARY = "/opt/warmroute/bin/warmroute"
FILE = "/etc/warmroute/warmroute.yaml"
EXPOSED = 25
"""Tenths of the ten that systemd's own review of a unit's hardening may come to."""


def said(name: str) -> str:
    """The value of a key that stands once."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert isinstance(value, str)
    return value


def seconds(name: str) -> float:
    return float(said(name).removesuffix("s"))


@pytest.mark.parametrize("arguments", [["verify"], ["security", "--offline=true", f"--threshold={EXPOSED}"]])
def test_systemd_takes_it_and_finds_it_closed(arguments: list[str], require: Require, tmp_path: Path) -> None:
    found = shutil.which("systemd-analyze")
    require("systemd", found is not None, "apt-get install systemd")
    assert found is not None
    unit = tmp_path / UNIT.name
    # It looks for what is to be run.
    unit.write_text(UNIT.read_text().replace(BINARY, "/bin/true"))
    done = subprocess.run([found, *arguments, unit], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_it_waits_for_all_that_takes_its_time() -> None:
    config = Config()
    assert config.drain + config.drain_limit + GRACE < seconds("TimeoutStopSec")
    assert seconds("TimeoutStartSec") > STARTING


async def test_what_it_runs_says_when_it_is_ready_reads_again_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("listen: {host: 127.0.0.1, port: 0}\nadmin: {port: 0}\ndrain: 0s\ndrain_limit: 5s\n")
    variables = dict(each.split("=", 1) for each in said("Environment").split())
    command = [variables.get(word.strip("${}"), word).replace(FILE, str(file)) for word in said("ExecStart").split()]
    assert command[0] == BINARY
    log = tmp_path / "log"
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, log.open("wb") as out:
        told.bind(environment["NOTIFY_SOCKET"])
        told.setblocking(False)
        heard: list[bytes] = []

        def ready() -> bool:
            try:
                heard.append(told.recv(1000))
            except BlockingIOError:
                assert process.returncode is None, log.read_text()
            return b"READY=1" in heard

        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway", *command[1:]), stderr=out, env=environment
        )
        try:
            await until(ready, 90)
            count = int(variables["WARMROUTE_PROCESSES"])
            assert log.read_text().count("] INFO listening on") == count
            reload = shlex.split(said("ExecReload").replace("$MAINPID", str(process.pid)))
            assert await asyncio.wait_for((await asyncio.create_subprocess_exec(*reload)).wait(), 30) == 0
            # Without a change only a signal has them look.
            await until(lambda: log.read_text().count("configuration is unchanged") == count, 60)
            # To the first process only.
            assert said("KillMode") == "mixed"
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.returncode is not None, 60)
            assert process.returncode == 0, log.read_text()
        finally:
            if process.returncode is None:
                process.kill()
            await asyncio.wait_for(process.wait(), 30)
