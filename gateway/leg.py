"""The prefill engine's part of a pair: one request whose answer no client sees."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

from gateway.dialects import broken
from gateway.errors import Fault, GatewayFault, Internal, Malformed, Reset, WorkerFault
from gateway.http import wire
from gateway.http.sse import payload
from gateway.http.upstream import Outbound
from gateway.workers import Charge, State, Target

if TYPE_CHECKING:
    from gateway.legs import Legs

STALE = 2.0
"""Seconds after sending within which a reused connection that ends was closed before the worker saw the request."""
LARGEST = 16 * 1024 * 1024
"""Bytes of an answer that are kept; logprobs of long prompts are large."""
LAST = 8
"""Pieces of an answer's end that are kept where the rest is of no use."""


class Leg:
    """See the module's head. Is the `Receiver` of its connection."""

    __slots__ = (
        "body",
        "charge",
        "connection",
        "deadline",
        "ended_at",
        "fields",
        "legs",
        "over",
        "pieces",
        "resent",
        "sent_at",
        "size",
        "status",
        "target",
        "task",
    )

    def __init__(self, legs: Legs, target: Target, charge: Charge | None, body: bytes) -> None:
        self.legs = legs
        self.target = target
        self.charge = charge
        self.body = body
        self.connection: Outbound | None = None
        self.task: asyncio.Task[None] | None = None
        self.status = 0
        self.fields: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.size = 0
        self.over = False
        self.resent = False
        self.sent_at = self.ended_at = 0.0
        self.deadline = inf

    def open(self) -> None:
        """Send it."""
        gateway = self.legs.exchange.gateway
        self.sent_at = now = gateway.clock()
        self.deadline = now + gateway.limits_out.first_byte_seconds
        connection = self.target.worker.pool.take()
        if connection is not None:
            self._send(connection)
        else:
            self.task = gateway.loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            connection = await self.target.worker.pool.connect()
        except (WorkerFault, GatewayFault) as fault:
            self.task = None
            self._fail(fault)
            return
        except Exception:
            self.task = None
            self.legs.exchange.gateway.defect("connecting to a prefill worker")
            self._fail(Internal("the gateway failed; its log says why"))
            return
        self.task = None
        if self.over:
            connection.close()
        elif self.target.worker.state is State.DOWN:
            connection.close()
            self._fail(Reset("the worker went down"))
        else:
            try:
                self._send(connection)
            except Exception:
                self.legs.exchange.gateway.defect("sending a prompt to a prefill worker")
                self._fail(Internal("the gateway failed; its log says why"))

    def _send(self, connection: Outbound) -> None:
        exchange = self.legs.exchange
        worker = self.target.worker
        self.connection = connection
        self.sent_at = exchange.gateway.clock()
        head = wire.request_head(
            exchange.incoming,
            worker.base,
            worker.authority.encode(),
            len(self.body),
            exchange.request_id,
            worker.spec.api_key,
            exchange.gateway.tenants.keyed,
            self.target.rank if len(worker.targets) > 1 else None,
            exchange.gateway.inserts.lines(exchange, self.target),
            exchange.trace is not None,
        )
        connection.request(self, head, self.body)
        if not exchange.counted:
            exchange.counted = True
            exchange.gateway.accounts.sent(exchange)

    # -- Receiver ---------------------------------------------------------------------------------------------------

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Final status and fields."""
        self.status, self.fields = status, fields

    def response_data(self, data: bytes) -> None:
        """Kept up to a bound where somebody will read it; else its end, which tells of errors."""
        if self.status >= 400 or self.legs.reads:
            self.size += len(data)
            if self.size <= LARGEST:
                self.pieces.append(data)
            return
        self.pieces.append(data)
        if len(self.pieces) > LAST:
            del self.pieces[0]

    def response_end(self) -> None:
        """It answered."""
        self.connection = None
        self.body = b""
        self.ended_at = self.legs.exchange.gateway.clock()
        if self.over:
            return
        self.over = True
        # Of an answer too large to be kept nothing is learned.
        body = b"".join(self.pieces) if self.size <= LARGEST else b""
        self.pieces = []
        if self.size > LARGEST and self.legs.sequential:
            self.legs.prefill_failed(Malformed("the prefill worker's answer is too large"))
        elif self.status >= 400:
            self.legs.prefill_refused(self.status, self.fields, body)
        elif (broke := broken(self.legs.exchange.dialect, body)) is not None:
            self.legs.prefill_refused(broke[0], [(b"content-type", b"application/json")], payload(broke[1])[1])
        else:
            self.legs.prefilled(body)

    def response_failed(self, fault: WorkerFault) -> None:
        """It will not answer."""
        connection, self.connection = self.connection, None
        gateway = self.legs.exchange.gateway
        stale = connection is not None and not connection.fresh and not connection.answered
        once = self.legs.pair.lent is not None
        if stale and not once and not self.resent and not self.over and gateway.clock() - self.sent_at < STALE:
            self.resent = True
            gateway.metrics.resends.add((gateway.label(self.target),))
            self.task = gateway.loop.create_task(self._connect())
            return
        self._fail(fault)

    def worker_slow(self) -> None:
        """It is bounded and in memory already."""

    def _fail(self, fault: Fault) -> None:
        if not self.over:
            self.over = True
            self.legs.prefill_failed(fault)

    def close(self) -> None:
        """Nobody waits for it any more: an abort for the engine."""
        self.over = True
        self.body, self.pieces = b"", []
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        task, self.task = self.task, None
        if task is not None:
            task.cancel()
