"""Streams on their way through: bytes unchanged, writes that end on whole events, errors in the client's dialect."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import EVENTS, Scripted, Seen, chunk, events, ok
from tests.gateway.talk import CHAT, Raw, Response, admin, chat, once, request, settled, until, until_closed

MESSAGES = "/v1/messages"
GENERATE = "/generate"


def stream(path: str = CHAT, *lines: str) -> bytes:
    return request(chat(stream=True), *lines, path=path)


async def pieces_of(seen: Seen, pieces: list[bytes], end: bytes = b"0\r\n\r\n", pause: float = 0.0) -> None:
    await seen.write(EVENTS)
    for piece in pieces:
        await seen.write(chunk(piece))
        await asyncio.sleep(pause)
    await seen.write(end)


STREAMS = [
    pytest.param([b'data: {"a":1}\n\n', b"data: [DONE]\n\n"], id="plain"),
    pytest.param([b"data: 1\r\n\r\n", b"data: 2\r\n\r\ndata: 3\r\n\r\n"], id="crlf"),
    pytest.param([b"data: 1\r\rdata: 2\r\r"], id="cr"),
    pytest.param([b": ping\n\n", b": ping\n\n", b"data: x\n\n: pong\n\n"], id="comments"),
    pytest.param([b"da", b"ta: 1\n", b"\nda", b"ta: 2\n\ndata:", b" 3\n\n"], id="cut-everywhere"),
    pytest.param([b"event: a\nid: 1\nretry: 5\ndata: x\ndata: y\n\n"], id="all-fields"),
    pytest.param([b"data: \xe4\xb8", b"\xad\xff\n\n"], id="not-utf-8"),
    pytest.param([b"\n\n\n\ndata: late\n\n"], id="empty-lines-first"),
    pytest.param([b"data: 1\n\n", b"data: unfinished at the end"], id="unfinished"),
    pytest.param([b"data: " + b"x" * 300_000 + b"\n\n", b"data: end\n\n"], id="one-large-event"),
    pytest.param([b"data: 1\n\n", b"data: " + b"y" * 200_000 + b"\n\n" + b"data: 2\n\n"], id="large-event-later"),
    pytest.param([b"\xef\xbb\xbfdata: bom\n\n"], id="byte-order-mark"),
]


@pytest.mark.parametrize("pieces", STREAMS)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, GENERATE])
async def test_the_payload_of_a_stream_is_identical(
    gateway: Begin, scripted: StartScripted, pieces: list[bytes], path: str
) -> None:
    worker = await scripted(lambda seen: pieces_of(seen, pieces, pause=0.002))
    running = await gateway(worker)
    answer = await once(running.port, stream(path))
    assert answer.whole
    assert answer.body == b"".join(pieces)
    assert answer.one("content-type") == "text/event-stream"
    assert (answer.one("x-accel-buffering"), answer.one("cache-control")) == ("no", "no-cache")


async def test_random_cuts_of_a_stream_change_nothing_and_every_write_ends_on_an_event(
    gateway: Begin, scripted: StartScripted
) -> None:
    dice = random.Random(3)
    whole = b"".join(b"data: %b\n\n" % (b"x" * dice.randint(0, 50)) for _ in range(60)) + b": c\n\ndata: [DONE]\n\n"

    async def cut(seen: Seen) -> None:
        cuts = sorted(dice.sample(range(1, len(whole)), 40))
        await pieces_of(seen, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)])

    running = await gateway(await scripted(cut))
    async with await Raw.connect(running.port) as client:
        for _ in range(15):
            answer = await client.ask(stream())
            assert answer.body == whole
            assert all(piece.endswith(b"\n\n") for piece in answer.chunks)


async def test_the_headers_of_a_stream_that_the_worker_sets_are_kept(gateway: Begin, scripted: StartScripted) -> None:
    head = EVENTS[:-2] + b"Cache-Control: no-store\r\nX-Accel-Buffering: yes\r\n\r\n"
    running = await gateway(await scripted(head + chunk(b"data: 1\n\n") + b"0\r\n\r\n"))
    answer = await once(running.port, stream())
    assert (answer.one("x-accel-buffering"), answer.one("cache-control")) == ("yes", "no-store")


async def test_an_event_is_passed_on_as_soon_as_it_is_whole(gateway: Begin, scripted: StartScripted) -> None:
    go = asyncio.Event()

    async def one_and_a_half(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(b"data: 1\n\ndata: ha"))
        await go.wait()
        await seen.write(chunk(b"lf\n\n") + b"0\r\n\r\n")

    running = await gateway(await scripted(one_and_a_half))
    async with await Raw.connect(running.port) as client:
        await client.send(stream())
        await client.head()
        assert await client.reader.readuntil(b"\n\n\r\n") == chunk(b"data: 1\n\n")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reader.read(1), 0.1)
        go.set()
        assert await client.reader.readuntil(b"\n\n\r\n") == chunk(b"data: half\n\n")


async def test_head_and_first_event_are_one_write(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(events(b"data: 1\n\n")))
    async with await Raw.connect(running.port) as client:
        await client.send(stream())
        first = await client.reader.read(65536)
        assert first.startswith(b"HTTP/1.1 200 ")
        assert b"data: 1\n\n" in first


@pytest.mark.parametrize("first", [b"", b"data: 1\n\n"])
@pytest.mark.parametrize("whole", [b"", b"data: 2\n\n"])
async def test_at_most_64_kib_of_an_unfinished_event_are_held(
    gateway: Begin, scripted: StartScripted, first: bytes, whole: bytes
) -> None:
    """Whatever stood before it in the same read: nothing, the first event, or a later one."""
    go = asyncio.Event()

    async def endless_event(seen: Seen) -> None:
        await seen.write(EVENTS + (chunk(first) if first else b""))
        await asyncio.sleep(0.03)
        await seen.write(chunk(whole + b"data: " + b"x" * 200_000))
        await go.wait()
        await seen.write(chunk(b"\n\n") + b"0\r\n\r\n")

    running = await gateway(await scripted(endless_event))
    async with await Raw.connect(running.port) as client:
        await client.send(stream())
        await client.head()
        got = 0
        while got < 200_000 - 64 * 1024:
            got += len(await asyncio.wait_for(client.reader.read(65536), 10))
        go.set()
        assert (await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), 10)).endswith(b"\n\n\r\n0\r\n\r\n")


# -- death in the middle ----------------------------------------------------------------------------------------------


def cut_after(*pieces: bytes, how: str) -> Any:
    async def die(seen: Seen) -> None:
        await seen.write(events(*pieces, end=False))
        await asyncio.sleep(0.05)
        if how == "reset":
            seen.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
        elif how == "garbage":
            await seen.write(b"\x00\xff no chunk\r\n")
        seen.writer.close()

    return die


def openai_error(tail: bytes, answer: Response) -> None:
    first, nothing = tail.split(b"\n\n")
    assert nothing == b""
    error = json.loads(first.removeprefix(b"data: "))["error"]
    assert set(error) >= {"message", "type", "code"}
    assert error["code"] == 502


def anthropic_error(tail: bytes, answer: Response) -> None:
    event, nothing = tail.split(b"\n\n")
    assert nothing == b""
    name, data = event.split(b"\n")
    assert name == b"event: error"
    body = json.loads(data.removeprefix(b"data: "))
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert body["error"]["message"]


@pytest.mark.parametrize(
    ("path", "check"), [(CHAT, openai_error), (GENERATE, openai_error), (MESSAGES, anthropic_error)]
)
@pytest.mark.parametrize("how", ["close", "reset", "garbage"])
async def test_a_stream_that_dies_ends_with_an_error_event_and_close(
    gateway: Begin, scripted: StartScripted, path: str, check: Any, how: str
) -> None:
    worker = await scripted(cut_after(b"data: 1\n\n", b"data: half an ev", how=how))
    other = await scripted()
    running = await gateway(worker, other)
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            answer = await client.ask(stream(path))
            if answer.one("content-type") == "text/event-stream":
                break
        assert answer.whole, "the framing ends properly"
        assert answer.body.startswith(b"data: 1\n\n")
        check(answer.body.removeprefix(b"data: 1\n\n"), answer)
        assert await client.rest() == b""
    assert len(other.seen) <= 1, "a stream that began is not retried"
    await settled(running)


async def test_an_error_event_does_not_become_the_end_of_a_large_event_that_was_cut(
    gateway: Begin, scripted: StartScripted
) -> None:
    running = await gateway(await scripted(cut_after(b"data: 1\n\n", b"data: " + b"x" * 200_000, how="close")))
    answer = await once(running.port, stream())
    found = [event for event in answer.body.split(b"\n\n") if event.startswith(b'data: {"error"')]
    assert len(found) == 1


async def test_http_1_0_gets_the_error_event_and_close(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted(cut_after(b"data: 1\n\n", how="close")))
    data = await until_closed(running.port, stream().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    _, _, body = data.partition(b"\r\n\r\n")
    assert body.startswith(b'data: 1\n\ndata: {"error":')
    assert body.endswith(b"}\n\n")


async def test_after_an_error_event_no_pipelined_request_is_served(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(cut_after(b"data: 1\n\n", how="close"))
    running = await gateway(worker)
    data = await until_closed(running.port, stream() + stream())
    assert data.count(b"HTTP/1.1 200") == 1
    assert len(worker.seen) == 1


# -- the first event --------------------------------------------------------------------------------------------------

FULL = b'data: {"error":{"object":"error","message":"The request queue is full.","type":"SERVICE_UNAVAILABLE","code":503}}\n\n'
ANTHROPIC_FULL = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"full"}}\n\n'


@pytest.mark.parametrize(
    ("path", "event"),
    [
        (CHAT, FULL),
        (CHAT, b": ping\n\n" + FULL),
        (CHAT, FULL.replace(b"503", b"500")),
        (CHAT, FULL.replace(b"503", b'"503"')),
        (CHAT, FULL.replace(b"\n", b"\r\n")),
        ("/v1/completions", b'data: {"object":"error","message":"full","code":503,"error":null}\n\n'),
        (GENERATE, b'data: {"error":{"message":"full","code":503}}\n\n'),
        (MESSAGES, ANTHROPIC_FULL),
    ],
)
async def test_an_error_as_the_first_event_goes_to_another_worker(
    gateway: Begin, scripted: StartScripted, path: str, event: bytes
) -> None:
    full = await scripted(lambda seen: pieces_of(seen, [event[:20], event[20:], b"data: [DONE]\n\n"]))
    free = await scripted(events(b"data: served\n\n"))
    running = await gateway(full, free)
    for _ in range(2):
        answer = await once(running.port, stream(path))
        assert (answer.status, answer.body) == (200, b"data: served\n\n")
    assert len(full.seen) >= 1
    await settled(running)


@pytest.mark.parametrize(
    ("path", "event", "status"),
    [(CHAT, FULL, 503), (CHAT, FULL.replace(b"503", b"500"), 502), (MESSAGES, ANTHROPIC_FULL, 503)],
)
async def test_when_all_are_full_the_client_gets_a_status(
    gateway: Begin, scripted: StartScripted, path: str, event: bytes, status: int
) -> None:
    running = await gateway(*[await scripted(events(event, b"data: [DONE]\n\n")) for _ in range(2)])
    answer = await once(running.port, stream(path))
    assert answer.status == status
    assert "error" in answer.json()
    if status == 503:
        assert int(answer.one("retry-after")) >= 1
    await settled(running)


async def test_an_error_of_the_client_in_the_first_event_is_passed_on_and_counts_against_nobody(
    gateway: Begin, scripted: StartScripted
) -> None:
    event = FULL.replace(b"503", b"400")
    worker = await scripted(events(event, b"data: [DONE]\n\n"))
    running = await gateway(worker)
    for _ in range(8):
        answer = await once(running.port, stream())
        assert (answer.status, answer.body) == (200, event + b"data: [DONE]\n\n")
    target = (await admin(running, "/workers"))["workers"][0]["targets"][0]
    assert target["breaker"] == "closed"
    assert "warmroute_worker_faults_total{" not in await admin(running, "/metrics")


async def test_content_that_speaks_of_errors_is_content(gateway: Begin, scripted: StartScripted) -> None:
    event = b'data: {"choices":[{"delta":{"content":"{\\"error\\":{\\"code\\":503}}"}}],"error":null}\n\n'
    running = await gateway(await scripted(events(event, b"data: [DONE]\n\n")))
    answer = await once(running.port, stream())
    assert answer.body == event + b"data: [DONE]\n\n"


async def test_sglang_s_full_queue_on_a_stream_goes_to_the_other_engine(gateway: Begin, engine: StartEngine) -> None:
    full, free = await engine("sglang"), await engine("sglang")
    running = await gateway(full, free)
    full.faults.add("queue_full", count=None)
    for _ in range(4):
        answer = await once(running.port, request(chat(stream=True, max_tokens=4)))
        assert answer.status == 200
        assert b'"error"' not in answer.body
        assert answer.body.endswith(b"data: [DONE]\n\n")
    assert free.stats()["finished"] == 4


@pytest.mark.parametrize("kind", ["reset", "half_close", "garbage"])
@pytest.mark.parametrize(("dialect", "path"), [("vllm", CHAT), ("vllm", MESSAGES), ("sglang", GENERATE)])
async def test_engines_that_break_in_mid_stream(
    gateway: Begin, engine: StartEngine, kind: str, dialect: str, path: str
) -> None:
    broken = await engine(dialect)
    running = await gateway(broken)
    broken.faults.add(kind, after_events=3)  # type: ignore[arg-type]
    body = chat(stream=True, max_tokens=40, ignore_eos=True, text="hello", sampling_params={"max_new_tokens": 40})
    answer = await once(running.port, request(body, path=path))
    assert answer.whole
    events_seen = answer.body.split(b"\n\n")[:-1]
    assert b'"error"' in events_seen[-1]
    await settled(running)
    await until(lambda: broken.stats()["running"] == 0)
    assert broken.stats()["kv_blocks_leaked"] == 0


# -- back-pressure ----------------------------------------------------------------------------------------------------


async def flood(seen: Seen) -> None:
    """200 MB of events."""
    await seen.write(EVENTS)
    piece = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
    for _ in range(3200):
        await seen.write(piece)
    await seen.write(b"0\r\n\r\n")


async def test_a_slow_client_stops_the_worker_and_not_its_neighbours(gateway: Begin, scripted: StartScripted) -> None:
    written = 0

    async def count(seen: Seen) -> None:
        nonlocal written
        if not seen.all("x-flood"):
            await seen.write(ok())
            return
        await seen.write(EVENTS)
        piece = chunk(b"data: " + b"x" * 65_000 + b"\n\n")
        for _ in range(1600):
            await seen.write(piece)
            written += len(piece)
        await seen.write(b"0\r\n\r\n")

    running = await gateway(await scripted(count))
    async with await Raw.connect(running.port, receive_buffer=65536) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(stream(CHAT, "X-Flood: 1"))
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.2)
        assert 0 < written < 30_000_000
        assert (await once(running.port, request())).status == 200
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await client.response()
        assert answer.whole
        assert len(answer.body) == 1600 * 65_008
    await settled(running)


async def test_a_slow_client_holds_back_the_answers_it_pipelined_too(gateway: Begin, scripted: StartScripted) -> None:
    """Each answer is small; the next one begins while the client has not taken the one before."""

    async def sized(seen: Seen) -> None:
        await seen.write(ok(b"x" * 100_000, b"X-Tag: " + seen.all("x-tag")[0].encode()))

    worker = await scripted(sized)
    running = await gateway(worker)
    async with await Raw.connect(running.port, receive_buffer=65536) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(b"".join(request(chat(), f"X-Tag: {number}") for number in range(400)))
        before = -1
        while before != len(worker.seen):
            before = len(worker.seen)
            await asyncio.sleep(0.1)
        assert 1 < before < 200, "20 MB would be more than the sockets hold"
        assert (await once(running.port, request(chat(), "X-Tag: other"))).one("x-tag") == "other"
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for number in range(400):
            answer = await client.response()
            assert (answer.one("x-tag"), len(answer.body)) == (str(number), 100_000)
    await settled(running)
    assert worker.connections < 8


async def test_a_client_that_asks_and_never_reads_is_not_answered_without_bound(
    gateway: Begin, scripted: StartScripted
) -> None:
    """The gateway's own answers: there is no worker to hold back, so the asking is."""
    running = await gateway(await scripted(models=tuple(f"model-{number}" for number in range(200))))
    one = request(path="/v1/models", method="GET")
    async with await Raw.connect(running.port, receive_buffer=65536) as client:
        size = len((await client.ask(one)).body)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        try:
            while sent < 40_000_000 // size:
                client.writer.write(one * 20)
                await asyncio.wait_for(client.writer.drain(), 0.5)
                sent += 20
        except TimeoutError:
            pass
        (connection,) = running.gateway.server.connections
        assert connection.transport is not None
        buffered = -1
        while buffered != connection.transport.get_write_buffer_size():
            buffered = connection.transport.get_write_buffer_size()
            await asyncio.sleep(0.05)
        assert buffered < 1_000_000
        assert (await once(running.port, one)).status == 200
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(sent):
            assert len((await client.response()).body) == size


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    text = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


