"""Policies that are tried: for a part of the sessions, or beside, only to be compared; over HTTP."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gateway.config import Config, ModelConfig, RolloutConfig, ShadowConfig, parse
from gateway.config_reader import ConfigError
from gateway.run import Running
from gateway.trials import Part
from policies.base import load
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import admin, chat, once, request, tell
from tests.gateway.test_admission import metric, tenant

LONG = "the quick brown fox jumps over the lazy dog " * 200


def having(*tenants: Any, **fields: Any) -> Any:
    def change(config: Config) -> None:
        config.tenants = list(tenants)
        for name, value in fields.items():
            setattr(config, name, value)

    return change


async def decision(running: Running, key: str = "a", *lines: str, **fields: Any) -> str:
    fields.setdefault("max_tokens", 1)
    answer = await once(running.port, request(chat(**fields), f"Authorization: Bearer key-{key}", *lines))
    assert answer.status == 200
    return answer.one("x-warmroute-decision").split("/")[0]


# -- per tenant and model -----------------------------------------------------------------------------------------------


async def test_a_tenant_may_have_a_policy_for_each_model(gateway: Begin, engine: StartEngine) -> None:
    one, two = await engine(models=("one",)), await engine(models=("two",))
    tenants = [tenant("a", policy="least_load", policies={"two": "round_robin"}), tenant("b")]
    running = await gateway(one, two, change=having(*tenants, models={"two": ModelConfig(policy="random")}))
    assert await decision(running, model="one") == "least_load"
    assert await decision(running, model="two") == "round_robin"
    assert await decision(running, "b", model="two") == "random"


# -- a part of the sessions ---------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_a_larger_share_gives_nobody_back(one: float, other: float, number: int) -> None:
    policy = load("random")
    small, large = Part(policy, min(one, other)), Part(policy, max(one, other))
    assert not small.has(number) or large.has(number)
    assert not Part(policy, 0.0).has(number)
    assert Part(policy, 1.0).has(number)


async def test_a_rollout_takes_its_share_of_the_sessions_and_keeps_each(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine() for _ in range(2)]

    def with_share(share: float) -> Any:
        return having(tenant("a", policy="session", rollout=RolloutConfig("cache_aware", share)))

    running = await gateway(*engines, change=with_share(0.3))
    sides: dict[str, set[str]] = {}
    for turn in range(3):
        for number in range(60):
            name = f"s{number}"
            told = await decision(running, "a", f"x-session-id: {name}", messages=_talk(number, turn))
            sides.setdefault(name, set()).add(told)
    assert all(len(seen) == 1 for seen in sides.values()), "a session is on one side for good"
    new = {name for name, seen in sides.items() if seen == {"cache_aware"}}
    assert 8 <= len(new) <= 30
    # Elsewhere, and after a restart, they are on the same side; with a larger share they still are.
    again = await gateway(*engines, change=with_share(0.3))
    assert {name for name in sides if await decision(again, "a", f"x-session-id: {name}") == "cache_aware"} == new
    more = await gateway(*engines, change=with_share(0.7))
    taken = {name for name in sides if await decision(more, "a", f"x-session-id: {name}") == "cache_aware"}
    assert new < taken


def _talk(number: int, turn: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{number} {each} {LONG[:600]}"} for each in range(turn + 1)]


async def test_without_sessions_requests_are_shared_out_one_by_one(gateway: Begin, engine: StartEngine) -> None:
    change = having(tenant("a", policy="round_robin", rollout=RolloutConfig("least_load", 0.5)))
    running = await gateway(await engine(), await engine(), change=change)
    said = [[{"role": "user", "content": str(number)}] for number in range(60)]
    seen = Counter([await decision(running, messages=messages) for messages in said])
    assert set(seen) == {"round_robin", "least_load"}


# -- shadows ------------------------------------------------------------------------------------------------------------


async def test_a_shadow_that_is_the_same_agrees_and_would_have_saved_nothing(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine() for _ in range(3)]
    change = having(tenant("a", policy="cache_aware", shadow=ShadowConfig("cache_aware", 1.0)))
    running = await gateway(*engines, change=change)
    for number in range(30):
        await decision(running, "a", f"x-session-id: s{number % 10}", messages=_talk(number % 10, number // 10))
    labels = {"tenant": "a", "policy": "cache_aware", "shadow": "cache_aware"}
    assert await metric(running, "warmroute_shadow_decisions_total", agrees="true", **labels) == 30
    assert await metric(running, "warmroute_shadow_seconds_total") == 0
    assert await metric(running, "warmroute_shadow_tokens_total") == 0


async def test_a_better_shadow_is_seen_to_be_better_and_changes_nothing(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine() for _ in range(3)]
    change = having(tenant("a", policy="round_robin", shadow=ShadowConfig("cache_aware", 1.0)))
    running = await gateway(*engines, change=change)
    workers = []
    for turn in range(8):
        body = chat(max_tokens=1, messages=_talk(7, turn))
        answer = await once(running.port, request(body, "Authorization: Bearer key-a", "x-session-id: s"))
        workers.append(answer.one("x-warmroute-worker"))
        assert answer.one("x-warmroute-decision") == "round_robin/turn"
    assert len({*workers[:3]}) == 3, "round robin goes round"
    assert await metric(running, "warmroute_shadow_decisions_total", agrees="false") >= 4
    better = await metric(running, "warmroute_shadow_tokens_total", than_ours="better")
    assert better > 200
    assert await metric(running, "warmroute_shadow_tokens_total", than_ours="worse") <= better / 4
    assert await metric(running, "warmroute_shadow_seconds_total", than_ours="better") > 0


async def test_a_share_of_the_requests_is_asked_about(gateway: Begin, engine: StartEngine) -> None:
    change = having(tenant("a", policy="round_robin", shadow=ShadowConfig("least_load", 0.25)), tenant("b"))
    running = await gateway(await engine(), await engine(), change=change)
    for _ in range(120):
        await decision(running)
    await decision(running, "b")
    assert 12 <= await metric(running, "warmroute_shadow_decisions_total") <= 50
    assert await metric(running, "warmroute_shadow_decisions_total", tenant="b") == 0


async def test_a_shadow_that_fails_costs_a_defect_and_no_request(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(
        await engine(), change=having(tenant("a", policy="round_robin", shadow=ShadowConfig("least_load", 1.0)))
    )

    class Broken:
        name, needs_prefix, needs_session = "broken", False, False

        def choose(self, *told: object) -> object:
            raise ArithmeticError("a policy of somebody's")

    ours = running.gateway.routing.tenants["a"].policies
    assert ours is not None
    assert ours.shadow is not None
    ours.shadow.policy = Broken()  # type: ignore[assignment]
    assert await decision(running) == "round_robin"
    assert running.gateway.defects == 1
    running.gateway.defects = 0


async def test_the_dry_run_tells_what_the_shadow_would_do(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.models = {"sim": ModelConfig(policy="round_robin", shadow=ShadowConfig("cache_aware", 1.0))}

    running = await gateway(await engine(), await engine(), change=change)
    status, told = await tell(running, "POST", "/route", chat())
    assert status == 200
    assert told["decision"] == "round_robin"
    assert told["shadow"]["policy"] == "cache_aware"
    assert set(told["shadow"]) == {"policy", "target", "agrees", "saves_ms", "saves_tokens"}
    assert "warmroute_shadow_decisions_total{" not in await admin(running, "/metrics")


@pytest.mark.parametrize(
    ("text", "key", "cure"),
    [
        ("models: {m: {shadow: {policy: cache_awar}}}", "models.m.shadow.policy", "did you mean 'cache_aware'"),
        ("models: {m: {rollout: {policy: random, share: 2}}}", "models.m.rollout.share", "from 0 to 1"),
        ("models: {m: {rollout: {policy: random}}}", "models.m.rollout", "share"),
        ("tenants: [{name: a, keys: [k], policies: {m: rnd}}]", "tenants[0].policies.m", "no policy is called 'rnd'"),
        (
            "{models: {m: {policy: random}}, tenants: [{name: a, keys: [k], shadow: {policy: random}}]}",
            "tenants[0].shadow",
            "Name the tenant's policy too",
        ),
    ],
)
def test_what_is_wrong_with_trials_is_told_with_the_cure(text: str, key: str, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, {})
    (problem,) = caught.value.problems
    assert problem.key == key
    assert cure in problem.message
