"""What a simulation came to, as figures that people and scripts read."""

from collections.abc import Sequence
from typing import Any

from load_tests.simulate.fleet import Outcome


def row(outcome: Outcome, ceiling: float) -> dict[str, Any]:
    """One policy's figures; ``None`` where nothing tells them."""
    asked = outcome.asked
    ttft = sorted(each.first - each.arrived for each in asked)
    pace = sorted((each.ended - each.first) / (output - 1) for each in asked if (output := each.asks.output) > 1)
    begun: dict[str, float] = {}
    ended: dict[str, float] = {}
    workers: dict[str, int] = {}
    moved: set[str] = set()
    for each in asked:
        session = each.chain.session
        if session is None:
            continue
        begun.setdefault(session, each.arrived)
        ended[session] = max(ended.get(session, 0.0), each.ended)
        if workers.setdefault(session, each.worker) != each.worker:
            moved.add(session)
        workers[session] = each.worker
    prompt = sum(engine.totals.prompt for engine in outcome.engines)
    computed = [engine.totals.computed for engine in outcome.engines]
    lasted = sorted(ended[session] - at for session, at in begun.items())
    return {
        "requests": len(asked),
        "token_hit_rate": _rounded(1 - sum(computed) / prompt if prompt else None, 4),
        "ceiling": _rounded(ceiling, 4),
        "ttft_mean_ms": _ms(sum(ttft) / len(ttft) if ttft else None),
        "ttft_p50_ms": _ms(quantile(ttft, 0.5)),
        "ttft_p90_ms": _ms(quantile(ttft, 0.9)),
        "ttft_p99_ms": _ms(quantile(ttft, 0.99)),
        "tpot_p50_ms": _ms(quantile(pace, 0.5)),
        "session_p50_s": _rounded(quantile(lasted, 0.5), 3),
        "imbalance": _rounded(max(computed) * len(computed) / sum(computed) if sum(computed) else None, 3),
        "moved_sessions": len(moved),
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of ``ordered`` lies (nearest rank); ``None`` of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
