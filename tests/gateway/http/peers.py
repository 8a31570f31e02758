"""Other servers in front of a gateway and behind it: nginx, and proxies and engines on h11, which all count for themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import h11

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

CONFIG = """
daemon off; user root; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log crit;
events {{ worker_connections 512; }}
http {{
  log_format counted '$upstream_status $request_uri';
  access_log {folder}/access.log counted;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_header_timeout 1s; client_body_timeout 1s; lingering_close off; lingering_timeout 1s; client_max_body_size 64m;
  underscores_in_headers on; ignore_invalid_headers off; merge_slashes off;
  upstream next {{ server 127.0.0.1:{upstream}; keepalive 8; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://next; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_request_buffering {buffering}; proxy_next_upstream off; proxy_read_timeout 10s;
    }}
  }}
}}
"""
"""As lenient as nginx can be made, so that as much as possible comes through."""


class Nginx:
    """A real nginx on a free port that passes everything on to ``upstream``. It tells what it passed on by its access log."""

    def __init__(self, folder: Path, upstream: int, buffering: bool) -> None:
        self.folder = folder
        self.upstream = upstream
        self.buffering = buffering
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        config = self.folder / "nginx.conf"
        config.write_text(
            CONFIG.format(
                folder=self.folder,
                port=self.port,
                upstream=self.upstream,
                buffering="on" if self.buffering else "off",
            )
        )
        # It takes the socket over, so that nobody else can take the port.
        assert NGINX is not None
        self._process = await asyncio.create_subprocess_exec(
            NGINX,
            *("-p", str(self.folder), "-c", str(config)),
            pass_fds=(listening.fileno(),),
            env={**os.environ, "NGINX": f"{listening.fileno()};"},
            stderr=asyncio.subprocess.DEVNULL,
        )
        listening.close()

    async def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait_for(self._process.wait(), 15)

    def answered(self, *but: str) -> int:
        """Requests that were passed on and answered, those to the paths ``but`` excepted."""
        log = self.folder / "access.log"
        rows = [line.split(" ", 1) for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
        return sum(1 for status, path in rows if status.isdigit() and path not in but)


class Engine:
    """A worker that reads with h11. It answers each request with what it took it for."""

    def __init__(self) -> None:
        self.port = 0
        self.bodies: list[bytes] = []
        self.errors: list[str] = []
        """What it could not read."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(h11.Connection(h11.SERVER), reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        except h11.RemoteProtocolError as error:
            self.errors.append(str(error))
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _converse(self, http: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (found := await whole(http, reader)) is not None:
            request, body = found
            if request.target == b"/v1/models":
                answer: dict[str, Any] = {"object": "list", "data": [{"id": "sim", "object": "model"}]}
            else:
                self.bodies.append(body)
                tags = [value.decode() for name, value in request.headers if name == b"x-tag"]
                answer = {"size": len(body), "tags": tags}
            writer.write(reply(http, 200, json.dumps(answer).encode()))
            if http.our_state is h11.MUST_CLOSE:
                return
            http.start_next_cycle()


async def whole(http: Any, reader: asyncio.StreamReader, patience: float = 60.0) -> tuple[Any, bytes] | None:
    """The next message with its body; ``None`` at the end. Raises `h11.RemoteProtocolError`, and `TimeoutError` when
    nothing comes for ``patience`` seconds."""
    head, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await asyncio.wait_for(reader.read(65536), patience))
        elif isinstance(event, h11.Request | h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return head, body
        elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            return None


def reply(http: Any, status: int, body: bytes) -> bytes:
    """A complete answer."""
    head = h11.Response(
        status_code=status, headers=[("content-type", "application/json"), ("content-length", str(len(body)))]
    )
    return bytes(http.send(head) + http.send(h11.Data(data=body)) + http.send(h11.EndOfMessage()))


class Front:
    """A proxy on h11 that passes what it reads on with the fields as they are, over one connection that all clients share."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.port = 0
        self.answers = 0
        self._shared: tuple[Any, asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._shared is not None:
            self._shared[2].transport.abort()

    def answered(self, *but: str) -> int:
        """Requests that were passed on and answered."""
        return self.answers

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        http = h11.Connection(h11.SERVER)
        try:
            # What it waits for in vain is the rest of a body that never comes.
            while (found := await whole(http, reader, patience=1.0)) is not None:
                async with self._turn:
                    status, body = await self._pass_on(*found)
                writer.write(reply(http, status, body))
                if http.our_state is h11.MUST_CLOSE:
                    break
                http.start_next_cycle()
            await writer.drain()
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass
        except h11.RemoteProtocolError:
            if http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                writer.write(reply(http, 400, b"{}"))
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _pass_on(self, request: Any, body: bytes) -> tuple[int, bytes]:
        if self._shared is None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream)
            self._shared = (h11.Connection(h11.CLIENT), reader, writer)
        http, reader, writer = self._shared
        try:
            head = h11.Request(method=request.method, target=request.target, headers=request.headers.raw_items())
            data = http.send(head)
            data += http.send(h11.Data(data=body)) if body else b""
            writer.write(data + http.send(h11.EndOfMessage()))
            found = await whole(http, reader)
            assert found is not None
            self.answers += 1
        except BaseException:
            self._drop()
            raise
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        else:
            self._drop()
        return found[0].status_code, found[1]

    def _drop(self) -> None:
        if self._shared is not None:
            self._shared[2].transport.abort()
            self._shared = None
