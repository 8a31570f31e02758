"""Targets, fleets and requests for tests of policies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.base import Fleet, Rates, Request, Target, rendezvous

KIND = Rates()


def target(id: int, **fields: Any) -> Target:
    fields.setdefault("rates", KIND)
    return Target(id, fields.pop("name", f"10.0.0.{id}:8000"), **fields)


def fleet(count: int, **fields: Any) -> Fleet:
    """``count`` equal targets."""
    return Fleet([target(id, **fields) for id in range(count)])


def state(target: Target) -> tuple[Any, ...]:
    """All that a policy could change."""
    return tuple(getattr(each, slot) for each in (target, target.rates) for slot in type(each).__slots__)


def said(request: Request) -> tuple[Any, ...]:
    return (dict(request.holdings), *(getattr(request, slot) for slot in Request.__slots__))


bits = st.integers(0, 2**64 - 1)
seconds = st.one_of(st.just(0.0), st.floats(0, 30))
rates = st.builds(
    Rates,
    base=st.floats(1e-4, 1.0),
    token=st.floats(1e-6, 1e-2),
    attention=st.floats(0, 1e-7),
    decode=st.floats(1e-6, 1e-2),
)


@st.composite
def fleets(draw: st.DrawFn, most: int = 9, equal_rates: bool | None = None, slow: bool | None = None) -> Fleet:
    """Random fleets: rates equal or not, some targets in slow start or none."""
    count = draw(st.integers(1, most))
    same = draw(st.booleans()) if equal_rates is None else equal_rates
    slowly = draw(st.booleans()) if slow is None else slow
    kinds = [draw(rates)] if same else draw(st.lists(rates, min_size=1, max_size=3))
    waits = [draw(seconds) for _ in range(count)]
    return Fleet(
        [
            target(
                id * 3,
                rates=draw(st.sampled_from(kinds)),
                wait=waits[id],
                head=draw(st.sampled_from([0.0, 0.5, 1.0])) * waits[id],
                since=draw(st.floats(-30, 0)),
                running=draw(st.integers(0, 50)),
                foreign=float(draw(st.integers(0, 20))),
                busy=float(draw(st.integers(0, 50))),
                homes=draw(st.integers(0, 40)),
                share=draw(st.sampled_from([0.1, 0.4, 1.0])) if slowly else 1.0,
            )
            for id in range(count)
        ]
    )


@st.composite
def requests(draw: st.DrawFn, fleet: Fleet) -> Request:
    """Random requests, with holdings of targets that are gone too, and with anything missing."""
    ids = st.sampled_from([target.id for target in fleet.targets] + [1001])
    session = draw(st.none() | bits)
    return Request(
        draw=draw(bits),
        ordinal=draw(st.integers(0, 10_000)),
        tokens=draw(st.none() | st.integers(0, 200_000)),
        holdings=draw(st.dictionaries(ids, st.integers(0, 250_000), max_size=len(fleet.targets) + 1)),
        session=session,
        home=None if session is None else draw(st.none() | ids),
        siblings=draw(st.integers(0, 3)),
        prefix=draw(st.none() | bits),
        crowd=draw(st.sampled_from([0.0, 0.1, 2.0])),
        turns=draw(st.floats(1, 50)),
    )


@st.composite
def asked(draw: st.DrawFn, **options: Any) -> tuple[Fleet, Request]:
    fleet = draw(fleets(**options))
    return fleet, draw(requests(fleet))


def preferred(key: int, fleet: Fleet) -> Target:
    """Rendezvous: the highest score."""
    return rendezvous(key, fleet.targets)
