"""A short request of the gateway's own to a worker, over the pool that serves its requests."""

from __future__ import annotations

import asyncio
import logging

from gateway.errors import GatewayFault, WorkerFault
from gateway.http.upstream import Outbound
from gateway.workers import Worker

log = logging.getLogger("warmroute")

SECONDS = 5.0
"""Within which it has to be answered."""


class _Answer:
    """Is the `Receiver` of its connection; the answer's end is all that is waited for."""

    def __init__(self, done: asyncio.Future[int]) -> None:
        self.done = done
        self.status = 0

    def response_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Final status."""
        self.status = status

    def response_data(self, data: bytes) -> None:
        """Of no use."""

    def response_end(self) -> None:
        """Complete."""
        if not self.done.done():
            self.done.set_result(self.status)

    def response_failed(self, fault: WorkerFault) -> None:
        """It will not come."""
        if not self.done.done():
            self.done.set_result(0)

    def worker_slow(self) -> None:
        """It is a few bytes."""


async def post(worker: Worker, path: str, body: bytes, credential: bytes = b"") -> int | None:
    """POST ``body`` (JSON) to ``path``; the status, or ``None`` if there was no answer in time. Raises nothing.

    ``credential``: the client's, for workers that have none of ours.
    """
    key = worker.spec.api_key
    credential = credential if key is None else b"Bearer " + key.encode()
    head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (
        worker.base,
        path.encode(),
        worker.authority.encode(),
        b"authorization: %b\r\n" % credential if credential else b"",
        len(body),
    )
    connection: Outbound | None = None
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    try:
        async with asyncio.timeout(SECONDS):
            connection = worker.pool.take() or await worker.pool.connect()
            connection.request(_Answer(done), head, body)
            status = await done
            connection = None
            return status or None
    except (TimeoutError, WorkerFault, GatewayFault) as problem:
        log.debug("%s was not told at %s: %s", worker.id, path, problem)
        return None
    except Exception:
        log.exception("telling %s at %s failed", worker.id, path)
        return None
    finally:
        if connection is not None:
            connection.close()
