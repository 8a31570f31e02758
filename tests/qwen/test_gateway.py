"""The session of four requests through the whole gateway: simulated engines with the real tokenizer and template."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import Config, ModelConfig, WorkerConfig
from gateway.templates import Template
from kv_index.index import Rung
from tests.gateway.conftest import Begin, StartEngine, engine as engine, gateway as gateway
from tests.gateway.talk import Raw, request, until
from tests.gateway.test_admin import call
from tests.qwen import Files
from tests.qwen.session import MODEL, REQUESTS, body, generated

# The simulated engine ends what it says with a mark of its own. Of the last token that is sampled nothing is computed, so that
# it is the mark, and all that the template shows again is there.
PLAIN = [(506, 0), (773, 580), (898, 880), (824, 504)]
ENDS = [(506, 0), (773, 580), (898, 880), (824, 0)]
BLOCKS = [(506, 0), (773, 576), (898, 864), (824, 480)]
BOUNDARY = [(506, 0), (773, 448), (898, 768), (824, 448)]

CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int]], Rung]] = {
    "vllm, by events": ({"dialect": "vllm", "block_size": 32, "events": True}, BLOCKS, Rung.EXACT),
    "vllm": ({"dialect": "vllm", "block_size": 32}, BLOCKS, Rung.PREDICTED),
    "vllm hybrid, by events": (
        {"dialect": "vllm", "block_size": 64, "hybrid": "boundary", "events": True},
        BOUNDARY,
        Rung.EXACT,
    ),
    "vllm hybrid": ({"dialect": "vllm", "block_size": 64, "hybrid": "boundary"}, BOUNDARY, Rung.PREDICTED),
    "token by token, by events": ({"dialect": "vllm", "block_size": 1, "events": True}, PLAIN, Rung.EXACT),
    "token by token": ({"dialect": "vllm", "block_size": 1}, PLAIN, Rung.PREDICTED),
    "llamacpp": ({"dialect": "llamacpp"}, PLAIN, Rung.PREDICTED),
    "hybrid, ends": ({"dialect": "vllm", "block_size": 1, "hybrid": "ends"}, ENDS, Rung.PREDICTED),
}


@pytest.mark.parametrize("case", CASES)
async def test_engine_and_gateway_tell_the_session_s_figures(
    gateway: Begin, engine: StartEngine, qwen: Files, case: str
) -> None:
    options, figures, rung = CASES[case]
    one = await engine(models=[MODEL], tokenizer=qwen.tokenizer, template=qwen.template, time_scale=0, **options)
    hybrid = options.get("hybrid")

    def configure(config: Config) -> None:
        config.models[MODEL] = ModelConfig(tokenizer=qwen.tokenizer, template=qwen.template)
        if hybrid is not None and rung is Rung.PREDICTED:
            config.models[MODEL].reuse, config.models[MODEL].checkpoints = "checkpoints", hybrid

    running = await gateway(one, policy="cache_aware", change=configure)
    (target,) = running.fleet.targets.values()
    await until(lambda: running.index.of(target.id).rung is rung)
    template = Template.load(qwen.template)
    told, believed = [], []
    async with await Raw.connect(running.port) as client:
        for number in REQUESTS:
            text = generated(template, number) if number < len(REQUESTS) else "明天。"
            said = body(number, max_tokens=200, sim={"reply": {"text": text}})
            answer = await client.ask(request(said, "X-Session-Id: one"))
            usage = answer.json()["usage"]
            told.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            believed.append(int(answer.one("x-warmroute-predicted-cached-tokens")))
    assert told == figures
    assert list(zip([prompt for prompt, _ in told], believed, strict=True)) == figures
    assert not running.metrics.token_fallbacks.values


PROMPTS_ONLY = [(506, 0), (773, 506), (898, 773), (824, 504)]
"""What a prefill engine finds: the prompts before, and of the 580 tokens that could be had, 506."""
HANDED_BACK = [(506, 0), (773, 580), (898, 880), (824, 504)]
"""The same with the answers before, where the decode engine hands them back; the last shows no thinking any more."""
DECODE = [0, 580, 880, 504]


@pytest.mark.parametrize("back", [False, True])
async def test_a_prefill_engine_holds_prompts_and_a_decode_engine_answers_too(
    gateway: Begin, engine: StartEngine, qwen: Files, back: bool
) -> None:
    options = {"models": [MODEL], "tokenizer": qwen.tokenizer, "template": qwen.template, "time_scale": 0}
    first = await engine(role="prefill", block_size=1, bidirectional=back, **options)
    second = await engine(role="decode", block_size=1, bidirectional=back, **options)

    def configure(config: Config) -> None:
        config.models[MODEL] = ModelConfig(tokenizer=qwen.tokenizer, template=qwen.template)
        config.policies["sides"] = {"name": "disaggregated", "prefill": "prefix_hash"}
        config.disaggregation.bidirectional = back

    workers = WorkerConfig(first.url, role="prefill"), WorkerConfig(second.url, role="decode")
    running = await gateway(*workers, policy="sides", change=configure)
    template = Template.load(qwen.template)
    told, believed, held = [], [], []
    async with await Raw.connect(running.port) as client:
        for number in REQUESTS:
            text = generated(template, number) if number < len(REQUESTS) else "明天。"
            said = body(number, max_tokens=200, sim={"reply": {"text": text}})
            status, asked = await call(running, "POST", "/route", said, {"x-session-id": "one"})
            assert status == 200, asked
            (row,) = asked["candidates"]
            held.append(sum(row["holding_tokens"].values()))
            answer = await client.ask(request(said, "X-Session-Id: one"))
            usage = answer.json()["usage"]
            told.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
            believed.append(int(answer.one("x-warmroute-predicted-cached-tokens")))
    figures = HANDED_BACK if back else PROMPTS_ONLY
    assert held == DECODE
    assert list(zip([prompt for prompt, _ in told], believed, strict=True)) == figures
    assert told == figures
    assert second.stats()["computed_tokens"] == 0
