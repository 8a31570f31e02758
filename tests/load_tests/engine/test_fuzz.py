"""Whatever a body holds, the engine answers 2xx or 4xx, and goes on working."""

from __future__ import annotations

from random import Random
from typing import Any

import aiohttp
import pytest

from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import WEATHER, chat, user

ODD: list[Any] = [
    None, True, 0, -1, 3, 2**40, 1.5, "", "x", "required", [], {}, [None], [0], [-5], [2**70], [[]], [[1, -1]], ["a"], [{}],
    {"type": "function"}, {"type": "tool"}, {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": 3}, {"function": "f"}, {"function": {"name": 7}}, [{"role": "user"}],
    [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": [None, {"text": 5}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}, user("x")],
    [{"role": "assistant", "tool_calls": 5}], [{"role": "assistant", "tool_calls": [5]}], [WEATHER], [{"name": "f"}],
    [{"type": "function", "name": "f", "parameters": 4}], [{"type": "function_call"}], [{"type": "message"}],
    [{"role": "user", "content": [{"type": "tool_use", "input": 5}, {"type": "tool_result", "content": 5}]}],
    {"include_usage": 1}, {"max_new_tokens": "x"}, {"stop": [5], "n": 2}, {"stop": 5}, ["\ud83d\ude00"], "<|im_end|>",
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "array", "minItems": "x", "items": 3}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3, "type": ["object"]}}}],
]  # fmt: skip
KEYS = {
    "/v1/chat/completions": ["messages", "model", "stream", "n", "max_tokens", "stop", "tools", "tool_choice", "seed",
        "response_format", "temperature", "stream_options", "cache_salt", "min_tokens", "session_id", "rid", "input_ids"],
    "/v1/completions": ["prompt", "max_tokens", "stream", "n", "stop", "seed"],
    "/v1/responses": ["input", "instructions", "tools", "tool_choice", "previous_response_id", "store", "stream"],
    "/v1/messages": ["messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"],
    "/v1/messages/count_tokens": ["messages", "system", "tools"],
    "/v1/embeddings": ["input", "dimensions", "encoding_format"],
    "/v1/rerank": ["query", "documents", "top_n"],
    "/v1/score": ["query", "items", "text_1", "text_2"],
    "/generate": ["text", "input_ids", "sampling_params", "stream", "rid", "lora_path", "session_id"],
    "/tokenize": ["prompt", "messages", "tools", "add_generation_prompt"],
    "/detokenize": ["tokens"],
    "/close_session": ["session_id"],
    "/abort_request": ["rid", "abort_all"],
    "/sim/faults": ["kind", "count", "after_events", "seconds"],
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("hi")], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [user("hi")], "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v1/score": {"query": "q", "items": ["d"]},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 3}},
    "/tokenize": {"prompt": "hi"},
}


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("path", KEYS)
async def test_odd_bodies(start: Start, http: aiohttp.ClientSession, dialect: str, path: str) -> None:
    engine = await start(dialect, time_scale=0.0, context_length=256)
    random = Random(path + dialect)
    bodies = [{**GOOD.get(path, {}), key: value} for key in KEYS[path] for value in ODD]
    bodies += [
        {key: random.choice(ODD) for key in random.sample(KEYS[path], min(2, len(KEYS[path])))} for _ in range(60)
    ]
    for body in bodies:
        async with http.post(engine.url + path, json=body) as answer:
            await answer.read()
            assert answer.status < 500, (body, await answer.text())
    engine.faults.clear()
    await chat(http, engine, [user("hi")])
    stats = engine.stats()
    assert (stats["running"], stats["waiting"], stats["kv_blocks_leaked"]) == (0, 0, 0)
