"""Requests that only compute their prompt: embeddings, rerank, score; and transcriptions, whose upload is opaque."""

from __future__ import annotations

import base64
import re
import time
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any
from uuid import uuid4

from aiohttp import web

from load_tests.engine.asks import integer, namespace_of, overflow, resolve_model
from load_tests.engine.core import Core
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.openai import begin
from load_tests.engine.prompts import prompts_of
from load_tests.engine.replies import Wanted, compose
from load_tests.engine.wire import Call

DIMENSIONS = 32
MOST_DIMENSIONS = 4096
BYTES_PER_AUDIO_TOKEN = 640


async def _compute(core: Core, call: Call, prompts: Sequence[list[int]], namespace: str) -> Job:
    """Compute prompts and give their KV back; 400 if one is longer than the context."""
    limit = core.options.context_length
    for prompt in prompts:
        if len(prompt) > limit:
            raise overflow(core.options.dialect, limit, len(prompt))
    name = f"embd-{uuid4().hex}"
    job = begin(core, call, name, prompts, [None] * len(prompts), namespace)
    try:
        await job.wait()
    finally:
        core.end(name, job)
    return job


def _usage(job: Job) -> dict[str, int]:
    total = sum(len(work.prompt) for work in job.works)
    return {"prompt_tokens": total, "total_tokens": total}


def _vector(tokens: Sequence[int], dimensions: int) -> array[float]:
    random = Random(hash(tuple(tokens)))
    return array("f", (random.uniform(-1.0, 1.0) for _ in range(dimensions)))


def _score(query: Sequence[int], document: Sequence[int]) -> float:
    """Share of the query's tokens that the document has: deterministic, and higher for what fits better."""
    have = set(document)
    return sum(token in have for token in query) / max(1, len(query))


async def embeddings(core: Core, call: Call) -> web.StreamResponse:
    body = call.body
    model, adapter = resolve_model(core.options, body)
    prompts = prompts_of(core.language, body, "input")
    size = integer(body, "dimensions", 1) or DIMENSIONS
    if size > MOST_DIMENSIONS:
        raise ApiError(400, f"dimensions must be at most {MOST_DIMENSIONS}, got {size}.", param="dimensions")
    job = await _compute(core, call, prompts, namespace_of(core.options, body, adapter))
    packed = body.get("encoding_format") == "base64"
    data: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        vector = _vector(prompt, size)
        value: Any = base64.b64encode(vector.tobytes()).decode() if packed else vector.tolist()
        data.append({"index": index, "object": "embedding", "embedding": value})
    name = f"embd-{uuid4().hex}"
    answer = {"id": name, "object": "list", "created": int(time.time()), "model": model, "data": data}
    return await call.json({**answer, "usage": _usage(job)})


def _texts(body: dict[str, Any], *keys: str) -> list[str]:
    """The first of ``keys`` that is there: a string or a list of strings or of {"text": ...}."""
    for key in keys:
        value = body.get(key)
        if isinstance(value, str):
            return [value]
        if isinstance(value, list) and value:
            texts = [item.get("text") if isinstance(item, dict) else item for item in value]
            if all(isinstance(text, str) for text in texts):
                return [str(text) for text in texts]
    raise ApiError(400, f"{' or '.join(keys)} must be a string or a list of strings", param=keys[0])


async def rerank(core: Core, call: Call) -> web.StreamResponse:
    body = call.body
    model, adapter = resolve_model(core.options, body)
    tokenize = core.language.encode
    query, documents = tokenize(_texts(body, "query")[0]), _texts(body, "documents")
    pairs = [tokenize(text) for text in documents]
    prompts = [query + pair for pair in pairs]
    job = await _compute(core, call, prompts, namespace_of(core.options, body, adapter))
    scores = sorted(((_score(query, pair), index) for index, pair in enumerate(pairs)), key=lambda s: (-s[0], s[1]))
    top = body.get("top_n")
    kept = scores[:top] if isinstance(top, int) and top > 0 else scores
    if core.options.dialect == "sglang":
        return await call.json([{"score": s, "document": documents[i], "index": i} for s, i in kept])
    results = [{"index": i, "document": {"text": documents[i]}, "relevance_score": s} for s, i in kept]
    name = f"rerank-{uuid4().hex}"
    return await call.json({"id": name, "model": model, "usage": _usage(job), "results": results})


async def score(core: Core, call: Call) -> web.StreamResponse:
    """vLLM: text_1 (or queries) against text_2 (or documents). SGLang: query against items."""
    body = call.body
    model, adapter = resolve_model(core.options, body)
    tokenize = core.language.encode
    left = [tokenize(text) for text in _texts(body, "text_1", "queries", "query")]
    right = [tokenize(text) for text in _texts(body, "text_2", "documents", "items")]
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise ApiError(400, "text_1 must be one text or as many as text_2", param="text_1")
    prompts = [a + b for a, b in zip(left, right, strict=True)]
    job = await _compute(core, call, prompts, namespace_of(core.options, body, adapter))
    scores = [_score(a, b) for a, b in zip(left, right, strict=True)]
    if core.options.dialect == "sglang":
        return await call.json({"scores": scores, "model": model, "usage": _usage(job), "object": "scoring"})
    data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
    answer = {"id": f"score-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": model}
    return await call.json({**answer, "data": data, "usage": _usage(job)})


async def transcriptions(core: Core, call: Call) -> web.StreamResponse:
    """A multipart upload, read as bytes: its length decides the work, its contents the text."""
    if not call.request.content_type.startswith("multipart/form-data"):
        raise ApiError(400, "multipart/form-data is needed", param="file")
    if b'name="file"' not in call.raw:
        raise ApiError(400, "file: Field required", param="file")
    field = re.search(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)', call.raw)
    resolve_model(core.options, {"model": field.group(1).decode(errors="replace")} if field else {})
    # The boundary is drawn anew for every upload; without it, one file is one prompt.
    boundary = call.request.headers["Content-Type"].rpartition("boundary=")[2].strip('"')
    contents = call.raw.replace(boundary.encode(), b"")
    length = min(1 + len(contents) // BYTES_PER_AUDIO_TOKEN, core.options.context_length - 65)
    random = Random(contents)
    prompt = [random.getrandbits(16) for _ in range(max(2, length))]
    reply = compose(prompt, Wanted(max_tokens=64), seed=core.options.seed)
    name = f"trsc-{uuid4().hex}"
    job = begin(core, call, name, [prompt], [reply], "\x1f\x1faudio")
    try:
        await job.wait()
    finally:
        core.end(name, job)
    return await call.json({"text": reply.content, "usage": {"type": "duration", "seconds": max(1, length // 50)}})
