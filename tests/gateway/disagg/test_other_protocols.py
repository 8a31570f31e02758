"""Mooncake, shared stores and TensorRT-LLM: the answer is one engine's, whoever fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway.config import Config
from tests.gateway.disagg.kinds import KINDS, BeginKind, kind_of_pair
from tests.gateway.disagg.rig import FIRST_BYTE, Rig, events_of, name, story
from tests.gateway.talk import admin, once, request, until
from tests.load_tests.engine.pairs import STORY

__all__ = ["kind_of_pair"]
STREAMS = [False, True]


async def counted(r: Rig, metric: str) -> dict[str, float]:
    """target -> tokens, where there are any."""
    return {labels["target"]: value for labels, value in await r.samples(metric) if value}


def computed(r: Rig) -> int:
    """Prompt tokens that decode engines computed."""
    return sum(int(each.stats()["computed_tokens"]) for each in r.decodes)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_answer_is_one_engine_s(kind_of_pair: BeginKind, kind: str, stream: bool) -> None:
    r = await kind_of_pair(kind)
    for number in range(3):
        answer = await r.check(story(number, stream=stream))
        assert answer.one("x-warmroute-worker") == name(r.d)
        assert answer.one("x-warmroute-prefill-worker") == name(r.p)
        assert answer.one("x-warmroute-decision").startswith("disaggregated/")
    assert computed(r) <= (3 * r.d.core.options.block_size if kind == "shared" else 0)
    assert r.p.stats()["computed_tokens"] > 0
    await r.nothing_left()
    decisions = await r.samples("warmroute_pd_decisions_total")
    assert {labels["kind"]: value for labels, value in decisions} == {"pair": 3}
    assert await r.samples("warmroute_pd_leg_failures_total") == []
    assert await r.faults() == {}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_other_routes(kind_of_pair: BeginKind, kind: str, stream: bool) -> None:
    r = await kind_of_pair(kind)
    body: dict[str, Any] = {"model": "sim", "prompt": STORY, "max_tokens": 9, "temperature": 0, "stream": stream}
    whole = await once(r.alone.port, request(body, path="/v1/completions"))
    answer = await r.ask(body, path="/v1/completions")
    assert answer.status == 200, answer.body
    said, right = ("".join(c["text"] for e in parts(a.body, stream) for c in e["choices"]) for a in (answer, whole))
    assert said == right != ""
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    await r.nothing_left()


def parts(body: bytes, stream: bool) -> list[Any]:
    """What an answer is made of: one object, or its events."""
    return [event for event in events_of(body) if event != "[DONE]"] if stream else [json.loads(body)]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_cached_tokens_are_those_of_the_prefill_engine(kind_of_pair: BeginKind, kind: str, stream: bool) -> None:
    """What was handed over is nobody's hit."""
    r = await kind_of_pair(kind)
    for _ in range(3):
        answer = await r.check(story("same", stream=stream), "X-Session-Id: s")
        await until(lambda: not r.running.gateway.exchanges)
    assert int(answer.one("x-warmroute-predicted-cached-tokens")) > 0
    await r.nothing_left()
    stats = r.p.stats()
    assert stats["cached_tokens"] > 0
    assert await counted(r, "warmroute_cached_tokens_total") == {name(r.p): stats["cached_tokens"]}
    assert await counted(r, "warmroute_prompt_tokens_total") == {name(r.p): stats["prompt_tokens"]}
    completions = await counted(r, "warmroute_completion_tokens_total")
    assert completions == {name(r.d): r.d.stats()["generated_tokens"]}


BEFORE = ["error500", "queue_full", "reset", "refuse"]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fault", BEFORE)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_side_that_fails_before_the_answer(
    kind_of_pair: BeginKind, kind: str, side: str, fault: Any, stream: bool
) -> None:
    r = await kind_of_pair(kind, 2, 2, policy="round_robin", lease=4.0, blocks_ttl=4.0)
    bad = r.p if side == "prefill" else r.d
    bad.faults.add(fault, count=None)
    for number in range(2):
        await r.check(story(number, stream=stream))
    # Of two that did their parts one after the other an error of the second may be either's.
    told = fault != "queue_full" and (side == "prefill" or fault != "error500")
    assert await r.blamed() <= {name(bad)}
    assert bool(await r.blamed()) or not told
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_side_that_is_silent(kind_of_pair: BeginKind, kind: str, side: str, stream: bool) -> None:
    def impatient(config: Config) -> None:
        config.timeouts.first_byte = FIRST_BYTE

    r = await kind_of_pair(kind, 2, 2, policy="round_robin", change=impatient, lease=4.0, blocks_ttl=4.0)
    bad = r.p if side == "prefill" else r.d
    bad.faults.add("stall_before", count=1)
    for number in range(2):
        await r.check(story(number, stream=stream))
    good = {name(each) for each in r.engines if (each in r.prefills) == (bad in r.prefills) and each is not bad}
    assert not good & await r.blamed()
    bad.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("kind", KINDS)
