"""Many requests at once over pairs of every kind, some of which fail: an answer is right, or it is an error."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from tests.gateway.disagg.kinds import KINDS, BeginKind, kind_of_pair
from tests.gateway.disagg.rig import events_of, story, text_of
from tests.gateway.talk import Response, chat, once, request
from tests.load_tests.engine.pairs import STORY

__all__ = ["kind_of_pair"]
STREAMS = [False, True]
REQUESTS = 30


@pytest.mark.parametrize("policy", ["pairs", "cache_aware", "round_robin"])
@pytest.mark.parametrize("kind", KINDS)
async def test_all_are_right(kind_of_pair: BeginKind, kind: str, policy: str) -> None:
    r = await kind_of_pair(kind, 2, 2, policy=policy)
    bodies = [story(number % 10, stream=number % 3 == 0, max_tokens=4 + number) for number in range(REQUESTS)]
    for each in bodies:
        await r.right(each)
    await asyncio.gather(*(r.check(each, f"X-Session-Id: {at % 7}") for at, each in enumerate(bodies)))
    assert await r.faults() == {}
    await r.nothing_left()


FAULTS: list[Any] = ["error500", "reset", "transfer_fail", "queue_full", "half_close", "refuse", "lost_answer"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_answer_is_never_given(kind_of_pair: BeginKind, kind: str, seed: int) -> None:
    r = await kind_of_pair(kind, 2, 2, policy="cache_aware" if seed % 2 else "pairs", lease=3.0, blocks_ttl=3.0)
    random = Random(seed)
    bodies = [story(number % 10, stream=random.random() < 0.5, max_tokens=4 + number) for number in range(REQUESTS)]
    for each in bodies:
        await r.right(each)
    for fault in FAULTS:
        random.choice(r.engines).faults.add(fault, count=1)
    answers = await asyncio.gather(*(r.ask(each, f"X-Session-Id: {at % 7}") for at, each in enumerate(bodies)))
    good = 0
    for body, answer in zip(bodies, answers, strict=True):
        stream = body["stream"] and answer.status == 200
        if failed(answer, stream):
            continue
        assert text_of(answer, stream) == await r.right(body)
        good += 1
    assert good >= REQUESTS - len(FAULTS)
    for each in r.engines:
        each.faults.clear()
    await r.nothing_left()


def failed(answer: Response, stream: bool) -> bool:
    """Whether the client was told that this is no answer: by a status, an error event, or an end before its end."""
    if answer.status != 200:
        assert answer.status in (500, 502, 503)
        told = answer.json()
        assert told.get("error", told)["message"]
        return True
    if not answer.whole:
        return True
    return stream and any(event != "[DONE]" and "error" in event for event in events_of(answer.body))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SAID: dict[str, dict[str, Any]] = {
    "a call": {
        "sim": {"reply": {"content": "Let me see.", "tool_calls": [{"name": "look", "arguments": {"at": 'é"'}}]}}
    },
    "two calls": {"sim": {"reply": {"tool_calls": [{"name": "look", "arguments": {"n": n}} for n in (1, 2)]}}},
    "reasoning": {"sim": {"reply": {"reasoning": "It is so.", "content": "So it is."}}},
    "a stop string": {"sim": {"reply": {"text": "one two three four"}}, "stop": ["three"]},
    "what looks like ours": {
        "sim": {"reply": {"text": ',"kv_transfer_params":{"a":1},"token_ids":[1] "finish_reason"'}}
    },
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_is_said(kind_of_pair: BeginKind, kind: str, what: str, stream: bool) -> None:
    r = await kind_of_pair(kind)
    body = chat(
        messages=[{"role": "user", "content": STORY}],
        max_tokens=60,
        temperature=0,
        stream=stream,
        tools=TOOLS,
        **SAID[what],
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    whole = await once(r.alone.port, request(body))
    answer = await r.ask(body)
    assert (answer.status, whole.status) == (200, 200), (answer.body, whole.body)
    assert answer.all("x-warmroute-prefill-worker")
    right = spoken(whole.body, stream)
    assert right["content"] or right["calls"]
    assert spoken(answer.body, stream) == right
    await r.nothing_left()


def spoken(body: bytes, stream: bool) -> dict[str, Any]:
    """Message, end and tokens of a chat's answer, however it came."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None, "usage": None}
    for part in [each for each in events_of(body) if each != "[DONE]"] if stream else [json.loads(body)]:
        usage = part.get("usage")
        if usage:
            said["usage"] = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in part["choices"]:
            told = choice["delta" if stream else "message"]
            said["content"] += told.get("content") or ""
            said["reasoning"] += told.get("reasoning") or told.get("reasoning_content") or ""
            said["finish"] = choice.get("finish_reason") or said["finish"]
            for at, call in enumerate(told.get("tool_calls") or []):
                made = said["calls"].setdefault(call.get("index", at), {"name": "", "arguments": ""})
                for key in made:
                    made[key] += call["function"].get(key) or ""
    return said
