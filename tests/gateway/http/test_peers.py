"""What other servers count and what the gateway counts agree, in front of it and behind it, for every case of the corpus.

A request that one of two takes for two, or for none, leaves the answers on their shared connection out of step: whoever asks
next gets another's. So after each case somebody else asks through the same servers, and must get the answer to that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.config import WorkerConfig
from gateway.run import Running
from tests.conftest import Require
from tests.gateway.conftest import start_gateway
from tests.gateway.http.corpus import CASES, Case
from tests.gateway.http.peers import NGINX, Engine, Front, Nginx
from tests.gateway.talk import Raw, admin, chat, once, request, until

MODELS = "/v1/models"


@dataclass
class Row:
    """Servers in a row: maybe one in front, the gateway, maybe one behind, an engine."""

    running: Running
    engine: Engine
    front: Front | Nginx | None = None
    behind: Nginx | None = None

    @property
    def port(self) -> int:
        return self.running.port if self.front is None else self.front.port

    async def counted(self) -> tuple[int, int]:
        """(requests that the gateway answered, requests that it passed on), by its metrics."""
        text = await admin(self.running, "/metrics")

        def total(name: str) -> int:
            return sum(int(float(value)) for value in re.findall(rf"^{name}_total(?:{{.*}})? (\S+)$", text, re.M))

        answered = total("warmroute_requests") + total("warmroute_refused_requests")
        return answered, total("warmroute_routed_requests")


async def rows(kind: str, folder: Path, require: Require) -> AsyncIterator[Row]:
    """One row of servers, ended afterwards."""
    if "nginx" in kind:
        require("nginx", NGINX is not None, "apt-get install nginx-light")
    engine = Engine()
    await engine.start()
    behind = front = None
    url = engine.url
    if kind == "nginx behind":
        behind = Nginx(folder, engine.port, buffering=True)
        await behind.start()
        url = f"http://127.0.0.1:{behind.port}"
    running = await start_gateway(WorkerConfig(url, engine="generic"))
    if kind == "h11 in front":
        front = Front(running.port)
        await front.start()
    elif "in front" in kind:
        front = Nginx(folder, running.port, buffering="unbuffered" not in kind)
        await front.start()
    yield Row(running, engine, front, behind)
    for server in (front, running, behind, engine):
        if server is not None:
            await server.stop()
    assert running.gateway.defects == 0


KINDS = ["h11 behind", "h11 in front", "nginx in front", "unbuffered nginx in front", "nginx behind"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS, ids=lambda kind: kind.replace(" ", "-"))
async def row(request: Any, tmp_path_factory: pytest.TempPathFactory, require: Require) -> AsyncIterator[Row]:
    """All cases go through the same servers."""
    found = rows(request.param, tmp_path_factory.mktemp("nginx"), require)
    async for each in found:
        yield each


async def say(port: int, data: bytes) -> None:
    """Send ``data``, then a request that asks to close, and wait for the end."""
    async with await Raw.connect(port) as client:
        client.writer.write(data + request(chat(), "X-Tag: behind", "Connection: close"))
        await client.rest()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "-") for case in CASES])
async def test_all_count_the_same(row: Row, case: Case) -> None:
    answered, passed_on = await row.counted()
    seen = len(row.engine.bodies)
    in_front = row.front.answered() if row.front is not None else 0
    behind = row.behind.answered(MODELS) if row.behind is not None else 0

    await say(row.port, case.data)
    other = await once(row.port, request(chat(), f"X-Tag: {case.name}"))
    assert other.json()["tags"] == [case.name]

    await until(lambda: not row.running.gateway.exchanges)
    now_answered, now_passed_on = await row.counted()
    assert row.engine.errors == []
    bodies = row.engine.bodies[seen:]
    assert len(bodies) == now_passed_on - passed_on
    if row.front is None:
        # What the corpus says of the case itself; behind it came one request or none, and the other's.
        assert tuple(bodies[: len(case.reaches)]) == case.reaches
        assert len(bodies) == len(case.reaches) + (1 if case.closes else 2)
    else:
        front = row.front
        await until(lambda: front.answered() - in_front == now_answered - answered)
    if row.behind is not None:
        back = row.behind
        await until(lambda: back.answered(MODELS) - behind == len(bodies))


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_of_the_corpus_stays(row: Row) -> None:
    answers = await asyncio.gather(*(once(row.port, request(chat(), f"X-Tag: {n}")) for n in range(8)))
    assert [answer.json()["tags"] for answer in answers] == [[str(n)] for n in range(8)]
