"""Sessions as the control plane shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.asks import BY_IDS
from gateway.sessions import Session
from kv_index.pages import PAGE_TOKENS, SYMBOL, TEXT_PAGE

if TYPE_CHECKING:
    from gateway.run import Running

CHILDREN = 100
"""Children that are named."""


def brief(running: Running, session: Session) -> dict[str, Any]:
    """One row of a list."""
    return {
        "id": session.key.hex(),
        "source": session.source,
        "tenant": session.tenant,
        "model": session.model,
        "home": name(running, session.home),
        "turns": session.turns,
        "running": session.running,
        "prompt_tokens": session.prompt_tokens,
        "idle_seconds": round(running.gateway.clock() - session.used, 3),
    }


def whole(running: Running, session: Session) -> dict[str, Any]:
    """All that is known of it."""
    now = running.gateway.clock()
    children = running.sessions.children(session)
    reported = [(prompt, cached) for prompt, cached in session.hits if cached is not None]
    prompts = sum(prompt for prompt, _ in reported)
    return {
        **brief(running, session),
        "why": session.why or None,
        "partner": name(running, session.partner),
        "parent": None if session.parent is None else session.parent.hex(),
        "children": [child.key.hex() for child in children[:CHILDREN]],
        "children_total": len(children),
        "told": sorted(session.told or ()),
        "tool": session.tool or None,
        "holdings": holdings(running, session),
        "hits": [
            {"prompt_tokens": prompt, "cached_tokens": cached, "rate": _rate(cached, prompt)}
            for prompt, cached in session.hits
        ],
        "hit_rate": _rate(sum(cached for _, cached in reported if cached is not None), prompts),
        "breaks": running.gateway.accounts.breaks(session),
        "returns": running.gateway.routing.forecast(session, now),
    }


def holdings(running: Running, session: Session) -> dict[str, int]:
    """Target -> tokens of the session's last prompt that it is believed to hold, the most first."""
    symbols = session.pages.symbols
    if not symbols:
        return {}
    index = running.index
    by_ids = session.namespace.endswith(BY_IDS)
    page = float(PAGE_TOKENS)
    if not by_ids:
        tokens = session.prompt_tokens or 0
        page = TEXT_PAGE * tokens / session.prompt_bytes if session.prompt_bytes and tokens else TEXT_PAGE / 4
    pages = index.radix.match(session.namespace, symbols).depths
    held = {target: round(depth * page) for target, depth in pages.items() if index.believed(target, session.home)}
    if by_ids:
        for target, tokens in index.blocks.match(symbols).tokens.items():
            held[target] = max(held.get(target, 0), min(tokens, len(symbols) // SYMBOL * PAGE_TOKENS))
    named = {name(running, target): tokens for target, tokens in sorted(held.items(), key=lambda item: -item[1])}
    return {target: tokens for target, tokens in named.items() if target is not None and tokens}


def name(running: Running, target: int | None) -> str | None:
    """Of a target that is still there."""
    found = None if target is None else running.fleet.targets.get(target)
    return None if found is None else found.name


def _rate(cached: int | None, prompt: int) -> float | None:
    return None if cached is None or not prompt else round(cached / prompt, 4)
