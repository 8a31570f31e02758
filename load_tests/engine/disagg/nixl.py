"""vLLM's NIXL connector: the decode engine pulls. (vLLM 0.33, distributed/kv_transfer/kv_connector/v1/nixl.)

The prefill engine answers with parameters that name its blocks, and keeps them for a lease. The decode engine is given
those parameters, says that it is there (heartbeats lengthen the lease while it waits), reads as many tokens as its own
prompt has, and notifies. Nothing compares the two prompts. With ``bidirectional`` the decode engine's answer names its
blocks in turn, for the prefill engine to read in the session's next turn.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

from load_tests.engine.blocks import BlockCache
from load_tests.engine.disagg.connector import JSON, Connector
from load_tests.engine.disagg.pins import Pin, Pins
from load_tests.engine.disagg.side import SideError, SideServer, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work

# Fewer tokens than these are computed by the prefill engine rather than read back.
RECOMPUTE_THRESHOLD = 64
NAMES = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
LOAD_FAILED = "Internal server error"


class Source:
    """Where a request's KV is, and how many of its sequences have still to be served from there."""

    def __init__(self, params: JSON, users: int) -> None:
        self.engine_id = str(params["remote_engine_id"])
        self.request = str(params["remote_request_id"])
        self.host = str(params["remote_host"])
        self.port = params["remote_port"] if isinstance(params["remote_port"], int) else 0
        self.blocks = sum(len(group) if isinstance(group, list) else 1 for group in params["remote_block_ids"])
        held = params.get("remote_num_tokens")
        self.tokens = held if isinstance(held, int) else 0
        self.users = users

    @classmethod
    def of(cls, params: JSON, users: int = 1) -> Source | None:
        """None where the parameters name nothing to read."""
        if not isinstance(params.get("remote_block_ids"), list) or not params["remote_block_ids"]:
            return None
        return cls(params, users) if all(name in params for name in NAMES) else None


class NixlLink:
    """One sequence's part of it. ``source`` None: there is nothing to read."""

    def __init__(self, owner: NixlConnector, rank: Rank, name: str, params: JSON, source: Source | None) -> None:
        self._owner = owner
        self._rank = rank
        self._name = name
        self._params = params
        self._source = source
        self._task: asyncio.Task[None] | None = None
        self._beat = owner.spawn(owner.beat(source)) if source is not None else None

    def hold(self, work: Work) -> bool:
        return False

    def wanted(self, tokens: int, hit: int) -> int:
        if self._source is None:
            return 0
        if self._params.get("do_remote_prefill"):
            return max(0, tokens - hit)
        count = min(self._source.tokens, tokens) - hit
        return count if count >= RECOMPUTE_THRESHOLD else 0

    def begin(self, work: Work, hit: int, upto: int) -> None:
        assert self._source is not None
        self._task = self._owner.spawn(self._bring(work, self._source, hit, upto))

    def spared(self, work: Work) -> None:
        self._done()

    def finish(self, work: Work) -> bool:
        self._done()
        return self._owner.keep(self._name, work, self._rank, bool(self._params.get("do_remote_decode")))

    def left(self, work: Work) -> None:
        if work.state == "aborted":
            self._owner.traffic.aborts += 1
        if self._task is not None:
            self._task.cancel()
        self._done()

    def retracted(self) -> ApiError | None:
        return None

    def _done(self) -> None:
        """This sequence needs nothing more from there; the last of a request says so."""
        if self._beat is not None:
            self._beat.cancel()
        source, self._source = self._source, None
        if source is not None:
            source.users -= 1
            if source.users == 0:
                self._owner.spawn(self._owner.notify(source))

    async def _bring(self, work: Work, source: Source, hit: int, upto: int) -> None:
        owner, driver = self._owner, self._rank.driver
        begun = time.perf_counter()
        try:
            tokens = await owner.read(source, hit, upto)
        except SideError:
            owner.traffic.in_failed += 1
            # Nothing is notified: what is kept over there goes with its lease.
            self._task = self._source = None
            if owner.options.load_failure == "recompute":
                driver.recompute(work)
            else:
                driver.fail(work, ApiError(500, LOAD_FAILED))
            return
        # From here on the sequence may leave without undoing anything.
        self._task = None
        owner.traffic.in_count += 1
        owner.traffic.in_tokens += upto - hit
        owner.traffic.in_seconds += time.perf_counter() - begun
        # Notified before the answer can be there, as the notification travels with the last of the data.
        source.users -= 1
        self._source = None
        if source.users == 0:
            await owner.notify(source)
        if self._beat is not None:
            self._beat.cancel()
        if work.state == "receiving":
            driver.received(work, tokens)


