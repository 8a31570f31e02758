"""Seconds: what costs nothing, and what more of it costs."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from policies.base import Rates, Request, Terms, load
from policies.cost import EXPECTED_OUTPUT, memory
from tests.policies.fleets import KIND, decoder, prefiller, split, target


def test_memory_is_the_time_until_running_answers_make_room() -> None:
    request = Request(7, tokens=1_000)
    assert memory(request, decoder(0)) == 0.0, "its room is not known"
    assert memory(request, decoder(0, active=1e9)) == 0.0
    fits = 1_000 + EXPECTED_OUTPUT
    assert memory(request, decoder(0, room=5_000 + fits, active=5_000.0, busy=4.0)) == 0.0
    answer = EXPECTED_OUTPUT * (KIND.base + 4 * KIND.decode)
    for lacking in (1, 500, fits):
        full = decoder(0, room=5_000 + fits - lacking, active=5_000.0, busy=4.0)
        assert memory(request, full) == pytest.approx(lacking / 5_000 * answer)
    opaque = Request(7)
    assert memory(opaque, decoder(0, room=5_000, active=5_000.0)) == pytest.approx(
        EXPECTED_OUTPUT / 5_000 * EXPECTED_OUTPUT * KIND.base
    )


def test_a_total_is_the_sum_of_all_terms() -> None:
    for place in range(len(Terms._fields)):
        assert Terms(*[float(at == place) for at in range(len(Terms._fields))]).total == 1.0
    assert Terms(1, 2, 4, 8, 16, 32, 64, 128).total == 255


def test_a_transfer_of_nothing_needs_no_handshake() -> None:
    rates = Rates(handshake=0.5, transfer=1e-3)
    assert (rates.moved(0), rates.moved(-5)) == (0.0, 0.0)
    assert rates.moved(1) == pytest.approx(0.501)
    assert rates.moved(1_000) == pytest.approx(1.5)


@given(st.integers(0, 100_000), st.integers(1, 200_000), st.floats(1, 200_000), st.floats(0, 50_000))
def test_memory_never_shrinks_with_what_is_active_or_asked(tokens: int, room: int, active: float, more: float) -> None:
    before = memory(Request(7, tokens=tokens), decoder(0, room=room, active=active))
    assert before >= 0.0
    assert memory(Request(7, tokens=tokens + int(more)), decoder(0, room=room, active=active)) >= before
    assert memory(Request(7, tokens=tokens), decoder(0, room=room + int(more), active=active)) <= before
    if tokens + EXPECTED_OUTPUT <= room:
        # More that runs, more to wait for; where the prompt fits at all.
        assert memory(Request(7, tokens=tokens), decoder(0, room=room, active=active + more)) >= before - 1e-12


def test_thrift_makes_a_prefill_count_more_in_each_way_of_a_disaggregated_fleet() -> None:
    request = Request(7, tokens=30_000, session=5, home=0, holdings={0: 25_000, 50: 9_000}, lent=20_000)
    targets = split([decoder(0, busy=30.0), target(50)], [prefiller(100)])
    rows = load("disaggregated", {"thrift": 2.0}).explain(request, targets, 0.0)
    seen = {(row.target.id, row.prefill is not None): row.terms for row in rows}
    assert set(seen) == {(0, True), (0, False), (50, False)}
    for way, held in (((0, True), 20_000), ((0, False), 25_000), ((50, False), 9_000)):
        found = seen[way]
        assert found is not None
        assert found.prefill == pytest.approx(KIND.prefill(30_000 - held, held))
        assert found.delay == pytest.approx(2.0 * found.prefill)
