"""A collector of traces on a real socket, and what a gateway sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.config import Config, TracingConfig
from gateway.run import Running
from tests.gateway.talk import settled


class Collector:
    """Takes spans; ``hangs``: it never answers."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.hangs = False
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        if self.hangs:
            await asyncio.sleep(60)
        body = ExportTraceServiceRequest.FromString(await request.read())
        for resource in body.resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return web.Response(body=b"", content_type="application/x-protobuf")

    def root(self) -> Any:
        (root,) = [span for span in self.spans if " " in span.name and span.kind == 2]
        return root

    def children(self) -> dict[str, Any]:
        root = self.root()
        found = {span.name: span for span in self.spans if span.parent_span_id == root.span_id}
        for span in found.values():
            assert span.trace_id == root.trace_id
            assert root.start_time_unix_nano - 1_000_000 <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000
        return found


def told(span: Any) -> dict[str, Any]:
    """Its attributes."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """One that listens."""
    there = Collector()
    application = web.Application()
    application.router.add_post("/v1/traces", there.take)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    there.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield there
    await runner.cleanup()


def traced(collector: Collector, share: float = 1.0) -> Callable[[Config], None]:
    return lambda config: setattr(config, "tracing", TracingConfig(collector.url, share))


async def flushed(running: Running) -> None:
    tracer = running.gateway.tracer
    assert tracer is not None
    await settled(running)
    assert await asyncio.to_thread(tracer._provider.force_flush, 5000)
