"""A Kubernetes API server as far as lists and watches go, with faults on order.

Objects are plain dictionaries. Every change has a resource version of its own; watches are chunked lines of JSON from a version
on, and are answered 410 (as a status, or as an event within the stream) when that version was compacted away. Selectors count
for watches as for lists: an object that stops to match is deleted for whoever watches. Pages remember the version that they are
of.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Object = dict[str, Any]
PODS, SLICES, POOLS = (
    "api/v1/pods",
    "apis/discovery.k8s.io/v1/endpointslices",
    "apis/inference.networking.k8s.io/v1/inferencepools",
)
OLD_POOLS = "apis/inference.networking.x-k8s.io/v1alpha2/inferencepools"


@dataclass
class Asked:
    """One request."""

    verb: str
    resource: str
    namespace: str | None
    query: dict[str, str]
    token: str | None


@dataclass
class Trouble:
    """What is done to some of the next requests."""

    verb: str
    times: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    hang: bool = False


@dataclass(eq=False)
class Watch:
    """One that is open."""

    resource: str
    pending: list[tuple[str, Object]] = field(default_factory=list)
    ended: bool = False
    cut: bool = False


class ApiServer:
    """``async with serving() as server``."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Object]] = {PODS: {}, SLICES: {}, POOLS: {}}
        self.log: list[tuple[int, str, str, Object | None, Object]] = []
        """Version, resource, kind of change, object before and after."""
        self.version = 100
        self.compacted = 0
        self.asked: list[Asked] = []
        self.watches: set[Watch] = set()
        self.tokens: set[str] | None = None
        """Those that are let in; ``None``: everybody."""
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs on resources."""
        self.troubles: list[Trouble] = []
        self.gone_within = False
        """Whether an expired version is told by an event and not by a status."""
        self.muted = False
        """Watches tell nothing and do not end."""
        self.forget_pages = 0
        """So many continuations are answered 410."""
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, verb: str, resource: str = "") -> int:
        """How often that was asked."""
        return sum(each.verb == verb and resource in each.resource for each in self.asked)

    # -- the truth --------------------------------------------------------------------------------------------------

    def put(self, resource: str, told: Object) -> None:
        """Create it, or change it."""
        self.version += 1
        made = deepcopy(told)
        made["metadata"]["resourceVersion"] = str(self.version)
        key = made["metadata"]["namespace"], made["metadata"]["name"]
        before = self.objects[resource].get(key)
        self.objects[resource][key] = made
        self._happened(resource, "ADDED" if before is None else "MODIFIED", before, made)

    def delete(self, resource: str, name: str, namespace: str = "llm") -> None:
        self.version += 1
        before = self.objects[resource].pop((namespace, name))
        last = deepcopy(before)
        last["metadata"]["resourceVersion"] = str(self.version)
        self._happened(resource, "DELETED", before, last)

    def _happened(self, resource: str, kind: str, before: Object | None, after: Object) -> None:
        self.log.append((self.version, resource, kind, before, after))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def compact(self) -> None:
        """Forget how it came to be as it is."""
        self.compacted = self.version
        self.log.clear()

    def touch(self) -> None:
        """Something else in the cluster happened."""
        self.version += 1

    # -- faults -----------------------------------------------------------------------------------------------------

    def trouble(self, verb: str, times: int = 1, **what: Any) -> None:
        self.troubles.append(Trouble(verb, times, **what))

    def cut_watches(self, cleanly: bool = False) -> None:
        """End those that are open: in the middle, or as if their time was over."""
        for watch in list(self.watches):
            watch.ended, watch.cut = True, not cleanly
            self.watches.discard(watch)
        self._wake()

    def bookmark(self) -> None:
        """Tell the version to whoever watches."""
        self.event("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}})

    def event(self, kind: str, told: Object) -> None:
        """Whatever a test wants to be told."""
        for watch in self.watches:
            watch.pending.append((kind, told))
        self._wake()

    # -- serving ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Away: connections are refused until it is started again, at the same port."""
        if self._runner is not None:
            self.cut_watches()
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        resource, namespace = _place(request.match_info["path"])
        verb = "watch" if request.query.get("watch") else "list"
        token = request.headers.get("authorization", "").removeprefix("Bearer ") or None
        self.asked.append(Asked(verb, resource, namespace, dict(request.query), token))
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized")
        if (verb, resource) in self.forbidden:
            return _status(403, f"cannot {verb} resource {resource}")
        if resource not in self.objects:
            return _status(404, "the server could not find the requested resource")
        for trouble in [each for each in self.troubles if each.verb == verb and each.times > 0][:1]:
            trouble.times -= 1
            await asyncio.sleep(3600 if trouble.hang else trouble.seconds)
            if trouble.status:
                return _status(trouble.status, "on order", trouble.headers)
        matches = _selector(request.query, namespace)
        return await (self._watch if verb == "watch" else self._list)(request, resource, matches)

    async def _list(self, request: web.Request, resource: str, matches: Callable[[Object], bool]) -> web.StreamResponse:
        limit, token = int(request.query.get("limit", 0)), request.query.get("continue")
        start, version = 0, self.version
        if token is not None:
            version, start = map(int, token.split("-"))
            if self.forget_pages > 0 or version < self.compacted:
                self.forget_pages -= 1
                return _status(410, "The provided continue parameter is too old")
        found = [each for _, each in sorted(self.objects[resource].items()) if matches(each)]
        page = found[start : start + limit] if limit else found
        meta: Object = {"resourceVersion": str(version)}
        if limit and start + limit < len(found):
            meta["continue"] = f"{version}-{start + limit}"
        return web.json_response({"kind": "List", "apiVersion": "v1", "metadata": meta, "items": page or None})

    async def _watch(
        self, request: web.Request, resource: str, matches: Callable[[Object], bool]
    ) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        expired = {"kind": "Status", "status": "Failure", "reason": "Expired", "code": 410, "message": "too old"}
        if seen < self.compacted and not self.gone_within:
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        watch = Watch(resource)
        self.watches.add(watch)
        end = asyncio.get_running_loop().time() + int(request.query["timeoutSeconds"])
        try:
            while not watch.ended:
                changed = self._changed
                if seen < self.compacted:
                    await _line(response, "ERROR", expired)
                    return response
                if not self.muted:
                    seen = await self._tell(response, resource, matches, seen)
                while watch.pending:
                    kind, told = watch.pending.pop(0)
                    await _line(response, kind, told)
                    seen = (
                        max(seen, int(told.get("metadata", {}).get("resourceVersion", 0)))
                        if kind == "BOOKMARK"
                        else seen
                    )
                left = end - asyncio.get_running_loop().time()
                if left <= 0 and not self.muted:
                    return response
                try:
                    await asyncio.wait_for(changed.wait(), max(0.05, left))
                except TimeoutError:
                    pass
            if watch.cut and request.transport is not None:
                request.transport.abort()
            return response
        except ConnectionError:
            return response
        finally:
            self.watches.discard(watch)

    async def _tell(
        self, response: web.StreamResponse, resource: str, matches: Callable[[Object], bool], seen: int
    ) -> int:
        for version, of, kind, before, after in [each for each in self.log if each[0] > seen]:
            seen = version
            if of != resource:
                continue
            was, fits = before is not None and matches(before), matches(after)
            if kind == "DELETED" or (was and not fits):
                if was:
                    await _line(response, "DELETED", after)
            elif fits:
                await _line(response, "MODIFIED" if was else "ADDED", after)
        return seen


