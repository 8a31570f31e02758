"""A name server on loopback, over UDP, that says what a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """``records``: (name, kind) -> what is said."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl = 1
        self.failure: dns.rcode.Rcode | None = None
        self.silent = False
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def says(self, kind: str, *values: str, name: str = "engines.test.") -> None:
        self.records[name, kind] = list(values)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)
        self.port = self._transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        if self.silent or self._transport is None:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        if self.failure is not None:
            answer.set_rcode(self.failure)
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif values := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(name, self.ttl, "IN", kind, *values))
        self._transport.sendto(answer.to_wire(), peer)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


@asynccontextmanager
async def naming() -> AsyncIterator[NameServer]:
    _, server = await asyncio.get_running_loop().create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    try:
        yield server
    finally:
        server.close()
