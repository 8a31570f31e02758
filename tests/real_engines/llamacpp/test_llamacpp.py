"""What holds in front of simulated engines holds in front of llama.cpp's own server."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from random import Random

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.run import Running
from load_tests.client import Answer, Client
from load_tests.workloads.agents import words
from tests.real_engines.llamacpp.conftest import CONTEXT, SLOTS

MODEL = "tiny"


def address(running: Running) -> str:
    return f"http://127.0.0.1:{running.port}"


async def converse(client: Client, name: str, turns: int, system: str | None = None) -> list[Answer]:
    """One session: each turn repeats what was said and adds a message."""
    random = Random(name)
    messages = [{"role": "system", "content": system or f"You are {name}. " + words(random, 120)}]
    answers = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(random, 60)})
        answer = await client.chat({"messages": messages, "max_tokens": 12}, {"x-session-id": name})
        assert answer.error is None
        messages.append({"role": "assistant", "content": answer.content})
        answers.append(answer)
    return answers


async def scraped(running: Running) -> dict[str, float]:
    """The gateway's counters, each summed over its labels."""
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"http://127.0.0.1:{running.admin.port}/metrics")).text
    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return dict(sums)


async def test_the_engine_is_recognised_with_its_capacity(running: Running) -> None:
    for worker in running.fleet.workers.values():
        assert worker.facts.engine == "llamacpp"
        assert worker.facts.kv_tokens == CONTEXT * SLOTS
        assert worker.facts.max_running == SLOTS
        assert worker.facts.context_length == CONTEXT
        assert [model.name for model in worker.facts.models] == [MODEL]


async def test_sessions_return_home_and_spread(running: Running) -> None:
    async with Client(address(running), MODEL) as client:
        sessions = await asyncio.gather(*[converse(client, f"home-{number}", 4) for number in range(4)])
    homes = []
    for answers in sessions:
        assert len({answer.worker for answer in answers}) == 1
        homes.append(answers[0].worker)
        for before, answer in pairwise(answers):
            assert before.prompt_tokens is not None
            assert answer.cached_tokens is not None
            assert answer.cached_tokens >= 0.9 * before.prompt_tokens
    assert len(set(homes)) == 2


async def test_sessions_under_one_system_prompt_keep_the_slots_that_are_named(running: Running) -> None:
    """To the server all slots look alike: it hands on whichever shares most with a request."""
    for worker in running.fleet.workers.values():
        worker.spec.slots = True
        running.fleet.describe(worker, worker.facts)
    system = "You are one of many. " + words(Random("one"), 600)
    async with Client(address(running), MODEL) as client:
        # More sessions than slots would take them from each other.
        sessions = await asyncio.gather(*[converse(client, f"slot-{number}", 5, system) for number in range(SLOTS)])
    for answers in sessions:
        assert len({answer.worker for answer in answers}) == 1
        for before, answer in pairwise(answers):
            assert before.prompt_tokens is not None
            assert answer.cached_tokens is not None
            assert answer.cached_tokens >= 0.9 * before.prompt_tokens
    for target in running.fleet.targets.values():
        assert target.slots is not None
        assert (target.slots.count, target.slots.busy) == (SLOTS, 0)