async def _line(response: web.StreamResponse, kind: str, told: Object) -> None:
    """In two pieces: lines and chunks are not the same."""
    data = json.dumps({"type": kind, "object": told}).encode() + b"\n"
    await response.write(data[: len(data) // 2])
    await response.write(data[len(data) // 2 :])


def _place(path: str) -> tuple[str, str | None]:
    parts = path.split("/")
    if "namespaces" in parts:
        at = parts.index("namespaces")
        return "/".join(parts[:at] + parts[at + 2 :]), parts[at + 1]
    return path, None


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    told = {"kind": "Status", "status": "Failure", "code": code, "message": message}
    return web.json_response(told, status=code, headers=headers)


def _selector(query: Any, namespace: str | None) -> Callable[[Object], bool]:
    wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")

    def matches(told: Object) -> bool:
        meta = told["metadata"]
        labels = meta.get("labels") or {}
        return (
            namespace in (None, meta["namespace"]) and wanted.items() <= labels.items() and name in ("", meta["name"])
        )

    return matches


@asynccontextmanager
async def serving() -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


# -- objects -----------------------------------------------------------------------------------------------------------


def pod(
    name: str,
    ip: str | None = "10.0.0.1",
    port: int = 8000,
    *,
    ready: bool | None = True,
    ends: bool = False,
    uid: str | None = None,
    namespace: str = "llm",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    gates: dict[str, bool] | None = None,
    ports: list[Object] | None = None,
) -> Object:
    """A pod of vLLM's, with much that nobody reads."""
    conditions = [{"type": "PodScheduled", "status": "True"}]
    if ready is not None:
        conditions.append({"type": "Ready", "status": str(ready)})
    conditions += [{"type": gate, "status": str(value)} for gate, value in (gates or {}).items()]
    meta: Object = {
        "name": name,
        "namespace": namespace,
        "uid": uid or f"uid-of-{name}",
        "labels": {"app": "vllm", **(labels or {})},
        "annotations": annotations,
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    }
    if ends:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": meta,
        "spec": {
            "containers": [
                {"name": "engine", "ports": ports or [{"name": "api", "containerPort": port, "protocol": "TCP"}]}
            ],
            "readinessGates": [{"conditionType": gate} for gate in gates or ()],
            "nodeName": "node-1",
        },
        "status": {"phase": "Running", **({"podIP": ip} if ip else {}), "conditions": conditions},
    }


def endpoint(ip: str, uid: str = "", **conditions: bool | None) -> Object:
    told: Object = {"addresses": [ip], "conditions": {"ready": True, **conditions}}
    if uid:
        told["targetRef"] = {"kind": "Pod", "name": uid, "namespace": "llm", "uid": uid}
    return told


def endpoint_slice(
    name: str,
    *endpoints: Object,
    service: str = "engines",
    ports: list[Object] | None = None,
    family: str = "IPv4",
    namespace: str = "llm",
    labels: dict[str, str] | None = None,
) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-of-{name}",
            "labels": {"kubernetes.io/service-name": service, **(labels or {})},
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": ports if ports is not None else [{"name": "http", "port": 8000, "protocol": "TCP"}],
    }


def inference_pool(name: str, *ports: int, older: bool = False, **labels: str) -> Object:
    meta = {"name": name, "namespace": "llm", "uid": f"uid-of-{name}"}
    if older:
        return {"metadata": meta, "spec": {"selector": labels, "targetPortNumber": ports[0]}}
    told = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": meta, "spec": told}
