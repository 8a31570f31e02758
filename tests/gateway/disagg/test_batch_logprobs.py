"""Prompt logprobs of streams of several answers, and what is not touched where nobody wants them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config import WorkerConfig
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.disagg.rig import StartRig
from tests.gateway.disagg.test_prompt_logprobs import NATIVE, ODD, PATH, TEXT, asked, same
from tests.gateway.scripted import ok
from tests.gateway.talk import once, request


@pytest.mark.parametrize("n", [1, 2])
async def test_a_batch_that_is_streamed(rig: StartRig, n: int) -> None:
    r = await rig(dialect="sglang")
    texts = [f"{number} {TEXT[: 90 * number]}" for number in range(1, 4)]
    await same(r, asked(texts, True, n, return_logprob=True, logprob_start_len=0))


async def test_several_answers_streamed(rig: StartRig) -> None:
    r = await rig(dialect="sglang")
    await same(r, asked(TEXT, True, 2, return_logprob=True, logprob_start_len=0))


async def test_a_list_of_what_each_wants(rig: StartRig) -> None:
    r = await rig(dialect="sglang")
    await same(r, asked(["a " + TEXT, TEXT], return_logprob=[True, True], logprob_start_len=[0, 0]))


@pytest.mark.parametrize("declined", [False, None, [False, False]])
async def test_bytes_where_they_are_declined(gateway: Begin, scripted: StartScripted, declined: Any) -> None:
    p, d = await scripted(ok(NATIVE)), await scripted(ok(ODD))
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="sglang", bootstrap="127.0.0.1:8998"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="sglang"),
    )
    answer = await once(running.port, request(asked("a", return_logprob=declined), path=PATH))
    assert json.loads(answer.body) == json.loads(ODD)
    assert answer.body == ODD
