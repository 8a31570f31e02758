"""What is counted, and how it reaches Prometheus.

Labels are bounded: tenants, models, policies, targets and reasons are all from the configuration, the fleet or a fixed
set, never from a client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gateway.exposition import Exposition, Labels
from gateway.process import of_process
from gateway.series import Counter, Gauge, Histogram

if TYPE_CHECKING:
    from gateway.exchange import Exchange

TTFT = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4)
DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)
INTER_TOKEN = (0.002, 0.004, 0.008, 0.012, 0.016, 0.024, 0.032, 0.048, 0.064, 0.096, 0.128, 0.256, 0.512, 1.0)
OVERHEAD = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0004, 0.0008, 0.0016, 0.0032, 0.0064, 0.0128, 0.05, 0.2)
SHARE = (-0.5, -0.2, -0.1, -0.05, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


WHO = ("tenant", "model", "policy")
"""Labels of what is told for each policy of each tenant."""
TALLIED = (*WHO, "target")


SAMPLED = 7
"""Requests whose draw has none of these bits are taken for what need not be known of all."""
FAILURES = ("worker_error", "stream_error", "no_worker", "timeout")
"""Outcomes of requests that ought to have been answered."""
STAGES = ("read", "tokenize", "match", "choose", "connect", "write")
HITS = ((0.1, "none"), (0.5, "some"), (0.9, "most"))
"""Below which part of a prompt a hit is called so."""


def hit_of(cached: int | None, prompt: int | None) -> str:
    """How much of a prompt was cached, as a label: none, some, most, all, unknown."""
    if cached is None or not prompt:
        return "unknown"
    share = cached / prompt
    for bound, name in HITS:
        if share < bound:
            return name
    return "all"


class Tally:
    """The cells of one (tenant, model, policy, target): found once, then added to without a look-up."""

    __slots__ = (
        "best",
        "cached",
        "ceiling",
        "completion",
        "decisions",
        "duration",
        "inter_token",
        "metrics",
        "overhead",
        "predicted",
        "predicted_prompt",
        "prompt",
        "reported",
        "requests",
        "routed",
        "saved",
        "ttft",
        "who",
    )

    def __init__(self, metrics: Metrics, tenant: str, model: str, policy: str, target: str) -> None:
        who = self.who = (tenant, model, policy)
        at = (*who, target)
        self.metrics = metrics
        self.decisions: dict[str, list[float]] = {}
        self.requests: dict[tuple[str, str], list[float]] = {}
        self.ttft: dict[tuple[str, str], list[float]] = {}
        self.inter_token: dict[str, list[float]] = {}
        self.routed = metrics.routed.cell((model, target))
        self.predicted = metrics.predicted_tokens.cell(at)
        self.predicted_prompt = metrics.predicted_prompt_tokens.cell(at)
        self.best = metrics.best_tokens.cell(at)
        self.ceiling = metrics.ceiling_tokens.cell(at)
        self.prompt = metrics.prompt_tokens.cell(at)
        self.completion = metrics.completion_tokens.cell(at)
        self.cached = metrics.cached_tokens.cell(at)
        self.reported = metrics.reported_prompt_tokens.cell(at)
        self.saved = metrics.saved_seconds.cell(at)
        self.duration = metrics.duration.row(who)
        self.overhead = metrics.overhead.row((policy,))

    def sent(self, reason: str, overhead: float) -> None:
        """A request was sent."""
        cell = self.decisions.get(reason)
        if cell is None:
            cell = self.decisions[reason] = self.metrics.decisions.cell((*self.who, reason))
        cell[0] += 1
        self.routed[0] += 1
        self.metrics.overhead.observe_in(self.overhead, overhead)

    def ended(self, kind: str, outcome: str, seconds: float) -> None:
        """A request ended."""
        cell = self.requests.get((kind, outcome))
        if cell is None:
            tenant, model, policy = self.who
            for failure in FAILURES:
                # Else the first of them would be no rise.
                self.metrics.requests.cell((tenant, model, kind, policy, failure))
            cell = self.metrics.requests.cell((tenant, model, kind, policy, outcome))
            self.requests[kind, outcome] = cell
        cell[0] += 1
        self.metrics.duration.observe_in(self.duration, seconds)

    def first_token(self, turn: str, hit: str, seconds: float) -> None:
        """The first event of a stream came."""
        row = self.ttft.get((turn, hit))
        if row is None:
            row = self.ttft[turn, hit] = self.metrics.ttft.row((*self.who, turn, hit))
        self.metrics.ttft.observe_in(row, seconds)

    def between_tokens(self, hit: str, seconds: float) -> None:
        """A stream ended, between whose tokens so many seconds were."""
        row = self.inter_token.get(hit)
        if row is None:
            row = self.inter_token[hit] = self.metrics.inter_token.row((*self.who, hit))
        self.metrics.inter_token.observe_in(row, seconds)


class Metrics:
    """Every metric of the gateway. Names begin with ``warmroute_``."""

    def __init__(self) -> None:
        self.exposition = Exposition(self.pieces)
        self.gauges: list[Gauge] = []
        self._tallies: dict[Labels, Tally] = {}
        self.groups: dict[str, list[Counter | Histogram]] = {}
        """What each is about -> those that are about it."""
        for about, define in (
            ("Requests and time", self._requests),
            ("Tokens and hits", self._tokens),
            ("Decisions, sessions, faults", self._decisions),
            ("Prefill and decode", self._pairs),
            ("KV events and the index", self._events),
            ("Queue, limits, pressure", self._queue),
            ("Other gateways", self._others),
        ):
            before = set(vars(self))
            define()
            new = [vars(self)[name] for name in vars(self) if name not in before]
            self.groups[about] = [each for each in new if isinstance(each, Counter | Histogram)]
        for counter, values in (
            (self.recorded, ()),
            (self.recording_dropped, ()),
            (self.request_log_dropped, ()),
            (self.leases_expired, ()),
            (self.config_reloads, ("applied", "unchanged", "failed")),
            (self.auth_failures, ("missing", "unknown", "token", "limited", "admin")),
            (self.pressure_skipped, ("doctor", "request")),
            (self.session_closes, ("told", "lost")),
            (self.migrations, ("asked", "drained")),
            (self.refused, ("500", "503")),
            (self.replicas_batches, ("said", "heard", "lost", "unread")),
            (self.replicas_bytes, ("said", "heard")),
            (self.replicas_conflicts, ()),
            (self.replicas_left, ()),
        ):
            for value in values or [None]:
                counter.cell(() if value is None else (value,))

    def _requests(self) -> None:
        self.requests = Counter(
            "warmroute_requests", "Requests ended, by how.", ("tenant", "model", "kind", "policy", "outcome")
        )
        self.recorded = Counter("warmroute_recorded_requests", "Requests written to the recording.")
        self.recording_dropped = Counter(
            "warmroute_recording_dropped", "Requests not recorded: too many waited to be written, or they could not be."
        )
        self.request_log_dropped = Counter(
            "warmroute_request_log_dropped",
            "Lines missing in the log of requests: too many waited, or it cannot be written.",
        )
        self.refused = Counter("warmroute_refused_requests", "Requests refused before routing, by status.", ("status",))
        self.config_reloads = Counter(
            "warmroute_config_reloads", "Reloads of the configuration: applied, unchanged, failed.", ("outcome",)
        )
        self.discovery_errors = Counter(
            "warmroute_discovery_errors",
            "Times that a source of workers could not be asked, or what it said could not be used; its last list holds then.",
            ("source", "reason"),
        )
        self.leases_expired = Counter(
            "warmroute_leases_expired", "Workers that registered themselves and were not heard of within their lease."
        )
        self.jwks_reads = Counter(
            "warmroute_jwks_reads", "Times that the keys of tokens' issuer were read, or could not be.", ("outcome",)
        )
        self.auth_failures = Counter(
            "warmroute_auth_failures",
            "Requests without a good credential: missing, unknown, token (a JWT), limited (unknown, too often), admin.",
            ("reason",),
        )
        self.duration = Histogram(
            "warmroute_request_duration_seconds", "From the request's last byte to the answer's.", DURATION, WHO
        )
        self.ttft = Histogram(
            "warmroute_time_to_first_token_seconds",
            "From the request's last byte to the first event of a streamed answer, by turn of its session and by how much of "
            "its prompt was cached: as predicted when it was sent, or, where nothing was predicted, as reported at its end.",
            TTFT,
            (*WHO, "turn", "hit"),
        )
        self.inter_token = Histogram(
            "warmroute_inter_token_seconds",
            "Mean time between two tokens of one streamed answer, by how much of its prompt was cached.",
            INTER_TOKEN,
            (*WHO, "hit"),
        )

    def _tokens(self) -> None:
        self.prompt_tokens = Counter("warmroute_prompt_tokens", "Prompt tokens, as engines report them.", TALLIED)
        self.completion_tokens = Counter(
            "warmroute_completion_tokens", "Generated tokens, as engines report them.", TALLIED
        )
        self.cached_tokens = Counter(
            "warmroute_cached_tokens", "Prompt tokens that engines report as found in their cache.", TALLIED
        )
        self.reported_prompt_tokens = Counter(
            "warmroute_cache_reported_prompt_tokens",
            "Prompt tokens of those requests whose engine reports cached tokens: the base of the reported hit rate.",
            TALLIED,
        )
        self.predicted_tokens = Counter(
            "warmroute_predicted_cached_tokens",
            "Prompt tokens predicted to be cached where they were sent.",
            TALLIED,
        )
        self.predicted_prompt_tokens = Counter(
            "warmroute_predicted_prompt_tokens",
            "Estimated prompt tokens of requests that were routed by prefix: the base of the predicted hit rate.",
            TALLIED,
        )
        self.best_tokens = Counter(
            "warmroute_best_cached_tokens",
            "Prompt tokens that were predicted to be cached on whichever target held most of them: less what was predicted "
            "where they were sent is lost to routing.",
            TALLIED,
        )
        self.ceiling_tokens = Counter(
            "warmroute_ceiling_cached_tokens",
            "Prompt tokens that were seen before, which one cache without bounds would have: less the best is lost to "
            "eviction, and of the predicted prompt the rest is cold. As far back as the index remembers.",
            TALLIED,
        )
        self.saved_seconds = Counter(
            "warmroute_saved_prefill_seconds",
            "Seconds of prefill that cached tokens spared engines, as reported, by what computing them would have taken there.",
            TALLIED,
        )
        self.engine_prompt_tokens = Counter(
            "warmroute_engine_prompt_tokens",
            "Prompt tokens that engines count themselves in what they export, whoever sent them, since the gateway looks.",
            ("worker",),
        )
        self.engine_cached_tokens = Counter(
            "warmroute_engine_cached_tokens",
            "Of those, what engines count as found in their cache, on the device or below it.",
            ("worker",),
        )
        self.engine_aborts = Counter(
            "warmroute_engine_aborts",
            "Requests that engines count as aborted, whoever sent them, since the gateway looks: that they stop for clients "
            "that left.",
            ("worker",),
        )
        self.prediction_error = Histogram(
            "warmroute_prediction_error_ratio",
            "(reported - predicted) cached tokens over prompt tokens; below 0: the engine held less than believed.",
            SHARE,
            ("model",),
        )

    def _decisions(self) -> None:
        self.decisions = Counter("warmroute_decisions", "Routing decisions.", (*WHO, "reason"))
        who = ("tenant", "model", "policy", "shadow")
        self.shadow_decisions = Counter(
            "warmroute_shadow_decisions",
            "Requests about which a shadow policy was asked too, by whether it would have chosen the same.",
            (*who, "agrees"),
        )
        self.shadow_seconds = Counter(
            "warmroute_shadow_seconds",
            "Seconds by which the shadow's choices would have been better, or worse, by the costs that the gateway knows.",
            (*who, "than_ours"),
        )
        self.shadow_tokens = Counter(
            "warmroute_shadow_tokens",
            "Prompt tokens that the shadow's choices would have had computed less (better) or more (worse).",
            (*who, "than_ours"),
        )
        self.routed = Counter("warmroute_routed_requests", "Requests sent, by target.", ("model", "target"))
        self.sessions = Counter(
            "warmroute_session_outcomes",
            "What a request meant for its session.",
            ("tenant", "model", "outcome", "reason"),
        )
        self.migrations = Counter(
            "warmroute_session_migrations", "Sessions given another home between their turns, by why.", ("reason",)
        )
        self.breaks = Counter(
            "warmroute_prompt_breaks",
            "Examined prompts that did not go on from the one before, or did not share their start, by cause.",
            ("tenant", "cause"),
        )
        self.break_tokens = Counter(
            "warmroute_prompt_break_tokens", "Prompt tokens that were not found again for it.", ("tenant", "cause")
        )
        self.warmed = Counter(
            "warmroute_warmed_starts",
            "Shared starts of prompts sent to engines with empty caches, by outcome.",
            ("target", "outcome"),
        )
        self.hints = Counter(
            "warmroute_retention_hints",
            "Requests by which an engine was asked to keep KV that would not survive until its session returns.",
            ("target",),
        )
        self.session_closes = Counter(
            "warmroute_session_closes", "Ends of sessions that engines were to be told of.", ("outcome",)
        )
        self.session_sources = Counter("warmroute_session_sources", "How sessions were recognised.", ("source",))
        self.retries = Counter("warmroute_retries", "Attempts after the first.", ("model", "reason"))
        self.worker_faults = Counter("warmroute_worker_faults", "What workers did wrong.", ("target", "kind"))
        self.backpressure = Counter("warmroute_backpressure", "Workers that said they are full.", ("target",))
        self.resends = Counter(
            "warmroute_resends", "Requests sent again because a reused connection was dead.", ("target",)
        )
        self.aborts = Counter("warmroute_client_aborts", "Clients that left, by phase.", ("phase",))
        self.breakers = Counter("warmroute_breaker_openings", "Circuit breakers opened.", ("target",))
        self.put_out = Counter(
            "warmroute_target_put_out",
            "Targets that did far worse than their peers and were left alone for a while, by what.",
            ("target", "reason"),
        )
        self.spared = Counter(
            "warmroute_target_spared",
            "Targets that did far worse than their peers but are in use, because half of them are out already.",
            ("target", "reason"),
        )
        self.overhead = Histogram(
            "warmroute_overhead_seconds",
            "From the request's last byte to its being sent to a worker.",
            OVERHEAD,
            ("policy",),
        )
        self.stage = Histogram(
            "warmroute_stage_seconds",
            "What a request takes until it is sent, by stage: read (its body and whose it is), tokenize (token ids), match "
            "(session and index), choose, connect (0 where a kept connection is free), write. Waiting in the queue is none. Of "
            "one request in eight.",
            OVERHEAD,
            ("stage",),
        )
        self._stages = {name: self.stage.row((name,)) for name in STAGES}
        self.lag = Histogram("warmroute_event_loop_lag_seconds", "How late the event loop woke up.", OVERHEAD)

    def _pairs(self) -> None:
        self.pair_decisions = Counter(
            "warmroute_pd_decisions",
            "Requests in a fleet with prefill and decode workers, by how they were served: a pair, or one worker alone.",
            ("model", "kind", "reason"),
        )
        self.transfer = Histogram(
            "warmroute_pd_transfer_seconds",
            "From a decode worker's being asked to its first event, where the prompt was computed elsewhere before.",
            TTFT,
            ("model",),
        )
        self.pair_failures = Counter(
            "warmroute_pd_leg_failures",
            "Parts of pairs that failed before the answer began, by whose failure it was and when.",
            ("model", "role", "stage"),
        )
        self.pair_recomputed = Counter(
            "warmroute_pd_recomputed_tokens",
            "Prompt tokens that a prefill worker computed although the decode worker held them.",
            ("model",),
        )
        self.fetches = Counter(
            "warmroute_kv_fetches", "Requests that moved and were told to fetch KV from the session's home.", ("model",)
        )
        self.pair_returns = Counter(
            "warmroute_pd_returns",
            "KV of a session's last turn that decode workers offered to hand back, and what became of it.",
            ("model", "outcome"),
        )

    def _events(self) -> None:
        of = ("target",)
        self.kv_batches = Counter("warmroute_kv_event_batches", "Batches of KV events taken, in order.", of)
        self.kv_stored = Counter("warmroute_kv_blocks_stored", "Blocks that KV events said were stored.", of)
        self.kv_removed = Counter("warmroute_kv_blocks_removed", "Blocks that KV events said were removed.", of)
        self.kv_unplaced = Counter(
            "warmroute_kv_events_unplaced",
            "KV events whose blocks could not be placed: an unknown parent, no room.",
            of,
        )
        self.kv_unread = Counter("warmroute_kv_events_unread", "KV events that could not be read.", of)
        self.kv_gaps = Counter("warmroute_kv_event_gaps", "Gaps in the order of batches.", of)
        self.kv_replays = Counter("warmroute_kv_event_replays", "Replays that were asked for.", of)
        self.index_moves = Counter(
            "warmroute_index_moves",
            "Steps on the ladder of belief: exact, predicted, session, none.",
            ("target", "rung", "reason"),
        )
        self.token_fallbacks = Counter(
            "warmroute_token_fallbacks",
            "Requests of models with a tokenizer that were routed by text all the same, by why.",
            ("model", "reason"),
        )

    def _others(self) -> None:
        self.replicas_batches = Counter(
            "warmroute_replicas_batches",
            "Batches of words between gateways: said, heard, lost (then all is asked for again), unread (not understood).",
            ("what",),
        )
        self.replicas_bytes = Counter(
            "warmroute_replicas_bytes", "Bytes of them: said, once to all, and heard, from each.", ("what",)
        )
        self.replicas_conflicts = Counter(
            "warmroute_replicas_conflicts", "Sessions to which two gateways gave different homes: the first one holds."
        )
        self.replicas_left = Counter("warmroute_replicas_left", "Other gateways that left, or fell silent.")

    def _queue(self) -> None:
        self.queue_seconds = Histogram(
            "warmroute_queue_seconds", "How long requests waited that left the queue for a target.", TTFT, ("priority",)
        )
        self.queue_shed = Counter(
            "warmroute_queue_shed",
            "Requests that were not let in, by why: no room, no time, no worker.",
            ("tenant", "priority", "reason"),
        )
        self.pressure_skipped = Counter(
            "warmroute_pressure_skipped",
            "What the gateway left out because it was short of time or memory itself: doctor, request (refused).",
            ("what",),
        )
        self.descriptors_short = Counter(
            "warmroute_descriptors_short",
            "Looks, two a second, that found no file descriptor left: new connections are cut.",
        )
        self.descriptors_short.cell()
        self.limited = Counter(
            "warmroute_tenant_limited", "Requests over what their tenant is granted, by what.", ("tenant", "limit")
        )

    def tally(self, tenant: str, model: str, policy: str, target: str) -> Tally:
        """The cells of these labels."""
        key = (tenant, model, policy, target)
        tally = self._tallies.get(key)
        if tally is None:
            for counter in (self.fetches, self.pair_recomputed):
                counter.cell((model,))
            tally = self._tallies[key] = Tally(self, tenant, model, policy, target)
        return tally

    def joined(self, target: str, events: bool) -> None:
        """Of ``target`` these are counted from now on, and were 0 until now: else the first of each would be no rise.

        ``events``: its KV events are listened to.
        """
        for counter in (self.backpressure, self.resends, self.breakers, self.hints):
            counter.cell((target,))
        for counter in (self.put_out, self.spared):
            for reason in ("errors", "latency"):
                counter.cell((target, reason))
        for outcome in ("warmed", "refused", "failed"):
            self.warmed.cell((target, outcome))
        if events:
            for counter in (
                self.kv_batches,
                self.kv_stored,
                self.kv_removed,
                self.kv_gaps,
                self.kv_replays,
                self.kv_unread,
                self.kv_unplaced,
            ):
                counter.cell((target,))

    def stages(self, exchange: Exchange, now: float) -> None:
        """It was sent for the first time, just ``now``."""
        if exchange.ask.request.draw & SAMPLED:
            return
        rows, observe = self._stages, self.stage.observe_in
        observe(rows["read"], exchange.read_at - exchange.started)
        if exchange.ask.ids is not None:
            observe(rows["tokenize"], exchange.begun_at - exchange.read_at)
        observe(rows["match"], exchange.asked_at - exchange.begun_at)
        observe(rows["choose"], exchange.chosen_at - exchange.turn_at)
        observe(rows["connect"], exchange.sent_at - exchange.chosen_at)
        observe(rows["write"], now - exchange.sent_at)

    def shadows(
        self, tenant: str, model: str, policy: str, shadow: str, agrees: bool, seconds: float, tokens: int
    ) -> None:
        """A shadow was asked: ``seconds`` and ``tokens`` by which its choice would have been better."""
        who = (tenant, model, policy, shadow)
        self.shadow_decisions.add((*who, "true" if agrees else "false"))
        for counter, saved in ((self.shadow_seconds, seconds), (self.shadow_tokens, tokens)):
            counter.add((*who, "better"), max(saved, 0))
            counter.add((*who, "worse"), max(-saved, 0))

    def all(self) -> list[Counter | Histogram | Gauge]:
        """Each of them."""
        return [each for group in self.groups.values() for each in group] + self.gauges

    def pieces(self) -> Iterator[str]:
        """Prometheus's text format, in pieces."""
        for each in self.all():
            yield from each.pieces()
        yield from of_process()

    def models(self) -> set[str]:
        """Those of which requests are counted."""
        return {key[1] for key in self._tallies}

    def drop(self, label: str, name: str) -> None:
        """``name`` left, a target, a worker or a tenant: its series go too."""
        for value in (each for group in self.groups.values() for each in group):
            if label in value.labels:
                value.drop(value.labels.index(label), name)
        if label in TALLIED:
            at = TALLIED.index(label)
            self._tallies = {key: tally for key, tally in self._tallies.items() if key[at] != name}
