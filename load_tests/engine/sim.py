"""/sim/*: the engine as a test bench. Nothing here is recorded, authenticated or subject to faults."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from load_tests.engine.core import Core
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import parse_fault
from load_tests.engine.http import Route
from load_tests.engine.wire import Call


async def stats(core: Core, call: Call) -> web.StreamResponse:
    return await call.json(core.stats())


async def list_faults(core: Core, call: Call) -> web.StreamResponse:
    return await call.json(core.faults.listing())


async def add_fault(core: Core, call: Call) -> web.StreamResponse:
    """Order a fault; 400 says what is wrong with it."""
    try:
        fault = parse_fault(call.body)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    if fault.kind == "refuse" and fault.count is None and fault.seconds is None:
        raise ApiError(400, "refuse without count or seconds could not be cleared over HTTP")
    core.faults.order(fault)
    return await call.json(core.faults.listing())


async def clear_faults(core: Core, call: Call) -> web.StreamResponse:
    core.faults.clear()
    return await call.json([])


async def requests(core: Core, call: Call) -> web.StreamResponse:
    """The last 1000 requests, oldest first."""
    return await call.json([received.listing() for received in core.recorder.ring])


async def last(core: Core, call: Call) -> web.StreamResponse:
    """The last request with its body in base64; ``?raw=1`` answers the body itself."""
    if call.request.query.get("raw"):
        return web.Response(body=core.recorder.last_body, content_type="application/octet-stream")
    return await call.json(core.recorder.last())


def routes(restart: Callable[[float], None]) -> list[Route]:
    """``restart`` takes the seconds for which the engine is to be away, after this answer has been sent."""

    async def restart_engine(core: Core, call: Call) -> web.StreamResponse:
        seconds = call.body.get("seconds", 0)
        if not isinstance(seconds, int | float) or seconds < 0:
            raise ApiError(400, "seconds must be a number of at least 0")
        restart(float(seconds))
        return await call.json({"restarting": True})

    return [
        Route("GET", "/sim/stats", stats),
        Route("GET", "/sim/faults", list_faults),
        Route("POST", "/sim/faults", add_fault),
        Route("DELETE", "/sim/faults", clear_faults),
        Route("GET", "/sim/requests", requests),
        Route("GET", "/sim/last", last),
        Route("POST", "/sim/restart", restart_engine),
    ]
