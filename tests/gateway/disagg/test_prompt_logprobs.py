"""SGLang's ``/generate`` over a pair: the prompt's logprobs are one engine's; each prompt and answer has its rank's room."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.config import WorkerConfig
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.disagg.rig import Rig, StartRig, events_of, name, story
from tests.gateway.scripted import events, ok
from tests.gateway.talk import Response, once, request, settled

PATH = "/generate"
STREAMS = [False, True]
TEXT = "The quick brown fox jumps over the lazy dog. " * 12
OF_PROMPT = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def asked(text: Any = TEXT, stream: bool = False, n: int = 1, **fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True, **({} if n == 1 else {"n": n})}
    return {"text": text, "sampling_params": sampling, "stream": stream, **fields}


def rows_of(answer: Response, stream: bool) -> list[dict[str, Any]]:
    """The last that was said of each answer, in their order."""
    if not stream:
        told = answer.json()
        return told if isinstance(told, list) else [told]
    last: dict[int, dict[str, Any]] = {}
    for event in events_of(answer.body):
        if event != "[DONE]":
            assert "error" not in event, event
            last[event.get("index", 0)] = event
    return [last[index] for index in sorted(last)]


def seen(row: dict[str, Any]) -> dict[str, Any]:
    """What does not differ from one run to the next."""
    names = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs", *OF_PROMPT)
    return {"text": row["text"], "output_ids": row["output_ids"]} | {
        key: row["meta_info"][key] for key in names if key in row["meta_info"]
    }


async def same(r: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Asked of the pair and of one engine alone, the answer is the same."""
    whole = await once(r.alone.port, request(body, path=PATH))
    assert whole.status == 200, whole.body
    answer = await r.ask(body, path=PATH)
    assert answer.status == 200, answer.body
    assert answer.one("x-warmroute-prefill-worker").split("#")[0] in {name(each) for each in r.prefills}
    stream = bool(body["stream"])
    assert answer.whole
    if stream:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert answer.all("content-length") == []
    else:
        assert answer.one("content-length") == str(len(answer.body))
    mine, other = rows_of(answer, stream), rows_of(whole, stream)
    assert [seen(row) for row in mine] == [seen(row) for row in other]
    return mine


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("start", [None, -1, 0, 1, 50])
async def test_one_prompt(rig: StartRig, start: int | None, stream: bool) -> None:
    r = await rig(dialect="sglang")
    more = {} if start is None else {"logprob_start_len": start}
    (row,) = await same(r, asked(stream=stream, return_logprob=True, **more))
    told = row["meta_info"]["input_token_logprobs"]
    count = row["meta_info"]["prompt_tokens"]
    assert len(told) == (1 if start in (None, -1) else count - (start or 0))
    assert r.d.stats()["computed_tokens"] == 0
    await r.nothing_left()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_batch(rig: StartRig, n: int) -> None:
    r = await rig(dialect="sglang")
    texts = [f"{number} {TEXT[: 90 * number]}" for number in range(1, 4)]
    rows = await same(r, asked(texts, n=n, return_logprob=True, logprob_start_len=0))
    assert len(rows) == 3 * n
    assert len({len(row["meta_info"]["input_token_logprobs"]) for row in rows}) == 3
    assert r.d.stats()["computed_tokens"] == 0
    await r.nothing_left()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_batch_of_one(rig: StartRig, n: int) -> None:
    r = await rig(dialect="sglang")
    assert len(await same(r, asked([TEXT], n=n, return_logprob=True, logprob_start_len=0))) == n
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
async def test_turns_that_go_on(rig: StartRig, stream: bool) -> None:
    """What is cached has logprobs all the same, as far as one engine tells them."""
    r = await rig(dialect="sglang", policy="cache_aware")
    text = TEXT
    for _ in range(3):
        body = asked(text, stream, return_logprob=True, logprob_start_len=0)
        whole = await once(r.alone.port, request(body, path=PATH))
        answer = await r.ask(body, path=PATH)
        assert answer.status == 200
        (mine,), (other,) = rows_of(answer, stream), rows_of(whole, stream)
        assert seen(mine) == seen(other)
        text += other["text"] + " and"
    await r.nothing_left()


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("fault", ["lost_answer", "error500", "reset"])
async def test_a_prefill_engine_that_does_not_tell_them(rig: StartRig, fault: Any, stream: bool) -> None:
    """The decode engine's answer is there, but it is not the whole: another pair tells it."""
    r = await rig(2, 1, dialect="sglang")
    r.p.faults.add(fault, count=1)
    for number in range(2):
        await same(r, asked(f"{number} {TEXT}", stream, return_logprob=True, logprob_start_len=0))
    r.p.faults.clear()
    await r.nothing_left()


# -- bytes --------------------------------------------------------------------------------------------------------------

