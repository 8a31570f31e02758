"""Whose fault a failure is, and what becomes of the requests it meets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.run import Running
from gateway.workers import Facts, ServedModel, State, Target, Worker, WorkerSpec
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import EVENTS, Scripted, Seen, chunk, events, ok
from tests.gateway.talk import Raw, admin, chat, once, request, settled, until

NOWHERE = "http://nonexistent.invalid:1"
CONTENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ERROR = b'data: {"error":{"message":"core died","type":"InternalServerError","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"


def worker_of(running: Running, scripted: Scripted) -> Worker:
    return running.fleet.workers[f"127.0.0.1:{scripted.port}"]


def target_of(running: Running, scripted: Scripted) -> Target:
    return worker_of(running, scripted).targets[0]


async def outcomes(running: Running) -> Counter[str]:
    """Outcome -> requests that ended so."""
    await until(lambda: not running.gateway.exchanges)
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(await admin(running, "/metrics")):
        for sample in family.samples if family.name == "warmroute_requests" else ():
            if sample.name.endswith("_total") and sample.value:
                found[sample.labels["outcome"]] += int(sample.value)
    return found


async def faults(running: Running) -> dict[tuple[str, str], float]:
    """(target, kind) -> faults counted."""
    return {
        (sample.labels["target"], sample.labels["kind"]): sample.value
        for family in text_string_to_metric_families(await admin(running, "/metrics"))
        if family.name == "warmroute_worker_faults"
        for sample in family.samples
        if sample.name.endswith("_total")
    }


# -- workers that go down -----------------------------------------------------------------------------------------------


async def hang(seen: Seen) -> None:
    await seen.gone(60)


async def begin_and_hang(seen: Seen) -> None:
    await seen.write(EVENTS)
    await seen.gone(60)


@pytest.mark.parametrize("silence", [hang, begin_and_hang])
async def test_a_request_that_waits_for_a_worker_that_goes_down_is_answered_by_another(
    gateway: Begin, scripted: StartScripted, silence: Any
) -> None:
    silent, good = await scripted(silence), await scripted(events(CONTENT, DONE))
    running = await gateway(silent, good)
    worker = worker_of(running, silent)
    asked = [asyncio.ensure_future(once(running.port, request(chat(stream=True)))) for _ in range(6)]
    await until(lambda: sum(task.done() for task in asked) == 3 and len(silent.seen) == 3)
    running.probe.unwatch(worker)
    running.fleet.set_state(worker, State.DOWN, "gone")
    answers = await asyncio.wait_for(asyncio.gather(*asked), 5)
    assert {(answer.status, answer.body) for answer in answers} == {(200, CONTENT + DONE)}
    assert len(good.seen) == 6
    await settled(running)


async def test_without_another_worker_the_client_is_told_at_once(gateway: Begin, scripted: StartScripted) -> None:
    silent = await scripted(hang)
    running = await gateway(silent)
    asked = asyncio.ensure_future(once(running.port, request()))
    await until(lambda: silent.seen)
    running.probe.unwatch(worker_of(running, silent))
    running.fleet.set_state(worker_of(running, silent), State.DOWN, "gone")
    assert (await asyncio.wait_for(asked, 5)).status in (502, 503)


async def test_a_silent_stream_of_a_worker_that_went_down_ends_soon_and_one_that_flows_goes_on(
    gateway: Begin, scripted: StartScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.exchange.SILENT", 1.0)
    monkeypatch.setattr("gateway.app.SILENT", 1.0)
    ended = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(CONTENT))
        if json.loads(seen.body).get("user") == "silent":
            await seen.gone(60)
            return
        while not ended.is_set():
            await seen.write(chunk(CONTENT))
            await asyncio.sleep(0.02)
        await seen.write(chunk(DONE) + b"0\r\n\r\n")

    only = await scripted(stream)
    running = await gateway(only)
    worker = worker_of(running, only)
    running.probe.unwatch(worker)
    flows = asyncio.ensure_future(once(running.port, request(chat(stream=True))))
    silent = asyncio.ensure_future(once(running.port, request(chat(stream=True, user="silent"))))
    await until(lambda: len(only.seen) == 2 and all(e.first_at for e in running.gateway.exchanges))
    running.fleet.set_state(worker, State.DOWN, "gone")
    answer = await asyncio.wait_for(silent, 10)
    assert answer.whole
    told, error = answer.body.rstrip().split(b"\n\n")
    assert told == CONTENT.rstrip()
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] in (502, 504)
    assert not flows.done(), "what still flows is left alone"
    ended.set()
    answer = await asyncio.wait_for(flows, 10)
    assert answer.body.endswith(DONE)
    assert b"error" not in answer.body
    assert await outcomes(running) == {"stream_error": 1, "ok": 1}


# -- what is no worker's fault ------------------------------------------------------------------------------------------


async def test_a_worker_without_an_address_stays_joining_and_harms_no_other(
    gateway: Begin, scripted: StartScripted
) -> None:
    good = await scripted()
    running = await gateway(good, NOWHERE, ready=False)
    worker, lost = worker_of(running, good), running.fleet.workers["nonexistent.invalid:1"]
    await until(lambda: worker.state is State.READY)
    await until(lambda: lost.reason != "not read yet")
    for _ in range(12):
        assert (await once(running.port, request())).status == 200
    assert lost.state is State.JOINING
    assert (worker.state, worker.targets[0].breaker.state, worker.failures) == (State.READY, "closed", 0)
    assert await faults(running) == {}


async def test_a_name_that_loses_its_address_is_told_apart_and_takes_no_worker_down(
    gateway: Begin, scripted: StartScripted
) -> None:
    good = await scripted()
    running = await gateway(good)
    lost = running.add_worker(WorkerSpec(NOWHERE, engine="generic"), watch=False)
    running.fleet.describe(lost, Facts(models=[ServedModel("sim")]))
    running.fleet.set_state(lost, State.READY, "it was")
    for _ in range(8):
        assert (await once(running.port, request())).status == 200
    running.probe.watch(lost)
    for _ in range(5):
        # Probes that cannot find it say nothing of it either.
        await running.probe._look(lost)
    assert lost.state is State.READY
    assert {kind for _, kind in await faults(running)} == {"unresolved"}
    assert target_of(running, good).breaker.state == "closed"
    assert worker_of(running, good).state is State.READY


COMMAND = str(Path(sys.executable).parent / "warmroute")


@contextlib.asynccontextmanager
async def command(
    tmp_path: Path, url: str, **options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, int]]:
    """The gateway as a process of its own; its data and admin ports."""
    lines = [
        "listen: {host: 127.0.0.1, port: 0}",
        "admin: {port: 0}",
        "probes: {health: 100ms, load: 60s, join: 100ms}",
        f"workers: [{{url: '{url}'}}]",
        *[f"{name}: {value}" for name, value in options.items()],
    ]
    config = tmp_path / "warmroute.yaml"
    config.write_text("\n".join(lines) + "\n")
    process = await asyncio.create_subprocess_exec(
        COMMAND, "serve", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(30):
            while "listening on" not in (line := (await process.stderr.readline()).decode()):
                assert line, "the gateway ended"
        ports = [int(word.rsplit(":", 1)[1]) for word in line.replace(",", "").split() if "127.0.0.1:" in word]
        async with asyncio.timeout(30):
            while (await once(ports[0], request(b"", path="/readyz", method="GET"))).status != 200:
                await asyncio.sleep(0.05)
        yield process, ports[0], ports[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def first_free(pid: int) -> int:
    """The lowest descriptor that a process does not use."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


