"""SGLang's protocol between two engines: rooms, who waits for whom, and what becomes of it when one leaves."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.pairs import CHAT, STORY, chat, nothing_left, pair, post, text, told, until, user
from tests.load_tests.engine.talk import cached

ASK = [user(STORY)]
ROOMS = count(10_000)


def room(p: Engine, number: int | None = None) -> dict[str, Any]:
    given = next(ROOMS) if number is None else number
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": p.side_port, "bootstrap_room": given}


async def said(http: aiohttp.ClientSession, engine: Engine, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(engine.url + path, json={"model": "sim", **body}) as answer:
        data = await answer.read()
        return answer.status, json.loads(data) if answer.content_type == "application/json" else data.decode()


async def legs(
    http: aiohttp.ClientSession, p: Engine, d: Engine, body: dict[str, Any], path: str = CHAT
) -> list[tuple[int, Any]]:
    """The answers of both, asked at once."""
    return list(await asyncio.gather(said(http, p, path, body), said(http, d, path, body)))


async def test_both_at_once_say_what_one_alone_would(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    alone = await start("sglang")
    history: list[Any] = []
    for turn in range(3):
        history.append(user(f"{STORY} {turn}"))
        (_, first), (status, second) = await legs(http, p, d, {"messages": history, **room(p)})
        assert status == 200
        assert text(second) == text(await chat(http, alone, history))
        assert first["usage"]["completion_tokens"] == 1
        assert first["choices"][0]["finish_reason"] == "length"
        assert text(second).startswith(text(first))
        assert cached(first) == cached(second)
        history.append({"role": "assistant", "content": text(second)})
    assert cached(first) > 100
    assert d.stats()["computed_tokens"] == d.stats()["cached_tokens"] == 0
    assert told(d)["transfers_in"] == told(p)["transfers_out"]
    await nothing_left(p, d)


async def test_a_decode_engine_with_a_cache_is_sent_the_rest(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang", decode_radix=True)
    first = (await legs(http, p, d, {"messages": ASK, **room(p)}))[1][1]
    history = [*ASK, {"role": "assistant", "content": text(first)}, user("And then?")]
    before = told(d)["transfers_in"]["tokens"]
    (_, prefilled), (_, second) = await legs(http, p, d, {"messages": history, **room(p)})
    prompt = second["usage"]["prompt_tokens"]
    # The decode engine has the reply as well.
    assert prompt - cached(second) == told(d)["transfers_in"]["tokens"] - before
    assert cached(second) > cached(prefilled)
    assert text(second) == text(await chat(http, await start("sglang"), history))
    await nothing_left(p, d)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_each_waits_for_the_other(start: Start, http: aiohttp.ClientSession, first: str) -> None:
    p, d = await pair(start, "sglang")
    body = {"messages": ASK, **room(p)}
    one, other = (p, d) if first == "prefill" else (d, p)
    waiting = asyncio.ensure_future(said(http, one, CHAT, body))
    await until(lambda: told(one)["rooms"] == 1)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert p.stats()["kv_blocks_used"] == 0
    if first == "decode":
        assert d.stats()["kv_blocks_used"] > 0
    assert (await said(http, other, CHAT, body))[0] == 200
    assert (await waiting)[0] == 200
    await nothing_left(p, d)


async def test_a_request_without_room_is_refused(start: Start, http: aiohttp.ClientSession) -> None:
    for engine in await pair(start, "sglang"):
        for more in ({}, {"stream": True}):
            status, answer = await said(http, engine, CHAT, {"messages": ASK, "rid": "r7", **more})
            assert status == 400
            wanted = "Invalid request: Disaggregated request received without bootstrap room id. req.rid='r7'"
            assert answer["message"] == wanted
    whole = await start("sglang")
    assert (await said(http, whole, CHAT, {"messages": ASK, "bootstrap_room": 5}))[0] == 200


async def test_ranks_follow_the_room(start: Start, http: aiohttp.ClientSession) -> None:
    p = await start("sglang", role="prefill", ranks=3)
    d = await start("sglang", role="decode", ranks=2)
    for number in (30, 31, 32):
        assert [status for status, _ in await legs(http, p, d, {"messages": ASK, **room(p, number)})] == [200, 200]
    assert [rank["finished"] for rank in p.stats()["ranks"]] == [1, 1, 1]
    status, answer = await said(http, p, CHAT, {"messages": ASK, "routed_dp_rank": 1, **room(p, 33)})
    assert status == 500
    assert "follow_bootstrap_room conflict: dispatched to dp_rank 1 but bootstrap_room 33 implies dp_rank 0." in str(
        answer
    )
    body = {"messages": ASK, "disagg_prefill_dp_rank": 1, **room(p, 36)}
    done = await asyncio.gather(said(http, p, CHAT, {**body, "routed_dp_rank": 1}), said(http, d, CHAT, body))
    assert [status for status, _ in done] == [200, 200]
    await nothing_left(p, d)


async def test_the_bootstrap_server(start: Start, http: aiohttp.ClientSession) -> None:
    p = await start("sglang", role="prefill", ranks=2, block_size=4)
    base = f"http://127.0.0.1:{p.side_port}"
    everything = "prefill_dp_rank={0}&prefill_cp_rank={1}&target_tp_rank={1}&target_pp_rank={1}"
    async with http.get(f"{base}/health") as answer:
        assert await answer.text() == "OK"
    async with http.get(f"{base}/route?" + everything.format(-1, -1)) as answer:
        info = await answer.json()
    assert (info["dp_size"], info["page_size"], info["follow_bootstrap_room"]) == (2, 4, True)
    async with http.get(f"{base}/route?" + everything.format(1, 0)) as answer:
        assert set(await answer.json()) == {"rank_ip", "rank_port"}
    async with http.get(f"{base}/route?" + everything.format(5, 0)) as answer:
        assert answer.status == 404
    async with http.get(f"{base}/route?prefill_dp_rank=0") as answer:
        assert answer.status == 400
    async with http.post(f"{base}/register_dp_rank", json={"bootstrap_room": 9, "dp_rank": 1}) as answer:
        assert answer.status == 200
    async with http.post(f"{base}/query_dp_ranks", json={"bootstrap_rooms": ["9", "10"]}) as answer:
        assert await answer.json() == {"9": 1}
    async with http.get(f"{p.url}/server_info") as answer:
        told_of = await answer.json()
    assert told_of["disaggregation_mode"] == "prefill"
    assert told_of["disaggregation_bootstrap_port"] == p.side_port


async def test_batches_have_a_room_for_each(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    alone = await start("sglang")
    texts = [STORY, "Something else. " + STORY]
    params = {"sampling_params": {"max_new_tokens": 30}}
    one = {"bootstrap_host": ["127.0.0.1"] * 2, "bootstrap_port": [p.side_port] * 2, "bootstrap_room": [11, 12]}
    whole = await post(http, alone, "/generate", {"text": texts, **params})
    for fields in (one, room(p, 50)):
        (_, first), (_, second) = await legs(http, p, d, {"text": texts, **params, **fields}, "/generate")
        assert [each["text"] for each in second] == [each["text"] for each in whole]
        assert [each["meta_info"]["completion_tokens"] for each in first] == [1, 1]
    several = {"text": STORY, "sampling_params": {"max_new_tokens": 30, "n": 3}}
    whole = await post(http, alone, "/generate", several)
    _, (_, second) = await legs(http, p, d, {**several, **room(p)}, "/generate")
    assert [each["text"] for each in second] == [each["text"] for each in whole]
    several["bootstrap_room"] = [70]
    _, (_, second) = await legs(http, p, d, {**room(p), **several}, "/generate")
    assert [each["text"] for each in second] == [each["text"] for each in whole]
    bad = {"text": texts, **room(p), "bootstrap_room": [1, 2, 3]}
    assert (await said(http, p, "/generate", bad))[0] == 400
    await nothing_left(p, d)


async def test_logprobs_of_the_prompt_are_the_prefill_engines(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    body = {"text": STORY, "return_logprob": True, "logprob_start_len": 0, **room(p)}
    (_, first), (_, second) = await legs(http, p, d, body, "/generate")
    assert len(first["meta_info"]["input_token_logprobs"]) == first["meta_info"]["prompt_tokens"]
    assert second["meta_info"]["input_token_logprobs"] == []
    assert len(second["meta_info"]["output_token_logprobs"]) == second["meta_info"]["completion_tokens"]
    alone = await post(http, await start("sglang"), "/generate", {**body})
    assert alone["meta_info"]["input_token_logprobs"] == first["meta_info"]["input_token_logprobs"]


async def test_a_prefill_engine_that_nobody_comes_to(start: Start, http: aiohttp.ClientSession) -> None:
    p, _ = await pair(start, "sglang", bootstrap_timeout=0.1)
    body = {"messages": ASK, "rid": "r1", **room(p, 77)}
    status, answer = await said(http, p, CHAT, body)
    assert status == 500
    wanted = "Prefill bootstrap failed for request rank=0 req.rid='r1' req.bootstrap_room=77 with exception "
    assert answer["message"].startswith(wanted + "KVTransferError(bootstrap_room=77): Request 77 timed out after")
    status, stream = await said(http, p, CHAT, {**body, "stream": True})
    assert status == 200
    first = json.loads(stream.split("\n\n")[0].removeprefix("data: "))
    assert first["error"]["code"] == 500
    assert stream.endswith("data: [DONE]\n\n")
    await nothing_left(p)
    assert told(p)["bootstrap_failed"] == 2


async def test_a_decode_engine_whose_kv_does_not_come(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang", waiting_timeout=0.1)
    status, answer = await said(http, d, CHAT, {"messages": ASK, **room(p, 78)})
    assert status == 500
    assert answer["message"].startswith("Decode transfer failed for request rank=0 decode_req.req.rid=")
    assert "in KVPoll.WaitingForInput" in answer["message"]
    await nothing_left(p, d)
    nowhere = {**room(p), "bootstrap_port": 9}
    status, answer = await said(http, d, CHAT, {"messages": ASK, **nowhere})
    assert status == 500
    assert answer["message"].startswith("Decode handshake failed for request rank=0")
    await nothing_left(p, d)


async def test_who_leaves_frees_its_own_side(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    p.faults.add("transfer_stall")
    body = {"messages": ASK, "rid": "left-1", **room(p)}
    both = [asyncio.ensure_future(said(http, engine, CHAT, body)) for engine in (p, d)]
    await until(lambda: told(p)["sending"] == told(d)["receiving"] == 1)
    async with http.post(p.url + "/abort_request", json={"rid": "left-"}) as answer:
        assert answer.status == 200
    await both[0]
    assert p.stats()["kv_blocks_used"] == 0
    # Nobody told the other side, which still holds all it has taken.
    await asyncio.sleep(0.1)
    assert not both[1].done()
    assert d.stats()["kv_blocks_used"] > 0
    async with http.post(d.url + "/abort_request", json={"rid": "left-"}) as answer:
        assert answer.status == 200
    await both[1]
    await nothing_left(p, d)
    assert told(p)["aborts"] == told(d)["aborts"] == 1


@pytest.mark.parametrize("stall", [True, False])
async def test_a_decode_client_that_disconnects(start: Start, stall: bool) -> None:
    p, d = await pair(start, "sglang")
    async with aiohttp.ClientSession() as http:
        body = {"messages": ASK, **room(p)}
        if stall:
            p.faults.add("transfer_stall")
            prefilling = asyncio.ensure_future(said(http, p, CHAT, body))
        async with aiohttp.ClientSession() as other:
            leaving = asyncio.ensure_future(said(other, d, CHAT, body))
            await until(lambda: told(d)["receiving"] == 1 and told(p)["rooms"] == 1)
            await until(lambda: not stall or told(p)["sending"] == 1)
            leaving.cancel()
        await until(lambda: told(d)["rooms"] == 0)
        if stall:
            status, answer = await prefilling
            assert status == 500
            assert "Aborted by AbortReq." in answer["message"]
    await nothing_left(p, d)


async def test_a_prefill_client_that_disconnects_before_anybody_came(start: Start) -> None:
    p, _ = await pair(start, "sglang")
    async with aiohttp.ClientSession() as http:
        leaving = asyncio.ensure_future(said(http, p, CHAT, {"messages": ASK, **room(p)}))
        await until(lambda: told(p)["rooms"] == 1)
        leaving.cancel()
    await nothing_left(p)


async def test_a_prefill_engine_that_dies(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang", heartbeat=0.05)
    p.faults.add("transfer_stall")
    body = {"messages": ASK, **room(p)}
    both = asyncio.ensure_future(asyncio.gather(*(said(http, e, CHAT, body) for e in (p, d)), return_exceptions=True))
    await until(lambda: told(p)["sending"] == told(d)["receiving"] == 1)
    port = p.side_port
    await p.kill()
    dead, (status, answer) = await both
    assert isinstance(dead, aiohttp.ClientError)
    assert status == 500
    assert f"Lost connection with prefill instance (bootstrap_addr: 127.0.0.1:{port})" in answer["message"]
    await nothing_left(d)


async def test_a_prefill_engine_that_comes_back_knows_no_room(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang", heartbeat=0.05, waiting_timeout=0.6)
    p.faults.add("transfer_stall")
    body = {"messages": ASK, **room(p)}
    first = asyncio.ensure_future(asyncio.gather(*(said(http, e, CHAT, body) for e in (p, d)), return_exceptions=True))
    await until(lambda: told(p)["sending"] == told(d)["receiving"] == 1)
    await p.restart()
    _, (status, answer) = await first
    assert status == 500
    assert "in KVPoll.WaitingForInput" in answer["message"]
    p.faults.clear()
    assert [status for status, _ in await legs(http, p, d, {"messages": ASK, **room(p)})] == [200, 200]
    await nothing_left(p, d)


async def test_transfers_that_fail_and_memory_that_runs_out(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    p.faults.add("transfer_fail")
    (one, first), (two, second) = await legs(http, p, d, {"messages": ASK, **room(p)})
    assert (one, two) == (500, 500)
    assert first["message"].startswith("Prefill transfer failed for request rank=0")
    assert "Failed to get kvcache from prefill instance, it might be dead" in second["message"]
    d.faults.add("transfer_fail")
    body = {"messages": ASK, **room(p)}
    leaving = asyncio.ensure_future(said(http, p, CHAT, body))
    assert (await said(http, d, CHAT, body))[0] == 500
    leaving.cancel()
    await nothing_left(p, d)
    d.faults.add("out_of_memory", count=2)
    (one, _), (two, second) = await legs(http, p, d, {"messages": ASK, **room(p)})
    assert (one, two) == (200, 503)
    assert second["message"] == "Retracted under decode memory pressure without a KV backup. Retry later."
    _, (status, stream) = await legs(http, p, d, {"messages": ASK, "stream": True, **room(p)})
    assert status == 200
    assert '"code":503' in stream
    await nothing_left(p, d)
    d.faults.add("out_of_memory", after_events=4)
    _, (status, stream) = await legs(
        http, p, d, {"messages": ASK, "stream": True, "ignore_eos": True, "max_tokens": 400, **room(p)}
    )
    assert status == 200
    assert stream.count('"content":') > 3
    assert '"code":503' in stream
    await nothing_left(p, d)


async def test_a_decode_engine_without_room_gives_up_the_youngest(start: Start, http: aiohttp.ClientSession) -> None:
    p = await start("sglang", role="prefill")
    d = await start("sglang", role="decode", kv_tokens=900)
    fields = {"max_tokens": 400, "ignore_eos": True}
    done = await asyncio.gather(*(legs(http, p, d, {"messages": ASK, **fields, **room(p)}) for _ in range(2)))
    assert sorted(answers[1][0] for answers in done) == [200, 503]
    await nothing_left(p, d)


async def test_different_bodies_in_one_room_give_another_text(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    where = room(p)
    other = [user("Nothing of the kind. " + STORY)]
    _, (status, answer) = await asyncio.gather(
        said(http, p, CHAT, {"messages": other, **where}), said(http, d, CHAT, {"messages": ASK, **where})
    )
    assert status == 200
    assert text(answer) != text(await chat(http, await start("sglang"), ASK))


async def test_load_and_metrics_tell_of_the_halves(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, "sglang")
    await legs(http, p, d, {"messages": ASK, **room(p)})
    waiting = asyncio.ensure_future(said(http, p, CHAT, {"messages": ASK, **room(p)}))
    await until(lambda: told(p)["rooms"] == 1)
    async with http.get(p.url + "/v1/loads") as answer:
        section = (await answer.json())["loads"][0]["disaggregation"]
    assert section["mode"] == "prefill"
    assert section["prefill_bootstrap_queue_reqs"] == 1
    assert section["kv_transfer_latency_ms"] > 0
    async with http.get(p.url + "/metrics") as answer:
        page = await answer.text()
    assert 'sglang:num_prefill_bootstrap_queue_reqs{engine_type="prefill",model_name="sim"} 1.0' in page
    async with http.get(d.url + "/metrics") as answer:
        assert "sglang:num_decode_transfer_queue_reqs" in await answer.text()
    waiting.cancel()
    await nothing_left(p, d)
