"""Tenants that are not to know where engines are do not learn it from errors, and what models say is never touched."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.addresses import hidden, hidden_in_events
from gateway.config import Config, Secret, TenantConfig, parse
from gateway.http.limits import Outward
from gateway.workers import Worker, WorkerSpec
from tests.gateway import test_usage_injection as usage
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import EVENTS, Scripted, Seen, chunk, events, ok
from tests.gateway.talk import Raw, chat, request, settled

KEY = "Authorization: Bearer k-hiding"
OPEN = "Authorization: Bearer k-open"


def hiding(config: Config) -> None:
    config.tenants = [
        TenantConfig("hiding", keys=[Secret("k-hiding")], hide_addresses=True, show_routing=False),
        TenantConfig("open", keys=[Secret("k-open")]),
    ]


async def ask(port: int, key: str = KEY, **fields: Any) -> Any:
    async with await Raw.connect(port) as client:
        return await client.ask(request(chat(**fields), key))


async def workers() -> list[Worker]:
    urls = ("http://engine-7.llm.svc.cluster.local:8000", "http://vllm:8000", "http://198.51.100.7:9000/base")
    return [Worker(WorkerSpec(url), Outward()) for url in urls]


HIDDEN = [
    ("cannot reach 10.1.2.3:8998", "cannot reach [worker]"),
    ("cannot reach 10.1.2.3", "cannot reach [worker]"),
    ("at http://10.1.2.3:8998/v1/x?y", "at [worker]/v1/x?y"),
    ("at http://user:word@10.1.2.3/x", "at [worker]/x"),
    (r"at http:\/\/10.1.2.3:80\/x", r"at [worker]\/x"),
    ("tcp://127.0.0.1:5557", "[worker]"),
    ("host='172.16.0.9', port=8000", "host='[worker]', port=8000"),
    ("('192.168.1.1', 80)", "('[worker]', 80)"),
    ("169.254.169.254 said no", "[worker] said no"),
    ("0.0.0.0:8000 is in use", "[worker] is in use"),
    ("8.8.8.8:53 timed out", "[worker] timed out"),
    ("peer 198.51.100.7 is gone", "peer [worker] is gone"),
    ("at [fd00::12]:8000", "at [worker]"),
    ("at http://[2001:db8::1]:8000/x", "at [worker]/x"),
    ("at fe80::1%eth0", "at [worker]"),
    ("at ::1", "at [worker]"),
    ("at ::ffff:10.0.0.1", "at [worker]"),
    ("engine-7.llm.svc.cluster.local is down", "[worker] is down"),
    ("ENGINE-7.llm.svc.cluster.local:9 is down", "[worker] is down"),
    ("https://engine-7.llm.svc.cluster.local:8000/v1", "[worker]/v1"),
    ("to vllm:8000.", "to [worker]."),
    ("at 10.10.00.1", "at [worker]"),
]
KEPT = [
    "vllm could not be found",
    "version 1.2.3.4 of it",
    "8.8.8.8 without a port",
    "std::vector and a :: b",
    "it is 12:34:56 o'clock",
    "1.2.3.4.5 and 10.1.2.3.4",
    "999.10.0.1:80",
    "max_tokens:4096 is over 8192",
    "other.example:8000",
    "xengine-7.llm.svc.cluster.local.evil.example",
    "dead::beef",
    "sha256:10ab:20cd",
]


@pytest.mark.parametrize(("said", "told"), HIDDEN)
async def test_what_is_hidden(said: str, told: str) -> None:
    assert hidden(said.encode(), await workers()).decode() == told


@pytest.mark.parametrize("said", KEPT)
async def test_what_is_kept(said: str) -> None:
    assert hidden(said.encode(), await workers()).decode() == said


@given(st.recursive(st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_stays_json(value: Any) -> None:
    data = json.dumps({"error": {"message": value, "at": "http://10.0.0.1:80/x"}}).encode()
    found = json.loads(hidden(data, []))
    assert found["error"]["at"] == "[worker]/x"


def told_of(worker: Scripted) -> bytes:
    return b"cannot connect to http://127.0.0.1:%d/v1 from 10.9.8.7" % worker.port


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500, 503])
@pytest.mark.parametrize("kind", ["json", "text", "chunked"])
async def test_errors_of_engines(gateway: Begin, scripted: StartScripted, status: int, kind: str) -> None:
    async def fail(seen: Seen) -> None:
        said = told_of(worker)
        if kind == "text":
            body = b"HTTP/1.1 %d No\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (
                status,
                len(said),
                said,
            )
        elif kind == "chunked":
            body = b"HTTP/1.1 %d No\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (
                status,
                chunk(said[:22]) + chunk(said[22:]),
            )
        else:
            body = ok(json.dumps({"error": {"message": said.decode()}}).encode(), status=b"%d No" % status)
        await seen.write(body)

    worker = await scripted(fail)
    running = await gateway(worker, change=hiding)
    for stream in (False, True):
        answer = await ask(running.port, stream=stream)
        assert (answer.status, answer.whole) == (status, True)
        assert b"cannot connect to [worker]/v1 from [worker]" in answer.body
        plain = await ask(running.port, OPEN, stream=stream)
        assert (plain.status, told_of(worker) in plain.body) == (status, True)
    await settled(running)


@pytest.mark.parametrize("status", [400, 500])
async def test_errors_that_cannot_be_read_are_told_in_our_words(
    gateway: Begin, scripted: StartScripted, status: int
) -> None:
    said = b"at 10.9.8.7 " * 40_000
    squeezed = ok(gzip.compress(b"at 10.9.8.7"), b"Content-Encoding: gzip", status=b"%d No" % status)
    running = await gateway(await scripted(squeezed, ok(said, status=b"%d No" % status)), change=hiding)
    for _ in range(2):
        answer = await ask(running.port)
        assert answer.status in (status, 502)
        assert set(answer.json()) == {"error"}
        assert b"10.9.8.7" not in answer.body
        assert answer.all("content-encoding") == []


TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"ask 10.0.0.1:80 about \\"error\\""}}]}\n\n'
ODD = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"error":"10.0.0.1"}]}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
ERROR = b'data: {"error":{"message":"lost http://10.0.0.1:8998/x","type":"E","code":500}}\n\n'
NAMED = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"lost 10.0.0.1:8998"}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("error", [ERROR, NAMED])
@pytest.mark.parametrize("step", [1, 7, 100_000])
async def test_error_events_behind_content(gateway: Begin, scripted: StartScripted, error: bytes, step: int) -> None:
    """Only they are changed, however the engine's writes cut them, and nothing else is left out."""
    data = TEXT + ODD + USAGE + error + DONE

    async def say(seen: Seen) -> None:
        await seen.write(EVENTS)
        for at in range(0, len(data), step):
            await seen.write(chunk(data[at : at + step]))
        await seen.write(b"0\r\n\r\n")

    running = await gateway(await scripted(say), change=hiding)
    answer = await ask(running.port, stream=True, stream_options={"include_usage": True})
    changed = error.replace(b"http://10.0.0.1:8998", b"[worker]").replace(b"10.0.0.1:8998", b"[worker]")
    assert answer.body == TEXT + ODD + USAGE + changed + DONE
    assert (await ask(running.port, OPEN, stream=True, stream_options={"include_usage": True})).body == data


