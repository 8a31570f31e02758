"""What `/metrics` says: that Prometheus can read it, that it holds nobody up, that hits separate by where they were lost, and
that nothing stays of who left."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import httpx
import pytest
from aiohttp import web
from hypothesis import given, strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.exposition import Exposition
from gateway.metrics import Metrics, hit_of
from gateway.run import Running
from gateway.series import Counter, Gauge, Histogram
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, chat, long_chat, once, request, settled, until

Samples = dict[str, float]


async def scraped(running: Running) -> dict[str, Samples]:
    """Name -> label text in Prometheus's order -> value."""
    found: dict[str, Samples] = defaultdict(dict)
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"http://127.0.0.1:{running.admin.port}/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name][",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))] = sample.value
    return found


async def total(running: Running, name: str) -> float:
    return sum((await scraped(running)).get(name, {}).values())


# -- the text -------------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.tuples(st.text(st.characters(exclude_categories=("Cs",))), st.sampled_from(["a", 'b"\\\n'])),
        st.floats(0, 1e18),
        max_size=5,
    )
)
def test_prometheus_reads_back_whatever_labels_and_numbers_there_are(values: dict[tuple[str, str], float]) -> None:
    counter = Counter("tests", "Some \\ help.\nMore.", ("one", "two"))
    histogram = Histogram("spans", "Times.", (0.1, 1), ("one", "two"))
    gauge = Gauge("level", "A level.", lambda: values.items(), ("one", "two"))
    for labels, value in values.items():
        counter.add(labels, value)
        histogram.observe(labels, value)
    text = "".join([*counter.pieces(), *histogram.pieces(), *gauge.pieces()])
    read = {
        (sample.name, *(sample.labels[name] for name in ("one", "two", "le") if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    # The parser strips what stands around a line, Prometheus does not.
    kept = {labels: value for labels, value in values.items() if labels[0] == labels[0].strip()}
    for labels, value in kept.items():
        assert read["tests_total", *labels] == value
        assert read["level", *labels] == value
        assert read["spans_count", *labels] == 1
        assert read["spans_sum", *labels] == value
        buckets = [read["spans_bucket", *labels, bound] for bound in ("0.1", "1.0", "+Inf")]
        assert buckets == [float(value <= 0.1), float(value <= 1), 1]


def test_a_hit_is_called_by_its_part_of_the_prompt() -> None:
    told = [hit_of(cached, 100) for cached in (0, 9, 10, 49, 50, 89, 90, 100, None)]
    assert told == ["none", "none", "some", "some", "most", "most", "all", "all", "unknown"]
    assert hit_of(0, 0) == hit_of(5, None) == "unknown"


async def test_a_large_fleets_metrics_are_written_between_other_work_and_then_there_at_once() -> None:
    writings = 0

    def pieces() -> Iterator[str]:
        nonlocal writings
        writings += 1
        for number in range(20):
            until = time.thread_time() + 0.002
            while time.thread_time() < until:
                pass
            yield f'a_total{{n="{number}"}} {writings}\n'

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    exposition = Exposition(pieces)
    other = asyncio.create_task(others())
    try:
        asked = asyncio.gather(*[exposition.read() for _ in range(8)])
        before = turns
        texts = await asked
        assert writings == 2, "one for all who ask, after one that tells what it costs"
        assert turns - before >= 15
        assert set(texts) == {texts[0]}
        assert texts[0].count(b"\n") == 20
        before = turns
        assert await exposition.read() == texts[0]
        assert turns - before <= 1, "it was there"
        await until(lambda: writings > 2, 30)
    finally:
        other.cancel()
        await exposition.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "metrics"]


async def test_who_asks_for_metrics_that_cannot_be_written_is_told() -> None:
    broken = False

    def pieces() -> Iterator[str]:
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        if broken:
            raise RuntimeError("a gauge failed")
        yield "a 1\n"

    exposition = Exposition(pieces)
    broken = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a gauge failed"):
            async with asyncio.timeout(5):
                await exposition.read()
    await exposition.stop()


# -- hits, and where they were lost -----------------------------------------------------------------------------------------


def text_of(name: str, words: int = 800) -> str:
    random = Random(name)
    return " ".join(random.choice(("alpha", "beta", "gamma", "delta")) for _ in range(words))


async def ask(running: Running, text: str, session: str | None = None) -> dict[str, int]:
    body = chat(messages=[{"role": "user", "content": text}], max_tokens=1)
    fields = [] if session is None else [f"X-Session-Id: {session}"]
    answer = await once(running.port, request(body, *fields))
    assert answer.status == 200
    usage = answer.json()["usage"]
    return {
        "prompt": usage["prompt_tokens"],
        "cached": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
    }


async def test_what_was_evicted_was_seen_all_the_same(gateway: Begin, engine: StartEngine) -> None:
    """Of a prompt that comes again when its cache has forgotten it nothing is predicted, and the ceiling tells that it was."""
    small = await engine(kv_tokens=2_048, block_size=16)
    running = await gateway(small, policy="cache_aware")
    for name in ("one", "two", "three", "four", "five"):
        await ask(running, text_of(name))
    before = await scraped(running)
    assert sum(before["warmroute_ceiling_cached_tokens_total"].values()) < 100, "all were new but for the template"
    usage = await ask(running, text_of("one"))
    assert usage["cached"] < 100
    after = await scraped(running)
    grown = {
        name: sum(after[f"warmroute_{name}_total"].values()) - sum(before[f"warmroute_{name}_total"].values())
        for name in (
            "ceiling_cached_tokens",
            "best_cached_tokens",
            "predicted_cached_tokens",
            "predicted_prompt_tokens",
        )
    }
    assert grown["ceiling_cached_tokens"] > 0.8 * grown["predicted_prompt_tokens"]
    assert grown["best_cached_tokens"] < 0.3 * grown["predicted_prompt_tokens"]
    assert grown["predicted_cached_tokens"] <= grown["best_cached_tokens"]


async def test_what_a_target_that_may_not_be_used_holds_is_lost_to_routing(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    await ask(running, text_of("shared"), "a")
    (home,) = [target for target in running.fleet.targets.values() if target.homes]
    running.moving.drain(home.worker)
    before = await scraped(running)
    usage = await ask(running, text_of("shared"), "b")
    assert usage["cached"] < 100
    after = await scraped(running)
    best, predicted, ceiling = (
        sum(after[f"warmroute_{name}_cached_tokens_total"].values())
        - sum(before[f"warmroute_{name}_cached_tokens_total"].values())
        for name in ("best", "predicted", "ceiling")
    )
    assert predicted < 100
    assert 0.8 * usage["prompt"] < best <= ceiling


async def test_a_growing_session_is_all_ceiling_but_for_what_is_new(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    messages = [{"role": "user", "content": text_of("start")}]
    prompt = 0
    for turn in range(4):
        body = chat(messages=messages, max_tokens=30)
        answer = await once(running.port, request(body, "X-Session-Id: growing"))
        prompt += answer.json()["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": text_of(f"turn {turn}", 40)})
    found = await scraped(running)
    ceiling, cached, base = (
        sum(found[f"warmroute_{name}_total"].values())
        for name in ("ceiling_cached_tokens", "cached_tokens", "predicted_prompt_tokens")
    )
    assert 0.6 < cached / prompt < 1
    assert abs(ceiling - cached) < 0.1 * base
    hits = {labels.split("hit=")[1].split(",")[0] for labels in found["warmroute_inter_token_seconds_count"]}
    assert hits <= {"none", "most", "all", "some"}


async def test_engines_own_counts_are_told_beside_ours(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(), await engine(dialect="sglang")]
    running = await gateway(*engines, change=lambda config: setattr(config.probes, "load", 0.05))
    for worker in running.fleet.workers.values():
        assert worker.facts.engine in ("vllm", "sglang")
    # Counting begins with the first look.
    await asyncio.sleep(1.0)
    usages = [await ask(running, text_of("counted")) for _ in range(6)]
    client = await Raw.connect(running.port)
    await client.send(request(long_chat(stream=True)))
    await client.head()
    client.vanish()
    await until(lambda: sum(each.stats()["aborts"] for each in engines) == 1)
    prompt, cached = (sum(each.stats()[name] for each in engines) for name in ("prompt_tokens", "cached_tokens"))
    assert cached == sum(usage["cached"] for usage in usages) > 0
    async with asyncio.timeout(20):
        while (
            await total(running, "warmroute_engine_prompt_tokens_total") != prompt
            or await total(running, "warmroute_engine_cached_tokens_total") != cached
            or await total(running, "warmroute_engine_aborts_total") != 1
        ):
            await asyncio.sleep(0.05)


# -- who left ---------------------------------------------------------------------------------------------------------------


async def test_of_a_worker_that_was_removed_no_series_is_left(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(
        await engine(), await engine(), policy="cache_aware", change=lambda config: setattr(config.probes, "load", 0.05)
    )
    for at in range(8):
        await ask(running, text_of(f"{at}"), f"s{at}")
    gone, stays = running.fleet.workers.values()
    before = await scraped(running)
    assert any(gone.id in labels for samples in before.values() for labels in samples)
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.delete(f"http://127.0.0.1:{running.admin.port}/workers/{gone.id}")
    assert answer.status_code == 200
    after = await scraped(running)
    assert not [name for name, samples in after.items() if any(gone.id in labels for labels in samples)]
    assert any(stays.id in labels for samples in after.values() for labels in samples)


def test_dropping_takes_histograms_and_tallies_along() -> None:
    metrics = Metrics()
    for tenant in ("stays", "goes"):
        tally = metrics.tally(tenant, "m", "p", "t")
        tally.sent("home", 0.001)
        tally.ended("chat", "ok", 0.1)
        tally.first_token("1", "all", 0.1)
        tally.between_tokens("all", 0.1)
    metrics.drop("tenant", "goes")
    text = "".join(metrics.pieces())
    assert "goes" not in text
    assert text.count('tenant="stays"') > 40
    metrics.tally("goes", "m", "p", "t").sent("home", 0.001)
    assert 'tenant="goes"' in "".join(metrics.pieces()), "one that comes back is counted again"


async def test_what_the_process_takes_and_what_runs_is_told(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    for _ in range(60):
        # Of one in eight.
        await ask(running, "hello")
    found = await scraped(running)
    assert found["process_resident_memory_bytes"][""] > 1e6
    assert found["process_max_fds"][""] >= found["process_open_fds"][""] > 3
    ((labels, value),) = found["warmroute_build_info"].items()
    assert value == 1
    assert "version=" in labels
    stages = found["warmroute_stage_seconds_count"]
    assert 0 < stages["stage=read"] == stages["stage=match"] == stages["stage=choose"] == stages["stage=write"] < 60
    assert stages["stage=tokenize"] == 0


async def test_a_metrics_page_that_hangs_costs_no_look_at_the_load(gateway: Begin, engine: StartEngine) -> None:
    """SGLang tells its load elsewhere."""
    behind = await engine("sglang")

    async def serve(asked: web.Request) -> web.Response:
        if asked.path == "/metrics":
            await asyncio.sleep(60)
        async with httpx.AsyncClient() as http:
            found = await http.get(behind.url + str(asked.rel_url))
        return web.Response(body=found.content, status=found.status_code, content_type="application/json")

    application = web.Application()
    application.router.add_get("/{path:.*}", serve)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        running = await gateway(url, change=lambda config: setattr(config.probes, "load", 0.05))
        (target,) = running.fleet.targets.values()
        assert target.worker.facts.engine == "sglang"
        for _ in range(8):
            seen = target.load_report
            await until(lambda seen=seen: target.load_report is not seen)
    finally:
        await runner.cleanup()


async def test_models_that_nobody_serves_any_more_have_no_series(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(models=["sim", "adapter"]), policy="cache_aware")
    for model in ("sim", "adapter"):
        assert (await once(running.port, request(chat(max_tokens=1, model=model)))).status == 200
    await settled(running)
    assert 'model="adapter"' in "".join(running.metrics.pieces())
    (worker,) = running.fleet.workers.values()
    worker.facts.models = [model for model in worker.facts.models if model.name == "sim"]
    running._part_models()
    text = "".join(running.metrics.pieces())
    assert 'model="adapter"' not in text
    assert 'model="sim"' in text
