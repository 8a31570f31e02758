"""What stands inside of requests and answers, in KV events and in the configuration."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gateway.addresses import hidden, hidden_in_events
from gateway.canonical import ALL, canonical
from gateway.config import parse
from gateway.config_reader import ConfigError
from gateway.dialects import all_dialects
from gateway.dialects.fields import GUARDED, NAMING, append, splice
from gateway.engines.events import apply, decode, polled
from gateway.errors import BadRequest
from gateway.http.incoming import Incoming, Shape
from gateway.http.relay import Relay
from gateway.http.sse import boundary, events, first_event, payload, spans
from gateway.outline import Unread, outline
from gateway.prompt import Thinking
from kv_index.blocks import BlockIndex
from tests.fuzz.targets import Target, cuts

# -- bodies -------------------------------------------------------------------------------------------------------------

DIALECTS = all_dialects()
ROUTES = [(dialect, route) for dialect in DIALECTS.values() for route in dialect.routes.values() if not route.opaque]


def parsed(body: bytes) -> tuple[bool, Any]:
    """Whether ``body`` is JSON, by Python's own reader, and what it says."""
    try:
        return True, json.loads(body.decode(), parse_constant=_none)
    except (ValueError, RecursionError):
        return False, None


def _none(constant: str) -> None:
    raise ValueError(constant)


def run_body(data: bytes) -> None:
    """The first byte says which dialect and route."""
    if not data:
        return
    dialect, route = ROUTES[data[0] % len(ROUTES)]
    body = data[1:]
    good, told = parsed(body)
    try:
        reading = dialect.read(route, body, light=bool(data[0] & 0x80))
    except BadRequest:
        return
    assert isinstance(told, dict) or not good, "an object is taken that is none"
    if good:
        assert reading.model == (told.get("model") or None) or reading.model == told.get("model")
    assert all(name in GUARDED for name in reading.guarded)
    list(reading.session())
    for name in NAMING:
        reading.field(name)
    for ask in (reading.salt, reading.ids, reading.tool):
        if ask is not None:
            ask()
    for thinking in Thinking if reading.make_prompt is not None else ():
        try:
            prompt = reading.make_prompt(thinking)
        except BadRequest:
            continue
        assert isinstance(prompt.text, bytes)
        assert 0 <= prompt.lead <= len(prompt.text)
        ends = list(prompt.earlier_ends())
        assert ends == sorted(ends, reverse=True)
        assert all(0 <= end <= len(prompt.text) for end in ends)
    if good:
        _spliced(body, told)


def _spliced(body: bytes, told: dict[str, Any]) -> None:
    found = json.loads(splice(body, cut=GUARDED, add={"x-added": b"[1]"}))
    assert found == {**{name: value for name, value in told.items() if name not in GUARDED}, "x-added": [1]}
    assert json.loads(append(body, b'"x-added":[1]')) == {**told, "x-added": [1]}


def run_canonical(data: bytes) -> None:
    """The first byte says which kind of request."""
    kind, body = ("chat", "completions", "messages", "responses")[data[0] % 4 if data else 0], data[1:]
    changed, steps = canonical(kind, body, ALL)
    assert (changed is body) is not bool(steps)
    if steps:
        (good, told), (was, before) = parsed(changed), parsed(body)
        assert good or not was, "it was JSON before"
        assert canonical(kind, changed, ALL)[0] == changed, "twice is not once"
        if good and was and "volatile" not in steps:
            assert {name: told[name] for name in told if name != "tools"} == {
                name: before[name] for name in before if name != "tools"
            }
            assert len(told["tools"]) == len(before["tools"])
    for thinking in Thinking:
        try:
            outline(kind, body, thinking)
        except Unread:
            return


# -- streams ------------------------------------------------------------------------------------------------------------


class Client:
    """Where a relay writes to."""

    def __init__(self) -> None:
        self.data = b""

    def send(self, data: bytes) -> None:
        self.data += data


def relayed(pieces: list[bytes], chunked: bool, fail: bytes | None = None, veil: bool = False) -> bytes:
    """What a client gets, without its framing."""
    client: Any = Client()
    incoming = Incoming(Shape(b"POST", b"/", [], not chunked))
    relay = Relay(client, incoming, b"head", events=True, sized=False, most=64)
    if veil:
        relay.unasked, relay.usage, relay.veil = True, False, lambda data: hidden_in_events(data, [])
    for piece in pieces:
        relay.data(piece)
    if fail is None:
        relay.finish()
    else:
        relay.fail(fail)
    told: bytes = client.data
    assert told.startswith(b"head")
    told = told[4:]
    if not chunked:
        return told
    body = b""
    while not told.startswith(b"0\r\n\r\n"):
        size, _, told = told.partition(b"\r\n")
        assert int(size, 16) > 0
        body, told = body + told[: int(size, 16)], told[int(size, 16) :]
        assert told.startswith(b"\r\n")
        told = told[2:]
    assert told == b"0\r\n\r\n"
    return body


def run_sse(data: bytes) -> None:
    pieces = cuts(data)
    assert 0 <= boundary(data) <= len(data)
    found = list(spans(data))
    assert all(start <= end < past for start, end, past in found)
    assert [data[start:end] for start, end, _ in found] == list(events(data))
    first = first_event(data)
    assert first is None or first in list(events(data))
    for event in events(data):
        payload(event)
        for dialect in DIALECTS.values():
            dialect.failure(event)
            dialect.opens(event)
    for dialect in DIALECTS.values():
        for streamed in (False, True):
            dialect.usage(data, streamed)
    for chunked in (True, False):
        assert relayed(pieces, chunked) == relayed([data] if data else [], chunked) == data
    whole = relayed(pieces, True, fail=b"event: error\n\n")
    assert whole.endswith(b"event: error\n\n")
    assert data.startswith(whole[: -len(b"event: error\n\n")].removesuffix(b"\n\n"))
    if b"error" not in data:
        assert relayed(pieces, True, veil=True) == data


