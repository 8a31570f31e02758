"""/sim/*: the engine as a test bench. Nothing here is recorded, authenticated or subject to faults."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

from aiohttp import web

from load_tests.engine.asks import integer
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


async def list_events(core: Core, call: Call) -> web.StreamResponse:
    """By rank: where its KV events are published and replayed, the next number, what was sent and is held."""
    listed = core.events.listing()
    if core.bus is not None:
        replays: Sequence[str | None] = core.bus.replay_endpoints() or [None] * len(listed)
        for entry, endpoint, replay in zip(listed, core.bus.endpoints(), replays, strict=True):
            entry |= {"endpoint": endpoint, "replay_endpoint": replay}
    return await call.json(listed)


async def order_events(core: Core, call: Call) -> web.StreamResponse:
    """{"action": drop|repeat|inject|hold|stop|resume, "rank"?}; drop has "batches" and "replayable", hold "seconds",
    inject "payload" in base64."""
    body, events = call.body, core.events
    action, rank = body.get("action"), integer(body, "rank", 0)
    if rank is not None and rank >= len(events.listing()):
        raise ApiError(400, f"there is no rank {rank} that publishes events")
    if action == "drop":
        events.drop(integer(body, "batches", 1) or 1, rank, replayable=body.get("replayable") is not False)
    elif action == "inject":
        try:
            events.inject(base64.b64decode(str(body.get("payload", "")), validate=True), rank)
        except ValueError:
            raise ApiError(400, "payload must be base64") from None
    elif action == "hold":
        seconds = body.get("seconds")
        if seconds is not None and not isinstance(seconds, int | float):
            raise ApiError(400, "seconds must be a number")
        events.hold(seconds, rank)
    elif action in ("repeat", "stop", "resume"):
        {"repeat": events.repeat, "stop": events.stop, "resume": events.resume}[action](rank)
    else:
        raise ApiError(400, "action must be one of drop, repeat, inject, hold, stop, resume")
    return await list_events(core, call)


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
        Route("GET", "/sim/events", list_events),
        Route("POST", "/sim/events", order_events),
        Route("GET", "/sim/requests", requests),
        Route("GET", "/sim/last", last),
        Route("POST", "/sim/restart", restart_engine),
    ]
