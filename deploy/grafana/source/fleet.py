"""Fleet at a glance."""

from __future__ import annotations

from panels import Dashboard, Panel, Row
from queries import (
    AT,
    CEILING,
    FIRST,
    FIRST_BY_HIT,
    HITS,
    OUTCOMES,
    REPORTED,
    SHARES,
    STATES,
    VARIABLES,
    WHO,
    quantile,
    quantiles,
    rate,
)

FLEET = Dashboard(
    "warmroute-fleet",
    "Fleet at a glance",
    "Is the fleet well, and what do the caches give?",
    VARIABLES,
    (
        Row(
            "Now",
            (
                Panel(
                    "Requests",
                    "Requests that ended, a second.",
                    [(rate("warmroute_requests", WHO), "")],
                    "reqps",
                    4,
                    4,
                    "stat",
                ),
                Panel(
                    "Answered",
                    "Of requests that clients did not give up, nor were refused for what they are: how many were answered.",
                    [
                        (
                            rate("warmroute_requests", f'{WHO},outcome="ok"')
                            + " / "
                            + rate("warmroute_requests", f'{WHO},outcome!~"client_gone|client_error|refused"'),
                            "",
                        )
                    ],
                    "percentunit",
                    4,
                    4,
                    "stat",
                    steps=(("red", None), ("orange", 0.99), ("green", 0.999)),
                ),
                Panel(
                    "Hit rate", "Reported by engines, weighed by tokens.", [(REPORTED, "")], "percentunit", 4, 4, "stat"
                ),
                Panel(
                    "Of the ceiling",
                    "The reported hit rate over what one cache without bounds would have given.",
                    [(f"({REPORTED}) / ({CEILING})", "")],
                    "percentunit",
                    4,
                    4,
                    "stat",
                    steps=(("red", None), ("orange", 0.6), ("green", 0.85)),
                ),
                Panel(
                    "First token, p99", "Of streamed answers.", [(quantile(0.99, FIRST, WHO), "")], "s", 4, 4, "stat"
                ),
                Panel(
                    "Workers ready",
                    "By the gateway that sees fewest.",
                    [('min (warmroute_workers{state="ready"})', "")],
                    "short",
                    4,
                    4,
                    "stat",
                    steps=(("red", None), ("green", 1)),
                ),
            ),
        ),
        Row("What the caches give", (HITS, SHARES)),
        Row(
            "What users feel",
            (
                Panel(
                    "Time to first token",
                    "From the request's last byte to the first event of a streamed answer.",
                    quantiles(FIRST, WHO),
                    "s",
                ),
                FIRST_BY_HIT,
                Panel(
                    "Time between tokens",
                    "Mean time between two tokens of one streamed answer, over answers.",
                    quantiles("warmroute_inter_token_seconds", WHO),
                    "s",
                ),
                OUTCOMES,
                Panel(
                    "Tokens",
                    "Prompt tokens that engines found in their caches, prompt tokens that they had to compute, and generated "
                    "tokens, a second. Only requests whose engine reports cached tokens count as cached or computed.",
                    [
                        (rate("warmroute_cached_tokens", AT), "cached"),
                        (
                            f"{rate('warmroute_cache_reported_prompt_tokens', AT)} - {rate('warmroute_cached_tokens', AT)}",
                            "computed",
                        ),
                        (rate("warmroute_completion_tokens", AT), "generated"),
                    ],
                ),
                Panel(
                    "Prefill spared",
                    "Engines whose whole time would go into prefill that cached tokens spare: seconds of prefill a second.",
                    [(rate("warmroute_saved_prefill_seconds", AT, "model"), "{{model}}")],
                ),
            ),
        ),
        Row(
            "Load",
            (
                Panel(
                    "In flight",
                    "Requests that gateways sent to the target and that are not over.",
                    [('sum by (target) (warmroute_target_in_flight{target=~"$target"})', "{{target}}")],
                ),
                Panel(
                    "Wait",
                    "Estimated seconds of prefill in front of a new request: the gateway's own, plus what the engine reports queued. "
                    "One far above the others: a hotspot, or a slow engine.",
                    [('max by (target) (warmroute_target_wait_seconds{target=~"$target"})', "{{target}}")],
                    "s",
                ),
                Panel(
                    "Lateness",
                    "How long streams take to begin on each target, as a multiple of what was expected of their prompts there. One far "
                    "above its peers is slow: it throttles, swaps, or shares its machine.",
                    [('max by (target) (warmroute_target_lateness{target=~"$target"})', "{{target}}")],
                ),
                Panel(
                    "Computed tokens",
                    "Prompt tokens that targets had to compute, a second.",
                    [
                        (
                            f"{rate('warmroute_cache_reported_prompt_tokens', AT, 'target')}"
                            f" - {rate('warmroute_cached_tokens', AT, 'target')}",
                            "{{target}}",
                        )
                    ],
                ),
                Panel(
                    "Engine's queue",
                    "Requests that the engine reports waiting, whoever sent them. Absent for engines that do not say.",
                    [('max by (target) (warmroute_target_queue{target=~"$target"})', "{{target}}")],
                ),
                Panel(
                    "KV in use",
                    "The part of its KV cache that the engine reports in use by running requests.",
                    [('max by (target) (warmroute_target_kv_usage{target=~"$target"})', "{{target}}")],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Waiting in the gateway",
                    "Requests that wait because everybody who could serve them is full, or their tenant has as many running as "
                    "it may.",
                    [("sum by (priority) (warmroute_queue_requests)", "{{priority}}")],
                ),
                STATES,
                Panel(
                    "Left alone",
                    "Targets whose breaker is open, by why: faults in a row, or errors or latency far above their peers'.",
                    [
                        ("sum by (reason) (max by (target, reason) (warmroute_target_breaker))", "{{reason}}"),
                        ("max (warmroute_workers_doubted)", "doubted, used all the same"),
                    ],
                ),
                Panel(
                    "Faults of workers",
                    "Errors, resets and timeouts of workers, a second.",
                    [(rate("warmroute_worker_faults", 'target=~"$target"', "target, kind"), "{{target}} {{kind}}")],
                ),
            ),
        ),
    ),
)
