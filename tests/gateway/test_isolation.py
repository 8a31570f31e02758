"""What tenants cannot learn of each other, and what no field of a request gets round."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from gateway.config import Config, ModelConfig, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Scripted, Seen, ok
from tests.gateway.talk import CHAT, Response, admin, chat, once, request

SECRET = "kept between restarts"
WORDS = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 200}]


def having(*tenants: TenantConfig, key: str | None = None) -> Any:
    def change(config: Config) -> None:
        config.tenants = list(tenants)
        config.models = {"sim": ModelConfig(aliases=["default"])}
        config.isolation_key = Secret(key) if key is not None else None

    return change


def isolated(name: str) -> TenantConfig:
    return TenantConfig(name, [Secret(f"key-{name}")], isolation="isolated")


def shared(name: str) -> TenantConfig:
    return TenantConfig(name, [Secret(f"key-{name}")])


async def ask(running: Running, tenant: str, *lines: str, path: str = CHAT, **fields: Any) -> Response:
    body = {**chat(), **fields}
    return await once(running.port, request(body, f"Authorization: Bearer key-{tenant}", *lines, path=path))


async def cached(running: Running, tenant: str, **fields: Any) -> int:
    """Tokens of the common prompt that the engine found in its cache."""
    answer = await ask(running, tenant, messages=WORDS, max_tokens=1, **fields)
    assert answer.status == 200
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] > 1000
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def asked(worker: Scripted) -> list[Seen]:
    """Requests of clients: probes of an engine's own pages are none."""
    return [seen for seen in worker.seen if seen.method == "POST"]


def salt(worker: Scripted) -> Any:
    """Of the last request."""
    return json.loads(asked(worker)[-1].body).get("cache_salt")


# -- caches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_isolated_tenants_find_nothing_of_each_other_in_the_engine_s_cache(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    running = await gateway(
        await engine(dialect), change=having(isolated("a"), isolated("b"), shared("c"), shared("d"))
    )
    assert await cached(running, "a") == 0
    assert await cached(running, "b") == 0
    assert await cached(running, "a") > 1000
    assert await cached(running, "b") > 1000
    assert await cached(running, "c") == 0
    assert await cached(running, "d") > 1000, "those who share do"


async def test_an_isolated_tenant_s_own_salt_keeps_its_caches_apart_too(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=having(isolated("a"), isolated("b")))
    assert await cached(running, "a", cache_salt="x") == 0
    assert await cached(running, "a", cache_salt="y") == 0
    assert await cached(running, "a", cache_salt="x") > 1000
    assert await cached(running, "b", cache_salt="x") == 0, "a salt that is guessed opens nothing"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
async def test_the_salt_is_each_tenant_s_own_and_tells_nothing(
    gateway: Begin, scripted: StartScripted, engine: str
) -> None:
    worker = await scripted()
    change = having(isolated("acme-corp"), isolated("b"), key=SECRET)
    first = await gateway(WorkerConfig(worker.url, engine=engine), change=change)
    second = await gateway(WorkerConfig(worker.url, engine=engine), change=change)
    other = await gateway(
        WorkerConfig(worker.url, engine=engine), change=having(isolated("acme-corp"), key="another key")
    )

    async def salt_of(running: Running, tenant: str, **fields: Any) -> str:
        assert (await ask(running, tenant, **fields)).status == 200
        found = salt(worker)
        assert isinstance(found, str)
        assert len(found) >= 16
        return found

    plain = await salt_of(first, "acme-corp")
    assert "acme" not in plain
    assert "key-" not in plain
    assert await salt_of(first, "acme-corp", messages=WORDS) == plain
    assert await salt_of(second, "acme-corp") == plain, "replicas share what one tenant's cache holds"
    assert await salt_of(other, "acme-corp") != plain
    assert await salt_of(first, "b") != plain
    mine = await salt_of(first, "acme-corp", cache_salt="mine")
    assert mine not in (plain, "mine")
    assert await salt_of(first, "acme-corp", cache_salt="mine") == mine
    assert await salt_of(first, "b", cache_salt="mine") != mine


