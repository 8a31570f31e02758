"""Questions over HTTP to what other engines tell of themselves."""

from __future__ import annotations

from typing import Any

import aiohttp

from load_tests.engine.disagg.side import ConnectionLost, SideError

PATIENCE = 5.0


class Web:
    """One session, opened when it is first used."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: str) -> Any:
        """JSON where it is that, otherwise text. SideError for another status than 200, or none."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE))
        try:
            async with self._session.get(url) as answer:
                if answer.status != 200:
                    raise SideError(f"{answer.status}, {await answer.text()}")
                return await answer.json() if answer.content_type == "application/json" else await answer.text()
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise ConnectionLost(f"cannot reach {url}: {error}") from None
