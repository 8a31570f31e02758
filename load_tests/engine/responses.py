"""POST /v1/responses and what belongs to it. A stored response lives in this process alone: previous_response_id
works on the engine that answered it and is 404 on any other, which is why a gateway must pin it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from aiohttp import web

from load_tests.engine.asks import integer, namespace_of, resolve_model, sampling
from load_tests.engine.core import Core
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError
from load_tests.engine.openai import begin, note_session, with_choice
from load_tests.engine.prompts import chat_prompt
from load_tests.engine.replies import Reply
from load_tests.engine.speech import speak
from load_tests.engine.template import JSON
from load_tests.engine.usage import prompt_figures
from load_tests.engine.wire import Call, Stream, event


def input_messages(body: JSON) -> list[JSON]:
    """The input field as chat messages."""
    value = body.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ApiError(400, "input must be a string or a list of items", param="input")
    return item_messages(value)


def item_messages(items: list[JSON]) -> list[JSON]:
    """Items as chat messages; calls that follow each other are one assistant message, as they were generated."""
    messages: list[JSON] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"function": {"name": item.get("name"), "arguments": item.get("arguments", "{}")}}
            if messages and messages[-1].get("tool_calls"):
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
    return messages


def chat_tools(body: JSON) -> list[JSON]:
    """Function tools in the chat form; tools of other types are left to nobody."""
    listed = body.get("tools") or []
    if not isinstance(listed, list):
        raise ApiError(400, "tools must be a list", param="tools")
    tools = [tool for tool in listed if isinstance(tool, dict) and tool.get("type") == "function"]
    if not all(isinstance(tool.get("name"), str) for tool in tools):
        raise ApiError(400, "every function tool needs a name", param="tools")
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key not in ("type", "strict")}}
        for tool in tools
    ]


def find(core: Core, name: str) -> dict[str, Any]:
    """The stored response; 404 where it is not this engine's."""
    if name not in core.responses:
        raise ApiError(404, f"Response with id '{name}' not found.", param="response_id", kind="invalid_request_error")
    return core.responses[name]


async def create(core: Core, call: Call) -> web.StreamResponse:
    body, options = call.body, core.options
    model, adapter = resolve_model(options, body)
    previous = body.get("previous_response_id")
    history: list[JSON] = list(find(core, str(previous))["messages"]) if previous else []
    history += input_messages(body)
    tools = chat_tools(body)
    if not history:
        raise ApiError(400, "input must not be empty", param="input")
    instructions = body.get("instructions")
    head = [{"role": "system", "content": instructions}] if instructions else []
    prompt = chat_prompt(options, core.language, head + history, tools, body=body, param="input")
    asked = integer(body, "max_output_tokens", 1)
    wanted = with_choice(sampling(body, prompt, options, asked), tools, body.get("tool_choice"), history[-1]["role"])
    reply = speak(core.language, prompt, wanted, body, seed=options.seed)
    note_session(core, body)
    answer = _response(body, model)
    name = answer["id"]
    job = begin(core, call, name, [prompt], [reply], namespace_of(options, body, adapter))
    try:
        if body.get("stream"):
            return await _stream(core, call, job, answer, history)
        await job.wait()
        _conclude(core, job, answer, history)
        return await call.json(answer)
    finally:
        core.end(name, job)


def _response(body: JSON, model: str) -> JSON:
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "temperature": body.get("temperature", 1.0),
        "top_p": body.get("top_p", 1.0),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata"),
        "store": body.get("store", True),
        "incomplete_details": None,
        "error": None,
        "usage": None,
    }