async def test_without_a_configured_key_no_two_processes_make_the_same_salt(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted()
    salts = set()
    for _ in range(2):
        running = await gateway(WorkerConfig(worker.url, engine="vllm"), change=having(isolated("a")))
        await ask(running, "a")
        salts.add(salt(worker))
    assert len(salts) == 2


async def test_a_shared_tenant_s_own_salt_passes_with_every_other_byte(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(WorkerConfig(worker.url, engine="vllm"), change=having(shared("c"), isolated("a")))
    body = b'{ "model":"sim", "cache_salt" : "mine", "messages":[{"role":"user","content":"\\u0041"}] }'
    assert (await once(running.port, request(body, "Authorization: Bearer key-c"))).status == 200
    assert asked(worker)[-1].body == body
    assert (await ask(running, "c")).status == 200
    assert salt(worker) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_every_path_that_generates_is_salted_for_an_isolated_tenant(
    gateway: Begin, scripted: StartScripted, path: str
) -> None:
    worker = await scripted()
    running = await gateway(WorkerConfig(worker.url, engine="vllm"), change=having(isolated("a")))
    assert (await ask(running, "a", path=path, prompt="x", input="x", max_tokens=1)).status == 200
    assert salt(worker)


# -- guards -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["x", "gzip", "identity", "br, gzip"])
@pytest.mark.parametrize("space", [b"", b"\r\n \t"])
async def test_a_content_encoding_on_a_plain_body_does_not_get_round_the_guards(
    gateway: Begin, scripted: StartScripted, encoding: str, space: bytes
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = space + b'{"model":"sim","kv_transfer_params":{"remote_host":"there"},"messages":[]}'
    answer = await once(running.port, request(body, f"Content-Encoding: {encoding}"))
    assert answer.status == 200
    assert json.loads(worker.one.body) == {"model": "sim", "messages": []}


async def test_a_content_encoding_on_a_plain_body_does_not_get_round_the_list_of_models(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted(models=("sim", "large"))
    running = await gateway(worker, change=having(TenantConfig("few", [Secret("key-few")], models=["sim"])))
    assert (await ask(running, "few", "Content-Encoding: x", model="large")).status == 403
    assert (await ask(running, "few", "Content-Encoding: x", model="sim")).status == 200
    assert len(worker.seen) == 1


async def test_a_really_compressed_body_is_passed_on_as_it_is(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker)
    body = gzip.compress(json.dumps(chat()).encode())
    answer = await once(running.port, request(body, "Content-Encoding: gzip"))
    assert answer.status == 200
    assert worker.one.body == body
    assert worker.one.all("content-encoding") == ["gzip"]


# -- aliases ------------------------------------------------------------------------------------------------------------

FEW = TenantConfig("few", [Secret("key-few")], models=["default"])


async def test_a_tenant_of_an_alias_may_leave_out_the_only_model(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker, change=having(FEW))
    answer = await once(
        running.port, request({"messages": [{"role": "user", "content": "x"}]}, "Authorization: Bearer key-few")
    )
    assert answer.status == 200
    assert (await ask(running, "few", model="default")).status == 200
    assert json.loads(worker.seen[-1].body)["model"] == "sim"


async def test_a_tenant_of_an_alias_gets_its_own_stored_response(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(ok(b'{"id":"resp_1","object":"response"}'), models=("sim", "large"))
    running = await gateway(worker, change=having(FEW, shared("c")))
    assert (await ask(running, "few", path="/v1/responses", model="default", input="x")).status == 200
    get = {"path": "/v1/responses/resp_1", "method": "GET"}
    answer = await once(running.port, request(b"", "Authorization: Bearer key-few", **get))
    assert (answer.status, answer.json()["id"]) == (200, "resp_1")
    assert (await once(running.port, request(b"", "Authorization: Bearer key-c", **get))).status == 404


async def test_an_alias_in_an_opaque_json_body_becomes_the_served_name(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted()
    running = await gateway(worker, change=having(FEW))
    kind = "Content-Type: application/json"
    speech = await once(
        running.port,
        request({"model": "default", "input": "x"}, "Authorization: Bearer key-few", kind, path="/v1/audio/speech"),
    )
    assert speech.status == 200
    assert json.loads(worker.one.body) == {"model": "sim", "input": "x"}


def form(model: str) -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n' % model.encode()


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, chat(model="large"), "application/json"),
        ("/v1/completions", {"model": "large", "prompt": "x"}, "application/json"),
        ("/v1/messages", chat(model="large"), "application/json"),
        ("/v1/responses", {"model": "large", "input": "x"}, "application/json"),
        ("/v1/embeddings", {"model": "large", "input": "x"}, "application/json"),
        ("/generate", {"model": "large", "text": "x"}, "application/json"),
        ("/v1/audio/speech", {"model": "large", "input": "x"}, "application/json"),
        ("/v1/audio/speech", {"model": "large", "input": "x"}, "text/plain"),
        ("/v1/audio/speech", {"input": "x"}, "application/json"),
        ("/v1/audio/transcriptions", form("large"), "multipart/form-data; boundary=b"),
        ("/v1/images/edits", b"junk", "multipart/form-data; boundary=b"),
        ("/v1/files", b"junk", "application/octet-stream"),
    ],
)
async def test_a_tenant_of_an_alias_is_refused_every_other_model(
    gateway: Begin, scripted: StartScripted, path: str, body: Any, kind: str
) -> None:
    worker = await scripted(models=("sim", "large"))
    running = await gateway(worker, change=having(FEW))
    answer = await once(
        running.port, request(body, "Authorization: Bearer key-few", f"Content-Type: {kind}", path=path)
    )
    assert answer.status == 403
    assert worker.seen == []


async def test_an_engine_that_cannot_keep_tenants_apart_is_told_of(
    gateway: Begin, engine: StartEngine, scripted: StartScripted
) -> None:
    able, plain = await engine(), await scripted()
    running = await gateway(able, plain, change=having(isolated("a"), shared("b")))
    lacking = {worker.id for worker in running.fleet.workers.values() if "salt" in worker.observed}
    assert lacking == {f"127.0.0.1:{plain.port}"}
    rows = (await admin(running, "/workers"))["workers"]
    (row,) = [row for each in rows for row in each["lacks"] if row["code"] == "salt"]
    assert "tenants[].models" in row["cure"]
    nobody = await gateway(plain, change=having(shared("b")))
    assert all("salt" not in worker.observed for worker in nobody.fleet.workers.values())
