"""What tenants are granted in any minute: against a list of everything that happened, and over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from gateway.config import LimitsConfig, WorkerConfig
from gateway.errors import RateLimited
from gateway.meters import Limits, Meter, Minute
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.disagg.kinds import KINDS, BeginKind, kind_of_pair
from tests.gateway.scripted import events, ok
from tests.gateway.talk import Response, chat, once, request, until
from tests.gateway.test_admission import Asked, having, held, tenant, told

__all__ = ["held", "kind_of_pair"]

LONG = "the quick brown fox jumps over the lazy dog " * 400

seconds = st.floats(0.0, 90.0, allow_nan=False)
amounts = st.integers(1, 400)


@given(st.lists(st.tuples(seconds, amounts), max_size=60), st.integers(1, 1000), st.floats(0, 1e6))
@example([(0.99, 500), (59.02, 500)], 500, 0.0)
def test_no_sixty_seconds_have_more_than_the_limit_and_waiting_as_told_is_enough(
    steps: list[tuple[float, int]], limit: int, start: float
) -> None:
    minute, now = Minute(), start
    granted: list[tuple[float, int]] = []
    for pause, amount in steps:
        now += pause
        wait = minute.wait(amount, limit, now)
        if wait > 0:
            assert wait <= 61
            # Who comes a little sooner than a whole second before that is refused, who comes then is not.
            assert minute.wait(amount, limit, now + wait + 1e-6) == 0
            now += wait + 1e-6
        minute.add(amount, now)
        granted.append((now, amount))
        within = [each for at, each in granted if now - 60.0 <= at]
        assert sum(within) <= max(limit, amount), "in any sixty seconds"
        assert minute.total >= sum(within)


@given(st.lists(st.tuples(seconds, amounts, st.integers(-400, 400), seconds), max_size=40))
@example([(0.0, 1000, -900, 50.0), (15.0, 1, 0, 0.0)])
def test_what_is_put_right_later_counts_for_when_it_was_counted(steps: list[tuple[float, int, int, float]]) -> None:
    minute, now = Minute(), 0.0
    happened: list[tuple[float, int]] = []
    for pause, amount, more, later in steps:
        at = now = now + pause
        minute.add(amount, now)
        now += later
        more = max(more, -amount)
        minute.correct(more, at, now)
        happened.append((at, amount + more))
        low = sum(each for when, each in happened if now - 60.0 <= when)
        high = sum(each for when, each in happened if now - 61.0 <= when)
        assert low <= minute.total <= high
    minute.wait(1, 1, now + 62)
    assert minute.total == 0


def test_a_clock_that_stands_still_or_goes_back_grants_nothing_twice() -> None:
    minute = Minute()
    minute.add(10, 1000.0)
    assert minute.wait(1, 10, 990.0) > 0
    minute.add(5, 990.0)
    assert minute.total == 15
    assert minute.wait(10, 10, 1_000_000.0) == 0


def test_a_refusal_counts_nothing() -> None:
    meter = Meter("a", Limits(prompt_tokens_per_minute=100, computed_tokens_per_minute=50))
    meter.asks(40, 40, 0.0)
    with pytest.raises(RateLimited):
        meter.asks(50, 20, 0.0)
    with pytest.raises(RateLimited):
        meter.asks(70, 0, 0.0)
    assert (meter.prompt.total, meter.computed.total) == (40, 40)


# -- over HTTP ----------------------------------------------------------------------------------------------------------


def of(running: Running) -> Meter:
    (found,) = [each for _, each in running.gateway.meters.all()]
    return found


async def ask(running: Running, *lines: str, **fields: Any) -> Response:
    return await once(running.port, request(chat(**fields), "Authorization: Bearer key-a", *lines))


async def test_a_request_that_is_refused_for_its_tokens_is_none_of_those_that_are_granted(
    gateway: Begin, scripted: StartScripted
) -> None:
    limits = LimitsConfig(requests_per_minute=3, prompt_tokens_per_minute=2_000)
    running = await gateway(await scripted(), change=having(tenant("a", limits=limits)))
    long = [{"role": "user", "content": LONG}]
    assert (await ask(running)).status == 200
    for _ in range(5):
        told(await ask(running, messages=long), "prompt_tokens")
    assert (await ask(running)).status == 200
    assert of(running).requests.total == 2


async def test_a_request_that_the_queue_turns_away_is_counted_nowhere(gateway: Begin, held: Any) -> None:
    worker = await held()
    limits = LimitsConfig(requests_per_minute=9, prompt_tokens_per_minute=100_000, computed_tokens_per_minute=100_000)
    running = await gateway(worker.config, change=having(tenant("a", limits=limits), deadline=0.1))
    asked = Asked(running)
    await asked.send("first", key="a")
    meter = of(running)
    counted = meter.requests.total, meter.prompt.total, meter.computed.total
    for _ in range(3):
        told(await ask(running), "deadline")
    assert (meter.requests.total, meter.prompt.total, meter.computed.total) == counted
    worker.let(1)
    assert await asked.status("first") == 200


async def test_what_is_over_is_counted_as_its_engine_says_streamed_or_not_and_what_broke_as_estimated(
    gateway: Begin, scripted: StartScripted
) -> None:
    usage = b'{"prompt_tokens":900,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":800}}'
    whole = ok(b'{"choices":[],"usage":' + usage + b"}")
    streamed = events(
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
        b'data: {"choices":[],"usage":' + usage + b"}\n\n",
        b"data: [DONE]\n\n",
    )
    broken = ok(b"{}", status=b"500 Internal Server Error")
    worker = await scripted(whole, streamed, broken, whole)
    limits = LimitsConfig(prompt_tokens_per_minute=100_000, computed_tokens_per_minute=100_000)
    running = await gateway(worker, policy="cache_aware", change=having(tenant("a", limits=limits)))
    for number, stream in enumerate((False, True), 1):
        assert (await ask(running, stream=stream)).status == 200
        await until(lambda: not running.gateway.exchanges)
        assert (of(running).prompt.total, of(running).computed.total) == (900 * number, 100 * number)
    assert (await ask(running)).status == 500
    await until(lambda: not running.gateway.exchanges)
    assert 1_800 < of(running).prompt.total < 1_900


async def test_of_a_pair_is_counted_what_its_prefill_engine_computed(gateway: Begin, engine: StartEngine) -> None:
    first = WorkerConfig((await engine(role="prefill")).url, role="prefill")
    second = WorkerConfig((await engine(role="decode")).url, role="decode")
    limits = LimitsConfig(prompt_tokens_per_minute=100_000, computed_tokens_per_minute=100_000)
    running = await gateway(first, second, policy="round_robin", change=having(tenant("a", limits=limits)))
    long = [{"role": "user", "content": LONG}]
    answers = [await ask(running, messages=long, max_tokens=3) for _ in range(2)]
    assert all(answer.all("x-warmroute-prefill-worker") for answer in answers)
    prompt = answers[0].json()["usage"]["prompt_tokens"]
    await until(lambda: not running.gateway.exchanges)
    assert of(running).prompt.total == 2 * prompt
    assert prompt <= of(running).computed.total < 1.1 * prompt, "the second one found it all"


@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_a_pair_s_decode_engine_says_of_what_came_to_it_was_computed_all_the_same(
    kind_of_pair: BeginKind, kind: str
) -> None:
    limits = LimitsConfig(prompt_tokens_per_minute=100_000, computed_tokens_per_minute=100_000)
    rig = await kind_of_pair(kind, policy="round_robin", change=having(tenant("a", limits=limits)))
    body = chat(messages=[{"role": "user", "content": LONG}], max_tokens=3)
    answer = await once(rig.running.port, request(body, "Authorization: Bearer key-a"))
    assert answer.all("x-warmroute-prefill-worker")
    await until(lambda: not rig.running.gateway.exchanges)
    assert of(rig.running).computed.total == of(rig.running).prompt.total == answer.json()["usage"]["prompt_tokens"]
