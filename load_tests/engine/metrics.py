"""The /metrics page of each dialect, with the names and labels that the real engines print."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.options import EngineOptions
from load_tests.engine.scheduler import Scheduler
from load_tests.engine.work import Work

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
GAP_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
# KV of one token of a model with 8 billion parameters.
BYTES_PER_TOKEN = 131_072
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)


class Histogram:
    """Cumulative buckets in seconds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class Page:
    """Prometheus text, built line by line. ``labels`` go on every sample, after its own."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._labels = dict(labels)
        self._families: dict[str, list[str]] = {}
        self._lines: list[str] = []

    def _open(self, name: str, kind: str) -> None:
        """The samples that follow are of this family."""
        head = f"# HELP {self._prefix}{name} {name.replace('_', ' ')}.\n# TYPE {self._prefix}{name} {kind}"
        self._lines = self._families.setdefault(head, [])

    def labelled(self, **labels: str) -> None:
        """From now on samples have these labels as well; families that are there already go on."""
        self._labels |= labels

    def sample(self, name: str, value: float, **labels: str) -> None:
        pairs = {**self._labels, **labels}
        text = ",".join(f'{key}="{_escaped(pairs[key])}"' for key in sorted(pairs))
        self._lines.append(
            f"{self._prefix}{name}{{{text}}} {float(value)}" if text else f"{self._prefix}{name} {value}"
        )

    def family(self, name: str, kind: str, samples: Iterable[tuple[float, dict[str, str]]]) -> None:
        suffix = "_total" if kind == "counter" else ""
        self._open(name + suffix, kind)
        for value, labels in samples:
            self.sample(name + suffix, value, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.family(name, "gauge", [(value, labels)])

    def counter(self, name: str, value: float, **labels: str) -> None:
        self.family(name, "counter", [(value, labels)])

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._open(name, "histogram")
        running = 0
        for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            running += count
            self.sample(f"{name}_bucket", running, le=bound)
        self.sample(f"{name}_count", running)
        self.sample(f"{name}_sum", histogram.total)

    def text(self) -> str:
        return "".join(f"{head}\n" + "".join(f"{line}\n" for line in lines) for head, lines in self._families.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Measures:
    """What an engine remembers for its page, besides the scheduler's own totals."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.rejected = 0
        self.first_token = Histogram(TTFT_BUCKETS)
        self.token_gap = Histogram(GAP_BUCKETS)
        self.whole = Histogram(LATENCY_BUCKETS)
        self.queued = Histogram(LATENCY_BUCKETS)

    def observe(self, work: Work, reason: str) -> None:
        """Count a finished sequence; the reason is that of its reply."""
        self.finished[reason] += 1
        if work.first is None or work.ended is None or work.admitted is None:
            return
        self.first_token.observe(work.first - work.arrived)
        self.whole.observe(work.ended - work.arrived)
        self.queued.observe(work.admitted - work.arrived)
        if work.emitted > 1:
            self.token_gap.observe((work.ended - work.first) / (work.emitted - 1), work.emitted - 1)

    @classmethod
    def sum(cls, parts: Iterable[Measures]) -> Measures:
        whole = cls()
        for part in parts:
            whole.finished += part.finished
            whole.rejected += part.rejected
            for name in ("first_token", "token_gap", "whole", "queued"):
                getattr(whole, name).add(getattr(part, name))
        return whole


Ranks = Sequence[tuple[Scheduler, Measures]]


def render(
    options: EngineOptions,
    ranks: Ranks,
    started: float,
    traffic: Traffic | None = None,
    queues: Mapping[str, int] | None = None,
) -> str:
    """The page of ``options.dialect``; ``started`` is the process' start in Unix seconds."""
    if options.dialect == "sglang":
        return _sglang(options, ranks, traffic or Traffic(), queues or {})
    if options.dialect == "llamacpp":
        return _llamacpp(ranks[0][0])
    page = Page("vllm:", {"model_name": options.models[0]})
    for number, (scheduler, measures) in enumerate(ranks):
        page.labelled(engine=str(number))
        _vllm(page, options, scheduler, measures)
        if number == 0 and traffic is not None:
            _transfers(page, options.connector, traffic)
    process = Page("", {})
    process.gauge("process_start_time_seconds", started)
    return process.text() + page.text()


