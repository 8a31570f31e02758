"""TensorRT-LLM's protocol between a context and a generation server, and what its dialect answers."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.pairs import CHAT, STORY, chat, nothing_left, pair, text, told, until, user
from tests.load_tests.engine.talk import cached, events, post

ASK = [user(STORY)]
CONTEXT = {"request_type": "context_only"}


async def halves(http: aiohttp.ClientSession, p: Engine, d: Engine, messages: list[Any], **fields: Any) -> list[Any]:
    first = await chat(http, p, messages, disaggregated_params=CONTEXT, **fields)
    params = {**first["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
    return [first, await chat(http, d, messages, disaggregated_params=params | {"ctx_usage": first["usage"]}, **fields)]


async def test_context_and_generation(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "tensorrt_llm")
    alone = await start("tensorrt_llm")
    history: list[Any] = []
    for turn in range(3):
        history.append(user(f"{STORY} {turn}"))
        first, second = await halves(http, p, d, history)
        assert first["choices"][0]["finish_reason"] == "not_finished"
        params = first["choices"][0]["disaggregated_params"]
        assert len(params["first_gen_tokens"]) == first["usage"]["completion_tokens"] == 1
        assert len(first["prompt_token_ids"]) == first["usage"]["prompt_tokens"]
        assert text(second) == text(await chat(http, alone, history))
        assert cached(second) == cached(first)
        history.append({"role": "assistant", "content": text(second)})
    assert cached(first) > 0
    assert d.stats()["computed_tokens"] == 0
    await nothing_left(p, d)
    # One token is all that was asked for: it has ended by length.
    one = await chat(http, p, ASK, disaggregated_params=CONTEXT, max_tokens=1)
    assert one["choices"][0]["finish_reason"] == "length"
    assert one["choices"][0]["disaggregated_params"]["encoded_opaque_state"]


async def test_streams_of_the_generation_server(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "tensorrt_llm")
    first = await post(http, p, "/v1/completions", {"prompt": STORY, "disaggregated_params": CONTEXT})
    params = {**first["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
    got = await events(http, d, "/v1/completions", {"prompt": STORY, "disaggregated_params": params})
    whole = await post(http, await start("tensorrt_llm"), "/v1/completions", {"prompt": STORY})
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == whole["choices"][0]["text"]
    await nothing_left(p, d)


@pytest.mark.parametrize("kind", ["forget", "transfer_fail", "queue_full", "left"])
async def test_what_fails_is_told_and_leaves_nothing(start: Start, http: aiohttp.ClientSession, kind: Any) -> None:
    p, d = await pair(start, "tensorrt_llm", lease=0.3)
    if kind == "forget":
        p.faults.add(kind)
    first = await chat(http, p, ASK, disaggregated_params=CONTEXT)
    params = {**first["choices"][0]["disaggregated_params"], "request_type": "generation_only"}
    body = {"model": "sim", "messages": ASK, "disaggregated_params": params}
    if kind == "left":
        p.faults.add("transfer_stall")
        asked = asyncio.ensure_future(http.post(d.url + CHAT, json=body))
        await until(lambda: told(d)["receiving"] == 1)
        asked.cancel()
    else:
        if kind != "forget":
            d.faults.add(kind)
        async with http.post(d.url + CHAT, json=body) as answer:
            assert answer.status == (503 if kind == "queue_full" else 500)
            assert (await answer.json())["object"] == "error"
    await nothing_left(p, d)


async def test_parameters_of_no_use(start: Start, http: aiohttp.ClientSession) -> None:
    _, d = await pair(start, "tensorrt_llm")
    for params in ({"request_type": "half"}, {"request_type": "generation_only"}, "context_only"):
        async with http.post(d.url + CHAT, json={"messages": ASK, "disaggregated_params": params}) as answer:
            assert answer.status == 400
    await nothing_left(d)


async def test_what_the_dialect_tells_of_itself(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("tensorrt_llm")

    async def told_at(path: str) -> Any:
        async with http.get(engine.url + path) as answer:
            assert answer.status == 200
            return await answer.json()

    assert (await told_at("/v1/models"))["data"][0]["owned_by"] == "tensorrt_llm"
    assert (await told_at("/version"))["version"].startswith("1.")
    assert await told_at("/metrics") == []
    await chat(http, engine, ASK)
    assert cached(await chat(http, engine, ASK)) % 32 == 0
    (entry,) = await told_at("/metrics")
    assert entry["kvCacheStats"]["tokensPerBlock"] == 32
    assert await told_at("/metrics") == []
    assert (await told_at("/server_info"))["disaggregated_params"]["ctx_info_endpoint"] is None
