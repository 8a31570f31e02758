"""The queue's core: who goes next, who is turned away; against what anybody would count by hand."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from policies.admission import GENERATED, QUANTUM, Bounds, Held, Priority, Queue, Shed, Waiting, full
from policies.base import Rates, Target

ANY = [0]
FOREVER = 1e9


def waiting(
    tenant: str = "a",
    computed: float = 100.0,
    *,
    level: int = 0,
    at: float = 0.0,
    until: float = FOREVER,
    home: int | None = None,
    size: int = 10,
    weight: float = 1.0,
    generated: float = 0.0,
) -> Waiting:
    return Waiting(tenant, level, computed, generated, size, at, until, home=home, weight=weight)


def queue(*priorities: Priority, bounds: Bounds | None = None, quantum: float = QUANTUM) -> Queue:
    return Queue(priorities or (Priority("only", deadline=FOREVER),), bounds, quantum=quantum)


def put(line: Queue, *them: Waiting, now: float = 0.0) -> None:
    for each in them:
        assert line.offer(each, now) == (None, [])


def drained(line: Queue, tokens: float = 1e12, now: float = 0.0) -> list[Waiting]:
    """Who leaves, one after the other, until so many tokens were charged or nobody waits."""
    left = []
    spent = 0.0
    while spent < tokens and (each := line.take(now, ANY)) is not None:
        line.charge(each, each.computed, 0.0, now)
        spent += each.computed
        left.append(each)
    return left


# -- a target is full ---------------------------------------------------------------------------------------------------


def test_a_target_is_full_when_it_runs_as_many_as_it_can() -> None:
    target = Target(0, "t", most_running=4, running=3)
    assert not full(target, 1.0, 0.0)
    target.running = 4
    assert full(target, 1.0, 0.0)
    target.running, target.foreign = 1, 3.0
    assert full(target, 1.0, 0.0), "what others run there counts"


def test_a_target_is_full_when_much_is_in_front_and_empties_as_time_passes() -> None:
    target = Target(0, "t", rates=Rates(base=0.0), wait=2.0, head=2.0, since=10.0, running=1)
    assert full(target, 0.5, 10.0)
    assert full(target, 0.5, 11.4)
    assert not full(target, 0.5, 11.6)


def test_what_prompts_cost_whatever_their_length_does_not_fill_a_target() -> None:
    # Twenty tiny prompts are one step of an engine.
    target = Target(0, "t", rates=Rates(base=0.1, token=0.0), wait=2.0, running=20)
    assert not full(target, 0.05, 0.0)
    target.wait = 2.1
    assert full(target, 0.05, 0.0)


def test_one_that_has_nothing_of_ours_is_never_full() -> None:
    assert not full(Target(0, "t", wait=100.0, foreign=100.0, most_running=4), 0.0, 0.0)


# -- order --------------------------------------------------------------------------------------------------------------


def test_one_tenant_s_requests_leave_in_the_order_in_which_they_came() -> None:
    line = queue()
    them = [waiting(at=float(at)) for at in range(20)]
    put(line, *them)
    assert drained(line, now=20.0) == them


def test_what_the_free_targets_hold_goes_first_until_somebody_has_waited_for_half_of_its_time() -> None:
    cold, warm = waiting(at=0.0, until=100.0), waiting(at=1.0, until=101.0)
    line = queue()
    put(line, cold, warm)
    assert line.take(10.0, ANY, score=lambda each: 50.0 * (each is warm)) is warm
    line = queue()
    cold, warm = waiting(at=0.0, until=100.0), waiting(at=1.0, until=101.0)
    put(line, cold, warm)
    assert line.take(50.5, ANY, score=lambda each: 50.0 * (each is warm)) is cold


def test_who_belongs_to_a_target_waits_for_it() -> None:
    line = queue()
    at_one, anywhere, at_two = waiting(home=1), waiting(at=1.0), waiting(home=2, at=2.0)
    put(line, at_one, anywhere, at_two)
    assert line.take(3.0, [2], [1, 2], score=lambda each: float(each is at_two)) is at_two
    assert line.take(3.0, [2], [1, 2]) is anywhere
    assert line.take(3.0, [2], [1, 2]) is None
    assert line.take(3.0, [1], [1, 2]) is at_one


def test_who_belongs_to_a_target_that_is_gone_waits_for_nobody() -> None:
    line = queue()
    lost = waiting(home=7)
    put(line, lost)
    assert line.take(0.0, [1], [1, 2]) is lost


def test_the_last_that_came_leaves_its_home_first_and_only_if_it_would() -> None:
    line = queue()
    them = [waiting(computed=1000.0, home=1, at=float(at)) for at in range(3)]
    other = waiting(computed=1.0, home=2, at=0.5)
    put(line, *them, other)
    asked: list[tuple[Waiting, float]] = []

    def moves(each: Waiting, ahead: float) -> bool:
        asked.append((each, ahead))
        return ahead >= 2000.0

    assert line.take(3.0, [3], [1, 2, 3], moves=moves) is them[2]
    assert line.take(3.0, [3], [1, 2, 3], moves=moves) is None
    assert asked == [(them[2], 2000.0), (them[1], 1000.0), (other, 0.0)]


def test_nobody_leaves_while_nothing_is_free() -> None:
    line = queue()
    put(line, waiting())
    assert line.take(0.0, []) is None


# -- fairness -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(200, 5_000), st.sampled_from([1.0, 2.0, 0.5])), min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_backlogged_tenants_get_what_their_weights_say_within_a_quantum_and_a_request(
    told: list[tuple[int, float]], seed: int
) -> None:
    random = Random(seed)
    line = queue(bounds=Bounds(requests=10**9, tenant_requests=10**9))
    largest = max(size for size, _ in told)
    goal = 12 * (largest + QUANTUM)
    arrivals = [
        waiting(str(number), float(random.randint(1, size)), weight=weight)
        for number, (size, weight) in enumerate(told)
        for _ in range(int(2 * goal / (size / 2)) + 1)
    ]
    random.shuffle(arrivals)
    put(line, *arrivals)
    got: Counter[str] = Counter()
    for each in drained(line, goal):
        got[each.tenant] += each.computed  # type: ignore[assignment]
    shares = [got[str(number)] / weight for number, (_, weight) in enumerate(told)]
    heaviest = max(weight for _, weight in told) / min(weight for _, weight in told)
    assert max(shares) - min(shares) <= (QUANTUM + largest) * 2 * heaviest


def test_cached_tokens_are_free() -> None:
    line = queue()
    put(line, *[waiting("cached", 1000.0) for _ in range(100)], *[waiting("new", 1000.0) for _ in range(100)])
    left: Counter[str] = Counter()
    for _ in range(100):
        each = line.take(0.0, ANY)
        assert each is not None
        # Of one tenant's prompts nine tenths were found again.
        line.charge(each, 100.0 if each.tenant == "cached" else 1000.0, 0.0, 0.0)
        left[each.tenant] += 1
    assert left["cached"] >= 8 * left["new"]


def test_what_was_generated_is_charged_when_it_is_known() -> None:
    line = queue(quantum=1000.0)
    put(line, *[waiting("talks", 100.0) for _ in range(50)], *[waiting("listens", 100.0) for _ in range(50)])
    computed: Counter[str] = Counter()
    for _ in range(40):
        each = line.take(0.0, ANY)
        assert each is not None
        line.charge(each, 100.0, 0.0, 0.0)
        if each.tenant == "talks":
            line.correct("talks", 0, GENERATED * 450.0)
        computed[each.tenant] += 1
    assert computed["listens"] >= 7 * computed["talks"]


def test_leaving_the_queue_empty_leaves_no_debt_behind() -> None:
    line = queue(quantum=100.0)
    put(line, waiting("heavy", 5000.0))
    drained(line)
    put(line, *[waiting("light", 100.0, at=1.0) for _ in range(60)], waiting("heavy", 100.0, at=0.5), now=1.0)
    order = [each.tenant for each in drained(line, now=1.0)]
    assert order.index("heavy") >= 40


def test_counters_start_anew_after_a_while_without_anybody_waiting() -> None:
    line = queue(quantum=100.0)
    put(line, waiting("heavy", 5000.0))
    drained(line)
    put(line, waiting("heavy", 100.0, at=60.0), waiting("light", 100.0, at=61.0), now=61.0)
    assert [each.tenant for each in drained(line, now=61.0)] == ["heavy", "light"]


def test_a_tenant_that_may_not_have_more_running_is_passed_over() -> None:
    line = queue()
    first, second = waiting("capped"), waiting("other", at=1.0)
    put(line, first, second)
    assert line.take(2.0, ANY, may=lambda tenant: tenant != "capped") is second
    assert line.take(2.0, ANY, may=lambda tenant: tenant != "capped") is None
    assert line.take(2.0, ANY) is first


# -- priorities ---------------------------------------------------------------------------------------------------------

TWO = (Priority("interactive", deadline=FOREVER), Priority("bulk", share=0.2, deadline=FOREVER))


def test_the_first_priority_goes_first_and_the_second_has_its_share() -> None:
    line = queue(*TWO)
    put(line, *[waiting("b", 100.0, level=1) for _ in range(2000)])
    put(line, *[waiting("i", 100.0, level=0, at=1.0) for _ in range(2000)], now=1.0)
    left = drained(line, 100_000, now=1.0)
    assert left[0].tenant == "i"
    share = sum(each.computed for each in left if each.level == 1) / 100_000
    assert 0.18 <= share <= 0.22


def test_what_the_first_priority_does_not_use_the_second_has() -> None:
    line = queue(*TWO)
    put(line, *[waiting("b", 100.0, level=1) for _ in range(50)])
    assert len(drained(line)) == 50
    put(line, *[waiting("b", 100.0, level=1) for _ in range(50)], waiting("i"))
    assert drained(line)[0].tenant == "i"


def test_where_the_first_may_not_go_the_second_does() -> None:
    line = queue(*TWO)
    put(line, waiting("i", home=1), waiting("b", level=1, home=2))
    found = line.take(0.0, [2], [1, 2])
    assert found is not None
    assert found.tenant == "b"


# -- turned away --------------------------------------------------------------------------------------------------------


def refusal(line: Queue, each: Waiting, now: float = 0.0) -> Shed:
    shed, displaced = line.offer(each, now)
    assert shed is not None
    assert displaced == []
    assert each.line is None
    assert shed.retry_after >= 1.0
    return shed


def test_the_queue_is_bounded_in_requests_and_bytes_of_all_of_a_tenant_and_of_a_level() -> None:
    line = queue(bounds=Bounds(requests=2))
    put(line, waiting(), waiting("b"))
    assert refusal(line, waiting("c")).reason == "queue_full"
    line = queue(bounds=Bounds(bytes=25))
    put(line, waiting(), waiting("b"))
    assert refusal(line, waiting("c")).reason == "queue_full"
    line = queue(bounds=Bounds(tenant_requests=1))
    put(line, waiting(), waiting("b"))
    assert refusal(line, waiting()).reason == "tenant_full"
    line = queue(bounds=Bounds(tenant_bytes=15))
    put(line, waiting(), waiting("b"))
    assert refusal(line, waiting()).reason == "tenant_full"
    line = queue(Priority("only", deadline=FOREVER, requests=1))
    put(line, waiting())
    assert refusal(line, waiting("b")).reason == "level_full"


def test_bounds_hold_over_all_queues_that_share_them() -> None:
    held = Held()
    bounds = Bounds(requests=2)
    one, two = (Queue((Priority("only", deadline=FOREVER),), bounds, held) for _ in range(2))
    put(one, waiting())
    put(two, waiting("b"))
    assert refusal(one, waiting("c")).reason == "queue_full"
    drained(two)
    put(one, waiting("c"))


def test_one_of_more_priority_takes_the_place_of_the_last_that_came_of_the_longest_line() -> None:
    line = queue(*TWO, bounds=Bounds(requests=4))
    long = [waiting("long", level=1, at=float(at)) for at in range(3)]
    put(line, *long, waiting("short", level=1, at=9.0))
    assert line.offer(waiting("i"), 10.0) == (None, [long[2]])
    assert refusal(line, waiting("b", level=1), 10.0).reason == "queue_full"


def test_who_is_not_served_in_time_is_told_at_its_deadline() -> None:
    line = queue()
    short, long = waiting(until=5.0), waiting(until=9.0)
    put(line, short, long)
    assert line.expired(4.9) == []
    assert [(each, shed.reason) for each, shed in line.expired(5.0)] == [(short, "deadline")]
    assert line.all() == [long]
    assert line.expired(FOREVER)[0][0] is long
    assert len(line) == 0


def test_who_could_not_be_served_in_time_is_told_at_once() -> None:
    line = queue()
    put(line, *[waiting(computed=100.0) for _ in range(200)])
    # 1,000 tokens a second.
    for step in range(1, 101):
        now = step / 10
        each = line.take(now, ANY)
        assert each is not None
        line.charge(each, 100.0, 0.0, now)
    # Ten seconds' work waits.
    shed = refusal(line, waiting(at=10.0, until=15.0), 10.0)
    assert shed.reason == "too_long"
    assert 3.0 < shed.retry_after < 8.0
    put(line, waiting(at=10.0, until=25.0), now=10.0)


def test_what_was_measured_in_a_stall_is_forgotten_when_nobody_waits_any_more() -> None:
    line = queue()
    put(line, *[waiting(computed=100.0, until=70.0) for _ in range(50)])
    for step in range(1, 21):
        each = line.take(step / 10, ANY)
        assert each is not None
        line.charge(each, 100.0, 0.0, step / 10)
    # Then nothing moves for a minute.
    shed = refusal(line, waiting(at=60.0, until=61.0), 60.0)
    assert (shed.reason, shed.retry_after) == ("too_long", 300.0), "nobody knows what will be in an hour"
    assert len(line.expired(70.0)) == 30
    put(line, waiting(at=71.0, until=72.0), now=71.0)


def test_who_belongs_to_a_free_target_goes_however_many_belong_to_nobody() -> None:
    line = queue()
    put(line, *[waiting(at=2.0) for _ in range(200)], waiting(home=1, at=1.0, until=61.0), now=2.0)
    left = []
    for step in range(3, 60):
        put(line, waiting(at=float(step)), now=float(step))
        each = line.take(float(step), [1], [1, 2])
        assert each is not None
        left.append(each.home)
    assert 1 in left


def test_nobody_has_to_leave_for_one_that_does_not_fit_at_all() -> None:
    line = queue(*TWO, bounds=Bounds(bytes=100))
    put(line, *[waiting(level=1) for _ in range(5)])
    assert refusal(line, waiting("i", size=101)).reason == "queue_full"
    assert len(line) == 5


def test_a_newcomer_is_not_told_that_it_must_wait_for_another_tenant_s_whole_backlog() -> None:
    line = queue()
    put(line, *[waiting("flood", 100.0) for _ in range(2000)])
    for step in range(1, 101):
        each = line.take(step / 10, ANY)
        assert each is not None
        line.charge(each, 100.0, 0.0, step / 10)
    put(line, waiting("new", 100.0, at=10.0, until=12.0), now=10.0)


# -- books --------------------------------------------------------------------------------------------------------------

ACTS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "take", "leave", "expire", "correct"]),
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.integers(0, 5_000),
        st.sampled_from([None, 0, 1, 2]),
        st.floats(0.0, 3.0),
    ),
    max_size=120,
)
THREE = (
    Priority("one", deadline=FOREVER),
    Priority("two", share=0.2, deadline=FOREVER, requests=10),
    Priority("three", share=0.1, deadline=FOREVER, bytes=300),
)


@settings(deadline=None, max_examples=200)
@given(ACTS)
def test_whatever_happens_the_books_agree_with_who_is_there(
    acts: list[tuple[str, str, int, int, int | None, float]],
) -> None:
    bounds = Bounds(requests=25, bytes=2_000, tenant_requests=12, tenant_bytes=900)
    line = queue(*THREE, bounds=bounds)
    there: dict[Waiting, None] = {}
    now, sizes = 0.0, count(1)
    for act, tenant, level, number, home, passes in acts:
        now += passes
        if act == "offer":
            each = waiting(
                tenant, float(number), level=level, at=now, until=now + 1 + number % 7, home=home, size=next(sizes) % 90
            )
            shed, displaced = line.offer(each, now)
            for gone in displaced:
                del there[gone]
                assert gone.level > level
            if shed is None:
                there[each] = None
        elif act == "take":
            found = line.take(now, [0, 1], [0, 1, 2], may=lambda name, no=tenant: name != no)  # type: ignore[misc]
            if found is not None:
                del there[found]
                assert found.tenant != tenant
                assert found.home in (None, 0, 1)
                line.charge(found, float(number), 10.0, now)
            else:
                assert not any(each.tenant != tenant and each.home in (None, 0, 1) for each in there)
        elif act == "leave" and there:
            each = list(there)[number % len(there)]
            line.leave(each, now)
            line.leave(each, now)
            del there[each]
        elif act == "expire":
            gone = [each for each, _ in line.expired(now)]
            assert set(gone) == {each for each in there if each.deadline <= now}
            for each in gone:
                del there[each]
        else:
            line.correct(tenant, level, float(number - 2_500))
        assert set(line.all()) == set(there)
        assert len(line) == len(there) == line.held.requests <= bounds.requests
        assert line.held.bytes == sum(each.size for each in there) <= bounds.bytes
        for place, each_level in enumerate(line.levels):
            mine = [each for each in there if each.level == place]
            assert each_level.requests == len(mine) <= each_level.priority.requests
            assert each_level.bytes == sum(each.size for each in mine) <= each_level.priority.bytes
            assert each_level.tokens == pytest.approx(sum(each.tokens for each in mine), abs=1e-6)
        for name in "abc":
            mine = [each for each in there if each.tenant == name]
            assert line.held.tenants.get(name, [0, 0])[0] == len(mine) <= bounds.tenant_requests
    for each in list(there):
        line.leave(each, now)
    assert (line.held.requests, line.held.bytes, line.held.tenants) == (0, 0, {})
