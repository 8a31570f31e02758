"""Several gateway processes on one host as one: started, watched, restarted one by one, ended together.

This process carries no request. It holds the listening sockets, so that none of them is closed while a process is replaced:
each gateway process has one of its own for clients, all of one port, among which the kernel shares out connections
(``SO_REUSEPORT``); those of the control plane they have in common. What comes while there is nobody to take it waits in the
socket's queue.

    SIGTERM, SIGINT   all drain and end, and so does this one; a second signal ends at once
    SIGHUP            all read their configuration again
    SIGUSR2           all are replaced one by one, by processes of the code that is installed now, and this one becomes one of
                      that code too. One that does not come up ends it: the others go on as they are.

A process that ends is started again, ever later if it ends again at once. One whose event loop does not turn is killed. When
this process is killed, the others drain and end: nobody would start them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from site import getsitepackages
from tempfile import gettempdir, mkdtemp
from time import monotonic

import msgspec

from gateway.config import Config
from gateway.seat import VARIABLE, Seat

log = logging.getLogger("warmroute")

ADOPTED = "WARMROUTE_SUPERVISED"
"""What a supervisor leaves to the one that it becomes."""
LOOK = 0.1
"""Seconds between two looks at the processes."""
STARTING = 120.0
"""Seconds that one may take to begin to serve."""
STALLED = 30.0
"""Seconds without a turn of its event loop after which one is killed, unless the configuration says otherwise."""
YOUNG = 10.0
"""Seconds of life below which its end counts as a failure to start."""
LATEST = 30.0
"""Seconds between two starts of one that always fails, at most."""
GRACE = 30.0
"""Seconds beyond its own bounds that draining may take before a process is killed."""
BACKLOG = 2048
READY, BEATS = b"r", b"."


class Child(msgspec.Struct):
    """One gateway process."""

    number: int
    pid: int
    status: int
    """The reading end of the pipe by which it says that it lives."""
    began: float
    heard: float
    ready: bool = False
    until: float | None = None
    """When it is killed, if it is to end; ``None``: it is not."""
    ended: int | None = None
    """Its exit status."""

    @property
    def lives(self) -> bool:
        """Whether it did not end."""
        return self.ended is None


class Slot(msgspec.Struct):
    """A place for one process."""

    number: int
    listener: int
    child: Child | None = None
    failures: int = 0
    """Starts that failed in a row."""
    start_at: float = 0.0


class State(msgspec.Struct):
    """All that outlives this process's code."""

    slots: list[Slot]
    shared: dict[str, int]
    """Listening sockets that all have in common."""
    folder: str
    host: str
    secret: str
    life: tuple[int, int]
    leaving: list[Child] = []
    """Processes that were replaced, and drain."""


