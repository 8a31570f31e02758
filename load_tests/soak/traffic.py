"""The clients: open arrivals at random times, of several kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from time import monotonic

import aiohttp

from load_tests.soak.answers import Answer, Manner, ask
from load_tests.soak.asked import Asked, Asking
from load_tests.soak.plan import Tenant
from load_tests.soak.verdict import Verdicts

TURNS = 4
"""Of a session, at most."""
KINDS = (("stream", 0.46), ("whole", 0.2), ("session", 0.14), ("hurried", 0.08), ("slow", 0.06), ("leaver", 0.06))
"""Of arrivals, and their shares."""
PER_ARRIVAL = 1.0 + 0.14 * (TURNS - 1) * 0.75
"""Requests, on average: a session's further turns come if its last one was answered."""


class Traffic:
    """Against one gateway. Everything it starts ends before `run` and `most` return."""

    def __init__(self, url: str, tenants: list[Tenant], seed: int, verdicts: Verdicts) -> None:
        self.url = url
        self.tenants = tenants
        self.verdicts = verdicts
        self.random = Random(seed)
        self.asking = Asking(seed)
        self.http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self.running = 0

    async def close(self) -> None:
        """Its connections."""
        await self.http.close()

    async def most(self, seconds: float, clients: int) -> float:
        """What is answered in a second when so many ask again at once, after the first third of ``seconds``."""
        began = monotonic()
        counted = 0
        tenant = next(each for each in self.tenants if not each.limited)

        async def client() -> None:
            nonlocal counted
            while monotonic() < began + seconds:
                await self._one(self.asking.first(self.random.random() < 0.7), tenant, Manner())
                counted += began + seconds / 3 < monotonic() < began + seconds

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return counted / (seconds * 2 / 3)

    async def run(self, seconds: float, rate: float, going: Callable[[], bool] = lambda: True) -> None:
        """So many requests a second for so long, while ``going``; then wait for the last answers."""
        ends = monotonic() + seconds
        due = monotonic()
        names, shares = zip(*KINDS, strict=True)
        async with asyncio.TaskGroup() as group:
            while going():
                due += self.random.expovariate(rate / PER_ARRIVAL)
                if due > ends:
                    return
                await asyncio.sleep(max(0.0, due - monotonic()))
                (kind,) = self.random.choices(names, shares)
                (tenant,) = self.random.choices(self.tenants, [each.share for each in self.tenants])
                group.create_task(self._arrival(kind, tenant))

    async def _arrival(self, kind: str, tenant: Tenant) -> None:
        asked = self.asking.first(kind != "whole" and (kind != "leaver" or self.random.random() < 0.5))
        if kind == "session":
            await self._session(asked, tenant)
        elif kind == "hurried":
            seconds = self.random.uniform(0.3, 4.0)
            await self._one(asked, tenant, Manner({"x-request-timeout": f"{seconds:.2f}"}))
        elif kind == "slow":
            await self._one(asked, tenant, Manner(pause=self.random.uniform(0.02, 0.2)))
        elif kind == "leaver":
            await self._one(asked, tenant, Manner(leaves=self.random.uniform(0.005, 2.0)))
        else:
            await self._one(asked, tenant, Manner())

    async def _session(self, asked: Asked, tenant: Tenant) -> None:
        headers = {"x-session-id": f"soak-{asked.number}"}
        for _ in range(self.random.randint(2, TURNS)):
            answer = await self._one(asked, tenant, Manner(headers))
            if answer is None:
                return
            await asyncio.sleep(self.random.uniform(0.05, 0.8))
            said = {"role": "assistant", "content": answer.text}
            asked = self.asking.next([*asked.messages, said], asked.stream)

    async def _one(self, asked: Asked, tenant: Tenant, manner: Manner) -> Answer | None:
        """The answer, if it was good."""
        self.running += 1
        headers = {"authorization": f"Bearer {tenant.key}", "content-type": "application/json", **manner.headers}
        hurried = "x-request-timeout" in headers
        answer = await ask(self.http, self.url, asked, Manner(headers, manner.pause, manner.leaves))
        self.running -= 1
        return answer if self.verdicts.of(asked, answer, tenant.limited, hurried) else None
