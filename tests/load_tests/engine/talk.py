"""What the tests say to an engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from load_tests.engine import Engine

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
LONG = "You are a careful assistant who answers briefly. " * 12


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def post(
    http: aiohttp.ClientSession, engine: Engine, path: str, body: dict[str, Any], **more: Any
) -> dict[str, Any]:
    async with http.post(engine.url + path, json=body, **more) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        return json.loads(text)  # type: ignore[no-any-return]


async def chat(http: aiohttp.ClientSession, engine: Engine, messages: list[Any], **fields: Any) -> dict[str, Any]:
    return await post(http, engine, "/v1/chat/completions", {"model": "sim", "messages": messages, **fields})


async def events(http: aiohttp.ClientSession, engine: Engine, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every SSE event, decoded; [DONE] stays a string."""
    async with http.post(engine.url + path, json={**body, "stream": True}) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
    found: list[Any] = []
    for block in text.split("\n\n")[:-1]:
        data = next(line[6:] for line in block.split("\n") if line.startswith("data: "))
        found.append(data if data == "[DONE]" else json.loads(data))
    assert text.endswith("\n\n")
    return found


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for something that must come to be."""
    for _ in range(int(seconds * 200)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")
