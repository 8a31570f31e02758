"""Traces: one span a request with its stages as children, sent by OTLP to a collector that listens on a real socket."""

from __future__ import annotations

import asyncio

import pytest

from gateway.config import Config, ConfigError, TracingConfig, parse
from gateway.tracing import parent_of
from tests.gateway.collector import Collector, flushed, told, traced
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import Raw, admin, chat, long_chat, once, request, until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


async def test_a_stream_is_a_span_with_its_stages(gateway: Begin, engine: StartEngine, collector: Collector) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=traced(collector))
    body = chat(stream=True, max_tokens=8, stream_options={"include_usage": True})
    answer = await once(running.port, request(body, "X-Session-Id: talk"))
    assert answer.status == 200
    await flushed(running)
    root = collector.root()
    assert root.name == "chat sim"
    assert not root.parent_span_id
    said = told(root)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == "sim"
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.provider.name"] == "vllm"
    assert said["gen_ai.usage.output_tokens"] == 8
    assert said["gen_ai.usage.input_tokens"] > 0
    assert said["http.response.status_code"] == 200
    assert said["warmroute.outcome"] == "ok"
    assert said["warmroute.tenant"] == "anonymous"
    assert said["warmroute.target"] == answer.one("x-warmroute-worker")
    listed = await admin(running, "/sessions")
    assert [said["gen_ai.conversation.id"]] == [each["id"] for each in listed["sessions"]]
    children = collector.children()
    assert set(children) == {"admission", "decision", "connect", "first_byte", "stream"}
    assert told(children["decision"])["warmroute.decision.reason"]
    assert collector.services == {"warmroute"}


async def test_engines_are_told_the_span_in_place_of_the_clients(
    gateway: Begin, scripted: StartScripted, collector: Collector
) -> None:
    worker = await scripted()
    running = await gateway(worker, change=traced(collector, share=0.0))
    fields = (f"traceparent: {PARENT}", "tracestate: vendor=1")
    assert (await once(running.port, request(chat(), *fields))).status == 200
    await flushed(running)
    root = collector.root()
    assert root.trace_id.hex() == TRACE
    assert root.parent_span_id.hex() == SPAN
    assert root.trace_state == "vendor=1"
    (there,) = [each.all("traceparent") for each in worker.seen if each.target.startswith("/v1/chat")]
    assert there == [f"00-{TRACE}-{root.span_id.hex()}-01"]
    assert [each.all("tracestate") for each in worker.seen if each.target.startswith("/v1/chat")] == [["vendor=1"]]


async def test_a_tracestate_that_is_none_is_left_out_and_says_nothing_in_our_log(
    gateway: Begin, engine: StartEngine, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    running = await gateway(await engine(), change=traced(collector))
    for state in ("\x80evil log line", "=", "a=" + "x" * 5000):
        collector.spans.clear()
        fields = (f"traceparent: {PARENT}", f"tracestate: {state}")
        assert (await once(running.port, request(chat(max_tokens=1), *fields))).status == 200
        await flushed(running)
        assert collector.root().trace_state == ""
        assert collector.root().trace_id.hex() == TRACE
    assert "evil" not in caplog.text


@pytest.mark.parametrize("parent", [None, f"00-{TRACE}-{SPAN}-00"])
async def test_what_is_not_sampled_passes_unchanged_and_makes_no_span(
    gateway: Begin, scripted: StartScripted, collector: Collector, parent: str | None
) -> None:
    worker = await scripted()
    running = await gateway(worker, change=traced(collector, share=0.0 if parent is None else 1.0))
    fields = [] if parent is None else [f"traceparent: {parent}"]
    assert (await once(running.port, request(chat(), *fields))).status == 200
    await flushed(running)
    assert collector.spans == []
    (chats,) = [each for each in worker.seen if each.target.startswith("/v1/chat")]
    assert chats.all("traceparent") == ([] if parent is None else [parent])


async def test_attempts_that_failed_are_events_and_a_failure_is_an_error(
    gateway: Begin, engine: StartEngine, collector: Collector
) -> None:
    bad, good = await engine(), await engine()
    running = await gateway(bad, good, change=traced(collector))
    for each in (bad, good):
        each.faults.add("error500", count=1)
    assert (await once(running.port, request(chat(max_tokens=1)))).status >= 500
    await flushed(running)
    root = collector.root()
    assert root.status.code == 2
    assert told(root)["error.type"] == told(root)["warmroute.outcome"] == "worker_error"
    assert told(root)["warmroute.attempts"] == 2
    assert [event.name for event in root.events] == ["attempt failed"] * 2
    assert {told(event)["error.type"] for event in root.events} == {"ServerError"}


async def test_who_leaves_and_who_was_never_sent_have_spans_too(
    gateway: Begin, engine: StartEngine, collector: Collector
) -> None:
    running = await gateway(await engine(), change=traced(collector))
    client = await Raw.connect(running.port)
    await client.send(request(long_chat(stream=True)))
    await client.head()
    client.vanish()
    await flushed(running)
    assert told(collector.root())["warmroute.outcome"] == "client_gone"
    collector.spans.clear()
    (worker,) = running.fleet.workers.values()
    running.moving.drain(worker)
    assert (await once(running.port, request(chat(), "x-request-timeout: 0.1"))).status >= 429
    await flushed(running)
    assert set(collector.children()) == {"admission"}


async def test_under_pressure_nothing_is_traced(gateway: Begin, engine: StartEngine, collector: Collector) -> None:
    def pressed(config: Config) -> None:
        traced(collector)(config)
        config.pressure.memory = 1

    running = await gateway(await engine(), change=pressed)
    await until(lambda: running.gateway.pressure.rung > 0)
    if running.gateway.pressure.rung < 4:
        await once(running.port, request(chat(max_tokens=1)))
    await flushed(running)
    assert [span for span in collector.spans if span.name == "first_byte"] == []


async def test_a_collector_that_hangs_holds_nobody_up(
    gateway: Begin, engine: StartEngine, collector: Collector
) -> None:
    collector.hangs = True
    running = await gateway(await engine(), change=traced(collector))
    for _ in range(5):
        assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    async with asyncio.timeout(20):
        await running.stop()


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (PARENT, True),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
        ("\x00" * 55, False),
    ],
)
def test_parents_are_read_as_the_standard_says(value: str, valid: bool) -> None:
    found = parent_of(value.encode())
    assert (found is not None) is valid
    assert parent_of(None) is None


def test_what_is_wrong_with_tracing_is_said() -> None:
    for text, field in (
        ("tracing: {endpoint: collector:4318}", "tracing.endpoint"),
        ("tracing: {endpoint: 'http://c/v1/traces', share: 2}", "tracing.share"),
        ("tracing: {share: 0.5}", "endpoint"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse(text + "\nworkers: [{url: 'http://127.0.0.1:1'}]\n", {})
        assert field in str(caught.value)


async def test_clients_that_are_not_trusted_do_not_decide_what_is_traced(
    gateway: Begin, engine: StartEngine, collector: Collector
) -> None:
    def wary(config: Config) -> None:
        config.tracing = TracingConfig(collector.url, 0.0, trust=False)

    running = await gateway(await engine(), change=wary)
    assert (await once(running.port, request(chat(max_tokens=1), f"traceparent: {PARENT}"))).status == 200
    await flushed(running)
    assert collector.spans == []
