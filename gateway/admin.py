"""The control plane: health, metrics, workers, sessions, the dry run. JSON over aiohttp, on an address of its own.

With a token configured everything but ``/healthz``, ``/readyz`` and the page's own files needs it as a bearer token; without
one the address must be loopback. Requests that a browser makes on another site's behalf are refused (`gateway.access`).
`gateway.openapi` describes all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import urandom
from typing import TYPE_CHECKING, Any

from aiohttp import web

from gateway.access import DOOR, LARGE, Access, has_body, in_json, read, read_object
from gateway.config import shown
from gateway.config_diff import fingerprints, tree
from gateway.config_reader import Secret
from gateway.door import Door
from gateway.engines import all_engines
from gateway.engines.audit import lacks
from gateway.errors import BadRequest, NotFound
from gateway.leases import LONGEST, SHORTEST
from gateway.ledger import rows
from gateway.live import Live
from gateway.openapi import DOCUMENT
from gateway.page import FOLDER, Page
from gateway.portrait import brief, whole
from gateway.prefixes import Prefixes
from gateway.reload import NoFile
from gateway.routing import draw_of
from gateway.sessions import Session
from gateway.together import ADDED as ADDED_PATH, Together
from gateway.workers import ADDED, State, Worker, WorkerSpec
from kv_index.groups import Tier
from policies.base import Role

if TYPE_CHECKING:
    from gateway.run import Running

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


class AdminSite:
    """Listeners of the control plane."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.port = 0
        self.metrics_port: int | None = None
        self._runners: list[web.AppRunner] = []
        self._doors: list[Door] = []
        self.access = Access(running)
        self._salt = urandom(16)
        self.live = Live(running)
        seat = running.seat
        self.together = None if seat is None else Together(running, seat.folder, seat.number)
        """The other processes, where there are several."""
        self._page = Page()
        self._prefixes = Prefixes(running, self.live.name)

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        config = self.running.config
        middlewares, inside = [self.access.timed, self.access.guard], [self.access.timed, self.access.inside]
        if self.together is not None:
            own = self._application(inside)
            own.router.add_get(ADDED_PATH, self.together.tell_added)
            await self._listen(own, "inside", str(self.together.path), 0)
            middlewares.append(self.together.gathered)
        self.port = await self._listen(self._application(middlewares), "admin", config.admin.host, config.admin.port)
        if config.metrics is not None:
            scraped = web.Application(middlewares=[self.access.timed, *middlewares[2:]])
            scraped.router.add_get("/metrics", self.metrics)
            self.metrics_port = await self._listen(scraped, "metrics", config.metrics.host, config.metrics.port)

    async def stop(self) -> None:
        """Stop listening."""
        await self.live.stop()
        if self.together is not None:
            await self.together.stop()
        for runner in self._runners:
            await runner.cleanup()
        self._runners.clear()
        self._doors.clear()

    def sweep(self) -> None:
        """Twice a second."""
        for door in self._doors:
            door.sweep()

    async def _listen(self, application: web.Application, name: str, host: str, port: int) -> int:
        door = application[DOOR] = Door()
        self._doors.append(door)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=2)
        await runner.setup()
        self._runners.append(runner)
        door.server = runner.server
        seat = self.running.seat
        given = None if seat is None else seat.socket(name)
        if name == "inside":
            await web.UnixSite(runner, host).start()
            return 0
        await (web.TCPSite(runner, host, port) if given is None else web.SockSite(runner, given)).start()
        return int(runner.addresses[0][1])

    def _application(self, middlewares: Sequence[Any] = ()) -> web.Application:
        application = web.Application(middlewares=middlewares, client_max_size=0)
        route = application.router
        route.add_get("/", self._page.index)
        route.add_get(FOLDER + "{name}", self._page.file)
        route.add_get("/live", self.live.serve, allow_head=False)
        route.add_get("/healthz", self.healthz)
        route.add_get("/readyz", self.readyz)
        route.add_get("/metrics", self.metrics)
        route.add_get("/openapi.json", self.openapi)
        route.add_get("/workers", self.workers)
        route.add_post("/workers", self.add_worker)
        route.add_get("/workers/{id}", self.worker)
        route.add_patch("/workers/{id}", self.change_worker)
        route.add_delete("/workers/{id}", self.remove_worker)
        route.add_post("/workers/{id}/drain", self.drain_worker)
        route.add_post("/workers/{id}/heartbeat", self.heartbeat)
        route.add_get("/sessions", self.sessions)
        route.add_get("/sessions/{id}", self.session)
        route.add_delete("/sessions/{id}", self.remove_session)
        route.add_post("/sessions/{id}/move", self.move_session)
        route.add_get("/prefixes", self.prefixes)
        route.add_get("/tenants", self.tenants)
        route.add_get("/doctor", self.doctor)
        route.add_post("/route", self.route)
        route.add_get("/config", self.config)
        route.add_get("/config/fingerprints", self.fingerprints)
        route.add_post("/config/reload", self.reload)
        return application

    # -- health and metrics -----------------------------------------------------------------------------------------

    async def healthz(self, request: web.Request) -> web.Response:
        """The process lives."""
        told = self.running.reloading.told(self.access.authorized(request))
        return in_json({"status": "ok", "config": told, "pressure": self.running.gateway.pressure.told()})

    async def readyz(self, request: web.Request) -> web.Response:
        """It can serve."""
        ready, body = self.running.gateway.own.readiness()
        return in_json(body, 200 if ready else 503)

    async def openapi(self, request: web.Request) -> web.Response:
        """What this site takes and answers."""
        return in_json(DOCUMENT)

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus exposition."""
        return web.Response(body=await self.running.metrics.exposition.read(), headers={"content-type": EXPOSITION})

    # -- workers ----------------------------------------------------------------------------------------------------

    async def workers(self, request: web.Request) -> web.Response:
        """All workers with what they are, lack and do."""
        return in_json({"workers": [self._worker(worker) for worker in self.running.fleet.workers.values()]})

    async def worker(self, request: web.Request) -> web.Response:
        """One worker."""
        return in_json(self._worker(self._find(request)))

    async def add_worker(self, request: web.Request) -> web.Response:
        """Add a worker: ``{"url", "engine"?, "role"?, "models"?, "pool"?, "api_key"?, "kv_tokens"?, "lease"?}``; it joins when
        it answers. With a lease it is known for so many seconds, unless it is heard of again."""
        body = await read_object(request)
        allowed = {"url", "engine", "role", "models", "pool", "api_key", "kv_tokens", "lease"}
        for name in body:
            if name not in allowed:
                raise BadRequest(f"unknown key {name!r}; known: {', '.join(sorted(allowed))}", param=name)
        url = body.get("url")
        if not isinstance(url, str):
            raise BadRequest("url is missing: {'url': 'http://host:port'}", param="url")
        engine = body.get("engine")
        if engine is not None and (not isinstance(engine, str) or engine not in all_engines()):
            raise BadRequest(f"engine must be one of {', '.join(all_engines())}", param="engine")
        role, pool = body.get("role"), body.get("pool")
        if role is not None and role not in tuple(Role):
            raise BadRequest(f"role must be one of {', '.join(Role)}", param="role")
        if pool is not None and not isinstance(pool, str):
            raise BadRequest("pool must be a string", param="pool")
        lease = body.get("lease")
        if lease is not None and (type(lease) not in (int, float) or not SHORTEST <= lease <= LONGEST):
            raise BadRequest(f"lease must be a number of seconds from {SHORTEST} to {LONGEST}", param="lease")
        models = body.get("models")
        if models is not None and not (isinstance(models, list) and all(isinstance(name, str) for name in models)):
            raise BadRequest("models must be a list of names", param="models")
        tokens = body.get("kv_tokens")
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0):
            raise BadRequest("kv_tokens must be a positive whole number", param="kv_tokens")
        key = body.get("api_key")
        if key is not None and not isinstance(key, str):
            raise BadRequest("api_key must be a string", param="api_key")
        try:
            spec = WorkerSpec(
                url=url,
                engine=engine,
                role=role,
                models=models,
                api_key=None if key is None else Secret(key),
                kv_tokens=tokens,
                pool=pool,
            )
        except ValueError as error:
            raise BadRequest(str(error), param="url") from None
        before = len(self.running.fleet.workers)
        worker = self.running.add_worker(spec) if lease is None else self.running.leases.grant(spec, float(lease))
        created = len(self.running.fleet.workers) > before
        if created and lease is None:
            worker.origin = ADDED
        return in_json(self._worker(worker), 201 if created else 200)

    async def heartbeat(self, request: web.Request) -> web.Response:
        """It lives: its lease begins anew."""
        worker = self._find(request)
        self.running.leases.beat(worker)
        return in_json(self._worker(worker))

    async def change_worker(self, request: web.Request) -> web.Response:
        """``{"state": "ready" | "draining"}``."""
        worker = self._find(request)
        body = await read_object(request)
        if set(body) != {"state"} or body["state"] not in ("ready", "draining"):
            raise BadRequest("what can be changed is {'state': 'ready'} or {'state': 'draining'}", param="state")
        if body["state"] == "draining":
            self.running.moving.drain(worker)
        elif worker.state is State.DRAINING:
            self.running.resume_worker(worker)
        return in_json(self._worker(worker))

    async def drain_worker(self, request: web.Request) -> web.Response:
        """Send it nothing new and give its sessions other homes, ``?over=SECONDS`` spreads that; its running requests end as
        they would. `GET /workers/{id}` tells how far it is."""
        worker = self._find(request)
        text = request.query.get("over", "0")
        if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", text):
            raise BadRequest("over must be a number of seconds, at most 99999", param="over")
        self.running.moving.drain(worker, float(text))
        return in_json(self._worker(worker), 202)

    async def remove_worker(self, request: web.Request) -> web.Response:
        """Forget it."""
        worker = self._find(request)
        self.running.remove_worker(worker)
        return in_json({"removed": worker.id, "running": worker.running})

    def _find(self, request: web.Request) -> Worker:
        wanted = request.match_info["id"]
        worker = self.running.fleet.workers.get(wanted)
        if worker is None:
            raise NotFound(f"no worker is called {wanted!r}; GET /workers lists them")
        return worker

    def _worker(self, worker: Worker) -> dict[str, Any]:
        facts = worker.facts
        return {
            "id": worker.id,
            "url": worker.url,
            "state": worker.state.value,
            "reason": worker.reason,
            "source": worker.origin,
            "lease": self.running.leases.told(worker),
            "engine": facts.engine,
            "version": facts.version,
            "role": worker.role,
            "protocol": worker.protocol,
            "pool": worker.pool_name or None,
            "models": [model.name for model in facts.models],
            "block_size": facts.block_size,
            "kv_tokens": facts.kv_tokens,
            "context_length": facts.context_length,
            "running": worker.running,
            "drain": self.running.moving.progress(worker),
            "connections": worker.pool.open,
            "idle_connections": worker.pool.idle,
            "targets": [
                {
                    "name": target.name,
                    "rank": target.rank,
                    "running": target.running,
                    "wait_seconds": round(target.waits(self.running.fleet.clock()), 6),
                    "homes": target.homes,
                    "share": target.share,
                    "breaker": target.breaker.state,
                    "breaker_reason": target.breaker.reason,
                    "holding_pages": self.running.index.radix.pages(target.id),
                    "capacity_pages": self.running.index.radix.capacity(target.id),
                    "evicted_pages": self.running.index.radix.evicted(target.id),
                    "belief": self._belief(target.id),
                    "returns": self.running.gateway.routing.says_of(target),
                    "queue": target.load_report.waiting if target.load_report else None,
                    "kv_usage": target.load_report.kv_usage if target.load_report else None,
                }
                for target in worker.targets
            ],
            "lacks": lacks(worker),
        }

    def _belief(self, target: int) -> dict[str, Any]:
        """What its holdings are taken from, and why."""
        index = self.running.index
        trust = index.of(target)
        return {
            "rung": trust.rung.value,
            "reason": trust.reason,
            "events": trust.fed,
            "whole": trust.whole,
            "batches": trust.batches,
            "cache_share": round(trust.share, 4),
            "held_tokens": {tier.name.lower(): index.blocks.tokens(target, tier) for tier in Tier}
            if trust.fed
            else None,
        }

    # -- sessions ---------------------------------------------------------------------------------------------------

    async def sessions(self, request: web.Request) -> web.Response:
        """The most recently used sessions; ``?limit=N``, at most 1,000."""
        text = request.query.get("limit", "100")
        if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= 1000:
            raise BadRequest("limit must be from 1 to 1000", param="limit")
        found = self.running.sessions.recent(int(text))
        return in_json(
            {"total": len(self.running.sessions), "sessions": [brief(self.running, session) for session in found]}
        )

    async def session(self, request: web.Request) -> web.Response:
        """One session: its turns, home and why, holdings, hits, breaks, parent and children, and whether its KV will last."""
        return in_json(whole(self.running, self._find_session(request)))

    async def remove_session(self, request: web.Request) -> web.Response:
        """Forget a session, with its sub-agents that go by its name; its next request is placed anew."""
        session = self._find_session(request)
        self.running.sessions.end(session)
        return in_json({"removed": session.key.hex()})

    async def move_session(self, request: web.Request) -> web.Response:
        """Give a session another home: ``{"to": "<target or worker>"}``, or to whom its policy prefers."""
        session = self._find_session(request)
        body = await read_object(request) if has_body(request) else {}
        if set(body) - {"to"} or not isinstance(body.get("to", ""), str):
            raise BadRequest("what can be given is {'to': '<name of a target>'}", param="to")
        self.running.moving.move(session, body.get("to"))
        return in_json(whole(self.running, session))

    def _find_session(self, request: web.Request) -> Session:
        text = request.match_info["id"]
        try:
            session = self.running.sessions.get(bytes.fromhex(text))
        except ValueError:
            session = None
        if session is None:
            raise NotFound(f"no session is called {text!r}; GET /sessions lists the recent ones")
        return session

    async def prefixes(self, request: web.Request) -> web.Response:
        """The hottest prefixes that prompts share, as a tree, with who holds them; no text of them."""
        return in_json(self._prefixes.told())

    async def tenants(self, request: web.Request) -> web.Response:
        """All tenants: what they are granted and what they use of it."""
        return in_json({"tenants": rows(self.running.gateway)})

    async def doctor(self, request: web.Request) -> web.Response:
        """Why prompts are not found in caches: findings, the costliest first."""
        doctor = self.running.gateway.doctor
        if doctor is None:
            raise NotFound("the doctor is off here: set doctor.enabled to true")
        return in_json(doctor.report())

    # -- the dry run and the configuration --------------------------------------------------------------------------

    async def route(self, request: web.Request) -> web.Response:
        """Where would this request go, and why? The body is that of the request itself; nothing changes.

        Headers are read as the data port reads them; ``?path=/v1/messages`` names another path than chat completions.
        """
        body = await read(request, LARGE)
        gateway = self.running.gateway
        path = request.query.get("path", "/v1/chat/completions").encode()
        named = {name.lower(): value for name, value in request.raw_headers}
        if self.running.config.admin.token:
            named.pop(b"authorization", None)
        key = request.headers.get("x-warmroute-tenant-key")
        if key is not None:
            named[b"authorization"] = f"Bearer {key}".encode()
        ids = await gateway.ids_for(path, body, named)
        return in_json(gateway.dry_run(path, body, named, draw_of(named.get(b"x-request-id", b"dry run")), ids))

    async def config(self, request: web.Request) -> web.Response:
        """The configuration in force, secrets hidden."""
        return in_json(shown(self.running.config))

    async def fingerprints(self, request: web.Request) -> web.Response:
        """By what another configuration's secrets are compared with those in force: 16 bits of a salted hash of each."""
        found = fingerprints(tree(self.running.config, self._salt, 2))
        return in_json({"salt": self._salt.hex(), "fingerprints": found})

    async def reload(self, request: web.Request) -> web.Response:
        """Read the configuration's file again and follow it: all of it, or, where something is wrong with it, nothing."""
        reloading = self.running.reloading
        try:
            outcome = await reloading.reload()
        except NoFile as error:
            raise web.HTTPConflict(reason=str(error)) from None
        assert outcome is not None
        if outcome.problems:
            problems = [problem._asdict() for problem in outcome.problems]
            told = {"message": "the configuration was not reloaded", "code": 400, "problems": problems}
            return in_json({"error": told}, 400)
        followed = {"outcome": outcome.outcome, "changed": outcome.changed, "generation": reloading.generation}
        return in_json({**followed, "needs_restart": reloading.needs_restart})
