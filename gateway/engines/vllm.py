"""vLLM (facts as of 0.33; older names are not tried)."""

from typing import Any

from gateway.engines import Ask, Counts, by_rank, gauge, label, owner, served_models, summed, whole
from gateway.workers import EventSource, Facts, Load

CONNECTORS = ("nixl", "mooncake")
"""KV connectors that have metrics of their own, by the name of their protocol."""


class VLLM:
    """Told by ``/version`` and by who owns its models; cache and load from ``/metrics``."""

    name = "vllm"
    rank = 30
    health = "/health"

    async def read(self, ask: Ask) -> Facts | None:
        """Cache sizes come from the ``vllm:cache_config_info`` metric."""
        version = (await ask("/version")).json()
        if not isinstance(version, dict) or not isinstance(version.get("version"), str):
            return None
        models = await served_models(ask)
        if models is None or owner(models) not in ("vllm", ""):
            return None
        facts = Facts(engine=self.name, version=version["version"], models=models, injects_usage=True)
        facts.context_length = min((m.max_length for m in models if m.max_length is not None), default=None)
        metrics = await ask("/metrics")
        if metrics.status != 200 or b"vllm:" not in metrics.body:
            facts.missing.append("metrics")
            return facts
        for labels in gauge(metrics.body, "vllm:cache_config_info"):
            facts.block_size = whole(label(labels, "block_size"))
            facts.kv_tokens = whole(label(labels, "kv_cache_size_tokens"))
            blocks = whole(label(labels, "num_gpu_blocks"))
            if facts.kv_tokens is None and blocks is not None and facts.block_size is not None:
                facts.kv_tokens = blocks * facts.block_size
            facts.hybrid = label(labels, "mamba_cache_mode") in ("align", "all")
            if label(labels, "enable_prefix_caching") in ("False", "false", "0"):
                facts.missing.append("prefix_cache")
        facts.ranks = max(
            [rank + 1 for rank in by_rank(metrics.body, "vllm:num_requests_running", "engine")], default=1
        )
        facts.protocol = next((name for name in CONNECTORS if f"vllm:{name}_".encode() in metrics.body), None)
        facts.started = gauge(metrics.body, "process_start_time_seconds").get("")
        facts.events = _sources((await ask("/kv_event_sources")).json())
        if not facts.events:
            facts.missing.append("events")
        elif any(source.replay is None for source in facts.events):
            facts.missing.append("replay")
        return facts

    async def load(self, ask: Ask) -> list[Load] | None:
        """Running, waiting and KV use of each rank."""
        metrics = await ask("/metrics")
        if metrics.status != 200:
            return None
        running = by_rank(metrics.body, "vllm:num_requests_running", "engine")
        waiting = by_rank(metrics.body, "vllm:num_requests_waiting", "engine")
        usage = by_rank(metrics.body, "vllm:kv_cache_usage_perc", "engine")
        if not running:
            return None
        return [
            Load(whole(running.get(rank)), whole(waiting.get(rank)), usage.get(rank))
            for rank in range(max(running) + 1)
        ]

    async def counts(self, ask: Ask) -> Counts | None:
        """Of what is not on the device its connector counts what it brought: from below, or from another worker."""
        metrics = await ask("/metrics")
        if metrics.status != 200:
            return None
        asked = summed(metrics.body, "vllm:prefix_cache_queries_total")
        found = summed(metrics.body, "vllm:prefix_cache_hits_total")
        if asked is None or found is None:
            return None
        brought = summed(metrics.body, "vllm:external_prefix_cache_hits_total") or 0
        aborted = summed(metrics.body, "vllm:request_success_total", 'finished_reason="abort"')
        return Counts(asked, found + brought, brought, aborted)


def _sources(told: Any) -> list[EventSource]:
    """``{"0": {"endpoint", "replay_endpoint", "topic", ...}, ...}`` by rank."""
    found = []
    for rank in range(len(told) if isinstance(told, dict) else 0):
        row = told.get(str(rank))
        if not isinstance(row, dict) or row.get("publisher") != "zmq" or not isinstance(row.get("endpoint"), str):
            return []
        replay, topic = row.get("replay_endpoint"), row.get("topic")
        found.append(
            EventSource(
                row["endpoint"], replay if isinstance(replay, str) else None, topic if isinstance(topic, str) else ""
            )
        )
    return found


ENGINE = VLLM()
