"""Between gateway and worker: what is sent on and what stops, connections and their reuse, answers of every kind."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from typing import Any

import pytest

from gateway.config import Config, Secret, TenantConfig, WorkerConfig
from gateway.workers import Facts, ServedModel, State
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import EVENTS, Seen, chunk, events, ok
from tests.gateway.talk import CHAT, Raw, admin, chat, once, request, settled, until

# -- requests ---------------------------------------------------------------------------------------------------------


async def test_the_head_that_a_worker_gets(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker)
    lines = [
        "Accept-Encoding: gzip, br",
        "X-Unknown: Kept As It Is",
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate: a=b,c=d",
        "baggage: k=v",
        "X-Session-Id: s-1",
        "X-Twice: 1",
        "X-Twice: 2",
        "User-Agent: tests",
        "Content-Type: application/json",
        "OpenAI-Organization: o",
    ]
    await once(running.port, request(chat(), *lines))
    seen = worker.one
    assert seen.all("accept-encoding") == ["identity"]
    assert seen.all("host") == [f"127.0.0.1:{worker.port}"]
    for line in lines[1:]:
        name, _, value = line.partition(": ")
        assert value in seen.all(name.lower())
        assert name in [key for key, _ in seen.fields], "the name's case is kept"
    assert seen.all("x-twice") == ["1", "2"]


HOP = [
    "Keep-Alive: timeout=5",
    "Proxy-Connection: keep-alive",
    "Proxy-Authorization: Basic eDp5",
    "TE: trailers",
    "Trailer: X-Sum",
]


@pytest.mark.parametrize(
    ("connection", "stops"),
    [
        (["Connection: X-One"], ["x-one"]),
        (["Connection: close, X-One , x-two"], ["x-one", "x-two"]),
        (["Connection: X-One", "Connection: X-Two"], ["x-one", "x-two"]),
        (["Connection: keep-alive", "Connection: x-two"], ["x-two"]),
        (["Connection: keep-alive"], []),
    ],
)
async def test_hop_by_hop_fields_of_the_client_stop(
    gateway: Begin, scripted: StartScripted, connection: list[str], stops: list[str]
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    await once(running.port, request(chat(), *HOP, "X-One: 1", "X-Two: 2", "X-Three: 3", *connection))
    seen = worker.one
    for line in HOP:
        assert seen.all(line.partition(":")[0].lower()) == []
    assert seen.all("connection") == []
    for name in ("x-one", "x-two", "x-three"):
        assert bool(seen.all(name)) == (name not in stops)


@pytest.mark.parametrize("connection", ["Connection: X-One", "Connection: close, X-One"])
async def test_hop_by_hop_fields_of_the_worker_stop(gateway: Begin, scripted: StartScripted, connection: str) -> None:
    lines = ["Keep-Alive: timeout=5", "Proxy-Authenticate: Basic", "X-One: 1", "X-Two: kept", connection]
    worker = await scripted(ok(b"{}", *[line.encode() for line in lines], b"Set-Cookie: a=b", b"Set-Cookie: c=d"))
    running = await gateway(worker)
    answer = await once(running.port, request())
    for name in ("keep-alive", "proxy-authenticate", "connection", "x-one"):
        assert answer.all(name) == []
    assert answer.one("x-two") == "kept"
    assert answer.all("set-cookie") == ["a=b", "c=d"]


BODIES = [
    pytest.param(b' { "model" : "sim" ,\n\t"messages":[ ] , "unknown": {"a":[1.0e5, 1E+2,-0.0, 1.10]} } ', id="spaces"),
    pytest.param('{"model":"sim","messages":[{"role":"user","content":"\u4e2d\U0001f600"}]}'.encode(), id="unicode"),
    pytest.param(rb'{"model":"sim","messages":[{"role":"user","content":"\u4e2d\ud83d\ude00\/"}]}', id="escapes"),
    pytest.param(b'{"model":"sim","a":1,"a":2,"big":123456789012345678901234567890}', id="twice-and-big"),
    pytest.param(b'{"model":"sim","session_id":"s","prompt_cache_key":"k","user":"u"}', id="session-fields"),
]


@pytest.mark.parametrize("body", BODIES)
async def test_a_body_in_which_nothing_is_spliced_is_identical(
    gateway: Begin, scripted: StartScripted, body: bytes
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    assert (await once(running.port, request(body))).status == 200
    assert worker.one.body == body


async def test_a_compressed_body_is_relayed_opaque(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = gzip.compress(json.dumps(chat()).encode())
    assert (await once(running.port, request(body, "Content-Encoding: gzip"))).status == 200
    assert worker.one.body == body
    assert worker.one.all("content-encoding") == ["gzip"]


async def test_a_compressed_answer_is_relayed_opaque(gateway: Begin, scripted: StartScripted) -> None:
    body = gzip.compress(b'{"a":1}' * 1000)
    worker = await scripted(ok(body, b"Content-Encoding: gzip", b"ETag: x"))
    running = await gateway(worker)
    answer = await once(running.port, request())
    assert answer.body == body
    assert answer.one("content-encoding") == "gzip"


async def test_a_request_id_is_kept_or_made_and_always_sent_on(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(ok(b"{}", b"X-Request-Id: the-worker's"))
    running = await gateway(worker)
    answer = await once(running.port, request(chat(), "X-Request-ID: mine-1"))
    assert (worker.seen[0].all("x-request-id"), answer.all("x-request-id")) == (["mine-1"], ["mine-1"])
    made = []
    for _ in range(2):
        answer = await once(running.port, request())
        assert worker.seen[-1].all("x-request-id") == answer.all("x-request-id")
        made.append(answer.one("x-request-id"))
    assert made[0] != made[1]
    refused = await once(running.port, request(b"{", "X-Request-ID: mine-2"))
    assert refused.one("x-request-id") == "mine-2"


GUARDED = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
    "ec_transfer_params": {},
    "disaggregated_params": {"request_type": "context_only"},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 7,
    "bootstrap_pair_key": "k",
    "decode_tp_size": 2,
    "routed_dp_rank": 1,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 0,
}
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages", "/generate", "/v1/rerank"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "odd", [None, ("stream", 0), ("messages", 5), ("max_tokens", []), ("system", 7), ("input", {})]
)
async def test_guarded_fields_are_taken_out_and_nothing_else(
    gateway: Begin, scripted: StartScripted, path: str, odd: tuple[str, Any] | None
) -> None:
    """Also from a body with a type that the gateway does not expect: engines coerce what it would not."""
    worker = await scripted()
    running = await gateway(worker)
    rest: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "a}{,\"'"}], "x": {"y": [1, None]}}
    if odd is not None:
        rest[odd[0]] = odd[1]
    async with await Raw.connect(running.port) as client:
        for body in ({**GUARDED, **rest}, {**rest, **GUARDED}, *({**rest, key: GUARDED[key]} for key in GUARDED)):
            answer = await client.ask(request(body, path=path))
            assert answer.status == 200
            assert json.loads(worker.seen[-1].body) == rest


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/generate"])
@pytest.mark.parametrize("odd", ["", '"stream":0,', '"messages":3,"text":4,'])
@pytest.mark.parametrize(
    "fields",
    [
        '"kv_transfer_params":{},"kv_transfer_params":null',
        '"bootstrap_room":1,"bootstrap_room":1',
        '"bootstrap_room":1,"x":2,"bootstrap\\u005froom":3',
        '"kv_transfer_par\\u0061ms":{}',
        '"\\u0062ootstrap_host":"h"',
        '"routed_dp_rank":1,"a":{"b":1},"routed_dp_rank":0',
    ],
)
async def test_a_guarded_field_twice_or_in_escapes_is_400(
    gateway: Begin, scripted: StartScripted, path: str, odd: str, fields: str
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = '{"model":"sim",' + odd + fields + "}"
    assert json.loads(body)["model"] == "sim"
    assert (await once(running.port, request(body.encode(), path=path))).status == 400
    assert worker.seen == []


async def test_guarded_names_in_other_places_are_the_client_s_own(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = b'{"model":"sim","metadata":{"bootstrap_room":1},"messages":[{"role":"user","content":"\\"bootstrap_room\\":1"}]}'
    assert (await once(running.port, request(body))).status == 200
    assert worker.one.body == body


@pytest.mark.parametrize(
    "name",
    [
        "X-Data-Parallel-Rank",
        "x_data_parallel_rank",
        "X-Data_Parallel-Rank",
        "x-override-model",
        "X-Override-Anything",
        "x_override_model",
    ],
)
async def test_guarded_headers_are_taken_out(gateway: Begin, scripted: StartScripted, name: str) -> None:
    worker = await scripted()
    running = await gateway(worker)
    await once(running.port, request(chat(), f"{name}: 1", "X-Overrides: kept", "x_other: kept"))
    names = {key.lower().replace("_", "-") for key, _ in worker.one.fields}
    assert name.lower().replace("_", "-") not in names
    assert {"x-overrides", "x-other"} <= names


# -- credentials ------------------------------------------------------------------------------------------------------


def keyed(config: Config) -> None:
    config.tenants = [TenantConfig("team", keys=[Secret("tenant-secret")])]


@pytest.mark.parametrize(
    "lines",
    [
        ["Authorization: Bearer tenant-secret"],
        ["x-api-key: tenant-secret"],
        ["authorization: bearer tenant-secret", "X-API-Key: tenant-secret", "Cookie: k=tenant-secret"],
        ["Authorization: Bearer tenant-secret", "Authorization: Bearer tenant-secret"],
    ],
)
@pytest.mark.parametrize("worker_key", [None, "worker-secret"])
async def test_the_tenant_s_credential_never_reaches_a_worker_and_the_worker_s_no_client(
    gateway: Begin, scripted: StartScripted, lines: list[str], worker_key: str | None
) -> None:
    worker = await scripted()
    spec = WorkerConfig(worker.url, engine="generic", api_key=Secret(worker_key) if worker_key else None)
    running = await gateway(spec, change=keyed)
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(chat(), *lines))
        listed = await client.ask(request(None, *lines, path="/v1/models", method="GET"))
    assert (answer.status, listed.status) == (200, 200)
    assert b"tenant-secret" not in worker.one.head + worker.one.body
    assert worker.one.all("authorization") == ([f"Bearer {worker_key}"] if worker_key else [])
    assert "worker-secret" not in str(answer) + str(listed)
    assert "secret" not in json.dumps(await admin(running, "/workers")) + json.dumps(await admin(running, "/config"))


async def test_without_tenants_the_worker_s_credential_takes_the_place_of_the_client_s(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted()
    running = await gateway(WorkerConfig(worker.url, engine="generic", api_key=Secret("worker-secret")))
    await once(running.port, request(chat(), "Authorization: Bearer client", "x-api-key: client"))
    assert worker.one.all("authorization") == ["Bearer worker-secret"]
    assert worker.one.all("x-api-key") == []


async def test_without_tenants_and_keys_the_client_s_credential_is_the_worker_s_business(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    await once(running.port, request(chat(), "Authorization: Bearer client"))
    assert worker.one.all("authorization") == ["Bearer client"]


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_the_gateway_s_own_key_is_not_the_client_s_fault(
    gateway: Begin, scripted: StartScripted, status: int
) -> None:
    worker = await scripted(ok(b'{"error":"Unauthorized worker-secret"}', status=b"%d No" % status))
    running = await gateway(WorkerConfig(worker.url, engine="generic", api_key=Secret("worker-secret")))
    answer = await once(running.port, request())
    assert answer.status == 502
    assert b"worker-secret" not in answer.body


# -- connections ------------------------------------------------------------------------------------------------------


async def test_connections_are_kept_and_reused_last_in_first_out(gateway: Begin, scripted: StartScripted) -> None:
    released = asyncio.Event()

    async def together(seen: Seen) -> None:
        if seen.all("x-wait"):
            await released.wait()
        await seen.write(ok())

    worker = await scripted(together)
    running = await gateway(worker)
    asking = [asyncio.ensure_future(once(running.port, request(chat(), "X-Wait: 1"))) for _ in range(5)]
    await until(lambda: len(worker.seen) == 5)
    released.set()
    await asyncio.gather(*asking)
    first = {seen.connection for seen in worker.seen}
    assert len(first) == 5
    worker.seen.clear()
    for _ in range(10):
        await once(running.port, request())
    used = [seen.connection for seen in worker.seen]
    assert len(set(used)) == 1, "one after the other they need one connection"
    assert used[0] in first
    await settled(running)


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_request_that_dies_on_a_reused_connection_is_sent_once_more(
    gateway: Begin, scripted: StartScripted, how: str
) -> None:
    """The worker closes the idle connection in the moment in which the request is on its way."""

    async def hang_up(seen: Seen) -> None:
        if how == "reset":
            seen.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
        seen.writer.close()

    worker = await scripted(ok(), hang_up, ok(b'{"second":true}'))
    running = await gateway(worker)
    assert (await once(running.port, request())).status == 200
    answer = await once(running.port, request())
    assert answer.json() == {"second": True}
    assert len(worker.seen) == 3
    assert worker.seen[1].connection == worker.seen[0].connection
    assert worker.seen[2].connection != worker.seen[1].connection
    targets = (await admin(running, "/workers"))["workers"][0]["targets"]
    assert targets[0]["breaker"] == "closed"
    assert "warmroute_worker_faults_total{" not in await admin(running, "/metrics")


async def test_it_is_sent_once_more_and_not_again(gateway: Begin, scripted: StartScripted) -> None:
    async def hang_up(seen: Seen) -> None:
        seen.writer.close()

    worker = await scripted(ok(), hang_up)
    running = await gateway(worker)
    await once(running.port, request())
    assert (await once(running.port, request())).status == 502
    assert len(worker.seen) == 3


async def test_on_a_fresh_connection_it_is_not_sent_again(gateway: Begin, scripted: StartScripted) -> None:
    async def hang_up(seen: Seen) -> None:
        seen.writer.close()

    worker = await scripted(hang_up)
    running = await gateway(worker)
    assert (await once(running.port, request())).status == 502
    assert len(worker.seen) == 1


@pytest.mark.parametrize("begun", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_after_the_first_byte_of_an_answer_it_is_not_sent_again(
    gateway: Begin, scripted: StartScripted, begun: bytes
) -> None:
    async def begin(seen: Seen) -> None:
        await seen.write(begun)
        seen.writer.close()

    worker = await scripted(ok(), begin)
    running = await gateway(worker)
    await once(running.port, request())
    assert (await once(running.port, request())).status == 502
    assert len(worker.seen) == 2


async def test_an_idle_connection_that_the_worker_closed_is_not_used(gateway: Begin, scripted: StartScripted) -> None:
    async def leave(seen: Seen) -> None:
        await seen.write(ok())
        seen.writer.close()

    worker = await scripted(leave)
    running = await gateway(worker)
    for _ in range(5):
        assert (await once(running.port, request())).status == 200
    assert len(worker.seen) == 5
    await settled(running)


@pytest.mark.parametrize("line", [b"Connection: close", b"Connection: CLOSE, x"])
async def test_a_connection_that_the_worker_says_it_will_close_is_not_used(
    gateway: Begin, scripted: StartScripted, line: bytes
) -> None:
    worker = await scripted(ok(b"{}", line))
    running = await gateway(worker)
    for _ in range(3):
        assert (await once(running.port, request())).status == 200
    assert len({seen.connection for seen in worker.seen}) == 3


async def test_http_1_0_of_a_worker(gateway: Begin, scripted: StartScripted) -> None:
    async def old(seen: Seen) -> None:
        await seen.write(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nold body")
        seen.writer.close()

    worker = await scripted(old)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            answer = await client.ask(request())
            assert (answer.body, answer.whole) == (b"old body", True)


async def test_connections_given_up_at_any_moment_of_their_making_are_counted_once(
    gateway: Begin, scripted: StartScripted
) -> None:
    running = await gateway(await scripted())
    (worker,) = running.fleet.workers.values()
    for turns in [*range(12)] * 20:
        making = asyncio.ensure_future(worker.pool.connect())
        for _ in range(turns):
            await asyncio.sleep(0)
        making.cancel()
        done = (await asyncio.gather(making, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            done.close()
    await until(lambda: worker.pool.open == 0)
    await asyncio.sleep(0.05)
    assert worker.pool.open == worker.pool.idle == 0


async def test_a_slow_reader_does_not_leave_a_stopped_connection_in_the_pool(
    gateway: Begin, scripted: StartScripted
) -> None:
    """The last bytes of an answer stop the reading; the connection that is put back must read again."""
    big = ok(b"x" * 12_000_000)
    worker = await scripted(big, big, big, ok())
    running = await gateway(worker)
    for _ in range(3):
        async with await Raw.connect(running.port, receive_buffer=65536) as client:
            await client.send(request())
            await asyncio.sleep(0.05)
            answer = await client.response()
            assert len(answer.body) == 12_000_000
    assert (await once(running.port, request())).json() == {"ok": True}
    assert len({seen.connection for seen in worker.seen}) == 1


# -- deadlines --------------------------------------------------------------------------------------------------------


async def never(seen: Seen) -> None:
    await seen.gone(60)


def impatient(which: str) -> Any:
    def change(config: Config) -> None:
        setattr(config.timeouts, which, 0.3)

    return change


async def test_no_first_byte_in_time_is_504(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(never)
    running = await gateway(worker, change=impatient("first_byte"))
    answer = await once(running.port, request())
    assert (answer.status, answer.json()["error"]["type"]) == (504, "upstream_timeout")
    answer = await once(running.port, request(path="/v1/messages"))
    assert (answer.status, answer.json()["type"]) == (504, "error")
    await settled(running)


async def test_a_head_alone_is_no_first_event(gateway: Begin, scripted: StartScripted) -> None:
    async def head_only(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(b": ping\n\n"))
        await never(seen)

    running = await gateway(await scripted(head_only), change=impatient("first_byte"))
    assert (await once(running.port, request(chat(stream=True)))).status == 504


async def test_a_connection_that_is_not_accepted_in_time_is_504(gateway: Begin, scripted: StartScripted) -> None:
    """A listener whose queue is full takes no more connections."""
    deaf = socket.socket()
    deaf.bind(("127.0.0.1", 0))
    deaf.listen(0)
    port = deaf.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    try:
        running = await gateway(f"http://127.0.0.1:{port}", change=impatient("connect"), ready=False)
        (worker,) = running.fleet.workers.values()
        running.probe.unwatch(worker)
        running.fleet.describe(worker, Facts(models=[ServedModel("sim")]))
        running.fleet.set_state(worker, State.READY, "a test says so")
        answer = await once(running.port, request())
        assert answer.status == 504
        assert "accept" in answer.json()["error"]["message"]
        await settled(running)
    finally:
        for each in (deaf, *fillers):
            each.close()


async def test_the_idle_time_of_a_stream_is_counted_from_its_last_bytes(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def tick(seen: Seen) -> None:
        await seen.write(EVENTS)
        for number in range(16):
            await seen.write(chunk(b"data: %d\n\n" % number))
            await asyncio.sleep(0.1)
        await seen.write(b"0\r\n\r\n")

    running = await gateway(await scripted(tick), change=impatient("idle"))
    answer = await once(running.port, request(chat(stream=True)))
    assert answer.whole
    assert answer.body.endswith(b"data: 15\n\n")


async def test_a_stream_that_stops_ends_with_an_error_event(gateway: Begin, scripted: StartScripted) -> None:
    async def stop(seen: Seen) -> None:
        await seen.write(events(b"data: 1\n\n", end=False))
        await never(seen)

    running = await gateway(await scripted(stop), change=impatient("idle"))
    answer = await once(running.port, request(chat(stream=True)))
    assert answer.body.startswith(b"data: 1\n\n")
    assert b'"code":504' in answer.body
    await settled(running)


async def test_a_json_answer_that_stops_is_cut(gateway: Begin, scripted: StartScripted) -> None:
    async def stop(seen: Seen) -> None:
        await seen.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
        await never(seen)

    running = await gateway(await scripted(stop), change=impatient("idle"))
    answer = await once(running.port, request())
    assert (answer.body, answer.whole) == (b"abc", False)
    await settled(running)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "interim",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\nX-A: b\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3,
    ],
)
async def test_interim_answers_are_swallowed(gateway: Begin, scripted: StartScripted, interim: bytes) -> None:
    worker = await scripted(interim + ok(b'{"final":1}', b"X-B: c"))
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            await client.send(request())
            head = await client.head()
            assert (head.status, head.all("x-a"), head.all("link"), head.one("x-b")) == (200, [], [], "c")
            assert await client.reader.readexactly(int(head.one("content-length"))) == b'{"final":1}'
    assert len({seen.connection for seen in worker.seen}) == 1


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_answers_without_a_body(gateway: Begin, scripted: StartScripted, status: bytes) -> None:
    worker = await scripted(b"HTTP/1.1 %b\r\nX-A: b\r\nContent-Type: text/event-stream\r\n\r\n" % status)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        for _ in range(3):
            answer = await client.ask(request())
            assert (answer.status, answer.one("x-a")) == (int(status[:3]), "b")
            assert answer.all("transfer-encoding") == []
            assert answer.all("content-length") == []
    assert len({seen.connection for seen in worker.seen}) == 1


@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_a_body_that_ends_with_the_connection(gateway: Begin, scripted: StartScripted, kind: bytes) -> None:
    async def until_close(seen: Seen) -> None:
        await seen.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n" % kind)
        for _ in range(3):
            await seen.write(b"data: piece\n\n")
            await asyncio.sleep(0.01)
        seen.writer.close()

    running = await gateway(await scripted(until_close))
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            answer = await client.ask(request())
            assert (answer.whole, answer.body) == (True, b"data: piece\n\n" * 3)


async def test_an_empty_body_that_ends_with_the_connection(gateway: Begin, scripted: StartScripted) -> None:
    async def nothing(seen: Seen) -> None:
        await seen.write(b"HTTP/1.1 200 OK\r\nX-A: b\r\n\r\n")
        seen.writer.close()

    running = await gateway(await scripted(nothing))
    answer = await once(running.port, request())
    assert (answer.status, answer.body, answer.whole) == (200, b"", True)


async def test_chunks_with_extensions_and_trailers_of_a_worker(gateway: Begin, scripted: StartScripted) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
    data += b"5;a=b\r\nhello\r\n6\r\n world\r\n0;c\r\nX-Sum: 1\r\n\r\n"
    worker = await scripted(data)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        for _ in range(2):
            answer = await client.ask(request())
            assert (answer.body, answer.whole) == (b"hello world", True)
            assert answer.all("x-sum") + answer.all("trailer") == []
    assert len({seen.connection for seen in worker.seen}) == 1


@pytest.mark.parametrize("step", [1, 2, 7])
async def test_an_answer_cut_at_every_byte(gateway: Begin, scripted: StartScripted, step: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n5\r\nhello\r\n1\r\n!\r\n0\r\nT: v\r\n\r\n"

    async def drip(seen: Seen) -> None:
        for at in range(0, len(whole), step):
            await seen.write(whole[at : at + step])
            await asyncio.sleep(0)

    running = await gateway(await scripted(drip))
    async with await Raw.connect(running.port) as client:
        for _ in range(3):
            answer = await client.ask(request())
            assert (answer.body, answer.one("x-a")) == (b"hello!", "b")


GARBAGE = [
    b"\x00\xff not http\r\n\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n",
    b"HTTP/3.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    b"SMTP ready\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n\x81\x00",
    b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: g\r\n\r\n",
]


@pytest.mark.parametrize("data", GARBAGE)
async def test_garbage_is_502(gateway: Begin, scripted: StartScripted, data: bytes) -> None:
    async def garbage(seen: Seen) -> None:
        await seen.write(data)
        await asyncio.sleep(0.05)
        seen.writer.close()

    running = await gateway(await scripted(garbage))
    answer = await once(running.port, request())
    assert (answer.status, answer.json()["error"]["type"]) == (502, "upstream_error")
    await settled(running)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 502),
        (b"HTT", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Le", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", 502),
        (EVENTS + chunk(b"data: half an ev"), 502),
        (EVENTS + b"0\r\n\r\n", 502),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 50\r\n\r\nhalf", 502),
    ],
)
async def test_an_answer_that_ends_before_its_content_is_502(
    gateway: Begin, scripted: StartScripted, data: bytes, status: int
) -> None:
    async def half(seen: Seen) -> None:
        await seen.write(data)
        seen.writer.close()

    running = await gateway(await scripted(half))
    assert (await once(running.port, request(chat(stream=True)))).status == status
    await settled(running)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n50\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n0\r\n",
    ],
)
async def test_a_body_that_falls_short_is_cut_and_never_looks_complete(
    gateway: Begin, scripted: StartScripted, data: bytes
) -> None:
    async def short(seen: Seen) -> None:
        await seen.write(data)
        await asyncio.sleep(0.05)
        seen.writer.close()

    running = await gateway(await scripted(short))
    answer = await once(running.port, request())
    assert answer.body == b"short"
    assert not answer.whole
    await settled(running)


@pytest.mark.parametrize("pause", [0.0, 0.05])
@pytest.mark.parametrize(
    "extra",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\nContent-Len",
        b"more than it said",
        b"\x00",
    ],
)
async def test_a_second_answer_to_one_request_poisons_nobody(
    gateway: Begin, scripted: StartScripted, pause: float, extra: bytes
) -> None:
    async def twice(seen: Seen) -> None:
        answer = ok(json.dumps({"for": seen.all("x-request-id")[0]}).encode())
        if not pause:
            await seen.write(answer + extra)
            return
        await seen.write(answer)
        await asyncio.sleep(pause)
        await seen.write(extra)

    worker = await scripted(twice)
    running = await gateway(worker)
    async with await Raw.connect(running.port) as client:
        for number in range(4):
            answer = await client.ask(request(chat(), f"X-Request-Id: id-{number}"))
            assert (answer.status, answer.json()) == (200, {"for": f"id-{number}"})
            assert answer.one("content-type") == "application/json"
            assert answer.one("content-length") == str(len(answer.body))
            await asyncio.sleep(pause * 2)
    assert len({seen.connection for seen in worker.seen}) == 4


async def test_a_worker_that_talks_before_it_is_asked_is_not_believed(gateway: Begin, scripted: StartScripted) -> None:
    async def early(seen: Seen) -> None:
        await seen.write(ok(b'{"n":1}'))
        await asyncio.sleep(0.02)
        await seen.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    running = await gateway(await scripted(early))
    for _ in range(5):
        assert (await once(running.port, request())).json() == {"n": 1}
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "line",
    [b"X-A: b\r\n c", b"X-A: b\nX-Evil: 1", b"X-A: b\rX-Evil: 1", b"X A: b"],
)
async def test_odd_field_lines_of_a_worker_split_no_answer(
    gateway: Begin, scripted: StartScripted, line: bytes
) -> None:
    running = await gateway(await scripted(ok(b'{"n":1}', line)))
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request())
        if answer.status == 200:
            assert answer.json() == {"n": 1}
            for name, value in answer.fields:
                assert re.fullmatch(r"[!-~]+", name)
                assert "\n" not in value
                assert "\r" not in value
        else:
            assert answer.status == 502


async def test_a_base_path_and_an_authority_of_a_worker(gateway: Begin, scripted: StartScripted) -> None:
    """``http://host:port/base/`` puts its path before every request's."""
    worker = await scripted()
    spec = WorkerConfig(worker.url + "/base/", engine="generic", models=["sim"])
    running = await gateway(spec, ready=False)
    await until(lambda: any(seen.target == "/base/v1/models" for seen in worker.seen))
    assert running.port
