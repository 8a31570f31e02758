"""How each dialect reports what a request cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from load_tests.engine.driver import Job
from load_tests.engine.options import EngineOptions
from load_tests.engine.tiers import Sources


def prompt_figures(options: EngineOptions, job: Job, counted: Sequence[int]) -> tuple[int, int, int]:
    """(prompt, cached, created) tokens over the sequences ``counted``; created is what became reusable by this."""
    prompt = cached = created = 0
    for index in counted:
        work = job.works[index]
        length, hit = len(work.prompt), work.cached or 0
        prompt += length
        cached += hit if work.reported is None else work.reported
        created += max(0, length // options.block_size * options.block_size - hit)
    return prompt, cached, created


def usage_of(options: EngineOptions, job: Job, counted: Sequence[int], *, stream: bool = False) -> dict[str, Any]:
    """OpenAI's usage. ``counted`` are the sequences whose prompts count, one for each distinct prompt."""
    prompt, cached, created = prompt_figures(options, job, counted)
    completion = sum(work.emitted for work in job.works)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    details: dict[str, Any] = {"cached_tokens": cached}
    if options.dialect == "vllm":
        details |= {"created_cache_tokens": created, "multimodal_tokens": None}
        if stream:
            del details["multimodal_tokens"]
    if options.usage_details:
        usage["prompt_tokens_details"] = details
    elif not stream:
        usage["prompt_tokens_details"] = None
    thought = sum(
        part.kind == "reasoning"
        for work, reply in zip(job.works, job.replies, strict=True)
        for part in reply.parts[: work.emitted]
    )
    if options.dialect == "sglang":
        usage["reasoning_tokens"] = thought
    elif thought:
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def cached_details(sources: Sources) -> dict[str, int]:
    """SGLang's word on where cached tokens came from."""
    return {"device": sources.device, "host": sources.host, "storage": sources.disk}


def sglang_extra(options: EngineOptions, body: dict[str, Any], job: Job, counted: Sequence[int]) -> dict[str, Any]:
    """SGLang's extension of an answer, for those who asked; empty for the others."""
    if options.dialect != "sglang" or not body.get("return_cached_tokens_details"):
        return {}
    parts = zip(*(job.works[index].sources for index in counted), strict=True)
    return {"sglext": {"cached_tokens_details": cached_details(Sources(*map(sum, parts)))}}


def timings(job: Job) -> dict[str, Any]:
    """llama.cpp's timings, in milliseconds of this engine's clock."""
    work = job.works[0]
    cached = work.cached or 0
    begun, first, ended = work.admitted or 0.0, work.first or 0.0, work.ended or 0.0
    prompt_ms, predicted_ms = max(0.0, first - begun) * 1e3, max(0.0, ended - first) * 1e3
    computed = len(work.prompt) - cached
    return {
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_second": computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": work.emitted,
        "predicted_ms": predicted_ms,
        "predicted_per_second": work.emitted / predicted_ms * 1e3 if predicted_ms else 0.0,
    }
