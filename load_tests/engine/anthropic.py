"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's dialect, as vLLM and SGLang serve it.

The cached part of a prompt is told apart in usage (input_tokens + cache_read_input_tokens +
cache_creation_input_tokens = prompt), and in a stream only by message_delta.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import msgspec
from aiohttp import web

from load_tests.engine.asks import integer, namespace_of, resolve_model, stops_of, wanted_tokens
from load_tests.engine.core import Core
from load_tests.engine.driver import Job
from load_tests.engine.errors import ApiError, stream_error
from load_tests.engine.openai import begin, note_session, with_choice
from load_tests.engine.prompts import chat_prompt
from load_tests.engine.replies import Part, Reply, Wanted
from load_tests.engine.speech import speak
from load_tests.engine.template import JSON, compact
from load_tests.engine.usage import prompt_figures
from load_tests.engine.wire import Call, Stream, event

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


def chat_messages(body: JSON) -> list[JSON]:
    """Anthropic's system and messages as chat messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise ApiError(400, "messages: Input should be a non-empty list of objects")
    converted: list[JSON] = []
    system = body.get("system")
    if isinstance(system, list):
        # As vLLM 0.32 does; in a system prompt that is a string it stays.
        system = [block for block in system if not _is_billing(block)]
    if system:
        converted.append({"role": "system", "content": system})
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            converted.extend(_from_blocks(message.get("role"), content))
        else:
            converted.append(message)
    return converted


def _is_billing(block: Any) -> bool:
    """Whether it is the attribution that Claude Code puts first, and that changes with every request."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header")


def _from_blocks(role: Any, blocks: list[Any]) -> list[JSON]:
    messages: list[JSON] = []
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[JSON] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append({"function": {"name": block.get("name"), "arguments": compact(block.get("input") or {})}})
        elif kind == "tool_result":
            messages.append({"role": "tool", "content": block.get("content")})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_without_cache_control(block))
    if texts or calls or not messages:
        message: JSON = {"role": role, "content": texts, "tool_calls": calls}
        messages.append({**message, "reasoning": "\n".join(thoughts)} if thoughts else message)
    return messages


def _without_cache_control(block: Any) -> Any:
    return {key: value for key, value in block.items() if key != "cache_control"} if isinstance(block, dict) else block


def chat_tools(body: JSON) -> list[JSON]:
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools):
        raise ApiError(400, "tools: every tool needs a name")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": tool.get("input_schema") or {"type": "object"},
            },
        }
        for tool in tools
    ]


def prompt_of(core: Core, body: JSON) -> list[int]:
    return chat_prompt(core.options, core.language, chat_messages(body), chat_tools(body), body=body, param=None)


async def count_tokens(core: Core, call: Call) -> web.StreamResponse:
    resolve_model(core.options, call.body)
    return await call.json({"input_tokens": len(prompt_of(core, call.body))})


async def messages(core: Core, call: Call) -> web.StreamResponse:
    body, options = call.body, core.options
    model, adapter = resolve_model(options, body)
    prompt = prompt_of(core, body)
    asked = integer(body, "max_tokens", 1)
    if asked is None:
        raise ApiError(400, "max_tokens: Field required")
    wanted = Wanted(wanted_tokens(options, len(prompt), asked), stop=stops_of(body, "stop_sequences"))
    last = chat_messages(body)[-1]["role"]
    wanted = with_choice(wanted, chat_tools(body), _choice(body), last)
    reply = speak(core.language, prompt, wanted, body, seed=options.seed)
    note_session(core, body)
    name = f"msg_{uuid4().hex}"
    job = begin(core, call, name, [prompt], [reply], namespace_of(options, body, adapter))
    try:
        if body.get("stream"):
            return await _stream(core, call, job, name, model)
        await job.wait()
        reply = job.replies[0]
        answer = _message(name, model)
        answer |= {"content": _blocks(reply), "stop_reason": _stop_reason(job), "stop_sequence": reply.stop_reason}
        return await call.json({**answer, "usage": _usage(core, job)})
    finally:
        core.end(name, job)


