"""A pair at its edges: answers of any size, breakers on trial, comments sent early, requests that cannot be split."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.disagg.rig import StartRig, name, story
from tests.gateway.disagg.test_bodies import DELTA, PREFILLED, scripts
from tests.gateway.scripted import EVENTS, Script, Scripted, Seen, chunk, events, ok
from tests.gateway.talk import chat, once, request, settled, until

OFFERS = b'data: {"choices":[],"kv_transfer_params":{"do_remote_decode":true,"remote_host":"10.0.0.7","a":{"b":1}}}\n\n'


def after(seconds: float, answer: bytes) -> Script:
    async def script(seen: Seen) -> None:
        await asyncio.sleep(seconds)
        await seen.write(answer)

    return script


async def test_an_answer_of_any_size_passes_and_is_nobody_s_fault(gateway: Begin, scripted: StartScripted) -> None:
    body = json.dumps({"choices": [{"text": "x" * 6_000_000}], "usage": {"prompt_tokens": 3}}).encode()
    running, _, d = await scripts(gateway, scripted, ok(body))
    for _ in range(6):
        answer = await once(running.port, request(chat()))
        assert (answer.status, answer.body == body) == (200, True)
    assert len(d.seen) == 6
    assert all(target.breaker.state == "closed" for target in running.fleet.targets.values())
    await settled(running)


async def test_a_prefill_worker_on_trial_that_fails_is_left_alone_again(
    gateway: Begin, scripted: StartScripted
) -> None:
    running, p, _ = await scripts(gateway, scripted)
    p.replies[:] = [ok(b'{"error":"no"}', status=b"500 Oops")]
    target = next(t for t in running.fleet.targets.values() if t.name == f"127.0.0.1:{p.port}")
    for _ in range(12):
        await once(running.port, request(chat()))
    assert target.breaker.state != "closed"
    until_ = target.breaker.open_until
    assert until_ is not None
    target.breaker.open_until = running.fleet.clock() - 0.01
    running.fleet.changed()
    asked = len(p.seen)
    await once(running.port, request(chat()))
    assert len(p.seen) == asked + 1, "one trial"
    assert target.breaker.open_until is not None
    assert target.breaker.open_until > running.fleet.clock(), "and then a pause as before"
    await settled(running)


async def sglang(gateway: Begin, scripted: StartScripted, p: Any, d: Any) -> tuple[Running, Scripted, Scripted]:
    first, second = await scripted(p), await scripted(d)
    running = await gateway(
        WorkerConfig(first.url, role="prefill", engine="generic", protocol="sglang", bootstrap="127.0.0.1:8998"),
        WorkerConfig(second.url, role="decode", engine="generic", protocol="sglang"),
    )
    return running, first, second


@pytest.mark.parametrize("late", [0.0, 0.4])
async def test_prompt_logprobs_that_come_after_the_whole_answer(
    gateway: Begin, scripted: StartScripted, late: float
) -> None:
    told = b'data: {"text":"a","meta_info":{"id":"x","input_token_logprobs":%b}}\n\n'
    done = b"data: [DONE]\n\n"
    p = after(late, events(told % b"[[-1.5,7,null]]", done))
    running, _, _ = await sglang(gateway, scripted, p, after(0.1, events(told % b"[]", done)))
    body = {"text": "a", "stream": True, "return_logprob": True}
    answer = await once(running.port, request(body, path="/generate"))
    assert (answer.status, answer.whole) == (200, True)
    assert b'"input_token_logprobs":[[-1.5,7,null]]' in answer.body
    assert answer.body.endswith(done)
    assert all(target.breaker.faults == 0 for target in running.fleet.targets.values())
    await settled(running)


async def test_what_stands_in_for_a_late_answer_shows_no_addresses_either(
    gateway: Begin, scripted: StartScripted
) -> None:
    slow = await scripted(after(1.5, ok(b'{"error":"no"}', status=b"500 Oops")))
    p, d = await scripted(ok(PREFILLED)), await scripted(events(DELTA, OFFERS, b"data: [DONE]\n\n"))

    def change(config: Config) -> None:
        config.listen.comment_after = 0.3
        config.retries.budget = 1.0

    running = await gateway(
        WorkerConfig(slow.url, engine="generic"),
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="nixl"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="nixl"),
        change=change,
    )
    while not slow.seen:
        answer = await once(running.port, request(chat(stream=True)))
        assert answer.status == 200
        assert b"remote_host" not in answer.body
        assert b'"content":"a"' in answer.body
    assert b": keep-alive" in answer.body
    await settled(running)


async def test_answers_that_are_not_streamed_keep_a_decode_worker_busy(gateway: Begin, scripted: StartScripted) -> None:
    go = asyncio.Event()

    async def waits(seen: Seen) -> None:
        await go.wait()
        await seen.write(ok())

    running, _, d = await scripts(gateway, scripted, waits)  # type: ignore[arg-type]
    asked = [asyncio.ensure_future(once(running.port, request(chat()))) for _ in range(5)]
    await until(lambda: len(d.seen) == 5)
    target = next(t for t in running.fleet.targets.values() if t.name == f"127.0.0.1:{d.port}")
    assert (target.running, target.busy) == (5, 5.0)
    go.set()
    assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 5
    assert (target.running, target.busy, target.active) == (0, 0.0, 0.0)


async def test_a_stream_does_not_keep_its_prompt(gateway: Begin, scripted: StartScripted) -> None:
    async def streams(seen: Seen) -> None:
        await seen.write(EVENTS + chunk(DELTA))
        await seen.gone()

    running, _, _ = await scripts(gateway, scripted, streams)  # type: ignore[arg-type]
    body = chat(stream=True, max_tokens=9)
    body["messages"][0]["content"] = "x" * 300_000
    asked = asyncio.ensure_future(once(running.port, request(body)))
    await until(lambda: any(exchange.relay is not None for exchange in running.gateway.exchanges))
    (exchange,) = running.gateway.exchanges
    assert exchange.legs is not None
    assert (exchange.legs.pair.body, exchange.legs.decode_body, exchange.legs.answer) == (b"", b"", None)
    assert exchange.ask.takes is None
    asked.cancel()
    await settled(running)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"model": "sim", "prompt": "a b"}), ("/v1/messages/count_tokens", {"model": "sim", "messages": []})],
)
async def test_what_generates_nothing_needs_no_pair(rig: StartRig, path: str, body: dict[str, Any]) -> None:
    r = await rig(1, 1, "sglang")
    answer = await r.ask(body, path=path)
    assert answer.status != 503, answer.body
    assert answer.one("x-warmroute-worker") == name(r.d)
    await r.check(story(1))


async def test_aborts_carry_the_client_s_credential_where_workers_take_it(
    gateway: Begin, scripted: StartScripted
) -> None:
    async def waits(seen: Seen) -> None:
        await seen.gone()

    running, p, _ = await sglang(gateway, scripted, waits, ok(b'{"error":"no"}', status=b"500 Oops"))
    await once(running.port, request(chat(), "Authorization: Bearer mine"))
    await until(lambda: any(seen.target == "/abort_request" for seen in p.seen))
    (told,) = [seen for seen in p.seen if seen.target == "/abort_request"]
    assert told.all("authorization") == ["Bearer mine"]
    assert json.loads(told.body)["rid"].startswith("wr-")
    await settled(running)


async def test_a_request_that_a_prefill_engine_refuses_leaves_nothing_running(
    gateway: Begin, engine: StartEngine
) -> None:
    """What is wrong with it is its client's fault: nobody else is tried, and its session goes on."""
    prefill = await engine("sglang", role="prefill", time_scale=0.0)
    decode = await engine("sglang", role="decode", time_scale=0.0)
    running = await gateway(prefill, decode, policy="cache_aware")
    assert (await once(running.port, request(chat(max_tokens=2), "x-session-id: s"))).status == 200
    for wrong in ({"messages": "nonsense"}, {"max_tokens": "many"}, {"tools": "none"}):
        assert (await once(running.port, request(chat(**wrong), "x-session-id: s"))).status == 400
    (session,) = running.sessions.all()
    assert (session.running, session.turns) == (0, 1)
