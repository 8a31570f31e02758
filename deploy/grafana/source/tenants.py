"""Tenants."""

from __future__ import annotations

from panels import Dashboard, Panel, Row
from queries import FIRST, VARIABLES, WHO, over, quantiles, rate

TENANTS = Dashboard(
    "warmroute-tenants",
    "Tenants",
    "Who asks for what, who gets it, and what it costs.",
    VARIABLES[:2],
    (
        Row(
            "What they ask for",
            (
                Panel(
                    "Requests by tenant",
                    "Requests that ended, a second.",
                    [(rate("warmroute_requests", WHO, "tenant"), "{{tenant}}")],
                    "reqps",
                ),
                Panel(
                    "Computed tokens by tenant",
                    "Prompt tokens that engines had to compute, a second: what a tenant costs. One far above its share is hot.",
                    [
                        (
                            f"{rate('warmroute_cache_reported_prompt_tokens', WHO, 'tenant')}"
                            f" - {rate('warmroute_cached_tokens', WHO, 'tenant')}",
                            "{{tenant}}",
                        )
                    ],
                    stacked=True,
                ),
                Panel(
                    "Prompt and generated tokens",
                    "As engines report them, a second.",
                    [
                        (rate("warmroute_prompt_tokens", WHO, "tenant"), "prompt {{tenant}}"),
                        (rate("warmroute_completion_tokens", WHO, "tenant"), "generated {{tenant}}"),
                    ],
                ),
                Panel(
                    "Running",
                    "Requests in flight of tenants that have limits.",
                    [('sum by (tenant) (warmroute_tenant_running{tenant=~"$tenant"})', "{{tenant}}")],
                ),
                Panel(
                    "Hit rate",
                    "Reported by engines, weighed by tokens.",
                    [
                        (
                            over("warmroute_cached_tokens", "warmroute_cache_reported_prompt_tokens", WHO, "tenant"),
                            "{{tenant}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Prefill spared",
                    "Seconds of prefill a second that cached tokens spare.",
                    [(rate("warmroute_saved_prefill_seconds", WHO, "tenant"), "{{tenant}}")],
                ),
            ),
        ),
        Row(
            "What they get",
            (
                Panel(
                    "Time to first token, p99", "Of streamed answers.", quantiles(FIRST, WHO, "tenant", (0.99,)), "s"
                ),
                Panel(
                    "Duration, p90",
                    "From the request's last byte to the answer's last byte.",
                    quantiles("warmroute_request_duration_seconds", WHO, "tenant", (0.9,)),
                    "s",
                ),
                Panel(
                    "Not answered",
                    "Requests that ended otherwise than well, a second, by how.",
                    [(rate("warmroute_requests", f'{WHO},outcome!="ok"', "tenant, outcome"), "{{tenant}} {{outcome}}")],
                    "reqps",
                ),
                Panel(
                    "Over a limit",
                    "Requests over what their tenant is granted, a second, by what.",
                    [(rate("warmroute_tenant_limited", 'tenant=~"$tenant"', "tenant, limit"), "{{tenant}} {{limit}}")],
                    "reqps",
                ),
                Panel(
                    "Refused for want of room",
                    "Requests that were not let in, a second, by why: queue_full, too_long, deadline, tenant.",
                    [(rate("warmroute_queue_shed", 'tenant=~"$tenant"', "tenant, reason"), "{{tenant}} {{reason}}")],
                    "reqps",
                ),
                Panel(
                    "Without a good credential",
                    "Requests a second: missing, unknown, token (a JWT), limited (unknown, too often), admin; and requests that were "
                    "refused before routing, by status.",
                    [
                        (rate("warmroute_auth_failures", "", "reason"), "{{reason}}"),
                        (rate("warmroute_refused_requests", "", "status"), "{{status}}"),
                    ],
                    "reqps",
                ),
            ),
        ),
        Row(
            "Another policy beside",
            (
                Panel(
                    "Shadow agrees",
                    "The part of requests for which the shadow policy would have chosen the same target.",
                    [
                        (
                            f"{rate('warmroute_shadow_decisions', WHO + ',agrees=' + chr(34) + 'true' + chr(34), 'tenant, shadow')}"
                            f" / {rate('warmroute_shadow_decisions', WHO, 'tenant, shadow')}",
                            "{{tenant}} {{shadow}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Shadow's seconds",
                    "Seconds a second by which the shadow's choices would have been better, or worse, by the costs that the gateway "
                    "knows.",
                    [(rate("warmroute_shadow_seconds", WHO, "shadow, than_ours"), "{{shadow}} {{than_ours}}")],
                ),
                Panel(
                    "Shadow's tokens",
                    "Prompt tokens a second that the shadow's choices would have had computed less (better) or more (worse).",
                    [(rate("warmroute_shadow_tokens", WHO, "shadow, than_ours"), "{{shadow}} {{than_ours}}")],
                ),
            ),
        ),
    ),
)
