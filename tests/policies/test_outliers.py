"""Who does far worse than its peers: by failures and by time, against the same said in words."""

from statistics import median

from hypothesis import given, strategies as st

from policies.outliers import ERRORS, EVIDENCE, LATE, Record, outliers


def record(answered: float = 100.0, faults: float = 0.0, late: float = 1.0) -> Record:
    return Record(answered, faults, answered, answered * late)


def test_one_that_fails_often_while_others_do_not_is_put_out() -> None:
    pool = {0: record(), 1: record(60, 40), 2: record(99, 1)}
    assert outliers(pool, 0) == ([(1, "errors")], [])


def test_failures_that_all_have_are_nobody_s() -> None:
    assert outliers({number: record(60, 40) for number in range(4)}, 0) == ([], [])


def test_one_that_begins_late_is_put_out_and_slower_hardware_that_is_known_as_such_is_not() -> None:
    assert outliers({0: record(), 1: record(late=20.0), 2: record()}, 0) == ([(1, "latency")], [])
    assert outliers({0: record(), 1: record(late=1.5), 2: record()}, 0) == ([], [])


def test_times_are_told_as_multiples_of_what_was_expected() -> None:
    one, other = Record(), Record()
    for _ in range(20):
        one.began(10.0, 10.0)
        other.began(0.05, 0.05)
    assert one.lateness == other.lateness == 1.0


def test_little_evidence_judges_nobody() -> None:
    assert outliers({0: record(), 1: record(2, 5, late=50.0), 2: record()}, 0) == ([], [])
    assert outliers({0: record(1), 1: record(60, 40)}, 0) == ([], [])
    assert outliers({0: record(0, 50)}, 0) == ([], [])


def test_never_more_than_half_of_a_pool_is_out() -> None:
    pool = {number: record() for number in range(10)} | {3: record(60, 40), 4: record(40, 60), 5: record(50, 50)}
    worse, spared = outliers(pool, 3)
    assert [target for target, _ in worse] == [4, 5]
    assert spared == [(3, "errors")]
    assert outliers(pool, 5) == ([], [(4, "errors"), (5, "errors"), (3, "errors")])
    assert outliers({0: record(), 1: record(0, 99)}, 0)[0] == [(1, "errors")]


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.builds(record, st.floats(0, 200), st.floats(0, 200), st.floats(0, 50)),
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_whoever_is_put_out_deserves_it_and_half_stays(pool: dict[int, Record], out: int) -> None:
    worse, spared = outliers(pool, out)
    assert len({target for target, _ in [*worse, *spared]}) == len(worse) + len(spared)
    assert len(worse) <= max(0, len(pool) // 2 - out)
    for target, reason in [*worse, *spared]:
        mine = pool[target]
        if reason == "errors":
            assert mine.requests >= EVIDENCE
            assert mine.faults / mine.requests >= ERRORS
        else:
            assert mine.lateness is not None
            assert mine.lateness >= LATE


def test_counts_fade() -> None:
    one = record(8, 4)
    one.fade()
    assert (one.answered, one.faults, one.begun) == (4, 2, 4)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.floats(0.1, 40)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_each_is_compared_with_all_others_and_not_with_itself(rows: list[tuple[int, int, float]], out: int) -> None:
    """The sums and the sorted list that make this quick say what comparing each with each would."""
    pool = {
        number: Record(float(answered), float(faults), float(answered), answered * late)
        for number, (answered, faults, late) in enumerate(rows)
    }
    expected = set()
    for number, mine in pool.items():
        others = [record for other, record in pool.items() if other != number]
        peers = sum(record.requests for record in others)
        theirs = sum(record.faults for record in others) / peers if peers else 0.0
        if mine.requests >= 10 and peers >= 10 and mine.faults / mine.requests >= max(0.25, 3 * theirs):
            expected.add(number)
        known = [record.lateness for record in others if record.lateness is not None]
        if mine.lateness is not None and known and mine.lateness >= max(3.0, 4 * median(known)):
            expected.add(number)
    worse, spared = outliers(pool, out)
    assert {target for target, _ in worse + spared} == expected
