"""POST /v1/chat/completions and /v1/completions, as each dialect answers them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from aiohttp import web

from load_tests.engine.asks import integer, namespace_of, resolve_model, sampling, traits_of
from load_tests.engine.chunks import ChatChunks, CompletionChunks, chat_choice, completion_choice
from load_tests.engine.core import Core
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError, queue_full, stream_error
from load_tests.engine.prompts import chat_prompt, prompts_of
from load_tests.engine.replies import Reply, Wanted
from load_tests.engine.speech import speak
from load_tests.engine.template import JSON
from load_tests.engine.tokens import is_tokens
from load_tests.engine.usage import sglang_extra, timings, usage_of
from load_tests.engine.wire import DONE, Call, Stream, event

MAX_CHOICES = 128


def tools_of(body: JSON) -> list[JSON]:
    """The tools, checked: each {"type": "function", "function": {"name": ...}}."""
    tools = body.get("tools") or []
    if not isinstance(tools, list):
        raise ApiError(400, "tools must be a list", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, "every tool needs a function with a name", param="tools")
    return tools


def with_choice(wanted: Wanted, tools: Sequence[JSON], choice: Any, last_role: str) -> Wanted:
    """``wanted`` with its tools; ``choice`` is OpenAI's tool_choice: a word or {"function": {"name": ...}}."""
    if not tools:
        return wanted
    named: Any = ""
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else choice.get("name")
        if named not in [tool["function"]["name"] for tool in tools]:
            raise ApiError(400, "tool_choice names a tool that is not in tools", param="tool_choice")
    word = choice if isinstance(choice, str) else "auto"
    return replace(wanted, tools=tools, choice=word, choice_name=named, may_call=last_role == "user")


def choices_of(body: JSON) -> int:
    count = integer(body, "n", 1) or 1
    if count > MAX_CHOICES:
        raise ApiError(400, f"n must be at most {MAX_CHOICES}, got {count}.", param="n")
    return count


def request_name(core: Core, call: Call, prefix: str) -> str:
    """The response's id: vLLM takes the X-Request-Id header, SGLang the body's rid."""
    if core.options.dialect == "sglang":
        rid = call.body.get("rid")
        return rid if isinstance(rid, str) and rid else uuid4().hex
    given = call.request.headers.get("X-Request-Id") if core.options.dialect == "vllm" else None
    return prefix + (given or uuid4().hex)


def note_session(core: Core, body: JSON) -> None:
    """SGLang references a session from the first request that names it until /close_session."""
    session = body.get("session_id")
    if core.options.dialect == "sglang" and isinstance(session, str) and session:
        core.sessions.add(session)


def messages_of(body: JSON) -> list[JSON]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ApiError(400, "messages must be a list of objects", param="messages")
    return messages


def begin(core: Core, call: Call, name: str, prompts: Any, replies: Any, namespace: str) -> Job:
    """Core.begin, unless the order stands that this request finds the queue full."""
    if call.fault is not None and call.fault.kind == "queue_full":
        call.fault = None
        raise queue_full(core.options.dialect)
    traits = traits_of(core.options, call.request.headers, call.body, namespace)
    return core.begin(name, prompts, replies, traits, call.body)


async def chat_completions(core: Core, call: Call) -> web.StreamResponse:
    body, options = call.body, core.options
    model, adapter = resolve_model(options, body)
    tools, count = tools_of(body), choices_of(body)
    if options.dialect == "sglang" and is_tokens(body.get("input_ids")):
        prompt, last_role = list(body["input_ids"]), "user"
    else:
        messages = messages_of(body)
        shown = [] if body.get("tool_choice") == "none" else tools
        prompt = chat_prompt(options, core.language, messages, shown, body=body)
        last_role = messages[-1]["role"]
    asked = integer(body, "max_completion_tokens", 1) or integer(body, "max_tokens", 1)
    wanted = with_choice(sampling(body, prompt, options, asked), tools, body.get("tool_choice"), last_role)
    replies = [speak(core.language, prompt, wanted, body, seed=options.seed, index=index) for index in range(count)]
    note_session(core, body)
    name = request_name(core, call, "chatcmpl-")
    chunks = ChatChunks(options.dialect, name, int(time.time()), model)
    if options.dialect == "vllm" and body.get("return_token_ids"):
        chunks.prompt_ids = [prompt] * count
    return await _answer(core, call, name, [prompt] * count, replies, namespace_of(options, body, adapter), chunks, 1)


