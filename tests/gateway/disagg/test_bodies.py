"""What each half of a pair is sent, and what it is never sent; whole answers against those of one engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway.config import Config, WorkerConfig
from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.disagg.rig import Rig, StartRig, events_of, name, story
from tests.gateway.scripted import Scripted, events, ok
from tests.gateway.talk import once, request, settled, until
from tests.load_tests.engine.pairs import STORY

PARAMS = b'{"do_remote_prefill": true,"remote_block_ids":[[1, 2]], "remote_engine_id":"e\\u00e9", "x":1.50}'
PREFILLED = b'{"id":"a","choices":[{"index":0,"message":{"content":"t"}}],"kv_transfer_params":' + PARAMS + b"}"
DELTA = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


async def scripts(gateway: Begin, scripted: StartScripted, *answers: bytes) -> tuple[Running, Scripted, Scripted]:
    """A pair whose every byte is written here."""
    p = await scripted(ok(PREFILLED))
    d = await scripted(*(answers or (ok(),)))
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="nixl"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="nixl"),
    )
    return running, p, d


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_what_each_is_sent(gateway: Begin, scripted: StartScripted, path: str) -> None:
    running, p, d = await scripts(gateway, scripted, events(DELTA, b"data: [DONE]\n\n"))
    body: dict[str, Any] = {
        "model": "sim",
        "stream": True,
        "max_tokens": 77,
        "min_tokens": 5,
        "stream_options": {"include_usage": True},
        "own": {"deep": [1, 2.50]},
        "prompt" if path == COMPLETIONS else "messages": "hi" if path == COMPLETIONS else [],
    }
    if path != COMPLETIONS:
        body["messages"] = [{"role": "user", "content": "hi é"}]
    if path == CHAT:
        body["max_completion_tokens"] = 78
    answer = await once(running.port, request(body, "X-Own: 1", "X-Request-Id: mine", path=path))
    assert answer.status == 200
    first, second = json.loads(p.one.body), json.loads(d.one.body)
    asked = first.pop("kv_transfer_params")
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert second.pop("kv_transfer_params") == json.loads(PARAMS)
    assert b'"kv_transfer_params":' + PARAMS in d.one.body, "byte for byte"
    assert second == body
    changed = {"stream": False, "max_tokens": 1} | ({"max_completion_tokens": 1} if path == CHAT else {})
    if path != MESSAGES:
        # KV is handed over of an answer that ended by its length.
        changed["ignore_eos"] = True
    kept = {key: value for key, value in body.items() if key not in ("stream_options", "min_tokens", "stop")}
    assert first == kept | changed
    for seen in (p.one, d.one):
        assert (seen.target, seen.all("x-own"), seen.all("x-request-id")) == (path, ["1"], ["mine"])
    assert answer.one("x-warmroute-worker") == f"127.0.0.1:{d.port}"
    assert answer.one("x-warmroute-prefill-worker") == f"127.0.0.1:{p.port}"
    await settled(running)


GUARDED = {
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {},
    "disaggregated_params": {},
    "bootstrap_host": "h",
    "bootstrap_port": 1,
    "bootstrap_room": 2,
    "bootstrap_pair_key": "k",
    "decode_tp_size": 4,
    "routed_dp_rank": 1,
    "data_parallel_rank": 1,
    "disagg_prefill_dp_rank": 1,
}


@pytest.mark.parametrize("key", GUARDED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_what_engines_trust_is_not_the_client_s_to_say(
    gateway: Begin, scripted: StartScripted, key: str, path: str
) -> None:
    running, p, d = await scripts(gateway, scripted)
    said = '"prompt":"hi"' if path == COMPLETIONS else '"messages":[{"role":"user","content":"hi"}]'
    value = json.dumps(GUARDED[key])
    start = f'{{"model":"sim","max_tokens":3,{said}'
    escaped = f"\\u{ord(key[0]):04x}{key[1:]}"
    odd = (f'"{key}":{value},"{key}":{value}', f'"{escaped}":{value}', f'"{key}":{value},"{escaped}":{value}')
    for members in odd:
        answer = await once(running.port, request(f"{start},{members}}}".encode(), path=path))
        assert answer.status == 400
        assert key in answer.json()["error"]["message"]
    assert not p.seen and not d.seen
    headers = ("X-Data-Parallel-Rank: 1", "x_data_parallel_rank: 1", "X-Override-Bootstrap-Room: 3")
    answer = await once(running.port, request(f'{start},"{key}":{value}}}'.encode(), *headers, path=path))
    assert answer.status == 200
    for seen in (p.one, d.one):
        told = json.loads(seen.body)
        assert told.get(key) != GUARDED[key]
        assert key in ("kv_transfer_params",) or key not in told
        assert not [n for n, _ in seen.fields if "rank" in n.lower() or "override" in n.lower()]


WHOLE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "user", "content": STORY}], "n": 2}),
    (COMPLETIONS, {"prompt": STORY, "n": 2}),
    (COMPLETIONS, {"prompt": [STORY, "b"]}),
    (COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]]}),
    (COMPLETIONS, {"prompt": STORY, "echo": True}),
    (CHAT, {"messages": [{"role": "user", "content": STORY}], "prompt_logprobs": 1}),
    ("/v1/embeddings", {"input": STORY}),
    ("/v1/responses", {"input": STORY}),
]


@pytest.mark.parametrize(("path", "asked"), WHOLE)
async def test_what_cannot_be_split_is_served_by_one(rig: StartRig, path: str, asked: dict[str, Any]) -> None:
    r = await rig(1, 1)
    body = {"model": "sim", "max_tokens": 4, **asked}
    answer = await r.ask(body, path=path)
    assert answer.status == 200, answer.body
    assert answer.all("x-warmroute-prefill-worker") == []
    assert r.p.stats()["finished"] + r.d.stats()["finished"] in (1, 2)
    assert r.d.stats()["transferred_tokens"] == 0
    await r.nothing_left()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_usage_is_that_of_one_request(rig: StartRig, dialect: str, stream: bool) -> None:
    r = await rig(1, 1, dialect, policy="cache_aware")
    for turn in range(3):
        body = story("same", stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        answer = await r.check(body)
        whole = await once(r.alone.port, request(body))
        mine, other = [
            [e["usage"] for e in events_of(a.body) if e != "[DONE]" and e.get("usage")]
            if stream
            else [a.json()["usage"]]
            for a in (answer, whole)
        ]
        assert len(mine) == 1
        for key in ("prompt_tokens", "completion_tokens"):
            assert mine[0][key] == other[0][key], turn
    assert r.d.stats()["computed_tokens"] == 0 or answer.all("x-warmroute-prefill-worker") == []
    await r.nothing_left()


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [True, False])
async def test_prompt_tokens_are_charged_once_and_to_who_computes(rig: StartRig, dialect: str, stream: bool) -> None:
    r = await rig(1, 1, dialect, policy="least_load", time_scale=3.0)
    asked = asyncio.ensure_future(r.ask(story("x", stream=stream, max_tokens=400, ignore_eos=True)))
    p, d = r.target(r.p), r.target(r.d)
    await until(lambda: p.running)
    assert (p.running, d.running) == (1, 1)
    assert len(p.ahead) == 1 and len(d.ahead) == 0 and d.wait == 0
    await until(lambda: r.d.stats()["running"] and r.d.stats()["disaggregation"]["receiving"] == 0)
    await until(lambda: p.running == 0)
    assert (p.wait, p.active, d.running, d.wait) == (0, 0, 1, 0)
    asked.cancel()
    await r.nothing_left()


async def dry_run(r: Rig, body: dict[str, Any], *fields: tuple[str, str]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{r.running.admin.port}/route"
    async with aiohttp.ClientSession() as http, http.post(url, data=json.dumps(body), headers=dict(fields)) as answer:
        assert answer.status == 200, await answer.text()
        told: dict[str, Any] = await answer.json()
        return told


def always_pairs(config: Config) -> None:
    config.policies["pairs"] = {"name": "disaggregated", "prefill": "cache_aware"}


async def test_who_holds_what_after_a_turn(rig: StartRig) -> None:
    r = await rig(1, 1, policy="pairs", change=always_pairs)
    body = story("x", max_tokens=300, ignore_eos=True)
    answer = await r.check(body, "X-Session-Id: s")
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    said = answer.json()["choices"][0]["message"]["content"]
    prompt = answer.json()["usage"]["prompt_tokens"]
    messages = [*body["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    told = await dry_run(r, {**body, "messages": messages}, ("X-Session-Id", "s"))
    (row,) = told["candidates"]
    assert told["pair"] == {"prefill": name(r.p), "decode": name(r.d), "kv_from": None}
    assert row["holding_tokens"]["device"] == pytest.approx(prompt + 299, abs=16), "the decode engine holds the answer"
    again = await r.ask({**body, "messages": messages, "max_tokens": 2}, "X-Session-Id: s")
    predicted = int(again.one("x-warmroute-predicted-cached-tokens"))
    assert predicted == pytest.approx(prompt, abs=16), "the prefill engine does not"
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == pytest.approx(prompt, abs=16)
    await r.nothing_left()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_one_stage_alone_serves_and_pairs_come_back(rig: StartRig, lost: str, stream: bool) -> None:
    r = await rig(1, 1)
    worker = r.running.fleet.workers[name(r.p if lost == "prefill" else r.d)]
    r.running.fleet.set_state(worker, State.DOWN, "for a test")
    answer = await r.check(story(1, stream=stream))
    assert answer.one("x-warmroute-worker") == name(r.d if lost == "prefill" else r.p)
    assert answer.all("x-warmroute-prefill-worker") == []
    r.running.fleet.set_state(worker, State.READY, "again")
    answer = await r.check(story(2, stream=stream))
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    await r.nothing_left()
