"""Conversations over HTTP: what is cached, what is counted, what is said."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import LONG, WEATHER, cached, chat, events, post, user


@pytest.mark.parametrize(("dialect", "block"), [("vllm", 16), ("vllm", 32), ("openai", 16), ("sglang", 1)])
async def test_each_turn_reuses_prompt_and_reply_of_the_last(
    start: Start, http: aiohttp.ClientSession, dialect: str, block: int
) -> None:
    engine = await start(dialect, block_size=block)
    messages = [{"role": "system", "content": LONG}, user("hello")]
    known = 0
    for turn in range(4):
        answer = await chat(http, engine, messages)
        usage = answer["usage"]
        assert cached(answer) == known // block * block
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        messages += [answer["choices"][0]["message"], user(f"question {turn}")]
    stats = engine.stats()
    assert stats["prompt_tokens"] == stats["cached_tokens"] + stats["computed_tokens"]
    assert stats["requests"] == stats["finished"] == 4


@pytest.mark.parametrize(("dialect", "block"), [("vllm", 16), ("sglang", 1), ("sglang", 8), ("llamacpp", 1)])
async def test_the_same_prompt_again_is_cached_up_to_its_last_token(
    start: Start, http: aiohttp.ClientSession, dialect: str, block: int
) -> None:
    engine = await start(dialect, block_size=block)
    for length in (31, 32, 33, 48, 64):
        body = {"model": "sim", "prompt": [length * 1000 + i for i in range(length)], "max_tokens": 1}
        await post(http, engine, "/v1/completions", body)
        answer = await post(http, engine, "/v1/completions", body)
        assert answer["usage"]["prompt_tokens"] == length
        assert cached(answer) == (length - 1) // block * block


async def test_a_tool_call_is_made_on_demand_and_hits_when_it_comes_back(
    start: Start, http: aiohttp.ClientSession
) -> None:
    engine = await start("sglang")
    messages = [user("What is the weather in Paris?")]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = await chat(http, engine, messages, tools=[WEATHER], tool_choice=choice)
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        call = message["tool_calls"][0]
        assert call["function"]["name"] == "get_weather"
        assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
        known = answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] - 1
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
        again = await chat(http, engine, messages, tools=[WEATHER])
        assert cached(again) == known
        messages += [again["choices"][0]["message"], user("and tomorrow?")]
    plain = await chat(http, engine, messages, tools=[WEATHER], tool_choice="none")
    assert plain["choices"][0]["message"]["tool_calls"] is None


async def test_limits_and_stops(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    messages = [user("tell me something")]
    whole = await chat(http, engine, messages)
    text = whole["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == "stop"
    short = await chat(http, engine, messages, max_tokens=3)
    assert short["choices"][0]["finish_reason"] == "length"
    assert short["usage"]["completion_tokens"] == 3
    assert text.startswith(short["choices"][0]["message"]["content"])
    both = await chat(http, engine, messages, max_completion_tokens=2, max_tokens=9)
    assert both["usage"]["completion_tokens"] == 2
    word = text.split()[3]
    stopped = await chat(http, engine, messages, stop=[word, "nowhere"])
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(word)]
    assert stopped["choices"][0]["stop_reason"] == word
    endless = await chat(http, engine, messages, ignore_eos=True, max_tokens=200)
    assert endless["usage"]["completion_tokens"] == 200


async def test_choices_share_the_prompt_and_differ(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    answer = await chat(http, engine, [user(LONG)], n=3, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 15
    single = await chat(http, engine, [user(LONG)], max_tokens=5)
    assert answer["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]


async def test_a_json_schema_is_obeyed(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "sizes": {"type": "array"}}}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    answer = await chat(http, engine, [user("a thing")], response_format=form)
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert value["colour"] in ("red", "blue")
    assert isinstance(value["sizes"], list)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "openai"])
async def test_a_stream_says_what_the_answer_says(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect)
    body = {"model": "sim", "messages": [user(LONG)]}
    whole = await post(http, engine, "/v1/chat/completions", body)
    plain = await events(http, engine, "/v1/chat/completions", body)
    counted = await events(http, engine, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert plain[-1] == counted[-1] == "[DONE]"
    assert plain[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(chunk["choices"] for chunk in plain[:-1])
    assert plain[-2]["choices"][0]["finish_reason"] == "stop"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in plain[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert len({chunk["id"] for chunk in plain[:-1]}) == 1
    assert counted[-2]["choices"] == []
    usage = counted[-2]["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    if dialect == "llamacpp":
        assert plain[-2]["timings"]["cache_n"] > 0


async def test_tool_calls_stream_in_pieces(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = {"model": "sim", "messages": [user("weather?")], "tools": [WEATHER], "tool_choice": "required"}
    found = await events(http, engine, "/v1/chat/completions", body)
    calls = [call for chunk in found[:-1] for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert calls[0]["id"]
    json.loads("".join(call["function"]["arguments"] for call in calls))
    assert len(calls) > 2
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_completions_take_every_form_of_prompt(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    for prompt, count in (("hello", 1), (["hello", "world"], 2), ([1, 2, 3], 1), ([[1, 2], [3, 4, 5]], 2)):
        body = {"model": "sim", "prompt": prompt, "max_tokens": 4}
        answer = await post(http, engine, "/v1/completions", body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["completion_tokens"] == 4 * count
        found = await events(http, engine, "/v1/completions", body)
        for choice in answer["choices"]:
            mine = [c["choices"][0] for c in found[:-1] if c["choices"][0]["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in mine) == choice["text"]
            assert mine[-1]["finish_reason"] == "length"


async def test_usage_can_leave_the_cache_out(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect, usage_details=False)
        answer = await chat(http, engine, [user(LONG)])
        assert answer["usage"]["prompt_tokens_details"] is None


async def test_without_prefix_cache_nothing_is_cached(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang", "llamacpp"):
        engine = await start(dialect, prefix_cache=False)
        await chat(http, engine, [user(LONG)])
        assert cached(await chat(http, engine, [user(LONG)])) == 0


async def test_salt_and_adapter_keep_caches_apart(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(loras=["adapter"])
    hits = []
    for fields in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "adapter"}, {}):
        hits.append(cached(await chat(http, engine, [user(LONG)], **fields)) > 0)
    assert hits == [False, True, False, False, False]


async def test_many_at_once_share_what_is_common_and_all_finish(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(kv_tokens=2048, context_length=1024, max_running=8, chunk_tokens=256)
    calls = [
        chat(http, engine, [{"role": "system", "content": LONG}, user(f"question number {number}")], max_tokens=100)
        for number in range(24)
    ]
    answers = await asyncio.gather(*calls)
    assert all(answer["choices"][0]["finish_reason"] in ("stop", "length") for answer in answers)
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_used"], stats["kv_blocks_leaked"]) == (0, 0, 0, 0)
    assert stats["cached_tokens"] > stats["computed_tokens"]


async def test_small_kv_evicts_and_preempts_but_answers_all(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect, kv_tokens=640, context_length=320, max_running=8)
        bodies = [
            {"prompt": [n * 1000 + i for i in range(100)], "max_tokens": 60, "ignore_eos": True} for n in range(8)
        ]
        answers = await asyncio.gather(*(post(http, engine, "/v1/completions", body) for body in bodies))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [60] * 8
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["evicted_blocks"] > 0
        assert stats["kv_blocks_leaked"] == 0


async def test_vllm_returns_token_ids_on_demand(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = {"model": "sim", "messages": [user(LONG)], "return_token_ids": True}
    whole = await post(http, engine, "/v1/chat/completions", body)
    counted = await post(http, engine, "/tokenize", {"messages": [user(LONG)]})
    assert whole["prompt_token_ids"] == counted["tokens"]
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    found = await events(http, engine, "/v1/chat/completions", body)
    assert found[0]["prompt_token_ids"] == counted["tokens"]
    assert [token for chunk in found[1:-1] for token in chunk["choices"][0]["token_ids"]] == ids
    plain = await post(http, engine, "/v1/chat/completions", {**body, "return_token_ids": False})
    assert plain["prompt_token_ids"] is None
