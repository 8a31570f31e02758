"""What happens to the engines and to the configuration meanwhile; by chance, the same for the same seed."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from load_tests.places import EnginePlace, GatewayPlace, PlaceError
from load_tests.soak.plan import POLICIES, Plan, Tenant, Written
from load_tests.soak.verdict import Harm

SETTLED = 15.0
"""Seconds after which the gateway has seen a file that changed, whatever else the machine does."""


class Chaos:
    """See the module's head. ``guests`` are engines that the configuration does not list."""

    def __init__(
        self,
        plan: Plan,
        gateway: GatewayPlace,
        listed: list[EnginePlace],
        guests: list[EnginePlace],
        written: Written,
        rotated: Tenant,
        harm: Harm,
    ) -> None:
        self.plan = plan
        self.gateway = gateway
        self.listed = listed
        self.guests = guests
        self.written = written
        self.rotated = rotated
        self.harm = harm
        self.random = Random(plan.seed)
        self.did: Counter[str] = Counter()
        self.failed: list[str] = []
        """What did not do what it should."""
        self._taken: set[EnginePlace] = set()
        self._keys = 0

    async def run(self) -> None:
        """Until it is cancelled; then `heal`."""
        deeds: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._kill, 3.0),
            (self._stall, 3.0),
            (self._leave, 2.0),
            (self._reload, 2.0),
            (self._misreload, 0.7),
            (self._rotate, 1.0),
            (self._hang_up, 0.7),
        ]
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self.random.expovariate(1.0 / self.plan.pause))
                (deed,) = self.random.choices([each for each, _ in deeds], [weight for _, weight in deeds])
                if deed in (self._kill, self._stall, self._leave):
                    group.create_task(self._done(deed))
                else:
                    await self._done(deed)

    async def heal(self) -> None:
        """What is harmed still is whole again."""
        for engine in self._taken:
            engine.send(signal.SIGCONT)
            if not engine.alive:
                await engine.start()

    async def _done(self, deed: Callable[[], Awaitable[None]]) -> None:
        try:
            await deed()
        except PlaceError as error:
            self.failed.append(str(error))

    # -- engines ----------------------------------------------------------------------------------------------------

    def _take(self, engines: list[EnginePlace]) -> EnginePlace | None:
        """One to which something may be done now."""
        whole = [engine for engine in engines if engine not in self._taken]
        if not whole or len(self._taken) >= self.plan.harmed:
            return None
        engine = self.random.choice(whole)
        self._taken.add(engine)
        return engine

    def _whole(self, engine: EnginePlace) -> None:
        self._taken.discard(engine)
        self.harm.ends(engine.worker)

    async def _kill(self) -> None:
        engine = self._take(self.listed + self.guests)
        if engine is None:
            return
        self.harm.begins(engine.worker)
        self.did["engines killed"] += 1
        engine.kill()
        await asyncio.sleep(self.random.uniform(0.2, 6.0))
        await engine.start()
        self._whole(engine)

    async def _stall(self) -> None:
        engine = self._take(self.listed + self.guests)
        if engine is None:
            return
        self.harm.begins(engine.worker)
        self.did["engines stalled"] += 1
        engine.send(signal.SIGSTOP)
        # A hiccup, or so long that it is taken for dead.
        most = self.plan.stalled
        await asyncio.sleep(
            self.random.choice((self.random.uniform(0.1, 3.0), self.random.uniform(min(3.0, most), most)))
        )
        engine.send(signal.SIGCONT)
        self._whole(engine)

    async def _leave(self) -> None:
        """A guest leaves, drained or at once, and another one comes. That is no harm: what runs on it ends as it would."""
        engine = self._take(self.guests)
        if engine is None:
            return
        self.did["engines left and joined"] += 1
        left = engine.worker
        if self.random.random() < 0.5:
            await self.gateway.ask("POST", f"/workers/{left}/drain")
        else:
            await self.gateway.ask("DELETE", f"/workers/{left}")
        await self._until_idle(engine)
        await self.gateway.ask("DELETE", f"/workers/{left}", good=(200, 404))
        engine.kill()
        engine.port = 0
        await asyncio.sleep(self.random.uniform(0.1, 2.0))
        await engine.start()
        await self.gateway.ask("POST", "/workers", {"url": engine.url})
        self._taken.discard(engine)

    async def _until_idle(self, engine: EnginePlace) -> None:
        """It was told to leave: what runs on it ends as it would."""
        for _ in range(int(SETTLED * 4)):
            if not await engine.busy():
                return
            await asyncio.sleep(0.25)
        raise PlaceError(f"{engine.worker} left and had requests running {SETTLED:.0f} s later")

    # -- the configuration ------------------------------------------------------------------------------------------

    async def _reload(self) -> None:
        self.did["reloads"] += 1
        written = self.written
        written.policy = self.random.choice(POLICIES)
        written.weight = float(self.random.randint(1, 4))
        written.concurrency = self.random.randint(200, 400)
        written.extra = [f"extra{number}" for number in range(self.random.randint(0, 3))]
        self.gateway.write(written.text())
        if self.random.random() < 0.5:
            await self.gateway.ask("POST", "/config/reload")

    async def _misreload(self) -> None:
        """A file with a mistake in it changes nothing, and is told."""
        self.did["reloads of a wrong file"] += 1
        self.gateway.write(self.written.text() + "\nno_such_key: 1\n")
        await self.gateway.ask("POST", "/config/reload", good=(400,))
        self.gateway.write(self.written.text())
        await self.gateway.ask("POST", "/config/reload")

    async def _rotate(self) -> None:
        """The new key beside the old one, then alone; clients change between the two."""
        self.did["keys rotated"] += 1
        self._keys += 1
        before, key = self.rotated.key, f"soak-research-{self._keys}"
        self.written.key_file.write_text(f"{before}\n{key}\n")
        await self.gateway.ask("POST", "/config/reload")
        self.rotated.key = key
        # What was sent with the old one has been read by then.
        await asyncio.sleep(1.0)
        self.written.key_file.write_text(f"{key}\n")

    async def _hang_up(self) -> None:
        self.did["SIGHUP"] += 1
        self.gateway.send(signal.SIGHUP)
