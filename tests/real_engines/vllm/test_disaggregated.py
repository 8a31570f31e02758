"""A vLLM prefill engine and a vLLM decode engine say through the gateway what one vLLM engine says alone."""

from __future__ import annotations

import asyncio
import json
import statistics
from typing import Any

import pytest

from tests.real_engines.vllm.chats import answered, call
from tests.real_engines.vllm.conftest import StartPair
from tests.real_engines.vllm.engine import BLOCK, LEASE, MODEL
from tests.real_engines.vllm.pair import COMPLETIONS, COMPUTED, PULLED, Answer, Count, Talk, put
from tests.real_engines.vllm.talk import CHAT, TOOLS, Figures, events, finish, said

pytestmark = pytest.mark.engines

TURNS = 5
LONG = 3500
TEXT = "read the file and write the next one " * 30


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_sessions_through_a_pair(pair: StartPair, figures: Figures, stream: bool) -> None:
    pd = await pair()
    talks = [Talk(pd, f"pair {stream} {number}", stream=stream) for number in range(3)]
    answers: list[Answer] = []
    for talk in talks:
        for _ in range(TURNS):
            # What is right is asked of the prefill engine after each turn: only the decode engine's count is of the pair alone.
            async with Count(pd.d) as counted:
                answers.append(await talk.turn())
            (came,) = counted.came
            assert came[COMPUTED] == 0
            assert came[PULLED] > 0
            assert sum(came.values()) == answers[-1].prompt
    for number, answer in enumerate(answers):
        # The prefill engine holds the last turn's prompt, not its answer.
        assert answer.cached == (answers[number - 1].prompt // BLOCK * BLOCK if number % TURNS else 0)
    counted_once = {
        "warmroute_prompt_tokens_total": sum(answer.prompt for answer in answers),
        "warmroute_cached_tokens_total": sum(answer.cached for answer in answers),
        "warmroute_completion_tokens_total": sum((answer.usage or {})["completion_tokens"] for answer in answers),
    }
    for name, expected in counted_once.items():
        assert sum((await pd.by(name, "model")).values()) == expected, name
    assert await pd.by("warmroute_pd_decisions_total", "kind") == {"pair": len(answers)}
    assert await pd.by("warmroute_requests_total", "outcome") == {"ok": len(answers)}
    assert not await pd.blamed()
    if stream:
        prompt, cached = (sum(getattr(answer, name) for answer in answers) for name in ("prompt", "cached"))
        figures.pairs["found by the prefill engine, one way"] = f"{cached / prompt:.1%} of {prompt} prompt tokens"


async def test_how_soon_answers_begin(pair: StartPair, figures: Figures) -> None:
    pd = await pair()
    first: dict[str, list[float]] = {"through a pair": [], "from one engine, asked directly": []}
    for number in range(8):
        for name, seconds in first.items():
            body = said(f"{name} {number} " + TEXT * 10, max_tokens=8, stream=True)
            answer = await (pd.ask(body) if name == "through a pair" else put(pd.http, pd.p.url, body))
            assert (answer.status, answer.error) == (200, None)
            seconds.append(answer.seconds)
    for name, seconds in first.items():
        told = f"{1000 * statistics.median(seconds):.0f} ms (prompt of {answer.prompt} tokens, nothing cached)"
        figures.pairs[f"time to first word {name}, p50"] = told


LOGPROBS = {"logprobs": True, "top_logprobs": 3}
TOOL = {"tools": TOOLS, "tool_choice": "auto"}
_SHORT = {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"], "additionalProperties": False}
SHAPED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "letter", "schema": _SHORT}},
    "ignore_eos": False,
    "max_tokens": 100,
}
CALLED = {"messages": [*answered(call("read", '{"path": "a b"}')), {"role": "user", "content": TEXT}], "tools": TOOLS}


