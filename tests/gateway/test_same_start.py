"""Many sessions that name nothing and begin alike, as the rollouts of one task do: their first prompt is the same to the byte.

Each is a session of its own, and goes on as one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, request

SYSTEM = {"role": "system", "content": "You solve one task. " * 60}
TASK = {"role": "user", "content": "Make the tests pass."}


async def rollout(port: int, number: int, turns: int) -> list[str]:
    """Workers that answered; what the model says is another thing in each."""
    messages: list[dict[str, Any]] = [SYSTEM, TASK]
    workers = []
    async with await Raw.connect(port) as client:
        for turn in range(turns):
            answer = await client.ask(request(chat(messages=messages, max_tokens=30, seed=number)))
            assert answer.status == 200
            workers.append(answer.one("x-warmroute-worker"))
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": "user", "content": f"Result {turn} of rollout {number}: " + "x y z " * 60})
    return workers


@pytest.mark.parametrize("together", [True, False])
async def test_rollouts_of_one_task_are_sessions_of_their_own(
    gateway: Begin, engine: StartEngine, together: bool
) -> None:
    running = await gateway(*[await engine(time_scale=0.0) for _ in range(4)], policy="cache_aware")
    if together:
        found = await asyncio.gather(*(rollout(running.port, number, 6) for number in range(16)))
    else:
        # One begins after the other; all have begun before the first goes on.
        found = await staggered(running.port, 16, 6)
    turns = sorted(session.turns for session in running.sessions.all())
    last = Counter(workers[-1] for workers in found)
    moved = sum(worker != workers[0] for workers in found for worker in workers)
    what = f"{moved} of {16 * 5} turns moved; at the last turn {dict(last)}; turns of sessions {turns}"
    assert turns == [6] * 16, what
    assert moved == 0, what
    assert max(last.values()) <= 1.3 * 4, what


async def staggered(port: int, count: int, turns: int) -> list[list[str]]:
    talks: list[list[dict[str, Any]]] = [[SYSTEM, TASK] for _ in range(count)]
    found: list[list[str]] = [[] for _ in range(count)]
    async with await Raw.connect(port) as client:
        for turn in range(turns):
            for number, messages in enumerate(talks):
                answer = await client.ask(request(chat(messages=messages, max_tokens=30, seed=number)))
                found[number].append(answer.one("x-warmroute-worker"))
                messages.append(answer.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": f"Result {turn} of rollout {number}: " + "x y z " * 60})
    return found