async def served(url: str) -> tuple[asyncio.subprocess.Process, int]:
    """A gateway in a process of its own that is ready, and its port. Ports that were free may be taken a moment later."""
    command = Path(__file__).parents[3] / ".venv/bin/warmroute"
    for _ in range(5):
        ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                ports.append(str(probe.getsockname()[1]))
        process = await asyncio.create_subprocess_exec(
            *(str(command), "serve", "--worker", url, "--host", "127.0.0.1"),
            *("--port", ports[0], "--admin-port", ports[1], "--policy", "round_robin"),
            stderr=asyncio.subprocess.DEVNULL,
        )
        for _ in range(1000):
            if process.returncode is not None:
                break
            try:
                if (await once(int(ports[0]), request(path="/readyz", method="GET"))).status == 200:
                    return process, int(ports[0])
            except OSError:
                pass
            await asyncio.sleep(0.02)
    raise AssertionError("the gateway does not start")


async def test_slow_a_slow_reader_of_200_mb_does_not_grow_the_gateway(scripted: StartScripted) -> None:
    """The slow one of this file: a process of its own, read at first not at all, then in small steps, then whole."""
    worker: Scripted = await scripted(flood)
    process, port = await served(worker.url)
    try:
        before = resident(process.pid)
        most = 0
        async with await Raw.connect(port, receive_buffer=65536) as client:
            await client.send(stream())
            got = 0
            await asyncio.sleep(0.5)
            while got < 200_000_000:
                piece = await asyncio.wait_for(client.reader.read(1 << 18), 20)
                assert piece
                got += len(piece)
                if got < 2_000_000:
                    await asyncio.sleep(0.02)
                if most == 0 or got % 8 == 0:
                    most = max(most, resident(process.pid))
        assert most - before < 50_000_000
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 1)
        except TimeoutError:
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
