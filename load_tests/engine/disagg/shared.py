"""A store that engines share: what one has computed another finds, by whole blocks of a common prefix, unasked.

It stands for LMCache and vLLM's connectors to shared storage. Engines of one process share a store in memory, engines
with one ``shared_dir`` a folder; both belong to a model and a block size. What comes from there counts as cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from load_tests.engine.disagg.connector import JSON, Connector
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions
from load_tests.engine.rank import Rank
from load_tests.engine.work import Work

MOST_BLOCKS = 100_000
LOAD_FAILED = "Internal server error"


class Store(Protocol):
    """Blocks by name: what each was computed from."""

    def get(self, name: str) -> list[int] | None: ...

    def put(self, name: str, seen: list[int]) -> None: ...


class Memory:
    """The least recently used block goes beyond MOST_BLOCKS."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, list[int]] = OrderedDict()

    def get(self, name: str) -> list[int] | None:
        if name in self._blocks:
            self._blocks.move_to_end(name)
        return self._blocks.get(name)

    def put(self, name: str, seen: list[int]) -> None:
        self._blocks[name] = seen
        self._blocks.move_to_end(name)
        while len(self._blocks) > MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()


class Folder:
    """A file for each block. After MOST_BLOCKS files of its own an engine writes no more."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)
        self._written = 0

    def get(self, name: str) -> list[int] | None:
        try:
            return msgspec.json.decode((self._path / name).read_bytes(), type=list[int])
        except (OSError, msgspec.DecodeError):
            return None

    def put(self, name: str, seen: list[int]) -> None:
        target = self._path / name
        if self._written >= MOST_BLOCKS or target.exists():
            return
        self._written += 1
        half = target.with_suffix(f".{id(self)}")
        half.write_bytes(msgspec.json.encode(seen))
        half.rename(target)


MEMORY = Memory()


class SharedLink:
    """One sequence that may find its prefix in the store, and leaves there what it has computed."""

    def __init__(self, owner: SharedConnector, rank: Rank, work: Work) -> None:
        self._owner = owner
        self._driver = rank.driver
        self._found = owner.find(work)
        self._task: asyncio.Task[None] | None = None

    def hold(self, work: Work) -> bool:
        return False

    def wanted(self, tokens: int, hit: int) -> int:
        return max(0, len(self._found) - hit)

    def begin(self, work: Work, hit: int, upto: int) -> None:
        self._task = self._owner.spawn(self._bring(work, hit, upto))

    def spared(self, work: Work) -> None:
        return

    def finish(self, work: Work) -> bool:
        self._owner.leave(work, self._driver.scheduler.seen_of(work))
        return False

    def left(self, work: Work) -> None:
        if self._task is not None:
            self._task.cancel()

    def retracted(self) -> ApiError | None:
        return None

    async def _bring(self, work: Work, hit: int, upto: int) -> None:
        owner = self._owner
        begun = time.perf_counter()
        failing = await owner.stalled()
        await asyncio.sleep(owner.seconds(upto - hit))
        self._task = None
        if not failing:
            owner.traffic.in_count += 1
            owner.traffic.in_tokens += upto - hit
            owner.traffic.in_seconds += time.perf_counter() - begun
            self._driver.received(work, self._found[hit:upto])
            return
        owner.traffic.in_failed += 1
        self._found = []
        if owner.options.load_failure == "recompute":
            self._driver.recompute(work)
        else:
            self._driver.fail(work, ApiError(500, LOAD_FAILED))


class SharedConnector(Connector):
    """Every request takes part, whatever its body says."""

    name = "shared"

    def __init__(self, options: EngineOptions, faults: Faults, traffic: Traffic) -> None:
        super().__init__(options, faults, traffic)
        self._store: Store = Folder(options.shared_dir) if options.shared_dir else MEMORY

    def attach(self, job: Job, name: str, body: JSON, rank: Rank) -> None:
        for work in job.works:
            work.link = SharedLink(self, rank, work)

    def find(self, work: Work) -> list[int]:
        """What the leading blocks of a prompt that are in the store were computed from."""
        found: list[int] = []
        for _, name in self._names(work.namespace, work.prompt, len(work.prompt) - 1):
            seen = self._store.get(name)
            if seen is None:
                break
            found += seen
        return found

    def leave(self, work: Work, seen: Sequence[int]) -> None:
        """Put a finished sequence's whole blocks there."""
        if self.faults.take("forget") is not None:
            return
        size = self.options.block_size
        for start, name in self._names(work.namespace, work.tokens, work.computed):
            if self._store.get(name) is None:
                self._store.put(name, list(seen[start : start + size]))
                self.traffic.out_tokens += size
        self.traffic.out_count += 1

    def _names(self, namespace: str, tokens: Sequence[int], upto: int) -> Iterator[tuple[int, str]]:
        """(first position, name) of every whole block before ``upto``; a name stands for all that comes before."""
        size = self.options.block_size
        chain = hashlib.sha256(f"{self.options.models[0]}\x1f{size}\x1f{namespace}".encode())
        for start in range(0, upto // size * size, size):
            chain.update(msgspec.msgpack.encode(list(tokens[start : start + size])))
            yield start, chain.hexdigest()
