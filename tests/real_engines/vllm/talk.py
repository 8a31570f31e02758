"""What the tests say to engines and gateways, and what they read from the answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.run import Running
from tests.real_engines.vllm.engine import MODEL
from tests.real_engines.vllm.words import WORDS

CHAT = "/v1/chat/completions"
SECONDS = 60.0
"""How long anything that must come is waited for."""


async def until(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait for something that must come to be."""
    ends = monotonic() + seconds
    while not condition():
        assert monotonic() < ends, "it never came to be"
        await asyncio.sleep(0.02)


def words(random: Random, count: int) -> str:
    """Text of so many tokens."""
    return " ".join(random.choices(WORDS, k=count))


def address(running: Running) -> str:
    return f"http://127.0.0.1:{running.port}"


def said(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request of one message, whose answer does not end by itself."""
    message = {"role": "user", "content": text}
    return {"model": MODEL, "messages": [message], "temperature": 0, "ignore_eos": True, **fields}


def events(body: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, without ``[DONE]``."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line.strip() != b"[DONE]"]


def finish(told: list[dict[str, Any]]) -> str | None:
    """The last finish reason of a stream."""
    reasons = [choice["finish_reason"] for event in told for choice in event.get("choices", [])]
    return reasons[-1] if reasons else None


async def scraped(running: Running) -> Counter[str]:
    """The gateway's counters, each summed over its labels; also those of each outcome as ``name/outcome``."""
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"http://127.0.0.1:{running.admin.port}/metrics")).text
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value  # type: ignore[assignment]
            if "outcome" in sample.labels:
                sums[f"{sample.name}/{sample.labels['outcome']}"] += sample.value  # type: ignore[assignment]
    return sums


@dataclass(slots=True)
class Turn:
    """One answered request of a session."""

    worker: str
    decision: str
    prompt: int
    completion: int
    cached: int
    """As the engine reports it, like the two above."""
    predicted: int | None
    """Cached tokens, as the gateway predicted them when it sent the request."""
    ttft: float
    content: str

    @property
    def error(self) -> float | None:
        """How far the prediction was off, as a share of the prompt."""
        return None if self.predicted is None else abs(self.cached - self.predicted) / self.prompt


@dataclass(slots=True)
class Figures:
    """All turns of all sessions."""

    sessions: int = 0
    turns: list[Turn] = field(default_factory=list)
    events: dict[str, str] = field(default_factory=dict)
    """How predictions made from KV events compare with what engines report: by name, in words."""
    pairs: dict[str, str] = field(default_factory=dict)
    """What a prefill engine and a decode engine do together: by name, in words."""


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Turn:
    """One streamed request that must succeed."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    began, ttft, pieces = monotonic(), None, []
    async with http.stream("POST", url + CHAT, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for piece in response.aiter_bytes():
            ttft = ttft or monotonic() - began
            pieces.append(piece)
    whole = b"".join(pieces)
    assert whole.endswith(b"data: [DONE]\n\n")
    found = events(whole)
    usage = found[-1]["usage"]
    predicted = response.headers.get("x-warmroute-predicted-cached-tokens")
    assert ttft is not None
    return Turn(
        worker=response.headers.get("x-warmroute-worker", ""),
        decision=response.headers.get("x-warmroute-decision", ""),
        prompt=usage["prompt_tokens"],
        completion=usage["completion_tokens"],
        cached=usage["prompt_tokens_details"]["cached_tokens"],
        predicted=None if predicted is None else int(predicted),
        ttft=ttft,
        content="".join(choice["delta"].get("content") or "" for event in found for choice in event["choices"]),
    )


class Witness:
    """Passes bytes between a gateway and an engine and keeps those of the engine, connection by connection."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.talks: list[tuple[bytearray, bytearray]] = []
        """What each side of each connection said: the gateway, the engine."""
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Witness:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def payload(self, path: str) -> bytes:
        """The body of the answer on the only connection that asked for ``path``."""
        (said,) = [engine for gateway, engine in self.talks if gateway.startswith(b"POST " + path.encode())]
        head, _, body = bytes(said).partition(b"\r\n\r\n")
        if b"chunked" not in head.lower():
            return body
        pieces = []
        while body:
            size, _, body = body.partition(b"\r\n")
            pieces.append(body[: int(size, 16)])
            body = body[int(size, 16) + 2 :]
        return b"".join(pieces)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, engine = await asyncio.open_connection("127.0.0.1", self.port)
        talk = bytearray(), bytearray()
        self.talks.append(talk)
        await asyncio.gather(self._pass(reader, engine, talk[0], True), self._pass(there, writer, talk[1]))

    async def _passing(self, data: bytes) -> None:
        """Before the gateway's bytes reach the engine."""

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray, asks: bool = False
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                kept += data
                if asks:
                    await self._passing(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} the file",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write", "search")
]


async def converse(
    http: httpx.AsyncClient,
    url: str,
    name: str,
    turns: int,
    *,
    named: bool = True,
    figures: Figures | None = None,
    start: int = 200,
    step: int = 80,
    answer: int = 24,
) -> list[Turn]:
    """One session of an agent: each turn repeats all that was said and adds a message. ``named``: by a header."""
    random = Random(name)
    messages = [{"role": "system", "content": f"{name} {words(random, start)}"}]
    done: list[Turn] = []
    for number in range(turns):
        role = "user" if number % 3 == 0 else "tool"
        call = {} if role == "user" else {"tool_call_id": f"call-{number}"}
        messages.append({"role": role, "content": words(random, step), **call})
        body = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": answer, "temperature": 0}
        done.append(await ask(http, url, body, {"x-session-id": name} if named else None))
        messages.append({"role": "assistant", "content": done[-1].content})
    if figures is not None:
        figures.sessions += 1
        figures.turns += done
    return done