def _vllm(page: Page, options: EngineOptions, scheduler: Scheduler, measures: Measures) -> None:
    totals, cache = scheduler.totals, scheduler.cache
    page.gauge("num_requests_running", len(scheduler.running))
    deferred = len(scheduler.receiving)
    page.gauge("num_requests_waiting", len(scheduler.waiting) + deferred)
    reasons = (("capacity", len(scheduler.waiting)), ("deferred", deferred))
    page.family("num_requests_waiting_by_reason", "gauge", [(value, {"reason": name}) for name, value in reasons])
    come = sum(work.holding.open for work in scheduler.waiting)
    stages = (("waiting_to_start", 0), ("in_progress", deferred), ("completed_waiting", come))
    page.family("num_requests_kv_fetch_by_stage", "gauge", [(value, {"stage": name}) for name, value in stages])
    page.gauge("kv_cache_usage_perc", cache.used_blocks / cache.num_blocks)
    page.counter("prefix_cache_queries", totals.prompt_tokens)
    below = totals.host_tokens + totals.disk_tokens
    device = totals.cached_tokens - below
    page.counter("prefix_cache_hits", device)
    asked = cache.tiers is not None or options.connector != "none"
    page.counter("external_prefix_cache_queries", totals.prompt_tokens - device if asked else 0)
    page.counter("external_prefix_cache_hits", below + totals.transferred_tokens)
    page.counter("num_preemptions", totals.preemptions)
    page.counter("prompt_tokens", totals.prompt_tokens)
    sources = (
        ("local_compute", totals.computed_tokens),
        ("local_cache_hit", device),
        ("external_kv_transfer", below + totals.transferred_tokens),
    )
    page.family("prompt_tokens_by_source", "counter", [(value, {"source": name}) for name, value in sources])
    page.counter("prompt_tokens_cached", totals.cached_tokens + totals.transferred_tokens)
    found = (
        ("device", device),
        ("host", totals.host_tokens),
        ("p2p", totals.transferred_tokens),
        ("disk", totals.disk_tokens),
        ("external_unspecified", 0),
    )
    origins = [(value, {"source": name}) for name, value in found]
    page.family("prompt_tokens_cached_by_source", "counter", origins)
    page.counter("generation_tokens", totals.generated_tokens)
    ends = [(measures.finished[name], {"finished_reason": name}) for name in ("stop", "length", "abort", "error")]
    page.family("request_success", "counter", ends)
    page.counter("admission_rejections", measures.rejected, reason="max_num_queued_reqs")
    page.histogram("time_to_first_token_seconds", measures.first_token)
    page.histogram("inter_token_latency_seconds", measures.token_gap)
    page.histogram("e2e_request_latency_seconds", measures.whole)
    page.histogram("request_queue_time_seconds", measures.queued)
    page.gauge(
        "cache_config_info",
        1,
        block_size=str(options.block_size),
        effective_attention_block_size=str(options.block_size),
        num_gpu_blocks=str(options.num_blocks),
        kv_cache_size_tokens=str(options.num_blocks * options.block_size),
        enable_prefix_caching=str(options.prefix_cache),
        prefix_caching_hash_algo="sha256_cbor" if options.publishes else "sha256",
        cache_dtype="auto",
        mamba_cache_mode="align" if options.hybrid else "none",
    )


def _transfers(page: Page, connector: str, traffic: Traffic) -> None:
    """Seconds are those that passed, not scaled."""
    if connector == "mooncake":
        page.family("mooncake_xfer_time_seconds", "histogram", ())
        page.sample("mooncake_xfer_time_seconds_count", traffic.out_count)
        page.sample("mooncake_xfer_time_seconds_sum", traffic.out_seconds)
        page.counter("mooncake_num_failed_transfers", traffic.out_failed)
        page.counter("mooncake_num_failed_recvs", traffic.in_failed)
        page.counter("mooncake_num_kv_expired_reqs", traffic.expired)
    if connector != "nixl":
        return
    page.family("nixl_xfer_time_seconds", "histogram", ())
    page.sample("nixl_xfer_time_seconds_count", traffic.in_count)
    page.sample("nixl_xfer_time_seconds_sum", traffic.in_seconds)
    page.family("nixl_num_descriptors", "histogram", ())
    page.sample("nixl_num_descriptors_count", traffic.in_count)
    page.sample("nixl_num_descriptors_sum", traffic.in_count)
    page.family("nixl_bytes_transferred", "histogram", ())
    page.sample("nixl_bytes_transferred_count", traffic.in_count)
    page.sample("nixl_bytes_transferred_sum", traffic.in_tokens * BYTES_PER_TOKEN)
    page.counter("nixl_num_failed_transfers", traffic.in_failed)
    page.counter("nixl_num_failed_notifications", traffic.lost_notes)
    page.counter("nixl_num_kv_expired_reqs", traffic.expired)
    page.counter("nixl_num_notifications_after_expiry", traffic.late_notes)


