"""Engines that die while KV is to be handed back, and what clients must not see of it."""

from __future__ import annotations

import asyncio

import pytest

from tests.real_engines.vllm.hands_back import ANSWER, HandsBack, hands_back, returns, unspoilt
from tests.real_engines.vllm.pair import Gate, Talk, recovered

__all__ = ["hands_back"]
pytestmark = pytest.mark.engines


@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_a_decode_engine_that_dies_before_it_hands_back(hands_back: HandsBack, on_failure: str) -> None:
    first = await hands_back(on_failure=on_failure)
    await first.running.stop()
    async with Gate(first.p.port, b'"remote_request_id"') as gate:
        pd = await hands_back(on_failure=on_failure, through=(gate.url, None))
        talk = Talk(pd, f"dies {on_failure}", answer=ANSWER)
        for _ in range(2):
            await talk.turn(40)
        assert (await returns(pd))["used"] == 1
        gate.then = pd.d.kill
        talk.say(40)
        answer = await pd.ask(talk.body(), talk.name)
        assert gate.then is None
        print(f"{answer.status} after {answer.lasted:.2f} s: {answer.error or answer.text[:40]!r}", await pd.blamed())
        assert answer.lasted < 10
        assert (answer.status, answer.error, answer.text) == (200, None, (await pd.right(talk.body())).text)
        await unspoilt(pd, *talk.asked)
        await asyncio.to_thread(pd.d.start, pd.d.flags)
        await recovered(pd, pd.d)
        talk.messages.append({"role": "assistant", "content": answer.text})
        for _ in range(2):
            await talk.turn(40)
        await unspoilt(pd, *talk.asked)


async def test_token_ids_that_were_refused_are_not_shown(hands_back: HandsBack) -> None:
    pd = await hands_back()
    talk = Talk(pd, "refused", answer=5, return_token_ids=False)
    answer = await talk.turn(4)
    assert not answer.told[0].get("prompt_token_ids")
    assert not answer.told[0]["choices"][0].get("token_ids")


async def test_what_engines_offer_is_hidden_from_clients_of_a_gateway_that_takes_nothing_back(
    hands_back: HandsBack,
) -> None:
    pd = await hands_back(bidirectional=False)
    answer = await Talk(pd, "hidden", answer=5).turn(4)
    assert not answer.told[0].get("kv_transfer_params")