def _choice(body: JSON) -> Any:
    """Anthropic's tool_choice in OpenAI's words."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else "auto"
    if kind == "tool" and isinstance(choice, dict):
        return {"name": choice.get("name")}
    return {"any": "required", "none": "none"}.get(str(kind), "auto")


def _message(name: str, model: str) -> JSON:
    return {"id": name, "type": "message", "role": "assistant", "model": model}


def _stop_reason(job: Job) -> str:
    return "stop_sequence" if job.replies[0].stop_reason else STOP_REASONS[job.reason(0)]


def _usage(core: Core, job: Job) -> JSON:
    prompt, cached, created = prompt_figures(core.options, job, [0])
    output = job.works[0].emitted
    if not core.options.usage_details:
        return {"input_tokens": prompt, "output_tokens": output}
    return {
        "input_tokens": prompt - cached - created,
        "output_tokens": output,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


def _blocks(reply: Reply) -> list[JSON]:
    blocks: list[JSON] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not (reply.calls or reply.reasoning):
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        try:
            arguments = msgspec.json.decode(call.arguments)
        except msgspec.DecodeError:
            # Cut by max_tokens in the middle of the arguments.
            arguments = {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


async def _stream(core: Core, call: Call, job: Job, name: str, model: str) -> web.StreamResponse:
    stream = Stream(call)
    try:
        async for kind, fields in _events(core, job, name, model):
            await stream.send(event({"type": kind, **fields}, kind))
    except ApiError as error:
        core.errors += 1
        await stream.send(event(stream_error(core.options.dialect, call.request.path, error), "error"))
    return await stream.close()


async def _events(core: Core, job: Job, name: str, model: str) -> AsyncIterator[tuple[str, JSON]]:
    begun = False
    async for _, start, end, ended in job.progress():
        if not begun:
            begun = True
            # Only now: what the KV was computed from may have changed the reply.
            reply = job.replies[0]
            blocks = _BlockStream(reply)
            head = _message(name, model)
            head |= {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = {"input_tokens": len(job.works[0].prompt), "output_tokens": 0}
            yield "message_start", {"message": {**head, "usage": usage}}
        for part in reply.parts[start:end]:
            for item in blocks.show(part):
                yield item
        if ended:
            for item in blocks.finish():
                yield item
            delta = {"stop_reason": _stop_reason(job), "stop_sequence": reply.stop_reason}
            yield "message_delta", {"delta": delta, "usage": _usage(core, job)}
            yield "message_stop", {}


class _BlockStream:
    """Content blocks as tokens come: a block for each run of thinking, of text, and for each call."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._count = 0
        self._open: tuple[str, int] | None = None

    def show(self, part: Part) -> Iterator[tuple[str, JSON]]:
        if part.kind == "none":
            return
        kind = {"reasoning": "thinking", "text": "text"}.get(part.kind, "tool_use")
        if self._open != (kind, part.call):
            yield from self._close()
            yield "content_block_start", {"index": self._count, "content_block": self._block(kind, part.call)}
            self._open = (kind, part.call)
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": part.text},
            "text": {"type": "text_delta", "text": part.text},
            "arguments": {"type": "input_json_delta", "partial_json": part.text},
        }.get(part.kind)
        if delta is not None:
            yield "content_block_delta", {"index": self._count, "delta": delta}

    def finish(self) -> Iterator[tuple[str, JSON]]:
        """The end of the last block; a reply that shows nothing is one empty text."""
        if self._open is None and self._count == 0:
            yield "content_block_start", {"index": 0, "content_block": self._block("text", 0)}
            self._open = ("text", 0)
        yield from self._close()

    def _close(self) -> Iterator[tuple[str, JSON]]:
        if self._open is not None:
            yield "content_block_stop", {"index": self._count}
            self._count += 1
            self._open = None

    def _block(self, kind: str, call: int) -> JSON:
        if kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        if kind == "text":
            return {"type": "text", "text": ""}
        made = self._reply.calls[call]
        return {"type": "tool_use", "id": made.id, "name": made.name, "input": {}}
