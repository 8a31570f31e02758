"""vLLM's NIXL protocol between two engines: what passes, what is kept, and what becomes of it when something fails."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.pairs import (
    CHAT,
    PREFILL,
    STORY,
    both,
    chat,
    events,
    nothing_left,
    pair,
    post,
    prefill,
    text,
    told,
    until,
    user,
)
from tests.load_tests.engine.talk import cached
from tests.load_tests.engine.wiretap import happened

ASK = [user(STORY)]
LENGTHY = {"max_tokens": 120, "ignore_eos": True}


async def refused(http: aiohttp.ClientSession, engine: Engine, params: Any, **fields: Any) -> tuple[int, Any]:
    body = {"model": "sim", "messages": ASK, "kv_transfer_params": params, **fields}
    async with http.post(engine.url + CHAT, json=body) as answer:
        return answer.status, await answer.json()


async def test_the_decode_engine_says_what_one_alone_would(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    alone = await start()
    history: list[Any] = []
    for turn in range(3):
        history.append(user(f"{STORY} {turn}"))
        first, second = await both(http, p, d, history)
        whole = await chat(http, alone, history)
        assert first["choices"][0]["finish_reason"] == "length"
        assert text(second) == text(whole)
        assert cached(second) == cached(first)
        assert second["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        history.append({"role": "assistant", "content": text(second)})
    assert cached(first) > 0
    assert d.stats()["computed_tokens"] == 0
    assert d.stats()["transferred_tokens"] > 0
    assert told(d)["transfers_in"]["tokens"] == told(p)["transfers_out"]["tokens"] == d.stats()["transferred_tokens"]
    await nothing_left(p, d)


async def test_the_parameters_are_those_of_a_real_engine(start: Start, http: aiohttp.ClientSession) -> None:
    p, _ = await pair(start)
    answer = await prefill(http, p, ASK)
    params = answer["kv_transfer_params"]
    tokens = answer["usage"]["prompt_tokens"]
    assert len(params.pop("remote_block_ids")[0]) == -(-tokens // 16)
    assert params.pop("remote_request_id").startswith(answer["id"] + "-")
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": p.engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": p.side_port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    plain = await chat(http, p, ASK)
    assert plain["kv_transfer_params"] is None
    assert told(p)["pinned_blocks"] == -(-tokens // 16) == p.stats()["kv_blocks_used"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_lease_that_ends_fails_the_pull(start: Start, http: aiohttp.ClientSession, stream: bool) -> None:
    p, d = await pair(start, lease=0.05)
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    await until(lambda: told(p)["leases_expired"] == 1)
    await nothing_left(p)
    if stream:
        got = await events(http, d, CHAT, {"model": "sim", "messages": ASK, "kv_transfer_params": params})
        error = {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
        assert got[1:] == [{"error": error}, "[DONE]"]
        assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    else:
        status, answer = await refused(http, d, params)
        assert status == 500
        assert answer["error"]["message"] == "Internal server error"
    assert told(d)["transfers_in"]["failed"] == 1
    await nothing_left(p, d)
    assert text(await chat(http, d, ASK))


async def test_late_reads_may_get_whatever_is_there(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, lease=0.05, late_reads="blocks", kv_tokens=1024)
    right = text(await chat(http, await start(), ASK))
    first = await prefill(http, p, ASK)
    await until(lambda: told(p)["leases_expired"] == 1)
    second = await chat(http, d, ASK, kv_transfer_params=first["kv_transfer_params"], cache_salt="a")
    assert text(second) == right
    assert told(p)["notifications_late"] == 1
    for number in range(4):
        await chat(http, p, [user(f"{number}, and something else than before. {STORY}")])
    third = await chat(http, d, ASK, kv_transfer_params=first["kv_transfer_params"], cache_salt="b")
    assert text(third) != right
    assert text(await chat(http, d, ASK, cache_salt="b")) != right
    await nothing_left(p, d)


async def test_recomputing_is_the_other_policy(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, lease=0.05, load_failure="recompute")
    first = await prefill(http, p, ASK)
    await until(lambda: told(p)["leases_expired"] == 1)
    second = await chat(http, d, ASK, kv_transfer_params=first["kv_transfer_params"])
    assert text(second) == text(await chat(http, await start(), ASK))
    assert d.stats()["computed_tokens"] == second["usage"]["prompt_tokens"]
    await nothing_left(p, d)


async def test_heartbeats_lengthen_the_lease_while_the_request_waits(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, lease=1.0, max_running=1, time_scale=0.1)
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    body = {"model": "sim", "messages": [user("long")], "max_tokens": 20000, "ignore_eos": True}
    busy = asyncio.ensure_future(http.post(d.url + CHAT, json=body))
    await until(lambda: d.stats()["running"] == 1)
    waiting = asyncio.ensure_future(chat(http, d, ASK, kv_transfer_params=params))
    await asyncio.sleep(2.0)
    assert told(p)["leases_expired"] == 0
    assert told(p)["pinned_blocks"] > 0
    busy.cancel()
    assert text(await waiting) == text(await chat(http, await start(), ASK))
    await nothing_left(p, d)


async def test_a_refusal_at_the_door_frees_the_blocks(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, max_queued=0)
    p.core.ranks[0].scheduler.max_queued = None
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    assert (await refused(http, d, params))[0] == 503
    await nothing_left(p, d)
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    assert (await refused(http, d, params, temperature=-1))[0] == 400
    await nothing_left(p, d)
    d.faults.add("queue_full")
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    assert (await refused(http, d, params))[0] == 503
    await nothing_left(p, d)
    assert told(p)["leases_expired"] == 0
    assert told(p)["notifications_late"] == 0


async def test_what_is_held_already_is_not_sent_again(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    tokens = (await both(http, p, d, ASK))[0]["usage"]["prompt_tokens"]
    before = d.stats()["transferred_tokens"]
    assert before == tokens
    first, second = await both(http, p, d, ASK)
    # The last token's block is never a hit.
    assert d.stats()["transferred_tokens"] - before == tokens - (tokens - 1) // 16 * 16
    assert cached(second) == cached(first) == (tokens - 1) // 16 * 16
    await nothing_left(p, d)


async def test_foreign_kv_answers_otherwise_and_stays(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    other = [user("Zeta eta theta, and nothing of what was said before. " + STORY)]
    params = (await prefill(http, p, other))["kv_transfer_params"]
    right = text(await chat(http, await start(), ASK))
    wrong = await chat(http, d, ASK, kv_transfer_params=params)
    assert text(wrong) != right
    later = await chat(http, d, ASK)
    assert cached(later) > 0
    assert text(later) != right
    assert text(await chat(http, d, ASK, cache_salt="fresh")) == right
    assert told(d)["foreign_blocks"] > 0
    await nothing_left(p, d)


async def test_the_next_turn_reads_back_from_the_decode_engine(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, bidirectional=True)
    history: list[Any] = [user(STORY)]
    params: Any = PREFILL
    for _ in range(3):
        first = await prefill(http, p, history, kv_transfer_params=params)
        if params is not PREFILL:
            assert cached(first) == params["remote_num_tokens"]
        second = await chat(http, d, history, kv_transfer_params=first["kv_transfer_params"], **LENGTHY)
        assert text(second) == text(await chat(http, await start(), history, **LENGTHY))
        params = second["kv_transfer_params"]
        assert params["do_remote_decode"] is True
        assert params["do_remote_prefill"] is False
        assert params["remote_engine_id"] == d.engine_id
        assert params["remote_blocks_expiry_time"] > 0
        assert "remote_prefill_cached_tokens" not in params
        usage = second["usage"]
        assert params["remote_num_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] - 1
        history += [{"role": "assistant", "content": text(second)}, user("And then?")]
    assert told(d)["pinned_blocks"] > 0
    assert told(p)["transfers_in"]["count"] == 2
    # They are to be used once: who reads them again gets nothing.
    await prefill(http, p, history, kv_transfer_params=params)
    status, _ = await refused(http, p, params, messages=[*history, user("x")], cache_salt="elsewhere")
    assert status == 500


async def test_a_short_turn_is_computed_rather_than_read_back(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, bidirectional=True)
    first = await prefill(http, p, ASK)
    second = await chat(http, d, ASK, kv_transfer_params=first["kv_transfer_params"], max_tokens=20)
    history = [*ASK, {"role": "assistant", "content": text(second)}, user("And then?")]
    again = await prefill(http, p, history, kv_transfer_params=second["kv_transfer_params"])
    assert cached(again) == first["usage"]["prompt_tokens"] // 16 * 16
    assert told(p)["transfers_in"]["count"] == 0
    await until(lambda: told(d)["pinned_blocks"] == 0)


async def test_stale_blocks_of_the_decode_engine_corrupt_and_poison(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, bidirectional=True)
    _, second = await both(http, p, d, ASK)
    params = second["kv_transfer_params"]
    other = [user("Something else entirely. " + STORY + STORY)]
    right = text(await chat(http, await start(), other))
    first = await prefill(http, p, other, kv_transfer_params=params)
    assert cached(first) == params["remote_num_tokens"]
    bad = await chat(http, d, other, kv_transfer_params=first["kv_transfer_params"])
    assert text(bad) != right
    later = await chat(http, p, other)
    assert cached(later) >= params["remote_num_tokens"] // 16 * 16
    assert text(later) != right


async def test_blocks_of_a_decode_engine_go_after_their_time(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, bidirectional=True, blocks_ttl=0.1)
    await both(http, p, d, ASK)
    await until(lambda: told(d)["leases_expired"] == 1)
    await nothing_left(p, d)


async def test_a_stream_ends_with_the_parameters_and_carries_ids(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, bidirectional=True)
    first = await prefill(http, p, ASK, return_token_ids=True)
    body = {
        "model": "sim",
        "messages": ASK,
        "kv_transfer_params": first["kv_transfer_params"],
        "return_token_ids": True,
    }
    got = await events(http, d, CHAT, body)
    assert got[0]["prompt_token_ids"] == first["prompt_token_ids"]
    finish = next(chunk for chunk in got[:-1] if chunk["choices"][0]["finish_reason"])
    assert finish["kv_transfer_params"]["remote_engine_id"] == d.engine_id
    ids = [token for chunk in got[1:-1] for token in chunk["choices"][0]["token_ids"] or []]
    prompt = len(first["prompt_token_ids"])
    assert finish["kv_transfer_params"]["remote_num_tokens"] == prompt + len(ids) - 1
    assert all(chunk["kv_transfer_params"] is None for chunk in got[1:-2])


async def test_completions_and_their_choices(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    body = {"model": "sim", "prompt": STORY, "n": 3}
    first = await post(http, p, "/v1/completions", {**body, "n": 1, "max_tokens": 1, "kv_transfer_params": PREFILL})
    params = first["kv_transfer_params"]
    second = await post(http, d, "/v1/completions", {**body, "kv_transfer_params": params})
    whole = await post(http, await start(), "/v1/completions", body)
    assert [c["text"] for c in second["choices"]] == [c["text"] for c in whole["choices"]]
    await nothing_left(p, d)


async def test_a_restart_gives_another_engine(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    name, port = p.engine_id, p.side_port
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    await p.restart()
    assert p.engine_id != name
    assert p.side_port == port
    assert told(p)["pinned_blocks"] == 0
    assert (await refused(http, d, params))[0] == 500
    assert text((await both(http, p, d, ASK))[1]) == text(await chat(http, await start(), ASK))
    await nothing_left(p, d)
    named = await start(engine_id="mine", connector="nixl")
    await named.restart()
    assert named.engine_id == "mine"


async def test_death_in_the_middle_of_a_transfer(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    p.faults.add("transfer_stall", count=2)
    for end in (p.restart, p.kill):
        params = (await prefill(http, p, ASK))["kv_transfer_params"]
        asked = asyncio.ensure_future(refused(http, d, params))
        await until(lambda: told(d)["receiving"] == 1)
        assert d.stats()["kv_blocks_used"] > 0
        await asyncio.sleep(0.05)
        await end()
        assert (await asked)[0] == 500
        await nothing_left(d)


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_transfer_that_fails(start: Start, http: aiohttp.ClientSession, side: str) -> None:
    p, d = await pair(start, lease=0.2)
    engine = p if side == "p" else d
    async with http.post(engine.url + "/sim/faults", json={"kind": "transfer_fail"}) as answer:
        assert answer.status == 200
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    assert (await refused(http, d, params))[0] == 500
    assert engine.faults.listing() == []
    await nothing_left(p, d)


async def test_a_prefill_that_is_forgotten_and_notes_that_are_lost(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, lease=0.2)
    p.faults.add("forget")
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    assert told(p)["pinned_blocks"] == 0
    assert (await refused(http, d, params))[0] == 500
    d.faults.add("notify_lost")
    await both(http, p, d, ASK)
    assert told(p)["pinned_blocks"] > 0
    await nothing_left(p, d)
    assert told(p)["leases_expired"] == 2
    assert told(d)["notifications_lost"] == 1


async def test_an_answer_that_is_lost_keeps_blocks_for_a_lease(start: Start, http: aiohttp.ClientSession) -> None:
    p, _ = await pair(start, lease=0.2)
    p.faults.add("lost_answer")
    with pytest.raises(aiohttp.ClientConnectionError):
        await prefill(http, p, ASK)
    assert told(p)["pinned_blocks"] > 0
    await nothing_left(p)


@pytest.mark.parametrize("where", ["receiving", "waiting"])
async def test_a_client_that_leaves_the_decode_engine(start: Start, where: str) -> None:
    p, d = await pair(start, max_running=1, time_scale=0.1)
    async with aiohttp.ClientSession() as http:
        params = (await prefill(http, p, ASK))["kv_transfer_params"]
        if where == "receiving":
            p.faults.add("transfer_stall")
        else:
            body = {"model": "sim", "messages": [user("long")], "max_tokens": 8000, "ignore_eos": True}
            busy = asyncio.ensure_future(http.post(d.url + CHAT, json=body))
            await until(lambda: d.stats()["running"] == 1)
        asked = asyncio.ensure_future(refused(http, d, params))
        await until(lambda: told(d)["receiving"] + d.stats()["waiting"] == 1)
        asked.cancel()
        if where == "waiting":
            busy.cancel()
    await nothing_left(p, d)
    assert told(d)["aborts"] == 1
    assert told(p)["leases_expired"] == 0


async def test_metrics_tell_of_the_connector(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start)
    await both(http, p, d, ASK)
    async with http.get(d.url + "/metrics") as answer:
        page = await answer.text()
    assert "vllm:nixl_num_kv_expired_reqs_total" in page
    assert 'vllm:nixl_xfer_time_seconds_count{engine="0",model_name="sim"} 1.0' in page
    tokens = float(d.stats()["transferred_tokens"])
    source = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="external_kv_transfer"}'
    assert f"{source} {tokens}" in page
    async with http.get((await start()).url + "/metrics") as answer:
        assert "nixl" not in await answer.text()


async def test_an_engine_without_connector_takes_no_notice(start: Start, http: aiohttp.ClientSession) -> None:
    alone = await start()
    answer = await prefill(http, alone, ASK)
    assert answer["kv_transfer_params"] is None
    await nothing_left(alone)


async def test_pinned_memory_makes_others_wait(start: Start, http: aiohttp.ClientSession) -> None:
    p, _ = await pair(start, kv_tokens=512, lease=0.3)
    await prefill(http, p, ASK)
    assert p.stats()["kv_blocks_used"] > 16
    other = asyncio.ensure_future(prefill(http, p, [user("Something else. " + STORY)]))
    await until(lambda: p.stats()["waiting"] == 1)
    assert (await other)["kv_transfer_params"]
    await nothing_left(p)


@pytest.mark.parametrize("rule", ["boundary", "ends", "every:64"])
async def test_a_hybrid_model_is_pulled_whole(start: Start, http: aiohttp.ClientSession, rule: str) -> None:
    p, d = await pair(start, hybrid=rule)
    history: list[Any] = []
    for turn in range(3):
        history.append(user(f"{STORY} {turn}"))
        first, second = await both(http, p, d, history)
        assert text(second) == text(await chat(http, await start(), history))
        assert cached(first) == cached(second)
        history.append({"role": "assistant", "content": text(second)})
    assert d.stats()["computed_tokens"] == 0
    await nothing_left(p, d)


async def test_events_tell_of_what_has_come_and_not_before(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, events=True, hash_seed=1)
    p.faults.add("transfer_stall", seconds=0.3)
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    asked = asyncio.ensure_future(chat(http, d, ASK, kv_transfer_params=params))
    await until(lambda: told(d)["receiving"] == 1)
    assert await happened(d) == []
    await asked
    ours, theirs = [[event for event in await happened(engine) if "Stored" in event["type"]] for engine in (p, d)]
    computed = [number for event in ours for number in event["block_hashes"]]
    brought = [number for event in theirs for number in event["block_hashes"]]
    assert brought[: len(computed)] == computed
    await nothing_left(p, d)


async def test_what_a_failed_pull_was_to_bring_is_nobodys_hit(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, lease=0.3)
    p.faults.add("transfer_stall", seconds=0.2)
    p.faults.add("transfer_fail")
    params = (await prefill(http, p, ASK))["kv_transfer_params"]
    failing = asyncio.ensure_future(refused(http, d, params))
    await until(lambda: told(d)["receiving"] == 1)
    meanwhile = await chat(http, d, ASK)
    assert cached(meanwhile) == 0
    assert (await failing)[0] == 500
    assert text(meanwhile) == text(await chat(http, d, ASK))
    await nothing_left(p, d)
