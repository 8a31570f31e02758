"""What connectors share in which the decode engine pulls: a link that brings KV, and KV that is kept to be pulled."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from uuid import uuid4

from load_tests.engine.disagg.connector import JSON, Connector
from load_tests.engine.disagg.pins import Pin, Pins
from load_tests.engine.disagg.side import SideError, SideServer
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work

LOAD_FAILED = "Internal server error"


class Source:
    """Where a request's KV is. users: how many of its sequences have still to be served from there."""

    users = 1


class PullLink:
    """One sequence's part of it. ``source`` None: there is nothing to pull."""

    def __init__(self, owner: PullConnector, rank: Rank, name: str, params: JSON, source: Source | None) -> None:
        self.owner = owner
        self.rank = rank
        self.name = name
        self.params = params
        self.source = source
        self._task: asyncio.Task[None] | None = None
        self._beat = owner.spawn(owner.beat(source)) if source is not None else None

    def hold(self, work: Work) -> bool:
        return False

    def wanted(self, tokens: int, hit: int) -> int:
        if self.source is None:
            return 0
        return max(0, self.owner.offered(self.params, self.source, tokens, hit) - hit)

    def begin(self, work: Work, hit: int, upto: int) -> None:
        assert self.source is not None
        self._task = self.owner.spawn(self._bring(work, self.source, hit, upto))

    def spared(self, work: Work) -> None:
        self._done()

    def finish(self, work: Work) -> bool:
        self._done()
        return self.owner.keep(self, work)

    def left(self, work: Work) -> None:
        if work.state == "aborted":
            self.owner.traffic.aborts += 1
        if self._task is not None:
            self._task.cancel()
        self._done()

    def retracted(self) -> ApiError | None:
        return None

    def _done(self) -> None:
        """This sequence needs nothing more from there; the last of a request says so."""
        if self._beat is not None:
            self._beat.cancel()
        source, self.source = self.source, None
        if source is not None:
            source.users -= 1
            if source.users == 0:
                self.owner.spawn(self.owner.notify(source))

    async def _bring(self, work: Work, source: Source, hit: int, upto: int) -> None:
        owner, driver = self.owner, self.rank.driver
        begun = time.perf_counter()
        try:
            if await owner.stalled():
                raise SideError("the transfer failed, as ordered")
            tokens = await owner.pull(source, work, hit, upto)
        except SideError:
            owner.traffic.in_failed += 1
            # Nothing is notified: what is kept over there goes when its time is over.
            self._task = self.source = None
            if owner.options.load_failure == "recompute":
                driver.recompute(work)
            else:
                driver.fail(work, ApiError(500, LOAD_FAILED))
            return
        # From here on the sequence may leave without undoing anything.
        self._task = self.source = None
        owner.traffic.in_count += 1
        owner.traffic.in_tokens += upto - hit
        owner.traffic.in_seconds += time.perf_counter() - begun
        source.users -= 1
        if source.users == 0:
            await owner.pulled(source)
        if self._beat is not None:
            self._beat.cancel()
        if work.state == "receiving":
            driver.received(work, tokens)


class PullConnector(Connector):
    """``engine_id`` is new with every process unless the options give one."""

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic)
        self.engine_id = options.engine_id or str(uuid4())
        self.pins = Pins(self._expired)
        self.side = SideServer(options.host, port, self.answer)

    @property
    def port(self) -> int:  # type: ignore[override]
        return self.side.port

    async def open(self) -> None:
        await self.side.open()

    async def close(self) -> None:
        await self.side.close()
        await super().close()
        self.pins.clear()

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        params = self.params(body)
        if params is None:
            return
        source = self.source_of(params)
        if source is not None:
            source.users = len(job.works)
        for index, work in enumerate(job.works):
            given = f"{name}-{uuid4().hex[:8]}"
            own = given if len(job.works) == 1 else f"{index}_{given}"
            work.link = self.link(rank, own, params, source)
            work.reported = self.reported(params)

    def rejected(self, body: JSON) -> None:
        try:
            params = self.params(body)
            source = None if params is None else self.source_of(params)
        except ApiError:
            return
        if params is not None and source is not None and not params.get("do_remote_decode"):
            self.spawn(self.notify(source))

    def params(self, body: JSON) -> JSON | None:
        """What a request says of other engines; None if it says nothing. Raises ApiError for what cannot be."""
        params = body.get("kv_transfer_params")
        return params if isinstance(params, dict) and params else None

    def blocks(self) -> tuple[int, int]:
        return self.pins.blocks(), self.pins.blocks(late=True)

    def link(self, rank: Rank, name: str, params: JSON, source: Source | None) -> PullLink:
        return PullLink(self, rank, name, params, source)

    def reported(self, params: JSON) -> int | None:
        """The hit that an answer tells of, where it is not what was found and brought."""
        return None

    @abstractmethod
    def source_of(self, params: JSON) -> Source | None:
        """Where the parameters say that KV is; None where they name nothing to pull."""

    @abstractmethod
    def offered(self, params: JSON, source: Source, tokens: int, hit: int) -> int:
        """How many of a prompt's ``tokens`` are to be here once it has been pulled; at most ``hit``: none is pulled."""

    @abstractmethod
    async def pull(self, source: Source, work: Work, start: int, end: int) -> list[int]:
        """What the KV of tokens ``start:end`` over there was computed from. SideError if it cannot be had."""

    @abstractmethod
    async def notify(self, source: Source) -> None:
        """Tell the other engine that its blocks are not needed."""

    @abstractmethod
    async def answer(self, question: JSON) -> JSON:
        """What this engine's side channel answers."""

    @abstractmethod
    def keep(self, link: PullLink, work: Work) -> bool:
        """Keep a finished sequence for whoever pulls it. False if it is not kept."""

    async def pulled(self, source: Source) -> None:
        """The last sequence of a request has its KV. Told before the answer can be there, as it comes with the data."""
        await self.notify(source)

    async def beat(self, source: Source) -> None:
        """What goes on while a request waits for its KV."""

    def note_lost(self) -> bool:
        """Whether a notification is to be lost, as ordered."""
        lost = self.faults.take("notify_lost") is not None
        self.traffic.lost_notes += lost
        return lost

    def pinned(self, name: str) -> Pin:
        """KV that is kept. SideError if it is not here."""
        pin = self.pins.get(name)
        if pin is None:
            self.traffic.out_failed += 1
            raise SideError(f"there are no blocks of {name} (any more)")
        return pin

    async def give(self, name: str, start: int, end: int, seconds: float) -> list[int]:
        """What kept KV was computed from, after the time that it takes. SideError if it fails or goes meanwhile."""
        self.pinned(name)
        if await self.stalled():
            self.traffic.out_failed += 1
            raise SideError("the transfer failed, as ordered")
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        tokens = self.pinned(name).seen[start:end]
        self.traffic.out_count += 1
        self.traffic.out_tokens += len(tokens)
        self.traffic.out_seconds += time.perf_counter() - begun
        return tokens

    def forgotten(self) -> bool:
        """Whether KV that is to be kept is given up at once, as ordered."""
        gone = self.faults.take("forget") is not None
        self.traffic.expired += gone
        return gone

    def _expired(self, pin: Pin) -> None:
        self.traffic.expired += 1
