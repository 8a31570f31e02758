"""The decode side of SGLang's disaggregation: find the prefill engine, take memory, meet, and go on from there."""

from __future__ import annotations

import asyncio
import time

from load_tests.engine.disagg.bootstrap import BootstrapClient
from load_tests.engine.disagg.connector import JSON, Connector
from load_tests.engine.disagg.rooms import RETRACTED, Invitation, failure, invitations
from load_tests.engine.disagg.side import ConnectionLost, SideError, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work

# How often a prefill engine that does not answer is asked, a second of engine time apart.
FETCHES = 15
HEARTBEAT_FAILURES = 2


class DecodeLink:
    """One sequence of a request that is computed elsewhere and continued here."""

    def __init__(
        self, owner: DecodeConnector, rank: Rank, name: str, where: Invitation, prefill_rank: int | None
    ) -> None:
        self._owner = owner
        self._driver = rank.driver
        self._name = name
        self._where = where
        self._rank = prefill_rank
        self._address = ("", 0)
        self._task: asyncio.Task[None] | None = None

    def hold(self, work: Work) -> bool:
        self._owner.engaged.add(work)
        self._task = self._owner.spawn(self._find(work))
        return True

    def wanted(self, tokens: int, hit: int) -> int:
        return tokens - hit

    def begin(self, work: Work, hit: int, upto: int) -> None:
        self._task = self._owner.spawn(self._bring(work, hit))

    def spared(self, work: Work) -> None:
        return

    def finish(self, work: Work) -> bool:
        self._owner.engaged.discard(work)
        return False

    def left(self, work: Work) -> None:
        self._owner.engaged.discard(work)
        if work.state == "aborted":
            self._owner.traffic.aborts += 1
        if self._task is not None:
            self._task.cancel()

    def retracted(self) -> ApiError | None:
        return out_of_memory()

    def _fail(self, work: Work, what: str, reason: str) -> None:
        # It ends itself by this; nobody has to cancel it.
        self._task = None
        self._driver.fail(work, failure(what, "decode_req.req", self._name, self._where.room, reason))

    async def _find(self, work: Work) -> None:
        """Learn from the bootstrap server where the room is; memory is taken only then."""
        where, ask = self._where, self._owner.client
        for _ in range(FETCHES):
            try:
                info = await ask.info(where.host, where.port)
                if self._rank is None:
                    self._rank = where.room % info.dp_size
                self._address = await ask.address(where.host, where.port, self._rank)
                self._task = None
                self._driver.queue(work)
                return
            except SideError:
                await asyncio.sleep(self._owner.options.time_scale)
        self._owner.traffic.bootstrap_failed += 1
        reason = f"Could not fetch prefill parallel info from bootstrap_addr: {where.address}"
        self._fail(work, "Decode handshake", reason)

    async def _bring(self, work: Work, hit: int) -> None:
        owner = self._owner
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(owner.options.waiting_timeout):
                answer = await self._meet(hit)
        except TimeoutError:
            seconds = owner.options.waiting_timeout
            reason = f"Request {self._where.room} timed out after {seconds:.1f}s in KVPoll.WaitingForInput"
        except SideError as error:
            reason = str(error)
        else:
            self._task = None
            owner.traffic.in_count += 1
            owner.traffic.in_tokens += len(answer["tokens"])
            owner.traffic.in_seconds += time.perf_counter() - begun
            work.reported = max(answer["cached"], hit)
            self._driver.received(work, [int(token) for token in answer["tokens"]])
            await self._retract(work)
            return
        owner.traffic.in_failed += 1
        self._fail(work, "Decode transfer", reason)

    async def _retract(self, work: Work) -> None:
        """Run out of memory, as ordered, if the reply is long enough."""
        fault = self._owner.faults.take("out_of_memory")
        if fault is None:
            return
        while work.emitted < fault.after_events and work.state in ("waiting", "running"):
            await asyncio.sleep(0.001)
        self._driver.fail(work, out_of_memory())

    async def _meet(self, hit: int) -> JSON:
        """The KV, whenever it comes. SideError if the transfer failed or the prefill engine is dead."""
        if await self._owner.stalled():
            raise SideError("Failed to get kvcache from prefill instance, it might be dead")
        where = self._where
        try:
            async with connect(*self._address) as talk:
                return await talk.ask("meet", rank=self._rank, room=where.room, copy=where.copy, have=hit)
        except ConnectionLost:
            await self._until_dead()
        raise SideError(f"Lost connection with prefill instance (bootstrap_addr: {where.address})")

    async def _until_dead(self) -> None:
        """Heartbeats that fail in a row. One that came back meanwhile knows nothing of the room, and says nothing."""
        failed = 0
        while failed < HEARTBEAT_FAILURES:
            await asyncio.sleep(self._owner.options.heartbeat)
            alive = await self._owner.client.healthy(self._where.host, self._where.port)
            failed = 0 if alive else failed + 1


def out_of_memory() -> ApiError:
    return ApiError(503, RETRACTED, kind="SERVICE_UNAVAILABLE")


class DecodeConnector(Connector):
    """It listens to nobody: it goes where its requests say."""

    name = "bootstrap"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic) -> None:
        super().__init__(options, faults, traffic)
        self.client = BootstrapClient()
        self.engaged: set[Work] = set()

    async def close(self) -> None:
        await super().close()
        await self.client.close()

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        asked = body.get("disagg_prefill_dp_rank")
        prefill_rank = asked if isinstance(asked, int) and not isinstance(asked, bool) else None
        for work, where in zip(job.works, invitations(body, name, len(job.works)), strict=True):
            work.link = DecodeLink(self, rank, name, where, prefill_rank)

    def rooms(self) -> int:
        return len(self.engaged)

    def queues(self) -> dict[str, int]:
        states = [work.state for work in self.engaged]
        return {
            "decode_prealloc_queue_reqs": states.count("held") + states.count("waiting"),
            "decode_transfer_queue_reqs": states.count("receiving"),
        }
