"""What is asked of engines for handing KV back is not the client's to ask for, nor to see."""

from __future__ import annotations

import json

import pytest

from tests.gateway.disagg.rig import StartRig, events_of
from tests.gateway.disagg.test_bidirectional import Talk, begin, fetched, over, returns
from tests.gateway.test_token_mode import Language, language

__all__ = ["language"]


@pytest.mark.parametrize("stream", [True, False])
async def test_five_turns_of_a_client_that_asks_for_no_ids(rig: StartRig, language: Language, stream: bool) -> None:
    r = await begin(rig, language)
    talk = Talk(r, stream)
    for _ in range(5):
        await talk.turn()
    assert (await returns(r))["offered"] == 5
    assert fetched(r) == (await returns(r))["used"] == 4
    await over(r)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_client_is_told_no_ids_it_did_not_ask_for(rig: StartRig, language: Language, stream: bool) -> None:
    r = await begin(rig, language)
    answer = await Talk(r, stream).turn()
    for told in events_of(answer.body)[:-1] if stream else [answer.json()]:
        assert not told.get("prompt_token_ids")
        assert not any(choice.get("token_ids") for choice in told["choices"])
        assert str(r.d.side_port) not in json.dumps(told), "where engines reach each other"
    await over(r)
