"""Traces: a span for each sampled request, with children for its stages, sent to an OpenTelemetry collector.

Whether a request is traced is its client's choice where it brings a ``traceparent`` (W3C Trace Context), else a share. A
request's times are noted anyway; its children are made of them when it is over, so that one that is not traced costs nothing.
Engines are given the request's span as their parent. Attributes follow the GenAI semantic conventions; a session is told by
the hash that stands for it everywhere, and no content is told.

Needs the extra ``warmroute[tracing]``.
"""

from __future__ import annotations

import logging
import re
from time import time_ns
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)

from gateway.dialects import Usage
from gateway.errors import Fault
from gateway.workers import Target

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from gateway.exchange import Exchange

OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}
"""Kinds of requests -> ``gen_ai.operation.name``."""
QUEUE = 4096
"""Spans that wait to be sent, at most; more are dropped."""
SECONDS = 5.0
"""That sending some may take."""
LONGEST = 2048
"""Bytes of a path or a ``tracestate`` that are told, at most."""
FAILED = frozenset(("worker_error", "stream_error", "no_worker", "timeout"))

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def parent_of(value: bytes | None) -> SpanContext | None:
    """What a ``traceparent`` says; ``None`` if that is nothing, or nothing valid (W3C Trace Context, 3.2)."""
    found = _PARENT.fullmatch(value.strip()) if value is not None else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    if not trace or not span:
        return None
    return SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(int(found[4], 16) & TraceFlags.SAMPLED))