class NixlConnector(Connector):
    """``engine_id`` is new with every process unless the options give one."""

    name = "nixl"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic)
        self.engine_id = options.engine_id or str(uuid4())
        self._pins = Pins(self._expired)
        self._side = SideServer(options.host, port, self._answer)

    @property
    def port(self) -> int:  # type: ignore[override]
        return self._side.port

    async def open(self) -> None:
        await self._side.open()

    async def close(self) -> None:
        await self._side.close()
        await super().close()
        self._pins.clear()

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        params = body.get("kv_transfer_params")
        if not isinstance(params, dict) or not params:
            return
        reads = params.get("do_remote_prefill") or (params.get("do_remote_decode") and self.options.bidirectional)
        source = Source.of(params, len(job.works)) if reads else None
        hit = params.get("remote_prefill_cached_tokens")
        for index, work in enumerate(job.works):
            given = f"{name}-{uuid4().hex[:8]}"
            own = given if len(job.works) == 1 else f"{index}_{given}"
            work.link = NixlLink(self, rank, own, params, source)
            if params.get("do_remote_prefill") and isinstance(hit, int) and not isinstance(hit, bool):
                work.reported = hit

    def rejected(self, body: JSON) -> None:
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and params.get("do_remote_prefill") and (source := Source.of(params)) is not None:
            self.spawn(self.notify(source))

    def blocks(self) -> tuple[int, int]:
        return self._pins.blocks(), self._pins.blocks(late=True)

    def keep(self, name: str, work: Work, rank: Rank, prefilled: bool) -> bool:
        """Keep a finished sequence for whoever reads it, and say where it is. False if it is not kept."""
        if not prefilled and not self.options.bidirectional:
            return False
        seconds = self.options.lease if prefilled else self.options.blocks_ttl
        work.params = self._params_of(name, work, rank, prefilled)
        if self.faults.take("forget") is not None:
            self.traffic.expired += 1
            return False
        self._pins.keep(name, work, rank.driver, seconds)
        return True

    def _params_of(self, name: str, work: Work, rank: Rank, prefilled: bool) -> JSON:
        count = -(-work.computed // self.options.block_size)
        held = work.holding.blocks[:count] if isinstance(rank.cache, BlockCache) else range(count)
        params: JSON = {
            "do_remote_prefill": prefilled,
            "do_remote_decode": not prefilled,
            # Block 0 is the engine's own.
            "remote_block_ids": [[block + 1 for block in held]],
            "remote_engine_id": self._engine_of(rank),
            "remote_request_id": name,
            "remote_host": self.options.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": work.computed,
            "remote_blocks_expiry_time": None if prefilled else time.perf_counter() + self.options.blocks_ttl,
            "remote_registration_generation": 0,
            "transfer_mode": "pull",
        }
        if prefilled:
            params["remote_prefill_cached_tokens"] = work.cached or 0
        return params

    def _engine_of(self, rank: Rank) -> str:
        return self.engine_id if self.options.ranks == 1 else f"{self.engine_id}_dp{rank.number}"

    async def read(self, source: Source, start: int, end: int) -> list[int]:
        """What the KV of tokens ``start:end`` over there was computed from. SideError if it cannot be had."""
        if await self.stalled():
            raise SideError("the transfer failed, as ordered")
        if -(-end // self.options.block_size) > source.blocks:
            raise SideError("there are fewer blocks than this prompt has")
        async with connect(source.host, source.port) as talk:
            hello = await talk.ask("handshake")
            theirs = str(hello["engine_id"])
            if source.engine_id != theirs and source.engine_id.partition("_dp")[0] != theirs:
                raise SideError(f"{source.engine_id} is not there, but {theirs}")
            if hello["model"] != self.options.models[0]:
                raise SideError(f"{theirs} serves another model, {hello['model']}")
            wait = self.seconds(end - start)
            answer = await talk.ask("read", request=source.request, start=start, end=end, seconds=wait)
        return [int(token) for token in answer["tokens"]]

    async def notify(self, source: Source) -> None:
        """Tell the other engine that its blocks are not needed any more."""
        if self.faults.take("notify_lost") is not None:
            self.traffic.lost_notes += 1
            return
        await self._tell(source, "done", request=source.request)

    async def beat(self, source: Source) -> None:
        """Lengthen the lease of what a request waits for."""
        while True:
            await asyncio.sleep(self.options.lease / 6)
            await self._tell(source, "heartbeat", requests=[source.request], seconds=self.options.lease * 2 / 3)

    async def _tell(self, source: Source, verb: str, **fields: Any) -> None:
        try:
            async with connect(source.host, source.port) as talk:
                await talk.ask(verb, **fields)
        except SideError:
            self.traffic.lost_notes += 1

    async def _answer(self, question: JSON) -> JSON:
        """What this engine's side channel answers."""
        verb = question.get("verb")
        if verb == "handshake":
            return {"engine_id": self.engine_id, "model": self.options.models[0]}
        if verb == "heartbeat":
            for name in question["requests"]:
                self._pins.extend(name, question["seconds"])
            return {}
        if verb == "done":
            if not self._pins.release(question["request"]):
                self.traffic.late_notes += 1
            return {}
        if verb == "read":
            return await self._give(question)
        raise SideError(f"unknown verb {verb!r}")

    async def _give(self, question: JSON) -> JSON:
        name = question["request"]
        self._pinned(name)
        if await self.stalled():
            self.traffic.out_failed += 1
            raise SideError("the transfer failed, as ordered")
        await asyncio.sleep(question["seconds"])
        tokens = self._pinned(name).seen[question["start"] : question["end"]]
        self.traffic.out_count += 1
        self.traffic.out_tokens += len(tokens)
        return {"tokens": tokens}

    def _pinned(self, name: str) -> Pin:
        pin = self._pins.get(name)
        if pin is None:
            self.traffic.out_failed += 1
            raise SideError(f"there are no blocks of {name} (any more)")
        return pin

    def _expired(self, pin: Pin) -> None:
        self.traffic.expired += 1