@pytest.mark.skipif(sys.platform != "linux", reason="sets another process's limits")
async def test_a_gateway_without_descriptors_blames_no_worker(engine: StartEngine, tmp_path: Path) -> None:
    started = await engine(keep_alive=0.05)
    get = request(b"", path="/readyz", method="GET")
    async with (
        command(tmp_path, started.url, drain="0s") as (process, port, control),
        await Raw.connect(port) as client,
    ):
        assert (await client.ask(get)).status == 200
        assert (await client.ask(request(chat(max_tokens=1)))).status == 200
        soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        # Connections that were open close, and none can be made.
        for _ in range(20):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (first_free(process.pid), hard))
            await asyncio.sleep(0.05)
        for _ in range(8):
            answer = await client.ask(request(chat(max_tokens=1)))
            assert (answer.status, answer.json()["error"]["type"]) == (503, "service_unavailable")
            assert answer.all("retry-after")
            await asyncio.sleep(0.1)
        assert (await client.ask(get)).status == 200, "the worker is as healthy as before"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert (await client.ask(request(chat(max_tokens=1)))).status == 200
        metrics = (await once(control, request(b"", path="/metrics", method="GET"))).body
        assert b"warmroute_worker_faults_total{" not in metrics
        assert b"warmroute_breaker_openings_total{" not in metrics


async def test_a_second_signal_ends_a_long_drain_at_once(engine: StartEngine, tmp_path: Path) -> None:
    started = await engine()
    async with command(tmp_path, started.url, drain="10m") as (process, port, _):
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            while (await once(port, request(b"", path="/readyz", method="GET"))).status != 503:
                await asyncio.sleep(0.02)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


# -- breakers and pauses ------------------------------------------------------------------------------------------------


