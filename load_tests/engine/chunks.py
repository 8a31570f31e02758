"""OpenAI objects, field for field as vLLM 0.33, SGLang 0.5.23 and llama.cpp print them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from load_tests.engine.replies import Reply
from load_tests.engine.wire import encode, event

VLLM_FINGERPRINT = "vllm-0.33.0-tp1-sim"


def call_object(reply: Reply, number: int) -> dict[str, Any]:
    call = reply.calls[number]
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def matched_of(reply: Reply, reason: str) -> str | int | None:
    """SGLang's matched_stop: the stop string, or the end token's id."""
    return reply.stop_reason or (reply.tokens[-1] if reason in ("stop", "tool_calls") and reply.tokens else None)


def chat_choice(dialect: str, index: int, reply: Reply, reason: str) -> dict[str, Any]:
    calls = [call_object(reply, number) for number in range(len(reply.calls))]
    thoughts = reply.reasoning or None
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if calls else "")}
    choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
    if dialect == "vllm":
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": calls}
        message["reasoning"] = thoughts
        choice |= {"stop_reason": reply.stop_reason, "token_ids": None}
    elif dialect == "sglang":
        message |= {"reasoning_content": thoughts, "tool_calls": calls or None}
        choice["matched_stop"] = matched_of(reply, reason)
    else:
        if calls:
            message["tool_calls"] = calls
        if thoughts:
            message["reasoning_content"] = thoughts
        if dialect == "llamacpp":
            del choice["logprobs"]
    return choice


def completion_choice(dialect: str, index: int, reply: Reply, reason: str) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "text": reply.text, "logprobs": None, "finish_reason": reason}
    if dialect == "vllm":
        choice |= {"stop_reason": reply.stop_reason, "token_ids": None, "prompt_logprobs": None}
    elif dialect == "sglang":
        choice["matched_stop"] = matched_of(reply, reason)
    return choice


class _Chunks:
    """``prompt_ids``, by choice, are given when a vLLM request says return_token_ids: then each event carries the ids
    that it shows, and those that show nothing travel with the next."""

    kind = ""
    chunk_kind = ""
    prompt_ids: list[list[int]] | None = None

    def __init__(self, dialect: str, name: str, created: int, model: str) -> None:
        self.dialect = dialect
        self._unsent: dict[int, list[int]] = {}
        self._head = {"id": name, "object": self.chunk_kind, "created": created, "model": model}
        self._prefix = b"data: " + encode(self._head)[:-1]

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        answer = {**self._head, "object": self.kind, "choices": choices}
        if self.dialect == "vllm":
            answer |= {"service_tier": None, "system_fingerprint": VLLM_FINGERPRINT, "usage": usage}
            answer |= {"prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
        elif self.dialect == "sglang":
            answer |= {"usage": usage, "metadata": {"weight_version": "default"}}
        else:
            answer |= {"system_fingerprint": "sim", "usage": usage}
        return answer

    def usage(self, usage: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [], "usage": usage}
        if self.dialect == "vllm":
            chunk["system_fingerprint"] = VLLM_FINGERPRINT
        return event(chunk)

    def extension(self, fields: dict[str, Any]) -> bytes:
        """An event without choices, before usage."""
        return event({**self._head, "choices": [], **fields})

    def _ids(self, index: int) -> list[int] | None:
        """The ids generated since the last event that carried any; None where nobody asked."""
        return None if self.prompt_ids is None else self._unsent.pop(index, [])

    def _fast(self, before: bytes, text: str, after: bytes) -> bytes:
        """The hot path: one JSON string between constants, instead of an object built and encoded for every token."""
        return b"".join((self._prefix, before, encode(text), after))


class ChatChunks(_Chunks):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        answer = super().whole(choices, usage)
        if self.prompt_ids is not None:
            answer["prompt_token_ids"] = self.prompt_ids[0]
        return answer

    def start(self, index: int) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        choice["finish_reason"] = None
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self.dialect == "vllm":
            chunk |= {"prompt_token_ids": self.prompt_ids and self.prompt_ids[index], "prompt_text": None}
        elif self.dialect == "sglang":
            choice["delta"] = {"reasoning_content": None, **choice["delta"]}
            choice["matched_stop"] = None
        elif self.dialect == "llamacpp":
            choice["delta"] = {"role": "assistant", "content": None}
            del choice["logprobs"]
        return event(chunk)

    def tokens(self, index: int, reply: Reply, start: int, end: int) -> Iterator[bytes]:
        """Events for tokens ``start:end``: neighbours of one kind are one event."""
        if self.prompt_ids is not None:
            self._unsent.setdefault(index, []).extend(reply.tokens[start:end])
        for (kind, number), parts in groupby(reply.parts[start:end], key=lambda part: (part.kind, part.call)):
            text = "".join(part.text for part in parts)
            if kind == "text":
                yield self._content(index, text)
            elif kind == "reasoning":
                yield self._reasoning(index, text)
            elif kind == "arguments":
                yield self._tool(index, {"index": number, "function": {"arguments": text}})
            elif kind == "tool":
                call = call_object(reply, number)
                call["function"] = {"name": text, "arguments": ""}
                yield self._tool(index, {"index": number, **call})

    def finish(self, index: int, reason: str, reply: Reply, extra: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}
        chunk: dict[str, Any] = {**self._head, "choices": [choice], **extra}
        if self.dialect == "vllm":
            choice["delta"] = {"content": ""}
            choice |= {"stop_reason": reply.stop_reason, "token_ids": self._ids(index), "weight_versions": None}
            chunk |= {"system_fingerprint": VLLM_FINGERPRINT, "kv_transfer_params": extra.get("kv_transfer_params")}
        elif self.dialect == "sglang":
            choice["delta"] = {"reasoning_content": None}
            choice["matched_stop"] = matched_of(reply, reason)
        return event(chunk)

    def _content(self, index: int, text: str) -> bytes:
        if self.prompt_ids is not None:
            choice: dict[str, Any] = {"index": index, "delta": {"content": text}, "logprobs": None}
            choice |= {"finish_reason": None, "token_ids": self._ids(index)}
            return event({**self._head, "choices": [choice], "kv_transfer_params": None})
        number = str(index).encode()
        if self.dialect == "sglang":
            before = b',"choices":[{"index":' + number + b',"delta":{"reasoning_content":null,"content":'
            return self._fast(before, text, b'},"logprobs":null,"finish_reason":null,"matched_stop":null}]}\n\n')
        before = b',"choices":[{"index":' + number + b',"delta":{"content":'
        if self.dialect == "vllm":
            after = b'},"logprobs":null,"finish_reason":null,"token_ids":null}],"kv_transfer_params":null}\n\n'
        else:
            after = b'},"logprobs":null,"finish_reason":null}]}\n\n'
        return self._fast(before, text, after)

    def _reasoning(self, index: int, text: str) -> bytes:
        name = "reasoning" if self.dialect == "vllm" else "reasoning_content"
        choice: dict[str, Any] = {"index": index, "delta": {name: text}, "logprobs": None, "finish_reason": None}
        if self.dialect == "vllm":
            choice["token_ids"] = self._ids(index)
        elif self.dialect == "sglang":
            choice["matched_stop"] = None
        return event({**self._head, "choices": [choice]})

    def _tool(self, index: int, call: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": {"tool_calls": [call]}, "logprobs": None}
        choice["finish_reason"] = None
        if self.dialect == "sglang":
            choice["delta"] = {"reasoning_content": None, **choice["delta"]}
            choice["matched_stop"] = None
        return event({**self._head, "choices": [choice]})


class CompletionChunks(_Chunks):
    kind = "text_completion"
    chunk_kind = "text_completion"
    _begun: frozenset[int] = frozenset()

    def start(self, index: int) -> bytes:
        return b""

    def tokens(self, index: int, reply: Reply, start: int, end: int) -> Iterator[bytes]:
        text = "".join(part.text for part in reply.parts[start:end])
        if self.prompt_ids is not None:
            self._unsent.setdefault(index, []).extend(reply.tokens[start:end])
            if text:
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
                yield event({**self._head, "choices": [self._numbered(index, choice)]})
        elif text:
            before = b',"choices":[{"index":' + str(index).encode() + b',"text":'
            after = b',"logprobs":null,"finish_reason":null'
            after += {"vllm": b',"stop_reason":null', "sglang": b',"matched_stop":null'}.get(self.dialect, b"")
            yield self._fast(before, text, after + b"}]}\n\n")

    def finish(self, index: int, reason: str, reply: Reply, extra: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": reason}
        if self.dialect == "vllm":
            choice = self._numbered(index, {**choice, "stop_reason": reply.stop_reason})
        elif self.dialect == "sglang":
            choice["matched_stop"] = matched_of(reply, reason)
        return event({**self._head, "choices": [choice], **extra})

    def _numbered(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """With the ids, and in a choice's first event those of its prompt, for those who asked."""
        if self.prompt_ids is None:
            return choice
        first, self._begun = index not in self._begun, self._begun | {index}
        return {**choice, "token_ids": self._ids(index), "prompt_token_ids": self.prompt_ids[index] if first else None}