def _conclude(core: Core, job: Job, answer: JSON, history: list[JSON]) -> None:
    """Fill in the end of a response, and store it if the request allows."""
    reply, reason = job.replies[0], job.reason(0)
    prompt, cached, _ = prompt_figures(core.options, job, [0])
    output = job.works[0].emitted
    answer["status"] = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
    if reason == "length":
        answer["incomplete_details"] = {"reason": "max_output_tokens"}
    answer["output"] = [_item(answer["id"], reply, "completed")]
    answer["usage"] = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    if answer["store"] is not False:
        said = item_messages([_plain(item) for item in answer["output"]])
        core.remember({"response": answer, "messages": [*history, *said]})


def _plain(item: JSON) -> JSON:
    return item if item["type"] == "function_call" else {**item, "content": item["content"][0]["text"]}


def _item(name: str, reply: Reply, status: str) -> JSON:
    """The one output item of a reply; empty while in progress."""
    done = status == "completed"
    if reply.calls:
        call = reply.calls[0]
        item: JSON = {"id": f"fc_{name[5:]}", "type": "function_call", "status": status, "call_id": call.id}
        return {**item, "name": call.name, "arguments": call.arguments if done else ""}
    content = [_part(reply.content)] if done else []
    return {"id": f"msg_{name[5:]}", "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> JSON:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def _stream(core: Core, call: Call, job: Job, answer: JSON, history: list[JSON]) -> web.StreamResponse:
    """Numbered events with event: lines and, unlike the other routes, no [DONE]."""
    stream = Stream(call)
    number = 0
    try:
        async for kind, fields in _events(core, job, answer, history):
            await stream.send(event({"type": kind, "sequence_number": number, **fields}, kind))
            number += 1
    except ApiError as error:
        core.errors += 1
        await stream.send(event({"type": "error", "message": error.message, "sequence_number": number}, "error"))
    return await stream.close()


async def _events(core: Core, job: Job, answer: JSON, history: list[JSON]) -> AsyncIterator[tuple[str, JSON]]:
    yield "response.created", {"response": answer}
    yield "response.in_progress", {"response": answer}
    place: JSON = {}
    async for _, start, end, _ in job.progress():
        # Read only now: what the KV was computed from may have changed the reply.
        reply = job.replies[0]
        if not place:
            item = _item(answer["id"], reply, "in_progress")
            place |= {"item_id": item["id"], "output_index": 0}
            yield "response.output_item.added", {"output_index": 0, "item": item}
            if not reply.calls:
                place["content_index"] = 0
                yield "response.content_part.added", {**place, "part": _part("")}
        shown = "arguments" if reply.calls else "text"
        delta = "response.function_call_arguments.delta" if reply.calls else "response.output_text.delta"
        text = "".join(part.text for part in reply.parts[start:end] if part.kind == shown)
        if text:
            yield delta, {**place, "delta": text} if reply.calls else {**place, "delta": text, "logprobs": []}
    _conclude(core, job, answer, history)
    done = answer["output"][0]
    if reply.calls:
        yield "response.function_call_arguments.done", {**place, "name": done["name"], "arguments": done["arguments"]}
    else:
        yield "response.output_text.done", {**place, "text": reply.content, "logprobs": []}
        yield "response.content_part.done", {**place, "part": _part(reply.content)}
    yield "response.output_item.done", {"output_index": 0, "item": done}
    final = "response.incomplete" if answer["status"] == "incomplete" else "response.completed"
    yield final, {"response": answer}


async def retrieve(core: Core, call: Call) -> web.StreamResponse:
    return await call.json(find(core, call.request.match_info["id"])["response"])


async def delete(core: Core, call: Call) -> web.StreamResponse:
    name = call.request.match_info["id"]
    find(core, name)
    del core.responses[name]
    return await call.json({"id": name, "object": "response", "deleted": True})


async def cancel(core: Core, call: Call) -> web.StreamResponse:
    """Abort a response that is being generated; one that has ended is answered as it is stored."""
    name = call.request.match_info["id"]
    if name in core.jobs:
        core.jobs[name].abort()
        return await call.json({"id": name, "object": "response", "status": "cancelled"})
    return await call.json(find(core, name)["response"])
