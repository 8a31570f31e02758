"""The prefill side of SGLang's disaggregation: rooms, who is in them, and when they are over."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from load_tests.engine.disagg.bootstrap import BootstrapServer
from load_tests.engine.disagg.connector import JSON, Connector
from load_tests.engine.disagg.rooms import ABORTED, Key, failure, first_token, invitations
from load_tests.engine.disagg.side import SideError, SideServer
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work


@dataclass(eq=False)
class Room:
    """``link`` None: no request has come for it here. met: a decode engine is in it. ready: the KV is there."""

    key: Key
    link: PrefillLink | None = None
    met: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class PrefillLink:
    """One sequence of a request that is to be computed here and continued elsewhere."""

    def __init__(self, owner: PrefillConnector, rank: Rank, name: str, key: Key, conflict: str) -> None:
        self._owner = owner
        self._driver = rank.driver
        self._name = name
        self._conflict = conflict
        self._timer: asyncio.TimerHandle | None = None
        self.key = key
        self.work: Work | None = None

    def hold(self, work: Work) -> bool:
        self.work = work
        loop = asyncio.get_running_loop()
        if self._conflict:
            loop.call_soon(self._fail, "Prefill bootstrap", self._conflict)
            return True
        room = self._owner.enter(self)
        if room.met:
            return False
        self._timer = loop.call_later(self._owner.options.bootstrap_timeout, self._late)
        return True

    def go(self) -> None:
        """The other half has come."""
        self._stop_timer()
        if self.work is not None and self.work.state == "held":
            self._driver.queue(self.work)

    def wanted(self, tokens: int, hit: int) -> int:
        return 0

    def begin(self, work: Work, hit: int, upto: int) -> None:
        raise AssertionError("a prefill engine computes its prompts")

    def spared(self, work: Work) -> None:
        return

    def finish(self, work: Work) -> bool:
        work.state = "sending"
        self._owner.rooms_by_key[self.key].ready.set()
        return True

    def left(self, work: Work) -> None:
        self._stop_timer()
        if work.state == "aborted":
            self._owner.traffic.aborts += 1
        self._owner.leave(self)

    def retracted(self) -> ApiError | None:
        return None

    def sent(self) -> None:
        """The KV is over there: the request is answered."""
        self._owner.leave(self)
        assert self.work is not None
        self._driver.release(self.work)

    def fail(self, reason: str) -> None:
        """The other half left, or the transfer failed."""
        begun = self.work is not None and self.work.state != "held"
        self._fail("Prefill transfer" if begun else "Prefill bootstrap", reason)

    def content(self) -> tuple[list[int], int]:
        """(what the KV was computed from, how many tokens of it were cached)."""
        assert self.work is not None
        seen = self._driver.scheduler.seen_of(self.work)[: len(self.work.prompt)]
        return seen, self.work.cached or 0

    def _late(self) -> None:
        seconds = self._owner.options.bootstrap_timeout
        reason = f"Request {self.key.room} timed out after {seconds:.1f}s in KVPoll.Bootstrapping"
        self._fail("Prefill bootstrap", reason)

    def _fail(self, what: str, reason: str) -> None:
        assert self.work is not None
        if what == "Prefill bootstrap":
            self._owner.traffic.bootstrap_failed += 1
        self._driver.fail(self.work, failure(what, "req", self._name, self.key.room, reason))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class PrefillConnector(Connector):
    """``port`` is that of the bootstrap server; KV goes over another, which that one tells of."""

    name = "bootstrap"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> None:
        super().__init__(options, faults, traffic)
        self.rooms_by_key: dict[Key, Room] = {}
        self._bootstrap = BootstrapServer(options, port)
        self._side = SideServer(options.host, 0, self._answer)

    @property
    def port(self) -> int:  # type: ignore[override]
        return self._bootstrap.port

    async def open(self) -> None:
        await self._side.open()
        self._bootstrap.ranks = dict.fromkeys(range(self.options.ranks), (self.options.host, self._side.port))
        await self._bootstrap.open()

    async def close(self) -> None:
        await self._side.close()
        await self._bootstrap.close()
        await super().close()

    def rank(self, body: JSON) -> int | None:
        room = body.get("bootstrap_room")
        room = room[0] if isinstance(room, list) and room else room
        return room % self.options.ranks if isinstance(room, int) else None

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        size = self.options.ranks
        for index, (work, invited) in enumerate(zip(job.works, invitations(body, name, len(job.works)), strict=True)):
            implied, conflict = invited.room % size, ""
            pinned = body.get("disagg_prefill_dp_rank") is not None
            if index == 0 and not pinned and rank.number != implied:
                conflict = (
                    f"follow_bootstrap_room conflict: dispatched to dp_rank {rank.number} but bootstrap_room "
                    f"{invited.room} implies dp_rank {implied}. "
                    "Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
                )
            key = Key(rank.number if pinned else implied, invited.room, invited.copy)
            self._bootstrap.register(invited.room, key.rank)
            work.link = PrefillLink(self, rank, name, key, conflict)
            job.replies[index] = first_token(job.replies[index])
            work.planned = job.replies[index].tokens

    def rooms(self) -> int:
        return len(self.rooms_by_key)

    def queues(self) -> dict[str, int]:
        works = [room.link.work for room in self.rooms_by_key.values() if room.link is not None]
        states = [work.state for work in works if work is not None]
        return {
            "prefill_bootstrap_queue_reqs": states.count("held"),
            "prefill_inflight_queue_reqs": states.count("sending"),
        }

    def enter(self, link: PrefillLink) -> Room:
        """A request has come; whoever waited in that room for another is forgotten."""
        room = self.rooms_by_key.get(link.key)
        if room is None or room.link is not None:
            room = self.rooms_by_key[link.key] = Room(link.key)
        room.link = link
        return room

    def leave(self, link: PrefillLink) -> None:
        room = self.rooms_by_key.get(link.key)
        if room is not None and room.link is link:
            del self.rooms_by_key[link.key]
            room.link = None

    async def _answer(self, question: JSON) -> JSON:
        if question.get("verb") != "meet":
            raise SideError(f"unknown verb {question.get('verb')!r}")
        key = Key(question["rank"], question["room"], question["copy"])
        room = self.rooms_by_key.setdefault(key, Room(key))
        room.met = True
        try:
            if room.link is not None:
                room.link.go()
            return await self._send(room, question["have"])
        except asyncio.CancelledError:
            # The decode engine left, and says so.
            if room.link is not None:
                room.link.fail(ABORTED)
            raise
        finally:
            if room.link is None and self.rooms_by_key.get(key) is room:
                del self.rooms_by_key[key]

    async def _send(self, room: Room, have: int) -> JSON:
        await room.ready.wait()
        begun = time.perf_counter()
        failing = await self.stalled()
        link = room.link
        if link is None:
            # Aborted here, which the other side is not told of.
            await asyncio.Event().wait()
        assert link is not None
        tokens, hit = link.content()
        if not failing:
            await asyncio.sleep(self.seconds(max(0, len(tokens) - have)))
            if room.link is None:
                await asyncio.Event().wait()
        if failing:
            self.traffic.out_failed += 1
            link.fail(f"Failed to send kv chunk of {room.key.room} to decode instance")
            raise SideError("Failed to get kvcache from prefill instance, it might be dead")
        self.traffic.out_count += 1
        self.traffic.out_tokens += max(0, len(tokens) - have)
        self.traffic.out_seconds += time.perf_counter() - begun
        link.sent()
        return {"tokens": tokens[have:], "cached": hit}
