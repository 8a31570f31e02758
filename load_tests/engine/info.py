"""What an engine tells of itself: models, health, versions, load, metrics, tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from load_tests.engine import metrics
from load_tests.engine.core import Core
from load_tests.engine.disagg.rooms import DEFAULT_PORT
from load_tests.engine.errors import ApiError
from load_tests.engine.hybrid import HybridCache
from load_tests.engine.openai import messages_of, tools_of
from load_tests.engine.prompts import chat_prompt
from load_tests.engine.publisher import HWM
from load_tests.engine.radix import RadixCache
from load_tests.engine.rank import Rank
from load_tests.engine.slots import SlotCache
from load_tests.engine.template import JSON
from load_tests.engine.tokens import is_tokens
from load_tests.engine.wire import Call

TENSORRT_VERSION = "1.4.0rc1"
VLLM_VERSION = "0.33.0"
SGLANG_VERSION = "0.5.23"
# SGLang's health check waits for a reply of the scheduler and polls once a second.
SGLANG_HEALTH_SECONDS = 1.0


async def models(core: Core, call: Call) -> web.StreamResponse:
    options = core.options
    owner = {"llamacpp": "llamacpp", "openai": "system"}.get(options.dialect, options.dialect)
    listed: list[JSON] = []
    for name in (*options.models, *options.loras):
        parent = options.models[0] if name in options.loras else None
        entry: JSON = {"id": name, "object": "model", "created": int(core.started), "owned_by": owner}
        if options.dialect in ("vllm", "sglang"):
            entry |= {"root": name, "parent": parent, "max_model_len": options.context_length}
        elif options.dialect == "llamacpp":
            entry["meta"] = {"n_ctx_train": options.context_length}
        listed.append(entry)
    return await call.json({"object": "list", "data": listed})


async def health(core: Core, call: Call) -> web.StreamResponse:
    """SGLang's answer takes at least a second of engine time; the others' is immediate."""
    fault = core.faults.take("slow_health")
    wait = (fault.seconds or 0.0) if fault else 0.0
    if core.options.dialect == "sglang" and call.request.path != "/ping":
        wait += SGLANG_HEALTH_SECONDS * core.options.time_scale
    if wait:
        await asyncio.sleep(wait)
    if core.options.dialect in ("llamacpp", "openai"):
        return await call.json({"status": "ok"})
    return web.Response()


async def version(core: Core, call: Call) -> web.StreamResponse:
    known = {"tensorrt_llm": TENSORRT_VERSION}
    return await call.json({"version": known.get(core.options.dialect, VLLM_VERSION)})


async def metrics_page(core: Core, call: Call) -> web.StreamResponse:
    if not core.options.metrics:
        raise web.HTTPNotFound
    ranks = [(rank.scheduler, rank.measures) for rank in core.ranks]
    text = metrics.render(core.options, ranks, core.started, core.traffic, core.connector.queues())
    return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def iterations(core: Core, call: Call) -> web.StreamResponse:
    """TensorRT-LLM's statistics, which reading takes away: nothing where no step came since."""
    scheduler, cache = core.ranks[0].scheduler, core.ranks[0].cache
    steps, core.drained = core.drained, scheduler.totals.steps
    if steps == scheduler.totals.steps:
        return await call.json([])
    blocks = {
        "maxNumBlocks": cache.num_blocks,
        "usedNumBlocks": cache.used_blocks,
        "freeNumBlocks": cache.num_blocks - cache.used_blocks,
        "tokensPerBlock": core.options.block_size,
    }
    entry = {"iter": scheduler.totals.steps, "numActiveRequests": len(scheduler.running), "kvCacheStats": blocks}
    return await call.json([{**entry, "numQueuedRequests": len(scheduler.waiting)}])


async def context_info(core: Core, call: Call) -> web.StreamResponse:
    """TensorRT-LLM's /server_info: where a generation server finds this one."""
    port = core.connector.port
    where = None if port is None else [f"tcp://{core.options.host}:{port}"]
    return await call.json({"disaggregated_params": {"ctx_dp_rank": 0, "ctx_info_endpoint": where}})


async def load(core: Core, call: Call) -> web.StreamResponse:
    return await call.json({"server_load": sum(rank.load for rank in core.ranks)})


async def kv_event_sources(core: Core, call: Call) -> web.StreamResponse:
    """vLLM's: where each rank publishes. 404 without events, as on builds that do not have the route."""
    options = core.options
    if core.bus is None:
        raise web.HTTPNotFound
    replays: Sequence[str | None] = core.bus.replay_endpoints() or [None] * options.ranks
    common = {"buffer_steps": options.buffer_steps, "hwm": HWM, "max_queue_size": HWM, "topic": options.topic}
    sources: JSON = {}
    for rank, (endpoint, replay) in enumerate(zip(core.bus.endpoints(), replays, strict=True)):
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
        sources[str(rank)] = {**source, **common}
    return await call.json(sources)


