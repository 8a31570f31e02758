"""An HTTP client that runs workloads against an OpenAI-compatible address and measures what a user would feel."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from load_tests.workloads.agents import AgentSession


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


_event = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Answer:
    """What came back for one request."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    worker: str = ""
    ttft: float | None = None
    """Seconds to the first event; ``None`` if none came."""
    error: str | None = None
    prompt_tokens: int | None = None
    """As the engine reports it, like the two below; ``None`` where it does not."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(slots=True)
class Results:
    """Everything that a run measured."""

    ttft: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: int = 0
    moved: set[str] = field(default_factory=set)
    """Sessions of which a turn was answered by another worker than the turn before."""


class Client:
    """Runs sessions; ``async with Client(url) as client``."""

    def __init__(self, url: str, model: str, timeout: float = 120.0) -> None:
        self.url = url
        self.model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._http is not None
        await self._http.close()

    async def chat(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Answer:
        """One streamed chat request; never raises for what a server or the network does."""
        assert self._http is not None
        answer = Answer()
        began = monotonic()
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            async with self._http.post(
                f"{self.url}/v1/chat/completions",
                data=msgspec.json.encode(body),
                headers={"content-type": "application/json", **(headers or {})},
            ) as response:
                answer.worker = response.headers.get("x-warmroute-worker", "")
                if response.status != 200:
                    answer.error = f"{response.status}: {(await response.text())[:200]}"
                    return answer
                await self._read(response, answer, began)
        except (aiohttp.ClientError, msgspec.DecodeError, TimeoutError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer, began: float) -> None:
        finished = False
        pieces: list[str] = []
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if answer.ttft is None:
                answer.ttft = monotonic() - began
            data = line[6:].strip()
            if data == b"[DONE]":
                finished = True
                continue
            event = _event.decode(data)
            if event.usage is not None:
                _read_usage(event.usage, answer)
            if event.error is not None:
                answer.error = str(event.error.get("message"))
            for choice in event.choices:
                if choice.delta.content:
                    pieces.append(choice.delta.content)
                for call in choice.delta.tool_calls or []:
                    _merge(answer.tool_calls, call)
        answer.content = "".join(pieces)
        if not finished and answer.error is None:
            answer.error = "the stream ended before [DONE]"

    async def run(
        self, sessions: Sequence[AgentSession], results: Results, tick: Callable[[], None] = lambda: None
    ) -> Results:
        """All sessions, each at its start time; ``tick`` is called after every request."""
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(self._session(session, results, tick))
        return results

    async def _session(self, session: AgentSession, results: Results, tick: Callable[[], None]) -> None:
        await asyncio.sleep(session.start)
        messages: list[dict[str, Any]] = [{"role": "system", "content": session.system}]
        before = ""
        calls: list[dict[str, Any]] = []
        for turn in session.turns:
            if turn.think:
                await asyncio.sleep(turn.think)
            if turn.role == "tool" and calls:
                messages.append({"role": "tool", "tool_call_id": calls[0].get("id", "call"), "content": turn.content})
            else:
                messages.append({"role": "user", "content": turn.content})
            answer = await self.chat(
                {"messages": messages, "tools": session.tools, "max_tokens": turn.max_tokens},
                {"x-session-id": session.name},
            )
            results.requests += 1
            tick()
            if answer.error is not None:
                results.errors.append(answer.error)
                return
            if answer.ttft is not None:
                results.ttft.append(answer.ttft)
            if before and answer.worker != before:
                results.moved.add(session.name)
            before, calls = answer.worker, answer.tool_calls
            reply: dict[str, Any] = {"role": "assistant", "content": answer.content or None}
            if calls:
                reply["tool_calls"] = calls
            messages.append(reply)


def _read_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.prompt_tokens = usage.get("prompt_tokens")
    answer.completion_tokens = usage.get("completion_tokens")
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _merge(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    """Add one streamed tool-call delta to the calls so far."""
    at = int(delta.get("index", 0))
    while len(calls) <= at:
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[at], delta.get("function") or {}
    call["id"] = delta.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def quantile(values: Sequence[float], share: float) -> float | None:
    """The ``share`` quantile, by nearest rank; ``None`` of nothing."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
