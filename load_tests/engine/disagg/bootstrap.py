"""SGLang's bootstrap server: where a decode engine learns how to reach the ranks of a prefill engine.

    GET  /route?prefill_dp_rank=&prefill_cp_rank=&target_tp_rank=&target_pp_rank=   -1 in all: what the engine is like
    PUT  /route              a rank registers itself
    POST /register_dp_rank   {"bootstrap_room", "dp_rank"}
    POST /query_dp_ranks     {"bootstrap_rooms": ["123"]} -> {"123": 0}
    GET  /health             OK

(SGLang 0.5.23, disaggregation/common/conn.py.)
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from load_tests.engine.disagg.side import SideError
from load_tests.engine.disagg.web import Web
from load_tests.engine.options import EngineOptions

# Rooms are forgotten after this many seconds, and the oldest beyond this many.
ROOM_SECONDS = 120.0
MOST_ROOMS = 10_000
FIELDS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What a decode engine has to know of a prefill engine."""

    dp_size: int
    page_size: int
    follow_bootstrap_room: bool


class BootstrapServer:
    """``ranks`` is filled once the engine's own side channel listens; until then it is not ready."""

    def __init__(self, options: EngineOptions, port: int) -> None:
        self._options = options
        self.port = port
        self.ranks: dict[int, tuple[str, int]] = {}
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        """OSError if the port is taken; ``port`` is the real one afterwards."""
        app = web.Application()
        app.router.add_route("*", "/route", self._route)
        app.router.add_post("/register_dp_rank", self._register)
        app.router.add_post("/query_dp_ranks", self._query)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._options.host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def rank_of(self, room: int) -> int | None:
        """The rank that registered a room; None if none did, or too long ago."""
        rank, since = self._rooms.get(room, (0, 0.0))
        return rank if time.monotonic() - since < ROOM_SECONDS and room in self._rooms else None

    def register(self, room: int, rank: int) -> None:
        self._rooms[room] = (rank, time.monotonic())
        self._rooms.move_to_end(room)
        while len(self._rooms) > MOST_ROOMS:
            self._rooms.popitem(last=False)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _route(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            return await self._put(request)
        if request.method != "GET":
            return web.Response(text="Method not allowed", status=405, content_type="application/json")
        given = [request.query.get(name) for name in FIELDS]
        if not all(given):
            return web.Response(text="Missing inputs for bootstrap server.", status=400)
        if len(self.ranks) < self._options.ranks:
            text = f"Prefill server not fully registered yet ({len(self.ranks)} workers registered)."
            return web.Response(text=text, status=503)
        try:
            wanted = [int(value or 0) for value in given]
        except ValueError:
            return web.Response(text="Missing inputs for bootstrap server.", status=400)
        if wanted == [-1] * 4:
            return web.json_response(self._info())
        dp, cp, tp, pp = wanted
        if dp not in self.ranks or (cp, tp, pp) != (0, 0, 0):
            text = f"Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            return web.Response(text=text, status=404)
        host, port = self.ranks[dp]
        return web.json_response({"rank_ip": host, "rank_port": port})

    def _info(self) -> dict[str, Any]:
        return {
            "attn_tp_size": 1,
            "attn_cp_size": 1,
            "dp_size": self._options.ranks,
            "pp_size": 1,
            "page_size": self._options.block_size,
            "kv_cache_dtype": "auto",
            "follow_bootstrap_room": True,
            "enable_dsa_cache_layer_split": False,
            "prefill_http_port": self._options.port or None,
            "target_tp_rank": None,
            "target_tp_ranks": None,
            "target_cp_ranks": None,
            "target_pp_ranks": None,
            "required_dst_info_num": None,
            "required_prefill_response_num": None,
        }

    async def _put(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            group = "attn_dp_rank" if body["system_dp_size"] == 1 else "system_dp_rank"
            self.ranks[int(body[group])] = (str(body["rank_ip"]), int(body["rank_port"]))
        except (ValueError, KeyError, TypeError):
            return web.Response(text="bad registration", status=400)
        return web.Response(text="OK")

    async def _register(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
            self.register(int(body["bootstrap_room"]), int(body["dp_rank"]))
        except (ValueError, KeyError, TypeError):
            return web.Response(text="bad registration", status=400)
        return web.Response(text="OK")

    async def _query(self, request: web.Request) -> web.Response:
        try:
            rooms = [int(room) for room in (await request.json())["bootstrap_rooms"]]
        except (ValueError, KeyError, TypeError):
            return web.Response(text="bad query", status=400)
        found = {str(room): self.rank_of(room) for room in rooms}
        return web.json_response({room: rank for room, rank in found.items() if rank is not None})


class BootstrapClient(Web):
    """A decode engine's questions to the bootstrap servers of prefill engines."""

    async def healthy(self, host: str, port: int) -> bool:
        try:
            await self.get(f"http://{host}:{port}/health")
        except SideError:
            return False
        return True

    async def info(self, host: str, port: int) -> PrefillInfo:
        """SideError if it is not there, or not ready."""
        answer = await self._route(host, port, -1, -1, -1, -1)
        return PrefillInfo(answer["dp_size"], answer["page_size"], answer["follow_bootstrap_room"])

    async def address(self, host: str, port: int, rank: int) -> tuple[str, int]:
        """Where a rank's side channel listens."""
        answer = await self._route(host, port, rank, 0, 0, 0)
        return answer["rank_ip"], answer["rank_port"]

    async def _route(self, host: str, port: int, *values: int) -> dict[str, Any]:
        query = "&".join(f"{name}={value}" for name, value in zip(FIELDS, values, strict=True))
        answer = await self.get(f"http://{host}:{port}/route?{query}")
        if not isinstance(answer, dict):
            raise SideError("the answer is no object")
        return answer
