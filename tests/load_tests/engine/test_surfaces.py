"""The other routes: native, responses, messages, pooling, audio, and what an engine tells of itself."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from itertools import pairwise

import aiohttp
import pytest

from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import LONG, WEATHER, cached, chat, events, post, until, user


async def test_generate_streams_cumulative_text_and_counts_the_cache(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("sglang")
    body = {"text": LONG, "sampling_params": {"max_new_tokens": 10, "ignore_eos": True}, "rid": "r1"}
    first = await post(http, engine, "/generate", body)
    assert first["meta_info"]["cached_tokens"] == 0
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert len(first["output_ids"]) == 10
    found = await events(http, engine, "/generate", body)
    assert found[-1] == "[DONE]"
    texts = [item["text"] for item in found[:-1]]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == first["text"]
    assert found[-2]["meta_info"]["cached_tokens"] == first["meta_info"]["prompt_tokens"] - 1
    ids = await post(http, engine, "/generate", {"input_ids": [[1, 2], [3, 4]], "sampling_params": {}})
    assert [item["meta_info"]["prompt_tokens"] for item in ids] == [2, 2]


async def test_sessions_are_referenced_until_closed(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("sglang")
    for session in ("a", "b", "a"):
        await chat(http, engine, [user("hi")], session_id=session, max_tokens=2)
    assert engine.stats()["sessions"] == 2
    async with http.post(engine.url + "/close_session", json={"session_id": "a"}) as answer:
        assert answer.status == 200
    assert engine.stats()["sessions"] == 1


async def test_abort_by_request_id_matches_prefixes(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("sglang", time_scale=0.5)
    body = {"text": "hi", "rid": "abc-1", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    running = asyncio.ensure_future(post(http, engine, "/generate", body))
    await until(lambda: engine.stats()["running"] == 1)
    for rid in ("", "zzz", "abc"):
        async with http.post(engine.url + "/abort_request", json={"rid": rid}) as answer:
            assert answer.status == 200
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.stats()["kv_blocks_used"] == 0


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_caches_are_flushed_when_idle_only(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await start(dialect, time_scale=0.5)
    path = "/flush_cache" if dialect == "sglang" else "/reset_prefix_cache"
    running = asyncio.ensure_future(chat(http, engine, [user(LONG)], max_tokens=4000, ignore_eos=True))
    await until(lambda: engine.stats()["running"] == 1)

    async def flush() -> bool:
        async with http.post(engine.url + path) as answer:
            if dialect == "sglang":
                return answer.status == 200
            return bool((await answer.json())["success"])

    assert not await flush()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: engine.stats()["running"] == 0)
    assert await flush()
    assert engine.stats()["kv_blocks_cached"] == 0


async def test_responses_are_kept_by_the_engine_that_made_them(start: Start, http: aiohttp.ClientSession) -> None:
    engine, other = await start(), await start()
    first = await post(http, engine, "/v1/responses", {"model": "sim", "input": LONG, "instructions": "be kind"})
    assert first["status"] == "completed"
    more = {"model": "sim", "input": "go on", "previous_response_id": first["id"], "instructions": "be kind"}
    second = await post(http, engine, "/v1/responses", more)
    known = first["usage"]["total_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] == known // 16 * 16
    async with http.post(other.url + "/v1/responses", json=more) as answer:
        assert answer.status == 404
        assert "not found" in (await answer.json())["error"]["message"]
    async with http.get(f"{engine.url}/v1/responses/{first['id']}") as answer:
        assert (await answer.json())["output"] == first["output"]
    async with http.delete(f"{engine.url}/v1/responses/{first['id']}") as answer:
        assert (await answer.json())["deleted"]
    async with http.get(f"{engine.url}/v1/responses/{first['id']}") as answer:
        assert answer.status == 404
    unkept = await post(http, engine, "/v1/responses", {"model": "sim", "input": "x", "store": False})
    async with http.get(f"{engine.url}/v1/responses/{unkept['id']}") as answer:
        assert answer.status == 404


async def test_a_response_streams_numbered_events_without_done(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    found = await events(http, engine, "/v1/responses", {"model": "sim", "input": "hi"})
    assert [item["sequence_number"] for item in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] == "response.completed"
    text = "".join(item["delta"] for item in found if item["type"] == "response.output_text.delta")
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == text
    tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
    body = {"model": "sim", "input": "weather?", "tools": [tool], "tool_choice": "required"}
    found = await events(http, engine, "/v1/responses", body)
    item = found[-1]["response"]["output"][0]
    assert item["type"] == "function_call"
    assert json.loads(item["arguments"])
    follow = [user("weather?"), item, {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}]
    after = await post(http, engine, "/v1/responses", {**body, "input": follow, "tool_choice": "auto"})
    known = found[-1]["response"]["usage"]["total_tokens"] - 1
    assert after["usage"]["input_tokens_details"]["cached_tokens"] == known // 16 * 16


async def test_a_running_response_is_cancelled(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start(time_scale=0.5)
    body = {"model": "sim", "input": "hi", "stream": True, "ignore_eos": True, "max_output_tokens": 4000}
    async with http.post(engine.url + "/v1/responses", json=body) as answer:
        line = await answer.content.readuntil(b"\n\n")
        name = json.loads(line.split(b"data: ")[1])["response"]["id"]
        assert (await post(http, engine, f"/v1/responses/{name}/cancel", {}))["status"] == "cancelled"
        assert b'"status":"cancelled"' in await answer.read()
    assert engine.stats()["aborts"] == 1


async def test_messages_tell_the_cached_part_apart(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = {"model": "sim", "max_tokens": 200, "system": LONG, "messages": [user("hello")]}
    counted = await post(http, engine, "/v1/messages/count_tokens", body)
    first = await post(http, engine, "/v1/messages", body)
    usage = first["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert total == counted["input_tokens"]
    messages = [user("hello"), {"role": "assistant", "content": first["content"]}, user("more")]
    second = await post(http, engine, "/v1/messages", {**body, "messages": messages})
    assert second["usage"]["cache_read_input_tokens"] == (total + usage["output_tokens"] - 1) // 16 * 16


async def test_embeddings_rerank_and_score(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect)
        plain = await post(http, engine, "/v1/embeddings", {"model": "sim", "input": ["one text", "two"]})
        packed = await post(
            http, engine, "/v1/embeddings", {"model": "sim", "input": "one text", "encoding_format": "base64"}
        )
        vector = array("f", base64.b64decode(packed["data"][0]["embedding"]))
        assert vector.tolist() == plain["data"][0]["embedding"] != plain["data"][1]["embedding"]
        body = {"model": "sim", "query": "red cars", "documents": ["blue boats", "red cars and more"], "top_n": 1}
        ranked = await post(http, engine, "/v1/rerank", body)
        best = ranked[0] if isinstance(ranked, list) else ranked["results"][0]
        assert best["index"] == 1
        scored = await post(http, engine, "/v1/score", {"model": "sim", "query": "red", "items": ["red", "blue"]})
        assert len(scored.get("scores") or scored["data"]) == 2
        assert engine.stats()["kv_blocks_used"] == 0
        assert engine.stats()["generated_tokens"] == 0


async def test_a_transcription_takes_an_upload(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    texts = []
    for _ in range(2):
        form = aiohttp.FormData()
        form.add_field("model", "sim")
        form.add_field("file", b"\x00\x01" * 5000, filename="a.wav")
        async with http.post(engine.url + "/v1/audio/transcriptions", data=form) as answer:
            assert answer.status == 200
            texts.append((await answer.json())["text"])
    assert texts[0] == texts[1]
    async with http.post(engine.url + "/v1/audio/transcriptions", data=b"x") as answer:
        assert answer.status == 400


async def test_tokenize_agrees_with_usage_and_detokenizes(start: Start, http: aiohttp.ClientSession) -> None:
    for dialect in ("vllm", "sglang"):
        engine = await start(dialect)
        body = {"model": "sim", "messages": [user(LONG)], "tools": [WEATHER]}
        counted = await post(http, engine, "/tokenize", body)
        answer = await chat(http, engine, body["messages"], tools=[WEATHER])  # type: ignore[arg-type]
        assert counted["count"] == len(counted["tokens"]) == answer["usage"]["prompt_tokens"]
        back = await post(http, engine, "/detokenize", {"tokens": counted["tokens"]})
        assert LONG in next(iter(back.values()))


async def test_metrics_pages_agree_with_the_accounting(start: Start, http: aiohttp.ClientSession) -> None:
    wanted = {
        "vllm": {
            'vllm:prefix_cache_queries_total{engine="0",model_name="sim"}': "prompt_tokens",
            'vllm:prefix_cache_hits_total{engine="0",model_name="sim"}': "cached_tokens",
            'vllm:generation_tokens_total{engine="0",model_name="sim"}': "generated_tokens",
            'vllm:num_requests_running{engine="0",model_name="sim"}': "running",
        },
        "sglang": {
            'sglang:prompt_tokens_total{engine_type="unified",model_name="sim"}': "prompt_tokens",
            'sglang:cached_tokens_total{cache_source="device",engine_type="unified",model_name="sim"}': "cached_tokens",
            'sglang:num_running_reqs{engine_type="unified",model_name="sim",moe_ep_rank="0",pp_rank="0",tp_rank="0"}': (
                "running"
            ),
        },
        "llamacpp": {
            "llamacpp:prompt_tokens_cached_total": "cached_tokens",
            "llamacpp:tokens_predicted_total": "generated_tokens",
        },
    }
    for dialect, samples in wanted.items():
        engine = await start(dialect)
        for _ in range(2):
            await chat(http, engine, [user(LONG)])
        async with http.get(engine.url + "/metrics") as answer:
            page = dict(line.rsplit(" ", 1) for line in (await answer.text()).splitlines() if line[0] != "#")
        for name, key in samples.items():
            assert float(page[name]) == engine.stats()[key], name
    off = await start("vllm", metrics=False)
    async with http.get(off.url + "/metrics") as answer:
        assert answer.status == 404


async def test_an_engine_describes_itself(start: Start, http: aiohttp.ClientSession) -> None:
    async def get(url: str) -> object:
        async with http.get(url) as answer:
            assert answer.status == 200, url
            return await answer.json()

    vllm = await start("vllm", models=["big"], loras=["small"], context_length=4096)
    listed = await get(vllm.url + "/v1/models")
    assert [(m["id"], m["parent"], m["max_model_len"]) for m in listed["data"]] == [  # type: ignore[index]
        ("big", None, 4096),
        ("small", "big", 4096),
    ]
    assert await get(vllm.url + "/version") == {"version": "0.33.0"}
    async with http.get(vllm.url + "/metrics") as answer:
        info = next(line for line in (await answer.text()).splitlines() if line.startswith("vllm:cache_config_info"))
    for label in ('block_size="16"', 'num_gpu_blocks="8192"', 'kv_cache_size_tokens="131072"'):
        assert label in info
    sglang = await start("sglang", block_size=4)
    assert (await get(sglang.url + "/server_info"))["page_size"] == 4  # type: ignore[index]
    assert (await get(sglang.url + "/model_info"))["is_generation"]  # type: ignore[index]
    loads = await get(sglang.url + "/v1/loads")
    assert loads["loads"][0]["max_total_num_tokens"] == 131_072  # type: ignore[index]
    llama = await start("llamacpp", max_running=4)
    assert (await get(llama.url + "/props"))["total_slots"] == 4  # type: ignore[index]
    assert [slot["is_processing"] for slot in await get(llama.url + "/slots")] == [False] * 4  # type: ignore[attr-defined]


async def test_what_was_received_can_be_read_back(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start()
    body = b'{"model":"sim",  "messages":[{"role":"user","content":"h\\u00e9"}], "max_tokens":1}'
    headers = {"X-First": "1", "x-second": "2", "Content-Type": "application/json"}
    async with http.post(engine.url + "/v1/chat/completions?q=1", data=body, headers=headers) as answer:
        assert answer.status == 200
    async with http.get(engine.url + "/sim/last") as answer:
        last = await answer.json()
    assert base64.b64decode(last["body_base64"]) == body
    assert last["path"] == "/v1/chat/completions?q=1"
    assert last["keys"] == ["model", "messages", "max_tokens"]
    names = [name for name, _ in last["headers"]]
    assert names.index("X-First") < names.index("x-second")
    async with http.get(engine.url + "/sim/last?raw=1") as answer:
        assert await answer.read() == body
    async with http.get(engine.url + "/sim/requests") as answer:
        assert [item["method"] for item in await answer.json()] == ["POST"]
    async with http.get(engine.url + "/sim/stats") as answer:
        assert await answer.json() == engine.stats()


async def test_ids_follow_the_request(start: Start, http: aiohttp.ClientSession) -> None:
    body = {"model": "sim", "messages": [user(LONG)], "max_tokens": 1}
    vllm = await start("vllm")
    answer = await post(http, vllm, "/v1/chat/completions", body, headers={"X-Request-Id": "abc"})
    assert answer["id"] == "chatcmpl-abc"
    assert cached(await post(http, vllm, "/v1/chat/completions", body)) > 0
    sglang = await start("sglang")
    assert (await chat(http, sglang, [user("hi")], rid="r9"))["id"] == "r9"
