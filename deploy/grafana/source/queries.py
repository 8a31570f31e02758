"""PromQL that dashboards share, and panels that more than one of them shows."""

from __future__ import annotations

from collections.abc import Sequence

from panels import Panel

WHO = 'tenant=~"$tenant",model=~"$model"'
AT = f'{WHO},target=~"$target"'
WORST = (("green", None), ("orange", 1), ("red", 2))


def rate(metric: str, only: str = "", by: str = "") -> str:
    """Of a counter, a second, summed."""
    of = f"{{{only}}}" if only else ""
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}_total{of}[$__rate_interval]))"


def over(part: str, whole: str, only: str, by: str = "") -> str:
    """One counter's rate over another's, of the same interval."""
    return f"{rate(part, only, by)} / {rate(whole, only, by)}"


def quantile(share: float, metric: str, only: str = "", by: str = "") -> str:
    """Of a histogram."""
    of = f"{{{only}}}" if only else ""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{of}[$__rate_interval])))"


def quantiles(
    metric: str, only: str = "", by: str = "", shares: Sequence[float] = (0.5, 0.9, 0.99)
) -> list[tuple[str, str]]:
    """Some of a histogram's quantiles, each with its legend."""
    behind = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return [(quantile(share, metric, only, by), f"p{100 * share:g} {behind}".strip()) for share in shares]


P, C, B = "warmroute_predicted_prompt_tokens", "warmroute_ceiling_cached_tokens", "warmroute_best_cached_tokens"
K = "warmroute_predicted_cached_tokens"
REPORTED = over("warmroute_cached_tokens", "warmroute_cache_reported_prompt_tokens", AT)
PREDICTED = over(K, P, AT)
CEILING = over(C, P, AT)


def most(metric: str, only: str = "", by: str = "", of: str = "target") -> str:
    """Of a counter that every gateway tells of the same engines: a second, once."""
    one = f"max by ({of}{', ' + by if by and by != of else ''}) (rate({metric}_total{f'{{{only}}}' if only else ''}[$__rate_interval]))"
    return f"sum {f'by ({by}) ' if by else ''}({one})"


ENGINES = (
    f"{most('warmroute_engine_cached_tokens', of='worker')} / {most('warmroute_engine_prompt_tokens', of='worker')}"
)
EVICTED = f"({rate(C, AT)} - {rate(B, AT)}) / {rate(P, AT)}"
ROUTED = f"({rate(B, AT)} - {rate(K, AT)}) / {rate(P, AT)}"
COLD = f"1 - {CEILING}"
FIRST = "warmroute_time_to_first_token_seconds"

HITS = Panel(
    "Hit rate against its ceiling",
    "Prompt tokens found in an engine's cache over prompt tokens, both of the same interval: long prompts weigh what they cost. "
    "Reported by engines with each answer; predicted when it was sent; counted by engines themselves, whoever sent it (always of the whole fleet). The ceiling "
    "is what one cache without bounds would have given.",
    [(REPORTED, "reported"), (PREDICTED, "predicted"), (ENGINES, "engines' own"), (CEILING, "ceiling")],
    "percentunit",
    12,
    most=1,
)
SHARES = Panel(
    "Where prompt tokens went",
    "All prompt tokens, divided: predicted to be cached where they were sent; lost to routing (another target held them); lost to "
    "eviction (seen before, held by nobody any more); cold (never seen).",
    [(PREDICTED, "cached"), (ROUTED, "lost to routing"), (EVICTED, "lost to eviction"), (COLD, "cold")],
    "percentunit",
    12,
    stacked=True,
    most=1,
)
OUTCOMES = Panel(
    "Requests by outcome",
    "Requests that ended, a second, by how they ended.",
    [(rate("warmroute_requests", WHO, "outcome"), "{{outcome}}")],
    "reqps",
)
FIRST_BY_HIT = Panel(
    "Time to first token by hit",
    "p90, by how much of the prompt was cached: none (under 10 %), some (50), most (90), all. Hits that are not faster than misses "
    "mean that first tokens wait for something else than prefill: queues, transfers.",
    quantiles(FIRST, WHO, "hit", (0.9,)),
    "s",
)
STATES = Panel(
    "Workers by state",
    "How many workers are joining, ready, draining or down.",
    [("sum by (state) (max by (worker, state) (warmroute_worker_state))", "{{state}}")],
)

VARIABLES = (
    ("model", "warmroute_decisions_total"),
    ("tenant", "warmroute_decisions_total"),
    ("target", "warmroute_target_in_flight"),
)
