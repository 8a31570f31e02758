"""How refusals look in each dialect, bodies that no client should send, and what is listed and rewritten."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.config import Config, ModelConfig, Secret, TenantConfig, WorkerConfig
from gateway.workers import State
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Scripted, ok
from tests.gateway.talk import CHAT, Raw, Response, admin, chat, once, request, until

MESSAGES = "/v1/messages"
GENERATE = "/generate"
PATHS = {"openai": CHAT, "anthropic": MESSAGES, "sglang": GENERATE}

# -- refusals before the first byte -----------------------------------------------------------------------------------


def shape(dialect: str, answer: Response) -> None:
    """The body is an error as clients of this dialect read it."""
    body = answer.json()
    assert answer.one("content-type") == "application/json"
    assert answer.all("x-request-id")
    if dialect == "anthropic":
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) >= {"message", "type", "code"}
        assert body["error"]["code"] == answer.status
    assert body["error"]["message"]


@pytest.mark.parametrize("dialect", PATHS)
async def test_refusals_are_in_the_caller_s_dialect(gateway: Begin, scripted: StartScripted, dialect: str) -> None:
    worker = await scripted()
    running = await gateway(worker)
    path = PATHS[dialect]
    async with await Raw.connect(running.port) as client:
        for body, status in (
            (b'{"model":"nobody-has-it"}', 404),
            (b"{not json", 400),
            (b'"text"', 400),
            (b'{"model":5}', 400),
            (b"\xff\xfe", 400),
        ):
            answer = await client.ask(request(body, path=path))
            assert answer.status == status
            shape(dialect, answer)
        answer = await client.ask(request(path=path, method="GET"))
        assert answer.status == 405
        shape(dialect, answer)
    assert worker.seen == []


ANTHROPIC_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}


async def test_anthropic_s_own_words_for_the_kinds(gateway: Begin, scripted: StartScripted) -> None:
    def keyed(config: Config) -> None:
        config.tenants = [TenantConfig("team", keys=[Secret("k")])]

    running = await gateway(await scripted(), change=keyed)
    for line, body, status in (
        ("x-api-key: k", b"{", 400),
        ("x-api-key: wrong", None, 401),
        ("X-Nothing: k", None, 401),
        ("x-api-key: k", b'{"model":"nobody"}', 404),
    ):
        answer = await once(running.port, request(body, line, path=MESSAGES))
        assert (answer.status, answer.json()["error"]["type"]) == (status, ANTHROPIC_KINDS[status])


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize(
    "lines", [[], ["Authorization: Bearer wrong"], ["x-api-key: wrong"], ["Authorization: Basic a2V5"]]
)
async def test_without_a_known_key_it_is_401(
    gateway: Begin, scripted: StartScripted, dialect: str, lines: list[str]
) -> None:
    def keyed(config: Config) -> None:
        config.tenants = [TenantConfig("team", keys=[Secret("key")])]

    worker = await scripted()
    running = await gateway(worker, change=keyed)
    answer = await once(running.port, request(None, *lines, path=PATHS[dialect]))
    assert answer.status == 401
    assert answer.one("www-authenticate") == "Bearer"
    shape(dialect, answer)
    assert "wrong" not in answer.body.decode()
    assert worker.seen == []


async def test_a_tenant_is_held_to_its_models(gateway: Begin, scripted: StartScripted) -> None:
    def keyed(config: Config) -> None:
        config.tenants = [
            TenantConfig("a", keys=[Secret("a")], models=["other"]),
            TenantConfig("b", keys=[Secret("b")]),
        ]

    worker = await scripted(models=("sim", "other"))
    running = await gateway(worker, change=keyed)
    assert (await once(running.port, request(chat(), "Authorization: Bearer a"))).status == 403
    assert (await once(running.port, request(chat(model="other"), "Authorization: Bearer a"))).status == 200
    assert (await once(running.port, request(chat(), "Authorization: Bearer b"))).status == 200
    listed = await once(running.port, request(None, "Authorization: Bearer a", path="/v1/models", method="GET"))
    assert [row["id"] for row in listed.json()["data"]] == ["other"]


@pytest.mark.parametrize("dialect", ["openai", "anthropic", "sglang"])
async def test_a_body_too_large_is_413_in_the_caller_s_dialect(
    gateway: Begin, scripted: StartScripted, dialect: str
) -> None:
    def small(config: Config) -> None:
        config.listen.max_body = 100

    running = await gateway(await scripted(), change=small)
    answer = await once(running.port, request({"pad": "x" * 200}, path=PATHS[dialect]))
    assert answer.status == 413
    body = answer.json()
    assert body.get("type") == ("error" if dialect == "anthropic" else None)
    assert body["error"]["message"]


async def test_405_says_what_is_allowed(gateway: Begin, scripted: StartScripted) -> None:
    running = await gateway(await scripted())
    answer = await once(running.port, request(path=CHAT, method="GET"))
    assert answer.one("allow") == "POST"


async def test_404_and_503_are_told_apart(gateway: Begin, scripted: StartScripted) -> None:
    """A model that nobody knows is 404; one that is known and has no worker now is 503 with a time to come back."""

    def configured(config: Config) -> None:
        config.models = {"planned": ModelConfig()}

    worker = await scripted()
    running = await gateway(worker, change=configured)
    assert (await once(running.port, request(chat(model="nobody")))).status == 404
    planned = await once(running.port, request(chat(model="planned")))
    assert (planned.status, int(planned.one("retry-after")) >= 1) == (503, True)
    await worker.stop()
    await until(lambda: all(each.state is not State.READY for each in running.fleet.workers.values()))
    gone = await once(running.port, request())
    assert (gone.status, int(gone.one("retry-after")) >= 1) == (503, True)
    assert (await once(running.port, request(path="/healthz", method="GET"))).status == 200
    assert (await once(running.port, request(path="/readyz", method="GET"))).status == 503


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/v1/chat/completions/", "//v1/chat/completions", "/v1/../v1/models"]
)
async def test_paths_that_are_not_there(gateway: Begin, scripted: StartScripted, path: str) -> None:
    worker = await scripted()
    running = await gateway(worker)
    answer = await once(running.port, request(path=path))
    assert answer.status == 404
    shape("openai", answer)
    assert worker.seen == []


# -- bodies that no client should send --------------------------------------------------------------------------------

DEEP = 5000
NESTED = b"[" * DEEP + b"]" * DEEP
OBJECTS = b'{"a":' * DEEP + b"1" + b"}" * DEEP


def nested_results(depth: int) -> bytes:
    block = b'{"type":"text","text":"x"}'
    for _ in range(depth):
        block = b'{"type":"tool_result","tool_use_id":"t","content":[' + block + b"]}"
    return b'{"model":"sim","max_tokens":3,"messages":[{"role":"user","content":[' + block + b"]}]}"


def nested_prompt(depth: int) -> bytes:
    return b'{"model":"sim","max_tokens":3,"prompt":' + b"[" * depth + b"]" * depth + b"}"


CONTENTS: list[Any] = ["x", "", None, 5, True, 1.5, [], [None], ["x"], [5], {}, {"type": "text"}]
CONTENTS += [[{"type": "text", "text": "x"}], [{"type": "text", "text": None}], [{"type": "image_url"}], [[]]]
CONTENTS += [[{"type": "image_url", "image_url": {"url": "data:,x"}}], [{"text": 5}], [{}], "\x00", "\ud83d\ude00"]
PROMPTS: list[Any] = ["x", "", None, 5, True, [], [1, 2, 3], [[1, 2], [3]], ["a", "b"], [None], [-1], [2**40], [1.5]]
PROMPTS += [["a", 1], [1, "a"], [[]], [[[1]]], {}, {"a": 1}, [True], [10**30]]
MESSAGE_LISTS: list[Any] = [None, [], {}, "x", 5, [None], ["x"], [5], [[]], [{}], [{"role": None, "content": None}]]
MESSAGE_LISTS += [
    [{"role": 5, "content": "x"}],
    [{"content": "x"}],
    [{"role": "user"}],
    [{"role": "tool", "content": "x"}],
]
MESSAGE_LISTS += [[{"role": "assistant", "tool_calls": value}] for value in (None, [], {}, "x", 5, [None], [{}])]
MESSAGE_LISTS += [[{"role": "user", "content": "x", "name": value}] for value in (None, 5, {})]
MESSAGE_LISTS += [[{"role": "assistant", "content": "x", "reasoning": value}] for value in (None, 5, [])]
COMMON: list[dict[str, Any]] = [{"stream": value} for value in (None, 0, 1, "true", "x", [], 2.0)]
COMMON += [{"max_tokens": value} for value in (None, 0, -1, True, "5", 1.5, 1e300, 10**40, -(10**40), [], {})]
COMMON += [{"model": value} for value in (None, "", "sim\x00", "s" * 100_000, "\r\nX: y", 5, [], {})]
COMMON += [{"tools": value} for value in (None, {}, [], "x", 5, [None], [5])]
COMMON += [{"session_id": value} for value in (None, 5, "", "x" * 10_000, [], "\x00\r\n")]
COMMON += [{"metadata": value} for value in (None, 5, [], {"user_id": 5}, {"user_id": "{"}, {"session_id": {}})]
COMMON += [{"metadata": {"user_id": "{" * 3000}}, {"metadata": {"user_id": '{"session_id":5}'}}, {"user": 5}]
COMMON += [{"cache_salt": value} for value in (None, 5, [], "x")] + [{"rid": ["a", "b"]}, {"rid": 5}]
COMMON += [{"previous_response_id": value} for value in (None, 5, "resp_unknown", [])]
COMMON += [{"conversation": value} for value in (None, 5, "x", {"id": 5}, {"id": "x"}, [])]
COMMON += [{"stream_options": value} for value in (None, 5, {"include_usage": 1})]

RAW = [
    b"",
    b" ",
    b"null",
    b"true",
    b"5",
    b'"x"',
    b"[]",
    b"[{}]",
    b"{}",
    b"{",
    b"}",
    b"{}{}",
    b"{} x",
    b'{"model":"sim",}',
    b"{'model':'sim'}",
    b'{"model":NaN}',
    b'{"model":"sim","temperature":NaN}',
    b'{"model":"sim","temperature":-Infinity,"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":1e999}',
    b'{"model":"sim","messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 5000 + b"}",
    b'{"model":"sim","messages":[{"role":"user","content":"x"}],"a":0.' + b"1" * 5000 + b"}",
    b'{"model":"sim","model":"nobody"}',
    b'{"model":"nobody","model":"sim","messages":[],"messages":[{"role":"user","content":"x"}]}',
    b'{"mod\\u0065l":"sim","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"sim","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"sim","messages":[{"role":"\\udfff","content":"x"}]}',
    b'{"model":"\\ud800","messages":[{"role":"user","content":"x"}]}',
    b'{"\\ud800":1,"model":"sim","messages":[{"role":"user","content":"x"}]}',
    b'{"\\ud800":1,"model":"sim","kv_transfer_params":{},"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"sim","x":"\\ud800","kv_transfer_params":{},"messages":[{"role":"user","content":"x"}]}',
    b'{"model":"sim","session_id":"\\ud800","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"sim","metadata":{"user_id":"{\\"session_id\\":\\"\\\\ud800\\"}"},"messages":[]}',
    b'{"model":"sim","kv_transfer_params":' + NESTED + b"}",
    b'{"model":"sim","messages":[{"role":"user","content":"\xff\xfe"}]}',
    b'{"model":"sim","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    b'{"model":"\xff","messages":[{"role":"user","content":"x"}]}',
    b'{"\xff":1,"model":"sim","kv_transfer_params":{},"messages":[{"role":"user","content":"x"}]}',
    b'{"a":"\xff","model":"sim","bootstrap_room":1,"messages":[{"role":"user","content":"x"}]}',
    b"\xef\xbb\xbf" + b'{"model":"sim"}',
    '{"model":"sim"}'.encode("utf-16"),
    '{"model":"sim"}'.encode("utf-32"),
    b"\x00" * 100,
    NESTED,
    OBJECTS,
    b'{"model":"sim","messages":' + NESTED + b"}",
    b'{"model":"sim","x":' + OBJECTS + b"}",
    b'{"model":"sim","x":' + NESTED + b',"messages":[{"role":"user","content":"x"}]}',
    *[b'{"model":"sim","x":' + b"[" * n + b"]" * n + b',"stream":0,"bootstrap_room":1}' for n in range(880, 1000, 7)],
    *[nested_results(n) for n in (1, 5, 100, 150, 200, 240, 300, 320, 470, 490, 1000)],
    *[nested_prompt(n) for n in (1, 50, 300, 500, 700, 800, 850, 900, 930, 950, 970, 990, 1000, 5000)],
]


def odd_bodies() -> list[bytes]:
    """Every oddity in a body that is otherwise fine."""
    base = {"model": "sim", "max_tokens": 3}
    hi = [{"role": "user", "content": "x"}]
    found: list[dict[str, Any]] = [{**base, "messages": messages} for messages in MESSAGE_LISTS]
    found += [{**base, "messages": [{"role": role, "content": c}]} for c in CONTENTS for role in ("user", "system")]
    found += [{**base, "messages": [{"role": "assistant", "content": c}, *hi]} for c in CONTENTS]
    found += [{**base, "messages": hi, "system": c} for c in CONTENTS]
    found += [{**base, "prompt": p, "text": p, "input_ids": p, "input": p, "query": p, "documents": p} for p in PROMPTS]
    found += [{**base, "input": value, "instructions": value} for value in CONTENTS]
    found += [{**base, "messages": hi, "prompt": "x", "text": "x", "input": "x", **odd} for odd in COMMON]
    found += [{**base, "text": "x", "sampling_params": v} for v in (None, 5, [], [{}], {"max_new_tokens": 10**40}, "x")]
    return [*RAW, *[json.dumps(body).encode() for body in found]]


ALL_PATHS = [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score", MESSAGES]
ALL_PATHS += ["/v1/messages/count_tokens", GENERATE, "/tokenize", "/v1/audio/speech"]


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("policy", ["cache_aware", "session"])
async def test_odd_bodies_get_the_worker_s_own_answer_or_4xx(
    gateway: Begin, scripted: StartScripted, path: str, policy: str
) -> None:
    """Whatever reaches a worker that answers 200 to all must come back as 200: routing crashes on nothing."""
    worker = await scripted()
    running = await gateway(worker, policy=policy)
    wrong = []
    client = await Raw.connect(running.port)
    for body in odd_bodies():
        before = len(worker.seen)
        try:
            answer = await client.ask(request(body, path=path))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            wrong.append((body[:200], type(error).__name__))
            client.vanish()
            client = await Raw.connect(running.port)
            continue
        served = len(worker.seen) > before
        if answer.status != 200 if served else not 400 <= answer.status < 500:
            wrong.append((body[:200], answer.status, answer.body[:200]))
    client.vanish()
    assert wrong == []
    assert running.gateway.defects == 0
    assert "warmroute_defects 0" in await admin(running, "/metrics")


@pytest.mark.parametrize("path", [CHAT, MESSAGES, GENERATE])
async def test_nesting_of_every_depth_is_served_or_400_also_where_something_is_spliced(
    gateway: Begin, scripted: StartScripted, path: str
) -> None:
    """Each reader has its own depth at which it gives up; none may be reached behind another that did not."""
    running = await gateway(await scripted(), change=aliased, policy="cache_aware")
    statuses: dict[bytes, list[int]] = {}
    async with await Raw.connect(running.port) as client:
        for depth in (*range(1, 900, 60), *range(900, 1010)):
            deep = b'"x":' + b"[" * depth + b"]" * depth
            for start in (
                b'"model":"default",',
                b'"model":"sim","bootstrap_room":1,',
                b'"model":"default","stream":0,',
            ):
                answer = await client.ask(request(b"{" + start + deep + b"}", path=path))
                statuses.setdefault(start, []).append(answer.status)
    for start, found in statuses.items():
        assert set(found) == {200, 400}, start
        assert found == sorted(found)


@pytest.mark.parametrize(
    ("dialect", "path"),
    [("vllm", CHAT), ("vllm", "/v1/completions"), ("vllm", MESSAGES), ("sglang", GENERATE), ("vllm", "/v1/responses")],
)
async def test_odd_bodies_get_from_an_engine_what_it_says_itself(
    gateway: Begin, engine: StartEngine, dialect: str, path: str
) -> None:
    """What the engine answers directly and through the gateway has the same status, or the gateway says 4xx."""
    started = await engine(dialect, time_scale=0.0)
    running = await gateway(started, policy="cache_aware")
    wrong = []
    async with await Raw.connect(running.port) as through:
        for body in odd_bodies()[::3]:
            if b'"stream"' in body or len(body) > 9_000:
                continue
            got = await through.ask(request(body, path=path))
            want = await once(started.port, request(body, path=path))
            if got.status != want.status and not (400 <= got.status < 500 <= want.status or got.status in (400, 404)):
                wrong.append((body[:200], got.status, want.status))
    assert wrong == []
    assert running.gateway.defects == 0


# -- models -----------------------------------------------------------------------------------------------------------


def aliased(config: Config) -> None:
    config.models = {"sim": ModelConfig(aliases=["default", "gpt-\u4e2d"])}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, GENERATE, "/v1/embeddings", "/v1/responses", "/v1/completions"])
async def test_an_alias_becomes_the_served_name_and_every_other_value_keeps_its_bytes(
    gateway: Begin, scripted: StartScripted, path: str
) -> None:
    worker = await scripted()
    running = await gateway(worker, change=aliased)
    values = [
        b'"messages" : [ {"role":"user","content":"\\u4e2d \\/ model: default"} ]',
        b'"a":1.0e5',
        b'"b":-0.0',
        b'"c":12345678901234567890123',
        b'"d": { "model" : "default" }',
        '"e":"\u4e2d"'.encode(),
    ]
    for at in range(len(values) + 1):
        for name in (b'"model":"default"', b'"model" : "gpt-\\u4e2d"', b'"mod\\u0065l":"default"'):
            body = b"{" + b",".join([*values[:at], name, *values[at:]]) + b"}"
            assert (await once(running.port, request(body, path=path))).status == 200
            got = worker.seen[-1].body
            assert json.loads(got) == {**json.loads(body), "model": "sim"}
            for value in values:
                assert value.split(b":", 1)[1].strip() in got
            assert got.count(b'"model"') == 2
    body = b'{"model":"sim", "messages":[]}'
    await once(running.port, request(body, path=path))
    assert worker.seen[-1].body == body


async def test_models_are_merged_one_entry_each_with_aliases(gateway: Begin, scripted: StartScripted) -> None:
    workers = [await scripted(models=("sim", "both")), await scripted(models=("both", "own"))]
    running = await gateway(*workers, change=aliased)
    answer = await once(running.port, request(path="/v1/models", method="GET"))
    body = answer.json()
    assert body["object"] == "list"
    assert sorted(row["id"] for row in body["data"]) == sorted(["sim", "both", "own", "default", "gpt-\u4e2d"])
    for row in body["data"]:
        assert row["object"] == "model"
        assert isinstance(row["created"], int)
        assert row["owned_by"]


async def test_models_tell_the_shortest_context_and_ask_no_worker(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(context_length=4096), await engine(context_length=2048)]
    running = await gateway(*engines)

    def asked() -> int:
        return sum(1 for each in engines for seen in each.core.recorder.ring if seen.path == "/v1/models")

    before = asked()
    row: dict[str, Any] = {}
    for _ in range(50):
        answer = await once(running.port, request(path="/v1/models", method="GET"))
        (row,) = answer.json()["data"]
    assert row["max_model_len"] == 2048
    assert asked() - before < 10


async def test_models_of_dead_workers_are_not_listed(gateway: Begin, scripted: StartScripted) -> None:
    dead: Scripted = await scripted(models=("gone",))
    running = await gateway(dead, await scripted(models=("here",)))
    await dead.stop()

    async def listed() -> list[str]:
        answer = await once(running.port, request(path="/v1/models", method="GET"))
        return [row["id"] for row in answer.json()["data"]]

    for _ in range(500):
        if await listed() == ["here"]:
            break
        await asyncio.sleep(0.01)
    assert await listed() == ["here"]


async def test_a_request_goes_only_to_a_worker_that_has_its_model(gateway: Begin, scripted: StartScripted) -> None:
    first, second = await scripted(models=("a",)), await scripted(models=("b",))
    running = await gateway(first, second)
    for _ in range(6):
        assert (await once(running.port, request(chat(model="b")))).status == 200
    assert (len(first.seen), len(second.seen)) == (0, 6)
    missing = await once(running.port, request(b'{"messages":[]}'))
    assert missing.status == 400
    assert missing.json()["error"]["param"] == "model"


async def test_a_stored_response_is_out_of_reach_of_other_paths_and_unknown_ids(
    gateway: Begin, engine: StartEngine
) -> None:
    engines: list[Engine] = [await engine() for _ in range(2)]
    running = await gateway(*engines)
    made = (await once(running.port, request({"model": "sim", "input": "hi"}, path="/v1/responses"))).json()
    assert made["id"].startswith("resp_")
    for _ in range(4):
        got = await once(running.port, request(path=f"/v1/responses/{made['id']}", method="GET"))
        assert (got.status, got.json()["id"]) == (200, made["id"])
    for name in ("resp_unknown", "..", "%2e%2e", ""):
        answer = await once(running.port, request(path=f"/v1/responses/{name}", method="GET"))
        assert answer.status in (404, 405)


async def test_a_stored_response_s_path_does_not_climb(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(ok(b'{"id":"resp_abcdefgh"}'))
    running = await gateway(worker)
    await once(running.port, request({"model": "sim", "input": "hi"}, path="/v1/responses"))
    answer = await once(running.port, request(path="/v1/responses/resp_abcdefgh/../../../admin/cancel"))
    assert answer.status == 404
    assert len(worker.seen) == 1


async def test_a_stored_response_belongs_to_its_tenant(gateway: Begin, engine: StartEngine) -> None:
    def keyed(config: Config) -> None:
        config.tenants = [TenantConfig("a", keys=[Secret("a")]), TenantConfig("b", keys=[Secret("b")])]

    running = await gateway(await engine(), change=keyed)
    body = {"model": "sim", "input": "hi"}
    made = await once(running.port, request(body, "Authorization: Bearer a", path="/v1/responses"))
    path = f"/v1/responses/{made.json()['id']}"
    mine = await once(running.port, request(None, "Authorization: Bearer a", path=path, method="GET"))
    theirs = await once(running.port, request(None, "Authorization: Bearer b", path=path, method="GET"))
    assert (mine.status, theirs.status) == (200, 404)


async def test_guarded_fields_reach_no_engine(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()
    running = await gateway(WorkerConfig(started.url))
    await once(running.port, request(chat(max_tokens=2, kv_transfer_params={"x": 1}, stream=0, bootstrap_room=5)))
    assert started.core.recorder.ring[-1].keys == ["model", "messages", "max_tokens", "stream"]


async def test_one_model_is_told_by_its_name(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(models=["org/name"]))
    for path, status in (("org/name", 200), ("org%2Fname", 200), ("other", 404), ("", 404)):
        answer = await once(running.port, request(path=f"/v1/models/{path}", method="GET"))
        assert answer.status == status, path
        assert answer.json().get("id", "org/name") == "org/name"


async def test_a_request_id_of_unreasonable_length_is_replaced(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    answer = await once(running.port, request(chat(), "X-Request-Id: " + "a" * 300))
    assert answer.status == 200
    assert len(dict(answer.fields)["x-request-id"]) < 100


async def test_the_rank_that_was_chosen_is_sent(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()
    running = await gateway(started)
    (worker,) = running.fleet.workers.values()
    worker.facts.ranks = 2
    running.fleet.describe(worker, worker.facts)
    seen = set()
    for _ in range(2):
        answer = await once(running.port, request(chat(), "X-Data-Parallel-Rank: 7"))
        async with httpx.AsyncClient() as client:
            received = (await client.get(f"{started.url}/sim/requests")).json()
        rows = received if isinstance(received, list) else received["requests"]
        last = [row for row in rows if row["path"] == "/v1/chat/completions"][-1]
        ranks = [value for name, value in last["headers"] if name.lower() == "x-data-parallel-rank"]
        assert len(ranks) == 1
        seen.add((ranks[0], dict(answer.fields)["x-warmroute-worker"]))
    assert seen == {("0", worker.id), ("1", f"{worker.id}#1")}
