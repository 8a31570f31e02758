"""A start that every session shares must not herd them: on eight real (simulated) engines, over HTTP."""

import asyncio
from random import Random

import pytest

from gateway.run import Running
from load_tests.client import Client
from load_tests.engine import Engine
from load_tests.workloads.agents import words
from tests.gateway.conftest import Begin, StartEngine

ENGINES = 8
SESSIONS = 400


def body(number: int, start: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": "system", "content": start},
            {"role": "user", "content": f"Session {number} asks something of its own: " + f"{number} " * 150},
        ],
        "max_tokens": 4,
    }


def spread(values: list[int]) -> float:
    """Max over mean."""
    return max(values) * len(values) / sum(values)


async def fleet(gateway: Begin, engine: StartEngine) -> tuple[Running, list[Engine]]:
    engines = [await engine(time_scale=0.05, seed=number) for number in range(ENGINES)]
    return await gateway(*engines, policy="cache_aware"), engines


@pytest.mark.parametrize("named", [True, False], ids=["named sessions", "sessions known by their content"])
@pytest.mark.parametrize("burst", [True, False], ids=["in a burst", "one by one"])
async def test_sessions_under_one_start_spread_evenly(
    gateway: Begin, engine: StartEngine, burst: bool, named: bool
) -> None:
    running, engines = await fleet(gateway, engine)
    start = words(Random(3), 1900)
    async with Client(f"http://127.0.0.1:{running.port}", "sim") as client:

        async def ask(number: int) -> None:
            answer = await client.chat(body(number, start), {"x-session-id": f"s{number}"} if named else None)
            assert answer.error is None, answer.error

        if burst:
            await asyncio.gather(*[ask(number) for number in range(SESSIONS)])
        else:
            for number in range(SESSIONS):
                await ask(number)
    homes = [target.homes for target in running.fleet.targets.values()]
    computed = [each.stats()["computed_tokens"] for each in engines]
    print(f"burst={burst} named={named} homes={spread(homes):.3f} computed={spread(computed):.3f}")
    assert sum(homes) == SESSIONS
    assert spread(homes) < 1.3, homes
    assert spread(computed) < 1.3, computed
    cached = sum(each.stats()["cached_tokens"] for each in engines)
    prompt = sum(each.stats()["prompt_tokens"] for each in engines)
    assert cached > 0.6 * prompt, "the start is computed about once an engine"