async def test_kv_that_does_not_arrive(kind_of_pair: BeginKind, kind: str, side: str, stream: bool) -> None:
    r = await kind_of_pair(kind, 2, 2, policy="round_robin", lease=2.0, blocks_ttl=2.0)
    bad = r.p if side == "prefill" else r.d
    bad.faults.add("transfer_fail", count=1)
    for number in range(2):
        await r.check(story(number, stream=stream))
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves(kind_of_pair: BeginKind, kind: str, stream: bool) -> None:
    r = await kind_of_pair(kind, lease=2.0, blocks_ttl=2.0)
    asked = asyncio.ensure_future(r.ask(story("x", stream=stream, max_tokens=20_000, ignore_eos=True)))
    await until(lambda: r.d.stats()["running"])
    asked.cancel()
    await r.nothing_left()
    await r.check(story("y", stream=stream))


# -- Mooncake -----------------------------------------------------------------------------------------------------------


def quick(config: Config) -> None:
    config.probes.health = config.probes.join = 0.1


async def test_engine_ids_are_read_at_join(kind_of_pair: BeginKind) -> None:
    r = await kind_of_pair("mooncake", 2, 1)
    told = [r.running.fleet.workers[name(each)].engine_ids for each in r.prefills]
    assert told == [[each.engine_id] for each in r.prefills]
    assert r.running.fleet.workers[name(r.d)].engine_ids == []


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_restarted_prefill_engine_is_met_again(kind_of_pair: BeginKind, stream: bool) -> None:
    r = await kind_of_pair("mooncake", change=quick, blocks_ttl=4.0)
    await r.check(story(0, stream=stream))
    before = r.p.engine_id
    await r.p.restart()
    assert r.p.engine_id != before
    worker = r.running.fleet.workers[name(r.p)]
    for number in range(1, 200):
        # Answered rightly all the time, by whoever can.
        answer = await r.check(story(number, stream=stream))
        if worker.engine_ids == [r.p.engine_id] and answer.all("x-warmroute-prefill-worker"):
            break
        await asyncio.sleep(0.05)
    assert worker.engine_ids == [r.p.engine_id]
    had = computed(r)
    answer = await r.check(story("after", stream=stream))
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    assert computed(r) == had
    await r.nothing_left()


async def no_bootstrap(r: Rig, engine: Any) -> None:
    """Its bootstrap server does not answer, nor did when it joined."""
    r.running.fleet.workers[name(engine)].engine_ids = []


@pytest.mark.parametrize("stream", STREAMS)
async def test_without_a_bootstrap_server_others_serve(kind_of_pair: BeginKind, stream: bool) -> None:
    r = await kind_of_pair("mooncake", 2, 1, policy="round_robin")
    await no_bootstrap(r, r.p)
    for number in range(3):
        answer = await r.check(story(number, stream=stream))
        assert answer.one("x-warmroute-prefill-worker") == name(r.prefills[1])
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
async def test_without_any_the_decode_engine_serves_alone(kind_of_pair: BeginKind, stream: bool) -> None:
    r = await kind_of_pair("mooncake")
    await no_bootstrap(r, r.p)
    answer = await r.check(story("x", stream=stream))
    assert answer.one("x-warmroute-worker") == name(r.d)
    assert answer.all("x-warmroute-prefill-worker") == []
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
async def test_where_nobody_can_the_error_is_clear(kind_of_pair: BeginKind, stream: bool) -> None:
    def once_only(config: Config) -> None:
        config.retries.attempts = 1

    r = await kind_of_pair("mooncake", change=once_only)
    await no_bootstrap(r, r.p)
    answer = await r.ask(story("x", stream=stream))
    assert answer.status in (502, 503), answer.body
    assert "bootstrap server" in answer.json()["error"]["message"]
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
async def test_each_rank_is_met_by_its_own_id(kind_of_pair: BeginKind, stream: bool) -> None:
    r = await kind_of_pair("mooncake", policy="round_robin", ranks=2)
    assert len(set(r.running.fleet.workers[name(r.p)].engine_ids)) == 2
    served = set()
    for number in range(4):
        answer = await r.check(story(number, stream=stream))
        served.add(answer.one("x-warmroute-prefill-worker"))
    assert served == {name(r.p), f"{name(r.p)}#1"}
    assert computed(r) == 0
    assert await r.faults() == {}
    await r.nothing_left()


