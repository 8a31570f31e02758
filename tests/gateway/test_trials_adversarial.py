"""That a policy which is only asked changes nothing, and that a rollout keeps to its sides; over HTTP, by comparison."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import ModelConfig, RolloutConfig, ShadowConfig, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import ok
from tests.gateway.talk import Response, chat, once, request, tell, until
from tests.gateway.test_admission import metric, tenant
from tests.gateway.test_trials import having

LONG = "the quick brown fox jumps over the lazy dog " * 60
POLICIES = ["round_robin", "least_load", "cache_aware", "session", "consistent_hash", "prefix_hash"]


def talk(number: int, turn: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} {each} {LONG}"} for each in range(turn + 1)]


async def served(running: Running) -> list[tuple[str, str]]:
    """By whom and why, for the same conversations each time."""
    found = []
    for turn in range(4):
        for number in range(8):
            body = chat(max_tokens=1, messages=talk(number, turn))
            named = f"x-request-id: {turn}-{number}", f"x-session-id: s{number}"
            answer = await once(running.port, request(body, "Authorization: Bearer key-a", *named))
            assert answer.status == 200
            found.append((answer.one("x-warmroute-worker"), answer.one("x-warmroute-decision")))
            await until(lambda: not running.gateway.exchanges)
    return found


def state(running: Running) -> Any:
    homes = sorted((session.key, session.home, session.turns) for session in running.sessions.all())
    ordinals = {name: model.ordinal for name, model in running.gateway.routing.models.items()}
    charges = [(target.running, target.busy, target.homes) for target in running.fleet.targets.values()]
    return homes, ordinals, charges


@pytest.mark.parametrize("policy", POLICIES)
async def test_with_a_shadow_all_goes_as_without(gateway: Begin, engine: StartEngine, policy: str) -> None:
    engines = [await engine(time_scale=0.0) for _ in range(3)]
    plain = await gateway(*engines, change=having(tenant("a", policy=policy)))
    told = await served(plain)
    shadow = "lmetric" if policy != "session" else "cache_aware"
    beside = await gateway(*engines, change=having(tenant("a", policy=policy, shadow=ShadowConfig(shadow, 1.0))))
    again = await served(beside)
    if policy == "cache_aware":
        # What engines tell of time decides between equals.
        assert [reason for _, reason in again] == [reason for _, reason in told]
    else:
        assert again == told
    assert state(beside)[1] == state(plain)[1]
    assert await metric(beside, "warmroute_shadow_decisions_total") == 32
    if policy == "session":
        assert [each[1:] for each in state(beside)[0]] == [each[1:] for each in state(plain)[0]]


async def test_asking_what_would_be_done_counts_no_shadow_and_makes_no_session(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine() for _ in range(2)]
    model = ModelConfig(policy="round_robin", shadow=ShadowConfig("cache_aware", 1.0))
    running = await gateway(*engines, change=having(models={"sim": model}))
    await tell(running, "POST", "/route", chat())
    before = state(running)
    for _ in range(5):
        status, told = await tell(running, "POST", "/route", chat(messages=talk(1, 1)))
        assert (status, told["decision"], told["shadow"]["policy"]) == (200, "round_robin", "cache_aware"), told
    assert state(running) == before
    assert await metric(running, "warmroute_shadow_decisions_total") == 0


async def test_what_only_one_worker_can_serve_is_no_case_for_a_shadow(gateway: Begin, scripted: StartScripted) -> None:
    stored = ok(b'{"id":"resp_abc","object":"response","output":[]}')
    workers = [await scripted(stored) for _ in range(2)]
    change = having(tenant("a", policy="round_robin", shadow=ShadowConfig("least_load", 1.0)))
    running = await gateway(*workers, change=change)

    async def ask(**fields: str) -> Response:
        body = {"model": "sim", "input": "hi", **fields}
        return await once(running.port, request(body, "Authorization: Bearer key-a", path="/v1/responses"))

    assert (await ask()).status == 200
    counted = await metric(running, "warmroute_shadow_decisions_total")
    await until(lambda: not running.gateway.exchanges)
    for _ in range(4):
        assert (await ask(previous_response_id="resp_abc")).one("x-warmroute-decision") == "round_robin/pinned"
    assert await metric(running, "warmroute_shadow_decisions_total") == counted


async def test_a_shadow_over_pairs_is_asked_about_pairs(gateway: Begin, engine: StartEngine) -> None:
    prefill = [await engine(role="prefill") for _ in range(2)]
    decode = [await engine(role="decode") for _ in range(2)]
    workers = [WorkerConfig(each.url, role="prefill") for each in prefill]
    workers += [WorkerConfig(each.url, role="decode") for each in decode]
    change = having(tenant("a", policy="round_robin", shadow=ShadowConfig("round_robin", 1.0)))
    running = await gateway(*workers, change=change)
    for number in range(6):
        body = chat(max_tokens=2, messages=talk(number, 3))
        assert (await once(running.port, request(body, "Authorization: Bearer key-a"))).status == 200
    assert await metric(running, "warmroute_shadow_decisions_total", agrees="true") == 6
    assert await metric(running, "warmroute_shadow_seconds_total") == 0


async def test_a_rollout_keeps_sessions_that_are_known_by_what_they_say_on_their_side(
    gateway: Begin, engine: StartEngine
) -> None:
    change = having(tenant("a", policy="session", rollout=RolloutConfig("cache_aware", 0.5)))
    running = await gateway(*[await engine() for _ in range(2)], change=change)
    sides: dict[int, set[str]] = {}
    for turn in range(4):
        for number in range(16):
            body = chat(max_tokens=1, messages=talk(number, turn))
            answer = await once(running.port, request(body, "Authorization: Bearer key-a"))
            sides.setdefault(number, set()).add(answer.one("x-warmroute-decision").split("/")[0])
            await until(lambda: not running.gateway.exchanges)
    assert all(len(seen) == 1 for seen in sides.values()), sides
    assert {next(iter(seen)) for seen in sides.values()} == {"session", "cache_aware"}


async def test_a_session_that_a_client_names_keeps_its_side_whatever_it_says(
    gateway: Begin, engine: StartEngine
) -> None:
    change = having(tenant("a", policy="session", rollout=RolloutConfig("cache_aware", 0.5)))
    running = await gateway(*[await engine() for _ in range(2)], change=change)
    for number in range(12):
        seen = set()
        for again in range(3):
            body = chat(max_tokens=1, messages=talk(number, again))
            named = f"x-session-id: agent-{number}"
            answer = await once(running.port, request(body, "Authorization: Bearer key-a", named))
            seen.add(answer.one("x-warmroute-decision").split("/")[0])
        assert len(seen) == 1
