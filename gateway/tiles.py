"""The fleet at a glance: a tile for each target, and of what its sessions are.

A *group* is the sessions of one tenant and model whose prompts start alike: agents of one kind, say. What a target holds is
shown by group, as the last prompts of the sessions that are at home there. Sessions are many, so only those that were used
last are looked at, and only every few seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_64_intdigest

from gateway.sessions import Session
from gateway.workers import Target, Worker
from kv_index.pages import SYMBOL

if TYPE_CHECKING:
    from gateway.run import Running

SESSIONS = 4000
"""That are looked at for groups."""
GROUPS = 8
"""That are told apart."""
START = 4 * SYMBOL
"""Bytes of symbols by which prompts start alike."""
REGROUP = 5.0
"""Seconds between two looks at sessions."""
REASON = 200
"""Characters of a reason."""

Key = tuple[str, str, bytes]


class Tiles:
    """Of one gateway. ``name``: makes a name of a start's symbols, from which nothing can be told of the text."""

    def __init__(self, running: Running, name: Callable[[bytes], str]) -> None:
        self._running = running
        self._name = name
        self._places: dict[Key, int] = {}
        """Group -> its place, which it keeps while it is among those that are told apart."""
        self._held: dict[int, dict[int | None, int]] = {}
        """Target -> place of a group (``None``: all others) -> tokens."""
        self.groups: list[dict[str, Any]] = []
        """Those that are told apart."""
        self._due = 0.0

    def now(self) -> dict[str, dict[str, Any]]:
        """Name of a target, or of a worker that has none yet -> its tile."""
        clock = self._running.gateway.clock()
        if clock >= self._due:
            self._due = clock + REGROUP
            self._regroup()
        tiles = {}
        for worker in self._running.fleet.workers.values():
            of_worker = {
                "worker": worker.id,
                "state": worker.state.value,
                "reason": worker.reason[:REASON],
                "engine": worker.facts.engine,
                "role": worker.role.value,
                "models": [model.name for model in worker.facts.models],
            }
            for target in worker.targets:
                tiles[target.name] = {"name": target.name, **of_worker, **self._of(worker, target, clock)}
            if not worker.targets:
                tiles[worker.id] = {"name": worker.id, **of_worker, "running": 0, "groups": []}
        return tiles

    def _of(self, worker: Worker, target: Target, now: float) -> dict[str, Any]:
        load, trust = target.load_report, self._running.index.of(target.id)
        usage = None if load is None or load.kv_usage is None else round(load.kv_usage, 3)
        held = self._held.get(target.id, {})
        return {
            "rank": target.rank,
            "running": target.running,
            "queue": None if load is None else load.waiting,
            "wait_ms": round(target.waits(now) * 1e3),
            "kv_usage": usage,
            "kv_tokens": worker.facts.kv_tokens,
            "homes": target.homes,
            "share": round(target.share, 2),
            "rung": trust.rung.value,
            "rung_reason": trust.reason,
            "breaker": target.breaker.state,
            "breaker_reason": target.breaker.reason,
            "crowded": self._running.gateway.routing.says_of(target),
            "groups": sorted(([place, tokens] for place, tokens in held.items()), key=_first_places),
        }

    def _regroup(self) -> None:
        weights: Counter[Key] = Counter()
        counts: Counter[Key] = Counter()
        rows: list[tuple[int, Key, int]] = []
        for session in self._running.sessions.recent(SESSIONS):
            tokens = session.prompt_tokens or 0
            key = _key(session)
            counts[key] += 1
            weights[key] += tokens
            for at in (session.home, session.partner):
                if at is not None and tokens:
                    rows.append((at, key, tokens))
        best = [key for key, tokens in weights.most_common(GROUPS) if tokens]
        kept = {key: place for key, place in self._places.items() if key in best}
        free = [place for place in range(GROUPS) if place not in kept.values()]
        for key in best:
            if key not in kept:
                kept[key] = free.pop(0)
        self._places = kept
        self._held = {}
        for at, key, tokens in rows:
            held = self._held.setdefault(at, {})
            place = kept.get(key)
            held[place] = held.get(place, 0) + tokens
        self.groups = [
            {
                "place": kept[key],
                "tenant": key[0],
                "model": key[1],
                "start": self._name(key[2]) if key[2] else None,
                "sessions": counts[key],
                "tokens": weights[key],
            }
            for key in best
        ]


def _key(session: Session) -> Key:
    return session.tenant, session.model, session.pages.symbols[:START]


def _first_places(row: list[int | None]) -> int:
    return GROUPS if row[0] is None else row[0]


def namer(secret: bytes) -> Callable[[bytes], str]:
    """Makes short names of symbols. They are hashes of text already, but of any text that one may guess: hence the secret."""
    seed = int.from_bytes(secret[:8], "little")
    return lambda symbols: f"{xxh3_64_intdigest(secret + symbols, seed) >> 16:012x}"
