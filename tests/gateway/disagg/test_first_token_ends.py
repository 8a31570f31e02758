"""KV is handed over of answers that their length ended: what the client wants its answer to end with is no matter there."""

from __future__ import annotations

import json

import pytest

from tests.gateway.disagg.kinds import KINDS, BeginKind, kind_of_pair
from tests.gateway.disagg.rig import StartRig, name, story, text_of
from tests.gateway.talk import once, request

__all__ = ["kind_of_pair"]
STREAMS = [False, True]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_first_word_is_a_stop_string(kind_of_pair: BeginKind, kind: str, stream: bool) -> None:
    r = await kind_of_pair(kind)
    said = text_of(await once(r.alone.port, request(story("x"))), False)
    body = story("x", stream=stream, stop=[said.split()[0]])
    assert await r.right(body) == ""
    answer = await r.check(body)
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    sent = json.loads(r.d.core.recorder.last_body)
    assert sent["stop"] == body["stop"]
    assert "ignore_eos" not in sent
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
async def test_of_nixl_too(rig: StartRig, stream: bool) -> None:
    r = await rig()
    said = text_of(await once(r.alone.port, request(story("x"))), False)
    await r.check(story("x", stream=stream, stop=[said.split()[0]]))
    assert r.d.stats()["computed_tokens"] == 0
    await r.nothing_left()
