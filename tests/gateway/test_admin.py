"""The control plane over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import door
from gateway.config import Config, MetricsAddress, ModelConfig, Secret, TenantConfig
from gateway.run import Running
from gateway.series import Counter, Histogram
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, long_chat, once, request, settled, until

TOKEN = "adm1n-token"


async def call(
    running: Running, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, port: int = 0
) -> tuple[int, Any]:
    """One request to the control plane; (status, JSON or text)."""
    url = f"http://127.0.0.1:{port or running.admin.port}{path}"
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http, http.request(method, url, data=data, headers=headers) as answer:
        text = await answer.text()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(text) if "json" in kind else text


def error(body: Any) -> str:
    """The message of an error body, which must be of the one shape."""
    assert set(body) == {"error"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return str(body["error"]["message"])


def secured(config: Config) -> None:
    config.admin.token = Secret(TOKEN)


BEARER = {"authorization": f"Bearer {TOKEN}"}


async def only(running: Running) -> dict[str, Any]:
    status, body = await call(running, "GET", "/workers")
    assert status == 200
    (row,) = body["workers"]
    assert isinstance(row, dict)
    return row


# -- access -------------------------------------------------------------------------------------------------------------

PATHS = [
    ("GET", "/metrics"),
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/x"),
    ("PATCH", "/workers/x"),
    ("DELETE", "/workers/x"),
    ("POST", "/workers/x/drain"),
    ("GET", "/sessions"),
    ("GET", "/sessions/00"),
    ("DELETE", "/sessions/00"),
    ("POST", "/route"),
    ("GET", "/config"),
    ("GET", "/config/fingerprints"),
    ("POST", "/config/reload"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("PUT", "/workers"),
]


async def test_with_a_token_everything_but_health_needs_it(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        secured(config)
        config.auth.failures_per_minute = 0

    running = await gateway(await engine(), change=change)
    for method, path in PATHS:
        for headers in (
            {},
            {"authorization": TOKEN},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": "Bearer "},
            {"authorization": "Bearer \xff"},
            {"x-api-key": TOKEN},
        ):
            status, body = await call(running, method, path, headers=headers)
            assert status == 401, (method, path, headers)
            assert TOKEN not in error(body)
        status, _ = await call(running, method, path, headers=BEARER)
        assert status != 401
    for path in ("/healthz", "/readyz"):
        assert (await call(running, "GET", path))[0] == 200


async def test_requests_of_other_sites_are_refused(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=secured)
    for method, path in [*PATHS, ("GET", "/healthz")]:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", f"http://localhost:{running.admin.port}"):
            status, _ = await call(running, method, path, headers={**BEARER, "origin": origin})
            assert status == 403, (method, path, origin)
    own = f"http://127.0.0.1:{running.admin.port}"
    assert (await call(running, "GET", "/workers", headers={**BEARER, "origin": own}))[0] == 200


async def test_what_browsers_send_for_other_sites_without_asking_is_refused(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine())
    own = f"http://127.0.0.1:{running.admin.port}"
    worker = json.dumps({"url": "http://127.0.0.1:9"}).encode()
    for site in ("cross-site", "same-site", "nonsense"):
        assert (await call(running, "POST", "/workers", worker, {"sec-fetch-site": site}))[0] == 403
        assert (await call(running, "GET", "/config", headers={"sec-fetch-site": site}))[0] == 403
    for sent in ({"origin": own}, {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}):
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "text/plain; application/json",
        ):
            status, body = await call(running, "POST", "/workers", worker, {**sent, "content-type": kind})
            assert status == 415, (sent, kind)
            assert "application/json" in error(body)
        status, _ = await call(running, "POST", "/sessions/00/move", worker, {**sent, "content-type": ""})
        assert status == 415
    assert len(running.fleet.workers) == 1
    asked = {"origin": own, "content-type": "application/json; charset=utf-8"}
    assert (await call(running, "POST", "/workers", worker, asked))[0] == 201
    status, _ = await call(running, "POST", "/workers", worker, {"content-type": "application/x-www-form-urlencoded"})
    assert status == 200, "curl -d is no browser"


async def test_who_guesses_the_token_has_to_wait_and_who_knows_it_has_not(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        secured(config)
        config.auth.failures_per_minute = 3

    running = await gateway(await engine(), change=change)
    statuses = [(await call(running, "GET", "/config", headers={"authorization": f"Bearer {n}"}))[0] for n in range(5)]
    assert statuses == [401, 401, 401, 429, 429]
    assert (await call(running, "GET", "/config"))[0] == 401
    status, text = await call(running, "GET", "/metrics", headers=BEARER)
    assert status == 200
    assert 'warmroute_auth_failures_total{reason="admin"} 5.0' in text


async def test_a_body_is_bounded_whether_its_length_is_told_or_not(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    most = 1024 * 1024
    for method, path in (("POST", "/workers"), ("PATCH", f"/workers/{next(iter(running.fleet.workers))}")):
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        told = await once(running.admin.port, head + b"Content-Length: %d\r\n\r\n" % (most + 1))
        assert told.status == 413
        assert str(most) in error(told.json())
        async with await Raw.connect(running.admin.port) as client:
            await client.send(head + b"Transfer-Encoding: chunked\r\n\r\n")
            piece = b"10000\r\n" + b" " * 65536 + b"\r\n"
            await client.send(piece * 17)
            assert (await client.response()).status == 413
    told = await once(
        running.admin.port, b"POST /route HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    )
    assert told.status == 413


async def test_connections_on_which_nothing_happens_are_cut(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT", "WORKING", "RESTING"):
        monkeypatch.setattr(door, name, 0.3)
    running = await gateway(await engine())
    half = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    for sent in (b"", half, half + b"\r\n", b"POST /workers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"):
        async with await Raw.connect(running.admin.port) as client:
            await client.send(sent)
            # It ends: by a reset, or after the answer that there was.
            await client.rest()


async def test_of_too_many_connections_some_are_cut_and_the_rest_is_served(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MOST", 8)
    running = await gateway(await engine())
    silent = [await Raw.connect(running.admin.port) for _ in range(30)]
    gone = [asyncio.ensure_future(client.rest()) for client in silent]
    await until(lambda: sum(each.done() for each in gone) >= 22)
    assert (await call(running, "GET", "/healthz"))[0] == 200
    for client in silent:
        client.vanish()
    await asyncio.gather(*gone)


async def test_without_a_token_a_foreign_name_for_this_machine_is_refused(gateway: Begin, engine: StartEngine) -> None:
    """A page whose own name was made to point here is of the same origin; its name gives it away."""
    running = await gateway(await engine())
    for host in ("evil.example", f"evil.example:{running.admin.port}", "localhost.evil.example"):
        for headers in ({"host": host}, {"host": host, "origin": f"http://{host}"}):
            assert (await call(running, "GET", "/workers", headers=headers))[0] == 403
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:8081"):
        assert (await call(running, "GET", "/workers", headers={"host": host}))[0] == 200


async def test_unknown_paths_and_methods_are_told_in_json(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    for method, path, expected in (
        ("GET", "/nowhere", 404),
        ("POST", "/", 405),
        ("GET", "/ui/nothing.js", 404),
        ("PUT", "/workers", 405),
        ("POST", "/metrics", 405),
        ("GET", "/route", 405),
        ("DELETE", "/config", 405),
        ("POST", "/healthz", 405),
    ):
        status, body = await call(running, method, path)
        assert status == expected
        error(body)


# -- health -------------------------------------------------------------------------------------------------------------


async def ready(running: Running) -> tuple[int, Any]:
    """Readiness, which the data port and the control plane must agree on."""
    data = await once(running.port, request(b"", path="/readyz", method="GET"))
    status, body = await call(running, "GET", "/readyz")
    assert (data.status, data.json()) == (status, body)
    health = await once(running.port, request(b"", path="/healthz", method="GET"))
    assert (health.status, (await call(running, "GET", "/healthz"))[0]) == (200, 200)
    return status, body


async def test_readiness_needs_a_ready_worker(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway()
    status, body = await ready(running)
    assert status == 503
    assert (body["ready"], body["reason"]) == (False, "no ready worker")
    started = await engine()
    status, row = await call(running, "POST", "/workers", {"url": started.url})
    assert status == 201
    worker = running.fleet.workers[row["id"]]
    await until(lambda: worker.state is State.READY)
    assert (await ready(running))[0] == 200
    await call(running, "POST", f"/workers/{row['id']}/drain")
    assert (await ready(running))[0] == 503


async def test_readiness_needs_every_configured_model(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.models = {"sim": ModelConfig(), "other": ModelConfig()}

    running = await gateway(await engine(), change=change)
    status, body = await ready(running)
    assert status == 503
    assert body["models"] == ["other"]
    second = await engine(models=["other"])
    await call(running, "POST", "/workers", {"url": second.url})
    await until(lambda: all(worker.state is State.READY for worker in running.fleet.workers.values()))
    assert await ready(running) == (200, {"ready": True})
    # A model that is configured and has no engine now is 503, one that nobody ever heard of is 404.
    await call(running, "DELETE", f"/workers/127.0.0.1:{second.port}")
    assert (await once(running.port, request(chat(model="other")))).status == 503
    assert (await once(running.port, request(chat(model="never")))).status == 404


# -- workers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"null", "object"),
        (b"\xff\xfe", "JSON"),
        ({}, "url"),
        ({"url": 3}, "url"),
        ({"url": ""}, "url"),
        ({"url": "127.0.0.1:1"}, "url"),
        ({"url": "ftp://a:1"}, "url"),
        ({"url": "http://a:99999"}, "url"),
        ({"url": "http://u:p@a:1"}, "url"),
        ({"url": "http://a:1\r\nx: y"}, "url"),
        ({"url": "http://a:1", "engine": "nonsense"}, "engine"),
        ({"url": "http://a:1", "engine": ["vllm"]}, "engine"),
        ({"url": "http://a:1", "models": "m"}, "models"),
        ({"url": "http://a:1", "models": [1]}, "models"),
        ({"url": "http://a:1", "kv_tokens": 0}, "kv_tokens"),
        ({"url": "http://a:1", "kv_tokens": "9"}, "kv_tokens"),
        ({"url": "http://a:1", "kv_tokens": True}, "kv_tokens"),
        ({"url": "http://a:1", "kv_tokens": 1.5}, "kv_tokens"),
        ({"url": "http://a:1", "api_key": 3}, "api_key"),
        ({"url": "http://a:1", "api_key": "a\nb: c"}, "api_key"),
        ({"url": "http://a:1", "role": "both"}, "role"),
        ({"url": "http://a:1", "ranks": 2}, "ranks"),
        ({"url": "http://a:1", "URL": "x"}, "URL"),
    ],
)
async def test_a_worker_that_makes_no_sense_is_refused(gateway: Begin, body: Any, words: str) -> None:
    running = await gateway()
    status, answer = await call(running, "POST", "/workers", body)
    assert status == 400
    assert words in error(answer)
    assert not running.fleet.workers


async def test_a_worker_is_added_once_and_serves_and_is_removed(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway()
    started = await engine()
    body = {"url": started.url, "engine": "vllm", "models": ["sim"], "kv_tokens": 4096, "api_key": "s3cret"}
    status, row = await call(running, "POST", "/workers", body)
    assert status == 201
    assert row["state"] == "joining"
    status, again = await call(running, "POST", "/workers", {"url": started.url + "/"})
    assert (status, again["id"]) == (200, row["id"])
    await until(lambda: running.fleet.workers[row["id"]].state is State.READY)
    status, row = await call(running, "GET", f"/workers/{row['id']}")
    assert status == 200
    assert (row["state"], row["engine"], row["models"], row["kv_tokens"]) == ("ready", "vllm", ["sim"], 4096)
    assert "s3cret" not in json.dumps(row)
    assert row == await only(running)
    assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
    assert await call(running, "DELETE", f"/workers/{row['id']}") == (200, {"removed": row["id"], "running": 0})
    for method in ("GET", "DELETE"):
        status, gone = await call(running, method, f"/workers/{row['id']}")
        assert status == 404
        assert row["id"] in error(gone)
    assert (await once(running.port, request(chat()))).status == 503


async def test_a_worker_behind_a_path_can_be_named(gateway: Begin) -> None:
    running = await gateway()
    _, row = await call(running, "POST", "/workers", {"url": "http://127.0.0.1:9/engine/a"})
    assert row["id"] == "127.0.0.1:9/engine/a"
    quoted = row["id"].replace("/", "%2F")
    assert (await call(running, "GET", f"/workers/{quoted}"))[0] == 200
    assert (await call(running, "DELETE", f"/workers/{quoted}"))[0] == 200


async def test_draining_and_resuming(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="round_robin")
    first, second = list(running.fleet.workers)
    status, row = await call(running, "POST", f"/workers/{first}/drain")
    assert (status, row["state"]) == (202, "draining")
    assert (await call(running, "POST", f"/workers/{first}/drain"))[0] == 202
    for _ in range(4):
        answer = await once(running.port, request(chat(max_tokens=1)))
        assert answer.one("x-warmroute-worker") == second
    status, row = await call(running, "PATCH", f"/workers/{first}", {"state": "ready"})
    assert (status, row["state"]) == (200, "ready")
    seen = {(await once(running.port, request(chat(max_tokens=1)))).one("x-warmroute-worker") for _ in range(4)}
    assert seen == {first, second}
    status, row = await call(running, "PATCH", f"/workers/{second}", {"state": "draining"})
    assert (status, row["state"]) == (200, "draining")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        {},
        [],
        {"state": "down"},
        {"state": "joining"},
        {"state": None},
        {"state": ["ready"]},
        {"state": "ready", "x": 1},
    ],
)
async def test_other_changes_of_a_worker_are_refused(gateway: Begin, engine: StartEngine, body: Any) -> None:
    running = await gateway(await engine())
    (id,) = running.fleet.workers
    status, answer = await call(running, "PATCH", f"/workers/{id}", body)
    assert status == 400
    error(answer)
    assert running.fleet.workers[id].state is State.READY


async def test_a_worker_that_never_answered_does_not_become_ready_by_being_resumed(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway()
    dead = await engine()
    await dead.kill()
    _, row = await call(running, "POST", "/workers", {"url": dead.url})
    await call(running, "POST", f"/workers/{row['id']}/drain")
    _, row = await call(running, "PATCH", f"/workers/{row['id']}", {"state": "ready"})
    assert row["state"] == "joining"
    assert (await ready(running))[0] == 503
    await engine(port=dead.port)
    await until(lambda: running.fleet.workers[row["id"]].state is State.READY)
    assert (await once(running.port, request(chat(max_tokens=1)))).status == 200


async def test_unknown_ids_are_404(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    for method, path in (
        ("GET", "/workers/nobody"),
        ("PATCH", "/workers/nobody"),
        ("DELETE", "/workers/nobody"),
        ("POST", "/workers/nobody/drain"),
        ("GET", "/sessions/nothex"),
        ("GET", f"/sessions/{'00' * 16}"),
        ("DELETE", f"/sessions/{'00' * 16}"),
        ("DELETE", "/sessions/%C3%A9"),
    ):
        status, body = await call(running, method, path, {"state": "ready"} if method == "PATCH" else None)
        assert status == 404, (method, path)
        error(body)


async def test_a_worker_removed_while_it_answers_finishes(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    (id,) = running.fleet.workers
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=300, ignore_eos=True)))
        assert (await client.head()).status == 200
        assert (await call(running, "DELETE", f"/workers/{id}"))[1] == {"removed": id, "running": 1}
        data = b""
        while b"[DONE]" not in data:
            data = await client.reader.readuntil(b"\n\n")
    await until(lambda: not running.gateway.exchanges)
    assert running.index.radix.pages(0) == 0


async def test_what_a_removed_worker_still_answers_brings_no_series_of_it_back(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    (id,) = running.fleet.workers
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=300, ignore_eos=True)))
        await client.head()
        await call(running, "DELETE", f"/workers/{id}")
        while b"[DONE]" not in await client.reader.readuntil(b"\n\n"):
            pass
    await until(lambda: not running.gateway.exchanges)
    assert id not in (await call(running, "GET", "/metrics"))[1]


# -- sessions -----------------------------------------------------------------------------------------------------------


async def test_sessions_are_listed_newest_first_and_removed(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    for at in range(5):
        await once(running.port, request(chat(max_tokens=1, prompt_cache_key=f"secret-{at}")))
    status, body = await call(running, "GET", "/sessions?limit=3")
    assert status == 200
    assert body["total"] == 5
    assert len(body["sessions"]) == 3
    assert "secret" not in json.dumps(body)
    row = body["sessions"][0]
    assert (row["source"], row["tenant"], row["model"], row["turns"], row["running"]) == (
        "prompt_cache_key",
        "anonymous",
        "sim",
        1,
        0,
    )
    assert row["home"] in running.fleet.workers
    assert row["prompt_tokens"] > 0
    _, one = await call(running, "GET", f"/sessions/{row['id']}")
    assert {**one, **row, "idle_seconds": 0} == {**one, "idle_seconds": 0}
    assert await call(running, "DELETE", f"/sessions/{row['id']}") == (200, {"removed": row["id"]})
    assert (await call(running, "GET", f"/sessions/{row['id']}"))[0] == 404
    assert (await call(running, "GET", "/sessions"))[1]["total"] == 4
    assert sum(target.homes for target in running.fleet.targets.values()) == 4
    await once(running.port, request(chat(max_tokens=1, prompt_cache_key="secret-4")))
    assert (await call(running, "GET", f"/sessions/{row['id']}"))[1]["turns"] == 1


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "", "1.5", "%C2%B2", "1e2", "9" * 5000, "+5"])
async def test_a_limit_that_is_none_is_refused(gateway: Begin, engine: StartEngine, limit: str) -> None:
    running = await gateway(await engine())
    status, body = await call(running, "GET", f"/sessions?limit={limit}")
    assert status == 400
    assert "limit" in error(body)


# -- the dry run --------------------------------------------------------------------------------------------------------


def snapshot(running: Running) -> Any:
    """All that a dry run could change."""
    index, routing = running.index.radix, running.gateway.routing
    values = {
        name: {labels: list(row) for labels, row in value.values.items()}
        for name, value in vars(running.metrics).items()
        if isinstance(value, Counter | Histogram) and name != "lag"
    }
    return (
        len(running.sessions),
        [
            (session.key, session.home, session.used, session.turns, session.running)
            for session in running.sessions.recent(99)
        ],
        [(t.id, t.homes, t.running, t.wait, t.busy, index.pages(t.id)) for t in running.fleet.targets.values()],
        (index.bytes, index.evicted_pages),
        {name: model.ordinal for name, model in routing.models.items()},
        values,
    )


BODIES: list[dict[str, Any]] = [
    chat(max_tokens=1),
    chat(max_tokens=1, messages=[{"role": "system", "content": "s " * 900}, {"role": "user", "content": "q"}]),
    chat(max_tokens=1, prompt_cache_key="k"),
    chat(
        max_tokens=1,
        messages=[
            {"role": "user", "content": "w " * 900},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "q"},
        ],
    ),
]


@pytest.mark.parametrize(
    "policy", ["cache_aware", "round_robin", "random", "session", "prefix_hash", "consistent_hash"]
)
async def test_a_dry_run_changes_nothing_and_says_what_then_happens(
    gateway: Begin, engine: StartEngine, policy: str
) -> None:
    engines = [await engine() for _ in range(5)]
    running = await gateway(*engines, policy=policy)
    await once(running.port, request(chat(max_tokens=1)))
    await settled(running)
    for turn in range(5):
        for body in BODIES:
            headers = {"x-request-id": f"r{turn}-{BODIES.index(body)}"}
            before = snapshot(running)
            for _ in range(3):
                status, said = await call(running, "POST", "/route", body, headers)
                assert status == 200
            assert snapshot(running) == before
            assert said["decision"] == policy
            assert said["candidates"][0]["target"] == said["target"]
            assert len(said["candidates"]) == 5
            answer = await once(running.port, request(body, f"x-request-id: {headers['x-request-id']}"))
            assert answer.one("x-warmroute-worker") == said["target"]
            assert answer.one("x-warmroute-decision") == f"{policy}/{said['reason']}"
            await until(lambda: not running.gateway.exchanges)


async def test_a_dry_run_tells_session_and_costs(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    body = chat(max_tokens=1, messages=[{"role": "user", "content": "word " * 900}])
    _, said = await call(running, "POST", "/route", body, {"x-session-id": "mine"})
    assert said["session"]["source"] == "x-session-id"
    assert (said["session"]["home"], said["session"]["turns"]) == (None, 0)
    home = (await once(running.port, request(body, "x-session-id: mine"))).one("x-warmroute-worker")
    await settled(running)
    _, said = await call(running, "POST", "/route", body, {"X-Session-ID": "mine"})
    assert (said["target"], said["reason"], said["session"]["home"], said["session"]["turns"]) == (
        home,
        "home",
        home,
        1,
    )
    chosen, other = said["candidates"]
    assert chosen["holding_tokens"]["device"] > 500
    assert other["holding_tokens"]["device"] == 0
    assert chosen["total_ms"] < other["total_ms"]
    assert chosen["total_ms"] == pytest.approx(sum(chosen["terms"].values()), abs=0.01)
    assert said["pair"] is None
    assert "mine" not in json.dumps(said)


async def test_a_dry_run_reads_other_paths(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    messages = {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    assert (await call(running, "POST", "/route?path=/v1/messages", messages))[0] == 200
    assert (await call(running, "POST", "/route?path=/v1/completions", {"model": "sim", "prompt": "hi"}))[0] == 200
    for path in ("/nowhere", "/v1/audio/speech", "", "/v1/models", "%C3%A9"):
        status, body = await call(running, "POST", f"/route?path={path}", messages)
        assert status == 404
        error(body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (chat(model="never"), 404),
        (chat(model=7), 400),
        (chat(messages=7), 200),
        (chat(messages=[]), 200),
        (chat(messages=[None]), 200),
        (chat(messages=[{"role": "user", "content": [{"type": "text", "text": None}]}]), 200),
        (chat(kv_transfer_params={"a": 1}), 200),
    ],
)
async def test_a_dry_run_of_a_bad_body_says_what_the_request_would_be_told(
    gateway: Begin, engine: StartEngine, body: Any, status: int
) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    found, answer = await call(running, "POST", "/route", body)
    assert found == status
    if status != 200:
        error(answer)


async def test_a_dry_run_without_a_worker_is_503(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    (id,) = running.fleet.workers
    await call(running, "POST", f"/workers/{id}/drain")
    status, body = await call(running, "POST", "/route", chat())
    assert status == 503
    error(body)


async def test_a_dry_run_is_made_for_a_tenant(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        secured(config)
        config.tenants = [
            TenantConfig("a", [Secret("ka")], policy="random"),
            TenantConfig("b", [Secret("kb")], models=["other"]),
        ]

    running = await gateway(await engine(), change=change)
    status, said = await call(running, "POST", "/route", chat(), {**BEARER, "x-warmroute-tenant-key": "ka"})
    assert (status, said["decision"]) == (200, "random")
    assert (await call(running, "POST", "/route", chat(), {**BEARER, "x-warmroute-tenant-key": "kb"}))[0] == 403
    assert (await call(running, "POST", "/route", chat(), BEARER))[0] == 401
    assert (await call(running, "POST", "/route", chat(), {**BEARER, "x-warmroute-tenant-key": "kc"}))[0] == 401


async def test_a_dry_run_follows_the_pin_of_a_stored_response(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine() for _ in range(4)]
    running = await gateway(*engines, policy="round_robin")
    first = await once(running.port, request({"model": "sim", "input": "hi", "store": True}, path="/v1/responses"))
    assert first.status == 200
    body = {"model": "sim", "input": "on", "previous_response_id": first.json()["id"]}
    _, said = await call(running, "POST", "/route?path=/v1/responses", body)
    then = await once(running.port, request(body, path="/v1/responses"))
    assert said["target"] == then.one("x-warmroute-worker") == first.one("x-warmroute-worker")


# -- configuration and metrics ------------------------------------------------------------------------------------------


async def test_the_configuration_in_force_is_shown_without_secrets(
    gateway: Begin, engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")

    def change(config: Config) -> None:
        secured(config)
        config.tenants = [TenantConfig("a", [Secret("s3cret-tenant")])]
        for worker in config.workers:
            worker.api_key = Secret("s3cret-worker")

    running = await gateway(await engine(), change=change)
    for key in ("s3cret-tenant", "s3cret-guess"):
        await once(running.port, request(chat(max_tokens=1), f"authorization: Bearer {key}"))
    status, shown = await call(running, "GET", "/config", headers=BEARER)
    assert status == 200
    text = json.dumps(shown)
    text += (await call(running, "GET", "/metrics", headers=BEARER))[1] + caplog.text
    for secret in (TOKEN, "s3cret"):
        assert secret not in text
    assert shown["tenants"][0]["keys"] == ["***"]
    assert shown["listen"]["max_body"] == 64 * 1024 * 1024
    assert shown["policy"] == "round_robin"


async def test_the_address_for_a_scraper_has_metrics_and_nothing_else(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        secured(config)
        config.metrics = MetricsAddress(port=0)

    running = await gateway(await engine(), change=change)
    port = running.admin.metrics_port
    assert port
    status, text = await call(running, "GET", "/metrics", port=port)
    assert status == 200
    assert "warmroute_requests" in text
    for path in ("/workers", "/config", "/sessions", "/healthz", "/"):
        assert (await call(running, "GET", path, port=port))[0] == 404
    assert (await call(running, "POST", "/route", chat(), port=port))[0] == 404


ODD = 'od"d\n\\{}'


async def test_metrics_parse_and_no_label_is_a_client_s(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(models=["sim"]), policy="cache_aware", change=odd_tenant)
    key = "authorization: Bearer k"
    for body in (
        chat(max_tokens=1),
        chat(max_tokens=1, model="client-model"),
        chat(max_tokens=1, model=ODD + "client-model"),
        chat(max_tokens=1, user="client-user", prompt_cache_key="client-key", metadata={"session_id": "client-meta"}),
        chat(max_tokens=1, rid="client-rid", session_id="client-sid", cache_salt="client-salt"),
        chat(max_tokens="client-type"),
        long_chat(stream=True, max_completion_tokens=3),
    ):
        for line in ("x-session-id: client-a", "x-client-session-id: client-b", "user-agent: client-c"):
            await once(running.port, request({**body, "max_tokens": 3}, key, line, "x-request-id: client-d"))
    for path in ("/client-path", "/v1/responses/client-response", "/v1/chat/client"):
        await once(running.port, request(chat(), key, path=path))
    await once(running.port, request(chat(), key, method="CLIENTMETHOD"))
    await once(running.port, request(chat(), "authorization: Bearer client-key"))
    status, text = await call(running, "GET", "/metrics")
    assert status == 200
    assert "client-" not in text
    allowed = {
        "tenant": {ODD, "anonymous"},
        "model": {"sim", "any"},
        "policy": {"cache_aware"},
        "target": set(running.fleet.workers),
        "worker": set(running.fleet.workers),
    }
    names = set()
    for family in text_string_to_metric_families(text):
        names.add(family.name)
        assert family.documentation
        for sample in family.samples:
            for label, value in sample.labels.items():
                assert "client-" not in value
                if label in allowed:
                    assert value in allowed[label], (sample.name, label, value)
    assert all(name.startswith(("warmroute_", "process_")) for name in names)
    assert {"warmroute_requests", "warmroute_decisions", "warmroute_session_outcomes", "warmroute_sessions"} <= names


def odd_tenant(config: Config) -> None:
    config.tenants = [TenantConfig(ODD, [Secret("k")])]


async def test_a_scrape_while_requests_run_and_a_worker_leaves_is_whole(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")

    async def ask() -> None:
        for at in range(10):
            await once(running.port, request(chat(max_tokens=1, prompt_cache_key=f"{at}")))

    async def scrape() -> None:
        for _ in range(5):
            status, text = await call(running, "GET", "/metrics")
            assert status == 200
            assert list(text_string_to_metric_families(text))

    await asyncio.gather(ask(), scrape(), call(running, "DELETE", f"/workers/{next(iter(running.fleet.workers))}"))
