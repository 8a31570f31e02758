"""Continuous batching in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from load_tests.engine.blocks import BlockCache
from load_tests.engine.physics import Rates, step_seconds, unloaded_prefill_seconds
from load_tests.engine.radix import RadixCache
from load_tests.engine.scheduler import QueueFull, Scheduler, Work

RATES = Rates()


def drain(scheduler: Scheduler, limit: int = 10_000) -> tuple[list[Work], float]:
    """Run until idle; sequences in the order they finished, and the time it took."""
    now, finished = 0.0, []
    for _ in range(limit):
        if not scheduler.busy:
            return finished, now
        touched, seconds = scheduler.step(now)
        now += seconds
        finished += [work for work in touched if work.state == "finished"]
    raise AssertionError("the scheduler makes no progress")


def prompt(name: int, length: int) -> list[int]:
    return [name * 1000 + place for place in range(length)]


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=12),
    chunk=st.integers(1, 24),
    running=st.integers(1, 5),
    radix=st.booleans(),
)
def test_every_request_finishes_within_budget_and_leaves_nothing(
    sizes: list[tuple[int, int]], chunk: int, running: int, radix: bool
) -> None:
    cache = RadixCache(64) if radix else BlockCache(16, 4)
    scheduler = Scheduler(cache, RATES, max_running=running, chunk_tokens=chunk)
    works = [Work(prompt(name, length), list(range(900, 900 + out))) for name, (length, out) in enumerate(sizes)]
    for work in works:
        scheduler.submit(work)
    now = 0.0
    admitted: list[Work] = []
    while scheduler.busy:
        step = scheduler.plan(now)
        assert 0 < sum(new for _, new in step.work) <= chunk
        assert len(scheduler.running) <= running
        assert cache.used_blocks <= cache.num_blocks
        admitted += [work for work, _ in step.work if work not in admitted]
        scheduler.complete(step, now + step.seconds)
        now += step.seconds
    assert admitted == works, "admitted out of order of arrival"
    for work, (length, out) in zip(works, sizes, strict=True):
        assert work.state == "finished"
        assert work.tokens == prompt(works.index(work), length) + list(range(900, 900 + out))
    assert cache.used_blocks == 0
    totals = scheduler.totals
    assert totals.prompt_tokens == totals.cached_tokens + totals.computed_tokens == sum(size for size, _ in sizes)
    assert totals.generated_tokens == sum(out for _, out in sizes)


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(BlockCache(100, 4), RATES, chunk_tokens=8)
    talker = Work(prompt(1, 4), list(range(50)))
    scheduler.submit(talker)
    scheduler.step(0.0)
    reader = Work(prompt(2, 30), [1])
    scheduler.submit(reader)
    chunks = []
    while reader.state != "finished":
        before = talker.emitted
        step = scheduler.plan()
        chunks += [new for work, new in step.work if work is reader]
        scheduler.complete(step)
        assert talker.emitted == before + 1
    assert chunks == [7, 7, 7, 7, 2]


def test_when_kv_runs_out_the_youngest_computes_again() -> None:
    cache = BlockCache(8, 4, reuse=False)
    scheduler = Scheduler(cache, RATES)
    elder, younger = Work(prompt(1, 12), list(range(12))), Work(prompt(2, 12), list(range(12)))
    scheduler.submit(elder)
    scheduler.submit(younger)
    finished, _ = drain(scheduler)
    assert finished == [elder, younger]
    assert (elder.preempted, younger.preempted) == (0, 1)
    assert scheduler.totals.preemptions == 1
    assert scheduler.totals.recomputed_tokens >= 12
    assert younger.tokens[12:] == list(range(12))
    assert scheduler.totals.prompt_tokens == 24, "a preempted prompt counts once"


def test_the_queue_has_a_limit_only_when_told() -> None:
    scheduler = Scheduler(BlockCache(100, 4), RATES, max_queued=2)
    scheduler.submit(Work([1], [1]))
    scheduler.submit(Work([1], [1]))
    with pytest.raises(QueueFull):
        scheduler.submit(Work([1], [1]))
    assert len(scheduler.waiting) == 2


def test_an_abort_frees_kv_at_once_and_tells_in_the_middle_of_a_step() -> None:
    cache = BlockCache(100, 4)
    scheduler = Scheduler(cache, RATES, max_running=1)
    first, second = Work(prompt(1, 20), list(range(9))), Work(prompt(2, 20), list(range(9)))
    scheduler.submit(first)
    scheduler.submit(second)
    step = scheduler.plan()
    scheduler.abort(second)
    scheduler.abort(first)
    assert cache.used_blocks == 0
    assert scheduler.complete(step) == []
    assert not scheduler.busy
    scheduler.abort(first)
    assert scheduler.totals.aborts == 2


def test_time_is_the_sum_of_the_formulas() -> None:
    scheduler = Scheduler(BlockCache(1000, 4), RATES, chunk_tokens=100)
    work = Work(prompt(1, 250), [1, 2, 3])
    scheduler.submit(work)
    _, seconds = drain(scheduler)
    decodes = step_seconds(RATES, (), 1, 250) + step_seconds(RATES, (), 1, 251)
    assert work.first == pytest.approx(unloaded_prefill_seconds(RATES, 0, 250, 100))
    assert seconds == pytest.approx(unloaded_prefill_seconds(RATES, 0, 250, 100) + decodes)


def test_attention_counts_each_pair_once_however_the_prompt_is_cut() -> None:
    rates = Rates(base=0.0, token=0.0, decode=0.0, attention=1.0)
    whole = step_seconds(rates, [(0, 100)])
    assert whole == 100 * 50
    assert step_seconds(rates, [(0, 30)]) + step_seconds(rates, [(30, 70)]) == whole
