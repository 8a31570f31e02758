"""What isolated tenants find of each other in vLLM's own prefix cache: nothing. Those who share find everything."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.config import Config, Secret, TenantConfig
from gateway.run import Running
from tests.real_engines.vllm.conftest import Begin, Fleet
from tests.real_engines.vllm.engine import BLOCK, MODEL, PLAIN
from tests.real_engines.vllm.talk import CHAT, address

pytestmark = pytest.mark.engines

SAME = "Everybody asks this very same and rather long question, word by word. " * 20


def change(config: Config) -> None:
    def tenant(name: str, isolation: str) -> TenantConfig:
        return TenantConfig(name, [Secret(f"key-{name}")], isolation=isolation)

    config.tenants = [tenant("a", "isolated"), tenant("b", "isolated"), tenant("c", "shared"), tenant("d", "shared")]


async def cached(running: Running, name: str, mark: str, **fields: Any) -> int:
    """Prompt tokens that the engine says it found."""
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": f"{mark} {SAME}"}],
        **fields,
    }
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(address(running) + CHAT, json=body, headers={"authorization": f"Bearer key-{name}"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] > 8 * BLOCK
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_equal_prompts_of_isolated_tenants_share_nothing_and_of_others_everything(
    gateway: Begin, engines: Fleet
) -> None:
    running = await gateway(engines(PLAIN, PLAIN)[:1], change)
    found = {name: [await cached(running, name, "one") for _ in range(2)] for name in "abcd"}
    print(f"cached tokens of two equal prompts each: {found}")
    for name in "ab":
        first, second = found[name]
        assert first < BLOCK, "nobody else's"
        assert second > 8 * BLOCK, "its own"
    assert found["c"][0] < BLOCK
    assert found["c"][1] > 8 * BLOCK
    assert found["d"][0] > 8 * BLOCK, "those who share do"


async def test_a_salt_that_a_tenant_brings_opens_nobody_else_s_cache(gateway: Begin, engines: Fleet) -> None:
    running = await gateway(engines(PLAIN, PLAIN)[:1], change)
    assert await cached(running, "a", "two", cache_salt="x") < BLOCK
    assert await cached(running, "a", "two", cache_salt="y") < BLOCK
    assert await cached(running, "a", "two", cache_salt="x") > 8 * BLOCK
    assert await cached(running, "b", "two", cache_salt="x") < BLOCK
    assert await cached(running, "c", "two", cache_salt="x") < BLOCK
