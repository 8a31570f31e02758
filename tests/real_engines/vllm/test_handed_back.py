"""A vLLM decode engine hands its KV back to the prefill engine for the session's next turn: for that very prompt, and no other.

Neither engine compares what it is offered with the prompt. A wrong answer, and a prefix cache that stays wrong for everybody,
is what comes of one mistake here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from tests.real_engines.vllm.engine import BLOCK
from tests.real_engines.vllm.hands_back import ANSWER, HandsBack, hands_back, returns, unspoilt, whole
from tests.real_engines.vllm.pair import Talk
from tests.real_engines.vllm.talk import TOOLS, Figures, words

__all__ = ["hands_back"]
pytestmark = pytest.mark.engines


async def test_the_answer_is_found_at_the_next_turn(hands_back: HandsBack, figures: Figures) -> None:
    shares = {}
    for both in (False, True):
        pd = await hands_back(bidirectional=both)
        talk = Talk(pd, f"back {both}", answer=ANSWER)
        answers = [await talk.turn(40) for _ in range(5)]
        for before, answer in pairwise(answers):
            assert answer.cached == (whole(before) if both else before.prompt // BLOCK * BLOCK)
            assert answer.headers["x-warmroute-predicted-cached-tokens"] == str(answer.cached)
        shares[both] = sum(a.cached for a in answers) / sum(a.prompt for a in answers)
        assert await returns(pd) == ({"offered": 5, "used": 4} if both else {})
        await unspoilt(pd, *talk.asked)
    figures.pairs["found by the prefill engine, handed back"] = f"{shares[True]:.1%}, otherwise {shares[False]:.1%}"


async def test_streams_are_answered_right_though_they_offer_nothing(hands_back: HandsBack) -> None:
    pd = await hands_back()
    talk = Talk(pd, "streamed", answer=ANSWER, stream=True)
    answers = [await talk.turn(40) for _ in range(5)]
    for before, answer in pairwise(answers):
        assert answer.cached == before.prompt // BLOCK * BLOCK
    # vLLM 0.32 ends a stream without its parameters.
    assert not await returns(pd)
    await unspoilt(pd, *talk.asked)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_whatever_is_cheapest_is_right(hands_back: HandsBack, stream: bool) -> None:
    pd = await hands_back("cache_aware")
    talks = [Talk(pd, f"priced {number} {stream}", answer=400, stream=stream) for number in range(3)]
    for _ in range(5):
        await asyncio.gather(*[talk.turn(60) for talk in talks])
    print(await pd.by("warmroute_pd_decisions_total", "kind"), await returns(pd))
    for talk in talks:
        await unspoilt(pd, *talk.asked)


async def test_thinking_that_the_template_drops(hands_back: HandsBack) -> None:
    pd = await hands_back()
    talk = Talk(pd, "think", answer=ANSWER)
    roles = ("user", "tool", "tool", "user", "tool", "user")
    used, before = 0, None
    for role in roles:
        answer = await talk.turn(40, role, "reasoning_content")
        now = (await returns(pd))["used"]
        if before is not None and role == "tool":
            assert (now, answer.cached) == (used + 1, whole(before))
        else:
            # What was thought is gone from the prompt, and the answer's place with it.
            assert now == used
            assert before is None or answer.cached < before.prompt
        used, before = now, answer
    assert used == 3
    await unspoilt(pd, *talk.asked)


def answer_edited(talk: Talk) -> dict[str, Any]:
    first, _, rest = talk.messages[-2]["content"].partition(" ")
    talk.messages[-2] = {"role": "assistant", "content": f"{first} not {rest.partition(' ')[2]}"}
    return {}


def last_word_edited(talk: Talk) -> dict[str, Any]:
    rest = talk.messages[-2]["content"].rpartition(" ")[0]
    talk.messages[-2] = {"role": "assistant", "content": f"{rest} not"}
    return {}


def start_edited(talk: Talk) -> dict[str, Any]:
    talk.messages[0] = {"role": "system", "content": "not " + talk.messages[0]["content"].partition(" ")[2]}
    return {}


def turn_left_out(talk: Talk) -> dict[str, Any]:
    del talk.messages[1:3]
    return {}


def all_new(talk: Talk) -> dict[str, Any]:
    random = Random("new")
    for message in talk.messages:
        message["content"] = words(random, len(message["content"].split()))
    return {}


def tool_changed(talk: Talk) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "description": "another"}}]}


def thought_left_out(talk: Talk) -> dict[str, Any]:
    talk.messages[-2] = {"role": "assistant", "content": "", "reasoning_content": talk.messages[-2]["content"]}
    return {}


def answer_gone_on_with(talk: Talk) -> dict[str, Any]:
    talk.messages.pop()
    return {"continue_final_message": True, "add_generation_prompt": False}


def asked_again(talk: Talk) -> dict[str, Any]:
    del talk.messages[-2:]
    return {}


def salted(talk: Talk) -> dict[str, Any]:
    return {"cache_salt": "another"}


def nothing(talk: Talk) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("edit", "used"),
    [
        (answer_edited, 0),
        (last_word_edited, None),
        (start_edited, 0),
        (turn_left_out, 0),
        (all_new, 0),
        (tool_changed, 0),
        (thought_left_out, 0),
        (answer_gone_on_with, None),
        (asked_again, 0),
        (salted, None),
        (nothing, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_prompt_that_does_not_go_on_from_what_is_offered(
    hands_back: HandsBack, edit: Callable[[Talk], dict[str, Any]], used: int | None
) -> None:
    pd = await hands_back()
    talk = Talk(pd, f"edit {edit.__name__}", answer=ANSWER, tools=TOOLS[:1], tool_choice="none")
    for _ in range(2):
        await talk.turn(40)
    before = (await returns(pd))["used"]
    talk.say(40)
    answer = await talk.ask(**edit(talk))
    taken = (await returns(pd))["used"] - before
    print(f"taken {taken}, {answer.cached} of {answer.prompt} tokens")
    assert used in (None, taken)
    talk.messages.append({"role": "assistant", "content": answer.text})
    await talk.turn(40)
    await unspoilt(pd, *talk.asked)


async def test_what_is_offered_is_taken_once(hands_back: HandsBack) -> None:
    pd = await hands_back()
    talk = Talk(pd, "once", answer=ANSWER)
    await talk.turn(40)
    bodies = []
    for _ in range(3):
        talk.say(40)
        bodies.append(talk.body())
        talk.messages.pop()
    await asyncio.gather(*[pd.check(body, talk.name) for body in bodies])
    assert (await returns(pd))["used"] <= 1
    await unspoilt(pd, *bodies)


async def test_sessions_that_take_each_other_s_name(hands_back: HandsBack) -> None:
    pd = await hands_back()
    random = Random(5)
    talks = [Talk(pd, f"name {number}", answer=ANSWER, stream=bool(number % 2)) for number in range(5)]
    names = [talk.name for talk in talks]
    bodies: list[dict[str, Any]] = []

    async def say(talk: Talk) -> None:
        if random.random() < 0.3:
            talk.name = random.choice(names)
        if random.random() < 0.2:
            random.choice([turn_left_out, start_edited, answer_edited])(talk)
        await talk.turn(random.choice([3, 40, 70]))

    for talk in talks:
        await talk.turn(40)
    for _ in range(12):
        await asyncio.gather(*[say(talk) for talk in random.sample(talks, 3)])
    for talk in talks:
        bodies += talk.asked
    print(len(bodies), "requests", await returns(pd))
    assert (await returns(pd))["used"] > 5
    await unspoilt(pd, *bodies)