def _event_source(core: Core) -> JSON | None:
    """SGLang's: the first rank's ports, and how many there are."""
    if core.bus is None:
        return None
    port, replay = core.bus.ports
    return {
        "publisher": "zmq",
        "endpoint_host": "*" if core.options.host == "0.0.0.0" else core.options.host,
        "endpoint_port_base": port,
        "topic": core.options.topic,
        "block_size": core.options.block_size,
        "dp_size": core.options.ranks,
        "replay_endpoint_port_base": replay,
        "load_endpoint_port_base": None,
        "load_topic": "load",
    }


async def model_info(core: Core, call: Call) -> web.StreamResponse:
    name = core.options.models[0]
    return await call.json(
        {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": name,
            "is_generation": True,
            "weight_version": "default",
            "reasoning_parser": None,
            "tool_call_parser": "qwen",
            "disaggregation_mode": _mode(core),
            "disaggregation_bootstrap_port": _bootstrap_port(core),
            "model_type": "sim",
            "architectures": ["SimForCausalLM"],
        }
    )


def _mode(core: Core) -> str:
    return "null" if core.options.role == "unified" else core.options.role


def _bootstrap_port(core: Core) -> int:
    """What a decode engine prints is a setting that it does not use."""
    return DEFAULT_PORT if core.connector.port is None else core.connector.port


async def server_info(core: Core, call: Call) -> web.StreamResponse:
    options = core.options
    return await call.json(
        {
            "model_path": options.models[0],
            "served_model_name": options.models[0],
            "host": options.host,
            "port": options.port,
            "page_size": options.block_size,
            "dp_size": options.ranks,
            "tp_size": 1,
            "context_length": options.context_length,
            "max_running_requests": options.max_running,
            "max_queued_requests": options.max_queued,
            "max_total_num_tokens": options.num_blocks * options.block_size,
            "chunked_prefill_size": options.chunk_tokens,
            "disaggregation_mode": _mode(core),
            "disaggregation_bootstrap_port": _bootstrap_port(core),
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_enable_radix_cache": options.decode_radix,
            "load_balance_method": "follow_bootstrap_room" if options.role == "prefill" else "round_robin",
            "disable_radix_cache": not options.prefix_cache,
            "kv_events": _event_source(core),
            "enable_session_radix_cache": options.session_refs,
            "radix_eviction_policy": options.eviction,
            "enable_priority_scheduling": False,
            "abort_on_priority_when_disabled": False,
            "enable_streaming_session": options.streaming_sessions,
            "internal_states": [{"max_running_requests_per_dp": options.max_running} for _ in core.ranks],
            "version": SGLANG_VERSION,
        }
    )


async def loads(core: Core, call: Call) -> web.StreamResponse:
    """SGLang's /v1/loads: one entry for each data-parallel rank, or for the one in ``?dp_rank=``."""
    wanted = call.request.query.get("dp_rank")
    entries = [_load_entry(core, rank) for rank in core.ranks if wanted in (None, str(rank.number))]
    stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return await call.json({"timestamp": stamp, "version": SGLANG_VERSION, "loads": entries})


def _load_entry(core: Core, rank: Rank) -> JSON:
    options, scheduler, cache = core.options, rank.scheduler, rank.cache
    totals, size = scheduler.totals, options.block_size
    waiting_tokens = sum(len(work.tokens) for work in scheduler.waiting)
    used = cache.used_blocks * size
    return {
        "timestamp": time.time(),
        "dp_rank": rank.number,
        "num_running_reqs": len(scheduler.running),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_waiting_uncached_tokens": waiting_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + waiting_tokens,
        "num_active_tokens": used,
        "max_total_num_tokens": cache.num_blocks * size,
        "max_running_requests": options.max_running,
        "token_usage": cache.used_blocks / cache.num_blocks,
        "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
        "utilization": len(scheduler.running) / options.max_running,
        "total_prefill_uncached_tokens": totals.computed_tokens,
        "memory": {"weight_gb": 15.0, "kv_cache_gb": 40.0, "graph_gb": 1.0, "token_capacity": cache.num_blocks * size},
        **_disaggregation(core),
        "queues": {"waiting": len(scheduler.waiting), "grammar": 0, "paused": 0, "retracted": 0},
    }


