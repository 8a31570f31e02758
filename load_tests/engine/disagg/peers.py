"""vLLM's offloading connector, peer to peer: an engine takes whole blocks from any other that a request names.

``kv_transfer_params`` has one of three objects, each with a kv_request_id of the caller's own:

    remote_kv_source   {"kv_request_id", "remote_host", "remote_port"}: ask that peer what it has of this prompt, take it
    remote_decoder     {"kv_request_id"}: what this request computes is for another, which comes for it
    remote_prefiller   {"kv_request_id", "remote_host", "remote_port"}: wait there for it

Peers find each other's blocks only with one hash_seed. A peer that does not answer has nothing.
(vLLM 0.33, v1/kv_offload/tiering/p2p.)
"""

from __future__ import annotations

import asyncio

from load_tests.engine.cache import Holding
from load_tests.engine.disagg.connector import JSON
from load_tests.engine.disagg.pull import PullConnector, PullLink, Source
from load_tests.engine.disagg.side import SideError, connect
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work


class Peer(Source):
    """Another engine, and whether it is asked what it has, or waited for."""

    def __init__(self, params: JSON, waits: bool) -> None:
        self.id = str(params["kv_request_id"])
        self.host = str(params["remote_host"])
        self.port = params["remote_port"] if isinstance(params["remote_port"], int) else 0
        self.waits = waits
        # Tokens that it said it has, once asked.
        self.has = 0


class PeerLink(PullLink):
    """Before the sequence is queued, its peer is asked."""

    def hold(self, work: Work) -> bool:
        source = self.source
        if not isinstance(source, Peer) or source.waits:
            return False
        self._task = self.owner.spawn(self._probe(work, source))
        return True

    async def _probe(self, work: Work, source: Peer) -> None:
        assert isinstance(self.owner, PeerConnector)
        source.has = await self.owner.probe(source, work)
        self._task = None
        self.rank.driver.queue(work)


class PeerConnector(PullConnector):
    """Peers are given from the caches of every rank."""

    name = "p2p"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic, port)
        self._ranks: list[Rank] = []
        self._awaited: dict[str, asyncio.Event] = {}

    def serve(self, ranks: list[Rank]) -> None:
        self._ranks = ranks

    def link(self, rank: Rank, name: str, params: JSON, source: Source | None) -> PullLink:
        return PeerLink(self, rank, name, params, source)

    def source_of(self, params: JSON) -> Source | None:
        for name, waits in (("remote_prefiller", True), ("remote_kv_source", False)):
            named = params.get(name)
            if isinstance(named, dict):
                whole = all(named.get(key) for key in ("kv_request_id", "remote_host", "remote_port"))
                return Peer(named, waits) if whole else None
        return None

    def offered(self, params: JSON, source: Source, tokens: int, hit: int) -> int:
        assert isinstance(source, Peer)
        whole = (tokens - 1) // self.options.block_size * self.options.block_size
        return whole if source.waits else min(whole, source.has)

    def keep(self, link: PullLink, work: Work) -> bool:
        named = link.params.get("remote_decoder")
        name = named.get("kv_request_id") if isinstance(named, dict) else None
        if not name or self.forgotten():
            return False
        self.pins.keep(str(name), work, link.rank.driver, self.options.lease)
        if (event := self._awaited.get(str(name))) is not None:
            event.set()
        return True

    async def probe(self, source: Peer, work: Work) -> int:
        """How many of a prompt's tokens the peer has; 0 if it does not answer."""
        try:
            async with connect(source.host, source.port) as talk:
                answer = await talk.ask("lookup", **self._wanted(work))
        except SideError:
            return 0
        return int(answer["tokens"])

    async def pull(self, source: Source, work: Work, start: int, end: int) -> list[int]:
        assert isinstance(source, Peer)
        seconds = self.seconds(end - start)
        async with connect(source.host, source.port) as talk:
            if source.waits:
                answer = await talk.ask("wait", id=source.id, start=start, end=end, seconds=seconds)
            else:
                answer = await talk.ask("fetch", **self._wanted(work), start=start, end=end, seconds=seconds)
        return [int(token) for token in answer["seen"]]

    async def notify(self, source: Source) -> None:
        assert isinstance(source, Peer)
        if not source.waits or self.note_lost():
            return
        try:
            async with connect(source.host, source.port) as talk:
                await talk.ask("done", id=source.id)
        except SideError:
            self.traffic.lost_notes += 1

    def _wanted(self, work: Work) -> JSON:
        return {
            "namespace": work.namespace,
            "prompt": list(work.prompt),
            "seed": self.options.hash_seed,
            "block_size": self.options.block_size,
        }

    async def answer(self, question: JSON) -> JSON:
        verb = question.get("verb")
        if verb == "lookup":
            return {"tokens": len(self._held(question))}
        if verb == "fetch":
            return {"seen": await self._fetched(question)}
        if verb == "wait":
            await self._ready(question["id"])
            span = question["start"], question["end"], question["seconds"]
            return {"seen": await self.give(question["id"], *span)}
        if verb == "done":
            self.pins.release(question["id"])
            return {}
        raise SideError(f"unknown verb {verb!r}")

    def _held(self, question: JSON) -> list[int]:
        """What the longest prefix that a rank has was computed from."""
        if (question["seed"], question["block_size"]) != (self.options.hash_seed, self.options.block_size):
            return []
        prompt, best = question["prompt"], list[int]()
        for rank in self._ranks:
            # One token more, as no hit includes the last.
            hit = rank.cache.match(Holding(question["namespace"]), [*prompt, 0])
            if hit > len(best):
                best = rank.scheduler.contents.seen(question["namespace"], prompt, hit)
        return best

    async def _fetched(self, question: JSON) -> list[int]:
        if await self.stalled():
            self.traffic.out_failed += 1
            raise SideError("the transfer failed, as ordered")
        await asyncio.sleep(question["seconds"])
        seen = self._held(question)[question["start"] : question["end"]]
        if len(seen) < question["end"] - question["start"]:
            self.traffic.out_failed += 1
            raise SideError("the blocks are not here any more")
        self.traffic.out_count += 1
        self.traffic.out_tokens += len(seen)
        return seen

    async def _ready(self, name: str) -> None:
        """Until the request that a decode engine waits for has been computed. SideError when that takes too long."""
        if self.pins.get(name) is not None:
            return
        event = self._awaited.setdefault(name, asyncio.Event())
        try:
            await asyncio.wait_for(event.wait(), self.options.lease)
        except TimeoutError:
            raise SideError(f"nothing came for {name}") from None
        finally:
            self._awaited.pop(name, None)
