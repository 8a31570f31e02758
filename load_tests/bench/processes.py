"""Processes of a benchmark: started on one core, measured by the CPU clock of their whole tree, ended by their own id."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
STOP_SECONDS = 5.0


def cores() -> tuple[int, int]:
    """(core of the gateway, core of load and mock engines); the same one twice if there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[0], allowed[-1]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that are free now."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in held]
    finally:
        for each in held:
            each.close()


@dataclass(slots=True)
class Started:
    """A process group of ours."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End the whole group."""
        try:
            if self.alive:
                os.killpg(self.process.pid, signal.SIGTERM)
                self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait(STOP_SECONDS)


def start(command: Sequence[str], core: int, log: Path, environment: Mapping[str, str] | None = None) -> Started:
    """Start ``command`` in a group of its own, on ``core``, its output in ``log``."""
    before = os.sched_getaffinity(0)
    # A child inherits the affinity; setting it here and back again needs no code between fork and exec.
    os.sched_setaffinity(0, {core})
    try:
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
    finally:
        os.sched_setaffinity(0, before)
    return Started(process, log)


def tree(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _fields(int(entry.name))
            if parent is not None:
                children.setdefault(int(parent[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time that the processes used since their start, in steps of a clock tick."""
    total = 0
    for pid in pids:
        fields = _fields(pid)
        if fields is not None:
            total += int(fields[11]) + int(fields[12])
    return total / TICK


def resident_mb(pids: Iterable[int]) -> float:
    """Resident memory of the processes, in MB of 2**20 bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        fields = _fields(pid)
        if fields is not None:
            total += int(fields[21]) * page
    return total / 2**20


def _fields(pid: int) -> list[str] | None:
    """What ``/proc/PID/stat`` says behind the command's name; ``None`` if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
