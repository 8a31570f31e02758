"""Decode engines hand the KV of a session's last turn back: for the very prompt that goes on from it, once, and never else."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ModelConfig
from tests.gateway.disagg.rig import Rig, StartRig, events_of, text_of
from tests.gateway.talk import Response, until
from tests.gateway.test_token_mode import TOOLS, Language, language

__all__ = ["language"]
STORY = "The quick brown fox jumps over the lazy dog, and it's 3.14 metres away. " * 6
STRIPS = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 < messages|length - 1 %}{{- 'older' }}
    {%- else %}{{- message.content }}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def told(language: Language | None, bidirectional: bool = True, keep: float = 450.0) -> Any:
    def change(config: Config) -> None:
        config.disaggregation.bidirectional = bidirectional
        config.disaggregation.keep = keep
        config.probes.load = 600.0
        if language is not None:
            config.models["sim"] = ModelConfig(tokenizer=language.tokenizer, template=language.template)

    return change


class Talk:
    """One session, turn by turn."""

    def __init__(self, r: Rig, stream: bool = False, session: str = "s") -> None:
        self.r = r
        self.stream = stream
        self.session = session
        self.messages: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    async def turn(self, said: str = "And then?") -> Response:
        self.messages.append({"role": "user", "content": f"{len(self.messages)} {said} {STORY}"})
        body = {
            "model": "sim",
            "messages": self.messages,
            "max_tokens": 300,
            "ignore_eos": True,
            "temperature": 0,
            "stream": self.stream,
            **({"stream_options": {"include_usage": True}} if self.stream else {}),
            **self.more,
        }
        answer = await self.r.check(body, f"X-Session-Id: {self.session}")
        self.messages.append({"role": "assistant", "content": text_of(answer, self.stream)})
        await until(lambda: not self.r.running.gateway.exchanges)
        return answer


async def begin(rig: StartRig, language: Language, **more: Any) -> Rig:
    """The decode engine is known to be busy with others' requests, so that prompts are computed by the other."""
    files = {"tokenizer": language.tokenizer, "template": language.template}
    change = more.pop("change", None) or told(language)
    options = {"bidirectional": True, "blocks_ttl": 2.0, **files, **more}
    r = await rig(1, 1, policy="cache_aware", change=change, **options)
    target = r.target(r.d)
    target.foreign = target.busy = 40
    return r


async def over(r: Rig) -> None:
    target = r.target(r.d)
    target.foreign = 0
    target.recount()
    await r.nothing_left()


async def returns(r: Rig) -> Counter[str]:
    return Counter({row["outcome"]: int(v) for row, v in await r.samples("warmroute_pd_returns_total")})


def fetched(r: Rig) -> int:
    """How often the prefill engine took something back."""
    return int(r.p.stats()["disaggregation"]["transfers_in"]["count"])


def usage_of(answer: Response, stream: bool) -> dict[str, Any]:
    if stream:
        return dict([event for event in events_of(answer.body) if event != "[DONE]"][-1]["usage"])
    return dict(answer.json()["usage"])


def cached(answer: Response, stream: bool) -> int:
    return int(usage_of(answer, stream)["prompt_tokens_details"]["cached_tokens"])


def tokens(answer: Response, stream: bool) -> int:
    """Of prompt and answer."""
    return int(usage_of(answer, stream)["total_tokens"])


ASKS = {"return_token_ids": True}


@pytest.mark.parametrize("stream", [True, False])
async def test_five_turns(rig: StartRig, language: Language, stream: bool) -> None:
    r = await begin(rig, language)
    talk = Talk(r, stream)
    talk.more = dict(ASKS)
    before = 0
    for turn in range(5):
        answer = await talk.turn()
        assert cached(answer, stream) >= before, "the answer before is there"
        before = tokens(answer, stream) - 1 if turn < 4 else 0
    assert fetched(r) == 4
    assert (await returns(r))["used"] == 4
    await over(r)


CHANGES = ["history edited", "a tool changed", "another session", "decode restarted", "kept too long"]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("stream", [True, False])
async def test_never_for_what_does_not_go_on(rig: StartRig, language: Language, stream: bool, what: str) -> None:
    r = await begin(rig, language, change=told(language, keep=0.2 if what == "kept too long" else 450.0))
    talk = Talk(r, stream)
    talk.more = dict(ASKS)
    await talk.turn()
    offered = (await returns(r))["offered"]
    if what == "history edited":
        talk.messages[0] = {"role": "user", "content": "Otherwise. " + talk.messages[0]["content"]}
    elif what == "a tool changed":
        talk.more["tools"] = TOOLS
    elif what == "another session":
        talk.session = "other"
    elif what == "decode restarted":
        target = r.target(r.d)
        await r.d.restart()
        r.running.fleet.restarted(target.worker)
        target.foreign = target.busy = 40
    else:
        await asyncio.sleep(0.3)
    await talk.turn()
    assert offered == 1
    assert fetched(r) == 0
    assert (await returns(r))["used"] == 0
    await over(r)


@pytest.mark.parametrize("stream", [True, False])
async def test_never_in_text_mode(rig: StartRig, language: Language, stream: bool) -> None:
    r = await begin(rig, language, change=told(None))
    talk = Talk(r, stream)
    talk.more = dict(ASKS)
    for _ in range(3):
        await talk.turn()
    assert fetched(r) == 0
    assert await returns(r) == {}
    await over(r)


@pytest.mark.parametrize("stream", [True, False])
async def test_never_where_the_template_leaves_out_what_was_said(
    rig: StartRig, language: Language, stream: bool, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(STRIPS)
    r = await begin(rig, language._replace(template=str(template)))
    talk = Talk(r, stream)
    talk.more = dict(ASKS)
    for _ in range(4):
        await talk.turn()
    assert (await returns(r))["used"] == fetched(r) == 0
    await over(r)


async def test_once_when_two_come_at_a_time(rig: StartRig, language: Language) -> None:
    r = await begin(rig, language)
    talk = Talk(r)
    talk.more = dict(ASKS)
    await talk.turn()
    other = Talk(r)
    other.messages, other.more = list(talk.messages), dict(ASKS)
    await asyncio.gather(talk.turn("First?"), other.turn("Second?"))
    assert (await returns(r))["used"] <= 1
    assert fetched(r) <= 1
    await over(r)