async def completions(core: Core, call: Call) -> web.StreamResponse:
    body, options = call.body, core.options
    model, adapter = resolve_model(options, body)
    prompts, count = prompts_of(core.language, body), choices_of(body)
    asked = integer(body, "max_tokens", 1) or 16
    sequences: list[list[int]] = []
    replies: list[Reply] = []
    for prompt in prompts:
        wanted = sampling(body, prompt, options, asked)
        for index in range(count):
            sequences.append(prompt)
            replies.append(speak(core.language, prompt, wanted, body, seed=options.seed, index=index))
    note_session(core, body)
    name = request_name(core, call, "cmpl-")
    chunks = CompletionChunks(options.dialect, name, int(time.time()), model)
    namespace = namespace_of(options, body, adapter)
    if options.dialect == "vllm" and body.get("return_token_ids"):
        chunks.prompt_ids = sequences
    return await _answer(core, call, name, sequences, replies, namespace, chunks, len(prompts))


async def _answer(
    core: Core,
    call: Call,
    name: str,
    prompts: Sequence[list[int]],
    replies: Sequence[Reply],
    namespace: str,
    chunks: ChatChunks | CompletionChunks,
    distinct: int,
) -> web.StreamResponse:
    """Run and answer. ``distinct`` is how many different prompts there are: usage counts each once."""
    streaming = bool(call.body.get("stream"))
    try:
        job = begin(core, call, name, prompts, replies, namespace)
    except ApiError as error:
        # SGLang finds the queue full after it has answered 200 to a stream.
        if not (streaming and core.options.dialect == "sglang" and error.status >= 500):
            raise
        core.errors += 1
        stream = Stream(call)
        await stream.send(event(stream_error("sglang", call.request.path, error)))
        await stream.send(DONE)
        return await stream.close()
    counted = list(range(0, len(prompts), len(prompts) // distinct))
    try:
        if streaming:
            return await _stream(core, call, job, chunks, counted)
        await job.wait()
        return await _whole(core, call, job, chunks, counted)
    finally:
        core.end(name, job)


async def _whole(
    core: Core, call: Call, job: Job, chunks: ChatChunks | CompletionChunks, counted: list[int]
) -> web.StreamResponse:
    dialect = core.options.dialect
    pick = chat_choice if isinstance(chunks, ChatChunks) else completion_choice
    choices = [pick(dialect, index, reply, job.reason(index)) for index, reply in enumerate(job.replies)]
    if chunks.prompt_ids is not None:
        for choice, work in zip(choices, job.works, strict=True):
            choice["token_ids"] = work.tokens[len(work.prompt) :]
            if isinstance(chunks, CompletionChunks):
                choice["prompt_token_ids"] = list(work.prompt)
    answer = chunks.whole(choices, usage_of(core.options, job, counted))
    answer |= sglang_extra(core.options, call.body, job, counted)
    if dialect == "vllm":
        answer["kv_transfer_params"] = job.works[0].params
    if dialect == "tensorrt_llm" and job.works[0].params is not None:
        for choice, work in zip(choices, job.works, strict=True):
            choice["disaggregated_params"] = work.params
        answer["prompt_token_ids"] = list(job.works[0].prompt)
    if dialect == "llamacpp":
        answer["timings"] = timings(job)
    return await call.json(answer)


async def _stream(
    core: Core, call: Call, job: Job, chunks: ChatChunks | CompletionChunks, counted: list[int]
) -> web.StreamResponse:
    stream = Stream(call)
    if core.options.dialect != "sglang":
        await stream.open()
    try:
        async for data in _events(core, call, job, chunks, counted):
            await stream.send(data)
    except ApiError as error:
        core.errors += 1
        if core.options.dialect == "vllm" and not stream.sent:
            # vLLM begins a chat's choices before it looks at what came of them.
            for index in range(len(job.works)):
                if head := chunks.start(index):
                    await stream.send(head)
        await stream.send(event(stream_error(core.options.dialect, call.request.path, error)))
        await stream.send(DONE)
    return await stream.close()


async def _events(
    core: Core, call: Call, job: Job, chunks: ChatChunks | CompletionChunks, counted: list[int]
) -> AsyncIterator[bytes]:
    started: set[int] = set()
    async for index, start, end, ended in job.progress():
        reply = job.replies[index]
        if index not in started:
            started.add(index)
            if head := chunks.start(index):
                yield head
        for data in chunks.tokens(index, reply, start, end):
            yield data
        if ended:
            extra = {"timings": timings(job)} if core.options.dialect == "llamacpp" else {}
            if core.options.dialect == "vllm" and (params := job.works[index].params) is not None:
                extra["kv_transfer_params"] = params
            yield chunks.finish(index, job.reason(index), reply, extra)
    if extra := sglang_extra(core.options, call.body, job, counted):
        yield chunks.extension(extra)
    options = call.body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield chunks.usage(usage_of(core.options, job, counted, stream=True))
    yield DONE