class Supervisor:
    """See the module's head. ``command`` starts one gateway process."""

    def __init__(self, config: Config, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Raises `OSError` if an address cannot be had."""
        self.config = config
        self.command = list(command)
        self.environment = {name: value for name, value in environment.items() if name not in (VARIABLE, ADOPTED)}
        adopted = environment.get(ADOPTED)
        self.state = _begin(config) if adopted is None else msgspec.json.decode(adopted, type=State)
        self.stopping = False
        self.failed = 0
        """The exit status of a process that could not start."""
        self._roll = False
        self._rolls: asyncio.Task[None] | None = None
        self._told = False
        self._again = False

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until all have ended; the exit status."""
        loop = asyncio.get_running_loop()
        for number, does in (
            (signal.SIGTERM, self._stop),
            (signal.SIGINT, self._stop),
            (signal.SIGHUP, self._reload),
            (signal.SIGUSR2, self._replace),
        ):
            loop.add_signal_handler(number, does, *((number,) if does == self._stop else ()))
        count = len(self.state.slots)
        log.info("%d gateway processes listen on %s:%d", count, self.config.listen.host, self.port)
        while not (self.stopping and not self._all()):
            self._look(monotonic())
            if self._again:
                self._become()
            await asyncio.sleep(LOOK)
        if self._rolls is not None:
            self._rolls.cancel()
        self._close()
        return self.failed

    @property
    def port(self) -> int:
        """Where clients connect."""
        return _port(self.state.slots[0].listener)

    def _all(self) -> list[Child]:
        """Processes that live."""
        here = [slot.child for slot in self.state.slots if slot.child is not None]
        return [child for child in (*here, *self.state.leaving) if child.lives]

    def _close(self) -> None:
        for slot in self.state.slots:
            os.close(slot.listener)
        for descriptor in (*self.state.shared.values(), *self.state.life):
            os.close(descriptor)
        rmtree(self.state.folder, ignore_errors=True)

    # -- signals ----------------------------------------------------------------------------------------------------

    def _stop(self, number: int) -> None:
        self.stopping = True
        until = monotonic() + self.config.drain + self.config.drain_limit + GRACE
        for child in self._all():
            child.until = until if child.until is None else child.until
            _send(child, number)

    def _reload(self) -> None:
        for child in self._all():
            _send(child, signal.SIGHUP)

    def _replace(self) -> None:
        if self._rolls is None or self._rolls.done():
            self._rolls = asyncio.get_running_loop().create_task(self._replace_all(), name="replacing")

    # -- watching ---------------------------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        for child in self._all():
            self._hear(child, now)
            _reap(child)
            if child.lives and child.until is not None and now > child.until:
                log.error("process %d does not end: it is killed", child.pid)
                _send(child, signal.SIGKILL)
            elif child.lives and child.until is None and now - child.heard > self._patience(child):
                log.error("process %d does not turn its event loop: it is killed", child.pid)
                _send(child, signal.SIGKILL)
        self.state.leaving = [child for child in self.state.leaving if child.lives or _closed(child)]
        for slot in self.state.slots:
            self._fill(slot, now)
        if not self._told and all(slot.child is not None and slot.child.ready for slot in self.state.slots):
            self._told = True
            _notify(self.environment, b"READY=1")

    def _patience(self, child: Child) -> float:
        stalled = STALLED if self.config.health is None else self.config.health.stalled
        return stalled if child.ready else max(STARTING, stalled)

    def _hear(self, child: Child, now: float) -> None:
        with suppress(BlockingIOError):
            said = os.read(child.status, 65536)
            if said:
                child.heard = now
                child.ready = child.ready or READY in said

    def _fill(self, slot: Slot, now: float) -> None:
        """Start what is missing."""
        child = slot.child
        if child is not None and not child.lives:
            _closed(child)
            slot.child = None
            if self.stopping:
                return
            if not self._told and not child.ready and child.ended in (1, 2):
                # None of them ever served: what is wrong is no accident.
                self.failed = child.ended
                self._stop(signal.SIGINT)
                return
            young = not child.ready or now - child.began < YOUNG
            slot.failures = slot.failures + 1 if young else 0
            pause = min(LATEST, 0.5 * 2**slot.failures) if young else 0.0
            slot.start_at = now + pause
            log.error(
                "process %d ended (%s): another takes its place %s",
                child.pid,
                _how(child.ended),
                f"in {pause:.0f} s" if pause else "now",
            )
            if pause > 2.0:
                # Connections would wait for it: they are shared among the others.
                self._reopen(slot)
        if slot.child is None and not self.stopping and now >= slot.start_at:
            if not _listens(slot.listener):
                socket.socket(fileno=os.dup(slot.listener)).listen(BACKLOG)
            slot.child = self._start(slot, now)
        elif slot.child is not None and slot.child.ready and now - slot.child.began > YOUNG:
            slot.failures = 0

    def _reopen(self, slot: Slot) -> None:
        listener = _bind(self.config.listen.host, self.port, listens=False)
        os.close(slot.listener)
        slot.listener = listener

    def _start(self, slot: Slot, now: float) -> Child:
        state = self.state
        status, says = os.pipe()
        os.set_blocking(status, False)
        sockets = {"listen": slot.listener, **state.shared}
        life = state.life[0]
        seat = Seat(slot.number, len(state.slots), state.folder, state.host, state.secret, sockets, says, life)
        process = subprocess.Popen(
            self.command,
            env={**self.environment, VARIABLE: msgspec.json.encode(seat).decode()},
            pass_fds=(*sockets.values(), says, life),
            # What a terminal sends is for this process, which tells the others.
            process_group=0,
        )
        os.close(says)
        # It is reaped by its number, which outlives this object.
        process.returncode = 0
        return Child(slot.number, process.pid, status, now, now)

    # -- replacing --------------------------------------------------------------------------------------------------

    async def _replace_all(self) -> None:
        log.info("all processes are replaced, one by one")
        for slot in self.state.slots:
            if not await self._replaced(slot):
                log.error("a new process does not come up: those that run stay")
                return
        log.info("all processes are replaced")
        self._again = True

    async def _replaced(self, slot: Slot) -> bool:
        new = self._start(slot, monotonic())
        try:
            async with asyncio.timeout(STARTING):
                while new.lives and not new.ready and not self.stopping:
                    await asyncio.sleep(LOOK)
                    self._hear(new, monotonic())
                    _reap(new)
        except TimeoutError:
            pass
        if not (new.lives and new.ready) or self.stopping:
            new.until = monotonic()
            if new.lives:
                _send(new, signal.SIGKILL)
            self.state.leaving.append(new)
            return False
        old, slot.child = slot.child, new
        if old is not None and old.lives:
            old.until = monotonic() + self.config.drain_limit + GRACE
            _send(old, signal.SIGUSR1)
            self.state.leaving.append(old)
        return True

    def _become(self) -> None:
        """Be a process of the code that is installed now, with all that this one has."""
        state = self.state
        told = [child.status for child in (*(slot.child for slot in state.slots if slot.child), *state.leaving)]
        for descriptor in (*[slot.listener for slot in state.slots], *state.shared.values(), *state.life, *told):
            os.set_inheritable(descriptor, True)
        environment = {**self.environment, ADOPTED: msgspec.json.encode(state).decode()}
        log.info("this process goes on with the code that is installed now")
        os.execve(self.command[0], self.command, environment)


def _begin(config: Config) -> State:
    """Sockets, and what the processes have in common. Raises `OSError`."""
    host, port = config.listen.host, config.listen.port
    listeners: list[int] = []
    shared: dict[str, int] = {}
    try:
        for _ in range(config.replicas.processes):
            listeners.append(_bind(host, port))
            port = _port(listeners[0])
        for name, address in (("admin", config.admin), ("metrics", config.metrics), ("health", config.health)):
            if address is not None:
                shared[name] = _bind(address.host, address.port, several=False)
    except OSError:
        for descriptor in (*listeners, *shared.values()):
            os.close(descriptor)
        raise
    life = os.pipe()
    return State(
        [Slot(number, listener) for number, listener in enumerate(listeners)],
        shared,
        # Names of Unix sockets are of some hundred bytes at most.
        mkdtemp(prefix="warmroute-", dir=None if len(gettempdir()) < 40 else "/tmp"),
        os.urandom(8).hex(),
        os.urandom(32).hex(),
        life,
    )


def _bind(host: str, port: int, several: bool = True, listens: bool = True) -> int:
    """The descriptor of a listening socket; ``several``: of one port there may be more. Raises `OSError`."""
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with socket.socket(family, kind, protocol) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if several:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        if listens:
            bound.listen(BACKLOG)
        return bound.detach()


def _listens(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as bound:
        return bool(bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as bound:
        return int(bound.getsockname()[1])


def _send(child: Child, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child.pid, number)


def _reap(child: Child) -> None:
    """Learn of its end."""
    try:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
    except ChildProcessError:
        child.ended = -1
        return
    if pid:
        child.ended = os.waitstatus_to_exitcode(status)


def _closed(child: Child) -> bool:
    """Nothing more is heard of it; never kept."""
    if child.status >= 0:
        os.close(child.status)
        child.status = -1
    return False


def _how(status: int | None) -> str:
    if status is not None and status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            pass
    return f"status {status}"


def _notify(environment: Mapping[str, str], what: bytes) -> None:
    """Tell systemd, if it asked to be told."""
    address = environment.get("NOTIFY_SOCKET")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect("\0" + address[1:] if address.startswith("@") else address)
        told.send(what)


def supervise(config: Config, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``config.replicas.processes`` gateways with the same arguments as this one. Raises `OSError` if an address cannot be
    had; returns the exit status."""
    root = str(Path(__file__).parent.parent)
    if root not in getsitepackages():
        # A checkout is not found from everywhere.
        paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    supervisor = Supervisor(config, [sys.executable, "-P", "-m", "gateway", *arguments], environment)
    Path(supervisor.state.folder).chmod(0o700)
    return asyncio.run(supervisor.run())
