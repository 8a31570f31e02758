"""What the gateway does for every request, it does for those that two engines serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, ModelConfig, Recording, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from tests.gateway.conftest import Begin, StartScripted
from tests.gateway.disagg.rig import StartRig, events_of, name, story, text_of
from tests.gateway.disagg.test_bodies import DELTA, PREFILLED
from tests.gateway.scripted import Seen, events, ok
from tests.gateway.talk import once, request, until

DIALECTS = ["vllm", "sglang"]
FORCED = {"name": "disaggregated", "prefill": "cache_aware"}


def forced(config: Config) -> None:
    """Every request takes a pair, whatever it would cost elsewhere."""
    config.policies["pairs"] = dict(FORCED)


async def test_both_halves_have_the_same_salt_and_name(gateway: Begin, scripted: StartScripted) -> None:
    p, d = await scripted(ok(PREFILLED)), await scripted()

    def change(config: Config) -> None:
        config.tenants = [TenantConfig(each, [Secret(f"key-{each}")], isolation="isolated") for each in ("a", "b")]
        config.models["sim"] = ModelConfig(aliases=["alias"])

    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="vllm", protocol="nixl", models=["sim"]),
        WorkerConfig(d.url, role="decode", engine="vllm", protocol="nixl", models=["sim"]),
        change=change,
    )
    salts = []
    for tenant in ("a", "b"):
        body = {**story(1), "model": "alias", "cache_salt": "mine"}
        assert (await once(running.port, request(body, f"Authorization: Bearer key-{tenant}"))).status == 200
        first, second = (json.loads(each.seen[-1].body) for each in (p, d))
        assert first["cache_salt"] == second["cache_salt"] != "mine"
        assert first["model"] == second["model"] == "sim"
        assert not any(each.seen[-1].all("authorization") for each in (p, d))
        salts.append(first["cache_salt"])
    assert salts[0] != salts[1]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_that_was_not_asked_for_is_counted_and_not_shown(rig: StartRig, dialect: str) -> None:
    r = await rig(dialect=dialect, policy="pairs", change=forced)
    answer = await r.check(story("x", stream=True, max_tokens=7))
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    assert not any(event.get("usage") for event in events_of(answer.body) if event != "[DONE]")
    await until(lambda: not r.running.gateway.exchanges)
    prompts = await r.samples("warmroute_prompt_tokens_total")
    answers = await r.samples("warmroute_completion_tokens_total")
    assert {labels["target"]: value for labels, value in prompts if value} == {
        name(r.p): r.alone.stats()["prompt_tokens"]
    }, "where it was computed"
    assert {labels["target"]: value for labels, value in answers if value} == {name(r.d): 7}
    await r.nothing_left()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_comments_while_the_prompt_is_computed(rig: StartRig, dialect: str) -> None:
    def patient(config: Config) -> None:
        config.listen.comment_after = 0.3

    r = await rig(2, 2, dialect, change=patient)
    for each in r.prefills:
        each.faults.add("stall_before", count=1, seconds=1.5)
    for each in r.prefills[:1]:
        each.faults.add("error500", count=1)
    late = await r.check(story("x", stream=True))
    assert late.body.startswith(b": keep-alive\n\n")
    assert late.body.count(b"[DONE]") == 1
    await r.nothing_left()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_after_comments_is_an_event(rig: StartRig, dialect: str) -> None:
    def patient(config: Config) -> None:
        config.listen.comment_after = 0.3
        config.timeouts.first_byte = 1.5
        config.retries.attempts = 1

    r = await rig(dialect=dialect, change=patient)
    r.p.faults.add("stall_before", count=None)
    answer = await r.ask(story("x", stream=True))
    assert answer.status == 200
    assert b"keep-alive" in answer.body
    assert [event for event in events_of(answer.body) if event != "[DONE]" and "error" in event]
    r.p.faults.clear()
    await r.nothing_left()


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_recording_has_the_request_once(rig: StartRig, dialect: str, stream: bool, tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"

    def change(config: Config) -> None:
        forced(config)
        config.recording = Recording(str(file))

    r = await rig(dialect=dialect, policy="pairs", change=change)
    answer = await r.check(story("x", stream=stream))
    assert answer.one("x-warmroute-prefill-worker") == name(r.p)
    await r.nothing_left()
    await r.running.stop()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len([row for row in rows if "input_length" in row or "timestamp" in row]) == 1, rows


async def test_a_stored_response_stays_with_its_worker(rig: StartRig) -> None:
    r = await rig()
    made = await r.ask({"model": "sim", "input": "hi", "max_output_tokens": 4}, path="/v1/responses")
    assert made.status == 200
    home = made.one("x-warmroute-worker")
    for _ in range(3):
        body = {"model": "sim", "input": "on", "previous_response_id": made.json()["id"], "max_output_tokens": 4}
        again = await r.ask(body, path="/v1/responses")
        assert (again.status, again.one("x-warmroute-worker")) == (200, home)
        assert again.all("x-warmroute-prefill-worker") == []
    await r.nothing_left()


@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("vllm", "/v1/completions"),
        ("vllm", "/v1/messages"),
        ("vllm", "/v1/responses"),
        ("sglang", "/v1/completions"),
        ("sglang", "/v1/messages"),
        ("sglang", "/v1/responses"),
        ("sglang", "/generate"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_other_routes_say_what_one_engine_says(rig: StartRig, dialect: str, path: str, stream: bool) -> None:
    r = await rig(dialect=dialect, time_scale=0.02)
    said = story("x")["messages"][0]["content"]
    key = {"/v1/completions": "prompt", "/v1/messages": "messages", "/generate": "text", "/v1/responses": "input"}[path]
    body: dict[str, Any] = {"model": "sim", "stream": stream, key: said, "temperature": 0, "max_tokens": 9}
    if path == "/v1/messages":
        body["messages"] = [{"role": "user", "content": said}]
    if path == "/generate":
        body["sampling_params"] = {"max_new_tokens": 9, "temperature": 0}
    whole = await once(r.alone.port, request(body, path=path))
    assert whole.status == 200, whole.body
    answer = await r.ask(body, path=path)
    assert answer.status == 200, answer.body
    assert spoken(answer.body, stream) == spoken(whole.body, stream) != ""
    paired = not (dialect == "vllm" and path == "/v1/responses")
    assert bool(answer.all("x-warmroute-prefill-worker")) is paired
    if paired and not (dialect == "vllm" and path == "/v1/messages"):
        # The simulated vLLM hands nothing over there.
        assert r.d.stats()["computed_tokens"] == 0
    await r.nothing_left()


def spoken(body: bytes, stream: bool) -> str:
    """All the text in an answer, however it is wrapped."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("text", "delta") and isinstance(inner, str):
                    found.append(inner)
                else:
                    walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk([event for event in events_of(body) if event != "[DONE]"] if stream else json.loads(body))
    return "".join(found)


