"""Either half of a pair of vLLM engines fails, in each phase of a request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from time import monotonic
from typing import Any

import pytest

from gateway.config import Config
from tests.real_engines.vllm.conftest import StartPair
from tests.real_engines.vllm.engine import LEASE, VLLM
from tests.real_engines.vllm.pair import COMPUTED, PULLED, Answer, Count, Gate, Pair, recovered
from tests.real_engines.vllm.talk import events, said, until

pytestmark = pytest.mark.engines

TEXT = "read the file and write the next one " * 30
LONG = 3000
_names = count()


def fresh(**fields: Any) -> dict[str, Any]:
    """A chat that nobody has seen."""
    return said(f"faults {next(_names)} {TEXT}", **{"max_tokens": 12, **fields})


async def pairs_again(pd: Pair) -> None:
    """The next requests are prefilled here and decoded there."""
    for stream in (True, False):
        async with Count(pd.d) as counted:
            await pd.ask(body := fresh(stream=stream))
        (came,) = counted.came
        assert came[COMPUTED] == 0
        assert came[PULLED] > 0
        await pd.check(body)


async def served_by(pd: Pair, engine: VLLM) -> None:
    """One engine does it all."""
    for stream in (True, False):
        answer = await pd.check(fresh(stream=stream), engine=engine)
        assert answer.lasted < 5
        assert answer.headers["x-warmroute-worker"] == pd.name(engine)


async def restarted(pd: Pair, *engines: VLLM) -> None:
    for engine in engines:
        await asyncio.to_thread(engine.start, engine.flags)
    for engine in engines:
        await recovered(pd, engine)


async def interrupted(pd: Pair, then: Callable[[], object], **fields: Any) -> tuple[bytes, float]:
    """A stream during which ``then`` happens: all its bytes, and how many seconds after that it ended."""
    data, at = b"", 0.0
    body = fresh(stream=True, max_tokens=LONG, stream_options={"include_usage": True}, **fields)
    async with pd.http.stream("POST", pd.url + "/v1/chat/completions", json=body) as response:
        async for piece in response.aiter_bytes():
            data += piece
            if not at and data.count(b"\n\n") > 20:
                await asyncio.to_thread(then)
                at = monotonic()
    return data, monotonic() - at


async def test_a_prefill_engine_that_is_killed_and_comes_back(pair: StartPair) -> None:
    pd = await pair()
    await pairs_again(pd)
    before = pd.running.fleet.workers[pd.name(pd.p)].facts.started
    pd.p.kill()
    await served_by(pd, pd.d)
    await until(lambda: not pd.ready(pd.p), 10)
    await served_by(pd, pd.d)
    assert await pd.blamed() <= {"prefill"}
    await restarted(pd, pd.p)
    assert pd.running.fleet.workers[pd.name(pd.p)].facts.started != before
    await pairs_again(pd)
    assert (await pd.by("warmroute_requests_total", "outcome")).keys() == {"ok"}


async def test_a_prefill_engine_that_dies_after_its_part_is_not_missed(pair: StartPair) -> None:
    pd = await pair()
    data, _ = await interrupted(pd, pd.p.kill)
    assert data.endswith(b"data: [DONE]\n\n")
    assert events(data)[-1]["usage"]["completion_tokens"] == LONG
    await served_by(pd, pd.d)
    await restarted(pd, pd.p)
    await pairs_again(pd)
    assert await pd.blamed() <= {"prefill"}


async def test_a_decode_engine_that_dies_in_its_stream_and_comes_back(pair: StartPair) -> None:
    pd = await pair()
    await pairs_again(pd)
    data, seconds = await interrupted(pd, pd.d.kill)
    assert seconds < 5
    assert b"[DONE]" not in data, "that says that an answer is whole"
    assert events(data)[-1]["error"]["code"] in (502, 504)
    await served_by(pd, pd.p)
    assert await pd.blamed() == {"decode"}
    await pd.idle(LEASE + 8)
    await restarted(pd, pd.d)
    await pairs_again(pd)
    outcomes = await pd.by("warmroute_requests_total", "outcome")
    assert (outcomes.keys(), outcomes["stream_error"]) == ({"ok", "stream_error"}, 1)


Between = Callable[..., Awaitable[tuple[Pair, Gate]]]


@pytest.fixture
async def between(pair: StartPair) -> Any:
    """A pair, and what happens between the prefill engine's answer and the decode engine's getting the request."""
    gates: list[Gate] = []

    async def begin(on_failure: str, change: Callable[[Config], None] = lambda config: None) -> tuple[Pair, Gate]:
        flags = partial(VLLM.paired, on_failure=on_failure)
        pd = await pair(flags=flags)
        gate = Gate(pd.d.port, b'"do_remote_prefill":true')
        gates.append(gate)
        await gate.__aenter__()
        await pd.running.stop()
        return await pair(flags=flags, through=(None, gate.url), change=change), gate

    yield begin
    for gate in gates:
        await gate.__aexit__()


async def after(pd: Pair, gate: Gate, then: Callable[[], object], stream: bool) -> tuple[dict[str, Any], Answer]:
    """A request between whose parts ``then`` happens."""
    gate.then = then
    body = fresh(stream=stream)
    answer = await pd.ask(body)
    assert gate.then is None
    print(f"{answer.status} after {answer.lasted:.2f} s: {answer.error or answer.text[:40]!r}")
    print("failures", await pd.rows("warmroute_pd_leg_failures_total"), "blamed", await pd.blamed())
    return body, answer


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("on_failure", ["fail", "recompute"])
async def test_a_prefill_engine_that_dies_before_its_kv_is_fetched(
    between: Between, on_failure: str, stream: bool
) -> None:
    pd, gate = await between(on_failure)
    await pairs_again(pd)
    for met in (True, False) if stream and on_failure == "recompute" else (True,):
        # A decode engine that has not met the prefill engine yet tries for some seconds to reach it.
        body, answer = await after(pd, gate, pd.p.kill, stream)
        assert answer.lasted < (3 if met else 15)
        right = await pd.right(body, engine=pd.d)
        assert (answer.status, answer.error, answer.text) == (200, None, right.text)
        await served_by(pd, pd.d)
        assert "decode" not in await pd.blamed()
        await restarted(pd, pd.p)
    stages = await pd.by("warmroute_pd_leg_failures_total", "stage")
    assert bool(stages["transfer"]) == (on_failure == "fail")
    await pairs_again(pd)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_decode_engine_that_dies_before_it_fetches(between: Between, stream: bool) -> None:
    pd, gate = await between("fail")
    await pairs_again(pd)
    body, answer = await after(pd, gate, pd.d.kill, stream)
    right = await pd.right(body)
    assert (answer.status, answer.error, answer.text) == (200, None, right.text)
    assert answer.lasted < 5
    await served_by(pd, pd.p)
    assert await pd.blamed() == {"decode"}
    await pd.idle(LEASE + 8)
    await restarted(pd, pd.d)
    await pairs_again(pd)


async def test_a_client_that_leaves_between_the_two(between: Between) -> None:
    pd, gate = await between("fail")
    await pairs_again(pd)
    tasks = [asyncio.create_task(pd.ask(fresh(max_tokens=LONG, stream=True)))]
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()

    def leave() -> None:
        loop.call_soon_threadsafe(tasks[0].cancel)
        loop.call_soon_threadsafe(gone.set)

    gate.then = leave
    await asyncio.wait_for(gone.wait(), 10)
    await asyncio.gather(*tasks, return_exceptions=True)
    began = monotonic()
    await pd.idle(LEASE + 8)
    print(f"nothing kept after {monotonic() - began:.1f} s")
    print(pd.p.metrics()["vllm:nixl_num_kv_expired_reqs_total"])
    assert not await pd.blamed()
    await pairs_again(pd)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_prefill_engine_that_hangs_before_its_kv_is_fetched(between: Between, stream: bool) -> None:
    def impatient(config: Config) -> None:
        config.timeouts.first_byte = 4.0

    pd, gate = await between("fail", impatient)
    await pairs_again(pd)
    body, answer = await after(pd, gate, lambda: pd.p.signal_all(signal.SIGSTOP), stream)
    stopped = pd.p.alive
    await served_by(pd, pd.d)
    pd.p.signal_all(signal.SIGCONT)
    assert stopped
    assert answer.lasted < 15
    right = await pd.right(body, engine=pd.d)
    assert (answer.status, answer.error, answer.text) == (200, None, right.text)
    print(await pd.blamed())
    await until(lambda: pd.ready(pd.p), 30)
    await pairs_again(pd)
