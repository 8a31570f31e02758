"""One simulated engine: by hand, and against the scheduler of the HTTP engine, step by step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from load_tests.engine.blocks import BlockCache as WitnessCache
from load_tests.engine.physics import Rates, prefill_seconds, step_seconds, unloaded_prefill_seconds
from load_tests.engine.scheduler import Scheduler, Work as WitnessWork
from load_tests.simulate.engine import Engine, Options, Work

# Attention dearer than any real one: otherwise nothing would tell how the steps of a run grow.
RATES = Rates(attention=2e-6)
BLOCK = 4


def run(engine: Engine, works: list[tuple[float, Work]]) -> list[Work]:
    """Submit each at its time; returns them in order of their ends."""
    ended: list[Work] = []
    left = sorted(works, key=lambda each: each[0])
    while left or engine.due is not None:
        if left and (engine.due is None or left[0][0] < engine.due):
            at, work = left.pop(0)
            engine.submit(work, at)
        else:
            ended += engine.advance()[1]
        assert engine.cache.used <= engine.cache.capacity
        assert len(engine.cache.refs) + engine.cache.private <= engine.cache.capacity
    return ended


def alone(number: int, prompt: int, output: int) -> Work:
    """A request that shares nothing."""
    blocks = (prompt + max(0, output - 1)) // BLOCK
    return Work(prompt, output, range(number * 10_000, number * 10_000 + blocks))


def test_a_prompt_alone_takes_what_physics_says() -> None:
    engine = Engine(Options(rates=RATES, kv_tokens=100_000, block=16))
    work = Work(5000, 1, range(312))
    run(engine, [(1.0, work)])
    assert work.first == work.ended == pytest.approx(1.0 + unloaded_prefill_seconds(RATES, 0, 5000, 2048))
    again = Work(5000, 1, range(312))
    run(engine, [(9.0, again)])
    assert again.cached == 4992
    assert again.first == pytest.approx(9.0 + unloaded_prefill_seconds(RATES, 4992, 5000, 2048))


def test_decodes_take_a_step_each_and_their_context_grows() -> None:
    engine = Engine(Options(rates=RATES, kv_tokens=100_000, block=16))
    work = Work(1000, 11, ())
    run(engine, [(0.0, work)])
    first = unloaded_prefill_seconds(RATES, 0, 1000, 2048)
    decodes = sum(step_seconds(RATES, (), 1, 1000 + place) for place in range(10))
    assert work.first == pytest.approx(first)
    assert work.ended == pytest.approx(first + decodes)
    assert engine.totals.steps == 11


def test_a_prompt_that_arrives_waits_for_the_step_and_delays_the_decode() -> None:
    engine = Engine(Options(rates=RATES, kv_tokens=100_000, block=16))
    old, new = Work(1000, 100, ()), Work(600, 1, ())
    first = unloaded_prefill_seconds(RATES, 0, 1000, 2048)
    second_step = first + step_seconds(RATES, (), 1, 1000)
    run(engine, [(0.0, old), (first + 0.001, new)])
    delayed = step_seconds(RATES, [(0, 600)], 1, 1001)
    assert new.first == pytest.approx(second_step + delayed)
    decodes = sum(step_seconds(RATES, (), 1, 1000 + place) for place in range(99))
    assert old.ended == pytest.approx(first + decodes + prefill_seconds(RATES, 0, 600))


def witness(
    works: list[tuple[float, Work]], num_blocks: int, block: int, max_running: int, chunk: int
) -> tuple[list[WitnessWork], Scheduler]:
    """The same on the HTTP engine's scheduler, one step after the other."""
    scheduler = Scheduler(WitnessCache(num_blocks, block), RATES, max_running=max_running, chunk_tokens=chunk)
    twins = []
    for number, (_, work) in enumerate(works):
        full = [id_ * block + place for id_ in work.ids for place in range(block)]
        unique = [10**9 + number * 100_000 + place for place in range(1, work.prompt + work.output + 1)]
        tokens = (full + unique)[: work.prompt + work.output]
        twins.append(WitnessWork(tokens[: work.prompt], tokens[work.prompt :]))
    waiting = sorted(zip([at for at, _ in works], twins, strict=True), key=lambda each: each[0])
    now = 0.0
    while waiting or scheduler.busy:
        if not scheduler.busy:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            scheduler.submit(waiting.pop(0)[1], now)
        now += scheduler.step(now)[1]
    return twins, scheduler


# No two arrive at once: which of them the first step takes along is a matter of taste.
requests = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda at: at * 0.000713), st.integers(1, 60), st.integers(0, 25), st.integers(0, 3)
    ),
    min_size=1,
    max_size=14,
    unique_by=lambda each: each[0],
)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 6), st.integers(7, 40))
def test_with_little_kv_it_does_what_the_scheduler_does_step_by_step(
    asked: list[tuple[float, int, int, int]], running: int, chunk: int
) -> None:
    works = [(at, alone(number, prompt, output)) for number, (at, prompt, output, _) in enumerate(asked)]
    engine = Engine(Options(rates=RATES, kv_tokens=24 * BLOCK, block=BLOCK, max_running=running, chunk_tokens=chunk))
    run(engine, works)
    twins, scheduler = witness(works, 24, BLOCK, running, chunk)
    for (_, work), twin in zip(works, twins, strict=True):
        assert work.cached == twin.cached
        assert (work.first, work.ended) == (pytest.approx(twin.first), pytest.approx(twin.ended))
    assert engine.totals.preemptions == scheduler.totals.preemptions
    assert engine.totals.recomputed == scheduler.totals.recomputed_tokens
    assert engine.totals.steps == scheduler.totals.steps
    assert engine.totals.generated == scheduler.totals.generated_tokens
    assert engine.cache.used == 0


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(1, 6), st.integers(7, 40))
def test_with_shared_starts_it_finds_what_the_scheduler_finds(
    asked: list[tuple[float, int, int, int]], running: int, chunk: int
) -> None:
    works = []
    for number, (at, prompt, output, group) in enumerate(asked):
        # Starts of some lengths of one of a few groups, then blocks of its own.
        shared = range(group * 1000, group * 1000 + min(prompt // BLOCK, 3 * group))
        own = range((number + 10) * 1000, (number + 10) * 1000 + prompt // BLOCK - len(shared))
        works.append((at, Work(prompt, output, (*shared, *own))))
    engine = Engine(Options(rates=RATES, kv_tokens=4000, block=BLOCK, max_running=running, chunk_tokens=chunk))
    run(engine, works)
    twins, scheduler = witness(works, 1000, BLOCK, running, chunk)
    for (_, work), twin in zip(works, twins, strict=True):
        assert work.cached == twin.cached
        assert (work.first, work.ended) == (pytest.approx(twin.first), pytest.approx(twin.ended))
    assert engine.totals.steps == scheduler.totals.steps
    assert engine.totals.cached + engine.totals.computed == engine.totals.prompt
    assert engine.cache.used == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [({"kv_tokens": 3, "block": 16}, "kv_tokens"), ({"max_running": 0}, "max_running"), ({"block": 0}, "block")],
)
def test_options_that_make_no_engine_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Options(**options)  # type: ignore[arg-type]
