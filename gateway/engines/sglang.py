"""SGLang (facts as of 0.5.23, and the older names of its information paths)."""

from typing import Any

from gateway.disagg import BOOTSTRAP_PORT
from gateway.engines import Ask, Counts, served_models, summed, whole
from gateway.workers import EventSource, Facts, Load, ServedModel

RANKS = 1024
"""Data-parallel ranks of one worker that are believed."""


class SGLang:
    """Told by ``/model_info``; everything else from ``/server_info`` and ``/v1/loads``."""

    name = "sglang"
    rank = 10
    health = "/health"

    async def read(self, ask: Ask) -> Facts | None:
        """Every resolved argument of the server is in ``/server_info``."""
        info = await _first(ask, "/model_info", "/get_model_info")
        if info is None or "model_path" not in info:
            return None
        server = await _first(ask, "/server_info", "/get_server_info") or {}
        models = await served_models(ask)
        if models is None:
            name = info.get("served_model_name") or info["model_path"]
            models = [ServedModel(str(name))]
        facts = Facts(engine=self.name, models=models, injects_usage=True)
        version = server.get("version")
        facts.version = version if isinstance(version, str) else None
        facts.block_size = whole(server.get("page_size"))
        facts.ranks = whole(server.get("dp_size")) or 1
        facts.context_length = whole(server.get("context_length"))
        facts.max_running = whole(server.get("max_running_requests"))
        facts.kv_tokens = whole(server.get("max_total_num_tokens")) or _capacity(server)
        mode = info.get("disaggregation_mode") or server.get("disaggregation_mode")
        if mode in ("prefill", "decode"):
            facts.role, facts.protocol = mode, self.name
            facts.bootstrap_port = whole(server.get("disaggregation_bootstrap_port")) or BOOTSTRAP_PORT
            facts.keeps = mode == "prefill" or server.get("disaggregation_decode_enable_radix_cache") is True
        facts.stores = server.get("disaggregation_decode_enable_offload_kvcache") is True or bool(
            server.get("hicache_storage_backend")
        )
        facts.refers = server.get("enable_session_radix_cache") is True
        facts.retains = (
            server.get("radix_eviction_policy") == "priority"
            and server.get("enable_priority_scheduling") is False
            and server.get("abort_on_priority_when_disabled") is not True
        )
        facts.streams = server.get("enable_streaming_session") is True
        if server.get("enable_cache_report") is False:
            facts.missing.append("usage_details")
        if server.get("disable_radix_cache") is True:
            facts.missing.append("prefix_cache")
        if server.get("chunked_prefill_size") == -1:
            facts.missing.append("chunked_prefill")
        if server.get("enable_metrics") is False:
            facts.missing.append("metrics")
        facts.events = _sources(server.get("kv_events"))
        if not facts.events:
            facts.missing.append("events")
        elif any(source.replay is None for source in facts.events):
            facts.missing.append("replay")
        if facts.kv_tokens is None:
            loads = await self._loads(ask)
            facts.kv_tokens = whole(loads[0].get("max_total_num_tokens")) if loads else None
        return facts

    async def load(self, ask: Ask) -> list[Load] | None:
        """``/v1/loads``, a row for each rank."""
        rows = await self._loads(ask)
        if not rows:
            return None
        rows.sort(key=lambda row: whole(row.get("dp_rank")) or 0)
        return [
            Load(whole(row.get("num_running_reqs")), whole(row.get("num_waiting_reqs")), _share(row.get("token_usage")))
            for row in rows
        ]

    async def counts(self, ask: Ask) -> Counts | None:
        """From ``/metrics``, which the server must be started with."""
        metrics = await ask("/metrics")
        if metrics.status != 200:
            return None
        prompt = summed(metrics.body, "sglang:prompt_tokens_total")
        # It appears with the first hit.
        cached = summed(metrics.body, "sglang:cached_tokens_total") or 0
        aborted = summed(metrics.body, "sglang:num_aborted_requests_total")
        return None if prompt is None else Counts(prompt, cached, aborted=aborted)

    async def _loads(self, ask: Ask) -> list[dict[str, Any]]:
        body = (await ask("/v1/loads?include=core")).json()
        rows = body.get("loads") if isinstance(body, dict) else None
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


async def _first(ask: Ask, *paths: str) -> dict[str, Any] | None:
    for path in paths:
        body = (await ask(path)).json()
        if isinstance(body, dict):
            return body
    return None


def _capacity(server: dict[str, Any]) -> int | None:
    states = server.get("internal_states")
    if isinstance(states, list) and states and isinstance(states[0], dict):
        usage = states[0].get("memory_usage")
        if isinstance(usage, dict):
            return whole(usage.get("token_capacity"))
    return None


def _sources(told: Any) -> list[EventSource]:
    """One port a rank, counted up from a base."""
    if not isinstance(told, dict) or told.get("publisher") != "zmq":
        return []
    host, base, replay = told.get("endpoint_host"), whole(told.get("endpoint_port_base")), None
    if not base:
        return []
    host = host if isinstance(host, str) and host else "*"
    replay, topic = whole(told.get("replay_endpoint_port_base")), told.get("topic")
    return [
        EventSource(
            f"tcp://{host}:{base + rank}",
            f"tcp://{host}:{replay + rank}" if replay else None,
            topic if isinstance(topic, str) else "",
        )
        for rank in range(min(whole(told.get("dp_size")) or 1, RANKS))
    ]


def _share(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


ENGINE = SGLang()
