"""Two engines that share their work, and what a gateway says to them."""

from __future__ import annotations

from typing import Any

import aiohttp

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import chat, events, post, until, user

CHAT = "/v1/chat/completions"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
STORY = "Tell me about the history of the lighthouse at the end of the world, and who kept it. " * 12


async def pair(start: Start, dialect: str = "vllm", **options: Any) -> tuple[Engine, Engine]:
    """A prefill and a decode engine of one model."""
    return (await start(dialect, role="prefill", **options), await start(dialect, role="decode", **options))


async def prefill(http: aiohttp.ClientSession, engine: Engine, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """The prefill engine's answer, as vLLM is asked for it."""
    fields = {"kv_transfer_params": PREFILL, **fields, "max_tokens": 1}
    return await chat(http, engine, messages, **fields)


async def both(
    http: aiohttp.ClientSession, p: Engine, d: Engine, messages: list[Any], **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both answered when one after the other was asked."""
    first = await prefill(http, p, messages, **fields)
    params = first["kv_transfer_params"]
    return first, await chat(http, d, messages, **{**fields, "kv_transfer_params": params})


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def told(engine: Engine) -> dict[str, Any]:
    return dict(engine.stats()["disaggregation"])


async def nothing_left(*engines: Engine, seconds: float = 5.0) -> None:
    """Every engine gets back all that it held."""

    def clean(engine: Engine) -> bool:
        stats, shared = engine.stats(), told(engine)
        held = stats["kv_blocks_used"] + stats["running"] + stats["waiting"] + stats["kv_blocks_leaked"]
        left = shared["pinned_blocks"] + shared["rooms"] + shared["receiving"] + shared["sending"]
        return not held and not left and not shared["leaked_blocks"]

    await until(lambda: all(clean(engine) for engine in engines), seconds)


__all__ = [
    "CHAT",
    "PREFILL",
    "STORY",
    "both",
    "chat",
    "events",
    "nothing_left",
    "pair",
    "post",
    "prefill",
    "text",
    "told",
]
__all__ += ["until", "user"]
