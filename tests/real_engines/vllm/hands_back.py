"""A pair in which the decode engine hands KV back, and a policy that takes back whatever is offered: for a model as small as
the tests' no price would ever say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ModelConfig
from policies.base import Choice, Fleet, Request
from policies.disaggregated import Disaggregated
from tests.real_engines.vllm.conftest import StartPair
from tests.real_engines.vllm.engine import KEPT, MODEL, VLLM
from tests.real_engines.vllm.pair import Answer, Pair, put


class TakesAll(Disaggregated):
    """Every request takes the pair, in a fleet of one."""

    name = "takes_all"

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        chosen = super().choose(request, fleet, now)
        if fleet.prefill is None:
            return chosen
        return chosen._replace(prefill=fleet.prefill.targets[0], source=chosen.target if request.lent else None)


POINTS = f"[warmroute.policies]\n{TakesAll.name} = {TakesAll.__module__}:{TakesAll.__name__}\n"
"""How an installed distribution tells of it."""

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
