from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine, EngineOptions

Start = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines on free ports, fast ones unless told otherwise, and kills them at the end."""
    engines: list[Engine] = []

    async def begin(dialect: str = "vllm", **options: Any) -> Engine:
        options.setdefault("time_scale", 0.02)
        engine = await Engine.start(EngineOptions(dialect=dialect, **options))  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        await engine.kill()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
