"""What a simulation came to, as figures that people and scripts read."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from load_tests.simulate.fleet import Asked, Outcome

TURNS = ((1, 1), (2, 2), (3, 3), (4, 8), (9, 16), (17, 32), (33, None))
"""First and last of the numbers within a session that are taken together; ``None``: all that follow."""


class Goal(NamedTuple):
    """What a request must keep to count as good, in milliseconds; ``tpot`` ``None``: any pace will do."""

    ttft: float
    tpot: float | None = None


def row(outcome: Outcome, ceiling: float, goal: Goal | None = None, price: float | None = None) -> dict[str, Any]:
    """One policy's figures; ``None`` where nothing tells them. ``price``: of one engine's hour.

    With prefill apart a prompt's hit is that of the engine that computed it, and imbalance is of the prefill engines.
    """
    asked = outcome.asked
    ttft = sorted([each.first - each.arrived for each in asked])
    pace = sorted([pace for each in asked if (pace := tpot(each)) is not None])
    sessions = _Sessions(asked)
    prompt, computed = _computed(outcome)
    balanced = computed[: outcome.prefill] if outcome.prefill and any(computed[: outcome.prefill]) else computed
    cost = None if price is None else price * len(outcome.engines) * outcome.seconds / 3600
    good = None if goal is None or not asked else sum(_good(each, goal) for each in asked) / len(asked)
    return {
        "requests": len(asked),
        "token_hit_rate": _rounded(1 - sum(computed) / prompt if prompt else None, 4),
        "ceiling": _rounded(ceiling, 4),
        "ttft_mean_ms": _ms(sum(ttft) / len(ttft) if ttft else None),
        "ttft_p50_ms": _ms(quantile(ttft, 0.5)),
        "ttft_p90_ms": _ms(quantile(ttft, 0.9)),
        "ttft_p99_ms": _ms(quantile(ttft, 0.99)),
        "tpot_mean_ms": _ms(sum(pace) / len(pace) if pace else None),
        "tpot_p50_ms": _ms(quantile(pace, 0.5)),
        "tpot_p99_ms": _ms(quantile(pace, 0.99)),
        "session_p50_s": _rounded(quantile(sessions.lasted, 0.5), 3),
        "session_p90_s": _rounded(quantile(sessions.lasted, 0.9), 3),
        "imbalance": _rounded(max(balanced) * len(balanced) / sum(balanced) if sum(balanced) else None, 3),
        "moved_sessions": sessions.moved,
        "pair_share": _rounded(_pairs(outcome), 4),
        "goodput": _rounded(good, 4),
        "cost_per_session": _rounded(cost / len(sessions.lasted) if cost is not None and sessions.lasted else None, 6),
        "cost_per_request": _rounded(cost / len(asked) if cost is not None and asked else None, 6),
        "requests_again": sum([each.again for each in asked]),
        "preemptions": sum(engine.totals.preemptions for engine in outcome.engines),
        "ttft_by_turn": sessions.by_turn,
    }


def _pairs(outcome: Outcome) -> float | None:
    """Share of requests that two engines served; ``None`` where all do both."""
    if not outcome.prefill or not outcome.asked:
        return None
    return sum(each.sent.decoder is not None for each in outcome.asked) / len(outcome.asked)


def _computed(outcome: Outcome) -> tuple[int, list[int]]:
    """Prompt tokens that were asked, and of each engine those that it computed."""
    engines = outcome.engines
    if not outcome.prefill:
        return sum(engine.totals.prompt for engine in engines), [engine.totals.computed for engine in engines]
    # The totals of a decode engine count what came to it from others too.
    computed = [0] * len(engines)
    for each in outcome.asked:
        computed[each.worker] += each.asks.tokens - each.cached
    return sum(each.asks.tokens for each in outcome.asked), computed


def tpot(asked: Asked) -> float | None:
    """Seconds between two tokens of an answer, on average; ``None`` of one token or none."""
    output = asked.asks.output
    return (asked.ended - asked.first) / (output - 1) if output > 1 else None


def _good(asked: Asked, goal: Goal) -> bool:
    if (asked.first - asked.arrived) * 1e3 > goal.ttft:
        return False
    pace = tpot(asked) if goal.tpot is not None else None
    return pace is None or goal.tpot is None or pace * 1e3 <= goal.tpot


class _Sessions:
    """Requests by session, whose order is that of arrival. ``lasted``: seconds of each, from the shortest on; ``moved``: how
    many were on more than one engine; ``by_turn``: as `row` has it, ``None`` where there are no sessions."""

    def __init__(self, asked: Iterable[Asked]) -> None:
        begun: dict[str, float] = {}
        ended: dict[str, float] = {}
        workers: dict[str, int] = {}
        turns: dict[str, int] = {}
        moved: set[str] = set()
        waited: list[list[float]] = [[] for _ in TURNS]
        for each in asked:
            session = each.chain.session
            if session is None:
                continue
            begun.setdefault(session, each.arrived)
            ended[session] = max(ended.get(session, 0.0), each.ended)
            if workers.setdefault(session, each.worker) != each.worker:
                moved.add(session)
                workers[session] = each.worker
            number = turns[session] = turns.get(session, 0) + 1
            waited[_bucket(number)].append(each.first - each.arrived)
        self.lasted = sorted([ended[session] - at for session, at in begun.items()])
        self.moved = len(moved)
        self.by_turn: list[dict[str, Any]] | None = None
        if begun:
            self.by_turn = [
                {"turn": _named(first, last), "requests": len(them), "ttft_mean_ms": _ms(fmean(them) if them else None)}
                for (first, last), them in zip(TURNS, waited, strict=True)
            ]


def _bucket(number: int) -> int:
    if number <= 3:
        return number - 1
    return next(place for place, (_, last) in enumerate(TURNS) if last is None or number <= last)


def _named(first: int, last: int | None) -> str:
    return f"{first}+" if last is None else str(first) if first == last else f"{first}-{last}"


def mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the same policy's figures under several seeds: each the mean of those that are told, and ``spread``: their standard
    deviations. One row stays as it is."""
    if len(rows) == 1:
        return dict(rows[0])
    spread: dict[str, float | None] = {}
    found: dict[str, Any] = {}
    for key in rows[0]:
        if key == "ttft_by_turn":
            found[key] = _mean_by_turn([row[key] for row in rows if row[key] is not None])
            continue
        told = [row[key] for row in rows if row[key] is not None]
        same = all(value == told[0] for value in told)
        found[key] = (told[0] if same else round(fmean(told), 6)) if told else None
        spread[key] = round(stdev(told), 6) if len(told) > 1 else None
    found["spread"] = spread
    return found


def _mean_by_turn(tables: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]] | None:
    if not tables:
        return None
    found = []
    for buckets in zip(*tables, strict=True):
        told = [each["ttft_mean_ms"] for each in buckets if each["ttft_mean_ms"] is not None]
        requests = fmean(each["requests"] for each in buckets)
        found.append(
            {
                "turn": buckets[0]["turn"],
                "requests": round(requests, 1),
                "ttft_mean_ms": round(fmean(told), 2) if told else None,
            }
        )
    return found


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of ``ordered`` lies (nearest rank); ``None`` of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