async def test_a_trial_that_streams_closes_the_breaker_when_its_answer_begins(
    gateway: Begin, scripted: StartScripted
) -> None:
    release = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(CONTENT))
        await release.wait()
        await seen.write(chunk(DONE) + b"0\r\n\r\n")

    only = await scripted(stream, ok())
    running = await gateway(only)
    target = target_of(running, only)
    for _ in range(5):
        running.fleet.failed(target, running.gateway.clock() - 100)
    assert target.breaker.state == "open"
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True)))
        assert (await client.head()).status == 200
        assert target.breaker.state == "closed"
        for _ in range(3):
            assert (await once(running.port, request())).status == 200
        assert len(running.gateway.exchanges) == 1, "the first still streams"
        release.set()
    await settled(running)


async def test_one_429_locks_nobody_else_out(gateway: Begin, scripted: StartScripted) -> None:
    only = await scripted(ok(b'{"error":"quota"}', b"Retry-After: 30", status=b"429 Too Many"), ok())
    running = await gateway(only)
    answer = await once(running.port, request())
    assert (answer.status, answer.one("retry-after")) == (429, "30")
    for _ in range(3):
        assert (await once(running.port, request())).status == 200
    assert len(only.seen) == 4


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("retry_after", [b"1", None])
async def test_one_refusal_at_home_spills_that_request_and_moves_no_session(
    gateway: Begin, scripted: StartScripted, status: int, retry_after: bytes | None
) -> None:
    lines = [b"Retry-After: " + retry_after] if retry_after is not None else []
    full = ok(b'{"error":"full"}', *lines, status=b"%d Full" % status)
    workers = {f"127.0.0.1:{worker.port}": worker for worker in [await scripted(), await scripted()]}
    running = await gateway(*workers.values(), policy="cache_aware")
    body = chat(messages=[{"role": "user", "content": "w " * 20_000}])

    async def turn() -> str:
        answer = await once(running.port, request(body, "X-Session-Id: s"))
        assert answer.status == 200
        return answer.one("x-warmroute-worker")

    home = await turn()
    assert await turn() == home
    workers[home].replies = [full, ok()]
    assert await turn() != home
    target = target_of(running, workers[home])
    (session,) = running.sessions.recent(2)
    assert session.home == target.id
    await until(lambda: target.paused_until <= running.gateway.clock(), 5)
    running.gateway.sweep()
    assert [await turn() for _ in range(3)] == [home] * 3
    assert session.home == target.id
    moved = [key for key in running.metrics.sessions.values if key[2] == "moved"]
    assert moved == []


# -- what a worker is ---------------------------------------------------------------------------------------------------


class Pages:
    """An engine's own pages, and how often each was read."""

    def __init__(self) -> None:
        listing = {"object": "list", "data": [{"id": "sim", "object": "model", "owned_by": "vllm"}]}
        metrics = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\nvllm:num_requests_running 0\n'
        self.pages = {
            "/version": ok(b'{"version":"0.33.0"}'),
            "/v1/models": ok(json.dumps(listing).encode()),
            "/metrics": ok(metrics),
            "/health": ok(b""),
        }
        self.read: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
                self.read[path] += 1
                writer.write(self.pages.get(path, ok(b"{}", status=b"404 Not Found")))
        writer.close()


@pytest.fixture
async def pages() -> AsyncIterator[tuple[Pages, str]]:
    """An engine that shows pages and nothing else; with its url."""
    each = Pages()
    server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
    yield each, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("status", [b"503 Busy", b"404 Not Found"])
async def test_an_engine_whose_list_of_models_fails_once_stays_what_it_is(
    gateway: Begin, pages: tuple[Pages, str], status: bytes
) -> None:
    shown, url = pages
    running = await gateway(url)
    (worker,) = running.fleet.workers.values()

    def is_whole() -> bool:
        facts = worker.facts
        names = [model.name for model in facts.models]
        return (facts.engine, names, facts.kv_tokens, worker.state) == ("vllm", ["sim"], 1600, State.READY)

    assert is_whole()
    listing, before = shown.pages["/v1/models"], shown.read["/v1/models"]
    shown.pages["/v1/models"] = ok(b"{}", status=status)
    await until(lambda: shown.read["/v1/models"] > before)
    assert is_whole()
    shown.pages["/v1/models"] = listing
    before = shown.read["/metrics"]
    await until(lambda: shown.read["/metrics"] > before)
    assert is_whole()
    assert running.fleet.view("nonsense") is None, "it does not take any name"


async def test_an_engine_whose_metrics_fail_once_keeps_its_known_size(gateway: Begin, pages: tuple[Pages, str]) -> None:
    shown, url = pages
    running = await gateway(url)
    (worker,) = running.fleet.workers.values()
    shown.pages["/metrics"] = ok(b"", status=b"503 Busy")
    before = shown.read["/version"]
    await until(lambda: shown.read["/version"] > before + 1)
    assert (worker.facts.engine, worker.facts.kv_tokens, worker.facts.block_size) == ("vllm", 1600, 16)


