"""What engines report corrects what is believed of their caches."""

from __future__ import annotations

from random import Random
from statistics import median

from gateway.config import WorkerConfig
from gateway.run import Running
from gateway.workers import State
from load_tests.engine import Engine, EngineOptions
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, once, request, until

SHARED = "the quick brown fox jumps over the lazy dog " * 200


async def ask(running: Running, text: str, session: str) -> tuple[int, int, int]:
    """Tokens predicted to be cached, tokens found in the cache, tokens of the prompt."""
    body = chat(messages=[{"role": "user", "content": text}], max_tokens=1)
    answer = await once(running.port, request(body, f"X-Session-Id: {session}"))
    assert answer.status == 200
    usage = answer.json()["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return int(answer.one("x-warmroute-predicted-cached-tokens")), cached, usage["prompt_tokens"]


async def test_an_engine_that_finds_nothing_is_believed_to_hold_nothing_until_it_finds_something(
    gateway: Begin, engine: StartEngine
) -> None:
    cold = await engine(prefix_cache=False)
    running = await gateway(cold, policy="cache_aware")
    predicted = [(await ask(running, SHARED + str(at), f"s{at}"))[:2] for at in range(10)]
    assert all(found == 0 for _, found in predicted)
    assert all(believed > 1000 for believed, _ in predicted[1:4]), "nothing was known yet"
    assert [believed for believed, _ in predicted[4:]] == [0] * 6
    await cold.kill()
    (worker,) = running.fleet.workers.values()
    await until(lambda: worker.state is State.DOWN)
    warm = await Engine.start(EngineOptions(dialect="vllm", time_scale=0.02, port=cold.port))
    try:
        await until(lambda: worker.state is State.READY)
        told = [await ask(running, SHARED + str(at), f"t{at}") for at in range(6)]
        assert told[0][1] == 0
        assert all(found > 1000 for _, found, _ in told[1:])
        for believed, found, prompt in told[3:]:
            assert abs(believed - found) < 0.1 * prompt, "trusted again"
    finally:
        await warm.kill()


async def test_two_reports_of_nothing_are_no_verdict(gateway: Begin, engine: StartEngine) -> None:
    cold = await engine(prefix_cache=False)
    running = await gateway(cold, policy="cache_aware")
    for at in range(3):
        await ask(running, SHARED + str(at), f"s{at}")
    believed, found, _ = await ask(running, SHARED + "x", "x")
    assert believed > 1000
    assert found == 0


async def test_an_engine_with_a_quarter_of_its_assumed_cache_is_predicted_well_after_a_while(
    gateway: Begin, engine: StartEngine
) -> None:
    small = await engine(kv_tokens=16_384, time_scale=0)
    running = await gateway(WorkerConfig(small.url, kv_tokens=65_536), policy="cache_aware")
    draws, errors = Random(5), []
    texts = [" ".join(f"w{draws.randrange(10_000)}" for _ in range(450)) for _ in range(40)]
    async with await Raw.connect(running.port) as client:
        for _ in range(600):
            # Some come back often, most hardly ever.
            at = min(int(draws.expovariate(1 / 10)), len(texts) - 1)
            body = chat(messages=[{"role": "user", "content": texts[at]}], max_tokens=1)
            answer = await client.ask(request(body, f"X-Session-Id: s{at}"))
            usage = answer.json()["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            believed = int(answer.one("x-warmroute-predicted-cached-tokens"))
            errors.append(abs(cached - believed) / usage["prompt_tokens"])
    (target,) = running.fleet.targets.values()
    assert running.index.of(target.id).share < 0.6
    assert median(errors[-100:]) < 0.1
    assert sum(errors[-100:]) < sum(errors[40:140]) / 2, "and rarely wrong, too"