def _sglang(options: EngineOptions, ranks: Ranks, traffic: Traffic, queues: Mapping[str, int]) -> str:
    """Tokens are counted for the process, load for each rank."""
    common = {"model_name": options.models[0], "engine_type": options.role}
    tokens = Page("sglang:", common)
    page_size, all_totals = options.block_size, [scheduler.totals for scheduler, _ in ranks]
    measures = Measures.sum(part for _, part in ranks)
    tokens.counter("prompt_tokens", sum(totals.prompt_tokens for totals in all_totals))
    tokens.counter("generation_tokens", sum(totals.generated_tokens for totals in all_totals))
    tokens.counter("num_requests", sum(totals.requests for totals in all_totals))
    tokens.counter("num_aborted_requests", sum(totals.aborts for totals in all_totals))
    host, disk = (sum(getattr(totals, name) for totals in all_totals) for name in ("host_tokens", "disk_tokens"))
    device = sum(totals.cached_tokens for totals in all_totals) - host - disk
    found = (("device", device), ("host", host), ("storage", disk))
    tokens.family("cached_tokens", "counter", [(value, {"cache_source": name}) for name, value in found])
    tokens.counter("evicted_tokens", sum(scheduler.cache.evicted_blocks for scheduler, _ in ranks) * page_size)
    tokens.histogram("time_to_first_token_seconds", measures.first_token)
    tokens.histogram("inter_token_latency_seconds", measures.token_gap)
    tokens.histogram("e2e_request_latency_seconds", measures.whole)
    tokens.histogram("queue_time_seconds", measures.queued)
    if options.role != "unified":
        tokens.counter("num_bootstrap_failed_reqs", traffic.bootstrap_failed)
        tokens.counter("num_transfer_failed_reqs", traffic.in_failed + traffic.out_failed)
        for name, value in queues.items():
            tokens.gauge(f"num_{name}", value)
    load = Page("sglang:", {**common, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"})
    for number, (scheduler, _) in enumerate(ranks):
        if len(ranks) > 1:
            load.labelled(dp_rank=str(number))
        _sglang_load(load, options, scheduler)
    return tokens.text() + load.text()


def _sglang_load(load: Page, options: EngineOptions, scheduler: Scheduler) -> None:
    totals, cache, page_size = scheduler.totals, scheduler.cache, options.block_size
    used, room = cache.used_blocks, cache.num_blocks
    load.gauge("num_running_reqs", len(scheduler.running))
    load.gauge("num_queue_reqs", len(scheduler.waiting))
    load.gauge("num_retracted_reqs", totals.preemptions)
    load.gauge("token_usage", used / room)
    load.gauge("full_token_usage", used / room)
    load.gauge("num_used_tokens", used * page_size)
    load.gauge("kv_used_tokens", used * page_size)
    load.gauge("kv_evictable_tokens", cache.evictable_blocks * page_size)
    load.gauge("kv_available_tokens", (room - used - cache.evictable_blocks) * page_size)
    load.gauge("max_total_num_tokens", room * page_size)
    if cache.tiers is not None:
        load.gauge("hicache_host_used_tokens", cache.tiers.used[0] * page_size)
        load.gauge("hicache_host_total_tokens", options.host_tokens)
    load.gauge("page_size", page_size)
    load.gauge("num_pages", room)
    load.gauge("context_len", options.context_length)
    load.gauge("cache_hit_rate", totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0)
    load.gauge("utilization", len(scheduler.running) / options.max_running)


def _llamacpp(scheduler: Scheduler) -> str:
    page = Page("llamacpp:", {})
    totals = scheduler.totals
    page.counter("prompt_tokens", totals.computed_tokens)
    page.counter("prompt_tokens_cached", totals.cached_tokens)
    page.counter("tokens_predicted", totals.generated_tokens)
    page.gauge("requests_processing", len(scheduler.running))
    page.gauge("requests_deferred", len(scheduler.waiting))
    page.gauge("n_busy_slots_per_decode", len(scheduler.running))
    return page.text()
