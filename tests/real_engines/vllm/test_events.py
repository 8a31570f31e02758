"""What vLLM's own KV events tell of its cache is what it then finds there."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Fast

from gateway.config import Config, ModelConfig
from gateway.run import Running
from gateway.templates import Template
from gateway.tokens import Tokenizer
from kv_index.index import Rung
from tests.real_engines.vllm.chats import CHATS, TEMPLATES
from tests.real_engines.vllm.conftest import Begin, Fleet
from tests.real_engines.vllm.dialogue import Dialogue, at_once, one_at_a_time
from tests.real_engines.vllm.engine import MODEL, VLLM
from tests.real_engines.vllm.talk import (
    CHAT,
    TOOLS,
    Figures,
    Witness,
    address,
    events,
    said,
    scraped,
    until,
)

pytestmark = pytest.mark.engines

Listening = Callable[..., Any]


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120)


def standing(running: Running) -> dict[str, tuple[Rung, str]]:
    """Worker -> where its only target stands, and why."""
    found = {}
    for worker in running.fleet.workers.values():
        (target,) = worker.targets
        trust = running.index.of(target.id)
        found[worker.id] = (trust.rung, trust.reason)
    return found


@pytest.fixture
def listening(gateway: Begin, model: Path) -> Listening:
    """``await listening(engines)``: a gateway that makes token ids, from its own files or, with ``tokenizer="engine"``, theirs;
    with ``tokenizer=None`` it makes none."""

    async def begin(
        engines: list[VLLM], tokenizer: str | None = "", exact: bool = True, url: str | None = None
    ) -> Running:
        def change(config: Config) -> None:
            if url is not None:
                config.workers[0].url = url
            if tokenizer == "":
                files = str(model / "tokenizer.json"), str(model / "chat_template.jinja")
                config.models[MODEL] = ModelConfig(tokenizer=files[0], template=files[1])
            else:
                config.models[MODEL] = ModelConfig(tokenizer=tokenizer)

        running: Running = await gateway(engines, change)
        if exact:
            await until(lambda: all(rung is Rung.EXACT for rung, _ in standing(running).values()))
        return running

    return begin


def publishing(engines: Fleet, servers: list[VLLM], *more: str) -> list[VLLM]:
    """Both engines, publishing."""
    return engines(*[engine.publishing(*more) for engine in servers])


# -- where they are ---------------------------------------------------------------------------------------------------


async def test_what_the_engine_says_of_its_events_is_understood(
    listening: Listening, engines: Fleet, servers: list[VLLM]
) -> None:
    both = publishing(engines, servers)
    running = await listening(both)
    for engine in both:
        async with client() as http:
            told = (await http.get(f"{engine.url}/kv_event_sources")).json()
        print(json.dumps(told))
        (source,) = running.fleet.workers[engine.id].facts.events
        assert (source.endpoint, source.replay, source.topic) == (
            told["0"]["endpoint"],
            told["0"]["replay_endpoint"],
            "kv",
        )
        assert not {"events", "replay"} & {*running.fleet.workers[engine.id].facts.missing}
    assert set(standing(running).values()) == {(Rung.EXACT, "events")}


async def test_a_gateway_that_starts_late_is_told_all_from_the_start(
    listening: Listening, engines: Fleet, servers: list[VLLM]
) -> None:
    both = publishing(engines, servers)
    dialogues = [Dialogue(f"late {number}") for number in range(4)]
    running = await listening(both)
    async with client() as http:
        await one_at_a_time(http, running, dialogues, 3, "before")
    again = await listening(both)
    assert set(standing(again).values()) == {(Rung.EXACT, "events")}
    async with client() as http:
        told = await one_at_a_time(http, again, dialogues, 2, "after")
    print(told, told.wrong, sep="\n")
    assert told.right == 1
    assert sum(each.turn.cached for each in told.said[:4]) > 0


# -- token ids --------------------------------------------------------------------------------------------------------


def first_difference(ours: list[int], theirs: list[int], tokenizer: Any) -> str:
    """Where two prompts part, as text."""
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    near = slice(max(0, at - 6), at + 24)
    texts = [tokenizer.decode(ids[near]) for ids in (ours, theirs)]
    return f"{len(ours)} and {len(theirs)} ids part at {at}: {texts[0]!r} and {texts[1]!r}"


async def made(running: Running, chat: dict[str, Any]) -> list[int]:
    """The ids that the gateway makes of a chat. Raises `Unrendered`."""
    found = running.gateway.modes[MODEL].start("chat", json.dumps({"model": MODEL, **chat}).encode())
    assert found is not None
    return numbers(found if isinstance(found, bytes) else await found)


def numbers(ids: bytes) -> list[int]:
    return [id_ for (id_,) in struct.iter_unpack("<I", ids)]


def question(chat: dict[str, Any], **more: Any) -> dict[str, Any]:
    """For ``/tokenize``."""
    told = {name: chat[name] for name in ("messages", "tools") if name in chat}
    return {"model": MODEL, "add_generation_prompt": True, **told, **more}


async def given(http: httpx.AsyncClient, engine: VLLM, chat: dict[str, Any], **more: Any) -> list[int]:
    """The ids that the engine itself makes of a chat."""
    body = {"model": MODEL, "max_tokens": 1, "return_token_ids": True, **chat, **more}
    answer = await http.post(engine.url + CHAT, json=body)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["prompt_token_ids"]
    return ids


async def test_token_ids_are_the_engine_s_own(
    listening: Listening, engines: Fleet, servers: list[VLLM], model: Path
) -> None:
    one, _ = both = publishing(engines, servers)
    running = await listening(both)
    asking = await listening(both, "engine")
    fast = Fast.from_file(str(model / "tokenizer.json"))
    wrong = []
    async with client() as http:
        for name, chat in CHATS.items():
            theirs = await given(http, one, chat)
            told = (await http.post(f"{one.url}/tokenize", json=question(chat))).json()["tokens"]
            for who, ids in (
                ("/tokenize", told),
                ("file", await made(running, chat)),
                ("engine", await made(asking, chat)),
            ):
                if ids != theirs:
                    wrong.append(f"{name}, {who}: {first_difference(ids, theirs, fast)}")
    assert not wrong, "\n".join(wrong)


async def test_templates_are_run_as_the_engine_runs_them(engines: Fleet, servers: list[VLLM], model: Path) -> None:
    one, _ = publishing(engines, servers)
    tokenizer, fast = Tokenizer(str(model / "tokenizer.json")), Fast.from_file(str(model / "tokenizer.json"))
    wrong = []
    async with client() as http:
        for kind, source in TEMPLATES.items():
            template = Template(source, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
            for name, chat in CHATS.items():
                theirs = await given(http, one, chat, chat_template=source)
                ours = numbers(tokenizer.ids(template.render(chat)))
                if ours != theirs:
                    wrong.append(f"{kind}, {name}: {first_difference(ours, theirs, fast)}")
    assert not wrong, "\n".join(wrong)


# -- predictions ------------------------------------------------------------------------------------------------------


async def test_predictions_are_what_the_engine_finds(
    listening: Listening, engines: Fleet, servers: list[VLLM], figures: Figures
) -> None:
    running = await listening(publishing(engines, servers))
    async with client() as http:
        told = await one_at_a_time(http, running, [Dialogue(f"exact {number}") for number in range(12)], 11, "exact")
    print(told, told.wrong, sep="\n")
    figures.events["one request at a time"] = str(told)
    assert told.right >= 0.99
    assert len({each.turn.worker for each in told.said}) == 2


async def test_predictions_of_many_at_once_are_within_a_block(
    listening: Listening, engines: Fleet, servers: list[VLLM], figures: Figures
) -> None:
    running = await listening(publishing(engines, servers))
    async with client() as http:
        told = await at_once(http, running, [Dialogue(f"many {number}") for number in range(16)], 11, 8)
    print(told, told.wrong, sep="\n")
    figures.events["8 at once"] = str(told)
    assert told.near >= 0.95


async def test_engines_that_tokenise_themselves_are_predicted_as_exactly(
    listening: Listening, engines: Fleet, servers: list[VLLM], figures: Figures
) -> None:
    running = await listening(publishing(engines, servers), "engine")
    async with client() as http:
        told = await one_at_a_time(http, running, [Dialogue(f"asked {number}") for number in range(6)], 10, "asked")
    print(told, told.wrong, sep="\n")
    figures.events["tokenised by the engines"] = str(told)
    assert told.right >= 0.99
    assert not (await scraped(running))["warmroute_token_fallbacks_total"]


async def test_without_a_tokenizer_events_are_of_no_use_and_somebody_says_so(
    listening: Listening, engines: Fleet, servers: list[VLLM], caplog: pytest.LogCaptureFixture
) -> None:
    running = await listening(publishing(engines, servers), None, exact=False)
    async with client() as http:
        told = await one_at_a_time(http, running, [Dialogue(f"text {number}") for number in range(3)], 5, "text")
    print(told, told.wrong, standing(running), sep="\n")
    assert all(each.turn.predicted for each in told.said if each.number)
    warned = [record.getMessage() for record in caplog.records if "publish KV events" in record.getMessage()]
    assert len(warned) == 1
    assert MODEL in warned[0]
    assert f"models.{MODEL}.tokenizer" in warned[0]


# -- usage ------------------------------------------------------------------------------------------------------------


def shape(event: Any) -> Any:
    """An event without what differs between two answers to the same request, and without what was said."""
    if isinstance(event, dict):
        # Its fingerprint vLLM tells with the very last event: with the one that is taken out.
        passed = ("id", "created", "content", "system_fingerprint")
        return {name: shape(value) for name, value in event.items() if name not in passed}
    return [shape(each) for each in event] if isinstance(event, list) else event


def content(told: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
async def test_usage_that_the_client_did_not_ask_for_is_counted_and_not_shown(
    listening: Listening, engines: Fleet, servers: list[VLLM], tools: Any
) -> None:
    one, _ = publishing(engines, servers)
    async with Witness(one.port) as witness, client() as http:
        running = await listening([one], url=witness.url)
        body = said(f"count the tokens of the file {tools} " * 4, max_tokens=40, stream=True)
        body |= {"tools": tools} if tools else {}
        first = await http.post(one.url + CHAT, json=body)
        direct = await http.post(one.url + CHAT, json=body)
        through = await http.post(address(running) + CHAT, json=body)
        assert through.status_code == first.status_code == 200
        # The engine's own bytes, but for one event.
        pieces = witness.payload(CHAT).split(b"\n\n")
        (usage,) = [piece for piece in pieces if b'"usage":{' in piece]
        assert through.content == b"\n\n".join(piece for piece in pieces if piece is not usage)
        counts = json.loads(usage[6:])["usage"]
        told, known = events(through.content), events(direct.content)
        assert through.content.endswith(b"\n\ndata: [DONE]\n\n")
        assert not any("usage" in event for event in told)
        assert {json.dumps(shape(event)) for event in told} == {json.dumps(shape(event)) for event in known}
        assert (shape(told[0]), shape(told[-1])) == (shape(known[0]), shape(known[-1]))
        assert content(told) == content(known)
        sums = await scraped(running)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert sums["warmroute_prompt_tokens_total"] == counts["prompt_tokens"]
        assert sums["warmroute_cached_tokens_total"] == cached
        assert int(through.headers["x-warmroute-predicted-cached-tokens"]) == cached
        asked = await http.post(address(running) + CHAT, json={**body, "stream_options": {"include_usage": True}})
        assert events(asked.content)[-1]["usage"]["prompt_tokens"] == counts["prompt_tokens"]
        assert (await scraped(running))["warmroute_prompt_tokens_total"] == 2 * counts["prompt_tokens"]


# -- what ends a cache ------------------------------------------------------------------------------------------------


async def test_an_engine_that_was_reset_holds_nothing(
    listening: Listening, engines: Fleet, servers: list[VLLM]
) -> None:
    one, two = both = publishing(engines, servers)
    running = await listening(both)
    dialogues = [Dialogue(f"reset {number}") for number in range(6)]
    async with client() as http:
        before = await one_at_a_time(http, running, dialogues, 3, "before")
        assert {each.turn.worker for each in before.said} == {one.id, two.id}
        (await http.post(f"{one.url}/reset_prefix_cache")).raise_for_status()
        told = await one_at_a_time(http, running, dialogues, 4, "after")
    print(before, before.wrong, *told.said, sep="\n")
    there = [each for each in told.said if each.turn.worker == one.id]
    # The engine tells with the first step that it computes afterwards.
    assert not there[0].turn.cached
    assert all(each.right for each in there[2:])
    assert all(each.right for each in told.said if each.turn.worker == two.id)


async def test_an_engine_that_was_killed_comes_back_with_nothing(
    listening: Listening, engines: Fleet, servers: list[VLLM]
) -> None:
    one, two = both = publishing(engines, servers)
    running = await listening(both)
    dialogues = [Dialogue(f"killed {number}") for number in range(6)]
    async with client() as http:
        before = await one_at_a_time(http, running, dialogues, 3, "before")
        assert {each.turn.worker for each in before.said} == {one.id, two.id}
        await asyncio.to_thread(one.kill)
        await until(lambda: running.fleet.workers[one.id].state == "down", 20)
        print(standing(running))
        meanwhile = await one_at_a_time(http, running, dialogues, 1, "meanwhile")
        assert {each.turn.worker for each in meanwhile.said} == {two.id}
        await asyncio.to_thread(one.start, one.flags)
        await asyncio.to_thread(one.wait)
        await until(lambda: running.fleet.workers[one.id].state == "ready")
        await until(lambda: standing(running)[one.id][0] is Rung.EXACT)
        print(standing(running))
        (target,) = running.fleet.workers[one.id].targets
        assert running.index.blocks.tokens(target.id) == 0
        dialogues += [Dialogue(f"after {number}") for number in range(8)]
        told = await one_at_a_time(http, running, dialogues, 4, "after")
    print(before, before.wrong, *meanwhile.said, *told.said, sep="\n")
    assert any(each.turn.worker == one.id and each.turn.cached for each in told.said)
    assert all(each.right for each in [*meanwhile.said, *told.said])


# -- other engines ----------------------------------------------------------------------------------------------------


async def test_predictions_are_what_an_engine_finds_that_evicts_all_the_time(
    listening: Listening, engines: Fleet, servers: list[VLLM], figures: Figures
) -> None:
    both = publishing(engines, servers, "--num-gpu-blocks-override", "96", "--max-model-len", "2048")
    running = await listening(both)
    async with client() as http:
        told = await one_at_a_time(http, running, [Dialogue(f"evict {number}") for number in range(12)], 11, "evict")
    removed = (await scraped(running))["warmroute_kv_blocks_removed_total"]
    print(told, removed, told.wrong, sep="\n")
    figures.events["evicting, one request at a time"] = str(told)
    assert told.right >= 0.99
    assert len({each.turn.worker for each in told.said}) == 2
    assert removed > 500


async def test_without_replay_a_late_gateway_believes_once_reports_agree(
    listening: Listening, engines: Fleet, servers: list[VLLM]
) -> None:
    one, _ = engines(servers[0].publishing(replay=False), None)
    early = await listening([one], exact=False)
    assert "replay" in early.fleet.workers[one.id].facts.missing
    dialogues = [Dialogue(f"unrepeated {number}") for number in range(2)]
    async with client() as http:
        told = await one_at_a_time(http, early, dialogues, 3, "early")
    print(*told.said, standing(early), sep="\n")
    # Who listens from the first event on has all of them.
    assert standing(early)[one.id] == (Rung.EXACT, "events")
    late = await listening([one], exact=False)
    assert standing(late)[one.id] == (Rung.PREDICTED, "start")
    async with client() as http:
        told = await one_at_a_time(http, late, dialogues, 2, "late")
        print(*told.said, standing(late), sep="\n")
        assert standing(late)[one.id] == (Rung.PREDICTED, "start")
        # Of what begins with blocks that were stored before, events tell nothing.
        fresh = [Dialogue(f"fresh {number}", alone=True) for number in range(3)]
        told = await one_at_a_time(http, late, fresh, 10, "fresh")
    print(*told.said, standing(late), sep="\n")
    assert standing(late)[one.id] == (Rung.EXACT, "reports_agree")
    rungs = [each.rung for each in told.said]
    exact = rungs.index(Rung.EXACT)
    assert rungs == [Rung.PREDICTED] * exact + [Rung.EXACT] * (len(rungs) - exact)
    assert exact < len(rungs) - 5
    assert all(each.right for each in told.said[exact + 1 :])
