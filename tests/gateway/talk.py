"""What the tests say to a gateway: raw bytes, and small requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.run import Running

CHAT = "/v1/chat/completions"
SECONDS = 15.0
"""How long anything that must come is waited for."""


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait for something that must come to be."""
    for _ in range(int(seconds * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


def request(
    body: bytes | dict[str, Any] | None = None, *lines: str | bytes, path: str = CHAT, method: str = "POST"
) -> bytes:
    """A well-formed sized request; ``lines`` are further fields."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body if body is not None else b""
    if body is None and method == "POST":
        data = b'{"model":"sim","messages":[{"role":"user","content":"hi"}]}'
    fields = [line.encode("latin-1") if isinstance(line, str) else line for line in lines]
    if data or method == "POST":
        fields.append(b"Content-Length: %d" % len(data))
    head = b"\r\n".join([f"{method} {path} HTTP/1.1".encode("latin-1"), b"Host: gateway", *fields])
    return head + b"\r\n\r\n" + data


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": "hi"}], **fields}


def long_chat(**fields: Any) -> dict[str, Any]:
    """It generates until somebody stops it."""
    return chat(max_tokens=20_000, ignore_eos=True, **fields)


@dataclass
class Response:
    """One response."""

    status: int
    fields: list[tuple[str, str]]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = True
    """Whether its framing was complete."""

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name]

    def one(self, name: str) -> str:
        (value,) = self.all(name)
        return value

    def json(self) -> Any:
        return json.loads(self.body)


class Raw:
    """A client that writes bytes and reads HTTP with a small parser of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Raw:
        if receive_buffer is None:
            return cls(*await asyncio.open_connection("127.0.0.1", port))
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=plain))

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.vanish()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def vanish(self) -> None:
        """Leave at once."""
        self.writer.transport.abort()

    async def ask(self, data: bytes, head_only: bool = False) -> Response:
        await self.send(data)
        return await self.response(head_only)

    async def response(self, head_only: bool = False) -> Response:
        """The next response, interim ones skipped."""
        return await asyncio.wait_for(self._response(head_only), SECONDS)

    async def head(self) -> Response:
        """The next head, interim ones included, without its body."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), SECONDS)
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        version, status, _ = first.split(" ", 2)
        assert version == "HTTP/1.1"
        return Response(int(status), [(n, v.strip()) for n, _, v in (line.partition(":") for line in lines)])

    async def _response(self, head_only: bool) -> Response:
        found = await self.head()
        while found.status < 200:
            found = await self.head()
        if head_only or found.status in (204, 304):
            return found
        if found.all("transfer-encoding"):
            await self._chunks(found)
        elif found.all("content-length"):
            try:
                found.body = await self.reader.readexactly(int(found.one("content-length")))
            except asyncio.IncompleteReadError as error:
                found.body, found.whole = error.partial, False
        else:
            found.body = await self.reader.read()
        return found

    async def _chunks(self, found: Response) -> None:
        try:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                found.chunks.append((await self.reader.readexactly(size + 2))[:-2])
            await self.reader.readuntil(b"\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            found.whole = False
        found.body = b"".join(found.chunks)

    async def rest(self) -> bytes:
        """What comes until the gateway closes."""
        data = b""
        try:
            while piece := await asyncio.wait_for(self.reader.read(1 << 20), SECONDS):
                data += piece
        except ConnectionError:
            pass
        return data


async def once(port: int, data: bytes, head_only: bool = False) -> Response:
    """One request on a connection of its own."""
    async with await Raw.connect(port) as client:
        return await client.ask(data, head_only)


async def until_closed(port: int, data: bytes) -> bytes:
    """Send ``data``; everything that comes back until the gateway closes."""
    async with await Raw.connect(port) as client:
        await client.send(data)
        return await client.rest()


async def tell(running: Running, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and JSON of a call to the control plane."""
    url = f"http://127.0.0.1:{running.admin.port}{path}"
    async with aiohttp.ClientSession() as http, http.request(method, url, json=body) as answer:
        return answer.status, await answer.json()


async def admin(running: Running, path: str) -> Any:
    """JSON of the control plane, or text."""
    url = f"http://127.0.0.1:{running.admin.port}{path}"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        text = await answer.text()
        return json.loads(text) if "json" in answer.headers["Content-Type"] else text


async def settled(running: Running) -> None:
    """Nothing is in flight any more, by every account the gateway gives of itself."""
    # What clients pipelined before they left may begin between two looks.
    for _ in range(100):
        await until(lambda: not running.gateway.exchanges)
        if not any(worker["running"] for worker in (await admin(running, "/workers"))["workers"]):
            break
        await asyncio.sleep(0.05)
    for worker in (await admin(running, "/workers"))["workers"]:
        assert worker["running"] == 0
        assert all(target["running"] == 0 for target in worker["targets"])
    metrics = await admin(running, "/metrics")
    rows = [line for line in metrics.splitlines() if line.startswith("warmroute_target_in_flight{")]
    assert rows
    assert all(float(row.rsplit(" ", 1)[1]) == 0 for row in rows), rows
    for worker in running.fleet.workers.values():
        await until(lambda worker=worker: worker.pool.open == worker.pool.idle)  # type: ignore[misc]
