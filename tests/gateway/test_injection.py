"""What clients and engines write stays what it is: it becomes no header, no line of a log, no sample of a metric, no address
to connect to, and nothing that is unpacked."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Config, Secret, TenantConfig, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import Scripted, Seen, ok
from tests.gateway.talk import CHAT, Raw, Response, admin, chat, once, request, settled, tell, until, until_closed

WICKED = [
    "a\r\nX-Evil: 1",
    "a\nwarmroute_evil 1",
    'a"} 1\nwarmroute_evil{a="',
    "a\x00b",
    "\x1b[2J\x1b[31mred",
    "a\x7f\x08\x07",
    "{{evil}} ${evil} %s %(x)s {0.__class__}",
    "<script>alert(1)</script>",
    "\u2028\u2029\u202e",
    "\ud800",
    "x" * 5000,
    "../../../etc/passwd",
    "",
]
PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/generate", "/v1/embeddings"]


def bodies(value: str) -> list[dict[str, Any]]:
    """The same words in every place that the gateway reads."""
    tool = {"type": "function", "function": {"name": value, "description": value, "parameters": {value: value}}}
    called = {"id": value, "type": "function", "function": {"name": value, "arguments": value}}
    return [
        chat(model=value),
        chat(prompt_cache_key=value, user=value, session_id=value, rid=value, cache_salt=value),
        chat(metadata={"session_id": value, "user_id": value, value: value}, session_params={"id": value}),
        chat(tools=[tool], tool_choice=value),
        chat(
            messages=[{"role": value, "content": value, "name": value, "tool_calls": [called], "tool_call_id": value}]
        ),
        chat(previous_response_id=value, conversation=value, input=value, prompt=value, system=value, text=value),
        chat(stop=value, response_format={"type": value}, lora_path=value, **{f"x{value[:50]}": value}),
    ]


def honest(answer: Response) -> None:
    for name, value in answer.fields:
        assert re.fullmatch(r"[a-z0-9-]+", name.lower()), name
        assert re.fullmatch(r"[\t\x20-\x7e\x80-\xff]*", value), (name, value)
        assert name.lower() != "x-evil"


async def samples(running: Running) -> dict[str, list[dict[str, str]]]:
    """Name -> labels of all samples; raises if the exposition cannot be read."""
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(await admin(running, "/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        assert not re.search(r"[\x00-\x1f\x7f]", record.getMessage()), record.getMessage()


async def test_words_of_clients_are_words(
    gateway: Begin, scripted: StartScripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    running = await gateway(await scripted(), policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        for value in WICKED:
            for path in PATHS:
                for body in bodies(value):
                    answer = await client.ask(request(json.dumps(body).encode(), path=path))
                    assert answer.status in (200, 400, 404), (path, body, answer)
                    honest(answer)
    await settled(running)
    names = await samples(running)
    assert not any("evil" in name for name in names)
    # A model that nobody serves is no label, whatever it is called.
    assert {labels.get("model", "sim") for rows in names.values() for labels in rows} <= {"sim", "", "unknown", "-"}
    for path in ("/sessions", "/workers", "/healthz", "/doctor", "/config"):
        status, told = await tell(running, "GET", path)
        assert status in (200, 404), path
        assert "evil" not in json.dumps(told)
        assert "[31mred" not in json.dumps(told)
    one_line_each(caplog)


HEADERS = ["x-session-id", "x-request-id", "x-correlation-id", "session-id", "x-claude-code-session-id", "user-agent"]


@pytest.mark.parametrize("name", HEADERS)
async def test_fields_of_clients_are_fields(
    gateway: Begin, scripted: StartScripted, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.DEBUG)
    worker = await scripted()
    running = await gateway(worker, policy="cache_aware")
    for value in WICKED:
        raw = value.encode("utf-8", "surrogatepass")
        data = request(None, name.encode() + b": " + raw)
        if re.search(rb"[\x00-\x08\x0a-\x1f\x7f]", raw.replace(b"\r\n", b"")):
            assert (await until_closed(running.port, data)).startswith(b"HTTP/1.1 400 ")
            continue
        answer = await once(running.port, data)
        assert answer.status == 200
        honest(answer)
    assert all(len(seen.all("x-request-id")) == 1 for seen in worker.seen)
    await samples(running)
    one_line_each(caplog)


async def test_words_of_engines_are_words(
    gateway: Begin, scripted: StartScripted, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that was taken over tells of models with such names."""
    caplog.set_level(logging.DEBUG)
    wicked = tuple(value for value in WICKED if value and value.isprintable() is False and "\ud800" not in value)
    worker = await scripted(models=("sim", *wicked))
    running = await gateway(worker, policy="cache_aware")
    listed = (await once(running.port, request(path="/v1/models", method="GET"))).json()
    assert {row["id"] for row in listed["data"]} >= {"sim"}
    for model in wicked:
        answer = await once(running.port, request(json.dumps(chat(model=model)).encode()))
        assert answer.status in (200, 404)
        honest(answer)
    await settled(running)
    names = await samples(running)
    assert not any("evil" in name for name in names)
    await admin(running, "/workers")
    one_line_each(caplog)