def _disaggregation(core: Core) -> JSON:
    """The section of a half engine; absent from a whole one."""
    if core.options.role == "unified":
        return {}
    names = ("prefill_bootstrap", "prefill_inflight", "decode_prealloc", "decode_transfer", "decode_retracted")
    section: JSON = {"mode": core.options.role} | {f"{name}_queue_reqs": 0 for name in names}
    traffic = core.traffic
    moved, seconds = traffic.in_tokens + traffic.out_tokens, traffic.in_seconds + traffic.out_seconds
    count = traffic.in_count + traffic.out_count
    section["kv_transfer_speed_gb_s"] = moved * metrics.BYTES_PER_TOKEN / seconds / 1e9 if seconds else 0.0
    section["kv_transfer_latency_ms"] = seconds / count * 1e3 if count else 0.0
    return {"disaggregation": section | core.connector.queues()}


async def props(core: Core, call: Call) -> web.StreamResponse:
    options = core.options
    settings = {"n_ctx": options.context_length}
    return await call.json(
        {
            "default_generation_settings": settings,
            "total_slots": options.max_running,
            "model_path": options.models[0],
            "model_alias": options.models[0],
            "chat_template": "chatml",
            "build_info": "sim",
        }
    )


async def slots(core: Core, call: Call) -> web.StreamResponse:
    """llama.cpp's slots; ``?fail_on_no_slot=1`` answers 503 when all are busy."""
    cache = core.ranks[0].cache
    cache = cache.inner if isinstance(cache, HybridCache) else cache
    busy = cache.slots() if isinstance(cache, SlotCache) else []
    if call.request.query.get("fail_on_no_slot") and all(busy):
        raise ApiError(503, "no slot available", kind="unavailable_error")
    listing = [
        {"id": number, "id_task": number if taken else -1, "n_ctx": core.options.context_length, "is_processing": taken}
        for number, taken in enumerate(busy)
    ]
    return await call.json(listing)


async def tokenize_text(core: Core, call: Call) -> web.StreamResponse:
    body = call.body
    if core.options.dialect == "llamacpp":
        return await call.json({"tokens": core.language.encode(str(body.get("content", "")))})
    tokens = _tokens_of(core, body)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": core.options.context_length, "tokens": tokens}
    if core.options.dialect == "vllm":
        answer["token_strs"] = (
            [core.language.decode([token]) for token in tokens] if body.get("return_token_strs") else None
        )
    return await call.json(answer)


def _tokens_of(core: Core, body: JSON) -> list[int]:
    """vLLM's route, unlike its chat, does not know ``reasoning_content``."""
    if "messages" in body:
        messages, generate = messages_of(body), bool(body.get("add_generation_prompt", True))
        if core.options.dialect == "vllm":
            messages = [{k: v for k, v in message.items() if k != "reasoning_content"} for message in messages]
        return chat_prompt(core.options, core.language, messages, tools_of(body), body=body, generate=generate)
    if not isinstance(body.get("prompt"), str):
        raise ApiError(400, "prompt or messages are needed", param="prompt")
    return core.language.encode(body["prompt"], special=body.get("add_special_tokens") is not False)


async def detokenize_ids(core: Core, call: Call) -> web.StreamResponse:
    tokens = call.body.get("tokens")
    if not is_tokens(tokens) and tokens != []:
        raise ApiError(400, "tokens must be a list of integers", param="tokens")
    key = {"sglang": "text", "llamacpp": "content"}.get(core.options.dialect, "prompt")
    return await call.json({key: core.language.decode(tokens or ())})


async def reset_prefix_cache(core: Core, call: Call) -> web.StreamResponse:
    return await call.json({"success": core.clear_caches(call.request.query.get("reset_external") == "true")})


async def flush_cache(core: Core, call: Call) -> web.StreamResponse:
    if not core.busy and core.clear_caches():
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")
    return web.Response(text="Flush cache failed: requests are running or waiting.\n", status=400)


async def close_session(core: Core, call: Call) -> web.StreamResponse:
    """Always 200, also for a session that is not there."""
    core.sessions.discard(str(call.body.get("session_id")))
    for rank in core.ranks:
        if isinstance(rank.cache, RadixCache):
            rank.cache.close_session(str(call.body.get("session_id")))
    core.opened.close(str(call.body.get("session_id")))
    return web.Response()


async def open_session(core: Core, call: Call) -> web.StreamResponse:
    return await call.json(core.opened.open(call.body))


async def abort_request(core: Core, call: Call) -> web.StreamResponse:
    """Always 200 and empty, as SGLang answers; ``rid`` matches by prefix."""
    rid = call.body.get("rid")
    if call.body.get("abort_all"):
        core.abort_named("")
    elif isinstance(rid, str) and rid:
        core.abort_named(rid)
    return web.Response()
