"""Answers on the wire, and the faults that happen to them: the one place that touches a transport."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Mapping
from typing import NoReturn

import msgspec
from aiohttp import web

from load_tests.engine.faults import Fault
from load_tests.engine.template import JSON

encode = msgspec.json.encode

GARBAGE = b"\x00\xffnot http at all\r\n\x00{]\xfe\r\n\r\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(value: object, name: str = "") -> bytes:
    """One SSE event; ``name`` adds an ``event:`` line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


def reset_transport(transport: asyncio.Transport | asyncio.BaseTransport | None) -> None:
    """Close with RST: linger 0 on a duplicate descriptor, since event loops hide the socket's options."""
    if transport is None:
        return
    peer = transport.get_extra_info("socket")
    if peer is not None and peer.fileno() >= 0:
        with socket.socket(fileno=os.dup(peer.fileno())) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if isinstance(transport, asyncio.Transport) or hasattr(transport, "abort"):
        transport.abort()


async def forever() -> NoReturn:
    """Until the client leaves: the server cancels a handler whose connection is lost."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody resolves this future")


class Call:
    """One request being answered. ``body`` is its JSON object, {} where there is none."""

    def __init__(self, request: web.Request, raw: bytes, body: JSON, fault: Fault | None) -> None:
        self.request = request
        self.raw = raw
        self.body = body
        self.fault = fault

    async def strike(self) -> None:
        """Let the fault happen; returns only when the answer goes on afterwards."""
        fault, self.fault = self.fault, None
        if fault is None:
            return
        transport = self.request.transport
        if fault.kind in ("stall_before", "stall_during"):
            await (forever() if fault.seconds is None else asyncio.sleep(fault.seconds))
            return
        if fault.kind == "reset":
            reset_transport(transport)
        elif transport is not None and fault.kind == "garbage":
            transport.write(GARBAGE)
            transport.close()
        elif transport is not None and transport.can_write_eof():
            transport.write_eof()
        await forever()

    async def json(
        self, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Answer with JSON; a fault in mid-answer happens after the first half of the bytes."""
        data = encode(value)
        return await self.raw_answer(data, "application/json", status, headers)

    async def raw_answer(
        self, data: bytes, content_type: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        if self.fault is None:
            return web.Response(body=data, status=status, content_type=content_type, headers=headers)
        response = web.StreamResponse(status=status, headers=headers)
        response.content_type = content_type
        response.content_length = len(data)
        await response.prepare(self.request)
        half = len(data) // 2
        await response.write(data[:half])
        await self.strike()
        await response.write(data[half:])
        await response.write_eof()
        return response


class Stream:
    """Server-sent events, one write each. Opened by the first event, or before it by ``open``."""

    def __init__(self, call: Call, headers: Mapping[str, str] | None = None) -> None:
        self._call = call
        self._sent = 0
        self.response = web.StreamResponse(headers=headers)
        self.response.headers["Content-Type"] = EVENT_STREAM

    @property
    def sent(self) -> int:
        """Events so far."""
        return self._sent

    async def open(self) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._call.request)

    async def send(self, data: bytes) -> None:
        """Write one event, already encoded."""
        if not self.response.prepared:
            await self.response.prepare(self._call.request)
        fault = self._call.fault
        if fault is not None and self._sent >= fault.after_events:
            await self._call.strike()
        self._sent += 1
        await self.response.write(data)

    async def close(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response