# -- nothing is fetched -------------------------------------------------------------------------------------------------


class Trap:
    """Listens, and counts who comes."""

    def __init__(self) -> None:
        self.visits = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        writer.transport.abort()

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()


@pytest.fixture
async def trap() -> AsyncIterator[tuple[Trap, str]]:
    """A trap and where it is."""
    made = Trap()
    port = await made.start()
    yield made, f"http://127.0.0.1:{port}/x"
    made.stop()


def pointing(url: str) -> list[dict[str, Any]]:
    """Bodies that name ``url`` wherever some server has fetched one."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "image", "source": {"type": "url", "url": url}},
        {"type": "document", "source": {"type": "url", "url": url}},
    ]
    plain = dict.fromkeys(("callback_url", "webhook_url", "url", "file", "image_data", "template", "tokenizer"), url)
    return [
        *(
            chat(messages=[{"role": "user", "content": [part]}], input=[{"role": "user", "content": [part]}])
            for part in parts
        ),
        chat(tools=[{"type": "mcp", "server_url": url, "server_label": "a"}], **plain),
        chat(chat_template=f"{{% include '{url}' %}}", chat_template_kwargs={"url": url}, lora_path=url),
        chat(
            kv_transfer_params={"remote_host": "127.0.0.1", "remote_port": url.split(":")[2][:-2]}, bootstrap_host=url
        ),
        chat(metadata={"url": url}, extra_body={"base_url": url, "api_base": url}, base_url=url, model=url),
    ]


def keyed(config: Config) -> None:
    config.tenants = [TenantConfig("one", keys=[Secret("key-of-one")])]


async def test_no_url_of_a_client_is_fetched(gateway: Begin, scripted: StartScripted, trap: tuple[Trap, str]) -> None:
    caught, url = trap
    running = await gateway(await scripted(), policy="cache_aware")
    host = url.split("/")[2]
    async with await Raw.connect(running.port) as client:
        for path in PATHS:
            for body in pointing(url):
                answer = await client.ask(request(json.dumps(body).encode(), path=path))
                assert answer.status in (200, 400, 404)
                status, _ = await tell(running, "POST", "/route", body)
                assert status < 500
        for line in (
            f"X-Forwarded-Host: {host}",
            f"Forwarded: host={host}",
            f"Referer: {url}",
            f"X-Original-URL: {url}",
        ):
            assert (await client.ask(request(None, line))).status == 200
        for target in (url, f"http://{host}{CHAT}", f"//{host}{CHAT}", f"{CHAT}?url={url}", f"/v1/models/{url}"):
            assert (await client.ask(request(path=target))).status in (200, 404, 405)
        hosted = request().replace(b"Host: gateway", b"Host: " + host.encode())
        assert (await client.ask(hosted)).status == 200
    assert (await until_closed(running.port, f"CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()))[
        9:12
    ] == b"501"
    await settled(running)
    assert caught.visits == 0


async def test_no_url_in_a_token_is_fetched(gateway: Begin, scripted: StartScripted, trap: tuple[Trap, str]) -> None:
    caught, url = trap
    running = await gateway(await scripted(), change=keyed)
    head = base64.urlsafe_b64encode(json.dumps({"alg": "RS256", "jku": url, "x5u": url, "kid": url}).encode()).decode()
    claims = base64.urlsafe_b64encode(json.dumps({"iss": url, "sub": "one"}).encode()).decode()
    for token in (f"{head.rstrip('=')}.{claims.rstrip('=')}.c2ln", url):
        assert (await once(running.port, request(None, f"Authorization: Bearer {token}"))).status == 401
    assert caught.visits == 0


@pytest.mark.parametrize("status", [b"301 Moved", b"302 Found", b"307 Temporary", b"308 Permanent"])
async def test_no_redirect_of_an_engine_is_followed(
    gateway: Begin, scripted: StartScripted, trap: tuple[Trap, str], status: bytes
) -> None:
    caught, url = trap
    running = await gateway(await scripted(ok(b"{}", b"Location: " + url.encode(), status=status)))
    answer = await once(running.port, request())
    assert (answer.status, answer.one("location")) == (int(status[:3]), url)
    await settled(running)
    assert caught.visits == 0


# -- nothing is unpacked ------------------------------------------------------------------------------------------------


def bomb(megabytes: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(megabytes)) + packer.flush()


def peak() -> int:
    """The most memory that this process had since `forget_peak`, in bytes."""
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
async def test_a_bomb_passes_as_it_is_both_ways(gateway: Begin, scripted: StartScripted, coding: str) -> None:
    data = bomb(256)
    assert len(data) < 300_000
    worker = await scripted(ok(data, b"Content-Encoding: " + coding.encode()))
    running = await gateway(worker, policy="cache_aware")
    forget_peak()
    before = peak()
    answer = await once(running.port, request(data, f"Content-Encoding: {coding}", "Content-Type: application/json"))
    assert answer.status == 200
    assert answer.body == data
    assert worker.one.body == data
    assert peak() - before < 64 << 20


# -- JSON ---------------------------------------------------------------------------------------------------------------

ODD = [
    pytest.param(b'{"model":"sim","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
    pytest.param(b'{"model":"sim","messages":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}", id="deep-objects"),
    pytest.param(b"[" * 500_000, id="open"),
    pytest.param(b'{"model":"sim","max_tokens":' + b"9" * 5000 + b"}", id="huge-integer"),
    pytest.param(b'{"model":"sim","max_tokens":-1e400,"n":1e400}', id="huge-float"),
    pytest.param(b'{"model":"sim","max_tokens":NaN,"n":Infinity}', id="nan"),
    pytest.param(b'{"model":"sim","max_tokens":18446744073709551616,"seed":-9223372036854775809}', id="65-bits"),
    pytest.param(b'{"model":"other","model":"sim","messages":1,"messages":[]}', id="keys-twice"),
    pytest.param(b'{"model":"sim","mod\\u0065l":"other"}', id="keys-twice-in-escapes"),
    pytest.param(b'{"model":"\\ud800","prompt":"\\udfff\\ud800x"}', id="surrogates"),
    pytest.param("\ufeff".encode() + b'{"model":"sim"}', id="mark"),
    pytest.param('{"model":"sim"}'.encode("utf-16"), id="utf-16"),
    pytest.param(b'{"model":"sim","prompt":"\xff\xfe\xc0\xaf"}', id="invalid-utf-8"),
    pytest.param(b'{"model":"sim","prompt":"\xed\xa0\x80"}', id="surrogate-in-utf-8"),
    pytest.param(b'{"model":"sim","prompt":"a\nb\x00"}', id="control-characters"),
    pytest.param(b'{"model":"sim",}', id="comma"),
    pytest.param(b"{'model':'sim'}", id="other-quotes"),
    pytest.param(b'{"model":"sim"} {"model":"other"}', id="two-documents"),
    pytest.param(b"null", id="null"),
    pytest.param(b'"sim"', id="string"),
    pytest.param(b"[]", id="list"),
    pytest.param(b"1", id="number"),
    pytest.param(b" " * 100_000, id="blanks"),
    pytest.param(b'{"model":{},"messages":{},"stream":"yes","tools":7,"prompt":{}}', id="other-types"),
    pytest.param(b'{"model":"sim","prompt":[[[1]],[-1],[4294967296],[null]]}', id="odd-ids"),
    pytest.param(b'{"":"","\\u0000":1,"__proto__":{"a":1},"model":"sim"}', id="odd-keys"),
]


@pytest.mark.parametrize("body", ODD)
async def test_odd_json_is_passed_on_as_it_is_or_refused(gateway: Begin, scripted: StartScripted, body: bytes) -> None:
    worker = await scripted()
    running = await gateway(worker, policy="cache_aware")
    passed = 0
    async with await Raw.connect(running.port) as client:
        for path in PATHS:
            answer = await client.ask(request(body, "Content-Type: application/json", path=path))
            assert answer.status in (200, 400, 404), answer
            assert len(answer.body) < 2000
            passed += answer.status == 200
        assert (await client.ask(request())).status == 200
    seen = worker.seen[:-1]
    assert len(seen) == passed
    assert all(each.body == body for each in seen)


# -- secrets ------------------------------------------------------------------------------------------------------------


async def test_no_error_and_no_log_quotes_a_secret(
    gateway: Begin, scripted: StartScripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def secret(config: Config) -> None:
        config.tenants = [
            TenantConfig("one", keys=[Secret("sk-tenant-1111")], models=["sim"]),
            TenantConfig("two", keys=[Secret("sk-tenant-2222")]),
        ]

    worker: Scripted = await scripted()
    running = await gateway(WorkerConfig(worker.url, engine="generic", api_key=Secret("sk-engine-3333")), change=secret)
    told = b""
    good, wrong = "Authorization: Bearer sk-tenant-1111", "Authorization: Bearer sk-guess-4444"
    for lines, body, path in (
        ([wrong], None, CHAT),
        (["x-api-key: sk-guess-4444"], None, "/v1/messages"),
        (["Authorization: Basic c2stZ3Vlc3Q6NDQ0NA=="], None, CHAT),
        ([good], json.dumps(chat(model="other")).encode(), CHAT),
        ([good], b"{", CHAT),
        ([good], None, "/nowhere/sk-guess"),
        ([good, "Upgrade: x"], None, CHAT),
        ([good, "Bad name: x"], None, CHAT),
    ):
        told += await until_closed(running.port, request(body, *lines, "Connection: close", path=path))
    await settled(running)

    async def down(seen: Seen) -> None:
        seen.reset()

    worker.replies = [down]
    told += await until_closed(running.port, request(None, good, "Connection: close"))
    for path in ("/config", "/workers", "/healthz", "/metrics", "/sessions"):
        told += json.dumps(await admin(running, path)).encode()
    told += caplog.text.encode() + repr(running.config).encode()
    for word in (b"1111", b"2222", b"3333", b"4444", b"c2stZ3Vlc3Q"):
        assert b"sk-tenant-" + word not in told
        assert b"sk-engine-" + word not in told
        assert b"sk-guess-" + word not in told


# -- slowness -----------------------------------------------------------------------------------------------------------


async def test_hundreds_that_drip_keep_nobody_waiting_and_are_let_go(gateway: Begin, scripted: StartScripted) -> None:
    def hurried(config: Config) -> None:
        config.listen.head_timeout = config.listen.body_timeout = 1.0
        config.listen.max_connections = 400

    running = await gateway(await scripted(), change=hurried)
    begun = [b"POST %b HTTP/1.1\r\nHost: g\r\n" % CHAT.encode(), request()[:-40]]
    slow = [await Raw.connect(running.port) for _ in range(300)]
    for number, client in enumerate(slow):
        client.writer.write(begun[number % 2])
    loop = asyncio.get_running_loop()
    started, served = loop.time(), 0
    while loop.time() < started + 0.8:
        for client in slow:
            client.writer.write(b"X" if client.writer.can_write_eof() else b"")
        assert (await once(running.port, request())).status == 200
        served += 1
        await asyncio.sleep(0.1)
    assert served > 0
    await until(lambda: not running.gateway.server.connections, 20)
    for client in slow:
        client.vanish()
