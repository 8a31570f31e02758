"""Sessions of an agent that say all that agents say, one turn at a time, and what was predicted for each turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx

from gateway.run import Running
from tests.real_engines.vllm.engine import BLOCK, MODEL
from tests.real_engines.vllm.talk import CHAT, TOOLS, Turn, address, ask, words

STARTS = ("the rules of the house", "the rules of the group", "the rules of the team")


async def ask_whole(http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]) -> Turn:
    """One request that is answered at once."""
    began = monotonic()
    response = await http.post(url + CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    told = response.json()
    usage = told["usage"]
    predicted = response.headers.get("x-warmroute-predicted-cached-tokens")
    return Turn(
        worker=response.headers.get("x-warmroute-worker", ""),
        decision=response.headers.get("x-warmroute-decision", ""),
        prompt=usage["prompt_tokens"],
        completion=usage["completion_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        predicted=None if predicted is None else int(predicted),
        ttft=monotonic() - began,
        content=told["choices"][0]["message"]["content"] or "",
    )


@dataclass(slots=True)
class Said:
    """One turn, and where its target stood then."""

    name: str
    number: int
    turn: Turn
    rung: str

    @property
    def right(self) -> bool:
        return self.turn.predicted == self.turn.cached

    @property
    def near(self) -> bool:
        """Within one block."""
        return self.turn.predicted is not None and abs(self.turn.predicted - self.turn.cached) <= BLOCK

    def __str__(self) -> str:
        turn = self.turn
        return (
            f"{self.name} {self.number:2} at {turn.worker} ({self.rung}, {turn.decision}): prompt {turn.prompt:4} "
            f"predicted {turn.predicted} reported {turn.cached}"
        )


class Dialogue:
    """An agent that starts as others do (unless ``alone``), speaks, calls tools and goes on from answers."""

    def __init__(self, name: str, alone: bool = False, start: int = 150, step: int = 60) -> None:
        self.name = name
        self.step = step
        self.random = Random(name)
        kind = self.random.randrange(len(STARTS))
        rules = name if alone else STARTS[kind]
        self.tools = TOOLS if kind == 1 else None
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{rules} {words(Random(rules), start)}"}]
        self.done = 0
        self._hear(name)

    def _hear(self, start: str = "") -> None:
        """The user speaks, or a tool does."""
        random = self.random
        text = f"{start} {words(random, random.randint(self.step // 2, self.step * 3 // 2))}"
        if self.done and random.random() < 0.3:
            # The agent's history tells a call instead of what the model said: the prompt parts from what was generated.
            name = f"call-{self.done}"
            arguments = json.dumps({"path": words(random, 2), "line": random.randrange(100)})
            call = {"id": name, "type": "function", "function": {"name": "read", "arguments": arguments}}
            self.messages[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}
            self.messages.append({"role": "tool", "tool_call_id": name, "content": text})
        elif random.random() < 0.3:
            self.messages.append(
                {"role": "user", "content": [{"type": "text", "text": part} for part in (text, "and")]}
            )
        else:
            self.messages.append({"role": "user", "content": text})

    def body(self, answer: int) -> dict[str, Any]:
        """The next request."""
        body = {"model": MODEL, "messages": self.messages, "max_tokens": answer, "temperature": 0}
        return {**body, "tools": self.tools} if self.tools else body

    async def turn(self, http: httpx.AsyncClient, running: Running, answer: int = 20) -> Said:
        """One request, every other one streamed."""
        number, headers = self.done, {"x-session-id": self.name}
        asked = ask if number % 2 else ask_whole
        turn = await asked(http, address(running), self.body(answer), headers)
        (target,) = running.fleet.workers[turn.worker].targets
        said = Said(self.name, number, turn, running.index.of(target.id).rung)
        self.done += 1
        self.messages.append({"role": "assistant", "content": turn.content})
        self._hear()
        return said


@dataclass(slots=True)
class Told:
    """All turns of a test."""

    said: list[Said] = field(default_factory=list)

    def add(self, turns: Iterable[Said]) -> None:
        self.said += turns

    @property
    def right(self) -> float:
        return sum(each.right for each in self.said) / len(self.said)

    @property
    def near(self) -> float:
        return sum(each.near for each in self.said) / len(self.said)

    @property
    def wrong(self) -> str:
        """Those that were predicted wrong, one a line."""
        return "\n".join(str(each) for each in self.said if not each.right)

    def __str__(self) -> str:
        turns = [each.turn for each in self.said]
        prompt, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
        return (
            f"{len(turns)} requests, {prompt} prompt tokens, {cached / prompt:.1%} of them cached; "
            f"predicted exactly {self.right:.1%}, within a block {self.near:.1%}"
        )


async def one_at_a_time(
    http: httpx.AsyncClient, running: Running, dialogues: list[Dialogue], turns: int, order: str
) -> Told:
    """All sessions, interleaved: each request after the answer to the one before."""
    told = Told()
    queue = [dialogue for dialogue in dialogues for _ in range(turns)]
    Random(order).shuffle(queue)
    for dialogue in queue:
        told.add([await dialogue.turn(http, running)])
    return told


async def at_once(http: httpx.AsyncClient, running: Running, dialogues: list[Dialogue], turns: int, most: int) -> Told:
    """All sessions, of which ``most`` have a request running."""
    told, free = Told(), asyncio.Semaphore(most)

    async def session(dialogue: Dialogue) -> None:
        for _ in range(turns):
            async with free:
                told.add([await dialogue.turn(http, running)])

    await asyncio.gather(*[session(dialogue) for dialogue in dialogues])
    return told
