"""POST /generate, SGLang's native route: text or token ids in, cumulative text out, meta_info always."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from aiohttp import web

from load_tests.engine.asks import integer, namespace_of, stops_of, wanted_tokens
from load_tests.engine.core import Core
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError, stream_error
from load_tests.engine.openai import begin, choices_of, note_session, request_name
from load_tests.engine.prompts import prompts_of
from load_tests.engine.replies import Reply, Wanted
from load_tests.engine.sessions import Opened
from load_tests.engine.speech import speak
from load_tests.engine.template import JSON
from load_tests.engine.usage import cached_details
from load_tests.engine.wire import DONE, Call, Stream, event

DEFAULT_NEW_TOKENS = 128


def wanted_of(core: Core, params: JSON, prompt: list[int]) -> Wanted:
    """SGLang's sampling_params."""
    asked = integer(params, "max_new_tokens", 0)
    most = wanted_tokens(core.options, len(prompt), DEFAULT_NEW_TOKENS if asked is None else asked)
    return Wanted(
        max_tokens=most,
        min_tokens=min(most, integer(params, "min_new_tokens", 0) or 0),
        ignore_eos=bool(params.get("ignore_eos")),
        stop=stops_of(params, "stop"),
    )


def finish_object(reply: Reply, reason: str) -> JSON:
    if reason == "abort":
        return {"type": "abort", "message": "Aborted"}
    if reason == "length":
        return {"type": "length", "length": len(reply.tokens)}
    return {"type": "stop", "matched": reply.stop_reason or reply.tokens[-1]}


def logprobs(core: Core, prompt: Sequence[int], output: Sequence[int], start: object) -> JSON:
    """[logarithm, id, null] of each token. A decode engine knows none of its prompt's."""
    first = start if isinstance(start, int) and start >= 0 else len(prompt) - 1
    told = [] if core.options.role == "decode" else prompt[first:]
    entries = [[None if place == 0 else _logprob(token), token, None] for place, token in enumerate(told)]
    return {
        "input_token_logprobs": entries,
        "output_token_logprobs": [[_logprob(token), token, None] for token in output],
    }


def _logprob(token: int) -> float:
    """The same on every engine."""
    return -(token * 2_654_435_761 % 4096 + 1) / 1024


def result(core: Core, job: Job, name: str, index: int, end: int, ended: bool, body: JSON) -> JSON:
    """One sequence's object after ``end`` tokens."""
    work, reply = job.works[index], job.replies[index]
    cached = (work.cached or 0) if work.reported is None else work.reported
    meta: dict[str, Any] = {
        "id": name if len(job.works) == 1 else f"{name}_{index}",
        "finish_reason": finish_object(reply, job.reason(index)) if ended else None,
        "prompt_tokens": len(work.prompt),
        "completion_tokens": end,
        "cached_tokens": cached,
        "cached_tokens_details": cached_details(work.sources),
        "weight_version": "default",
        "num_retractions": work.preempted,
        "reasoning_tokens": 0,
        "dp_rank": None,
        "e2e_latency": (work.ended or 0.0) - work.arrived if ended else 0.0,
    }
    if body.get("return_logprob"):
        meta |= logprobs(core, work.prompt, reply.tokens[:end], body.get("logprob_start_len"))
    text = "".join(part.text for part in reply.parts[:end])
    return {"text": text, "output_ids": list(reply.tokens[:end]), "meta_info": meta}


async def generate(core: Core, call: Call) -> web.StreamResponse:
    body = call.body
    key = "input_ids" if body.get("input_ids") is not None else "text"
    value = body.get(key)
    batch = isinstance(value, list) and (key == "text" or bool(value and isinstance(value[0], list)))
    prompts = prompts_of(core.language, body, key)
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise ApiError(400, "sampling_params must be an object")
    count = choices_of(params)
    session: Opened | None = None
    if not batch and count == 1:
        session, whole = core.opened.begin(body.get("session_params"), prompts[0])
        prompts = [whole]
    try:
        return await _generate(core, call, prompts, count, params, batch, session)
    except BaseException:
        if session is not None and session.running:
            core.opened.end(session, None)
        raise


async def _generate(
    core: Core, call: Call, prompts: list[list[int]], count: int, params: JSON, batch: bool, session: Opened | None
) -> web.StreamResponse:
    body = call.body
    sequences = [prompt for prompt in prompts for _ in range(count)]
    replies = [
        speak(
            core.language,
            prompt,
            wanted_of(core, params, prompt),
            body,
            seed=core.options.seed,
            index=number % count,
        )
        for number, prompt in enumerate(sequences)
    ]
    note_session(core, body)
    name = request_name(core, call, "")
    lora = body.get("lora_path")
    namespace = namespace_of(core.options, body, lora if isinstance(lora, str) else "")
    streaming = bool(body.get("stream"))
    try:
        job = begin(core, call, name, sequences, replies, namespace)
    except ApiError as error:
        if not streaming or error.status < 500:
            raise
        core.errors += 1
        return await _stream(call, _refused(call, error))
    try:
        if streaming:
            return await _stream(call, _events(core, job, name, body))
        await job.wait()
        results = [result(core, job, name, index, work.emitted, True, body) for index, work in enumerate(job.works)]
        return await call.json(results if batch or count > 1 else results[0])
    finally:
        core.end(name, job)
        if session is not None:
            work = job.works[0]
            core.opened.end(session, work.tokens if work.state == "finished" else None)


async def _refused(call: Call, error: ApiError) -> AsyncIterator[bytes]:
    yield event(stream_error("sglang", call.request.path, error))
    yield DONE


async def _events(core: Core, job: Job, name: str, body: JSON) -> AsyncIterator[bytes]:
    async for index, _, end, ended in job.progress():
        answer = result(core, job, name, index, end, ended, body)
        yield event({**answer, "index": index} if len(job.works) > 1 else answer)
    yield DONE


async def _stream(call: Call, events: AsyncIterator[bytes]) -> web.StreamResponse:
    stream = Stream(call)
    try:
        async for data in events:
            await stream.send(data)
    except ApiError as error:
        await stream.send(event(stream_error("sglang", call.request.path, error)))
        await stream.send(DONE)
    return await stream.close()
