"""One request over HTTP and what became of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from load_tests.soak.asked import Asked

LIMIT_SECONDS = 150.0
"""After which a request counts as lost: more than the queue, an engine and a stall may take together."""


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds on the monotonic clock."""

    began: float
    ended: float = 0.0
    status: int | None = None
    """``None``: no answer began."""
    refused: str | None = None
    """By which rule, if a rule turned it away."""
    worker: str = ""
    id: str = ""
    text: str = ""
    generated: int | None = None
    """Tokens, as the engine reports them."""
    whole: bool = False
    """The answer came to its end."""
    left: bool = False
    """The client left of its own will."""
    first: float | None = None
    """Seconds after which something of the content came; ``None``: it did not."""
    retry_after: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves."""

    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds before each piece that it reads."""
    leaves: float | None = None
    """Seconds after which it leaves."""


async def ask(http: aiohttp.ClientSession, url: str, asked: Asked, manner: Manner) -> Answer:
    """Ask, and read all of the answer. Never raises for what a server or the network does."""
    answer = Answer(monotonic())
    try:
        async with asyncio.timeout(manner.leaves or LIMIT_SECONDS):
            async with http.post(
                f"{url}/v1/chat/completions", data=msgspec.json.encode(asked.body()), headers=manner.headers
            ) as response:
                answer.status = response.status
                answer.worker = response.headers.get("x-warmroute-worker", "").split("#")[0]
                answer.refused = response.headers.get("x-warmroute-refused")
                answer.retry_after = response.headers.get("retry-after")
                if response.status != 200:
                    answer.error = (await response.text())[:300]
                    answer.whole = True
                elif asked.stream:
                    await _stream(response, answer, manner.pause)
                else:
                    _whole(msgspec.json.decode(await response.read()), answer)
    except TimeoutError:
        answer.left = manner.leaves is not None
        answer.error = f"nothing for {LIMIT_SECONDS:.0f} s"
    except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended = monotonic()
    return answer


def _whole(told: dict[str, Any], answer: Answer) -> None:
    (choice,) = told["choices"]
    answer.id, answer.text = told["id"], choice["message"]["content"]
    answer.generated = told["usage"]["completion_tokens"]
    answer.first, answer.whole = monotonic() - answer.began, True


async def _stream(response: aiohttp.ClientResponse, answer: Answer, pause: float) -> None:
    ids: set[str] = set()
    pieces: list[str] = []
    async for line in response.content:
        if pause:
            await asyncio.sleep(pause)
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            answer.whole = answer.error is None
            continue
        told = msgspec.json.decode(data)
        if "error" in told:
            answer.error = str(told["error"])[:300]
            continue
        ids.add(told["id"])
        if told.get("usage"):
            answer.generated = told["usage"]["completion_tokens"]
        for choice in told["choices"]:
            if choice["delta"].get("content"):
                if answer.first is None:
                    answer.first = monotonic() - answer.began
                pieces.append(choice["delta"]["content"])
    answer.text = "".join(pieces)
    answer.id = ids.pop() if len(ids) == 1 else f"{len(ids)} ids in one stream"
