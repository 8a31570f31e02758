"""The hottest shared prefixes as the control plane shows them: whose they are, who holds them, how many prompts go on from
them. The index knows hashes only, and what is shown are names of those under a secret of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gateway.asks import BY_IDS, BYTES_PER_TOKEN
from kv_index.hottest import Prefix, hottest
from kv_index.pages import PAGE_TOKENS, TEXT_PAGE

if TYPE_CHECKING:
    from gateway.run import Running

KEPT = 5.0
"""Seconds for which what was found is told again."""
BUDGET = 4000
"""Nodes of the index that are looked at: about as many microseconds."""
MOST = 60
"""Prefixes that are told."""
NAMED = 32
"""Holders of a prefix that are named."""


class Prefixes:
    """Of one gateway. ``name``: makes a name of symbols (`gateway.tiles.namer`)."""

    def __init__(self, running: Running, name: Callable[[bytes], str]) -> None:
        self._running = running
        self._name = name
        self._told: dict[str, Any] | None = None
        self._taken = 0.0

    def told(self) -> dict[str, Any]:
        """What ``GET /prefixes`` answers."""
        now = self._running.gateway.clock()
        if self._told is None or now - self._taken >= KEPT:
            index = self._running.index
            without = [target for target in index.low if not index.believed(target, None)]
            found = hottest(index.radix, BUDGET, MOST, without)
            self._taken = now
            self._told = {
                "prefixes": [self._row(prefix, b"") for prefix in found.prefixes],
                "looked_at": found.looked,
                "complete": found.whole,
            }
        return {**self._told, "age_seconds": round(now - self._taken, 3)}

    def _row(self, prefix: Prefix, before: bytes) -> dict[str, Any]:
        model, tenant, rest, by_ids = _parts(prefix.namespace)
        page = float(PAGE_TOKENS)
        if not by_ids:
            known = self._running.gateway.routing.models.get(model)
            page = TEXT_PAGE / (BYTES_PER_TOKEN if known is None else known.bytes_per_token)
        targets = self._running.fleet.targets
        holders = [targets[each].name for each in prefix.holders if each in targets]
        symbols = before + prefix.edge
        return {
            "id": self._name(prefix.namespace + symbols),
            "model": model,
            "tenant": tenant or None,
            "apart": bool(rest),
            "tokens": round(prefix.depth * page),
            "adds_tokens": round(prefix.pages * page),
            "prompts": prefix.below,
            "prompts_complete": prefix.whole,
            "used_seconds_ago": round(max(0.0, self._taken - prefix.used), 1),
            "holders": holders[:NAMED],
            "holders_total": len(holders),
            "children": [self._row(child, symbols) for child in prefix.children],
        }


def _parts(namespace: bytes) -> tuple[str, str, bytes, bool]:
    """Model; tenant, empty where tenants share; what else keeps caches apart; whether pages are of token ids."""
    by_ids = namespace.endswith(BY_IDS)
    model, tenant, rest = [*namespace.removesuffix(BY_IDS).split(b"\x00", 2), b"", b""][:3]
    return model.decode("utf-8", "replace"), tenant.decode("utf-8", "replace"), rest, by_ids
