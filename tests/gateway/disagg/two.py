"""Two unified workers and one session between them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.config import Config
from gateway.run import Running
from gateway.workers import Target
from load_tests.engine import Engine
from tests.gateway.disagg.rig import name, text_of
from tests.gateway.talk import Response, admin, once, request, until
from tests.load_tests.engine.pairs import STORY

BUSY = 200.0
"""Requests of others that keep a home busy: it costs more than any transfer."""


@dataclass
class Two:
    """Two unified workers, one session, and an engine alone that is always right."""

    running: Running
    engines: list[Engine]
    alone: Engine
    messages: list[dict[str, Any]] = field(default_factory=list)

    def target(self, engine: Engine) -> Target:
        return self.running.fleet.workers[name(engine)].targets[0]

    def busy(self, engine: Engine, requests: float = BUSY) -> None:
        """With requests that others sent."""
        target = self.target(engine)
        target.foreign = target.busy = requests

    def body(self, stream: bool = False, **fields: Any) -> dict[str, Any]:
        body = {"model": "sim", "messages": self.messages, "max_tokens": 12, "temperature": 0, "stream": stream}
        return body | fields

    def says(self, words: str) -> None:
        self.messages.append({"role": "user", "content": words})

    async def turn(self, words: str = STORY * 4, stream: bool = False, **fields: Any) -> Response:
        """The session's next, answered rightly."""
        self.says(f"{len(self.messages)} {words}")
        body = self.body(stream, **fields)
        plain = {key: value for key, value in self.body().items() if key != "kv_transfer_params"}
        right = text_of(await once(self.alone.port, request(plain)), False)
        answer = await once(self.running.port, request(body, "X-Session-Id: s"))
        assert answer.status == 200, answer.body
        assert text_of(answer, stream) == right
        self.messages.append({"role": "assistant", "content": right})
        await until(lambda: not self.running.gateway.exchanges)
        return answer

    def split(self, answer: Response) -> tuple[Engine, Engine]:
        """Who answered, and the other."""
        at = [name(each) for each in self.engines].index(answer.one("x-warmroute-worker"))
        return self.engines[at], self.engines[1 - at]

    async def route(self, **fields: Any) -> dict[str, Any]:
        """The dry run of what the session would say next."""
        messages = [*self.messages, {"role": "user", "content": "And?"}]
        url = f"http://127.0.0.1:{self.running.admin.port}/route"
        data = json.dumps({**self.body(**fields), "messages": messages})
        async with aiohttp.ClientSession() as http, http.post(url, data=data, headers={"X-Session-Id": "s"}) as answer:
            assert answer.status == 200, await answer.text()
            told: dict[str, Any] = await answer.json()
            return told

    async def rows(self) -> dict[str, dict[str, Any]]:
        return {row["target"]: row for row in (await self.route())["candidates"]}

    async def fetches(self) -> float:
        """Requests that were told to fetch."""
        rows = (await admin(self.running, "/metrics")).splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith("warmroute_kv_fetches_total{"))


def named(engine: Engine) -> dict[str, Any]:
    """What the last request said of other engines."""
    told: dict[str, Any] = json.loads(engine.core.recorder.last_body or b"{}")
    return dict(told.get("kv_transfer_params") or {})


def calm(config: Config) -> None:
    config.probes.health = 60.0
    config.probes.load = 600.0
    config.retries.budget = 1.0
