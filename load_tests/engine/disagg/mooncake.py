"""vLLM's Mooncake connector: both engines are asked at once, under a transfer id of the caller's own.

The decode engine learns from the prefill engine's bootstrap server how to reach it, and waits there until the KV is
ready. The prefill engine keeps it for ``blocks_ttl`` and says nothing of it in its answer; only what ended by length is
kept. (vLLM 0.33, distributed/kv_transfer/kv_connector/v1/mooncake.)
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from load_tests.engine.disagg.connector import JSON
from load_tests.engine.disagg.pull import PullConnector, PullLink, Source
from load_tests.engine.disagg.side import SideError, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.disagg.web import Web
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.work import Work

NAMES = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")


class Transfer(Source):
    """What a decode engine is told: whom to ask, and for what."""

    def __init__(self, params: JSON) -> None:
        self.engine_id = str(params["remote_engine_id"])
        self.bootstrap = str(params["remote_bootstrap_addr"]).rstrip("/")
        self.id = str(params["transfer_id"])


class Registry:
    """The bootstrap server: ``GET /query`` tells of every rank, ``POST /register`` adds one."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        self.workers: dict[str, dict[str, Any]] = {}
        self._host = host
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """OSError if the port is taken; ``port`` is the real one afterwards."""
        app = web.Application()
        app.router.add_get("/query", self._query)
        app.router.add_post("/register", self._register)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def add(self, rank: int, engine_id: str, address: str, tp_rank: int = 0, pp_rank: int = 0) -> None:
        """ValueError if the rank is another engine's."""
        entry = self.workers.setdefault(str(rank), {"engine_id": engine_id, "worker_addr": {}})
        if entry["engine_id"] != engine_id:
            expected = entry["engine_id"]
            raise ValueError(f"Engine ID mismatch for dp_rank={rank}: expected {expected}, got {engine_id}")
        entry["worker_addr"].setdefault(str(tp_rank), {})[str(pp_rank)] = address

    async def _query(self, request: web.Request) -> web.Response:
        return web.json_response(self.workers)

    async def _register(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            self.add(body["dp_rank"], body["engine_id"], body["addr"], body["tp_rank"], body["pp_rank"])
        except (ValueError, KeyError, TypeError) as error:
            return web.json_response({"detail": str(error)}, status=400)
        return web.json_response({"status": "ok"})


class MooncakeConnector(PullConnector):
    """``port`` is that of the bootstrap server; KV goes over another, which that one tells of."""

    name = "mooncake"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic, 0)
        self._registry = Registry(options.host, port)
        self._web = Web()
        self._awaited: dict[str, list[asyncio.Event]] = {}

    @property
    def port(self) -> int:  # type: ignore[override]
        return self._registry.port

    async def open(self) -> None:
        await self.side.open()
        for rank in range(self.options.ranks):
            own = self.engine_id if self.options.ranks == 1 else f"{self.engine_id}_dp{rank}"
            self._registry.add(rank, own, f"tcp://{self.options.host}:{self.side.port}")
        await self._registry.open()

    async def close(self) -> None:
        await self._registry.close()
        await super().close()
        await self._web.close()

    def rooms(self) -> int:
        return sum(len(events) for events in self._awaited.values())

    def source_of(self, params: JSON) -> Source | None:
        if not params.get("do_remote_prefill") or not all(params.get(name) for name in NAMES):
            return None
        return Transfer(params)

    def offered(self, params: JSON, source: Source, tokens: int, hit: int) -> int:
        return tokens

    def keep(self, link: PullLink, work: Work) -> bool:
        name = link.params.get("transfer_id")
        job, index = work.owner
        if not link.params.get("do_remote_decode") or not name or job.reason(index) != "length":
            return False
        if self.forgotten():
            return False
        self.pins.keep(str(name), work, link.rank.driver, self.options.blocks_ttl)
        for event in self._awaited.get(str(name), ()):
            event.set()
        return True

    async def pull(self, source: Source, work: Work, start: int, end: int) -> list[int]:
        assert isinstance(source, Transfer)
        return await self._ask(source, start, end, self.seconds(end - start))

    async def pulled(self, source: Source) -> None:
        """Nothing: whoever gave it knows."""

    async def notify(self, source: Source) -> None:
        """Pull nothing, which frees it as well."""
        assert isinstance(source, Transfer)
        if self.note_lost():
            return
        try:
            source.users = 1
            await self._ask(source, 0, 0, 0.0)
        except SideError:
            self.traffic.lost_notes += 1

    async def _ask(self, source: Transfer, start: int, end: int, seconds: float) -> list[int]:
        known = await self._web.get(f"{source.bootstrap}/query")
        entries = [entry for entry in known.values() if entry["engine_id"] == source.engine_id]
        if not entries:
            text = f"remote engine_id {source.engine_id} not found from bootstrap server {source.bootstrap}"
            raise SideError(text)
        where = urlsplit(entries[0]["worker_addr"]["0"]["0"])
        last = source.users == 1
        async with connect(where.hostname or "", where.port or 0) as talk:
            answer = await talk.ask("pull", id=source.id, start=start, end=end, seconds=seconds, last=last)
        return [int(token) for token in answer["tokens"]]

    async def answer(self, question: JSON) -> JSON:
        if question.get("verb") != "pull":
            raise SideError(f"unknown verb {question.get('verb')!r}")
        name = question["id"]
        await self._ready(name)
        empty = question["start"] == question["end"]
        tokens = [] if empty else await self.give(name, question["start"], question["end"], question["seconds"])
        if question["last"]:
            self.pins.release(name)
        return {"tokens": tokens}

    async def _ready(self, name: str) -> None:
        """Until the request of that transfer has been computed. SideError when that takes too long."""
        if self.pins.get(name) is not None:
            return
        event = asyncio.Event()
        self._awaited.setdefault(name, []).append(event)
        try:
            await asyncio.wait_for(event.wait(), self.options.blocks_ttl)
        except TimeoutError:
            raise SideError("Timeout waiting for P side ready.") from None
        finally:
            self._awaited[name].remove(event)
            if not self._awaited[name]:
                del self._awaited[name]
