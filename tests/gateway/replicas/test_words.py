"""Whatever stands on the bus, a gateway goes on, and what it can read of it is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gateway.meters import Limits, Meter, RateLimited
from gateway.replicas.elsewhere import Elsewhere
from gateway.replicas.words import VERSION, Batch, Flight, Home, Placed, Told, Used, decode, encode, home_of
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.replicas.test_agreeing import seats
from tests.gateway.talk import chat, once, request

WHO = b"somebody"


def home(key: bytes, at: str | None = None, **more: Any) -> Home:
    told: dict[str, Any] = {
        "tenant": "anonymous", "model": "sim", "source": "x-session-id", "home": at, "partner": None, "why": "new",
        "moves": 1, "bound": 1.0, "used": 1.0, "turns": 1, "prompt_bytes": 10, "prompt_tokens": 3, "tail_tokens": 1,
    }  # fmt: skip
    return Home(key, **{**told, **more})


HOSTILE = [
    b"",
    b"\xc1",
    b"[" * 1000,
    b"\x91" * 5000,
    msgspec.msgpack.encode([VERSION, WHO]),
    encode(Batch(VERSION + 1, WHO, b"", 1)),
    encode(Batch(VERSION, WHO, b"", 1, placed=[Placed(7, 1, b"12345678")])),
    encode(Batch(VERSION, WHO, b"", 2, names=("nobody:1",), placed=[Placed(0, 1, b"odd")])),
    encode(Batch(VERSION, WHO, b"", 3, flight=[Flight(9, 1, 1.0, 1)])),
    encode(Batch(VERSION, WHO, b"", 4, homes=[Told(b"k", b"", b"no home")])),
    encode(Batch(VERSION, WHO, b"", 5, used=[Used("nobody", 1e300, -1e300, 1.0, 10**9)])),
    encode(Batch(VERSION, WHO, b"", 1 << 62)),
    encode(Batch(VERSION, b"", b"", 0, last=True)),
]


async def test_what_cannot_be_read_costs_nothing(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    running = await gateway(await engine(time_scale=0.0), policy="cache_aware", seat=seats(tmp_path, 1)[0])
    assert running.replicas is not None
    for data in HOSTILE:
        running.replicas.hear(data)
    unread = running.metrics.replicas_batches.values["unread",][0]
    assert unread >= 6
    for number in range(3):
        assert (await once(running.port, request(chat(max_tokens=1), f"X-Session-Id: {number}"))).status == 200
    assert len(running.fleet.targets) == 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_are_refused(data: bytes) -> None:
    try:
        batch = decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    assert decode(encode(batch)) == batch


def test_a_home_is_read_as_it_was_said() -> None:
    before = home(b"k" * 16, "a:1", ends=(b"e" * 16,), pins=(("resp_1", "a:1"),), told=("a:1",))
    assert home_of(encode(before)) == before


def test_sessions_of_others_have_a_bound_and_those_spoken_of_last_stay() -> None:
    elsewhere = Elsewhere(100)
    for number in range(1000):
        key = b"%016d" % number
        elsewhere.put(key, b"end" + key, encode(home(key, last=b"end" + key)))
        assert len(elsewhere) <= 202
    assert elsewhere.get(b"%016d" % 999) is not None
    found = elsewhere.ends_with(b"end" + b"%016d" % 998)
    assert found is not None
    assert found.key == b"%016d" % 998
    assert elsewhere.get(b"%016d" % 3) is None
    elsewhere.drop(b"%016d" % 999)
    assert elsewhere.get(b"%016d" % 999) is None


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(20, 400), st.lists(st.integers(0, 5), min_size=1, max_size=80))
def test_several_meters_that_hear_of_each_other_late_grant_no_more_than_a_little_too_much(
    count: int, limit: int, rounds: list[int]
) -> None:
    meters = [Meter("a", Limits(requests_per_minute=limit)) for _ in range(count)]
    for meter in meters:
        meter.sharing = count
    granted = 0
    for burst in rounds:
        for meter in meters:
            for _ in range(burst * 5):
                try:
                    meter.comes(100.0)
                    granted += 1
                except RateLimited:
                    pass
        said = [meter.unsaid() for meter in meters]
        for meter in meters:
            for other, told in zip(meters, said, strict=True):
                if other is not meter:
                    meter.hears(*told, 100.0)
    # One each, however little is left, and a twenty-fifth part.
    assert granted <= limit * 1.05 + count
    if sum(rounds) * 5 * count > 20 * limit and len([each for each in rounds if each]) > 40:
        assert granted >= limit * 0.95


def test_what_runs_at_others_counts_for_how_many_may_run() -> None:
    meter = Meter("a", Limits(concurrency=4))
    meter.sharing, meter.beside = 2, 3
    assert meter.free
    meter.running = 1
    assert not meter.free
    meter.beside = 0
    meter.unsaid()
    assert meter.free


@pytest.mark.parametrize("number", [-1, 2**63])
def test_numbers_out_of_bounds_are_no_batch(number: int) -> None:
    with pytest.raises((msgspec.DecodeError, OverflowError)):
        decode(msgspec.msgpack.encode([VERSION, WHO, b"", "many", number]))
