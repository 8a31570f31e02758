"""The refusal that takes a worker down ends its attempt once: the request is sent to one other worker, and answered once."""

from __future__ import annotations

import asyncio

from gateway.config import Config
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.scripted import EVENTS, Script, Seen, chunk
from tests.gateway.talk import chat, once, request


def slow_stream(tag: bytes) -> Script:
    async def script(seen: Seen) -> None:
        await asyncio.sleep(0.1)
        await seen.write(EVENTS)
        for number in range(4):
            await seen.write(chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%s%d"}}]}\n\n' % (tag, number)))
            await asyncio.sleep(0.02)
        await seen.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return script


async def test_a_request_is_sent_once_when_its_worker_goes_down(gateway: Begin, scripted: StartScripted) -> None:
    gone = await scripted()
    good = [await scripted(slow_stream(b"a")), await scripted(slow_stream(b"b"))]

    def calm(config: Config) -> None:
        config.probes.health = 60.0
        config.retries.budget = 1.0

    running = await gateway(gone, *good, change=calm)
    for _ in range(6):
        await once(running.port, request(chat(stream=True)))
    await gone.stop()
    for number in range(9):
        before = sum(len(each.seen) for each in good)
        answer = await once(running.port, request(chat(stream=True)))
        await asyncio.sleep(0.3)
        assert answer.status == 200
        assert (answer.body.count(b"content"), answer.body.count(b"DONE")) == (4, 1), (number, answer.body)
        assert sum(len(each.seen) for each in good) - before == 1, number


async def test_the_last_attempt_is_not_lost_to_it(gateway: Begin, scripted: StartScripted) -> None:
    gone, good = await scripted(), await scripted(slow_stream(b"a"))

    def calm(config: Config) -> None:
        config.probes.health = 60.0
        config.retries.budget = 1.0
        config.retries.attempts = 2

    running = await gateway(gone, good, change=calm)
    await gone.stop()
    for number in range(8):
        answer = await once(running.port, request(chat(stream=True)))
        assert answer.status == 200, (number, answer.body)
