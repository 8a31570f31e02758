"""Cache and affinity."""

from __future__ import annotations

from panels import Dashboard, Panel, Row
from queries import AT, FIRST, FIRST_BY_HIT, HITS, SHARES, VARIABLES, WHO, C, P, most, over, quantiles, rate

CACHE = Dashboard(
    "warmroute-cache",
    "Cache and affinity",
    "Why did the hit rate fall?",
    VARIABLES,
    (
        Row("What was lost, and to what", (HITS, SHARES)),
        Row(
            "Where",
            (
                Panel(
                    "Reported hit rate by target",
                    "One target far below the others holds little of what it is sent: restarted, smaller, or evicting under load.",
                    [
                        (
                            over("warmroute_cached_tokens", "warmroute_cache_reported_prompt_tokens", AT, "target"),
                            "{{target}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Reported hit rate by tenant",
                    "One tenant far below what it had: its prompts changed. The doctor says where.",
                    [
                        (
                            over("warmroute_cached_tokens", "warmroute_cache_reported_prompt_tokens", AT, "tenant"),
                            "{{tenant}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Ceiling by tenant",
                    "What one cache without bounds would give each tenant. Low: its prompts share nothing, a timestamp in front "
                    "of all else.",
                    [(over(C, P, AT, "tenant"), "{{tenant}}")],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Tokens lost to broken prompts",
                    "Prompt tokens a second that were not found again because a prompt did not go on from the one before, or did "
                    "not share its session's start, by cause. Of the prompts that the doctor examined.",
                    [
                        (
                            rate("warmroute_prompt_break_tokens", 'tenant=~"$tenant"', "tenant, cause"),
                            "{{tenant}} {{cause}}",
                        )
                    ],
                ),
                Panel(
                    "Broken prompts",
                    "How often, a second.",
                    [(rate("warmroute_prompt_breaks", 'tenant=~"$tenant"', "tenant, cause"), "{{tenant}} {{cause}}")],
                ),
                Panel(
                    "Evicted from belief",
                    "Pages of targets' believed holdings that were forgotten, a second, to respect their engines' capacity. Much of "
                    "it, with a high share lost to eviction: caches are too small for what comes back.",
                    [
                        (
                            'max by (target) (deriv(warmroute_target_evicted_pages{target=~"$target"}[$__rate_interval]))',
                            "{{target}}",
                        )
                    ],
                ),
                Panel(
                    "Prediction error",
                    "Reported minus predicted cached tokens, as a share of the prompt. Below 0 the engine held less than believed: "
                    "it evicts more than its capacity suggests, or was restarted. Above 0 it held more.",
                    quantiles("warmroute_prediction_error_ratio", 'model=~"$model"', shares=(0.1, 0.5, 0.9)),
                    "percentunit",
                ),
                Panel(
                    "Share of the cache counted on",
                    "The part of the cache's size, as its engine tells it, that the target's answers let predictions count on. Well "
                    "below 1: others use that engine too, or it evicts earlier than its size says.",
                    [('min by (target) (warmroute_target_cache_share{target=~"$target"})', "{{target}}")],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Returning tokens",
                    "Tokens that come in until an ordinary session of the target returns. Above the size of its cache: sessions will "
                    "not find their KV.",
                    [('max by (target) (warmroute_target_returning_tokens{target=~"$target"})', "{{target}}")],
                ),
            ),
        ),
        Row(
            "Affinity",
            (
                Panel(
                    "Decisions by reason",
                    "Why targets were chosen, a second.",
                    [(rate("warmroute_decisions", WHO, "policy, reason"), "{{policy}} {{reason}}")],
                    "reqps",
                ),
                Panel(
                    "Session outcomes",
                    "What each request meant for its session, a second: hit (went home), new, moved (it has a new home), spilled "
                    "(served elsewhere once), lost (its home is gone). Many moved or spilled: homes are overloaded.",
                    [(rate("warmroute_session_outcomes", WHO, "outcome, reason"), "{{outcome}} {{reason}}")],
                    "reqps",
                ),
                Panel(
                    "How sessions are recognised",
                    "Requests of sessions, a second, by what told the session. Mostly derived ones: clients send no session id; "
                    "prefixes still route them.",
                    [(rate("warmroute_session_sources", "", "source"), "{{source}}")],
                    "reqps",
                ),
                Panel(
                    "Sessions at home",
                    "Live sessions whose home is the target. Uneven homes become uneven load when they wake.",
                    [('sum by (target) (warmroute_target_homes{target=~"$target"})', "{{target}}")],
                ),
                Panel(
                    "Sessions",
                    "Live ones, and those forgotten since the start, for idleness and for want of room. Any of the latter: raise "
                    "sessions.max.",
                    [
                        ("sum (warmroute_sessions)", "live"),
                        ("sum (warmroute_sessions_expired)", "expired"),
                        ("sum (warmroute_sessions_dropped)", "no room"),
                    ],
                ),
                Panel(
                    "Sessions moved between turns",
                    "Sessions given another home, a second, by why: drains, an operator.",
                    [(rate("warmroute_session_migrations", "", "reason"), "{{reason}}")],
                ),
                Panel(
                    "Time to first token by turn",
                    "p90. Later turns carry longer prompts; with warm caches they are nevertheless as fast as the first. 'none' is "
                    "requests without a session.",
                    quantiles(FIRST, WHO, "turn", (0.9,)),
                    "s",
                ),
                FIRST_BY_HIT,
                Panel(
                    "Time between tokens by hit",
                    "p50, by how much of the prompt was cached: generation itself gains nothing, but who computes prompts beside it "
                    "slows it down.",
                    quantiles("warmroute_inter_token_seconds", WHO, "hit", (0.5,)),
                    "s",
                ),
            ),
        ),
        Row(
            "What engines hold",
            (
                Panel(
                    "Belief",
                    "What each target's holdings are taken from. Exact: its own KV events. Predicted: what was sent there, within its "
                    "cache's size. Session: only what a session left at its home. None: its answers contradict all else. The log and "
                    "the moves beside say why it changed.",
                    [
                        (
                            "sum by (instance, target) ("
                            '3 * warmroute_target_belief{rung="exact",target=~"$target"} or '
                            '2 * warmroute_target_belief{rung="predicted",target=~"$target"} or '
                            'warmroute_target_belief{rung="session",target=~"$target"})',
                            "{{target}}",
                        )
                    ],
                    kind="state-timeline",
                    steps=(("red", None), ("orange", 1), ("blue", 2), ("green", 3)),
                    words={"3": "exact", "2": "predicted", "1": "session", "0": "none"},
                ),
                Panel(
                    "Moves of belief",
                    "Steps on the ladder, a second, by where they led and why. Down: gap, restarted, disconnected, flooded, no_events, "
                    "reports_disagree, finds_nothing, shares_nothing, index_full. Up: events, reports_agree, shares_again, "
                    "finds_something.",
                    [(rate("warmroute_index_moves", 'target=~"$target"', "rung, reason"), "{{rung}} {{reason}}")],
                ),
                Panel(
                    "KV events",
                    "Batches of KV events applied, and blocks that they said were stored and removed, a second. Removed as fast as "
                    "stored: the caches are full.",
                    [
                        (most("warmroute_kv_event_batches", 'target=~"$target"'), "batches"),
                        (most("warmroute_kv_blocks_stored", 'target=~"$target"'), "blocks stored"),
                        (most("warmroute_kv_blocks_removed", 'target=~"$target"'), "blocks removed"),
                    ],
                ),
                Panel(
                    "KV events by target",
                    "Batches a second. One that serves requests and tells nothing: its events are off, or do not arrive.",
                    [(most("warmroute_kv_event_batches", 'target=~"$target"', "target"), "{{target}}")],
                ),
                Panel(
                    "Gaps and replays",
                    "Gaps in the order of an engine's batches, and replays asked for, a second. A replay on every connection is "
                    "normal. Gaps say that events come faster than they are applied, or that the network loses them.",
                    [
                        (most("warmroute_kv_event_gaps", 'target=~"$target"', "target"), "gaps {{target}}"),
                        (most("warmroute_kv_event_replays", 'target=~"$target"', "target"), "replays {{target}}"),
                    ],
                ),
                Panel(
                    "Events not used",
                    "Events that could not be read (another version of the engine?) and events whose blocks could not be placed (an "
                    "unknown parent, or no room), a second.",
                    [
                        (most("warmroute_kv_events_unread", 'target=~"$target"', "target"), "unread {{target}}"),
                        (most("warmroute_kv_events_unplaced", 'target=~"$target"', "target"), "unplaced {{target}}"),
                    ],
                ),
                Panel(
                    "Held tokens by tier",
                    "Tokens that engines hold, as their own events tell, by where they lie. What lies below the device is restored "
                    "before it is used.",
                    [
                        (
                            'sum by (tier) (max by (target, tier) (warmroute_target_held_tokens{target=~"$target"}))',
                            "{{tier}}",
                        )
                    ],
                ),
                Panel(
                    "Believed holdings",
                    "Pages (256 bytes of text, or 16 token ids) that each target is believed to hold. Flat at its capacity is normal; "
                    "a drop to 0 is a restart.",
                    [('max by (target) (warmroute_target_holding_pages{target=~"$target"})', "{{target}}")],
                ),
                Panel(
                    "Warmed starts",
                    "Shared starts of prompts that were sent to engines with empty caches, a second, by outcome; and requests by which "
                    "engines were asked to keep KV until its session returns.",
                    [
                        (rate("warmroute_warmed_starts", 'target=~"$target"', "outcome"), "{{outcome}}"),
                        (rate("warmroute_retention_hints", 'target=~"$target"'), "asked to keep"),
                    ],
                ),
                Panel(
                    "Routed by text although there is a tokenizer",
                    "Requests of models with a tokenizer that were routed by text all the same, a second, by why. Dialect: no token "
                    "ids are made for that path. No_template: models.<name>.template is missing. Saturated, late: more prompts than "
                    "can be tokenised. Media, parameter: what the prompt becomes differs from engine to engine.",
                    [(rate("warmroute_token_fallbacks", 'model=~"$model"', "reason"), "{{reason}}")],
                    "reqps",
                ),
                Panel(
                    "Size of the indexes",
                    "Estimated bytes of the prefix index, which stays below its configured bound; of those, what only the ceiling is "
                    "known by; and of the index of blocks that KV events told of.",
                    [
                        ("sum (warmroute_index_bytes)", "prefixes"),
                        ("sum (warmroute_index_remembered_bytes)", "remembered"),
                        ("sum (warmroute_blocks_bytes)", "blocks"),
                    ],
                    "bytes",
                ),
            ),
        ),
    ),
)
