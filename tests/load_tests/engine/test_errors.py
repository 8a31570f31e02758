"""Errors, in the words and shapes of each engine."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import chat, events, post, until, user

CHAT = "/v1/chat/completions"


async def refused(http: aiohttp.ClientSession, engine: Engine, path: str, **request: Any) -> tuple[int, Any]:
    async with http.post(engine.url + path, **request) as answer:
        return answer.status, await answer.json()


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [user("hi")], **fields}


async def test_vllm_knows_its_models_and_sglang_takes_any(start: Start, http: aiohttp.ClientSession) -> None:
    vllm = await start("vllm", models=["a", "b"])
    status, body = await refused(http, vllm, CHAT, json=ask(model="x"))
    assert status == 404
    assert body["error"]["type"] == "NotFoundError"
    assert body["error"]["message"] == "The model `x` does not exist. Valid aliases: a, b"
    for dialect in ("sglang", "llamacpp"):
        engine = await start(dialect)
        assert (await chat(http, engine, [user("hi")], model="whatever"))["model"] == "whatever"


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_a_prompt_longer_than_the_context(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect, context_length=64)
    status, body = await refused(http, engine, CHAT, json=ask(messages=[user("word " * 200)]))
    assert status == 400
    error = body if dialect == "sglang" else body["error"]
    assert "context" in error["message"]
    assert "64" in error["message"]
    assert error["code"] == 400
    if dialect == "sglang":
        assert body["object"] == "error"
        assert body["type"] == "BadRequestError"
    elif dialect == "vllm":
        assert error["param"] == "input_tokens"
    else:
        assert error["type"] == "exceed_context_size_error"
    assert engine.stats()["errors"] == 1


async def test_too_many_tokens_asked(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect, context_length=64)
        status, body = await refused(http, engine, CHAT, json=ask(max_tokens=64))
        assert status == 400, body


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": None},
        {"messages": [{"content": "no role"}]},
        {"messages": [user("hi"), "hello"]},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"n": 0},
        {"stop": [1]},
        {"tools": "all"},
        {"tools": [{"type": "function"}]},
        {"tools": [{"function": {"name": "f"}}], "tool_choice": {"function": {"name": "g"}}},
        {"cache_salt": 5},
        {"model": 5},
    ],
)
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_bad_fields_are_400(start: Start, http: aiohttp.ClientSession, dialect: str, fields: Any) -> None:
    engine = await start(dialect)
    status, _ = await refused(http, engine, CHAT, json=ask(**fields))
    assert status == 400
    assert engine.stats()["requests"] == 0


async def test_broken_json_is_400(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang", "llamacpp"):
        engine = await start(dialect)
        for data in (b'{"model": "sim", ', b"[1, 2]", b"hello"):
            status, _ = await refused(http, engine, CHAT, data=data, headers={"Content-Type": "application/json"})
            assert status == 400


async def test_the_key_is_asked_for_where_real_engines_ask(start: Start, http: aiohttp.ClientSession) -> None:
    vllm = await start("vllm", api_key="secret")
    status, body = await refused(http, vllm, CHAT, json=ask())
    assert (status, body) == (401, {"error": "Unauthorized"})
    await post(http, vllm, CHAT, ask(), headers={"Authorization": "Bearer secret"})
    await post(http, vllm, "/tokenize", {"prompt": "hi"})
    sglang = await start("sglang", api_key="secret")
    status, _ = await refused(http, sglang, "/tokenize", json={"prompt": "hi"})
    assert status == 401
    async with http.get(sglang.url + "/health") as answer:
        assert answer.status == 200


async def test_paths_of_other_engines_are_not_found(start: Start, http: aiohttp.ClientSession) -> None:
    lacking = {
        "vllm": ["/model_info", "/server_info", "/v1/loads", "/props", "/slots", "/health_generate"],
        "sglang": ["/version", "/props", "/load"],
        "llamacpp": ["/version", "/model_info"],
        "openai": ["/metrics", "/version", "/model_info", "/props"],
    }
    for dialect, paths in lacking.items():
        engine = await start(dialect)
        for path in paths:
            async with http.get(engine.url + path) as answer:
                assert answer.status == 404, (dialect, path)
                body = await answer.json()
                assert "error" in body if dialect == "llamacpp" else body == {"detail": "Not Found"}
        async with http.get(engine.url + CHAT) as answer:
            assert answer.status == 405


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_full_queue(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect, max_running=1, max_queued=1, time_scale=0.2)
    slow = ask(max_tokens=2000, ignore_eos=True)
    tasks = []
    for expected in ((1, 0), (1, 1)):
        tasks.append(asyncio.ensure_future(chat(http, engine, [user("slow")], max_tokens=2000, ignore_eos=True)))
        await until(lambda e=expected: (engine.stats()["running"], engine.stats()["waiting"]) == e)
    status, body = await refused(http, engine, CHAT, json=slow)
    assert status == 503
    if dialect == "sglang":
        assert body["message"] == "The request queue is full."
        found = await events(http, engine, CHAT, slow)
        assert found[0]["error"]["code"] == 503
        assert found[0]["error"]["message"] == "The request queue is full."
        assert found[1:] == ["[DONE]"]
    else:
        assert body["error"]["message"].startswith("The engine is currently busy and cannot accept new requests.")
        status, _ = await refused(http, engine, CHAT, json={**slow, "stream": True})
        assert status == 503
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: engine.stats()["running"] == 0)


async def test_messages_answer_errors_as_anthropic_does(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    status, body = await refused(http, engine, "/v1/messages", json={**ask(model="x"), "max_tokens": 5})
    assert status == 404
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    status, body = await refused(http, engine, "/v1/messages", json=ask())
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
