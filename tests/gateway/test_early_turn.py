"""A client goes on as soon as it has read ``[DONE]``; its engine closes the answer a moment later.

A busy engine's event loop sends the last bytes of the framing some ten milliseconds after the last event. Agents whose tools
are quick have sent the next turn by then: found by its content, it is a session of its own.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import EVENTS, Seen, chunk
from tests.gateway.talk import Raw, chat, request

TEXT = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"done"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


async def late(seen: Seen) -> None:
    """The answer is complete; its framing is not, for a moment."""
    await seen.write(EVENTS + chunk(TEXT) + chunk(STOP) + chunk(DONE))
    await asyncio.sleep(0.05)
    await seen.write(b"0\r\n\r\n")


@pytest.mark.parametrize("lines", [[], ["x-session-id: s"]], ids=["content", "named"])
async def test_a_turn_that_comes_before_the_framing_of_the_last_ends_is_of_its_session(
    gateway: Begin, scripted: StartScripted, lines: list[str]
) -> None:
    workers = [await scripted(late) for _ in range(4)]
    running = await gateway(*workers, policy="cache_aware")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "do it " * 60}]
    seen = []
    clients = [await Raw.connect(running.port) for _ in range(6)]
    for turn, client in enumerate(clients):
        await client.send(request(chat(messages=messages, stream=True), *lines))
        head = await client.head()
        seen.append(dict(head.fields)["x-warmroute-worker"])
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
        messages.append({"role": "assistant", "content": "done"})
        messages.append({"role": "user", "content": json.dumps({"turn": turn, "words": "more words " * 30})})
    await asyncio.sleep(0.2)
    for client in clients:
        client.vanish()
    turns = [session.turns for session in running.sessions.all()]
    assert (turns, len(set(seen))) == ([6], 1), (turns, seen)
