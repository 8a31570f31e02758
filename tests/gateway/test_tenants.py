"""Keys, tenants, and what each of them may use and see; over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Config, ModelConfig, Secret, TenantConfig
from gateway.errors import Forbidden, Unauthorized
from gateway.run import Running
from gateway.tenants import Tenant, Tenants
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Response, admin, chat, once, request

WORDS = "the quick brown fox " * 400


def tenant(name: str, *keys: str, **fields: Any) -> TenantConfig:
    return TenantConfig(name, [Secret(key) for key in keys], **fields)


def having(*tenants: TenantConfig, **fields: Any) -> Any:
    def change(config: Config) -> None:
        config.tenants = list(tenants)
        for name, value in fields.items():
            setattr(config, name, value)

    return change


async def ask(running: Running, key: str | None, *lines: str, **fields: Any) -> Response:
    path = fields.pop("path", "/v1/chat/completions")
    credential = [f"Authorization: Bearer {key}"] if key is not None else []
    fields.setdefault("max_tokens", 1)
    return await once(running.port, request(chat(**fields), *credential, *lines, path=path))


async def series(running: Running, family: str) -> list[dict[str, str]]:
    text = await admin(running, "/metrics")
    return [
        sample.labels
        for each in text_string_to_metric_families(text)
        if each.name == family
        for sample in each.samples
        if sample.value
    ]


async def test_a_key_gives_its_tenant_and_the_tenant_its_policy(gateway: Begin, engine: StartEngine) -> None:
    tenants = having(
        tenant("one", "k1", "k1b", policy="round_robin"), tenant("two", "k2", policy="careful"), tenant("three", "k3")
    )

    def change(config: Config) -> None:
        tenants(config)
        config.policies = {"careful": {"name": "session", "fallback": "cache_aware"}}
        config.models = {"sim": ModelConfig(policy="random")}

    running = await gateway(await engine(), await engine(), change=change, policy="least_load")
    for key, decision in (
        ("k1", "round_robin/turn"),
        ("k1b", "round_robin/turn"),
        ("k2", "session/new"),
        ("k3", "random/draw"),
    ):
        assert (await ask(running, key)).one("x-warmroute-decision") == decision
    seen = {(each["tenant"], each["policy"]) for each in await series(running, "warmroute_decisions")}
    assert seen == {("one", "round_robin"), ("two", "session"), ("three", "random")}


@pytest.mark.parametrize("scheme", ["Authorization: Bearer k1", "authorization: bearer k1", "x-api-key: k1"])
async def test_a_key_may_come_in_either_header(gateway: Begin, engine: StartEngine, scheme: str) -> None:
    running = await gateway(await engine(), change=having(tenant("one", "k1")))
    assert (await once(running.port, request(chat(max_tokens=1), scheme))).status == 200


@pytest.mark.parametrize(
    "line",
    [
        None,
        "Authorization: Bearer nope",
        "Authorization: Bearer",
        "Authorization: Bearer k",
        "Authorization: Bearer k11",
        "Authorization: Basic k1x",
        "Authorization: ",
        "x-api-key: K1",
        "x-api-key: ",
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/generate"])
async def test_without_a_known_key_it_is_401_in_the_dialect_of_the_caller(
    gateway: Begin, engine: StartEngine, line: str | None, path: str
) -> None:
    started = await engine()
    running = await gateway(started, change=having(tenant("one", "k1")))
    answer = await once(running.port, request(chat(), *([line] if line else []), path=path))
    assert answer.status == 401
    assert answer.one("www-authenticate") == "Bearer"
    body = answer.json()
    if path == "/v1/messages":
        assert body["type"] == "error"
        assert body["error"]["type"] == "authentication_error"
    else:
        assert body["error"]["code"] == 401
        assert body["error"]["type"] == "authentication_error"
    assert "k1" not in answer.body.decode()
    assert not answer.all("x-warmroute-worker")
    assert started.stats()["requests"] == 0
    listing = await once(running.port, request(b"", *([line] if line else []), path="/v1/models", method="GET"))
    assert listing.status == 401


async def test_anonymous_serves_who_brings_no_key_but_not_who_brings_a_wrong_one(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine(), change=having(tenant("one", "k1"), anonymous=True))
    assert (await ask(running, None)).status == 200
    assert (await ask(running, "nope")).status == 401
    assert (await ask(running, "k1")).status == 200
    assert {each["tenant"] for each in await series(running, "warmroute_requests")} == {"anonymous", "one"}


async def test_a_tenant_may_use_its_models_and_no_other(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        having(tenant("few", "k1", models=["small", "nick"]), tenant("all", "k2"))(config)
        config.models = {"large": ModelConfig(aliases=["nick"])}

    running = await gateway(await engine(models=["small", "large"]), change=change)
    assert (await ask(running, "k1", model="small")).status == 200
    assert (await ask(running, "k1", model="nick")).status == 200, "an alias is a name of its own"
    for path in ("/v1/chat/completions", "/v1/messages"):
        refused = await ask(running, "k1", model="large", path=path)
        assert refused.status == 403
        kind = refused.json()["error"]["type"]
        assert kind == "permission_error"
    assert (await ask(running, "k1", model="secret")).status == 403, "nor is it told what exists"
    assert (await ask(running, "k2", model="large")).status == 200
    for key, names in (("k1", ["nick", "small"]), ("k2", ["large", "nick", "small"])):
        listed = await once(running.port, request(b"", f"Authorization: Bearer {key}", path="/v1/models", method="GET"))
        assert [each["id"] for each in listed.json()["data"]] == names


@pytest.mark.parametrize(
    "how",
    [
        "no model",
        "null model",
        "compressed",
        "opaque",
    ],
)
async def test_the_list_of_models_cannot_be_gone_round(gateway: Begin, engine: StartEngine, how: str) -> None:
    started = await engine(models=["large"])
    running = await gateway(started, change=having(tenant("few", "k1", models=["small"])))
    key = "Authorization: Bearer k1"
    body = chat(max_tokens=1)
    del body["model"]
    if how == "no model":
        answer = await once(running.port, request(body, key))
    elif how == "null model":
        answer = await once(running.port, request({**body, "model": None}, key))
    elif how == "compressed":
        answer = await once(running.port, request(b"\x1f\x8b junk", key, "Content-Encoding: gzip"))
    else:
        answer = await once(running.port, request(b"junk", key, path="/v1/audio/transcriptions"))
    assert answer.status in (400, 403, 415)
    assert not answer.all("x-warmroute-worker")
    assert started.stats()["requests"] == 0


@pytest.mark.parametrize("shows", [True, False])
async def test_routing_is_shown_to_those_who_may_see_it(gateway: Begin, engine: StartEngine, shows: bool) -> None:
    running = await gateway(
        await engine(), change=having(tenant("one", "k1", show_routing=shows)), policy="cache_aware"
    )
    for stream in (False, True):
        answer = await ask(running, "k1", "x-session-id: s", stream=stream)
        told = {name.lower() for name, _ in answer.fields if name.lower().startswith("x-warmroute-")}
        if shows:
            assert told >= {"x-warmroute-worker", "x-warmroute-decision", "x-warmroute-session-source"}
        else:
            assert not told
        assert answer.status == 200


async def predicted(running: Running, key: str) -> int:
    answer = await ask(running, key, messages=[{"role": "user", "content": WORDS}])
    assert answer.status == 200
    return int(answer.one("x-warmroute-predicted-cached-tokens"))


async def test_isolated_tenants_never_match_each_other_s_prefixes(gateway: Begin, engine: StartEngine) -> None:
    tenants = [
        tenant("a", "ka", isolation="isolated"),
        tenant("b", "kb", isolation="isolated"),
        tenant("c", "kc"),
        tenant("d", "kd"),
    ]
    running = await gateway(await engine(), change=having(*tenants), policy="cache_aware")
    assert await predicted(running, "ka") == 0
    assert await predicted(running, "ka") > 1000
    assert await predicted(running, "kb") == 0
    assert await predicted(running, "kc") == 0
    assert await predicted(running, "kd") > 1000, "those who share do"
    assert await predicted(running, "kb") > 1000


async def test_sessions_of_two_tenants_with_one_name_are_two(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=having(tenant("a", "ka"), tenant("b", "kb")), policy="cache_aware")
    for key in ("ka", "kb", "ka"):
        await ask(running, key, "x-session-id: same")
    rows = (await admin(running, "/sessions"))["sessions"]
    assert sorted((row["tenant"], row["turns"]) for row in rows) == [("a", 2), ("b", 1)]


async def test_content_never_joins_sessions_of_two_tenants(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=having(tenant("a", "ka"), tenant("b", "kb")), policy="cache_aware")
    start: list[Any] = [{"role": "user", "content": "hello"}]
    await ask(running, "ka", messages=start)
    longer = [*start, {"role": "assistant", "content": "x"}, {"role": "user", "content": "on"}]
    await ask(running, "kb", messages=longer)
    assert (await admin(running, "/sessions"))["total"] == 2


async def test_the_tenant_s_credential_never_reaches_a_worker(gateway: Begin, scripted: Any) -> None:
    worker = await scripted()
    running = await gateway(worker, change=having(tenant("one", "k1")))
    await once(running.port, request(chat(), "Authorization: Bearer k1", "x-api-key: k1"))
    assert not worker.one.all("authorization")
    assert not worker.one.all("x-api-key")


# -- pure ---------------------------------------------------------------------------------------------------------------


def test_no_key_is_kept_in_clear() -> None:
    tenants = Tenants([("very-secret", Tenant("a"))])
    assert "very-secret" not in repr(vars(tenants))
    assert tenants.of({b"x-api-key": b"very-secret"}).name == "a"
    with pytest.raises(Unauthorized) as found:
        tenants.of({b"x-api-key": b"guess"})
    assert "guess" not in found.value.message


def test_without_tenants_everybody_is_one_whatever_they_bring() -> None:
    tenants = Tenants()
    assert tenants.of({}) is tenants.of({b"authorization": b"Bearer x"})
    assert not tenants.keyed


def test_a_tenant_without_a_list_may_use_all_models() -> None:
    Tenant("a").check_model("m")
    with pytest.raises(Forbidden):
        Tenant("a", models=frozenset()).check_model("m")