async def test_what_the_metrics_count(rig: StartRig) -> None:
    r = await rig(policy="pairs", change=forced)
    for stream in (True, False, True):
        await r.check(story(stream, stream=stream))
    await r.nothing_left()
    decisions = await r.samples("warmroute_pd_decisions_total")
    assert sum(value for labels, value in decisions if labels["kind"] == "pair") == 3
    ((_, transfers),) = await r.samples("warmroute_pd_transfer_seconds_count")
    assert transfers == 2, "streams tell when it ended"
    assert await r.samples("warmroute_pd_leg_failures_total") == []


async def test_a_slow_reader_holds_nothing_of_the_prefill_engine(gateway: Begin, scripted: StartScripted) -> None:
    """The decode engine streams on for long: the other was let go when it began."""
    go = asyncio.Event()

    async def stream(seen: Seen) -> None:
        await seen.write(events(DELTA, end=False))
        await go.wait()
        await seen.write(b"0\r\n\r\n")

    p, d = await scripted(ok(PREFILLED)), await scripted(stream)
    running = await gateway(
        WorkerConfig(p.url, role="prefill", engine="generic", protocol="nixl"),
        WorkerConfig(d.url, role="decode", engine="generic", protocol="nixl"),
    )
    asked = asyncio.ensure_future(once(running.port, request(story("x", stream=True))))
    await until(lambda: d.seen)
    by_role = {target.worker.port: target for target in running.fleet.targets.values()}
    await until(lambda: by_role[p.port].running == 0)
    assert by_role[d.port].running == 1
    go.set()
    assert text_of(await asked, True) == "a"
