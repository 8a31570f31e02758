"""The doctor in the gateway: what it finds while requests run, and what that costs them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from gateway.config import Config, TenantConfig
from gateway.config_reader import Secret
from gateway.doctor import LARGEST
from gateway.run import Running
from gateway.sessions import Session
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, once, request, tell, until

RULES = "You are an agent. Follow the rules of the house and be brief. " * 40


def quick(config: Config) -> None:
    config.doctor.rate = 500.0


def tenants(config: Config) -> None:
    quick(config)
    config.tenants = [TenantConfig("x", [Secret("key-x")]), TenantConfig("y", [Secret("key-y")])]


async def say(running: Running, name: str, messages: list[dict[str, Any]], *lines: str, **fields: Any) -> None:
    sent = request(chat(messages=messages, max_tokens=4, **fields), f"x-session-id: {name}", *lines)
    answer = await once(running.port, sent)
    assert answer.status == 200
    messages.append(answer.json()["choices"][0]["message"])


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


async def sessions(running: Running, stamped: bool, count: int, key: str | None = None) -> None:
    """Agents whose system prompt has a time in the middle, or has not."""
    now = datetime(2026, 11, 30, 12)
    lines = () if key is None else (f"authorization: Bearer {key}",)
    for number in range(count):
        said: list[dict[str, Any]] = []
        for turn in range(4):
            now += timedelta(seconds=37)
            head = system(f"{RULES}It is {now:%Y-%m-%d %H:%M:%S}. {RULES}" if stamped else RULES * 2)
            said.append({"role": "user", "content": f"Do step {turn} of {number}. " * 20})
            messages = [head, *said]
            await say(running, f"{key}{number}", messages, *lines)
            said.append(messages[-1])


async def report(running: Running) -> dict[str, Any]:
    doctor = running.gateway.doctor
    assert doctor is not None
    await until(lambda: not doctor.report()["waiting"])
    return dict(await admin(running, "/doctor"))


async def test_a_time_in_the_system_prompt_is_found_named_and_counted(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware", change=tenants)
    await sessions(running, True, 4, "key-x")
    await sessions(running, False, 4, "key-y")
    told = await report(running)
    assert {finding["tenant"] for finding in told["findings"]} == {"x"}
    worst = told["findings"][0]
    assert worst["cause"] == "time"
    assert f"character {len(RULES) + 6} of the system prompt" in worst["text"]
    assert worst["text"].startswith("tenant x loses ")
    assert worst["tokens_lost"] > 1000
    assert 0.2 < worst["share_of_hits_lost"] < 1.0
    assert worst["example"] is None
    assert "2026" not in str(told)
    metrics = await admin(running, "/metrics")
    assert 'warmroute_prompt_breaks_total{cause="time",tenant="x"}' in metrics
    assert 'tenant="y"' not in "".join(line for line in metrics.splitlines() if "prompt_break" in line)
    session = running.sessions.named(b"key-x0", "x", "sim")
    assert session is not None
    page = await admin(running, f"/sessions/{session.key.hex()}")
    assert [each["cause"] for each in page["breaks"]][:1] == ["time"]


async def test_sessions_that_only_go_on_have_no_findings(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=quick)
    await sessions(running, False, 6)
    told = await report(running)
    assert told["findings"] == []
    assert told["examined"] > 0
    assert told["breaks"] == {"examined": 0, "skipped": 0}


async def test_thinking_that_the_template_strips_is_a_cause_of_its_own(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=quick)
    thought = "First I look at this and then at that. " * 60
    said = [system(RULES), {"role": "user", "content": "begin " * 200}]
    for turn in range(4):
        await say(running, "s", said)
        said[-1] = {"role": "assistant", "content": f"done {turn}", "reasoning_content": thought}
        # Within a turn its tools keep the thinking, and the user's next word drops it.
        said.append({"role": "tool", "tool_call_id": "c", "content": "result " * 150})
        await say(running, "s", said)
        said[-1] = {"role": "assistant", "content": f"done again {turn}", "reasoning_content": thought}
        said.append({"role": "user", "content": "go on " * 100})
    told = await report(running)
    assert {finding["cause"] for finding in told["findings"]} == {"thinking_stripped"}, told["findings"]


async def test_a_fan_out_and_retries_are_no_breaks(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=quick)
    said = [system(RULES), {"role": "user", "content": "begin " * 200}]
    await say(running, "s", said)
    for number in range(4):
        await say(running, "s", [*said, {"role": "user", "content": f"another way {number} " * 60}])
    assert (await report(running))["findings"] == []


async def test_examples_are_shown_only_where_the_operator_allows_it(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        quick(config)
        config.doctor.examples = True

    running = await gateway(await engine(), policy="cache_aware", change=change)
    await sessions(running, True, 2)
    worst = (await report(running))["findings"][0]
    assert "2026-11-30" in str(worst["example"])


async def test_it_can_be_turned_off(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.doctor.enabled = False

    running = await gateway(await engine(), policy="cache_aware", change=change)
    await sessions(running, True, 1)
    status, told = await tell(running, "GET", "/doctor")
    assert status == 404
    assert "doctor.enabled" in told["error"]["message"]


async def test_canonical_prompts_are_told_and_heal_what_they_can(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        quick(config)
        config.tenants = [
            TenantConfig("plain", [Secret("key-plain")]),
            TenantConfig("sorted", [Secret("key-sorted")], canonical=["tools", "json"]),
        ]

    running = await gateway(await engine(), policy="cache_aware", change=change)
    tools = [
        {"type": "function", "function": {"name": f"tool_{name}", "description": "It does. " * 30, "parameters": {}}}
        for name in "abcdef"
    ]
    hits = {}
    for tenant in ("plain", "sorted"):
        said = [system(RULES), {"role": "user", "content": "begin"}]
        for turn in range(4):
            shuffled = tools[turn:] + tools[:turn]
            sent = request(
                chat(messages=said, max_tokens=4, tools=shuffled),
                "x-session-id: s",
                f"authorization: Bearer key-{tenant}",
            )
            answer = await once(running.port, sent)
            told = answer.json()
            said += [told["choices"][0]["message"], {"role": "user", "content": "go on"}]
            done = ",".join(answer.all("x-warmroute-canonical")).split(",")
            assert ("tools" in done) is (tenant == "sorted")
        hits[tenant] = told["usage"]["prompt_tokens_details"]["cached_tokens"] / told["usage"]["prompt_tokens"]
    assert hits["sorted"] > 0.9
    assert hits["plain"] < 0.5
    findings = {finding["tenant"]: finding for finding in (await report(running))["findings"]}
    assert findings.keys() == {"plain"}
    assert findings["plain"]["cause"] == "tools_reordered"
    assert findings["plain"]["canonical_gain_tokens"] > 0


def small(config: Config) -> None:
    quick(config)
    config.doctor.memory = 1_000_000


async def streams(running: Running, count: int, size: int) -> list[Raw]:
    """So many that have begun, each with a body of that many bytes."""
    clients = []
    for number in range(count):
        client = await Raw.connect(running.port)
        body = chat(junk="x" * size, max_tokens=5000, ignore_eos=True, stream=True)
        await client.send(request(body, f"x-session-id: s{number}"))
        await client.reader.readuntil(b"\r\n\r\n")
        clients.append(client)
    return clients


async def test_bodies_of_streams_are_held_within_the_memory_that_was_given(gateway: Begin, engine: StartEngine) -> None:
    at = await engine(time_scale=1.0, max_running=100)
    running = await gateway(at, policy="cache_aware", change=small)
    doctor = running.gateway.doctor
    assert doctor is not None
    large = await streams(running, 2, LARGEST)
    assert doctor.held == 0
    clients = large + await streams(running, 12, 200_000)
    held = [len(exchange.ask.body) for exchange in running.gateway.exchanges if exchange.ask.body is not None]
    assert sum(held) == doctor.held and 600_000 < doctor.held <= 1_000_000
    assert doctor.skipped["memory"] == 12 - len(held) and doctor.skipped["too large"] == 2
    for client in clients:
        client.vanish()
    await until(lambda: not running.gateway.exchanges)
    for session in list(running.sessions.all()):
        running.sessions.drop(session)
    assert doctor.held <= 1_000_000 and doctor._held_back == 0


async def test_a_body_is_given_back_however_its_request_ends(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(time_scale=1.0), policy="cache_aware", change=small)
    doctor = running.gateway.doctor
    assert doctor is not None
    assert (await once(running.port, request(chat(max_tokens=1), "x-session-id: a"))).status == 200
    (client,) = await streams(running, 1, 1000)
    assert doctor._held_back > 1000
    session = running.sessions.named(b"s0", "anonymous", "sim")
    assert session is not None
    running.sessions.drop(session)
    client.vanish()
    await until(lambda: doctor._held_back == 0)
    # Nothing is kept of a session that ended meanwhile.
    assert session.hash not in doctor._kept

    def fails(session: Session, now: float) -> None:
        raise RuntimeError("a defect")

    running.sessions.turned = fails
    assert (await once(running.port, request(chat(max_tokens=1), "x-session-id: b"))).status == 200
    await until(lambda: running.gateway.defects == 1)
    assert doctor._held_back == 0
    running.sessions.turned = None
    running.gateway.defects = 0