ODD = b'{ "text":"a\\u00e9" ,"meta_info": {"id":"x","cached_tokens":0,"e":1.50 , "finish_reason":{"type":"stop"}}}'
NATIVE = b'{"text":"b","meta_info":{"id":"x","prompt_tokens":3}}'


@pytest.mark.parametrize("stream", STREAMS)
async def test_without_logprobs_bytes_are_the_decode_engine_s(
    gateway: Begin, scripted: StartScripted, stream: bool
) -> None:
    raw = b"data: " + ODD + b"\n\ndata: [DONE]\n\n"
    p = await scripted(events(b"data: " + NATIVE + b"\n\n") if stream else ok(NATIVE))
    d = await scripted(events(raw) if stream else ok(ODD))
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="sglang", bootstrap="127.0.0.1:8998"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="sglang"),
    )
    answer = await once(running.port, request(asked('say "return_logprob"', stream), path=PATH))
    assert (answer.status, answer.body) == (200, raw if stream else ODD)
    assert p.one.body == d.one.body
    assert "return_logprob" in json.loads(d.one.body)["text"]
    await settled(running)


@pytest.mark.parametrize("stream", STREAMS)
async def test_with_them_what_else_is_there_stays(gateway: Begin, scripted: StartScripted, stream: bool) -> None:
    first = NATIVE[:-2] + b',"input_token_logprobs":[[null,1,null],[-2.0,2,null]]}}'
    raw = b": hi\n\ndata: " + ODD + b"\n\ndata: [DONE]\n\n"
    p = await scripted(events(b"data: " + first + b"\n\ndata: [DONE]\n\n") if stream else ok(first))
    d = await scripted(events(raw) if stream else ok(ODD))
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="sglang", bootstrap="127.0.0.1:8998"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="sglang"),
    )
    answer = await once(running.port, request(asked("a", stream, return_logprob=True), path=PATH))
    assert answer.status == 200
    (told,) = [event for event in events_of(answer.body) if event != "[DONE]"] if stream else [answer.json()]
    right = json.loads(ODD)
    right["meta_info"]["input_token_logprobs"] = [[None, 1, None], [-2.0, 2, None]]
    assert told == right
    if stream:
        assert answer.body.startswith(b": hi\n\n") and answer.body.endswith(b"data: [DONE]\n\n")
    else:
        assert answer.one("content-length") == str(len(answer.body))
    await settled(running)


# -- ranks --------------------------------------------------------------------------------------------------------------


def ranks(r: Rig) -> list[int]:
    """Requests that each rank of the prefill engine ended."""
    return [int(each["finished"]) for each in r.p.stats()["ranks"]]


@pytest.mark.parametrize("stream", STREAMS)
async def test_each_rank_has_its_rooms(rig: StartRig, stream: bool) -> None:
    r = await rig(dialect="sglang", ranks=2)
    served = set()
    for number in range(8):
        answer = await r.check(story(number, stream=stream))
        served.add(answer.one("x-warmroute-prefill-worker"))
    assert served == {name(r.p), f"{name(r.p)}#1"}
    assert all(ranks(r))
    assert r.d.stats()["computed_tokens"] == 0
    assert await r.faults() == {}
    await r.nothing_left()


@pytest.mark.parametrize(("stream", "logprobs"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(("texts", "n"), [(3, 1), (1, 3), (3, 2)])
async def test_batches_and_several_answers_on_ranks(
    rig: StartRig, texts: int, n: int, logprobs: bool, stream: bool
) -> None:
    r = await rig(dialect="sglang", ranks=2)
    for turn in range(4):
        text = [f"{turn} {number} {TEXT[: 90 * number]}" for number in range(1, texts + 1)]
        more = {"return_logprob": True, "logprob_start_len": 0} if logprobs else {}
        rows = await same(r, asked(text if texts > 1 else text[0], stream, n, **more))
        assert len(rows) == texts * n
    assert r.d.stats()["computed_tokens"] == 0
    assert await r.faults() == {}
    await r.nothing_left()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_several_answers_of_the_other_routes(rig: StartRig, path: str) -> None:
    r = await rig(dialect="sglang", ranks=2)
    for turn in range(4):
        said = f"{turn} {TEXT}"
        prompt = {"prompt": said} if path == "/v1/completions" else {"messages": [{"role": "user", "content": said}]}
        body = {"model": "sim", "n": 2, "max_tokens": 9, "temperature": 0, **prompt}
        whole = await once(r.alone.port, request(body, path=path))
        answer = await r.ask(body, path=path)
        assert answer.status == 200, answer.body
        assert [text(choice) for choice in answer.json()["choices"]] == [text(c) for c in whole.json()["choices"]]
    assert r.d.stats()["computed_tokens"] == 0
    await r.nothing_left()


def text(choice: dict[str, Any]) -> str:
    """What one answer says."""
    return str(choice["text"] if "text" in choice else choice["message"]["content"])
