"""Who is served in what order when an engine serves one at a time, and what reloads do to those that wait; over HTTP."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from gateway.config import LimitsConfig, PriorityConfig, TenantConfig
from gateway.run import Running
from tests.gateway.conftest import Begin
from tests.gateway.talk import chat, once, request, settled, until
from tests.gateway.test_admission import Asked, having, held, tenant, told
from tests.gateway.test_admission_adversarial import empty

__all__ = ["held"]

PROMPT = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 400}]


async def order(
    running: Running, worker: Any, counts: dict[str, int], fields: dict[str, Any] | None = None
) -> list[str]:
    """Whose requests the engine saw, in order, when all of them waited at first."""
    asked = Asked(running)
    await asked.send("first-0", key=next(iter(counts)), messages=PROMPT)
    for name, number in counts.items():
        for each in range(number):
            await asked.send(f"{name}-{each}", key=name, messages=PROMPT, **(fields or {}))
    worker.let(1 + sum(counts.values()))
    for name in asked.tasks:
        assert await asked.status(name) == 200
    await settled(running)
    empty(running)
    return [name.split("-")[0] for name in worker.asked[1:]]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)])
async def test_tenants_take_turns_by_their_weights(gateway: Begin, held: Any, weights: tuple[float, float]) -> None:
    worker = await held()
    tenants = [tenant("a", weight=weights[0]), tenant("b", weight=weights[1])]
    running = await gateway(worker.config, policy="cache_aware", change=having(*tenants))
    seen = await order(running, worker, {"a": 30, "b": 30})
    # While both wait.
    both = seen[:20]
    share = weights[0] / sum(weights)
    assert abs(both.count("a") - 20 * share) <= 4, seen


async def test_three_tenants_that_ask_for_unlike_much_get_alike(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, policy="cache_aware", change=having(*[tenant(name) for name in "abc"]))
    seen = await order(running, worker, {"a": 40, "b": 10, "c": 5})
    last = max(at for at, name in enumerate(seen) if name == "c")
    assert last <= 19, seen
    assert seen[:15].count("a") <= 7, seen


async def test_a_priority_that_is_behind_gets_its_share_and_no_more(gateway: Begin, held: Any) -> None:
    worker = await held()
    levels = {"interactive": PriorityConfig(), "bulk": PriorityConfig(share=0.2)}
    change = having(tenant("a"), tenant("b", priority="bulk"), priorities=levels)
    running = await gateway(worker.config, policy="cache_aware", change=change)
    seen = await order(running, worker, {"a": 40, "b": 40})
    assert 4 <= seen[:40].count("b") <= 14, seen


# -- reloads while requests wait ----------------------------------------------------------------------------------------


def reload(running: Running, tenants: list[TenantConfig], **fields: Any) -> None:
    """Follow another configuration, as if the file had changed."""
    wanted = deepcopy(running.config)
    having(*tenants, **fields)(wanted)
    assert running.reloading._follow(running.reloading._plan(wanted), False).changed


async def test_a_limit_that_is_lifted_lets_those_go_that_waited_for_it(gateway: Begin, held: Any) -> None:
    worker = await held(most=None)
    running = await gateway(worker.config, change=having(tenant("a", limits=LimitsConfig(concurrency=1))))
    asked = Asked(running)
    for name in "abc":
        await asked.send(name, key="a")
    await until(lambda: worker.asked == ["a"])
    reload(running, [tenant("a")])
    await until(lambda: worker.asked == ["a", "b", "c"])
    worker.let(3)
    for name in "abc":
        assert await asked.status(name) == 200
    await settled(running)
    empty(running)


async def test_a_tenant_that_is_taken_out_while_its_requests_wait_has_them_served(gateway: Begin, held: Any) -> None:
    worker = await held()
    limited = tenant("a", limits=LimitsConfig(concurrency=5, requests_per_minute=100, prompt_tokens_per_minute=100_000))
    running = await gateway(worker.config, change=having(limited, tenant("b")))
    asked = Asked(running)
    for name in "abc":
        await asked.send(name, key="a")
    reload(running, [tenant("b")])
    assert (await once(running.port, request(chat(), "Authorization: Bearer key-a"))).status == 401
    worker.let(3)
    for name in "abc":
        assert await asked.status(name) == 200
    await settled(running)
    empty(running)


async def test_bounds_that_become_smaller_turn_away_the_next_and_nobody_who_waits(gateway: Begin, held: Any) -> None:
    worker = await held()
    running = await gateway(worker.config, change=having(tenant("a"), tenant("b")))
    asked = Asked(running)
    for name in "abcd":
        await asked.send(name, key="a")
    reload(running, [tenant("a", weight=3.0, limits=LimitsConfig(concurrency=1)), tenant("b")], queue=2)
    told(await once(running.port, request(chat(), "Authorization: Bearer key-b")), "queue_full")
    worker.let(4)
    for name in "abcd":
        assert await asked.status(name) == 200
    assert worker.asked == list("abcd")
    await settled(running)
    empty(running)