# -- shared stores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": [STORY, f"b {STORY}"]}, {"echo": True}, {"best_of": 1}])
async def test_engines_find_kv_however_many_prompts_there_are(kind_of_pair: BeginKind, more: dict[str, Any]) -> None:
    r = await kind_of_pair("shared")
    body = {"model": "sim", "prompt": STORY, "max_tokens": 5, "temperature": 0, **more}
    whole = await once(r.alone.port, request(body, path="/v1/completions"))
    answer = await r.ask(body, path="/v1/completions")
    assert answer.status == 200, answer.body
    said, right = ([choice["text"] for choice in each.json()["choices"]] for each in (answer, whole))
    assert said == right
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    assert r.d.stats()["transferred_tokens"] > 0
    await r.nothing_left()


@pytest.mark.parametrize("kind", ["shared", "tensorrt_llm"])
async def test_what_was_computed_is_not_computed_again(kind_of_pair: BeginKind, kind: str) -> None:
    """A decode engine that never saw its request leaves it to another one."""
    r = await kind_of_pair(kind, 1, 2, policy="round_robin")
    r.d.faults.add("refuse", count=None)
    for number in range(3):
        answer = await r.check(story(number))
        assert answer.one("x-warmroute-worker") == name(r.decodes[1])
    assert r.p.stats()["requests"] == 3
    r.d.faults.clear()
    await r.nothing_left()


# -- what is told -------------------------------------------------------------------------------------------------------


async def route(r: Rig, body: dict[str, Any], session: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{r.running.admin.port}/route"
    fields = {"X-Session-Id": session}
    async with aiohttp.ClientSession() as http, http.post(url, data=json.dumps(body), headers=fields) as answer:
        assert answer.status == 200, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


@pytest.mark.parametrize("kind", KINDS)
async def test_the_dry_run_says_what_is_done(kind_of_pair: BeginKind, kind: str) -> None:
    r = await kind_of_pair(kind, 2, 2)
    body = story("x")
    for turn in range(3):
        told = await route(r, body, "s")
        answer = await r.check(body, "X-Session-Id: s")
        await until(lambda: not r.running.gateway.exchanges)
        pair = (answer.one("x-warmroute-prefill-worker"), answer.one("x-warmroute-worker"))
        if turn:
            # Of a session that is not known yet the dry run has no key to break ties by.
            assert (told["pair"]["prefill"], told["pair"]["decode"]) == pair
            assert told["pair"]["kv_from"] is None
            assert told["session"]["home"] == pair[1]
            assert told["session"]["partner"] == pair[0]
            assert answer.one("x-warmroute-decision") == f"disaggregated/{told['reason']}"
    await r.nothing_left()


SIDES = [("prefill", "error500"), ("prefill", "reset"), ("decode", "refuse"), ("decode", "reset")]


@pytest.mark.parametrize(("side", "fault"), SIDES)
@pytest.mark.parametrize("kind", KINDS)
async def test_failures_are_counted_where_they_happened(
    kind_of_pair: BeginKind, kind: str, side: str, fault: Any
) -> None:
    r = await kind_of_pair(kind, 2, 2, policy="round_robin", lease=4.0, blocks_ttl=4.0)
    bad = r.p if side == "prefill" else r.d
    bad.faults.add(fault, count=None)
    for number in range(2):
        await r.check(story(number))
    bad.faults.clear()
    rows = await r.samples("warmroute_pd_leg_failures_total")
    assert {(labels["role"], labels["stage"]) for labels, value in rows if value} == {(side, side)}
    await r.nothing_left()


@pytest.mark.parametrize(("kind", "times"), [("mooncake", 0), ("shared", 3), ("tensorrt_llm", 3)])
async def test_transfers_are_timed_where_they_can_be(kind_of_pair: BeginKind, kind: str, times: int) -> None:
    """Of two that are asked at once nobody sees when the KV begins to go over."""
    r = await kind_of_pair(kind)
    for number in range(3):
        await r.check(story(number, stream=True))
    await r.nothing_left()
    assert sum(value for _, value in await r.samples("warmroute_pd_transfer_seconds_count")) == times
    assert await r.samples("warmroute_kv_fetches_total") == []


# -- TensorRT-LLM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_context_that_already_ended(kind_of_pair: BeginKind, stream: bool) -> None:
    """It generated its last token there: the other engine says the same of its own."""
    r = await kind_of_pair("tensorrt_llm")
    body = story("x", stream=stream, sim={"reply": {"text": ""}})
    answer = await r.check(body)
    ends = [choice.get("finish_reason") for event in parts(answer.body, stream) for choice in event["choices"]]
    assert [end for end in ends if end] == ["stop"]
    await r.check(story("y", stream=stream, sim={"reply": {"text": "Yes."}}))
    await r.nothing_left()


async def test_all_workers_are_told_by_their_role(kind_of_pair: BeginKind) -> None:
    for kind in KINDS:
        r = await kind_of_pair(kind)
        rows = {row["id"]: row for row in (await admin(r.running, "/workers"))["workers"]}
        assert (rows[name(r.p)]["role"], rows[name(r.d)]["role"]) == ("prefill", "decode")