async def test_usage_that_was_not_asked_for_stays_out_beside_it(gateway: Begin, scripted: StartScripted) -> None:
    worker = await usage.taking(scripted, events(*usage.SAID, usage.USAGE, ERROR, DONE))
    running = await gateway(usage.counting(worker.url), change=hiding, policy="cache_aware")
    body = json.dumps(usage.asked()).encode()
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(body, KEY, "Content-Type: application/json"))
    assert b"include_usage" in worker.seen[-1].body
    assert answer.body == b"".join(usage.SAID) + ERROR.replace(b"http://10.0.0.1:8998", b"[worker]") + DONE


@pytest.mark.parametrize("code", [400, 500])
async def test_an_error_event_before_content(gateway: Begin, scripted: StartScripted, code: int) -> None:
    error = ERROR.replace(b"500", b"%d" % code)
    running = await gateway(await scripted(events(error, DONE)), change=hiding)
    answer = await ask(running.port, stream=True)
    assert b"lost [worker]/x" in answer.body
    assert b"10.0.0.1" not in answer.body


async def test_a_client_that_was_sent_comments_reads_no_address_either(gateway: Begin, scripted: StartScripted) -> None:
    def commenting(config: Config) -> None:
        hiding(config)
        config.listen.comment_after = 0.05

    async def late(seen: Seen) -> None:
        await asyncio.sleep(1.5)
        await seen.write(ok(b'{"error":{"message":"no 10.0.0.1:1"}}', status=b"400 No"))

    running = await gateway(await scripted(late), change=commenting)
    answer = await ask(running.port, stream=True)
    assert answer.status == 200
    assert b'"message":"no [worker]"' in answer.body


async def test_answers_are_never_touched(gateway: Begin, scripted: StartScripted) -> None:
    said = b'{"choices":[{"message":{"content":"http://10.0.0.1:80 is an \\"error\\""}}],"error":null}'
    running = await gateway(await scripted(ok(said)), change=hiding)
    assert (await ask(running.port)).body == said


async def test_what_is_no_whole_event_is_passed_on() -> None:
    assert hidden_in_events(b'data: {"error":"10.0.0.1"', []) == b'data: {"error":"10.0.0.1"'


def test_it_is_an_option_of_a_tenant() -> None:
    tenants = "tenants: [{name: a, keys: [k], hide_addresses: true}, {name: b, keys: [l]}]"
    config = parse(f"workers: [{{url: 'http://h:1'}}]\n{tenants}\n")
    assert [tenant.hide_addresses for tenant in config.tenants] == [True, False]
