"""Sessions that begin with the whole of one earlier request: a greeting that was generated once, a first step that is kept.

To the gateway the first of them go on from that one request's session, and it makes no difference to anybody.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, request

START: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a guide. " * 60},
    {"role": "user", "content": "Greet whoever comes."},
]


async def test_many_sessions_that_go_on_from_one_greeting_are_spread(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(*[await engine(time_scale=0.0) for _ in range(4)], policy="cache_aware")
    found: list[list[str]] = [[] for _ in range(16)]
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(chat(messages=START, max_tokens=20)))
        greeting = answer.json()["choices"][0]["message"]
        talks = [[*START, greeting, {"role": "user", "content": f"I am {n}. " + f"q{n} " * 200}] for n in range(16)]
        for turn in range(5):
            for number, messages in enumerate(talks):
                answer = await client.ask(request(chat(messages=messages, max_tokens=20)))
                assert answer.status == 200
                found[number].append(answer.one("x-warmroute-worker"))
                messages.append(answer.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": f"More {turn} of {number}: " + f"w{number} " * 100})
    first = Counter(workers[0] for workers in found)
    moved = sum(worker != workers[0] for workers in found for worker in workers)
    turns = sorted(session.turns for session in running.sessions.all())
    what = f"first turns at {dict(first)}, {moved} moved, turns of sessions {turns}"
    assert len(running.sessions) >= 12, what
    # Those that are taken for one session stand at one engine.
    assert max(first.values()) <= 4 + 3, what
    assert moved == 0, what