class Trace:
    """The span of one request that runs. ``line`` tells its engines."""

    __slots__ = ("id", "inside", "line", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.inside: Context = set_span_in_context(span)
        context = span.get_span_context()
        self.id = format_trace_id(context.trace_id)
        self.line = b"traceparent: 00-%b-%b-01\r\n" % (
            self.id.encode(),
            format_span_id(context.span_id).encode(),
        )

    def failed(self, target: Target, fault: Fault) -> None:
        """An attempt failed."""
        self.span.add_event("attempt failed", {"warmroute.target": target.name, "error.type": type(fault).__name__})


class Tracer:
    """Makes spans. ``endpoint``: the collector's URL for traces (OTLP over HTTP). ``share``: of requests whose client says
    nothing."""

    def __init__(
        self,
        endpoint: str,
        share: float,
        service: str,
        version: str,
        trust: bool = True,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._trust = trust
        self._most_draw = int(share * (1 << 64))
        # It would have clients write to our log whatever they put into a tracestate.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        resource = Resource.create({"service.name": service, "service.version": version})
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter or OTLPSpanExporter(endpoint, timeout=SECONDS),
                max_queue_size=QUEUE,
                export_timeout_millis=1000 * SECONDS,
            )
        )
        self._tracer = self._provider.get_tracer("warmroute", version)

    def stop(self) -> None:
        """Send what waits, and end. Blocks for as long as sending may take."""
        self._provider.shutdown()

    def begin(self, exchange: Exchange) -> Trace | None:
        """It is about to be sent, or was refused; ``None``: it is not traced."""
        named = exchange.incoming.named
        parent = parent_of(named.get(b"traceparent"))
        if parent is None or not self._trust:
            if exchange.ask.request.draw >= self._most_draw:
                return None
        elif not parent.trace_flags.sampled:
            return None
        if parent is not None:
            state = named.get(b"tracestate")
            if state is not None and len(state) <= LONGEST:
                told = TraceState.from_header([state.decode("latin-1")])
                parent = SpanContext(parent.trace_id, parent.span_id, True, parent.trace_flags, told)
        operation = OPERATIONS.get(exchange.route.kind, exchange.route.kind)
        model = exchange.ask.model_name
        inside = None if parent is None else set_span_in_context(NonRecordingSpan(parent))
        span = self._tracer.start_span(
            f"{operation} {model}",
            inside,
            SpanKind.SERVER,
            start_time=_wall(exchange, exchange.started),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": model,
                "gen_ai.request.stream": exchange.reading.stream,
                "http.request.method": exchange.incoming.method.decode("latin-1"),
                "url.path": exchange.incoming.path[:LONGEST].decode("latin-1"),
                "warmroute.tenant": exchange.ask.tenant.name,
                "warmroute.policy": exchange.ask.policy.name,
            },
        )
        return Trace(span)

    def ended(self, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
        """It is over."""
        trace = exchange.trace or (self.begin(exchange) if not exchange.attempts else None)
        if trace is None:
            return
        now = exchange.gateway.clock()
        span = trace.span
        _describe(span, exchange, outcome, usage)
        self._children(trace, exchange, now)
        if outcome in FAILED:
            span.set_status(StatusCode.ERROR, outcome)
            span.set_attribute("error.type", outcome)
        span.end(_wall(exchange, now))

    def _children(self, trace: Trace, exchange: Exchange, now: float) -> None:
        """Stages, from the times that were noted."""
        self._child(trace, exchange, "admission", exchange.asked_at, exchange.turn_at or now)
        if not exchange.turn_at:
            return
        choice = exchange.choice
        decision: dict[str, str | int | float] = {"warmroute.match_seconds": exchange.asked_at - exchange.begun_at}
        if choice is not None:
            decision["warmroute.decision.reason"] = choice.reason
        self._child(trace, exchange, "decision", exchange.turn_at, exchange.chosen_at, decision)
        legs = exchange.legs
        if legs is not None and legs.leg is not None and legs.leg.sent_at:
            until = legs.leg.ended_at or exchange.first_at or now
            at = {"warmroute.target": legs.prefill.name, "server.address": legs.prefill.worker.host}
            self._child(trace, exchange, "prefill", legs.leg.sent_at, until, at)
        if not exchange.written_at or exchange.target is None or exchange.sent_at <= exchange.turn_at:
            return
        if exchange.attempts == 1 and legs is None:
            self._child(trace, exchange, "connect", exchange.chosen_at, exchange.sent_at)
        answered = exchange.first_at if exchange.events and exchange.first_at else now
        worker = exchange.target.worker
        at = {
            "warmroute.target": exchange.target.name,
            "server.address": worker.host,
        }
        name = "first_byte" if legs is None else "decode"
        self._child(trace, exchange, name, exchange.sent_at, answered, at, SpanKind.CLIENT)
        if answered < now:
            self._child(trace, exchange, "stream", answered, now)

    def _child(
        self,
        trace: Trace,
        exchange: Exchange,
        name: str,
        begin: float,
        end: float,
        attributes: dict[str, str | int | float] | dict[str, str] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        span = self._tracer.start_span(
            name, trace.inside, kind, start_time=_wall(exchange, begin), attributes=attributes or {}
        )
        span.end(_wall(exchange, max(begin, end)))


def _describe(span: Span, exchange: Exchange, outcome: str, usage: Usage | None) -> None:
    ask, target, choice = exchange.ask, exchange.target, exchange.choice
    told: dict[str, str | int | None] = {
        "warmroute.outcome": outcome,
        "warmroute.attempts": exchange.attempts,
        "warmroute.predicted_cached_tokens": ask.predicted,
        "warmroute.session.source": ask.found,
        "gen_ai.conversation.id": None if ask.session is None else ask.session.key.hex(),
        "http.response.status_code": exchange.status or None,
    }
    if target is not None:
        told["warmroute.target"] = target.name
        told["gen_ai.provider.name"] = target.worker.facts.engine
        told["server.address"], told["server.port"] = target.worker.host, target.worker.port
    if choice is not None:
        told["warmroute.decision.reason"] = choice.reason
    if usage is not None:
        told["gen_ai.usage.input_tokens"] = usage.prompt
        told["gen_ai.usage.output_tokens"] = usage.completion
        told["gen_ai.usage.cache_read.input_tokens"] = usage.cached
    span.set_attributes({name: value for name, value in told.items() if value is not None})


def _wall(exchange: Exchange, at: float) -> int:
    """A time of the gateway's clock in nanoseconds of everybody's."""
    return time_ns() - int((exchange.gateway.clock() - at) * 1e9)
