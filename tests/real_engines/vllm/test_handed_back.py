"""A vLLM decode engine hands its KV back to the prefill engine for the session's next turn: for that very prompt, and no other.

Neither engine compares what it is offered with the prompt. A wrong answer, and a prefix cache that stays wrong for everybody,
is what comes of one mistake here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config import Config, ModelConfig
from tests.real_engines.vllm.conftest import StartPair
from tests.real_engines.vllm.engine import BLOCK, KEPT, MODEL, VLLM
from tests.real_engines.vllm.hands_back import POINTS, HandsBack as TakesAll
from tests.real_engines.vllm.pair import Answer, Pair, Talk, put, recovered
from tests.real_engines.vllm.talk import TOOLS, Figures, words

pytestmark = pytest.mark.engines

ANSWER = 100
"""Tokens. With fewer new ones than 64 an engine computes them rather than take them back."""
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endfor %}
{%- set seen = namespace(users=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set seen.users = seen.users + 1 %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and seen.users >= ns.last %}
        {{- message.reasoning or message.reasoning_content or '' }}
    {%- endif %}
    {{- (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()
"""Like Qwen's: what was thought before the last question is dropped."""

HandsBack = Callable[..., Awaitable[Pair]]


@pytest.fixture
def hands_back(pair: StartPair, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandsBack:
    """Such a pair: every request is split, and every offer is taken."""
    template = model / "thinking.jinja"
    template.write_text(TEMPLATE)
    installed = tmp_path / "hands_back-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: hands-back\nVersion: 1\n")
    (installed / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))

    async def begin(
        policy: str = TakesAll.name,
        on_failure: str = "fail",
        through: tuple[str | None, str | None] = (None, None),
        more: Callable[[Config], None] = lambda config: None,
        **told: Any,
    ) -> Pair:
        def change(config: Config) -> None:
            more(config)
            config.models[MODEL] = ModelConfig(tokenizer=str(model / "tokenizer.json"), template=str(template))

        def flags(engine: VLLM) -> tuple[str, ...]:
            return engine.paired("--chat-template", str(template), bidirectional=True, on_failure=on_failure)

        told = {"bidirectional": True, "keep": KEPT - 6.0, **told}
        return await pair(policy, flags=flags, through=through, change=change, **told)

    return begin


async def returns(pd: Pair) -> Counter[str]:
    """What became of what was offered."""
    return await pd.by("warmroute_pd_returns_total", "outcome")


async def unspoilt(pd: Pair, *bodies: dict[str, Any]) -> None:
    """The prefill engine's own cache has what is right, as whoever asks it next would find."""
    for body in bodies:
        plain = {name: value for name, value in body.items() if name not in ("stream", "kv_transfer_params")}
        found = await put(pd.http, pd.p.url, plain)
        assert found.text == (await pd.right(body)).text


def whole(before: Answer) -> int:
    """Tokens that a decode engine has computed for an answer: all but the last that it sampled."""
    assert before.usage is not None
    return int(before.usage["total_tokens"]) - 1


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
