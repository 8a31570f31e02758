"""Bad networks between gateway and engines, and between clients and gateway.

Whatever is dropped, delayed, reset, half closed, corrupted, slowed or cut: no request outlasts its limits, no answer but the
whole one of that request looks complete, engines that are well go on serving, and afterwards nothing is in flight or open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import Counter
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import start_gateway
from tests.gateway.fault_proxy import KINDS, FaultProxy, Kind
from tests.gateway.scripted import EVENTS, Scripted, Seen, chunk, ok
from tests.gateway.talk import Raw, Response, chat, request, settled, until

ASKED = 36
WORDS = 40
PATIENCE = 8.0
"""Much longer than all limits that are set here."""
DONE = b"data: [DONE]\n\n"


def hasty(config: Config) -> None:
    config.timeouts.connect = config.timeouts.first_byte = config.timeouts.idle = 1.5
    config.listen.head_timeout = config.listen.body_timeout = config.listen.idle = 1.5
    config.retries.attempts = 3


def said(tag: str) -> list[str]:
    return [f"{tag}-{number}" for number in range(WORDS)]


async def engine(seen: Seen) -> None:
    """Says words that only the asker of this request can expect."""
    body = json.loads(seen.body)
    words = said(body["tag"])
    if not body["stream"]:
        await seen.write(ok(json.dumps({"said": words}).encode()))
        return
    await seen.write(EVENTS)
    for word in words:
        await seen.write(chunk(b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}).encode() + b"\n\n"))
        await asyncio.sleep(0)
    await seen.write(chunk(DONE) + b"0\r\n\r\n")


def heard(answer: Response, stream: bool) -> list[str] | None:
    """The words of an answer that its client must take for complete; ``None``: it can tell that it is not."""
    if not answer.whole or answer.status != 200:
        return None
    if not stream:
        return list(json.loads(answer.body)["said"])
    events = [event for event in answer.body.split(b"\n\n") if event]
    if events[-1] != DONE.strip():
        assert b'"error"' in events[-1], events[-1]
        return None
    return [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:-1]]


def near(found: Any, expected: Any) -> bool:
    """Whether they differ by one byte at most, which nobody on the way can see."""
    one, two = json.dumps(found), json.dumps(expected)
    return len(one) == len(two) and sum(a != b for a, b in zip(one, two, strict=True)) <= 1


async def ask(port: int, tag: str, stream: bool) -> tuple[Response | None, str]:
    """One request on a connection of its own; ``None``: nothing that is an answer came in `PATIENCE` seconds."""
    try:
        async with asyncio.timeout(PATIENCE), await Raw.connect(port) as client:
            padding = "x" * 1500
            return await client.ask(request(chat(stream=stream, tag=tag, padding=padding))), tag
    except (ConnectionError, TimeoutError, asyncio.IncompleteReadError):
        return None, tag
    except (ValueError, AssertionError, asyncio.LimitOverrunError):
        # Corrupted on its way to the client, who cannot read it.
        return None, tag


async def ask_all(port: int, kind: Kind) -> Counter[str]:
    """Ask many at once, streamed and not; how each came out."""
    asked = [ask(port, f"t{number:03}", number % 2 == 0) for number in range(ASKED)]
    outcomes: Counter[str] = Counter()
    for number, (answer, tag) in enumerate(await asyncio.wait_for(asyncio.gather(*asked), 60)):
        try:
            words = None if answer is None else heard(answer, number % 2 == 0)
        except (ValueError, LookupError, AssertionError):
            # Its client cannot read it, and knows.
            assert kind == "corrupt", (tag, answer)
            words = None
        if words is not None:
            assert words == said(tag) or (kind == "corrupt" and near(words, said(tag))), (tag, words)
        outcomes["lost" if answer is None else "whole" if words is not None else "told"] += 1
    return outcomes


def sockets() -> int:
    """Open sockets of this process: the gateway's, the engines' and the proxies'."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found


class Rig:
    """Three engines, a gateway, and a proxy before each."""

    def __init__(self) -> None:
        self.engines = [Scripted(engine) for _ in range(3)]
        self.before_engines: list[FaultProxy] = []
        self.running: Running

    async def __aenter__(self) -> Rig:
        for number, each in enumerate(self.engines):
            await each.start()
            proxy = FaultProxy(each.port, seed=number)
            await proxy.start()
            self.before_engines.append(proxy)
        workers = [WorkerConfig(proxy.url, engine="generic") for proxy in self.before_engines]
        self.running = await start_gateway(*workers, change=hasty)
        self.before_gateway = FaultProxy(self.running.port, seed=9)
        await self.before_gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.before_gateway.stop()
        await self.running.stop()
        for proxy in self.before_engines:
            await proxy.stop()
        for each in self.engines:
            await each.stop()
        assert self.running.gateway.defects == 0

    async def recovers(self) -> None:
        """All is well again: everybody is served, and nothing is left of what was not."""
        for proxy in (self.before_gateway, *self.before_engines):
            proxy.kind = "none"
            proxy.drop_all()
        await settled(self.running)
        outcomes: Counter[str] = Counter()
        for _ in range(40):
            outcomes = await ask_all(self.before_gateway.port, "none")
            if outcomes["whole"] == ASKED:
                break
            # A breaker may be open still.
            await asyncio.sleep(0.25)
        assert outcomes == Counter(whole=ASKED)
        await settled(self.running)
        await until(lambda: not self.running.gateway.server.connections)


@pytest.mark.parametrize("kind", KINDS)
async def test_between_gateway_and_engines(kind: Kind) -> None:
    """Two engines of three are behind bad networks."""
    before = sockets()
    async with Rig() as rig:
        for proxy in rig.before_engines[:2]:
            proxy.kind = kind
            proxy.drop_all()
        outcomes = await ask_all(rig.running.port, kind)
        assert outcomes["lost"] == 0, outcomes
        # The third engine is well, and what did not begin to be answered goes there.
        assert outcomes["whole"] >= ASKED // 3, outcomes
        assert kind == "none" or sum(proxy.faulty for proxy in rig.before_engines) > 0
        await rig.recovers()
    await until(lambda: sockets() <= before)


@pytest.mark.parametrize("kind", KINDS)
async def test_between_clients_and_gateway(kind: Kind) -> None:
    before = sockets()
    async with Rig() as rig:
        rig.before_gateway.kind = kind
        outcomes = await ask_all(rig.before_gateway.port, kind)
        assert outcomes["whole"] >= 1, outcomes
        assert kind == "none" or rig.before_gateway.faulty > 0
        if kind in ("none", "delay", "slow"):
            assert outcomes["whole"] == ASKED, outcomes
        # Others are not touched by it.
        assert (await ask_all(rig.running.port, "none"))["whole"] == ASKED
        for seen in (seen for each in rig.engines for seen in each.seen):
            assert kind == "corrupt" or json.loads(seen.body)["tag"] in {f"t{number:03}" for number in range(ASKED)}
        await rig.recovers()
    await until(lambda: sockets() <= before)
