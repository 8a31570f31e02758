"""A gateway in front of a prefill engine and a decode engine: what is asked of it, what one engine alone says to the same."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from time import monotonic
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import Config
from gateway.run import Running
from tests.real_engines.vllm.engine import MODEL, VLLM
from tests.real_engines.vllm.talk import CHAT, Witness, address, events, until, words

COMPLETIONS = "/v1/completions"
COMPUTED, PULLED, FOUND = "local_compute", "external_kv_transfer", "local_cache_hit"
"""Where an engine says that a prompt's tokens came from."""
_salts = count()


def text_of(choice: dict[str, Any]) -> str:
    """What one choice of a whole answer, or of an event, says."""
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("content") or said.get("text") or ""


@dataclass(slots=True)
class Answer:
    """A request's answer, whole or streamed, as its client reads it."""

    status: int
    text: str
    usage: dict[str, Any] | None
    told: list[dict[str, Any]]
    """The answer; of a stream its events."""
    seconds: float
    """Until the first byte of it, or the first word of a stream."""
    lasted: float
    headers: httpx.Headers

    @property
    def error(self) -> dict[str, Any] | None:
        """What went wrong, if anything."""
        found: dict[str, Any] | None = self.told[-1].get("error") if self.told else None
        return found

    @property
    def cached(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def prompt(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens"])


async def put(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = CHAT
) -> Answer:
    """Ask, whatever comes of it. Streams are asked for their usage."""
    stream = bool(body.get("stream"))
    if stream:
        body = {**body, "stream_options": {"include_usage": True}}
    began, first, whole = monotonic(), None, b""
    async with http.stream("POST", url + path, json=body, headers=headers) as response:
        async for piece in response.aiter_bytes():
            whole += piece
            if first is None and (not stream or any(map(said_of, events(whole[: whole.rfind(b"\n\n") + 2])))):
                first = monotonic() - began
    lasted = monotonic() - began
    streamed = response.headers["content-type"].startswith("text/event-stream")
    told = events(whole) if streamed else [json.loads(whole)]
    if streamed:
        assert whole.endswith(b"data: [DONE]\n\n"), whole[-200:]
        assert whole.count(b"data: [DONE]") == 1
    usages = [each["usage"] for each in told if each.get("usage")]
    assert len(usages) <= 1, usages
    text = "".join(map(said_of, told))
    usage = usages[0] if usages else None
    return Answer(response.status_code, text, usage, told, first or lasted, lasted, response.headers)


def said_of(event: dict[str, Any]) -> str:
    """What the choices of an event or an answer say."""
    return "".join(text_of(choice) for choice in event.get("choices") or [])


@dataclass
class Pair:
    """``p`` prefills and ``d`` decodes. What `p` says when it is asked directly, under a salt of its own, is right."""

    running: Running
    p: VLLM
    d: VLLM
    http: httpx.AsyncClient
    known: dict[str, Answer] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return address(self.running)

    async def ask(self, body: dict[str, Any], session: str | None = None, path: str = CHAT) -> Answer:
        """Through the gateway."""
        return await put(self.http, self.url, body, None if session is None else {"x-session-id": session}, path)

    async def right(self, body: dict[str, Any], path: str = CHAT, engine: VLLM | None = None) -> Answer:
        """What one engine alone says, computed from nothing."""
        hidden = ("stream", "kv_transfer_params")
        plain = {name: value for name, value in body.items() if name not in hidden}
        key = path + json.dumps(plain)
        if key not in self.known:
            salted = {**plain, "cache_salt": f"alone {next(_salts)} {monotonic()}"}
            self.known[key] = await put(self.http, (engine or self.p).url, salted, None, path)
            assert self.known[key].status == 200, self.known[key].told
        return self.known[key]

    async def check(
        self, body: dict[str, Any], session: str | None = None, path: str = CHAT, engine: VLLM | None = None
    ) -> Answer:
        """Ask, and have the right answer. ``engine``: who tells what is right."""
        answer = await self.ask(body, session, path)
        assert answer.status == 200, answer.told
        assert answer.error is None, answer.error
        right = await self.right(body, path, engine)
        assert answer.text == right.text, f"{answer.text!r} is not {right.text!r}"
        assert answer.usage is not None
        assert right.usage is not None
        for name in ("prompt_tokens", "completion_tokens"):
            assert answer.usage[name] == right.usage[name]
        return answer

    def ready(self, engine: VLLM) -> bool:
        return self.running.fleet.workers[self.name(engine)].state == "ready"

    def name(self, engine: VLLM) -> str:
        """What the gateway calls it, with whatever stands between."""
        return next(name for name, worker in self.running.fleet.workers.items() if worker.role == self.role(engine))

    def role(self, engine: VLLM) -> str:
        return "prefill" if engine is self.p else "decode"

    async def rows(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of one of the gateway's metrics."""
        text = (await self.http.get(f"http://127.0.0.1:{self.running.admin.port}/metrics")).text
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        ]

    async def by(self, name: str, label: str) -> Counter[str]:
        """One of the gateway's counters by one of its labels."""
        sums: Counter[str] = Counter()
        for labels, value in await self.rows(name):
            if value:
                sums[labels[label]] += int(value)
        return sums

    async def blamed(self) -> set[str]:
        """``prefill`` or ``decode``, if anything was counted against that engine."""
        found = await self.by("warmroute_worker_faults_total", "target")
        return {self.role(engine) for engine in (self.p, self.d) if found[self.name(engine)]}

    async def explained(self, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """The dry run."""
        headers = None if session is None else {"x-session-id": session}
        answer = await self.http.post(f"http://127.0.0.1:{self.running.admin.port}/route", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def running_nothing(self, seconds: float) -> None:
        """Until neither runs anything."""
        await self._none("vllm:num_requests_running", "vllm:num_requests_waiting", seconds=seconds)

    async def idle(self, seconds: float = 30.0) -> None:
        """Until neither runs anything nor keeps any KV block for anybody."""
        await self.running_nothing(seconds)
        await self._none("vllm:kv_cache_usage_perc", seconds=seconds)

    async def _none(self, *names: str, seconds: float) -> None:
        ends = monotonic() + seconds
        while True:
            told = {e.name: await asyncio.to_thread(e.metrics) for e in (self.p, self.d) if e.alive}
            left = {(at, name): each[name] for at, each in told.items() for name in names if each[name]}
            if not left:
                return
            assert monotonic() < ends, left
            await asyncio.sleep(0.1)


class Count:
    """Where the prompts' tokens came from while it was open, at each engine."""

    def __init__(self, *engines: VLLM) -> None:
        self.engines = engines

    async def __aenter__(self) -> Count:
        self.before = [await asyncio.to_thread(engine.sources) for engine in self.engines]
        return self

    async def __aexit__(self, *exc: object) -> None:
        after = [await asyncio.to_thread(engine.sources) for engine in self.engines]
        self.came = [
            {source: now[source] - before.get(source, 0) for source in now}
            for now, before in zip(after, self.before, strict=True)
        ]


class Talk:
    """One session, turn by turn; each turn's answer must be right."""

    def __init__(self, pair: Pair, name: str, *, start: int = 200, answer: int = 24, **fields: Any) -> None:
        self.pair = pair
        self.name = name
        self.random = Random(name)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name} {words(self.random, start)}"}]
        self.fields = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": answer, **fields}
        self.asked: list[dict[str, Any]] = []

    def body(self, **fields: Any) -> dict[str, Any]:
        """The next request, as it stands."""
        return {**self.fields, "messages": [*self.messages], **fields}

    def say(self, step: int = 80, role: str = "user") -> None:
        call = {"tool_call_id": "call-1"} if role == "tool" else {}
        self.messages.append({"role": role, "content": words(self.random, step), **call})

    async def ask(self, **fields: Any) -> Answer:
        """Send it."""
        self.asked.append(self.body(**fields))
        return await self.pair.check(self.asked[-1], self.name)

    async def turn(self, step: int = 80, role: str = "user", said: str = "content") -> Answer:
        """Say something, ask, and keep the answer, as what was ``said`` or thought."""
        self.say(step, role)
        answer = await self.ask()
        self.messages.append({"role": "assistant", "content": "", said: answer.text})
        return answer


class Gate(Witness):
    """Stands between the gateway and an engine. Before the next request with ``word`` in it passes, `then` is done, once."""

    def __init__(self, port: int, word: bytes) -> None:
        super().__init__(port)
        self.word = word
        self.then: Callable[[], object] | None = None

    async def _passing(self, data: bytes) -> None:
        then = self.then
        if then is not None and self.word in data:
            self.then = None
            await asyncio.to_thread(then)


def staged(policy: str = "round_robin", **more: Any) -> Callable[[Config], None]:
    """The first worker prefills, the second decodes. ``more``: fields of ``disaggregation``."""

    def change(config: Config) -> None:
        config.policy = policy
        config.workers[0].role, config.workers[1].role = "prefill", "decode"
        config.retries.budget = 1.0
        config.disaggregation.lease = 10.0
        for name, value in more.items():
            setattr(config.disaggregation, name, value)

    return change


async def recovered(pair: Pair, engine: VLLM) -> None:
    """Until the gateway uses a restarted engine again."""
    await asyncio.to_thread(engine.wait)
    await until(lambda: pair.ready(engine))
