"""What holds in front of simulated engines holds in front of vLLM itself.

Sessions come first, then what ends an engine, so that only those tests wait for one to start again.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
from itertools import count, pairwise
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.config import Config
from gateway.run import Running
from load_tests.client import quantile
from tests.real_engines.vllm.conftest import Begin, Fleet
from tests.real_engines.vllm.engine import BLOCK, BLOCKS, CONTEXT, MODEL, NARROW, PLAIN, VLLM
from tests.real_engines.vllm.talk import (
    CHAT,
    Figures,
    Turn,
    Witness,
    address,
    ask,
    converse,
    events,
    finish,
    said,
    scraped,
    until,
)

pytestmark = pytest.mark.engines

LONG = 3800
"""Tokens of an answer that nobody waits for: some seconds."""


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=60)


def held_blocks(before: Turn) -> int:
    """Tokens in whole blocks that an engine holds after a turn: the last token generated was never computed with."""
    return (before.prompt + before.completion - 1) // BLOCK * BLOCK


def only(engines: list[VLLM], worker: str) -> VLLM:
    (engine,) = [engine for engine in engines if engine.id == worker]
    return engine


async def row(running: Running, engine: VLLM) -> dict[str, Any]:
    """What the control plane says of its only target."""
    async with client() as http:
        worker = (await http.get(f"http://127.0.0.1:{running.admin.port}/workers/{engine.id}")).json()
    (target,) = worker["targets"]
    return target


async def hits(engines: list[VLLM]) -> float:
    """Prompt tokens that the engines themselves counted as found in their caches."""
    metrics = [await asyncio.to_thread(engine.metrics) for engine in engines]
    return sum(each["vllm:prefix_cache_hits_total"] for each in metrics)


# -- what it is -------------------------------------------------------------------------------------------------------


async def test_the_engine_is_recognised_with_its_capacity(gateway: Begin, engines: Fleet) -> None:
    both = engines(PLAIN, PLAIN)
    running = await gateway(both)
    async with client() as http:
        version = (await http.get(f"{both[0].url}/version")).json()["version"]
    for worker in running.fleet.workers.values():
        facts = worker.facts
        assert (facts.engine, facts.version) == ("vllm", version)
        assert [model.name for model in facts.models] == [MODEL]
        assert facts.block_size == BLOCK
        assert facts.kv_tokens == BLOCK * BLOCKS
        assert facts.context_length == CONTEXT
        assert (facts.ranks, facts.started is not None) == (1, True)
        assert not {"metrics", "prefix_cache", "usage_details"} & {*facts.missing, *worker.observed}


async def test_an_engine_without_events_is_told_so(gateway: Begin, engines: Fleet) -> None:
    running = await gateway(engines(PLAIN, PLAIN))
    for worker in running.fleet.workers.values():
        assert "events" in worker.facts.missing


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["named", "by content"])
async def test_sessions_stay_home_and_spread(gateway: Begin, engines: Fleet, figures: Figures, named: bool) -> None:
    running = await gateway(engines(PLAIN, PLAIN))
    async with client() as http:
        names = [f"home {named} {number}" for number in range(4)]
        sessions = await asyncio.gather(
            *[converse(http, address(running), name, 5, named=named, figures=figures) for name in names]
        )
    for turns in sessions:
        assert len({turn.worker for turn in turns}) == 1
        for before, turn in pairwise(turns):
            assert turn.cached >= held_blocks(before) - BLOCK
    homes = [turns[0].worker for turns in sessions]
    assert {homes.count(home) for home in homes} == {2}


async def test_cached_tokens_are_counted_as_the_engines_count_them(
    gateway: Begin, engines: Fleet, figures: Figures
) -> None:
    both = engines(PLAIN, PLAIN)
    running = await gateway(both)
    before = await hits(both)
    async with client() as http:
        sessions = await asyncio.gather(
            *[converse(http, address(running), f"count {number}", 4, figures=figures) for number in range(3)]
        )
        whole = said("count the words of the file " * 20, max_tokens=4)
        usages = [(await http.post(address(running) + CHAT, json=whole)).json()["usage"] for _ in range(2)]
    turns = [turn for session in sessions for turn in session]
    cached = sum(turn.cached for turn in turns) + sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    sums = await scraped(running)
    assert cached > 0
    assert sums["warmroute_cached_tokens_total"] == cached
    assert sums["warmroute_prompt_tokens_total"] == sum(t.prompt for t in turns) + sum(
        u["prompt_tokens"] for u in usages
    )
    assert sums["warmroute_cache_reported_prompt_tokens_total"] == sums["warmroute_prompt_tokens_total"]
    assert sums["warmroute_completion_tokens_total"] == sum(t.completion for t in turns) + 8
    assert await hits(both) - before == cached


async def test_predictions_are_near_what_is_reported(gateway: Begin, engines: Fleet, figures: Figures) -> None:
    running = await gateway(engines(PLAIN, PLAIN))
    turns: list[Turn] = []
    async with client() as http:
        for number in range(3):
            turns += await converse(http, address(running), f"predict {number}", 6, figures=figures)
    for turn in turns:
        print(f"prompt {turn.prompt:5} predicted {turn.predicted:5} reported {turn.cached:5} {turn.decision}")
    errors = [turn.error for turn in turns if turn.error is not None]
    assert len(errors) == len(turns)
    assert statistics.median(errors) < 0.1
    assert (quantile(errors, 0.95) or 0) < 0.25


async def test_a_salt_keeps_caches_apart_here_and_there(gateway: Begin, engines: Fleet) -> None:
    one, _ = engines(PLAIN, PLAIN)
    running = await gateway([one])
    body = said("only for one of us " * 100, max_tokens=4)
    async with client() as http:
        turns = [await ask(http, address(running), {**body, "cache_salt": salt}) for salt in ("a", "a", "b", "b")]
    assert [turn.cached > 0 for turn in turns] == [False, True, False, True]
    assert [(turn.predicted or 0) > 0 for turn in turns] == [False, True, False, True]


async def test_what_an_engine_had_to_evict_is_not_believed(gateway: Begin, engines: Fleet) -> None:
    one, _ = engines(PLAIN, PLAIN)
    running = await gateway([one])
    async with client() as http:
        url = address(running)
        await converse(http, url, "evict", 2, start=1500, step=400)
        for number in range(BLOCK * BLOCKS // 3000):
            await converse(http, url, f"flood {number}", 1, start=3200)
        cached = (await converse(http, url, "evict", 1, start=1500, step=400))[0]
        kept = await converse(http, url, f"flood {number}", 1, start=3200)
    assert cached.cached == 0
    assert (cached.predicted or 0) < 0.1 * cached.prompt
    assert kept[0].cached > 0.9 * kept[0].prompt
    assert (kept[0].predicted or 0) > 0.9 * kept[0].prompt
    assert (await row(running, one))["evicted_pages"] > 0


async def test_the_load_that_others_bring_is_seen(gateway: Begin, engines: Fleet) -> None:
    one, two = engines(PLAIN, PLAIN)
    running = await gateway([one, two], lambda config: setattr(config.probes, "load", 0.1))
    (target,) = running.fleet.workers[one.id].targets

    async def foreign(http: httpx.AsyncClient, number: int) -> None:
        await http.post(one.url + CHAT, json=said(f"not through the gateway {number}", max_tokens=LONG))

    async with client() as http:
        tasks = [asyncio.create_task(foreign(http, number)) for number in range(6)]
        await until(lambda: target.foreign == len(tasks))
        (turn,) = await converse(http, address(running), "others", 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert turn.worker == two.id
    await until(lambda: target.foreign == 0)


# -- answers as they are ----------------------------------------------------------------------------------------------


VARIES = ("id", "created", "content", "system_fingerprint")
"""The last is in the last event, which differs where usage was asked for."""


def shape(event: Any) -> Any:
    """An event without what differs between two answers to the same request."""
    if isinstance(event, dict):
        return {name: shape(value) for name, value in event.items() if name not in VARIES}
    return [shape(each) for each in event] if isinstance(event, list) else event


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "logprobs": True},
        {"stream": True, "n": 2, "temperature": 1.0, "seed": 3},
        {},
    ],
    ids=["usage", "no usage", "usage in every event", "two choices", "whole"],
)
async def test_answers_are_relayed_byte_for_byte(gateway: Begin, engines: Fleet, fields: dict[str, Any]) -> None:
    one, _ = engines(PLAIN, PLAIN)
    body = said("read the file and write it " * 20, **{"max_tokens": 40, **fields})
    async with Witness(one.port) as witness, client() as http:
        running = await gateway([one], lambda config: setattr(config.workers[0], "url", witness.url))
        await http.post(one.url + CHAT, json=body)
        direct = await http.post(one.url + CHAT, json=body)
        through = await http.post(address(running) + CHAT, json=body)
        assert through.status_code == direct.status_code == 200
        sent = witness.payload(CHAT)
        if fields.get("stream") and "stream_options" not in fields:
            # Usage that only the gateway asked for is its own.
            sent = b"".join(
                event + b"\n\n" for event in sent.split(b"\n\n")[:-1] if b'"choices":[],"usage":{' not in event
            )
        assert through.content == sent
    assert through.headers["content-type"] == direct.headers["content-type"]
    if not fields.get("stream"):
        assert through.json()["choices"] == direct.json()["choices"]
        assert through.json()["usage"] == direct.json()["usage"]
        return
    assert through.content.endswith(b"\n\ndata: [DONE]\n\n")
    told, known = events(through.content), events(direct.content)
    assert (shape(told[0]), shape(told[-1])) == (shape(known[0]), shape(known[-1]))
    if "stream_options" in fields:
        assert told[-1]["choices"] == []
        assert told[-1]["usage"]["completion_tokens"] == 40


async def test_events_come_as_they_are_made(gateway: Begin, engines: Fleet) -> None:
    running = await gateway(engines(None, None))
    loop = asyncio.get_running_loop()
    times = []
    async with (
        client() as http,
        http.stream("POST", address(running) + CHAT, json=said("one by one", stream=True, max_tokens=400)) as response,
    ):
        async for _ in response.aiter_bytes():
            times.append(loop.time())
    assert len(times) > 40
    assert times[len(times) // 2] - times[0] > 0.2 * (times[-1] - times[0])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_stops_the_generation(gateway: Begin, engines: Fleet, stream: bool) -> None:
    both = engines(None, None)
    running = await gateway(both)
    before = {engine.id: engine.metrics()["vllm:generation_tokens_total"] for engine in both}
    body = said("the next step of the test", stream=stream, max_tokens=LONG)

    def at_work() -> list[VLLM]:
        return [engine for engine in both if engine.metrics()["vllm:num_requests_running"]]

    async def reading() -> None:
        async with client() as http:
            await http.post(address(running) + CHAT, json=body)

    task = asyncio.create_task(reading())
    busy: list[VLLM] = []
    await until(lambda: busy or busy.extend(at_work()))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not at_work(), 10)
    made = busy[0].metrics()["vllm:generation_tokens_total"] - before[busy[0].id]
    assert 0 < made < LONG // 2
    assert (await scraped(running))["warmroute_client_aborts_total"] == 1


async def test_many_clients_leave_while_others_stay(gateway: Begin, engines: Fleet) -> None:
    both = engines(PLAIN, PLAIN)
    running = await gateway(both)
    body = said("stay or leave", stream=True, max_tokens=150)

    async def leave(http: httpx.AsyncClient, pieces: int) -> None:
        async with http.stream("POST", address(running) + CHAT, json={**body, "max_tokens": LONG}) as response:
            read = response.aiter_bytes()
            for _ in range(pieces):
                await anext(read)

    async with client() as http, client() as leaving:
        stayed = [ask(http, address(running), body) for _ in range(12)]
        turns = await asyncio.gather(*stayed, *[leave(leaving, pieces) for pieces in range(12)])
    assert [turn.completion for turn in turns[:12]] == [150] * 12
    await until(lambda: not any(engine.metrics()["vllm:num_requests_running"] for engine in both), 10)
    await until(lambda: not running.gateway.exchanges)
    sums = await scraped(running)
    assert sums["warmroute_client_aborts_total"] == sums["warmroute_requests_total/client_gone"] == 12
    assert sums["warmroute_worker_faults_total"] == 0


async def test_connections_that_the_engine_closes_while_idle_cost_nothing(gateway: Begin, engines: Fleet) -> None:
    one, _ = engines(None, None)
    running = await gateway([one])
    (worker,) = running.fleet.workers.values()
    async with client() as http:
        await ask(http, address(running), said("before", max_tokens=2))
        assert worker.pool.idle == 1
        # uvicorn keeps idle connections for 5 seconds.
        await until(lambda: worker.pool.idle == 0, 10)
        await ask(http, address(running), said("after", max_tokens=2))
    assert (await scraped(running))["warmroute_worker_faults_total"] == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": [{"role": "user", "content": "the file " * CONTEXT}]}, "maximum context length"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10 * CONTEXT}, "max_tokens"),
        ({"messages": []}, "message"),
        ({"messages": [{"role": "user"}], "stream": True, "n": -1}, "n must be"),
        ({"response_format": {"type": "poem"}}, "response_format"),
    ],
)
async def test_its_errors_pass_through_unchanged(
    gateway: Begin, engines: Fleet, fields: dict[str, Any], named: str
) -> None:
    one, two = engines(None, None)
    running = await gateway([one, two])
    body = {**said("hello", max_tokens=4), **fields}
    async with client() as http:
        direct = await http.post(one.url + CHAT, json=body)
        through = await http.post(address(running) + CHAT, json=body)
    assert through.status_code == direct.status_code == 400
    assert through.content == direct.content
    assert named in direct.json()["error"]["message"]
    sums = await scraped(running)
    assert sums["warmroute_worker_faults_total"] == 0
    assert sums["warmroute_requests_total/client_error"] == 1


async def test_a_model_that_nobody_serves_is_refused_here(gateway: Begin, engines: Fleet) -> None:
    running = await gateway(engines(None, None))
    async with client() as http:
        response = await http.post(address(running) + CHAT, json=said("hello", model="huge"))
    assert response.status_code == 404
    assert "huge" in response.json()["error"]["message"]
    assert "x-warmroute-worker" not in response.headers


# -- official clients --------------------------------------------------------------------------------------------------


async def test_openai_s_own_client(gateway: Begin, engines: Fleet) -> None:
    both = engines(PLAIN, PLAIN)
    running = await gateway(both)
    before = await hits(both)
    text = "repeat the words of this file " * 20
    prompt = completion = cached = 0
    async with openai.AsyncOpenAI(base_url=f"{address(running)}/v1", api_key="unused", max_retries=0) as asked:
        assert [model.id async for model in asked.models.list()] == [MODEL]
        for _ in range(2):
            written = await asked.completions.create(model=MODEL, prompt=text, max_tokens=6, temperature=0)
            assert written.choices[0].text
            assert written.usage is not None
            assert written.usage.prompt_tokens_details is not None
            prompt += written.usage.prompt_tokens
            completion += written.usage.completion_tokens
            cached += written.usage.prompt_tokens_details.cached_tokens or 0
        previous = None
        for number in range(5):
            if number % 2:
                async for event in await asked.responses.create(
                    model=MODEL,
                    input=text,
                    max_output_tokens=8,
                    temperature=0,
                    previous_response_id=previous,
                    stream=True,
                ):
                    last = event
                answer = last.response  # type: ignore[union-attr]
            else:
                answer = await asked.responses.create(
                    model=MODEL, input=text, max_output_tokens=8, temperature=0, previous_response_id=previous
                )
            assert answer.usage is not None
            prompt += answer.usage.input_tokens
            completion += answer.usage.output_tokens
            cached += answer.usage.input_tokens_details.cached_tokens
            previous = answer.id
        again = await asked.responses.retrieve(previous)
        assert again.id == previous
        with pytest.raises(openai.NotFoundError):
            await asked.chat.completions.create(model="huge", messages=[{"role": "user", "content": "hello"}])
    sums = await scraped(running)
    assert sums["warmroute_prompt_tokens_total"] == prompt
    assert sums["warmroute_completion_tokens_total"] == completion
    assert sums["warmroute_cached_tokens_total"] == cached == await hits(both) - before


async def test_anthropic_s_own_client(gateway: Begin, engines: Fleet) -> None:
    both = engines(PLAIN, PLAIN)
    running = await gateway(both)
    before = await hits(both)
    system = "messages " + "the plan of the agent and the tool " * 30
    messages: list[Any] = []
    plain = {"temperature": 0, "ignore_eos": True}
    workers, spent = set(), []
    async with anthropic.AsyncAnthropic(base_url=address(running), api_key="unused", max_retries=0) as asked:
        for number in range(4):
            messages.append({"role": "user", "content": f"step {number}: " + "read the next file " * 10})
            tokens = await asked.messages.count_tokens(model=MODEL, system=system, messages=messages)
            if number % 2:
                async with asked.messages.stream(
                    model=MODEL, max_tokens=20, system=system, messages=messages, extra_body=plain
                ) as stream:
                    text = "".join([piece async for piece in stream.text_stream])
                    answer = await stream.get_final_message()
                    workers.add(stream.response.headers["x-warmroute-worker"])
                assert text == answer.content[0].text
            else:
                raw = await asked.messages.with_raw_response.create(
                    model=MODEL, max_tokens=20, system=system, messages=messages, extra_body=plain
                )
                answer = await raw.parse() if asyncio.iscoroutinefunction(raw.parse) else raw.parse()
                workers.add(raw.headers["x-warmroute-worker"])
            assert answer.content[0].type == "text"
            assert answer.stop_reason == "max_tokens"
            usage = answer.usage
            cached = usage.cache_read_input_tokens or 0
            assert usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0) == tokens.input_tokens
            spent.append((tokens.input_tokens, usage.output_tokens, cached))
            messages.append({"role": "assistant", "content": answer.content[0].text})
        with pytest.raises(anthropic.NotFoundError):
            await asked.messages.create(model="huge", max_tokens=4, messages=messages)
        long: Any = [{"role": "user", "content": "the file " * CONTEXT}]
        with pytest.raises(anthropic.BadRequestError) as refused:
            await asked.messages.create(model=MODEL, max_tokens=4, messages=long)
        assert "maximum context length" in refused.value.message
    assert len(workers) == 1
    for (prompt, completion, _), (_, _, cached) in pairwise(spent):
        assert cached >= (prompt + completion - 1) // BLOCK * BLOCK - BLOCK
    sums = await scraped(running)
    assert sums["warmroute_prompt_tokens_total"] == sum(prompt for prompt, _, _ in spent)
    assert sums["warmroute_completion_tokens_total"] == sum(made for _, made, _ in spent)
    assert sums["warmroute_cached_tokens_total"] == sum(cached for _, _, cached in spent) == await hits(both) - before
    assert sums["warmroute_worker_faults_total"] == 0


# -- what ends an engine ----------------------------------------------------------------------------------------------


async def broken_stream(running: Running, end: Any) -> tuple[str, list[dict[str, Any]], bytes]:
    """A stream during which ``end`` is called with its worker: the worker, the events, the bytes."""
    data = b""
    async with (
        client() as http,
        http.stream(
            "POST", address(running) + CHAT, json=said("a long answer", stream=True, max_tokens=LONG)
        ) as response,
    ):
        worker = response.headers["x-warmroute-worker"]
        async for piece in response.aiter_bytes():
            data += piece
            if end is not None and data.count(b"\n\n") > 20:
                end(worker, data[: data.rindex(b"\n\n")])
                end = None
    return worker, events(data), data


async def test_an_answer_that_the_engine_gave_up_is_no_success(gateway: Begin, engines: Fleet) -> None:
    one, _ = engines(None, None)
    running = await gateway([one])

    def give_up(_: str, data: bytes) -> None:
        response = httpx.post(f"{one.url}/inference/v1/abort_requests", json={"request_ids": [events(data)[0]["id"]]})
        response.raise_for_status()

    _, told, data = await broken_stream(running, give_up)
    if not data.endswith(b"data: [DONE]\n\n") or finish(told) != "abort":
        pytest.fail("vLLM does not end such a stream so any more")
    assert (await scraped(running))["warmroute_requests_total/stream_error"] == 1


async def test_a_killed_engine_ends_its_stream_and_comes_back_empty(gateway: Begin, engines: Fleet) -> None:
    both = engines(None, None)
    running = await gateway(both)
    names = count()

    async def new_session(http: httpx.AsyncClient) -> Turn:
        (turn,) = await converse(http, address(running), f"kill {next(names)}", 1)
        return turn

    async with client() as http:
        await asyncio.gather(*[new_session(http) for _ in range(4)])
        assert all([(await row(running, engine))["holding_pages"] for engine in both])

        worker, told, data = await broken_stream(running, lambda worker, _: only(both, worker).kill())
        dead = only(both, worker)
        (other,) = [engine for engine in both if engine is not dead]
        assert b"[DONE]" not in data, "that says that an answer is whole"
        assert told[-1]["error"]["code"] in (502, 504)
        assert [turn.worker for turn in [await new_session(http) for _ in range(4)]] == [other.id] * 4
        await until(lambda: running.fleet.workers[dead.id].state == "down", 10)
        sums = await scraped(running)
        assert sums["warmroute_requests_total/stream_error"] == 1
        assert sums["warmroute_requests_total/ok"] == 8
        before = running.fleet.workers[dead.id].facts.started

        # Narrow, as the next test wants it.
        await asyncio.to_thread(dead.start, NARROW)
        await asyncio.to_thread(dead.wait)
        await until(lambda: running.fleet.workers[dead.id].state == "ready")
        assert running.fleet.workers[dead.id].facts.started != before
        told_of = await row(running, dead)
        assert (told_of["holding_pages"], told_of["homes"]) == (0, 0)
        used = False
        async with asyncio.timeout(60):
            # A cold worker works its way up to its share.
            while not used:
                turn = await new_session(http)
                used = turn.worker == dead.id
        assert turn.cached == 0
        assert (await row(running, dead))["holding_pages"] > 0
        again = await ask(http, address(running), said("once more " * 100, max_tokens=4))
        assert again.completion == 4


async def test_a_full_queue_sends_requests_to_the_other_engine(
    gateway: Begin, servers: list[VLLM], engines: Fleet
) -> None:
    narrow = next((at for at, engine in enumerate(servers) if engine.flags == NARROW), 1)
    both = engines(*(NARROW if at == narrow else PLAIN for at in range(2)))
    running = await gateway(both)
    async with client() as http:
        turns = await asyncio.gather(
            *[ask(http, address(running), said(f"crowd {number}", max_tokens=100)) for number in range(12)]
        )
    used = [turn.worker for turn in turns]
    assert 0 < used.count(both[narrow].id) < used.count(both[1 - narrow].id)
    sums = await scraped(running)
    assert sums["warmroute_backpressure_total"] > 0
    assert sums["warmroute_retries_total"] == sums["warmroute_backpressure_total"]
    assert sums["warmroute_breaker_openings_total"] == 0
    assert sums["warmroute_worker_faults_total"] == 0
    assert sums["warmroute_requests_total/ok"] == len(turns)


async def test_an_engine_that_is_all_full_says_so_itself(gateway: Begin, servers: list[VLLM], engines: Fleet) -> None:
    narrow = next((at for at, engine in enumerate(servers) if engine.flags == NARROW), 1)
    full = engines(*(NARROW if at == narrow else None for at in range(2)))[narrow]
    running = await gateway([full])
    body = said("crowd", max_tokens=400)
    async with client() as http:
        answers = await asyncio.gather(*[http.post(address(running) + CHAT, json=body) for _ in range(6)])
    refused = [answer for answer in answers if answer.status_code == 503]
    assert sum(answer.status_code == 200 for answer in answers) == len(answers) - len(refused) >= 1
    assert refused
    assert all(answer.json()["error"]["message"] for answer in refused)
    sums = await scraped(running)
    assert sums["warmroute_breaker_openings_total"] == sums["warmroute_worker_faults_total"] == 0


async def test_an_engine_told_to_end_breaks_its_stream(gateway: Begin, engines: Fleet) -> None:
    both = engines(None, None)

    def impatient(config: Config) -> None:
        # vLLM 0.32 ends such a stream with an error event, or as given up, or leaves it open without another word.
        config.timeouts.idle = 4.0

    running = await gateway(both, impatient)
    worker, told, data = await broken_stream(running, lambda worker, _: only(both, worker).signal(signal.SIGTERM))
    # vLLM's own end of a stream that failed has it, ours has not.
    assert data.count(b"[DONE]") <= 1
    ended = told[-1] if "error" in told[-1] else None
    assert ended["error"]["code"] >= 500 if ended is not None else finish(told) == "abort"
    await until(lambda: running.fleet.workers[worker].state == "down", 20)
    sums = await scraped(running)
    assert sums["warmroute_requests_total/stream_error"] == 1
    async with client() as http:
        turn = await ask(http, address(running), said("and now", max_tokens=4))
    assert turn.worker != worker
    only(both, worker).end()


_SURFACES = {
    CHAT: {"messages": [{"role": "user", "content": "a long answer"}], "max_tokens": LONG, "ignore_eos": True},
    "/v1/completions": {"prompt": "a long answer", "max_tokens": LONG, "ignore_eos": True},
    "/v1/responses": {"input": "a long answer", "max_output_tokens": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": "a long answer"}], "max_tokens": LONG},
}


async def test_an_engine_core_that_dies_under_a_live_server(
    gateway: Begin, servers: list[VLLM], engines: Fleet
) -> None:
    alive = [engine for engine in servers if engine.alive and engine.flags == PLAIN][:1] or engines(PLAIN, PLAIN)[:1]
    running = await gateway(alive)
    data = dict.fromkeys(_SURFACES, b"")

    async def stream(http: httpx.AsyncClient, path: str) -> None:
        body = {"model": MODEL, "temperature": 0, "stream": True, **_SURFACES[path]}
        async with http.stream("POST", address(running) + path, json=body) as response:
            async for piece in response.aiter_bytes():
                data[path] += piece

    async with client() as http:
        streams = [asyncio.create_task(stream(http, path)) for path in _SURFACES]
        await until(lambda: all(each.count(b"\n\n") > 20 for each in data.values()))
        await asyncio.to_thread(alive[0].kill_core)
        await asyncio.gather(*streams)
    await until(lambda: next(iter(running.fleet.workers.values())).state == "down", 20)
    sums = await scraped(running)
    alive[0].end()
    for path, each in data.items():
        told = events(each)
        assert "error" in told[-1] or told[-1].get("type") == "error"
        assert all(not event.get("error") for event in told[:-1])
        assert each.count(b"data: [DONE]\n\n") <= (path not in ("/v1/messages", "/v1/responses"))
    assert sums["warmroute_requests_total/stream_error"] == len(data)
