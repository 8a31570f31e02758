"""`GET /sessions/{id}`: what an operator can see of one session."""

from __future__ import annotations

from typing import Any

from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import admin, chat, once, request, tell, until

SYSTEM = {"role": "system", "content": "You are an agent with many rules. " * 80}


async def turn(running: Running, name: str, messages: list[dict[str, Any]], *lines: str) -> dict[str, Any]:
    """One turn of a session; its usage."""
    answer = await once(running.port, request(chat(messages=messages, max_tokens=4), f"x-session-id: {name}", *lines))
    assert answer.status == 200
    told = answer.json()
    messages.append(told["choices"][0]["message"])
    return dict(told["usage"])


async def seen(running: Running, name: str) -> dict[str, Any]:
    session = running.sessions.named(name.encode(), "anonymous", "sim")
    assert session is not None
    return dict(await admin(running, f"/sessions/{session.key.hex()}"))


async def test_it_tells_turns_home_holdings_and_hits(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    usages = []
    for _ in range(10):
        usages.append(await turn(running, "s", messages))
        messages.append({"role": "user", "content": "go on with this"})
    told = await seen(running, "s")
    assert (told["turns"], told["running"], told["source"], told["parent"]) == (10, 0, "x-session-id", None)
    assert told["why"] in ("load", "prefix")
    # The last eight turns, as the engine reported them.
    assert [(hit["prompt_tokens"], hit["cached_tokens"]) for hit in told["hits"]] == [
        (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) for usage in usages[-8:]
    ]
    assert told["hit_rate"] > 0.8
    ((holder, tokens),) = told["holdings"].items()
    assert holder == told["home"]
    assert 0.8 * usages[-1]["prompt_tokens"] <= tokens <= usages[-1]["prompt_tokens"]


async def test_parents_and_children_are_named(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    await turn(running, "mother", [SYSTEM, {"role": "user", "content": "hello"}])
    for child in ("first", "second"):
        await turn(running, child, [SYSTEM, {"role": "user", "content": child}], "x-parent-session-id: mother")
    mother, first = await seen(running, "mother"), await seen(running, "first")
    assert mother["children_total"] == 2
    assert first["id"] in mother["children"]
    assert first["parent"] == mother["id"]


async def test_a_move_by_the_operator_is_told_as_such(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    await turn(running, "s", [SYSTEM, {"role": "user", "content": "hello"}])
    before = await seen(running, "s")
    other = next(t.name for t in running.fleet.targets.values() if t.name != before["home"])
    assert (await tell(running, "POST", f"/sessions/{before['id']}/move", {"to": other}))[0] == 200
    after = await seen(running, "s")
    assert (after["home"], after["why"]) == (other, "moved_by_operator")
    # To whom the policy prefers: anybody but where it is.
    assert (await tell(running, "POST", f"/sessions/{before['id']}/move"))[1]["home"] == before["home"]


async def test_whether_its_cache_will_last_is_told_with_the_numbers(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Any) -> None:
        from gateway.config import ModelConfig

        config.models["sim"] = ModelConfig(kv_bytes=100_000)

    running = await gateway(await engine(kv_tokens=40_000), policy="cache_aware", change=change)
    messages = [SYSTEM, {"role": "user", "content": "hello"}]
    await turn(running, "s", messages)
    returns = (await seen(running, "s"))["returns"]
    assert returns["expected_seconds"] == 5.0
    assert returns["learned"] is False
    assert returns["room_tokens"] == 40_000
    assert returns["room_bytes"] == 4_000_000_000
    assert returns["survives"] is True
    assert "(4 GB): it survives" in returns["says"]
    dry = (await tell(running, "POST", "/route", chat(messages=messages, prompt_cache_key="x")))[1]
    assert dry["session"]["returns"] is None


async def test_a_cache_that_is_too_small_for_those_who_return_is_said_with_the_numbers(
    gateway: Begin, engine: StartEngine
) -> None:
    running = await gateway(await engine(kv_tokens=4_000, time_scale=0.0), policy="cache_aware")
    said = {f"s{number}": [{"role": "user", "content": f"{number} " * 600}] for number in range(24)}
    for messages in said.values():
        await turn(running, f"s{messages[0]['content'].split()[0]}", messages)
    name, messages = next(iter(said.items()))
    messages.append({"role": "user", "content": "go on"})
    dry = (await tell(running, "POST", "/route", chat(messages=messages, prompt_cache_key=name)))[1]
    assert dry["session"]["returns"]["survives"] is False
    assert dry["session"]["returns"]["needed_tokens"] > dry["session"]["returns"]["room_tokens"]
    assert "it cannot survive" in dry["session"]["returns"]["says"]
    # Of the fleet it is said when sessions were seen to return.
    (worker,) = (await admin(running, "/workers"))["workers"]
    assert "returning" not in [lack["code"] for lack in worker["lacks"]]
    for session in running.sessions.all():
        # As if its tool had run for five seconds.
        session.ended -= 5.0
    for name, messages in said.items():
        await turn(running, name, [*messages, {"role": "user", "content": "go on"}])
    await until(lambda: "returning" in running.fleet.workers[worker["id"]].observed)
    (worker,) = (await admin(running, "/workers"))["workers"]
    assert "returning" in [lack["code"] for lack in worker["lacks"]]
    assert "it cannot survive" in worker["targets"][0]["returns"]
