"""Ids of Mooncake engines, while their bootstrap server is asked again."""

from __future__ import annotations

import asyncio

from aiohttp import ClientSession, web

from gateway.config import Config, WorkerConfig
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.disagg.kinds import calm
from tests.gateway.disagg.rig import Rig, story


async def test_ids_are_kept_until_there_are_others(gateway: Begin, engine: StartEngine) -> None:
    p, d = [await engine(connector="mooncake", role=role) for role in ("prefill", "decode")]

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        async with ClientSession() as http, http.get(f"http://127.0.0.1:{p.side_port}/query") as answer:
            return web.json_response(await answer.json())

    app = web.Application()
    app.router.add_get("/query", slow)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    def change(config: Config) -> None:
        calm(None)(config)
        config.probes.health = 0.1

    running = await gateway(
        WorkerConfig(p.url, role="prefill", protocol="mooncake", bootstrap=f"127.0.0.1:{runner.addresses[0][1]}"),
        WorkerConfig(d.url, role="decode", protocol="mooncake"),
        policy="pairs",
        change=change,
    )
    r = Rig(running, [p], [d], await engine(time_scale=0))
    for number in range(12):
        answer = await r.check(story(number))
        assert answer.all("x-warmroute-prefill-worker"), number
    assert await r.faults() == {}
    await runner.cleanup()
