"""KV events as subscribers see them: frames, numbers, replay, faults, and where an engine says they are."""

from __future__ import annotations

import asyncio
import base64
import socket
import subprocess
import sys
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from load_tests.engine import Engine, EngineOptions
from load_tests.engine.options import OptionError
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.talk import LONG, post, user
from tests.load_tests.engine.wiretap import END, Batch, batches, frames_from, frames_of_replay, heard, subscribed


async def complete(http: aiohttp.ClientSession, engine: Engine, tokens: list[int], **fields: Any) -> dict[str, Any]:
    """One completion of a prompt of token ids; a single generated token unless told otherwise."""
    return await post(http, engine, "/v1/completions", {"prompt": tokens, "max_tokens": 1, **fields})


async def launch(start: Start, dialect: str = "vllm", **options: Any) -> Engine:
    defaults: dict[str, Any] = {"events": True, "block_size": 4, "time_scale": 0}
    return await start(dialect, **{**defaults, **options})


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_batch_is_topic_number_and_events(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    engine = await launch(start, dialect, topic="kv@here")
    await complete(http, engine, list(range(1, 10)))
    async with subscribed(engine, topic=b"kv@") as sub:
        await complete(http, engine, list(range(101, 110)))
        (batch,) = await heard(sub, 1)
    assert (batch.topic, batch.seq) == (b"kv@here", 1)
    seconds, events, rank = msgspec.msgpack.decode(batch.payload)
    assert isinstance(seconds, float)
    assert rank == 0
    assert events[0]["type"] == "BlockStored"
    assert events[0]["token_ids"] == list(range(101, 109))


async def test_a_topic_that_is_not_subscribed_is_not_heard(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, topic="other")
    await complete(http, engine, list(range(9)))
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv")
    sub.connect(engine.events_endpoints[0])
    async with subscribed(engine, topic=b"other"):
        assert not await sub.poll(0)
    context.destroy(linger=0)


async def test_replay_has_the_topic_and_ends_with_a_mark(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, topic="t")
    for name in range(3):
        await complete(http, engine, [name] * 5)
    answers = await frames_of_replay(engine, 1)
    assert [answer[:3] for answer in answers[:-1]] == [[b"", b"t", n.to_bytes(8, "big")] for n in (1, 2)]
    assert answers[-1] == [b"", b"", END, b""]
    assert await frames_of_replay(engine, 99) == [[b"", b"", END, b""]]


async def test_older_builds_replay_without_topic(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, topic="t", event_format="positional")
    await complete(http, engine, [1] * 5)
    first, last = await frames_of_replay(engine)
    assert len(first) == 3
    assert first[:2] == [b"", bytes(8)]
    assert last == [b"", END, b""]
    (event,) = msgspec.msgpack.decode(first[2])[1]
    name, hashes, parent, tokens, *rest = event
    assert (name, len(hashes), parent, tokens) == ("BlockStored", 1, None, [1] * 4)
    assert rest == [4, None, "GPU", None, [None], 0, "full_attention", None]


async def test_only_the_last_batches_can_be_replayed(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, buffer_steps=2)
    for name in range(5):
        await complete(http, engine, [name] * 5)
    assert [batch.seq for batch in await batches(engine)] == [3, 4]


async def test_a_replay_request_of_another_shape_is_ignored(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(engine.replay_endpoints[0])
    await dealer.send_multipart([bytes(8)])
    await dealer.send_multipart([b"", bytes(8), b"more"])
    await dealer.send_multipart([b"", bytes(8)])
    first = await asyncio.wait_for(dealer.recv_multipart(), 5)
    assert first[2] == bytes(8)
    context.destroy(linger=0)


async def test_numbers_start_again_after_a_restart_on_the_same_ports(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    where = (engine.events_endpoints, engine.replay_endpoints)
    for name in range(3):
        await complete(http, engine, [name] * 5)
    await engine.restart()
    assert (engine.events_endpoints, engine.replay_endpoints) == where
    assert await batches(engine) == []
    await complete(http, engine, [1] * 5)
    (batch,) = await batches(engine)
    assert batch.seq == 0
    assert batch.events[0]["type"] == "BlockStored"


async def test_a_killed_engine_leaves_its_ports(start: Start) -> None:
    first = await launch(start)
    port = int(first.events_endpoints[0].rpartition(":")[2])
    await first.kill()
    second = await launch(start, events_port=port)
    assert second.events_endpoints == [f"tcp://127.0.0.1:{port}"]


async def test_a_port_that_is_taken_stops_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="KV events"):
            await Engine.start(EngineOptions(events_port=taken.getsockname()[1]))


async def test_without_replay_there_is_no_endpoint(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, events_replay=False)
    assert len(engine.events_endpoints) == 1
    assert engine.replay_endpoints == []
    async with http.get(engine.url + "/kv_event_sources") as answer:
        assert (await answer.json())["0"]["replay_endpoint"] is None


async def test_vllm_tells_where_its_events_are(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, topic="kv", buffer_steps=77)
    async with http.get(engine.url + "/kv_event_sources") as answer:
        assert await answer.json() == {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": engine.events_endpoints[0],
                "replay_endpoint": engine.replay_endpoints[0],
                "buffer_steps": 77,
                "hwm": 100000,
                "max_queue_size": 100000,
                "topic": "kv",
            }
        }
    async with http.get((await start("vllm")).url + "/kv_event_sources") as answer:
        assert answer.status == 404


async def test_sglang_tells_where_its_events_are(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start, "sglang", block_size=8, topic="kv")
    async with http.get(engine.url + "/server_info") as answer:
        found = (await answer.json())["kv_events"]
    assert f"tcp://{found['endpoint_host']}:{found['endpoint_port_base']}" == engine.events_endpoints[0]
    assert engine.replay_endpoints[0].endswith(f":{found['replay_endpoint_port_base']}")
    assert (found["publisher"], found["topic"], found["block_size"], found["dp_size"]) == ("zmq", "kv", 8, 1)
    async with http.get((await start("sglang")).url + "/server_info") as answer:
        assert (await answer.json())["kv_events"] is None


async def test_dropped_batches_leave_a_gap_that_replay_can_fill(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    async with subscribed(engine) as sub:
        engine.events.drop(2)
        for name in (2, 3, 4):
            await complete(http, engine, [name] * 5)
        (batch,) = await heard(sub, 1)
        assert batch.seq == 3
        assert [each.seq for each in await batches(engine)] == [0, 1, 2, 3]
        engine.events.drop(1, replayable=False)
        for name in (5, 6):
            await complete(http, engine, [name] * 5)
        assert [each.seq for each in await batches(engine)] == [0, 1, 2, 3, 5]


async def test_held_batches_come_later_in_order(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    async with subscribed(engine) as sub:
        engine.events.hold()
        for name in (2, 3):
            await complete(http, engine, [name] * 5)
        assert len(await batches(engine)) == 1
        engine.events.resume()
        assert [batch.seq for batch in await heard(sub, 2)] == [1, 2]
        engine.events.hold(0.01)
        await complete(http, engine, [4] * 5)
        assert [batch.seq for batch in await heard(sub, 1)] == [3]


async def test_a_batch_can_come_twice_and_a_payload_can_be_rubbish(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    async with subscribed(engine) as sub:
        engine.events.repeat()
        (again,) = await heard(sub, 1)
        assert again == (await batches(engine))[0]
        engine.events.inject(b"\xc1 no msgpack")
        assert await heard(sub, 1) == [Batch(b"", 1, b"\xc1 no msgpack")]
        await complete(http, engine, [2] * 5)
        assert (await heard(sub, 1))[0].seq == 2


async def test_a_stopped_publisher_says_nothing_and_counts_nothing(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    engine.events.stop()
    await complete(http, engine, [1] * 5)
    engine.events.resume()
    await complete(http, engine, [2] * 5)
    (batch,) = await batches(engine)
    assert batch.seq == 0
    assert batch.events[0]["token_ids"] == [2] * 4


async def test_faults_are_ordered_over_http_too(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await launch(start)
    await complete(http, engine, [1] * 5)
    await post(http, engine, "/sim/events", {"action": "drop", "batches": 1})
    await post(http, engine, "/sim/events", {"action": "inject", "payload": base64.b64encode(b"one").decode()})
    await post(http, engine, "/sim/events", {"action": "repeat"})
    await post(http, engine, "/sim/events", {"action": "hold"})
    await complete(http, engine, [2] * 5)
    (listed,) = await post(http, engine, "/sim/events", {"action": "inject", "payload": ""})
    assert (listed["next_seq"], listed["held"]) == (2, 2)
    assert (listed["endpoint"], listed["replay_endpoint"]) == (engine.events_endpoints[0], engine.replay_endpoints[0])
    await post(http, engine, "/sim/events", {"action": "resume"})
    assert [batch.payload == b"one" for batch in await batches(engine)] == [False, True, False, False]
    for wrong in ({"action": "sing"}, {"action": "inject", "payload": "?"}, {"action": "drop", "rank": 7}):
        async with http.post(engine.url + "/sim/events", json=wrong) as answer:
            assert answer.status == 400


async def test_engines_without_events_publish_none(start: Start, http: aiohttp.ClientSession) -> None:
    engine = await start("vllm")
    await post(http, engine, "/v1/chat/completions", {"messages": [user(LONG)]})
    assert engine.events_endpoints == engine.replay_endpoints == []
    async with http.get(engine.url + "/sim/events") as answer:
        assert await answer.json() == []


def test_the_package_imports_no_zmq_until_events_are_wanted() -> None:
    script = "import sys, load_tests.engine.__main__; print('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


async def test_a_process_says_where_its_events_are(http: aiohttp.ClientSession) -> None:
    command = [sys.executable, "-m", "load_tests.engine", "--events", "any", "--events-topic", "x", "--ranks", "2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        lines = [(await asyncio.wait_for(process.stdout.readline(), 20)).decode().split() for _ in range(3)]
        url, events, replays = lines[0][2], lines[1][2:], lines[2][2:]
        async with http.get(url + "/kv_event_sources") as answer:
            told = await answer.json()
        assert [told[key]["endpoint"] for key in ("0", "1")] == events
        assert [told[key]["replay_endpoint"] for key in ("0", "1")] == replays
        body, headers = {"prompt": [1] * 17, "max_tokens": 1}, {"X-Data-Parallel-Rank": "1"}
        async with http.post(url + "/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
        assert [len(await frames_from(endpoint)) for endpoint in replays] == [1, 2]
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dialect": "llamacpp", "events": True}, "publishes no KV events"),
        ({"events_port": 70_000}, "events_port must be"),
        ({"event_format": "xml"}, "event_format must be"),
        ({"event_hashes": "md5"}, "event_hashes must be"),
        ({"events": True, "buffer_steps": 0}, "buffer_steps must be"),
        ({"ranks": 0}, "ranks must be"),
        ({"dialect": "openai", "ranks": 2}, "no data-parallel ranks"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        EngineOptions(**wrong)
