"""Gateway internals."""

from __future__ import annotations

from panels import Dashboard, Panel, Row
from queries import VARIABLES, WHO, WORST, most, quantiles, rate

GATEWAY = Dashboard(
    "warmroute-gateway",
    "Gateway internals",
    "What the gateway itself takes, and what goes wrong in and around it.",
    VARIABLES,
    (
        Row(
            "What it takes",
            (
                Panel(
                    "Overhead",
                    "From the request's last byte to its being sent to a worker: parsing, session, index, policy.",
                    quantiles("warmroute_overhead_seconds", "", "policy", (0.5, 0.99)),
                    "s",
                ),
                Panel(
                    "Overhead by stage, p90",
                    "Read (its body and whose it is), tokenize, match (session and index), choose, connect (nothing where a kept "
                    "connection is free), write.",
                    quantiles("warmroute_stage_seconds", "", "stage", (0.9,)),
                    "s",
                ),
                Panel(
                    "Event loop lag",
                    "How late the event loop wakes up. Above some milliseconds the process wants more CPU, or another process beside "
                    "it.",
                    [
                        *quantiles("warmroute_event_loop_lag_seconds", shares=(0.5, 0.99)),
                        ("max (warmroute_event_loop_lag_average_seconds)", "average of a second, worst"),
                    ],
                    "s",
                ),
                Panel(
                    "CPU",
                    "Cores. One process uses one.",
                    [('rate(process_cpu_seconds_total{job="warmroute"}[$__rate_interval])', "{{instance}}")],
                ),
                Panel(
                    "Memory",
                    "Resident bytes.",
                    [('process_resident_memory_bytes{job="warmroute"}', "{{instance}}")],
                    "bytes",
                ),
                Panel(
                    "Descriptors",
                    "The part of the limit that is open; and looks that found none left, a second: connections are cut.",
                    [
                        (
                            'max (process_open_fds{job="warmroute"} / process_max_fds{job="warmroute"})',
                            "open",
                        ),
                        (rate("warmroute_descriptors_short"), "looks that found none"),
                    ],
                    "percentunit",
                ),
                Panel(
                    "Connections and requests",
                    "Client connections, requests being answered, and requests whose prompts are being tokenised (each waits 2 s at "
                    "most, then it is routed by text).",
                    [
                        ("sum (warmroute_connections)", "connections"),
                        ("sum (warmroute_exchanges)", "requests"),
                        ("sum (warmroute_preparing)", "tokenising"),
                    ],
                ),
                Panel(
                    "Own pressure",
                    "What the gateway leaves out for want of time or memory.",
                    [("max by (instance) (warmroute_pressure_rung)", "{{instance}}")],
                    kind="state-timeline",
                    steps=WORST,
                    words={
                        "0": "nothing",
                        "1": "optional work",
                        "2": "token ids",
                        "3": "prefixes",
                        "4": "all but the first priority",
                        "5": "every new request",
                    },
                ),
                Panel(
                    "Left out",
                    "What was left out, a second: examinations, requests.",
                    [(rate("warmroute_pressure_skipped", "", "what"), "{{what}}")],
                ),
            ),
        ),
        Row(
            "The queue",
            (
                Panel(
                    "Waiting",
                    "Requests that wait for a free target.",
                    [("sum by (priority) (warmroute_queue_requests)", "{{priority}}")],
                ),
                Panel(
                    "Bytes that wait",
                    "Of the bodies of requests that wait.",
                    [("sum by (priority) (warmroute_queue_bytes)", "{{priority}}")],
                    "bytes",
                ),
                Panel(
                    "Time in the queue",
                    "Of requests that left it for a target.",
                    quantiles("warmroute_queue_seconds", "", "priority", (0.5, 0.99)),
                    "s",
                ),
            ),
        ),
        Row(
            "What goes wrong",
            (
                Panel(
                    "Retries",
                    "Attempts after the first, a second, by what made them necessary, and requests that were sent again because a "
                    "reused connection was dead. Clients do not see these failures.",
                    [
                        (rate("warmroute_retries", 'model=~"$model"', "reason"), "{{reason}}"),
                        (rate("warmroute_resends", 'target=~"$target"'), "dead connection"),
                    ],
                    "reqps",
                ),
                Panel(
                    "Full workers and open breakers",
                    "Answers that say a worker is full, and circuit breakers that opened after faults in a row, a second.",
                    [
                        (rate("warmroute_backpressure", 'target=~"$target"', "target"), "full {{target}}"),
                        (rate("warmroute_breaker_openings", 'target=~"$target"', "target"), "opened {{target}}"),
                    ],
                ),
                Panel(
                    "Far worse than their peers",
                    "Targets that were left alone for a while because they did far worse than their peers, a second, and those that "
                    "were not because half of them are out already.",
                    [
                        (
                            rate("warmroute_target_put_out", 'target=~"$target"', "target, reason"),
                            "out {{target}} {{reason}}",
                        ),
                        (
                            rate("warmroute_target_spared", 'target=~"$target"', "target, reason"),
                            "spared {{target}} {{reason}}",
                        ),
                    ],
                ),
                Panel(
                    "Clients that left, and what engines stopped",
                    "Requests whose client went away before the end, a second, by phase; and requests that engines count as aborted. "
                    "Clients leave in the middle and engines stop nothing: they generate for nobody.",
                    [
                        (rate("warmroute_client_aborts", "", "phase"), "left, {{phase}}"),
                        (most("warmroute_engine_aborts", of="worker"), "stopped by engines"),
                    ],
                    "reqps",
                ),
                Panel(
                    "Defects",
                    "Errors of the gateway's own since its start; its log has each with its trace. Anything but 0 wants a report.",
                    [("sum by (instance) (warmroute_defects)", "{{instance}}")],
                ),
                Panel(
                    "Duration of requests",
                    "From the request's last byte to the answer's last byte.",
                    quantiles("warmroute_request_duration_seconds", WHO),
                    "s",
                ),
            ),
        ),
        Row(
            "Configuration and files",
            (
                Panel(
                    "Configuration",
                    "Reloads that were followed since the start, whether the last one failed, and keys that wait for a restart.",
                    [
                        ("max by (instance) (warmroute_config_generation)", "generation {{instance}}"),
                        ("1 - min by (instance) (warmroute_config_last_reload_ok)", "last one failed {{instance}}"),
                        ("max by (instance) (warmroute_config_needs_restart)", "keys that need a restart {{instance}}"),
                    ],
                ),
                Panel(
                    "Reloads",
                    "A second, by outcome.",
                    [(rate("warmroute_config_reloads", "", "outcome"), "{{outcome}}")],
                ),
                Panel(
                    "Sources of workers",
                    "Workers that each source lists, and how long ago its list was last known to be what there is. A source that "
                    "fails leaves the workers that it listed last.",
                    [
                        ("max by (source) (warmroute_discovery_workers)", "listed by {{source}}"),
                        ("max by (source) (warmroute_discovery_list_age_seconds)", "seconds old {{source}}"),
                        ("1 - min by (source) (warmroute_discovery_up)", "fails {{source}}"),
                    ],
                ),
                Panel(
                    "Failures of sources",
                    "Times a second that a source of workers could not be asked, or said what cannot be used, by reason; and workers "
                    "that registered themselves and were not heard of within their lease.",
                    [
                        (rate("warmroute_discovery_errors", "", "source, reason"), "{{source}} {{reason}}"),
                        (rate("warmroute_leases_expired"), "leases that ran out"),
                    ],
                ),
                Panel(
                    "Other gateways",
                    "Processes on the same host and gateways on others that are heard; those that cannot hear any although they "
                    "should; words that wait to be said, and sessions and marks of prompts that are known of others.",
                    [
                        ("min(warmroute_replicas)", "heard by the one that hears fewest"),
                        ("sum(warmroute_replicas_deaf)", "hear nobody"),
                        ("sum(warmroute_replicas_unsaid)", "words that wait"),
                        ("max by (what) (warmroute_replicas_known)", "known {{what}}"),
                        (rate("warmroute_replicas_left"), "left a second"),
                    ],
                ),
                Panel(
                    "Words between gateways",
                    "Batches and bytes a second that gateways say and hear; lost ones are asked for again; conflicts are sessions "
                    "to which two gave different homes.",
                    [
                        (rate("warmroute_replicas_batches", "", "what"), "batches {{what}}"),
                        (rate("warmroute_replicas_bytes", "", "what"), "bytes {{what}}"),
                        (rate("warmroute_replicas_conflicts"), "conflicts"),
                    ],
                ),
                Panel(
                    "Recording and engines' sessions",
                    "Requests written to the recording, those dropped for want of time, and ends of sessions that engines were to be "
                    "told of, a second.",
                    [
                        (rate("warmroute_recorded_requests"), "recorded"),
                        (rate("warmroute_recording_dropped"), "dropped"),
                        (rate("warmroute_request_log_dropped"), "not in the log of requests"),
                        (rate("warmroute_session_closes", "", "outcome"), "sessions closed: {{outcome}}"),
                    ],
                ),
                Panel(
                    "What runs",
                    "Versions; different ones meanwhile a rollout.",
                    [("sum by (version, python) (warmroute_build_info)", "{{version}}, Python {{python}}")],
                ),
            ),
        ),
        Row(
            "Prefill and decode",
            (
                Panel(
                    "Pairs and workers alone",
                    "Requests in a fleet with prefill and decode workers, a second: served by a pair, or by one worker that computed "
                    "the prompt itself.",
                    [(rate("warmroute_pd_decisions", 'model=~"$model"', "kind, reason"), "{{kind}} {{reason}}")],
                    "reqps",
                ),
                Panel(
                    "Transfers",
                    "From a decode worker's being asked to its first event, where the prompt was computed elsewhere: KV on its way, "
                    "and the first token.",
                    quantiles("warmroute_pd_transfer_seconds", 'model=~"$model"'),
                    "s",
                ),
                Panel(
                    "Parts that failed",
                    "Parts of pairs that failed before the answer began, by whose failure it was and in which stage. Unknown: both "
                    "failed as often.",
                    [(rate("warmroute_pd_leg_failures", 'model=~"$model"', "role, stage"), "{{role}} {{stage}}")],
                ),
                Panel(
                    "Computed again on prefill workers",
                    "Prompt tokens a second that a prefill worker computed although the decode worker held them: what handing KV back "
                    "could save.",
                    [(rate("warmroute_pd_recomputed_tokens", 'model=~"$model"'), "tokens")],
                ),
                Panel(
                    "KV handed back",
                    "KV of a session's last turn that decode workers offered, a second, and what became of it.",
                    [(rate("warmroute_pd_returns", 'model=~"$model"', "outcome"), "{{outcome}}")],
                ),
                Panel(
                    "Fetched from a session's home",
                    "Requests that moved and were told to fetch KV from where their session was, a second.",
                    [(rate("warmroute_kv_fetches", 'model=~"$model"'), "fetched")],
                    "reqps",
                ),
            ),
        ),
    ),
)
