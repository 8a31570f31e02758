"""The same words in another form: a first input that is a text, and comes back as an item of a list.

To the engine, and in its cache, they are the same prompt. The same goes for a message whose content is a text, or one part.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, request

LONG = "Read all of this, and then do it. " * 60
TEXT: dict[str, Any] = {"role": "user", "content": LONG}
TYPED: dict[str, Any] = {"type": "message", **TEXT}
PART: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": LONG}]}


@pytest.mark.parametrize(
    ("first", "later"),
    [(LONG, TEXT), (LONG, PART), ([TEXT], TYPED), ([TEXT], PART)],
    ids=["text-item", "text-parts", "untyped-typed", "item-parts"],
)
async def test_an_input_that_comes_back_in_another_form_is_the_same_session(
    gateway: Begin, engine: StartEngine, first: Any, later: Any
) -> None:
    running = await gateway(*[await engine(time_scale=0.0) for _ in range(4)], policy="cache_aware")
    workers, cached, given = [], [], first
    history: list[Any] = [later]
    async with await Raw.connect(running.port) as client:
        for turn in range(4):
            body = {"model": "sim", "input": given, "max_output_tokens": 8, "store": False}
            answer = await client.ask(request(body, path="/v1/responses"))
            assert answer.status == 200
            workers.append(answer.one("x-warmroute-worker"))
            told = answer.json()
            cached.append(told["usage"]["input_tokens_details"]["cached_tokens"])
            history = [*history, *told["output"], {"role": "user", "content": f"and {turn}"}]
            given = history
    assert (len(running.sessions), len(set(workers))) == (1, 1), (workers, cached)
    assert all(cached[1:]), cached
