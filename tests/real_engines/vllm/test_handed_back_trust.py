"""What a decode engine offers to hand back is believed by engines whoever says it: clients cannot, and what is over is not."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from gateway.config import Config
from tests.real_engines.vllm.engine import KEPT, MODEL
from tests.real_engines.vllm.hands_back import ANSWER, HandsBack, hands_back, returns, unspoilt
from tests.real_engines.vllm.pair import Pair, Talk, put, recovered
from tests.real_engines.vllm.talk import words

__all__ = ["hands_back"]
pytestmark = pytest.mark.engines


# -- what clients say of transfers themselves -------------------------------------------------------------------------


async def test_a_client_s_own_parameters_are_not_believed(hands_back: HandsBack) -> None:
    pd = await hands_back()
    stolen = await taken_from(pd, Talk(pd, "robbed", answer=ANSWER))
    for number, more in enumerate(
        ({}, {"do_remote_decode": False, "do_remote_prefill": True}, {"prompt_token_ids": [5] * 300})
    ):
        for fields in ({}, {"stream": True}, {"n": 2, "temperature": 0.7, "seed": 3}):
            talk = Talk(pd, f"thief {number} {fields}", start=180, answer=ANSWER, **fields)
            talk.say(40)
            body = talk.body(kv_transfer_params={**stolen, **more})
            if "n" not in fields:
                await pd.check(body, "robbed")
            else:
                assert (await pd.ask(body, talk.name)).status == 200
            body["temperature"] = 0
            body.pop("n", None)
            await unspoilt(pd, body)
    text = words(Random("thief"), 280)
    for path, asked in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/messages", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
    ):
        limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
        body = {"model": MODEL, "temperature": 0, limit: 12, "kv_transfer_params": stolen, **asked}
        answer = await pd.http.post(pd.url + path, json=body)
        assert answer.status_code == 200, answer.text
    chat = {"model": MODEL, "temperature": 0, "max_tokens": 12}
    await unspoilt(pd, {**chat, "messages": [{"role": "user", "content": text}]})


async def taken_from(pd: Pair, talk: Talk) -> dict[str, Any]:
    """What the decode engine offers, as somebody would see it who can ask the engines themselves."""
    talk.say(40)
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    prefilled = await put(pd.http, pd.p.url, talk.body(max_tokens=1, kv_transfer_params=first))
    decoded = await put(pd.http, pd.d.url, talk.body(kv_transfer_params=prefilled.told[0]["kv_transfer_params"]))
    told = decoded.told[0]["kv_transfer_params"]
    assert told["remote_block_ids"]
    return dict(told)


async def test_what_was_not_asked_for_is_not_shown(hands_back: HandsBack) -> None:
    pd = await hands_back()
    for stream in (True, False):
        for asked in (False, True):
            fields = {"return_token_ids": True} if asked else {}
            talk = Talk(pd, f"shown {stream} {asked}", answer=ANSWER, stream=stream, **fields)
            for _ in range(2):
                answer = await talk.turn(40)
            assert not any(event.get("kv_transfer_params") for event in answer.told)
            ids = [i for event in answer.told for choice in event["choices"] for i in choice.get("token_ids") or []]
            assert len(ids) == (ANSWER if asked else 0)
            assert any(event.get("prompt_token_ids") for event in answer.told) == asked
    assert (await returns(pd))["used"] == 2


@pytest.mark.parametrize("field", ["vllm_xargs", "extra_args", "sampling_params"])
async def test_parameters_cannot_be_smuggled_in(hands_back: HandsBack, field: str) -> None:
    pd = await hands_back()
    stolen = await taken_from(pd, Talk(pd, f"robbed by {field}", answer=ANSWER))
    inside = {"kv_transfer_params": stolen}
    for smuggled in (inside, {"extra_args": inside}, {"kv_transfer_params": [str(stolen)]}):
        talk = Talk(pd, f"smuggler {field}", start=180, answer=ANSWER)
        talk.say(40)
        body = talk.body()
        answer = await pd.ask({**body, field: smuggled}, talk.name)
        assert answer.status == 400 or answer.text == (await pd.right(body)).text
        await unspoilt(pd, body)
    ids = [list(range(300, 560))]
    for path in ("/inference/v1/generate", "/v1/chat/completions/render", "/v1/chat/completions/batch", "/v2/chat"):
        told = {
            "model": MODEL,
            "token_ids": ids[0],
            "kv_transfer_params": stolen,
            "sampling_params": {"extra_args": inside},
        }
        assert (await pd.http.post(pd.url + path, json=told)).status_code == 404, path


# -- what is not there any more ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_an_offer_that_is_over(hands_back: HandsBack, on_failure: str) -> None:
    # The gateway is told to believe in it for longer than it is kept. With "recompute" vLLM 0.32 never answers then.
    def impatient(config: Config) -> None:
        config.timeouts.first_byte = 4.0

    pd = await hands_back(on_failure=on_failure, keep=60.0, more=impatient)
    talks = [Talk(pd, f"late {on_failure} {number}", answer=ANSWER) for number in range(2)]
    for talk in talks:
        await talk.turn(40)
    await pd.idle(KEPT + 10)
    other = Talk(pd, f"meanwhile {on_failure}", start=1500, answer=ANSWER)
    await other.turn(500)
    for talk in talks:
        answer = await talk.turn(40)
        print(f"{answer.cached} of {answer.prompt} after {answer.lasted:.2f} s", await returns(pd), await pd.blamed())
        assert answer.lasted < 6
    await unspoilt(pd, *talks[0].asked, *talks[1].asked, *other.asked)


async def test_a_decode_engine_that_started_again(hands_back: HandsBack) -> None:
    pd = await hands_back()
    talk = Talk(pd, "again", answer=ANSWER)
    for _ in range(2):
        await talk.turn(40)
    used = (await returns(pd))["used"]
    pd.d.kill()
    # Other blocks are at those places now.
    await asyncio.to_thread(pd.d.start, pd.d.flags)
    await recovered(pd, pd.d)
    for number in range(3):
        await Talk(pd, f"others {number}", answer=ANSWER).turn(40)
    await talk.turn(40)
    assert (await returns(pd))["used"] == used
    await talk.turn(40)
    assert (await returns(pd))["used"] == used + 1
    await unspoilt(pd, *talk.asked)


async def test_nothing_is_kept_for_long(hands_back: HandsBack) -> None:
    pd = await hands_back()
    for number in range(4):
        await Talk(pd, f"kept {number}", answer=ANSWER).turn(40)
    assert (await asyncio.to_thread(pd.d.metrics))["vllm:kv_cache_usage_perc"] > 0
    await pd.idle(KEPT + 10)
