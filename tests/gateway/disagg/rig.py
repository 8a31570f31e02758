"""A gateway in front of prefill and decode engines, and what must be true of both when nothing is under way any more."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.run import Running
from gateway.workers import Target
from load_tests.engine import Engine
from tests.gateway.talk import Response, admin, chat, once, request, settled, until
from tests.load_tests.engine.pairs import STORY, told

StartRig = Callable[..., Awaitable["Rig"]]
LEASE = 1.5
"""Real seconds for which these engines keep KV for somebody; the gateway believes a little less."""
FIRST_BYTE = 1.0
"""Seconds within which a worker's answer must begin, where a test lets one stall."""


def story(number: int | str, **fields: Any) -> dict[str, Any]:
    """A chat whose prompt is some hundreds of tokens, and like no other ``number``'s."""
    fields.setdefault("max_tokens", 12)
    return chat(messages=[{"role": "user", "content": f"{number}: {STORY}"}], temperature=0, **fields)


def events_of(body: bytes) -> list[Any]:
    """The data of every SSE event, decoded; [DONE] stays a string."""
    found: list[Any] = []
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = next((line[5:].strip() for line in block.split("\n") if line.startswith("data:")), None)
        if data is not None:
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def text_of(answer: Response, stream: bool) -> str:
    """What the assistant said in a chat."""
    if not stream:
        return str(answer.json()["choices"][0]["message"]["content"] or "")
    said = ""
    for event in events_of(answer.body):
        if event != "[DONE]":
            assert "error" not in event, event
            said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return said


@dataclass
class Rig:
    """``alone`` is a unified engine that the gateway does not know: what it says is right."""

    running: Running
    prefills: list[Engine]
    decodes: list[Engine]
    alone: Engine
    asked: dict[str, str] = field(default_factory=dict)

    @property
    def p(self) -> Engine:
        return self.prefills[0]

    @property
    def d(self) -> Engine:
        return self.decodes[0]

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefills, *self.decodes]

    def target(self, engine: Engine) -> Target:
        return self.running.fleet.workers[name(engine)].targets[0]

    async def ask(self, body: dict[str, Any], *lines: str, path: str = "/v1/chat/completions") -> Response:
        """Through the gateway."""
        return await once(self.running.port, request(body, *lines, path=path))

    async def right(self, body: dict[str, Any]) -> str:
        """What one engine alone says to the chat ``body``."""
        plain = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        key = json.dumps(plain)
        if key not in self.asked:
            answer = await once(self.alone.port, request(plain))
            assert answer.status == 200, answer.body
            self.asked[key] = text_of(answer, False)
        return self.asked[key]

    async def check(self, body: dict[str, Any], *lines: str) -> Response:
        """Ask, and have the right answer."""
        answer = await self.ask(body, *lines)
        assert answer.status == 200, (answer.status, answer.body)
        assert answer.whole
        assert text_of(answer, bool(body.get("stream"))) == await self.right(body)
        return answer

    async def faults(self) -> dict[tuple[str, str], float]:
        """(target, kind) -> what was counted against it."""
        return {
            (labels["target"], labels["kind"]): value
            for labels, value in await self.samples("warmroute_worker_faults_total")
        }

    async def blamed(self) -> set[str]:
        """Targets that anything was counted against."""
        return {target for target, _ in await self.faults()}

    async def samples(self, wanted: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of a metric, where it is not 0."""
        found = await admin(self.running, "/metrics")
        return [
            (sample.labels, sample.value)
            for family in text_string_to_metric_families(found)
            for sample in family.samples
            if sample.name == wanted and sample.value
        ]

    async def breakers(self) -> dict[str, str]:
        rows = (await admin(self.running, "/workers"))["workers"]
        return {target["name"]: target["breaker"] for row in rows for target in row["targets"]}

    async def nothing_left(self, seconds: float = 15.0, engines: list[Engine] | None = None) -> None:
        """Neither in the gateway nor in an engine."""
        gateway = self.running.gateway
        await until(lambda: not gateway.exchanges, seconds)
        await until(lambda: not gateway.pairs.lingering and not gateway.pairs._notices, seconds)
        await settled(self.running)
        for target in self.running.fleet.targets.values():
            await until(lambda target=target: not target.busy and not target.wait, seconds)  # type: ignore[misc]
            assert (target.running, target.active, target.charged, target.ahead) == (0, 0, 0, {}), target.name
        assert [session.running for session in gateway.sessions.recent(10_000) if session.running] == []
        clean = self.engines if engines is None else engines
        await until(lambda: all(not held(engine) for engine in clean), seconds)


def name(engine: Engine) -> str:
    """Its name in the gateway."""
    return f"127.0.0.1:{engine.port}"


def held(engine: Engine) -> dict[str, int]:
    """What an engine holds for anybody, by what it is; empty where there is nothing."""
    stats, shared = engine.stats(), told(engine)
    counts = {key: stats[key] for key in ("kv_blocks_used", "running", "waiting", "kv_blocks_leaked")}
    counts |= {key: shared[key] for key in ("pinned_blocks", "leaked_blocks", "rooms", "receiving", "sending")}
    return {key: value for key, value in counts.items() if value}