async def test_an_engine_whose_list_of_models_fails_while_it_joins_is_not_taken_for_another_kind(
    gateway: Begin, pages: tuple[Pages, str]
) -> None:
    shown, url = pages
    listing = shown.pages["/v1/models"]
    shown.pages["/v1/models"] = ok(b"{}", status=b"503 Loading")
    running = await gateway(url, ready=False)
    (worker,) = running.fleet.workers.values()
    await until(lambda: shown.read["/v1/models"] >= 4)
    assert worker.state is State.JOINING
    shown.pages["/v1/models"] = listing
    await until(lambda: worker.state is State.READY)
    assert (worker.facts.engine, worker.facts.kv_tokens) == ("vllm", 1600)


# -- streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces", [(CONTENT + ERROR + DONE,), (CONTENT + CONTENT, ERROR + DONE), (CONTENT, ERROR, DONE)]
)
async def test_an_error_event_behind_content_counts_as_a_broken_stream(
    gateway: Begin, scripted: StartScripted, pieces: tuple[bytes, ...]
) -> None:
    only = await scripted(events(*pieces))
    running = await gateway(only)
    answer = await once(running.port, request(chat(stream=True)))
    assert answer.body == b"".join(pieces), "it is passed on as it is"
    assert await outcomes(running) == {"stream_error": 1}
    assert target_of(running, only).breaker.faults == 1


async def test_an_answer_that_an_engine_gave_up_counts_as_a_broken_stream(
    gateway: Begin, scripted: StartScripted
) -> None:
    last = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
    only = await scripted(events(CONTENT, last, DONE))
    running = await gateway(only)
    answer = await once(running.port, request(chat(stream=True)))
    assert answer.body == CONTENT + last + DONE
    assert await outcomes(running) == {"stream_error": 1}


async def test_words_about_errors_and_aborts_are_no_broken_stream(gateway: Begin, scripted: StartScripted) -> None:
    said = rb'data: {"choices":[{"delta":{"content":"{\"error\":{\"code\":500}} \"finish_reason\":\"abort\""}}]}'
    only = await scripted(events(said + b"\n\n", DONE))
    running = await gateway(only)
    await once(running.port, request(chat(stream=True)))
    assert await outcomes(running) == {"ok": 1}


def response(**event: Any) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


@pytest.mark.parametrize("code", [503, "503"])
async def test_a_response_that_begins_with_an_error_is_made_by_another_worker(
    gateway: Begin, scripted: StartScripted, code: Any
) -> None:
    full = await scripted(events(response(type="error", code=code, message="full", param=None, sequence_number=0)))
    good = await scripted(events(response(type="response.created", sequence_number=0)))
    running = await gateway(full, good)
    for _ in range(4):
        target_of(running, full).paused_until = 0.0
        running.fleet.changed()
        answer = await once(running.port, request({"model": "sim", "input": "x", "stream": True}, path="/v1/responses"))
        assert answer.body.startswith(b"event: response.created\n")
    assert full.seen
    assert target_of(running, full).breaker.faults == 0, "being full is no fault"


async def test_a_response_that_breaks_off_ends_with_an_error_event_of_its_kind(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def die(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(response(type="response.created", sequence_number=0)))
        await asyncio.sleep(0.05)
        seen.reset()

    running = await gateway(await scripted(die))
    answer = await once(running.port, request({"model": "sim", "input": "x", "stream": True}, path="/v1/responses"))
    assert answer.whole
    _, last = answer.body.rstrip().split(b"\n\n")
    name, data = last.split(b"\n")
    assert name == b"event: error"
    told = json.loads(data.removeprefix(b"data: "))
    assert told["type"] == "error"
    assert isinstance(told["message"], str)
    assert b"[DONE]" not in answer.body
    assert await outcomes(running) == {"stream_error": 1}


# -- framing ------------------------------------------------------------------------------------------------------------

CODED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


@pytest.mark.parametrize(
    "answer",
    [
        CODED,
        CODED.replace(b"gzip, chunked", b"gzip"),
        CODED.replace(b"gzip, chunked", b"chunked, gzip"),
        CODED.replace(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked"),
    ],
)
async def test_a_transfer_coding_that_was_not_asked_for_is_never_passed_on(
    gateway: Begin, scripted: StartScripted, answer: bytes
) -> None:
    bad, good = await scripted(answer), await scripted()
    running = await gateway(bad)
    told = await once(running.port, request())
    assert told.status == 502
    assert told.json()["error"]["type"] == "upstream_error"
    running = await gateway(bad, good)
    for _ in range(4):
        assert (await once(running.port, request())).json() == {"ok": True}
    assert len(good.seen) == 4