async def test_sessions_whose_slots_the_server_chooses_go_home_and_find_their_shared_start(running: Running) -> None:
    """One after another: which slot is free, and so what is lost, is the server's own affair when they overlap."""
    system = "You are one of several. " + words(Random("several"), 600)
    histories: dict[str, list[dict[str, str]]] = {
        f"free-{number}": [{"role": "system", "content": system}] for number in range(2 * SLOTS)
    }
    homes: dict[str, set[str | None]] = {name: set() for name in histories}
    cached: dict[str, list[int | None]] = {name: [] for name in histories}
    async with Client(address(running), MODEL) as client:
        for turn in range(3):
            for name, messages in histories.items():
                messages.append({"role": "user", "content": words(Random(f"{name} {turn}"), 60)})
                answer = await client.chat({"messages": messages, "max_tokens": 12}, {"x-session-id": name})
                assert answer.error is None
                messages.append({"role": "assistant", "content": answer.content})
                homes[name].add(answer.worker)
                cached[name].append(answer.cached_tokens)
    assert all(target.slots is None for target in running.fleet.targets.values())
    for name in histories:
        assert len(homes[name]) == 1
        assert all(count is not None and count > len(system) // 2 for count in cached[name][1:])


async def test_cached_tokens_are_counted_to_the_token(running: Running) -> None:
    async with Client(address(running), MODEL) as client, httpx.AsyncClient(timeout=30) as http:
        sessions = await asyncio.gather(*[converse(client, f"count-{number}", 3) for number in range(3)])
        body = {
            "model": MODEL,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "count the words of the file"}],
        }
        whole = [
            (await http.post(f"{address(running)}/v1/chat/completions", json=body)).json()["usage"] for _ in range(2)
        ]
    answers = [answer for session in sessions for answer in session]
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    cached += sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in whole)
    prompt = sum(answer.prompt_tokens or 0 for answer in answers) + sum(usage["prompt_tokens"] for usage in whole)
    made = sum(answer.completion_tokens or 0 for answer in answers) + sum(usage["completion_tokens"] for usage in whole)
    sums = await scraped(running)
    assert cached > 0
    assert sums["warmroute_cached_tokens_total"] == cached
    assert sums["warmroute_prompt_tokens_total"] == prompt
    assert sums["warmroute_cache_reported_prompt_tokens_total"] == prompt
    assert sums["warmroute_completion_tokens_total"] == made


async def decoding(http: httpx.AsyncClient, url: str) -> list[int]:
    """Tokens made so far by each slot that is at work."""
    slots = (await http.get(f"{url}/slots")).json()
    return [slot["next_token"][0]["n_decoded"] for slot in slots if slot["is_processing"]]


async def test_a_client_that_leaves_stops_the_generation(running: Running, llamas: list[str]) -> None:
    wanted = CONTEXT - 200
    body = {"model": MODEL, "stream": True, "max_tokens": wanted, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "the next step of the test"}]
    async with httpx.AsyncClient(timeout=30) as http:
        async with http.stream("POST", f"{address(running)}/v1/chat/completions", json=body) as response:
            url = "http://" + response.headers["x-warmroute-worker"]
            # Kept until the end: an iterator that is let go closes its response.
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            made: list[int] = []
            async with asyncio.timeout(10):
                while not made:
                    made = await decoding(http, url)
        async with asyncio.timeout(20):
            while now := await decoding(http, url):
                made += now
                await asyncio.sleep(0.01)
    assert max(made) < wanted // 2
    assert (await scraped(running))["warmroute_client_aborts_total"] == 1


async def test_its_errors_pass_through_unchanged(running: Running, llamas: list[str]) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": " the file" * CONTEXT}]}
    async with httpx.AsyncClient(timeout=60) as http:
        direct = await http.post(f"{llamas[0]}/v1/chat/completions", json=body)
        through = await http.post(f"{address(running)}/v1/chat/completions", json=body)
    assert through.status_code == direct.status_code == 400
    assert direct.json()["error"]["type"] == "exceed_context_size_error"
    assert through.content == direct.content
    assert sum(value for name, value in (await scraped(running)).items() if "worker_faults_total" in name) == 0


async def test_a_model_that_nobody_serves_is_refused_here(running: Running) -> None:
    body = {"model": "huge", "messages": [{"role": "user", "content": "hello"}]}
    async with httpx.AsyncClient(timeout=10) as http:
        response = await http.post(f"{address(running)}/v1/chat/completions", json=body)
    assert response.status_code == 404
    assert "huge" in response.json()["error"]["message"]
    assert "x-warmroute-worker" not in response.headers
