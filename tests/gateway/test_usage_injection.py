"""The gateway may ask for usage that the client did not ask for: the client sees no byte of it, the counters do."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.config import Config, ModelConfig, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Script, Scripted, Seen, chunk, ok
from tests.gateway.talk import CHAT, Raw, admin, chat, request

SAID = [
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n',
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" two"}}]}\n\n',
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
]
USAGE = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[],"usage":{"prompt_tokens":900,'
    b'"completion_tokens":7,"total_tokens":907,"prompt_tokens_details":{"cached_tokens":800}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG = "the quick brown fox jumps over the lazy dog " * 20


def asked(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": LONG}], stream=True, max_tokens=5, **fields)


async def direct(url: str, body: bytes, path: str = CHAT) -> bytes:
    async with await Raw.connect(int(url.rpartition(":")[2])) as client:
        return (await client.ask(request(body, "Content-Type: application/json", path=path))).body


async def through(running: Running, body: bytes, path: str = CHAT) -> bytes:
    async with await Raw.connect(running.port) as client:
        answer = await client.ask(request(body, "Content-Type: application/json", path=path))
        assert answer.status == 200, answer.body
        assert answer.whole
        return answer.body


async def total(running: Running, name: str) -> float:
    rows = [line for line in (await admin(running, "/metrics")).splitlines() if line.startswith(name + "{")]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def normal(body: bytes) -> bytes:
    """Without what is another one in every answer."""
    events = []
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: {"):
            told = json.loads(event[6:])
            told.pop("id", None)
            told.pop("created", None)
            told.pop("timings", None)
            event = b"data: " + json.dumps(told).encode()
        events.append(event)
    return b"\n\n".join(events)


async def taking(scripted: StartScripted, reply: bytes | Script) -> Scripted:
    """A worker that looks like an engine that takes ``stream_options``; its one answer to a request is ``reply``."""

    async def script(seen: Seen) -> None:
        if seen.method == "GET":
            listing = b'{"object":"list","data":[{"id":"sim","object":"model","owned_by":"llamacpp"}]}'
            await seen.write(ok(listing if seen.target.endswith("/v1/models") else b'{"total_slots":4}'))
        elif isinstance(reply, bytes):
            await seen.write(reply)
        else:
            await reply(seen)

    return await scripted(script)


def sent(worker: Scripted) -> Seen:
    """The one request that is no probe."""
    (seen,) = [seen for seen in worker.seen if seen.method == "POST"]
    return seen


def counting(url: str) -> WorkerConfig:
    # Below a path of its own, where the script answers probes as well.
    return WorkerConfig(url + "/engine", engine="llamacpp")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp"])
async def test_the_client_of_a_stream_sees_what_the_engine_says_and_no_usage(
    gateway: Begin, engine: StartEngine, dialect: str, path: str
) -> None:
    one, other = await engine(dialect, seed=1), await engine(dialect, seed=1)
    running = await gateway(one, policy="cache_aware")
    told = asked() if path == CHAT else {"model": "sim", "prompt": LONG, "stream": True, "max_tokens": 5}
    body = json.dumps(told).encode()
    mine, theirs = await through(running, body, path), await direct(other.url, body, path)
    assert b'"usage":{' not in theirs
    assert normal(mine) == normal(theirs)
    assert mine.endswith(DONE)
    assert await total(running, "warmroute_prompt_tokens_total") > 100
    again = await through(running, body, path)
    assert normal(again) == normal(await direct(other.url, body, path))
    assert await total(running, "warmroute_cached_tokens_total") > 100


@pytest.mark.parametrize("wanted", [True, False, None])
@pytest.mark.parametrize("form", ["compact", "spaced", "first"])
async def test_what_the_client_says_of_usage_stands(
    gateway: Begin, engine: StartEngine, scripted: StartScripted, wanted: bool | None, form: str
) -> None:
    options = None if wanted is None else {"include_usage": wanted}
    told = asked(stream_options=options)
    if form == "first":
        told = {"stream_options": options, **asked()}
    body = json.dumps(told, separators=(",", ":") if form == "compact" else None).encode()
    worker = await taking(
        scripted, HEAD + chunk(b"".join(SAID)) + chunk(USAGE if wanted else b": \n\n") + chunk(DONE) + b"0\r\n\r\n"
    )
    running = await gateway(counting(worker.url), policy="cache_aware")
    got = await through(running, body)
    assert sent(worker).body == body, "not a byte is changed"
    assert got == b"".join(SAID) + (USAGE if wanted else b": \n\n") + DONE


async def test_without_a_policy_that_needs_prefixes_nothing_is_asked_for(
    gateway: Begin, scripted: StartScripted
) -> None:
    for policy in ("round_robin", "least_load", "session"):
        worker = await taking(scripted, HEAD + chunk(b"".join(SAID)) + chunk(DONE) + b"0\r\n\r\n")
        running = await gateway(counting(worker.url), policy=policy)
        body = json.dumps(asked()).encode()
        assert await through(running, body) == b"".join(SAID) + DONE
        assert sent(worker).body == body, policy


async def test_an_engine_that_may_not_take_it_is_not_asked(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(HEAD + chunk(b"".join(SAID)) + chunk(DONE) + b"0\r\n\r\n")
    running = await gateway(worker, policy="cache_aware")
    body = json.dumps(asked()).encode()
    assert await through(running, body) == b"".join(SAID) + DONE
    assert worker.one.body == body


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_dialects_that_have_no_such_option_are_left_alone(
    gateway: Begin, scripted: StartScripted, path: str
) -> None:
    event = b'event: x\ndata: {"type":"x"}\n\n'
    worker = await taking(scripted, HEAD + chunk(event) + b"0\r\n\r\n")
    running = await gateway(counting(worker.url), policy="cache_aware")
    told: dict[str, Any] = {"model": "sim", "stream": True, "max_tokens": 5}
    told |= {"messages": [{"role": "user", "content": LONG}]} if path == "/v1/messages" else {"input": LONG}
    body = json.dumps(told).encode()
    await through(running, body, path)
    assert sent(worker).body == body


@pytest.mark.parametrize("tail", ["", " ", "\n", "\r\n\t ", "}"])
async def test_the_body_that_is_sent_is_the_clients_with_one_more_member(
    gateway: Begin, scripted: StartScripted, tail: str
) -> None:
    worker = await taking(scripted, HEAD + chunk(b"".join(SAID)) + chunk(USAGE + DONE) + b"0\r\n\r\n")
    running = await gateway(counting(worker.url), policy="cache_aware")
    told = asked(odd={"stream_options": 1, "deep": [{}]}) if tail == "}" else asked()
    body = json.dumps(told, indent=1).encode() + tail.replace("}", "").encode()
    assert await through(running, body) == b"".join(SAID) + DONE
    assert json.loads(sent(worker).body) == {**told, "stream_options": {"include_usage": True}}
    assert sent(worker).all("content-length") == [str(len(sent(worker).body))]


def writes(*pieces: bytes) -> Any:
    """Each piece is a chunk, and a read, of its own."""

    async def script(seen: Seen) -> None:
        await seen.write(HEAD)
        for piece in pieces:
            await seen.write(chunk(piece))
            await asyncio.sleep(0.02)
        await seen.write(b"0\r\n\r\n")

    return script


CRLF = [event.replace(b"\n", b"\r\n") for event in (*SAID, USAGE, DONE)]
WHOLE = b"".join(SAID) + USAGE + DONE
SPLITS = {
    "with the end": [*SAID, USAGE + DONE],
    "with what was said": [SAID[0], SAID[1] + SAID[2] + USAGE, DONE],
    "all at once": [WHOLE],
    "in the middle": [*SAID, USAGE[:40], USAGE[40:] + DONE],
    "in its key": [*SAID, USAGE[: USAGE.index(b'usage"')], USAGE[USAGE.index(b'usage"') :] + DONE],
    "before its last byte": [*SAID, USAGE[:-1], USAGE[-1:], DONE],
    "before its blank line": [*SAID, USAGE[:-2], USAGE[-2:] + DONE],
    "in thirds, with its neighbours": [
        SAID[0],
        SAID[1] + SAID[2][:30],
        SAID[2][30:] + USAGE[:9],
        USAGE[9:] + DONE[:5],
        DONE[5:],
    ],
    "byte by byte": [*SAID, *[USAGE[at : at + 1] for at in range(len(USAGE))], DONE],
    "carriage returns": CRLF,
    "carriage returns, all at once": [b"".join(CRLF)],
    "carriage returns, cut in its blank line": [*CRLF[:3], CRLF[3][:-3], CRLF[3][-3:] + CRLF[4]],
    "carriage returns, cut before its last byte": [*CRLF[:3], CRLF[3][:-1], CRLF[3][-1:] + CRLF[4]],
    "comments between": [SAID[0], b": here\n\n", SAID[1], SAID[2], b": here\n\n" + USAGE + b": here\n\n", DONE],
    "no end": [*SAID, USAGE],
}


@pytest.mark.parametrize("name", SPLITS)
async def test_its_event_is_taken_out_however_it_arrives(gateway: Begin, scripted: StartScripted, name: str) -> None:
    pieces = SPLITS[name]
    worker = await taking(scripted, writes(*pieces))
    running = await gateway(counting(worker.url), policy="cache_aware")
    got = await through(running, json.dumps(asked()).encode())
    whole = b"".join(pieces)
    gone = CRLF[3] if CRLF[3] in whole else USAGE
    assert whole.count(gone) == 1
    assert got == whole.replace(gone, b"")
    assert await total(running, "warmroute_prompt_tokens_total") == 900
    assert await total(running, "warmroute_cached_tokens_total") == 800
    assert await total(running, "warmroute_completion_tokens_total") == 7


async def test_words_that_only_look_like_usage_are_passed_on(gateway: Begin, scripted: StartScripted) -> None:
    looks = [
        b'data: {"choices":[{"index":0,"delta":{"content":"\\"choices\\":[] and \\"usage\\":{}"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"usage":{"prompt_tokens":1}}\n\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"choices":[],"usage":null}\n\n',
        b'data: {"usage":null,"choices":[{"index":0,"delta":{"content":"y"}}]}\n\n',
    ]
    worker = await taking(scripted, HEAD + b"".join(map(chunk, [*looks, USAGE, DONE])) + b"0\r\n\r\n")
    running = await gateway(counting(worker.url), policy="cache_aware")
    assert await through(running, json.dumps(asked()).encode()) == b"".join(looks) + DONE


async def test_a_stream_that_ends_in_an_error_is_told_whole(gateway: Begin, scripted: StartScripted) -> None:
    error = b'data: {"error":{"message":"out of memory","type":"server_error","code":500}}\n\n'
    worker = await taking(scripted, HEAD + b"".join(map(chunk, [*SAID[:2], error, DONE])) + b"0\r\n\r\n")
    running = await gateway(counting(worker.url), policy="cache_aware")
    assert await through(running, json.dumps(asked()).encode()) == b"".join(SAID[:2]) + error + DONE


async def test_an_answer_that_is_no_stream_keeps_its_usage(gateway: Begin, scripted: StartScripted) -> None:
    told = b'{"id":"c","choices":[],"usage":{"prompt_tokens":900,"completion_tokens":7}}'
    worker = await taking(
        scripted, b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(told) + told
    )
    running = await gateway(counting(worker.url), policy="cache_aware")
    assert await through(running, json.dumps(asked()).encode()) == told


async def test_a_model_behind_an_alias_is_asked_for_usage_too(gateway: Begin, scripted: StartScripted) -> None:
    worker = await taking(scripted, HEAD + b"".join(map(chunk, [*SAID, USAGE, DONE])) + b"0\r\n\r\n")

    def change(config: Config) -> None:
        config.models["sim"] = ModelConfig(aliases=["other"])

    running = await gateway(counting(worker.url), policy="cache_aware", change=change)
    told = {**asked(), "model": "other"}
    assert await through(running, json.dumps(told).encode()) == b"".join(SAID) + DONE
    assert json.loads(sent(worker).body) == {**asked(), "model": "sim", "stream_options": {"include_usage": True}}


async def test_pipelined_streams_of_both_kinds_keep_their_order_and_their_own_usage(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine()
    running = await gateway(one, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        bodies = [asked() if at % 2 else asked(stream_options={"include_usage": True}) for at in range(8)]
        await client.send(b"".join(request(body) for body in bodies))
        for at in range(8):
            answer = await client.response()
            assert answer.status == 200
            assert (b'"usage":{' in answer.body) is (at % 2 == 0)
            assert answer.body.count(DONE) == 1