def run_addresses(data: bytes) -> None:
    once = hidden(data, [])
    assert not re.search(rb"(?<![\w.:])10\.\d{1,2}\.\d{1,2}\.\d{1,2}(?![\w:]|\.\d)", once)
    good, _ = parsed(data)
    if good:
        assert parsed(once)[0], "it was JSON before"


# -- KV events and configuration ----------------------------------------------------------------------------------------


def run_events(data: bytes) -> None:
    try:
        batch = decode(data)
    except ValueError:
        pass
    else:
        index = BlockIndex()
        index.add(0)
        apply(batch.events, index, 0)
        index.check()
    good, told = parsed(data)
    if good:
        found, ids = polled(told)
        assert all(isinstance(each, int) for each in ids)
        index = BlockIndex()
        index.add(0)
        apply(found, index, 0)
        index.check()


def run_config(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        parse(text, {"KEY": "value"})
    except ConfigError as refusal:
        problems = refusal.problems
        assert problems
        assert all(problem.message for problem in problems)


CHAT = json.dumps(
    {
        "model": "m",
        "stream": True,
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1.0, "a": [True]}}}],
        "metadata": {"user_id": "u"},
        "session_params": {"id": "x"},
        "kv_transfer_params": {"a": 1},
    }
).encode()
STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [1] * 32,
    "block_size": 16,
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [2, b"12345678"], "medium": "CPU"}
BODY_WORDS = [
    *(
        json.dumps(name).encode() + b":"
        for name in ("model", "messages", "content", "role", "tools", "input", "prompt")
    ),
    *(json.dumps(name).encode() + b":" for name in ("stream", "system", "metadata", "text", "type", *GUARDED[:4])),
    *(
        b"null",
        b"true",
        b"1e400",
        b"NaN",
        b'""',
        b'"\\ud800"',
        b"[]",
        b"{}",
        b"[",
        b"]",
        b"{",
        b"}",
        b",",
        b":",
        b"\\u0065",
    ),
    *(b'"user"', b'"tool"', b'"assistant"', b'"tool_result"', b'"thinking"', b"\xff", b"\xed\xa0\x80", b"9" * 30),
]
STREAM_WORDS = [
    *(
        b"data: ",
        b"event: error\n",
        b"\n\n",
        b"\r\n\r\n",
        b"\r\r",
        b"\n\r\n",
        b": c\n",
        b"data: [DONE]\n\n",
        b"\n",
        b"\r",
    ),
    *(
        b'{"error":',
        b'{"choices":[],"usage":{"prompt_tokens":1}}',
        b'"meta_info":{"cached_tokens":',
        b'"message":"m"}}',
    ),
    *(b'{"type":"message_start","message":{"usage":{"input_tokens":1}}}', b"[", b"]", b"9" * 400, b"\xff"),
]
YAML = b"""listen: {port: 8080, max_body: 64M}
workers: [{url: "http://a:1", events: {endpoint: "tcp://a:2"}}]
models: {m: {aliases: [n], policy: cache_aware}}
policies: {p: {name: session, fallback: cache_aware, spill: 1.25}}
tenants: [{name: t, keys: ["${KEY}"], policy: p, hide_addresses: true}]
"""
ADDRESS_WORDS = [b"10.0.0.1", b"::1", b":80", b"http://", b"fe80", b"%eth0", b"8.8.8.8", b"\\/", b"@", b"[", b"]", b"."]
TARGETS = {
    "body": Target(run_body, [bytes([n]) + CHAT for n in range(0, len(ROUTES), 3)], BODY_WORDS),
    "canonical": Target(run_canonical, [bytes([n]) + CHAT for n in range(4)], BODY_WORDS),
    "sse": Target(
        run_sse, [b'data: {"choices":[]}\n\n: c\n\ndata: [DONE]\n\n', b"event: error\r\ndata: x\r\n\r\n"], STREAM_WORDS
    ),
    "addresses": Target(
        run_addresses,
        [b'{"error":"at http://10.0.0.1:80/x"}', b"tcp://[fd00::1]:80 ::1 fe80::1%eth0"],
        ADDRESS_WORDS,
    ),
    "events": Target(
        run_events,
        [
            msgspec.msgpack.encode([1.0, [STORED, REMOVED, {"type": "AllBlocksCleared"}]]),
            msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1] * 16, 16, None], ["BlockRemoved", [1]]]]),
            json.dumps([{"event_id": 1, "data": {"type": "removed", "block_hashes": [1]}}]).encode(),
        ],
        [
            msgspec.msgpack.encode(each)
            for each in (None, -1, 2**63, 1.5, "BlockStored", [], {}, b"x", STORED, REMOVED, [1, 2])
        ],
    ),
    "config": Target(
        run_config,
        [YAML, YAML.replace(b"port", b"prot"), b"a: &a [*a]"],
        [
            *YAML.replace(b"\n", b" ").split(),
            *(b"\n", b"  - ", b"&a ", b"*a", b"<<: ", b"!!python/x ", b"${", b"}", b"null", b"-1", b"1e9s"),
        ],
    ),
}