def sampled(answer: Answer) -> list[Any]:
    """Tokens and how likely they were, as the answer or its events tell."""
    found: list[Any] = []
    for event in answer.told:
        for choice in event["choices"]:
            told = choice.get("logprobs") or {}
            found += [(each["token"], each["logprob"]) for each in told.get("content") or []]
            found += list(zip(told.get("tokens") or [], told.get("token_logprobs") or [], strict=True))
    return found


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {**LOGPROBS}),
        (CHAT, {**TOOL}),
        (CHAT, {**CALLED}),
        (CHAT, {**SHAPED}),
        (CHAT, {"cache_salt": "mine"}),
        (CHAT, {"max_completion_tokens": 30, "min_tokens": 10}),
        (CHAT, {"stop": [" file"]}),
        (CHAT, {"max_tokens": 1}),
        (CHAT, {"temperature": 1.0, "seed": 7}),
        (COMPLETIONS, {"logprobs": 2}),
        (COMPLETIONS, {"prompt": list(range(300, 700))}),
        (COMPLETIONS, {"prompt": [TEXT]}),
    ],
    ids=[
        "logprobs",
        "tools",
        "a call",
        "a shape",
        "salt",
        "lengths",
        "stop",
        "one token",
        "seed",
        "text",
        "ids",
        "list",
    ],
)
async def test_what_is_asked_is_answered_the_same(
    pair: StartPair, path: str, fields: dict[str, Any], stream: bool
) -> None:
    pd = await pair()
    plain: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": 24, "stream": stream}
    asked = {"messages": [{"role": "user", "content": TEXT}]} if path == CHAT else {"prompt": TEXT}
    body = {**plain, **asked, **fields}
    answer = await pd.check(body, path=path)
    right = await pd.right(body, path)
    assert await pd.by("warmroute_pd_decisions_total", "kind") == {"pair": 1}
    for got, wanted in zip(sampled(answer), sampled(right), strict=True):
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], abs=1e-3)
    if "logprobs" in fields:
        assert len(sampled(answer)) == 24
    assert finish(answer.told) == finish(right.told)
    if "response_format" in fields:
        assert json.loads(answer.text)["n"] in ("a", "b")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2, "temperature": 1.0, "messages": [{"role": "user", "content": TEXT}]}),
        (COMPLETIONS, {"prompt": [TEXT, "and another"]}),
        (COMPLETIONS, {"prompt": TEXT, "echo": True}),
        (COMPLETIONS, {"prompt": TEXT, "prompt_logprobs": 1}),
        ("/v1/responses", {"input": TEXT}),
    ],
    ids=["two answers", "two prompts", "echo", "the prompt's logprobs", "responses"],
)
async def test_what_cannot_be_split_is_answered_by_one(pair: StartPair, path: str, fields: dict[str, Any]) -> None:
    pd = await pair()
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": MODEL, "temperature": 0, limit: 8, **fields}
    async with Count(pd.p, pd.d) as counted:
        answer = await pd.http.post(pd.url + path, json=body)
    assert answer.status_code == 200, answer.text
    first, second = counted.came
    assert not any(first.values())
    assert second[PULLED] == 0
    assert second[COMPUTED] > 0


async def test_anthropic_s_messages(pair: StartPair) -> None:
    pd = await pair()
    for number in range(2):
        body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        body["messages"] = [{"role": "user", "content": f"{number} {TEXT}"}]
        async with Count(pd.d) as counted:
            answer = await pd.http.post(pd.url + "/v1/messages", json={**body, "stream": bool(number)})
        assert answer.status_code == 200, answer.text
        alone = await pd.http.post(pd.p.url + "/v1/messages", json=body)
        (text,) = [part["text"] for part in alone.json()["content"]]
        assert text
        if number:
            pieces = [event["delta"].get("text", "") for event in events(answer.content) if "delta" in event]
            assert "".join(pieces) == text
        else:
            assert answer.json()["content"] == alone.json()["content"]
        print(counted.came, await pd.by("warmroute_pd_decisions_total", "kind"))


# -- by price ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_whatever_is_cheapest_is_right(pair: StartPair, figures: Figures, stream: bool) -> None:
    pd = await pair("cache_aware")
    talks = [Talk(pd, f"price {stream} {number}", stream=stream) for number in range(4)]
    for turn in range(TURNS):
        # Short texts and long ones, alone and together.
        for talk in talks:
            talk.say(20 if turn % 2 else 500)
        told = await pd.explained(talks[0].body(), talks[0].name)
        ways = {(row["target"], row["prefill"]) for row in told["candidates"]}
        assert ways >= {(pd.name(pd.d), pd.name(pd.p)), (pd.name(pd.d), None)}
        assert all(row["total_ms"] > 0 for row in told["candidates"])
        chosen = told["candidates"][0]
        if chosen["prefill"] is None:
            assert told["pair"] is None
        else:
            assert told["pair"] == {"prefill": chosen["prefill"], "decode": chosen["target"], "kv_from": None}
        for talk in talks:
            await pd.right(talk.body())
        for talk, answer in zip(
            talks, await asyncio.gather(*[pd.check(talk.body(), talk.name) for talk in talks]), strict=True
        ):
            talk.messages.append({"role": "assistant", "content": answer.text})
    kinds = await pd.by("warmroute_pd_decisions_total", "kind")
    print(kinds, await pd.rows("warmroute_pd_decisions_total"))
    assert sum(kinds.values()) == len(talks) * TURNS
    assert not await pd.blamed()
    figures.pairs[f"by price, {'streams' if stream else 'whole answers'}"] = ", ".join(
        f"{kind} {n}" for kind, n in kinds.items()
    )


# -- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_a_client_that_leaves(pair: StartPair, where: str, stream: bool) -> None:
    pd = await pair()
    engine = pd.p if where == "prefill" else pd.d
    text = TEXT * (13 if where == "prefill" else 1)
    tasks = [
        asyncio.create_task(
            pd.ask(
                said(
                    f"leave {number} {where} {stream} {text}",
                    max_tokens=100 if where == "prefill" else LONG,
                    stream=stream,
                )
            )
        )
        for number in range(4)
    ]
    async with asyncio.timeout(20):
        while not (await asyncio.to_thread(engine.metrics))["vllm:num_requests_running"]:
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    left = asyncio.get_running_loop().time()
    await pd.running_nothing(5)
    await pd.idle(LEASE + 8)
    print(f"nothing is kept after {asyncio.get_running_loop().time() - left:.1f} s")
    expired = pd.p.metrics()["vllm:nixl_num_kv_expired_reqs_total"]
    print("expired", expired)
    gone = await pd.by("warmroute_client_aborts_total", "phase")
    assert sum(gone.values()) == len(tasks)
    assert not await pd.blamed()
    await pd.check(said(f"after {where} {stream} {TEXT}", max_tokens=8))
