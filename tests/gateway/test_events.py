"""Engines that publish their KV events are predicted to the token, whatever the stream of events goes through."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.config import EventsConfig, WorkerConfig
from gateway.run import Running
from gateway.workers import State
from load_tests.engine import Engine
from load_tests.engine.tokens import tokenize
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, once, request, until

COMPLETIONS = "/v1/completions"


class Told(NamedTuple):
    """What one answer said."""

    predicted: int
    cached: int
    prompt: int
    worker: str
    decision: str
    reply: list[int]


class Talk:
    """One client that sends prompts of token ids, one at a time, and waits for what engines say of each."""

    def __init__(self, running: Running, client: Raw, engines: tuple[Engine, ...]) -> None:
        self.running = running
        self.client = client
        self.engines = engines

    async def ask(self, ids: list[int], session: str, generate: int = 4, settle: bool = True) -> Told:
        body = {"model": "sim", "prompt": ids, "max_tokens": generate, "ignore_eos": True}
        answer = await self.client.ask(request(body, f"X-Session-Id: {session}", path=COMPLETIONS))
        assert answer.status == 200, answer.body
        told = answer.json()
        usage = told["usage"]
        if settle:
            await self.settle()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return Told(
            int(answer.one("x-warmroute-predicted-cached-tokens")),
            cached,
            usage["prompt_tokens"],
            answer.one("x-warmroute-worker"),
            answer.one("x-warmroute-decision"),
            tokenize(told["choices"][0]["text"]),
        )

    async def settle(self) -> None:
        """Until every batch that was published has arrived."""
        await until(lambda: all(heard_all(self.running, engine) for engine in self.engines))


def heard_all(running: Running, engine: Engine) -> bool:
    if engine.core.busy:
        return False
    worker = next(w for w in running.fleet.workers.values() if w.port == engine.port)
    listeners = [running.subscriptions.listeners.get(target.id) for target in worker.targets]
    rows = engine.events.listing()
    return all(
        listener is None or listener.feed.last + 1 >= row["next_seq"]
        for listener, row in zip(listeners, rows, strict=False)
    )


def rungs(running: Running) -> list[tuple[str, str]]:
    """Where every target stands and why."""
    found = [running.index.of(target.id) for target in running.fleet.targets.values()]
    return [(trust.rung.value, trust.reason) for trust in found]


async def exact(running: Running) -> None:
    """Events tell all that engines hold. That is compared with prompts as soon as one comes as token ids."""
    await until(lambda: all(running.index.of(target).whole for target in running.fleet.targets))


async def counted(running: Running, name: str, **labels: str) -> float:
    """The sum of a counter's series that have these labels."""
    total = 0.0
    for line in (await admin(running, "/metrics")).splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


@asynccontextmanager
async def talking(running: Running, *engines: Engine) -> AsyncIterator[Talk]:
    async with await Raw.connect(running.port) as client:
        yield Talk(running, client, engines)


def words(draws: Random, count: int) -> list[int]:
    return [draws.randrange(1, 30_000) for _ in range(count)]


async def converse(talk: Talk, draws: Random, sessions: int, turns: int, shared: int = 100) -> list[Told]:
    """Sessions that share a start, turn by turn, in any order."""
    start = words(draws, shared)
    prompts = {f"s{at}": start + words(draws, draws.randrange(20, 200)) for at in range(sessions)}
    order = [name for name in prompts for _ in range(turns)]
    draws.shuffle(order)
    told = []
    for name in order:
        answer = await talk.ask(prompts[name], name, draws.randrange(1, 40))
        told.append(answer)
        prompts[name] = prompts[name] + answer.reply + words(draws, draws.randrange(5, 80))
    return told


def wrong(told: list[Told]) -> list[tuple[int, Told]]:
    return [(at, each) for at, each in enumerate(told) if each.predicted != each.cached]


