"""A simulated engine with its socket: start it, stop it, kill it, order faults, read its accounting."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from load_tests.engine import sim
from load_tests.engine.core import Core
from load_tests.engine.faults import Fault, Faults
from load_tests.engine.http import build
from load_tests.engine.options import EngineOptions
from load_tests.engine.publisher import Events
from load_tests.engine.routes import ROUTES
from load_tests.engine.wire import reset_transport

DRAIN_SECONDS = 30.0
# Tenths of a second for which a restart waits for its ports.
PATIENCE = 50
# For handlers that still write, or that a fault holds, when nothing runs any more.
CLOSE_SECONDS = 2.0


async def _patiently(opens: Callable[[], Awaitable[None]]) -> None:
    """Somebody's outgoing connection may have got the port meanwhile: it is waited for."""
    for left in reversed(range(PATIENCE)):
        try:
            await opens()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not left:
                raise
        await asyncio.sleep(0.1)


class _Refusal(asyncio.Protocol):
    """A connection that is reset as soon as it is accepted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        reset_transport(transport)


class Engine:
    """One engine in the running event loop: ``engine = await Engine.start(EngineOptions(...))``.

    ``port`` and ``url`` are those it listens on; ``faults`` orders faults from code, ``events`` those of KV events.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.core = Core(options, self._faults_changed)
        self.port = options.port
        self._server: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def start(cls, options: EngineOptions) -> Engine:
        """Listen and serve; OSError if the port is taken."""
        engine = cls(options)
        routes = [*ROUTES, *sim.routes(lambda seconds: engine._spawn(engine.restart(seconds)))]
        engine._runner = web.AppRunner(
            build(engine.core, routes),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_SECONDS,
            keepalive_timeout=options.keep_alive,
        )
        await engine._runner.setup()
        try:
            engine.core.run()
            await engine.core.open()
            await engine._listen()
        except OSError:
            await engine.kill()
            raise
        return engine

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self.port}"

    @property
    def listening(self) -> bool:
        """False while it refuses connections: a fault, a restart, or stopped."""
        return self._server is not None

    @property
    def faults(self) -> Faults:
        return self.core.faults

    @property
    def events(self) -> Events:
        """Faults of the KV event stream: drop, repeat, inject, hold, stop, resume."""
        return self.core.events

    @property
    def events_endpoints(self) -> list[str]:
        """Where each rank publishes KV events; empty where none are."""
        return self.core.bus.endpoints() if self.core.bus else []

    @property
    def replay_endpoints(self) -> list[str]:
        """Where each rank replays them; empty where none does."""
        return self.core.bus.replay_endpoints() if self.core.bus else []

    @property
    def engine_id(self) -> str:
        """Its name to other engines; another after a restart. "" without a connector."""
        return self.core.connector.engine_id

    @property
    def side_port(self) -> int | None:
        """Where other engines reach it: side channel or bootstrap server. None without a connector."""
        return self.core.connector.port

    def stats(self) -> dict[str, Any]:
        """What GET /sim/stats answers."""
        return self.core.stats()

    async def stop(self) -> None:
        """Accept nothing more, let what runs finish for at most DRAIN_SECONDS, then close."""
        self._closed = True
        self._stop_listening()
        for connection in self._connections():
            connection.close()
        for _ in range(int(DRAIN_SECONDS * 100)):
            if not self.core.busy:
                break
            await asyncio.sleep(0.01)
        await self._cleanup()

    async def kill(self) -> None:
        """Reset every connection and stop, as a process that dies."""
        self._closed = True
        self._stop_listening()
        self._reset_connections()
        await self._cleanup()

    async def restart(self, seconds: float = 0.0) -> None:
        """Reset every connection, refuse new ones for ``seconds``, and come back on the same port with nothing cached."""
        self._stop_listening()
        self._reset_connections()
        await self.core.halt()
        await asyncio.sleep(seconds)
        if self._closed:
            return
        self.core.reset()
        self.core.run()
        await _patiently(self.core.open)
        await _patiently(self._listen)

    async def _cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._runner is not None:
            await self._runner.cleanup()
        await self.core.halt()
        self.core.events.close()

    async def _listen(self) -> None:
        if self._server is not None or self._closed or self._refusing():
            return
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._accept, self.options.host, self.port, reuse_address=True, backlog=1024
        )
        bound: socket.socket = self._server.sockets[0]
        self.port = bound.getsockname()[1]

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._runner is not None
        assert self._runner.server is not None
        if self.faults.take("refuse") is not None:
            return _Refusal()
        return self._runner.server()

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _connections(self) -> list[RequestHandler]:
        if self._runner is None or self._runner.server is None:
            return []
        return list(self._runner.server.connections)

    def _reset_connections(self) -> None:
        for connection in self._connections():
            reset_transport(connection.transport)

    def _refusing(self) -> bool:
        fault = self.faults.standing("refuse")
        return fault is not None and fault.count is None

    def _faults_changed(self) -> None:
        """Close the listener while a refusal without count stands; with any refusal connections are not kept alive."""
        fault = self.faults.standing("refuse")
        if fault is not None:
            for connection in self._connections():
                connection.close()
        if fault is not None and self._timer is None and fault.seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(fault.seconds, self._refusal_over, fault)
        if self._refusing():
            self._stop_listening()
        elif self._server is None and self._runner is not None:
            self._spawn(self._listen())

    def _refusal_over(self, fault: Fault) -> None:
        self._timer = None
        self.faults.remove(fault)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
