"""Workers and targets: one accounting of what is in flight, states, detection; pure first, then over real sockets."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gateway.breaker import Breaker
from gateway.config import Config
from gateway.engines import Answer, all_engines
from gateway.engines.audit import LACKS, lacks
from gateway.errors import Malformed, Refused, Reset
from gateway.fleet import FALL, FIRST_SHARE, SLOW_START, Fleet
from gateway.run import Running
from gateway.workers import Charge, Facts, Load, ServedModel, State, Worker, WorkerSpec
from load_tests.engine import Engine, EngineOptions
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.talk import Raw, admin, chat, long_chat, once, request, settled, until


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def describe(fleet: Fleet, worker: Worker, *models: str, ranks: int = 1, **facts: Any) -> None:
    fleet.describe(worker, Facts(models=[ServedModel(name) for name in models or ("sim",)], ranks=ranks, **facts))


def make(*ranks: int, clock: Clock | None = None, forgotten: list[int] | None = None) -> tuple[Fleet, Clock]:
    """A fleet of ready workers, with so many ranks each."""
    clock = clock or Clock()
    seen = [] if forgotten is None else forgotten
    fleet = Fleet(clock, forget=seen.append)
    for at, count in enumerate(ranks):
        worker = fleet.add(WorkerSpec(f"http://10.0.0.{at}:8000"))
        describe(fleet, worker, ranks=count)
        fleet.set_state(worker, State.READY, "for the test")
    return fleet, clock


# -- in flight ----------------------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 1), st.floats(0, 50_000), st.booleans()),
        st.tuples(st.just("first"), st.integers(0, 30)),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("wait"), st.floats(0, 20)),
        st.tuples(st.just("report"), st.integers(0, 1), st.integers(0, 9), st.none() | st.integers(0, 9)),
        st.tuples(st.just("forget"), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(steps, st.randoms(use_true_random=False))
@settings(max_examples=200)
async def test_a_charge_ends_exactly_once_in_whatever_order(todo: list[Any], draws: Any) -> None:
    fleet, clock = make(1, 1)
    targets = list(fleet.targets.values())
    charges: list[Charge] = []
    for step in todo:
        match step:
            case ("send", at, tokens, streamed):
                charges.append(fleet.dispatch(targets[at], tokens, 100.0, streamed))
            case ("first", pick) if charges:
                fleet.first_byte(charges[pick % len(charges)])
            case ("end", pick) if charges:
                fleet.release(charges[pick % len(charges)])
            case ("wait", seconds):
                clock.now += seconds
                fleet.settle_estimates(clock.now)
            case ("report", at, running, waiting):
                fleet.report(targets[at], Load(running, waiting, 0.5, clock.now), 0)
            case ("forget", at):
                fleet.forget_report(targets[at])
        for target in targets:
            live = [each for each in charges if each.target is target and not each.ended]
            ahead = [each for each in live if not each.prefilled]
            assert target.running == len(live)
            assert target.wait - target.queued == pytest.approx(sum(each.seconds for each in ahead), abs=1e-6)
            assert target.busy - target.foreign == pytest.approx(len(live) - len(ahead), abs=1e-6)
    draws.shuffle(charges)
    for charge in charges:
        fleet.first_byte(charge)
        fleet.release(charge)
        fleet.release(charge)
        fleet.first_byte(charge)
    clock.now += 10_000
    fleet.settle_estimates(clock.now)
    for target in targets:
        assert target.running == 0
        assert target.wait == target.queued
        assert target.busy == target.foreign
        fleet.forget_report(target)
        assert (target.wait, target.busy, target.foreign, target.load) == (0.0, 0.0, 0.0, 0.0)


async def test_what_is_sent_is_charged_at_once_and_its_prefill_ends_with_the_first_byte() -> None:
    fleet, _ = make(1)
    (target,) = fleet.targets.values()
    charge = fleet.dispatch(target, 5000, 1000, streamed=True)
    assert target.wait == target.rates.prefill(5000, 1000)
    assert (target.running, target.busy) == (1, 0)
    fleet.first_byte(charge)
    assert (target.running, target.busy, target.wait) == (1, 1, 0.0)
    fleet.release(charge)
    assert (target.running, target.busy, target.wait) == (0, 0, 0.0)


async def test_a_charge_that_is_not_streamed_decays_by_its_own_estimate() -> None:
    fleet, clock = make(1)
    (target,) = fleet.targets.values()
    seconds = target.rates.prefill(30_000, 0)
    fleet.dispatch(target, 30_000, 0, streamed=False)
    streamed = fleet.dispatch(target, 30_000, 0, streamed=True)
    clock.now += seconds * 0.9
    fleet.settle_estimates(clock.now)
    assert target.wait == pytest.approx(2 * seconds)
    clock.now += seconds * 0.2
    fleet.settle_estimates(clock.now)
    assert target.wait == pytest.approx(seconds), "what streams tells itself when its prefill is over"
    assert (target.running, target.busy) == (2, 1)
    clock.now += 1000
    fleet.settle_estimates(clock.now)
    assert target.wait == pytest.approx(seconds)
    fleet.release(streamed)


async def test_an_unstreamed_charge_behind_others_decays_after_them() -> None:
    fleet, clock = make(1)
    (target,) = fleet.targets.values()
    seconds = target.rates.prefill(30_000, 0)
    for _ in range(3):
        fleet.dispatch(target, 30_000, 0, streamed=False)
    for left in (3, 2, 1, 0):
        assert target.wait == pytest.approx(left * seconds)
        clock.now += seconds + 0.2
        fleet.settle_estimates(clock.now)


async def test_load_that_others_bring_is_the_report_without_our_own() -> None:
    fleet, clock = make(1)
    (target,) = fleet.targets.values()
    first = fleet.dispatch(target, 100, 0, streamed=True)
    fleet.dispatch(target, 100, 0, streamed=True)
    fleet.first_byte(first)
    fleet.report(target, Load(running=5, waiting=3, taken=clock.now), waiting_ours=1)
    assert target.foreign == 6
    assert target.busy == 7
    assert target.load == 8
    own = target.charged
    assert target.wait > own, "two of those who wait are not ours"
    fleet.report(target, Load(running=2, waiting=0, taken=clock.now), waiting_ours=0)
    assert (target.foreign, target.busy, target.wait) == (0, 1, own)
    fleet.report(target, Load(running=0, waiting=0, taken=clock.now), waiting_ours=0)
    assert target.foreign == 0, "a report from before ours arrived is not less than nothing"


async def test_a_report_that_says_nothing_is_neither_idle_nor_saturated() -> None:
    fleet, clock = make(1, 1)
    silent, other = fleet.targets.values()
    fleet.dispatch(silent, 100, 0, streamed=True)
    fleet.dispatch(other, 100, 0, streamed=True)
    fleet.report(silent, Load(taken=clock.now), waiting_ours=0)
    assert (silent.load, silent.wait, silent.busy) == (other.load, other.wait, other.busy)


async def test_a_stale_report_is_forgotten_and_our_own_counts_stay() -> None:
    fleet, clock = make(1, 1)
    target, other = fleet.targets.values()
    fleet.dispatch(target, 100, 0, streamed=True)
    fleet.dispatch(other, 100, 0, streamed=True)
    fleet.report(target, Load(running=40, waiting=40, kv_usage=1.0, taken=clock.now), waiting_ours=0)
    assert target.foreign == 79
    clock.now += 60
    fleet.sweep(clock.now)
    assert target.load_report is None
    assert (target.load, target.wait, target.busy) == (other.load, other.wait, other.busy)
    assert fleet.usable(target, clock.now)


# -- breaker ------------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_after_its_threshold_of_faults_in_a_row() -> None:
    breaker = Breaker(threshold=5)
    for _ in range(4):
        assert not breaker.failed(0.0)
    assert not breaker.succeeded()
    for _ in range(4):
        assert not breaker.failed(0.0)
    assert breaker.allows(0.0)
    assert breaker.failed(0.0)
    assert not breaker.allows(0.0)
    assert breaker.state == "open"


def test_half_open_lets_one_trial_through() -> None:
    breaker = Breaker(threshold=1, pause=5.0)
    breaker.failed(0.0)
    assert not breaker.allows(4.9)
    assert breaker.allows(5.0)
    assert breaker.sent(), "it is the trial"
    assert breaker.state == "half_open"
    assert not breaker.allows(5.0)
    assert not breaker.allows(500.0)
    assert breaker.succeeded()
    assert breaker.allows(5.0)
    assert not breaker.sent(), "an ordinary request"
    assert breaker.state == "closed"


def test_a_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    breaker, now = Breaker(threshold=1, pause=5.0, longest=60.0), 0.0
    breaker.failed(now)
    for pause in (5, 10, 20, 40, 60, 60):
        assert not breaker.allows(now + pause - 0.1)
        now += pause
        assert breaker.allows(now)
        breaker.sent()
        assert breaker.failed(now)
    breaker.sent()
    breaker.succeeded()
    now += 60 + breaker.calm + 1
    breaker.failed(now)
    assert breaker.allows(now + 5), "after a while in which it served it begins anew"


def test_one_that_fails_again_after_each_good_trial_is_left_alone_for_longer_and_longer() -> None:
    breaker, now = Breaker(threshold=1, pause=5.0, longest=60.0), 0.0
    for pause in (5, 10, 20, 40, 60, 60):
        assert breaker.failed(now)
        assert not breaker.allows(now + pause - 0.1)
        now += pause
        breaker.sent()
        assert breaker.succeeded()
        assert breaker.state == "closed"
        now += 1.0


def test_a_trial_that_told_nothing_may_be_made_again() -> None:
    breaker = Breaker(threshold=1, pause=5.0)
    breaker.failed(0.0)
    breaker.sent()
    breaker.undecided()
    assert breaker.allows(6.0)
    assert breaker.state == "open"
    breaker.sent()
    assert not breaker.allows(6.0)


def test_late_failures_of_requests_sent_before_do_not_prolong_an_open_breaker() -> None:
    breaker = Breaker(threshold=2, pause=5.0)
    for now in (0.0, 0.0, 1.0, 2.0, 3.0, 4.9):
        breaker.failed(now)
    assert breaker.allows(5.0)


async def test_a_trial_whose_client_leaves_frees_the_target_for_another() -> None:
    fleet, clock = make(1)
    (target,) = fleet.targets.values()
    for _ in range(target.breaker.threshold):
        fleet.failed(target, clock.now)
    assert fleet.view("sim") is None
    clock.now += target.breaker.pause
    fleet.sweep(clock.now)
    assert fleet.view("sim") is not None
    charge = fleet.dispatch(target, 100, 0, streamed=True)
    assert charge.trial
    assert fleet.view("sim") is None, "one trial only"
    fleet.release(charge)
    assert fleet.view("sim") is not None
    charge = fleet.dispatch(target, 100, 0, streamed=True)
    fleet.succeeded(target)
    fleet.release(charge)
    assert target.breaker.state == "closed"
    assert not fleet.dispatch(target, 100, 0, streamed=True).trial


# -- states and members -------------------------------------------------------------------------------------------------


async def test_only_refused_connections_in_a_row_bring_a_worker_down() -> None:
    forgotten: list[int] = []
    fleet, _ = make(2, forgotten=forgotten)
    (worker,) = fleet.workers.values()
    for _ in range(2 * FALL):
        fleet.connection_failed(worker, Reset("gone"))
        fleet.connection_failed(worker, Malformed("what"))
    assert worker.state is State.READY
    for _ in range(FALL - 1):
        fleet.connection_failed(worker, Refused("no"))
    fleet.succeeded(worker.targets[0])
    for _ in range(FALL - 1):
        fleet.connection_failed(worker, Refused("no"))
    assert worker.state is State.READY
    fleet.connection_failed(worker, Refused("no"))
    assert worker.state is State.DOWN
    assert forgotten == [], "the same process may come back with all that it holds"
    assert fleet.view("sim") is None
    fleet.restarted(worker)
    assert sorted(forgotten) == [target.id for target in worker.targets]


async def test_a_worker_that_comes_late_or_back_starts_slowly_and_the_first_ones_do_not() -> None:
    fleet, clock = make(1)
    (first,) = fleet.workers.values()
    fleet.sweep(clock.now)
    assert first.targets[0].share == 1.0
    clock.now += 2 * SLOW_START
    late = fleet.add(WorkerSpec("http://10.0.0.9:8000"))
    describe(fleet, late)
    fleet.set_state(late, State.READY, "healthy")
    shares = []
    for _ in range(8):
        fleet.sweep(clock.now)
        shares.append(late.targets[0].share)
        assert first.targets[0].share == 1.0
        clock.now += SLOW_START / 6
    assert shares[0] == pytest.approx(FIRST_SHARE)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    view = fleet.view("sim")
    assert view is not None
    assert view.uniform
    fleet.set_state(first, State.DOWN, "refused")
    fleet.set_state(first, State.READY, "healthy again")
    fleet.sweep(clock.now)
    assert first.targets[0].share < 0.2, "its cache is empty"


async def test_a_worker_that_starts_slowly_counts_before_the_first_sweep_too() -> None:
    fleet, clock = make(1)
    clock.now += 2 * SLOW_START
    late = fleet.add(WorkerSpec("http://10.0.0.9:8000"))
    describe(fleet, late)
    fleet.set_state(late, State.READY, "healthy")
    assert late.targets[0].share < 0.2


async def test_a_drained_worker_gets_nothing_new_and_is_not_cold_afterwards() -> None:
    forgotten: list[int] = []
    fleet, clock = make(1, 1, forgotten=forgotten)
    first, second = fleet.workers.values()
    clock.now += 2 * SLOW_START
    fleet.set_state(first, State.DRAINING, "drained")
    view = fleet.view("sim")
    assert view is not None
    assert [target.id for target in view.targets] == [second.targets[0].id]
    fleet.set_state(first, State.READY, "resumed")
    fleet.sweep(clock.now)
    assert first.targets[0].share == 1.0
    assert not forgotten


async def test_each_rank_is_a_target_of_its_own() -> None:
    fleet, _ = make(4, 1)
    names = [target.name for target in fleet.targets.values()]
    assert names == ["10.0.0.0:8000", "10.0.0.0:8000#1", "10.0.0.0:8000#2", "10.0.0.0:8000#3", "10.0.0.1:8000"]
    assert len({target.seed for target in fleet.targets.values()}) == 5
    view = fleet.view("sim")
    assert view is not None
    assert len(view.targets) == 5
    left = fleet.view("sim", tried=(0, 1))
    assert left is not None
    assert [target.id for target in left.targets] == [2, 3, 4]


async def test_ranks_that_an_engine_no_longer_has_are_no_targets_any_more() -> None:
    forgotten: list[int] = []
    fleet, _ = make(4, forgotten=forgotten)
    (worker,) = fleet.workers.values()
    describe(fleet, worker, ranks=1)
    assert len(worker.targets) == 4, "not while it serves: that is a page that was not there"
    fleet.set_state(worker, State.DOWN, "refused")
    forgotten.clear()
    describe(fleet, worker, ranks=2)
    fleet.set_state(worker, State.READY, "healthy again")
    view = fleet.view("sim")
    assert view is not None
    assert [target.rank for target in worker.targets] == [0, 1]
    assert [target.id for target in view.targets] == [0, 1]
    assert set(fleet.targets) == {0, 1}
    assert sorted(forgotten) == [2, 3]


async def test_a_new_start_of_the_same_engine_empties_what_it_is_believed_to_hold() -> None:
    forgotten: list[int] = []
    fleet, _ = make(1, forgotten=forgotten)
    (worker,) = fleet.workers.values()
    describe(fleet, worker, started=100.0)
    describe(fleet, worker, started=100.0)
    assert not forgotten
    describe(fleet, worker, started=None)
    describe(fleet, worker, started=200.0)
    assert forgotten == [0], "also when it was not told in between"


async def test_what_is_configured_wins_over_what_is_detected() -> None:
    fleet = Fleet(Clock())
    worker = fleet.add(WorkerSpec("http://a:1", role="unified", models=["mine", "sim"], kv_tokens=5000))
    describe(fleet, worker, "sim", "hidden", role="prefill", kv_tokens=9)
    assert [model.name for model in worker.facts.models] == ["mine", "sim"]
    assert worker.facts.kv_tokens == 5000
    assert worker.role == "unified"


def staged(fleet: Fleet, *roles: str, protocol: str) -> list[Worker]:
    workers = []
    for at, role in enumerate(roles):
        worker = fleet.add(WorkerSpec(f"http://a:{at + 1}"))
        describe(fleet, worker, role=role, protocol=protocol)
        fleet.set_state(worker, State.READY, "x")
        workers.append(worker)
    return workers


def seen(fleet: Fleet, tried: tuple[int, ...] = ()) -> tuple[list[str], list[str]] | None:
    """Roles of those that may generate, and of those that may compute for them."""
    view = fleet.view("sim", tried)
    if view is None:
        return None
    return [t.role for t in view.targets], [t.role for t in view.prefill.targets] if view.prefill else []


async def test_prefill_workers_stand_before_those_that_generate() -> None:
    fleet = Fleet(Clock())
    staged(fleet, "prefill", "decode", "unified", protocol="nixl")
    assert seen(fleet) == (["decode", "unified"], ["prefill"])


async def test_without_one_stage_whoever_can_serve_does_it_all() -> None:
    fleet = Fleet(Clock())
    prefill, decode = staged(fleet, "prefill", "decode", protocol="nixl")
    fleet.set_state(prefill, State.DOWN, "x")
    assert seen(fleet) == (["decode"], [])
    fleet.set_state(prefill, State.READY, "x")
    fleet.set_state(decode, State.DOWN, "x")
    assert seen(fleet) == (["prefill"], []), "such an engine can generate as well"


async def test_engines_that_serve_in_pairs_only_serve_nothing_alone_and_the_stage_that_lacks_is_named() -> None:
    fleet = Fleet(Clock())
    prefill, decode = staged(fleet, "prefill", "decode", protocol="sglang")
    assert seen(fleet) == (["decode"], ["prefill"])
    assert fleet.lacks("sim") is None
    fleet.set_state(prefill, State.DOWN, "x")
    assert seen(fleet) is None
    assert fleet.lacks("sim") == "prefill"
    fleet.set_state(prefill, State.READY, "x")
    assert seen(fleet, (decode.targets[0].id,)) is None
    assert fleet.lacks("sim", (decode.targets[0].id,)) == "decode"


async def test_a_pair_is_of_one_pool() -> None:
    fleet = Fleet(Clock())
    for at, (role, pool) in enumerate((("prefill", "a"), ("decode", "b"))):
        worker = fleet.add(WorkerSpec(f"http://a:{at + 1}", role=role, pool=pool))
        describe(fleet, worker, protocol="nixl")
        fleet.set_state(worker, State.READY, "x")
    assert seen(fleet) == (["decode"], [])


async def test_a_removed_worker_leaves_nothing() -> None:
    forgotten: list[int] = []
    fleet, _ = make(2, 1, forgotten=forgotten)
    first, second = fleet.workers.values()
    charge = fleet.dispatch(first.targets[0], 100, 0, streamed=False)
    fleet.remove(first)
    assert forgotten == [0, 1]
    assert list(fleet.workers.values()) == [second]
    assert [target.worker for target in fleet.targets.values()] == [second]
    fleet.first_byte(charge)
    fleet.release(charge)
    again = fleet.add(first.spec)
    describe(fleet, again)
    assert again.targets[0].id not in (0, 1, 2), "ids are not used twice"


@pytest.mark.parametrize(
    "url",
    [
        "a:1",
        "http://",
        "ftp://a",
        "http://a:0x1",
        "http://a:65536",
        "http://u@a:1",
        "http://a:1?q",
        "http://a:1/#f",
        "http://a\n:1",
    ],
)
def test_a_url_that_cannot_be_reached_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        WorkerSpec(url)


# -- detection ----------------------------------------------------------------------------------------------------------


async def facts_of(pages: dict[str, Any]) -> Facts:
    """What the engine is that answers these pages; all else is 404."""

    async def ask(path: str) -> Answer:
        page = pages.get(path)
        if page is None:
            return Answer(404, b"{}")
        return Answer(200, page if isinstance(page, bytes) else json.dumps(page).encode())

    for engine in all_engines().values():
        facts = await engine.read(ask)
        if facts is not None:
            return facts
    raise AssertionError("nobody took it")


VLLM_MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}


async def test_data_parallel_ranks_of_vllm_are_seen_in_its_metrics() -> None:
    metrics = b"".join(
        b'vllm:num_requests_running{engine="%d",model_name="m"} %d.0\n' % (rank, rank) for rank in range(4)
    )
    metrics += b'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="1000"} 1.0\n'
    found = await facts_of({"/version": {"version": "0.33.0"}, "/v1/models": VLLM_MODELS, "/metrics": metrics})
    assert (found.engine, found.ranks, found.block_size, found.kv_tokens) == ("vllm", 4, 16, 16_000)


async def test_data_parallel_ranks_of_sglang_are_seen_in_its_server_info() -> None:
    info = {"dp_size": 8, "page_size": 64, "max_total_num_tokens": 1_000_000, "version": "0.5.23"}
    found = await facts_of({"/model_info": {"model_path": "m"}, "/server_info": info})
    assert (found.engine, found.ranks, found.block_size, found.kv_tokens) == ("sglang", 8, 64, 1_000_000)
    assert [model.name for model in found.models] == ["m"]


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SEEN = {
    "/version": ["version"],
    "/v1/models": ["data", "object"],
    "/model_info": ["model_path", "disaggregation_mode", "served_model_name"],
    "/server_info": [
        "version",
        "page_size",
        "dp_size",
        "context_length",
        "internal_states",
        "kv_events",
        "tokens_per_block",
    ],
    "/v1/loads?include=core": ["loads"],
    "/props": ["total_slots", "default_generation_settings", "build_info"],
}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            path: st.fixed_dictionaries({}, optional=dict.fromkeys(keys, nonsense)) | nonsense
            for path, keys in SEEN.items()
        },
    )
)
@settings(max_examples=150)
def test_no_answer_of_an_engine_breaks_detection(pages: dict[str, Any]) -> None:
    found = asyncio.run(facts_of({path: page for path, page in pages.items() if page is not None}))
    assert found.ranks >= 1
    for number in (found.block_size, found.kv_tokens, found.context_length, found.max_running):
        assert number is None or number >= 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "1e300", "abc", "", "0x10", "1.5", "\xb2", "9" * 5000])
async def test_no_value_in_metrics_breaks_detection_or_load(value: str) -> None:
    text = (
        f'vllm:num_requests_running{{engine="{value}"}} 1.0\nvllm:num_requests_running{{engine="0"}} {value}\n'
        f'vllm:num_requests_waiting{{engine="0"}} {value}\nvllm:kv_cache_usage_perc{{engine="0"}} {value}\n'
        f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}"}} 1.0\n'
        f"llamacpp:requests_processing {value}\nllamacpp:requests_deferred {value}\nprocess_start_time_seconds {value}\n"
    ).encode()
    pages = {"/version": {"version": "1"}, "/v1/models": VLLM_MODELS, "/metrics": text}
    found = await facts_of(pages)
    assert found.engine == "vllm"
    assert 1 <= found.ranks < 1000

    async def ask(path: str) -> Answer:
        return Answer(200, text)

    for name in ("vllm", "llamacpp"):
        for load in await all_engines()[name].load(ask) or []:
            assert load.running is None or load.running >= 0
            assert load.waiting is None or load.waiting >= 0


# -- over real sockets --------------------------------------------------------------------------------------------------


def calm(config: Config) -> None:
    """Fast probes."""
    config.probes.health = config.probes.join = config.probes.load = 0.05


def name(engine: Engine) -> str:
    return f"127.0.0.1:{engine.port}"


def worker_of(running: Running, engine: Engine) -> Worker:
    return running.fleet.workers[name(engine)]


async def answered(running: Running, count: int, **fields: Any) -> list[str]:
    """Where so many requests went."""
    seen = []
    for _ in range(count):
        answer = await once(running.port, request(chat(max_tokens=1, **fields)))
        assert answer.status == 200
        seen.append(answer.one("x-warmroute-worker"))
    return seen


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("vllm", ("vllm", 16, 8192, 4096)),
        ("sglang", ("sglang", 1, 8192, 4096)),
        ("llamacpp", ("llamacpp", 1, 8192, 4096)),
        ("openai", ("generic", None, None, None)),
    ],
)
async def test_an_engine_is_detected_with_its_cache_and_models(
    gateway: Begin, engine: StartEngine, dialect: str, expected: tuple[Any, ...]
) -> None:
    slots = {"max_running": 2} if dialect == "llamacpp" else {}
    started = await engine(dialect, models=["one"], kv_tokens=8192, context_length=4096, **slots)
    running = await gateway(started, change=calm)
    (row,) = (await admin(running, "/workers"))["workers"]
    assert (row["engine"], row["block_size"], row["kv_tokens"], row["context_length"]) == expected
    assert row["models"] == ["one"]
    assert row["state"] == "ready"
    assert row["role"] == "unified"
    assert len(row["targets"]) == 1
    assert await answered(running, 1, model="one") == [row["id"]]


async def test_a_gateway_starts_without_its_fleet_and_the_fleet_joins(gateway: Begin, engine: StartEngine) -> None:
    first = await engine()
    port = first.port
    await first.kill()
    running = await gateway(f"http://127.0.0.1:{port}", change=calm, ready=False)
    (worker,) = running.fleet.workers.values()
    await until(lambda: worker.reason != "not read yet")
    assert worker.state is State.JOINING
    assert (await once(running.port, request(path="/healthz", method="GET", body=b""))).status == 200
    assert (await once(running.port, request(path="/readyz", method="GET", body=b""))).status == 503
    assert (await once(running.port, request())).status in (404, 503)
    await engine(port=port)
    await until(lambda: worker.state is State.READY)
    assert (await once(running.port, request(path="/readyz", method="GET", body=b""))).status == 200
    assert len(await answered(running, 2)) == 2


async def test_an_engine_that_dies_is_down_and_comes_back_with_nothing_held(
    gateway: Begin, engine: StartEngine
) -> None:
    engines = [await engine(), await engine()]
    running = await gateway(*engines, change=calm, policy="cache_aware")
    words = "word " * 600
    for at in range(4):
        await once(
            running.port,
            request(chat(max_tokens=1, prompt_cache_key=f"{at}", messages=[{"role": "user", "content": words}])),
        )
    dead = next(each for each in engines if running.index.radix.pages(worker_of(running, each).targets[0].id))
    worker = worker_of(running, dead)
    target = worker.targets[0]
    port = dead.port
    assert running.index.radix.pages(target.id) > 0
    await dead.kill()
    await until(lambda: worker.state is State.DOWN)
    other = next(each for each in engines if each is not dead)
    assert set(await answered(running, 4)) == {name(other)}
    await engine(port=port)
    await until(lambda: worker.state is State.READY)
    assert running.index.radix.pages(target.id) == 0
    assert target.homes == 0
    assert len(worker.targets) == 1
    await settled(running)


async def test_a_restart_between_two_probes_is_noticed_by_the_engine_s_own_start(
    gateway: Begin, engine: StartEngine
) -> None:
    def slow(config: Config) -> None:
        config.probes.health = 0.3

    started = await engine()
    running = await gateway(started, change=slow, policy="cache_aware")
    worker = worker_of(running, started)
    await once(running.port, request(chat(max_tokens=1, messages=[{"role": "user", "content": "word " * 600}])))
    assert running.index.radix.pages(worker.targets[0].id) > 0
    await started.restart()
    await until(lambda: running.index.radix.pages(worker.targets[0].id) == 0)
    assert worker.state is State.READY


async def test_one_slow_health_check_while_traffic_flows_is_not_death(gateway: Begin, engine: StartEngine) -> None:
    started = await engine()
    running = await gateway(started, change=calm)
    worker = worker_of(running, started)
    started.faults.add("slow_health", count=1, seconds=1.5)
    await until(lambda: started.faults.standing("slow_health") is None)
    states = set()
    for _ in range(40):
        assert (await once(running.port, request(chat(max_tokens=1)))).status == 200
        states.add(worker.state)
        await asyncio.sleep(0.01)
    assert states == {State.READY}


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_runs(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(), await engine()]
    running = await gateway(*engines, change=calm, policy="least_load")
    async with await Raw.connect(running.port) as client:
        await client.send(request(chat(stream=True, max_tokens=300, ignore_eos=True)))
        head = await client.head()
        busy = head.one("x-warmroute-worker")
        worker = running.fleet.workers[busy]
        running.fleet.set_state(worker, State.DRAINING, "for the test")
        assert busy not in await answered(running, 6)
        data = b""
        while b"[DONE]" not in data:
            data = await client.reader.readuntil(b"\n\n")
    await until(lambda: worker.running == 0)
    assert worker.state is State.DRAINING


async def test_a_worker_that_joins_later_gets_less_than_its_share_at_first(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine() for _ in range(3)]
    running = await gateway(*engines, change=calm, policy="cache_aware")
    # As if the gateway and its first workers had started a while ago.
    running.fleet._started -= 3 * SLOW_START
    for each in engines:
        worker_of(running, each).ready_since = running.fleet._started
    late = await engine()
    worker = running.add_worker(WorkerSpec(late.url))
    await until(lambda: worker.state is State.READY)
    assert worker.targets[0].share < 0.5
    clients = [await Raw.connect(running.port) for _ in range(40)]
    try:
        for at, client in enumerate(clients):
            words = f"{at} " * 300
            await client.send(request(long_chat(stream=True, messages=[{"role": "user", "content": words}])))
            await client.head()
        counts = [worker_of(running, each).running for each in (*engines, late)]
        assert sum(counts) == 40
        assert counts[3] < min(counts[:3])
    finally:
        for client in clients:
            client.vanish()
    await settled(running)


async def test_a_removed_worker_takes_its_series_and_holdings_with_it(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(), await engine()]
    running = await gateway(*engines, change=calm, policy="cache_aware")
    for at in range(6):
        await once(
            running.port,
            request(
                chat(max_tokens=1, prompt_cache_key=f"k{at}", messages=[{"role": "user", "content": f"{at} " * 500}])
            ),
        )
    gone = worker_of(running, engines[0])
    assert gone.id in await admin(running, "/metrics")
    ids = [target.id for target in gone.targets]
    running.remove_worker(gone)
    assert gone.id not in await admin(running, "/metrics")
    assert all(running.index.radix.pages(id) == 0 for id in ids)
    assert set(await answered(running, 4)) == {name(engines[1])}


@pytest.mark.parametrize(
    ("dialect", "options", "codes"),
    [
        ("vllm", {"prefix_cache": False}, {"prefix_cache"}),
        ("vllm", {"metrics": False}, {"metrics"}),
        ("vllm", {}, set()),
        ("sglang", {"prefix_cache": False}, {"prefix_cache"}),
        ("sglang", {}, set()),
        ("llamacpp", {"metrics": False, "max_running": 2}, {"metrics"}),
        ("openai", {}, {"metrics"}),
    ],
)
async def test_what_an_engine_lacks_is_named_with_its_cure(
    gateway: Begin, engine: StartEngine, dialect: str, options: dict[str, Any], codes: set[str]
) -> None:
    started = await engine(dialect, **options)
    running = await gateway(started, change=calm)
    rows = lacks(worker_of(running, started))
    assert {row["code"] for row in rows} - {"events"} == codes
    for row in rows:
        assert set(row) == {"code", "what", "costs", "cure"}
        assert all(row.values())
    (shown,) = (await admin(running, "/workers"))["workers"]
    assert shown["lacks"] == rows


async def test_usage_without_cached_tokens_is_seen_in_the_traffic(gateway: Begin, engine: StartEngine) -> None:
    plain, full = await engine(usage_details=False), await engine()
    running = await gateway(plain, full, change=calm)
    await answered(running, 60)
    assert "usage_details" in {row["code"] for row in lacks(worker_of(running, plain))}
    assert "usage_details" not in {row["code"] for row in lacks(worker_of(running, full))}


def test_every_lack_says_what_it_costs_and_a_cure() -> None:
    for lack in LACKS.values():
        assert lack.what
        assert lack.costs
        assert lack.cure


async def test_a_worker_that_answers_nonsense_never_joins_and_says_why(gateway: Begin, scripted: StartScripted) -> None:
    worker = await scripted(b"\x00\x01 nonsense\r\n\r\n")
    running = await gateway(worker.url, change=calm, ready=False)
    (found,) = running.fleet.workers.values()
    await until(lambda: found.reason != "not read yet")
    assert found.state is State.JOINING
    running.remove_worker(found)


async def test_the_chosen_rank_is_told_to_the_engine_and_a_client_s_own_is_not(
    gateway: Begin, scripted: StartScripted
) -> None:
    worker = await scripted()
    running = await gateway(worker)
    (found,) = running.fleet.workers.values()
    describe(running.fleet, found, ranks=3)
    targets = []
    for _ in range(6):
        answer = await once(running.port, request(chat(), "X-Data-Parallel-Rank: 7"))
        targets.append(answer.one("x-warmroute-worker"))
    assert targets == [found.id, f"{found.id}#1", f"{found.id}#2"] * 2
    assert [seen.all("x-data-parallel-rank") for seen in worker.seen] == [["0"], ["1"], ["2"]] * 2


# -- the command --------------------------------------------------------------------------------------------------------


async def test_check_fleet_tells_what_workers_are_and_lack(engine: StartEngine, scripted: StartScripted) -> None:
    vllm, sglang = await engine("vllm", prefix_cache=False), await engine("sglang")
    gone = await engine()
    await gone.kill()
    arguments = [each for engine in (vllm, sglang, gone) for each in ("--worker", engine.url)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from gateway.cli import main; sys.exit(main())",
        *("check", "--fleet", "--json", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, err
    first, second, third = json.loads(out)["workers"]
    assert (first["url"], first["engine"], first["models"], first["problem"]) == (vllm.url, "vllm", ["sim"], None)
    assert "prefix_cache" in {row["code"] for row in first["lacks"]}
    assert (second["engine"], second["block_size"]) == ("sglang", 1)
    assert (third["url"], third["engine"]) == (gone.url, None)
    assert third["problem"]


def test_options_of_the_simulated_engine_used_here_exist() -> None:
    assert {"usage_details", "metrics", "prefix_cache"} <= set(vars(EngineOptions()))