DIALECTS = [
    pytest.param("vllm", {}, id="vllm"),
    pytest.param("vllm", {"event_format": "positional"}, id="vllm arrays"),
    pytest.param("vllm", {"event_hashes": "bytes"}, id="vllm digests"),
    pytest.param("vllm", {"event_format": "positional", "event_hashes": "bytes"}, id="vllm arrays digests"),
    pytest.param("vllm", {"block_size": 32}, id="vllm blocks of 32"),
    pytest.param("sglang", {}, id="sglang"),
    pytest.param("sglang", {"block_size": 16}, id="sglang pages of 16"),
]
BOTH = pytest.mark.parametrize("dialect", ["vllm", "sglang"])


@pytest.mark.parametrize(("dialect", "options"), DIALECTS)
async def test_every_prediction_is_what_the_engine_reports(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    engines = [await engine(dialect, events=True, hash_seed=at, time_scale=0, **options) for at in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    async with talking(running, *engines) as talk:
        told = await converse(talk, Random(3), sessions=8, turns=5)
    assert wrong(told) == []
    assert sum(each.cached for each in told) > 0.5 * sum(each.prompt for each in told)
    assert len({each.worker for each in told}) == 2


@pytest.mark.parametrize(("dialect", "options"), DIALECTS)
async def test_so_it_is_while_everything_is_being_evicted(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    engines = [
        await engine(dialect, events=True, hash_seed=at, kv_tokens=2048, time_scale=0, **options) for at in range(2)
    ]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    async with talking(running, *engines) as talk:
        told = await converse(talk, Random(4), sessions=16, turns=5)
    assert wrong(told) == []
    assert sum(each.stats()["evicted_blocks"] for each in engines) >= 50
    partly = [each for each in told if 0 < each.cached < each.prompt - 200]
    assert partly, "nothing was evicted from inside a session"


@BOTH
async def test_forty_sessions_of_four_engines_are_found_where_they_are(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    engines = [await engine(dialect, events=True, hash_seed=at, time_scale=0) for at in range(4)]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    draws = Random(5)
    shared = words(draws, 300)
    prompts = [shared + words(draws, 500) for _ in range(40)]
    # Not through the gateway: only events can tell where they are.
    places = []
    async with aiohttp.ClientSession() as http:
        for prompt in prompts:
            place = draws.randrange(4)
            body = {"model": "sim", "prompt": prompt, "max_tokens": 1}
            async with http.post(engines[place].url + COMPLETIONS, json=body) as answer:
                assert answer.status == 200
            places.append(place)
    async with talking(running, *engines) as talk:
        await talk.settle()
    names = [f"127.0.0.1:{each.port}" for each in engines]
    for prompt, place in zip(prompts, places, strict=True):
        dry = await dry_run(running, [*prompt, 7, 8, 9], "new")
        held = {row["target"]: sum(row["holding_tokens"].values()) for row in dry["candidates"]}
        block = engines[0].options.block_size
        whole, start = len(prompt) // block * block, len(shared) // block * block
        assert held == {name: whole if name == names[place] else start for name in names}


async def test_every_salt_is_a_cache_of_its_own(gateway: Begin, engine: StartEngine) -> None:
    for dialect in ("vllm", "sglang"):
        one = await engine(dialect, events=True, time_scale=0)
        running = await gateway(one, policy="cache_aware")
        await exact(running)
        ids = words(Random(6), 400)
        async with await Raw.connect(running.port) as client:
            seen = []
            for salt in (None, "a", "b", "a", None, "b"):
                body = {"model": "sim", "prompt": ids, "max_tokens": 1}
                if salt is not None:
                    body["cache_salt"] = salt
                answer = await client.ask(request(body, path=COMPLETIONS))
                usage = answer.json()["usage"]
                cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
                seen.append((int(answer.one("x-warmroute-predicted-cached-tokens")), cached))
                await until(lambda running=running, one=one: heard_all(running, one))
        assert all(predicted == cached for predicted, cached in seen), seen
        assert [cached > 0 for _, cached in seen] == [False] * 3 + [True] * 3


# -- a gateway that comes late ----------------------------------------------------------------------------------------


async def served_before(engine: Engine, draws: Random, count: int = 12, size: int = 300) -> list[list[int]]:
    """Prompts that the engine computed before any gateway was there."""
    prompts = [words(draws, size) for _ in range(count)]
    async with aiohttp.ClientSession() as http:
        for prompt in prompts:
            body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
            async with http.post(engine.url + COMPLETIONS, json=body) as answer:
                assert answer.status == 200
    return prompts


@pytest.mark.parametrize(("dialect", "options"), DIALECTS)
async def test_a_gateway_that_comes_late_is_told_everything(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=8192, **options)
    prompts = await served_before(one, Random(7), 60)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    async with talking(running, one) as talk:
        await talk.settle()
        told = [await talk.ask(prompt, f"s{at}", 1) for at, prompt in enumerate(reversed(prompts))]
    assert wrong(told) == []
    assert sum(each.cached > 200 for each in told) >= 15


@pytest.mark.parametrize("options", [{"events_replay": False}, {"buffer_steps": 8}], ids=["no replay", "short replay"])
@BOTH
async def test_what_cannot_be_told_any_more_is_predicted_until_reports_agree(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    one = await engine(dialect, events=True, time_scale=0, **options)
    before = await served_before(one, Random(8), 20)
    running = await gateway(one, policy="cache_aware")
    listener = next(iter(running.subscriptions.listeners.values()))
    await until(lambda: listener.connected)
    await asyncio.sleep(0.3)
    assert [rung for rung, _ in rungs(running)] == ["predicted"]
    draws = Random(9)
    async with talking(running, one) as talk:
        assert (await talk.ask(before[0], "old", 1, settle=False)).predicted == 0
        prompts = {f"s{at}": words(draws, 300) for at in range(4)}
        for _ in range(4):
            for name in prompts:
                told = await talk.ask(prompts[name], name, 2)
                prompts[name] = prompts[name] + told.reply + words(draws, 40)
        assert rungs(running) == [("exact", "reports_agree")]
        told_now = []
        for name in prompts:
            told_now.append(await talk.ask(prompts[name], name, 2))
        assert wrong(told_now) == []


# -- trouble in the stream --------------------------------------------------------------------------------------------


@BOTH
async def test_a_gap_is_filled_by_asking_for_it(gateway: Begin, engine: StartEngine, dialect: str) -> None:
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=4096)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    replays = await counted(running, "warmroute_kv_event_replays_total")
    draws = Random(10)
    told, lost = [], []
    async with talking(running, one) as talk:
        for at in range(12):
            name, prompt = f"s{at}", words(draws, 400)
            one.events.drop(1)
            lost.append(await talk.ask(prompt, name, 1, settle=False))
            await until(lambda: not one.core.busy)
            told.append(await talk.ask(words(draws, 100), f"x{at}", 1))
            told.append(await talk.ask([*prompt, 1, 2, 3], name, 1))
    assert wrong(told) == []
    assert [each.cached for each in told[1::2]] == [400] * 12
    assert rungs(running) == [("exact", "events")]
    name = lost[0].worker
    assert await counted(running, "warmroute_kv_event_gaps_total", target=name) == 12
    assert await counted(running, "warmroute_kv_event_replays_total", target=name) >= replays + 12


@BOTH
async def test_a_gap_that_cannot_be_filled_makes_it_predicted_until_reports_agree(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    one = await engine(dialect, events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(11)
    prompts = {f"s{at}": words(draws, 300) for at in range(6)}
    async with talking(running, one) as talk:
        for name in prompts:
            await talk.ask(prompts[name], name, 1)
        one.events.drop(2, replayable=False)
        await talk.ask(words(draws, 300), "lost", 1, settle=False)
        await until(lambda: not one.core.busy)
        await talk.ask(words(draws, 300), "lost too", 1, settle=False)
        await until(lambda: not one.core.busy)
        await talk.ask(words(draws, 300), "the one that shows it", 1)
        assert rungs(running) == [("predicted", "gap")]
        told = []
        for name in prompts:
            told.append(await talk.ask([*prompts[name], 1], name, 1))
        assert all(each.predicted <= each.cached for each in told)
        assert all(each.predicted >= 300 - 16 for each in told), "what was routed there is still believed"
        assert rungs(running) == [("predicted", "gap")]
        told = await converse(talk, draws, sessions=4, turns=6)
        assert rungs(running) == [("exact", "reports_agree")]
        told = await converse(talk, draws, sessions=4, turns=4)
    assert wrong(told) == []
    target = told[0].worker
    moved = "warmroute_index_moves_total"
    assert await counted(running, moved, target=target, rung="predicted", reason="gap") == 1
    assert await counted(running, moved, target=target, rung="exact", reason="reports_agree") == 1


@BOTH
async def test_batches_that_come_twice_count_once(gateway: Begin, engine: StartEngine, dialect: str) -> None:
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=2048)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(12)
    async with talking(running, one) as talk:
        prompts = [words(draws, 300) for _ in range(5)]
        for at, prompt in enumerate(prompts):
            await talk.ask(prompt, f"a{at}", 1)
            one.events.repeat()
            one.events.repeat()
        assert rungs(running) == [("exact", "events")]
        # All of them have to go, each copy with one removal.
        for at in range(20):
            assert (await talk.ask(words(draws, 300), f"b{at}", 1)).predicted == 0
            one.events.repeat()
        told = [await talk.ask(prompt, f"c{at}", 1) for at, prompt in enumerate(prompts)]
    assert [(each.predicted, each.cached) for each in told] == [(0, 0)] * 5
    assert rungs(running) == [("exact", "events")]


@BOTH
async def test_batches_that_come_live_and_by_replay_leave_no_copies_behind(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=2048)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(13)
    async with talking(running, one) as talk:
        prompts = [words(draws, 200) for _ in range(8)]
        for at in range(0, 8, 2):
            # The first is replayed; the second waits in the socket, and is in the replay too.
            one.events.drop(1)
            await talk.ask(prompts[at], f"a{at}", 1, settle=False)
            await until(lambda: not one.core.busy)
            await talk.ask(prompts[at + 1], f"a{at + 1}", 1)
        for at in range(30):
            assert (await talk.ask(words(draws, 200), f"b{at}", 1)).predicted == 0
        told = [await talk.ask(prompt, f"c{at}", 1) for at, prompt in enumerate(prompts)]
    assert [(each.predicted, each.cached) for each in told] == [(0, 0)] * 8


async def test_a_payload_that_nobody_can_read_costs_nothing_else(gateway: Begin, engine: StartEngine) -> None:
    one = await engine(events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(14)
    rubbish = [b"", b"\xc1", b"rubbish", b"\x93", msgspec.msgpack.encode({"a": 1}), b"\xff" * 1000, b"\x91" * 5000]
    async with talking(running, one) as talk:
        told = []
        for at, payload in enumerate(rubbish):
            one.events.inject(payload)
            told.append(await talk.ask(prompt := words(draws, 200), f"s{at}", 1))
            told.append(await talk.ask([*prompt, 1], f"s{at}", 1))
    assert wrong(told) == []
    # It may have told of blocks that are gone.
    assert rungs(running) in ([("predicted", "unread")], [("exact", "reports_agree")])
    assert await counted(running, "warmroute_kv_events_unread_total", target=told[0].worker) == len(rubbish)


@pytest.mark.parametrize("form", ["map", "positional"])
async def test_an_event_that_nobody_can_read_costs_itself_alone(gateway: Begin, engine: StartEngine, form: str) -> None:
    one = await engine(events=True, time_scale=0, event_format=form)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    prompt = words(Random(15), 64)

    def stored(hashes: list[Any], parent: Any, tokens: list[Any]) -> Any:
        fields: dict[str, Any] = {
            "block_hashes": hashes,
            "parent_block_hash": parent,
            "token_ids": tokens,
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
        }
        return {"type": "BlockStored", **fields} if form == "map" else ["BlockStored", *fields.values()]

    bad: list[Any] = [
        stored(["text"], None, prompt[:16]),
        {"type": "Unheard", "x": 1} if form == "map" else ["Unheard", 1],
        stored([1 << 40], None, ["no", "tokens"]),
        17,
        None,
        "BlockStored",
        [],
        {},
    ]
    events = [stored([1, 2], None, prompt[:32]), *bad, stored([3, 4], 2, prompt[32:])]
    one.events.inject(msgspec.msgpack.encode([1.0, events, 0]))
    (target,) = running.fleet.targets.values()
    await until(lambda: heard_all(running, one))
    assert await counted(running, "warmroute_kv_events_unread_total", target=target.name) == len(bad)
    assert await counted(running, "warmroute_kv_blocks_stored_total", target=target.name) == 4
    async with talking(running, one) as talk:
        # The engine has it not, which is no fault of what was read.
        assert (await talk.ask([*prompt, 1], "s", 1)).predicted == 64
        assert rungs(running) == [("exact", "events")]


# -- engines that forget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no replay"])
@BOTH
async def test_what_an_engine_held_before_its_restart_is_forgotten(
    gateway: Begin, engine: StartEngine, dialect: str, replay: bool
) -> None:
    one = await engine(dialect, events=True, time_scale=0, events_replay=replay)
    running = await gateway(one, policy="cache_aware")
    draws = Random(16)
    prompts = {f"s{at}": words(draws, 300) for at in range(4)}
    (worker,) = running.fleet.workers.values()
    (target,) = worker.targets
    async with talking(running, one) as talk:
        for name in prompts:
            await talk.ask(prompts[name], name, 1, settle=replay)
    for size in (1, 4):
        again = asyncio.create_task(one.restart(1.0))
        await until(lambda: worker.state is State.DOWN)
        await again
        await until(lambda: worker.state is State.READY)
        listeners = running.subscriptions.listeners
        await until(lambda listeners=listeners: target.id in listeners and listeners[target.id].connected)
        # The subscription has to get through as well.
        await asyncio.sleep(0.3)
        async with talking(running, one) as talk:
            for name in list(prompts)[:size]:
                told = await talk.ask(prompts[name], name, 1, settle=replay)
                assert (told.predicted, told.cached) == (0, 0), "nothing is predicted there"
    if replay:
        await exact(running)
    async with talking(running, one) as talk:
        told_all = [await talk.ask([*prompts[name], 1, 2], name, 1, settle=replay) for name in prompts]
        assert wrong(told_all) == []
        assert all(each.cached > 280 for each in told_all)


@BOTH
async def test_an_engine_that_is_told_to_forget_is_believed_to_have(
    gateway: Begin, engine: StartEngine, dialect: str
) -> None:
    one = await engine(dialect, events=True, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(17)
    prompts = {f"s{at}": words(draws, 300) for at in range(4)}
    async with talking(running, one) as talk:
        for name in prompts:
            await talk.ask(prompts[name], name, 1)
        async with aiohttp.ClientSession() as http:
            path = "/reset_prefix_cache" if dialect == "vllm" else "/flush_cache"
            async with http.post(one.url + path) as answer:
                assert answer.status == 200
        if dialect == "vllm":
            # It tells with its next step.
            await talk.ask(words(draws, 100), "step", 1)
        await talk.settle()
        told = [await talk.ask(prompts[name], name, 1) for name in prompts]
        assert [(each.predicted, each.cached) for each in told] == [(0, 0)] * 4
        told = [await talk.ask([*prompts[name], 1], name, 1) for name in prompts]
        assert wrong(told) == []
        assert all(each.cached > 280 for each in told)
    assert [rung for rung, _ in rungs(running)] == ["exact"]


# -- the connection alone ---------------------------------------------------------------------------------------------


class Cable:
    """Stands between a gateway and an engine's events, and can be cut."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._context = zmq.asyncio.Context()
        self.port = 0

    async def plug(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: Any, writer: Any) -> None:
        port = int(self.engine.events_endpoints[0].rpartition(":")[2])
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        self._writers = [writer, far_writer]

        async def pump(source: Any, sink: Any) -> None:
            try:
                while data := await source.read(65536):
                    sink.write(data)
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                sink.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "no replay"])
async def test_a_connection_of_events_that_breaks_costs_exactness_until_it_is_back(
    gateway: Begin, engine: StartEngine, replay: bool
) -> None:
    one = await engine(events=True, time_scale=0)
    cable = Cable(one)
    await cable.plug()
    events = EventsConfig(endpoint=f"tcp://127.0.0.1:{cable.port}", replay=one.replay_endpoints[0] if replay else None)
    running = await gateway(WorkerConfig(one.url, events=events), policy="cache_aware")
    draws = Random(18)
    prompts = {f"s{at}": words(draws, 300) for at in range(4)}
    async with talking(running, one) as talk:
        listener = next(iter(running.subscriptions.listeners.values()))
        await until(lambda: listener.connected)
        # The subscription itself has to get through before anything is published.
        await asyncio.sleep(0.3)
        for name in prompts:
            await talk.ask(prompts[name], name, 1)
        await exact(running)
        cable.cut()
        await until(lambda: rungs(running) == [("predicted", "disconnected")])
        stored = await counted(running, "warmroute_kv_blocks_stored_total")
        await cable.plug()
        await until(lambda: listener.connected)
        await asyncio.sleep(0.3)
        if replay:
            before = await talk.ask(words(draws, 32), "next", 1)
            await exact(running)
            now = await counted(running, "warmroute_kv_blocks_stored_total")
            assert now == stored + before.prompt // 16, "nothing had to be told anew"
        told = [await talk.ask([*prompts[name], 1, 2, 3], name, 1) for name in prompts]
        assert wrong(told) == []
        assert all(each.cached == 288 for each in told)
    cable.cut()


async def test_what_was_missed_while_the_connection_was_broken_is_asked_for(
    gateway: Begin, engine: StartEngine
) -> None:
    one = await engine(events=True, time_scale=0, kv_tokens=2048)
    cable = Cable(one)
    await cable.plug()
    events = EventsConfig(endpoint=f"tcp://127.0.0.1:{cable.port}", replay=one.replay_endpoints[0])
    running = await gateway(WorkerConfig(one.url, events=events), policy="cache_aware")
    await exact(running)
    await asyncio.sleep(0.3)
    draws = Random(19)
    prompts = [words(draws, 300) for _ in range(12)]
    async with talking(running, one) as talk:
        for at, prompt in enumerate(prompts[:6]):
            await talk.ask(prompt, f"s{at}", 1)
        cable.cut()
        await until(lambda: rungs(running) == [("predicted", "disconnected")])
        for at, prompt in enumerate(prompts[6:]):
            await talk.ask(prompt, f"t{at}", 1, settle=False)
        await cable.plug()
        await exact(running)
        told = [await talk.ask([*prompt, 1], f"u{at}", 1) for at, prompt in reversed(list(enumerate(prompts)))]
    assert wrong(told) == []
    assert told[0].cached == 288
    assert told[-1].cached == 0
    cable.cut()


# -- events and prompts of text ---------------------------------------------------------------------------------------


async def test_events_of_engines_whose_prompts_are_text_are_said_once_to_be_of_no_use(
    gateway: Begin, engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [await engine(events=True, time_scale=0) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    await exact(running)
    text = "the quick brown fox jumps over the lazy dog " * 60
    predicted = []
    with caplog.at_level(logging.WARNING, "warmroute"):
        for at in range(8):
            body = chat(messages=[{"role": "user", "content": text + str(at % 2)}], max_tokens=1)
            answer = await once(running.port, request(body, f"X-Session-Id: s{at % 4}"))
            assert answer.status == 200
            predicted.append(int(answer.one("x-warmroute-predicted-cached-tokens")))
    assert predicted[0] == 0
    assert all(each > 400 for each in predicted[4:]), "predicted by what was routed"
    said = [record for record in caplog.records if "KV events" in record.getMessage()]
    assert len(said) == 1
    assert "sim" in said[0].getMessage()
    assert "models.sim.tokenizer" in said[0].getMessage()


# -- ranks ------------------------------------------------------------------------------------------------------------


@BOTH
async def test_every_rank_is_a_target_with_events_of_its_own(gateway: Begin, engine: StartEngine, dialect: str) -> None:
    one = await engine(dialect, events=True, ranks=2, time_scale=0, kv_tokens=8192)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    assert len(running.fleet.targets) == 2
    draws = Random(20)
    async with talking(running, one) as talk:
        told = await converse(talk, draws, sessions=8, turns=5)
        assert wrong(told) == []
        assert len({each.worker for each in told}) == 2
        homes: dict[str, set[str]] = {}
        prompts = {f"n{at}": words(draws, 200) for at in range(6)}
        for _ in range(3):
            for name in prompts:
                answer = await talk.ask(prompts[name], name, 2)
                homes.setdefault(name, set()).add(answer.worker)
                prompts[name] = prompts[name] + answer.reply + words(draws, 30)
        assert all(len(each) == 1 for each in homes.values()), homes
    ranks = one.stats()["ranks"]
    for target, rank in zip(running.fleet.targets.values(), ranks, strict=True):
        size = one.options.block_size
        stored = await counted(running, "warmroute_kv_blocks_stored_total", target=target.name)
        removed = await counted(running, "warmroute_kv_blocks_removed_total", target=target.name)
        assert stored - removed == rank["kv_blocks_cached"], size


async def test_the_events_of_one_rank_may_fail_alone(gateway: Begin, engine: StartEngine) -> None:
    one = await engine(events=True, ranks=2, time_scale=0)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(21)
    async with talking(running, one) as talk:
        for at in range(8):
            await talk.ask(words(draws, 200), f"r{at}", 1)
        one.events.drop(1, rank=1, replayable=False)
        for at in range(8):
            await talk.ask(words(draws, 200), f"s{at}", 1, settle=False)
            await until(lambda: not one.core.busy)
        await talk.settle()
    assert rungs(running) == [("exact", "events"), ("predicted", "gap")]


# -- models with recurrent layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_tokens", [65_536, 4096])
async def test_events_of_hybrid_models_tell_where_they_can_be_resumed(
    gateway: Begin, engine: StartEngine, kv_tokens: int
) -> None:
    one = await engine(events=True, hybrid="boundary", time_scale=0, kv_tokens=kv_tokens)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(22)
    async with talking(running, one) as talk:
        told = await converse(talk, draws, sessions=8, turns=5, shared=203)
        # It shares more than attention needs to keep, and less than any state covers.
        long = words(draws, 600)
        await talk.ask(long, "long", 1)
        branch = await talk.ask(long[:400] + words(draws, 100), "branch", 1)
        again = await talk.ask(long[:400] + words(draws, 100), "branch again", 1)
    assert wrong([*told, branch, again]) == []
    assert branch.cached == 0, "attention alone would say 400"
    assert again.cached == 400, "the state was kept where the other left what was shared"


# -- tiers ------------------------------------------------------------------------------------------------------------


async def dry_run(running: Running, ids: list[int], session: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{running.admin.port}/route?path={COMPLETIONS}"
    body = json.dumps({"model": "sim", "prompt": ids})
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers={"X-Session-Id": session}) as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        pytest.param("vllm", {"offload_events": "full"}, id="vllm"),
        pytest.param("sglang", {}, id="sglang"),
        pytest.param("vllm", {"offload_events": "full", "disk_tokens": 65_536}, id="vllm disk"),
        pytest.param("sglang", {"disk_tokens": 65_536}, id="sglang disk"),
    ],
)
async def test_what_was_moved_to_the_host_is_predicted_and_its_return_has_a_price(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any]
) -> None:
    host = 2048 if "disk_tokens" in options else 65_536
    one = await engine(dialect, events=True, time_scale=0, kv_tokens=2048, host_tokens=host, **options)
    running = await gateway(one, policy="cache_aware")
    await exact(running)
    draws = Random(23)
    prompts = [words(draws, 400) for _ in range(20)]
    async with talking(running, one) as talk:
        told = [await talk.ask(prompt, f"s{at}", 1) for at, prompt in enumerate(prompts)]
        for at, prompt in enumerate(prompts):
            dry = await dry_run(running, [*prompt, 1, 2], f"s{at}")
            (row,) = dry["candidates"]
            assert sum(row["holding_tokens"].values()) >= 384, at
            if at < 10:
                assert row["terms"]["restore"] > 0, at
            told.append(await talk.ask([*prompt, 1, 2], f"s{at}", 1))
    assert wrong(told) == []
    assert all(each.cached >= 384 for each in told[20:])
