"""vLLM's NIXL connector: the decode engine pulls. (vLLM 0.33, distributed/kv_transfer/kv_connector/v1/nixl.)

The prefill engine answers with parameters that name its blocks, and keeps them for a lease. The decode engine is given
those parameters, says that it is there (heartbeats lengthen the lease while it waits), reads as many tokens as its own
prompt has, and notifies. Nothing compares the two prompts. With ``bidirectional`` the decode engine's answer names its
blocks in turn, for the prefill engine to read in the session's next turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any, NamedTuple

from load_tests.engine.blocks import BlockCache
from load_tests.engine.disagg.connector import JSON
from load_tests.engine.disagg.pull import PullConnector, PullLink, Source
from load_tests.engine.disagg.side import SideError, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work

# Fewer tokens than these are computed by the prefill engine rather than read back.
RECOMPUTE_THRESHOLD = 64
MOST_REMAINS = 1000
NAMES = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class Blocks(Source):
    """Blocks of a request that another engine names."""

    def __init__(self, params: JSON) -> None:
        self.engine_id = str(params["remote_engine_id"])
        self.request = str(params["remote_request_id"])
        self.host = str(params["remote_host"])
        self.port = params["remote_port"] if isinstance(params["remote_port"], int) else 0
        self.count = sum(len(group) if isinstance(group, list) else 1 for group in params["remote_block_ids"])
        held = params.get("remote_num_tokens")
        self.tokens = held if isinstance(held, int) else 0


class Remains(NamedTuple):
    """Blocks that were kept, with what was in them: (number, digest, tokens that it was computed from)."""

    cache: BlockCache
    blocks: list[tuple[int, bytes | None, list[int]]]

    def read(self) -> list[int]:
        """What is in them now; a block that was taken since is of no known content."""
        found: list[int] = []
        for block, digest, seen in self.blocks:
            found += seen if self.cache.untouched(block, digest) else [0] * len(seen)
        return found


class NixlConnector(PullConnector):
    """Kept KV is named by the request that computed it."""

    name = "nixl"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic, port)
        self._remains: OrderedDict[str, Remains] = OrderedDict()

    def source_of(self, params: JSON) -> Source | None:
        reads = params.get("do_remote_prefill") or (params.get("do_remote_decode") and self.options.bidirectional)
        if not reads or not isinstance(params.get("remote_block_ids"), list) or not params["remote_block_ids"]:
            return None
        return Blocks(params) if all(name in params for name in NAMES) else None

    def reported(self, params: JSON) -> int | None:
        hit = params.get("remote_prefill_cached_tokens")
        usable = params.get("do_remote_prefill") and isinstance(hit, int) and not isinstance(hit, bool)
        return hit if usable else None

    def offered(self, params: JSON, source: Source, tokens: int, hit: int) -> int:
        assert isinstance(source, Blocks)
        if params.get("do_remote_prefill"):
            return tokens
        there = min(source.tokens, tokens)
        return there if there - hit >= RECOMPUTE_THRESHOLD else 0

    def keep(self, link: PullLink, work: Work) -> bool:
        prefilled = bool(link.params.get("do_remote_decode"))
        if not prefilled and not self.options.bidirectional:
            return False
        seconds = self.options.lease if prefilled else self.options.blocks_ttl
        work.params = self._params_of(link.name, work, link.rank, prefilled)
        self._remember(link, work)
        if self.forgotten():
            return False
        self.pins.keep(link.name, work, link.rank.driver, seconds)
        return True

    def _remember(self, link: PullLink, work: Work) -> None:
        """For those who come too late."""
        cache, size = link.rank.cache, self.options.block_size
        if self.options.late_reads == "fail" or not isinstance(cache, BlockCache):
            return
        seen = link.rank.scheduler.seen_of(work)[: work.computed]
        parts = [seen[start : start + size] for start in range(0, len(seen), size)]
        held = work.holding.blocks[: len(parts)]
        blocks = [(block, cache.digest_of(block), part) for block, part in zip(held, parts, strict=True)]
        self._remains[link.name] = Remains(cache, blocks)
        while len(self._remains) > MOST_REMAINS:
            self._remains.popitem(last=False)

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

    async def pull(self, source: Source, work: Work, start: int, end: int) -> list[int]:
        assert isinstance(source, Blocks)
        if -(-end // self.options.block_size) > source.count:
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
        assert isinstance(source, Blocks)
        if not self.note_lost():
            await self._tell(source, "done", request=source.request)

    async def beat(self, source: Source) -> None:
        """Lengthen the lease of what a request waits for."""
        assert isinstance(source, Blocks)
        while True:
            await asyncio.sleep(self.options.lease / 6)
            await self._tell(source, "heartbeat", requests=[source.request], seconds=self.options.lease * 2 / 3)

    async def _tell(self, source: Blocks, verb: str, **fields: Any) -> None:
        try:
            async with connect(source.host, source.port) as talk:
                await talk.ask(verb, **fields)
        except SideError:
            self.traffic.lost_notes += 1

    async def answer(self, question: JSON) -> JSON:
        verb = question.get("verb")
        if verb == "handshake":
            return {"engine_id": self.engine_id, "model": self.options.models[0]}
        if verb == "heartbeat":
            for name in question["requests"]:
                self.pins.extend(name, question["seconds"])
            return {}
        if verb == "done":
            if not self.pins.release(question["request"]):
                self.traffic.late_notes += 1
            return {}
        if verb == "read" and self.pins.get(question["request"]) is None and question["request"] in self._remains:
            return {"tokens": self._remains[question["request"]].read()[question["start"] : question["end"]]}
        if verb == "read":
            tokens = await self.give(question["request"], question["start"], question["end"], question["seconds"])
            return {"tokens": tokens}
        raise SideError(f"unknown verb {verb!r}")
