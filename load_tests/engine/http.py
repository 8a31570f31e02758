"""Routes of one engine, and what every request passes: recording, authentication, faults, errors in the right shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from load_tests.engine.core import Core
from load_tests.engine.errors import ApiError, error_body
from load_tests.engine.faults import BEFORE_ANSWER, DURING_ANSWER, Fault
from load_tests.engine.options import DIALECTS, Dialect
from load_tests.engine.recorder import Received
from load_tests.engine.wire import Call, encode, forever, reset_transport

Serve = Callable[[Core, Call], Awaitable[web.StreamResponse]]

MAX_BODY = 256 * 1024 * 1024
OPEN_PATHS = ("/health", "/ready", "/metrics", "/ping", "/sim/")


class Route(NamedTuple):
    """One path of one or more dialects. ``infers``: faults apply to it. ``parses``: its body is a JSON object."""

    method: str
    path: str
    serve: Serve
    dialects: tuple[Dialect, ...] = DIALECTS
    infers: bool = False
    parses: bool = True


def build(core: Core, routes: list[Route]) -> web.Application:
    """The application of one engine: what its dialect has, and 404 or 405 as a real one answers for the rest."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_middleware(core)])
    for route in routes:
        if core.options.dialect in route.dialects:
            app.router.add_route(route.method, route.path, _endpoint(core, route))
    return app


def _middleware(core: Core) -> Any:
    @web.middleware
    async def serve(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        raw = await request.read()
        if not request.path.startswith("/sim/"):
            _record(core, request, raw)
            if not _authorized(core, request):
                return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except ApiError as error:
            core.errors += 1
            return _json(error_body(core.options.dialect, request.path, error), error.status)
        except web.HTTPNotFound:
            return _unknown(core, 404, "Not Found")
        except web.HTTPMethodNotAllowed:
            return _unknown(core, 405, "Method Not Allowed")

    return serve


def _endpoint(core: Core, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        fault = core.faults.take(*BEFORE_ANSWER, *DURING_ANSWER) if route.infers else None
        body = _object(core, raw) if route.parses and request.method == "POST" else {}
        if body and not request.path.startswith("/sim/"):
            core.recorder.note_keys(body)
        call = Call(request, raw, body, fault)
        if fault is not None:
            await _before(call, fault)
        try:
            response = await route.serve(core, call)
        except ApiError as error:
            if route.infers and not error.told:
                core.connector.rejected(body)
            raise
        if route.infers and core.faults.take("lost_answer") is not None:
            reset_transport(request.transport)
            await forever()
        return response

    return answer


async def _before(call: Call, fault: Fault) -> None:
    """What happens before a byte is answered; queue_full is left to the place that queues."""
    if fault.kind == "stall_before" or (fault.kind in DURING_ANSWER[1:] and fault.after_events == 0):
        await call.strike()
    elif fault.kind == "error500":
        raise ApiError(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
    elif fault.kind == "error503":
        raise ApiError(503, "Generation is paused. Please retry after it resumes.", kind="ServiceUnavailableError")


def _object(core: Core, raw: bytes) -> dict[str, Any]:
    """The JSON object of a request; an empty body is {}."""
    if not raw:
        return {}
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        param = "body" if core.options.dialect == "vllm" else None
        raise ApiError(400, f"json_invalid: {error}", param=param, kind=_validation(core)) from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", kind=_validation(core))
    return value


def _validation(core: Core) -> str | None:
    return "Bad Request" if core.options.dialect == "vllm" else None


def _authorized(core: Core, request: web.Request) -> bool:
    """vLLM guards /v1 only; SGLang and the others all but health and metrics. Anthropic's header counts as well."""
    key = core.options.api_key
    if key is None or request.path.startswith(OPEN_PATHS):
        return True
    if core.options.dialect == "vllm" and not request.path.startswith("/v1"):
        return True
    return request.headers.get("Authorization") == f"Bearer {key}" or request.headers.get("x-api-key") == key


def _record(core: Core, request: web.Request, raw: bytes) -> None:
    headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in request.raw_headers]
    core.recorder.note(Received(request.method, request.path_qs, headers, len(raw)), raw)


def _unknown(core: Core, status: int, text: str) -> web.Response:
    if core.options.dialect == "llamacpp":
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        return _json({"error": {"code": status, "message": "File Not Found", "type": kind}}, status)
    return _json({"detail": text}, status)


def _json(value: object, status: int) -> web.Response:
    return web.Response(body=encode(value), status=status, content_type="application/json")
