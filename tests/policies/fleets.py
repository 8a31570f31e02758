"""Targets, fleets and requests for tests of policies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.base import Fleet, Rates, Request, Role, Target, rendezvous

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


def decoder(id: int, **fields: Any) -> Target:
    """A decode engine of pool ``a``, able to serve whole, unless told otherwise."""
    return target(id, role=Role.DECODE, **{"pool": "a", "name": f"decode-{id}", **fields})


def prefiller(id: int, **fields: Any) -> Target:
    """A prefill engine of pool ``a``, unless told otherwise."""
    return target(id, role=Role.PREFILL, whole=False, **{"pool": "a", "name": f"prefill-{id}", **fields})


def split(decode: list[Target], prefill: list[Target]) -> Fleet:
    """Who generates (decode engines, unified ones) and who may compute prompts for them."""
    return Fleet(decode, Fleet(prefill))


def everyone(fleet: Fleet) -> tuple[Target, ...]:
    """Of both sides."""
    return (*fleet.targets, *(fleet.prefill.targets if fleet.prefill else ()))


@st.composite
def split_fleets(draw: st.DrawFn, queues: bool = True) -> Fleet:
    """Random fleets of one pool or two; only what can serve a request is in them. ``queues``: decode engines may have some."""
    kinds = draw(st.lists(rates, min_size=1, max_size=2))
    pools = draw(st.sampled_from([["a"], ["a", "b"]]))

    def one(make: Any, id: int, queue: bool = True, **fields: Any) -> Target:
        """A prefill engine generates nothing."""
        wait = draw(seconds) if queue else 0.0
        room = draw(st.none() | st.integers(100, 300_000))
        made: Target = make(
            id,
            rates=draw(st.sampled_from(kinds)),
            wait=wait,
            head=draw(st.sampled_from([0.0, 0.5, 1.0])) * wait,
            since=draw(st.floats(-30, 0)),
            running=draw(st.integers(0, 50)),
            busy=0.0 if make is prefiller else float(draw(st.integers(0, 50))),
            homes=draw(st.integers(0, 40)),
            room=room,
            active=float(draw(st.integers(0, 200_000))),
            **fields,
        )
        return made

    prefill = [one(prefiller, 100 + at, pool=draw(st.sampled_from(pools))) for at in range(draw(st.integers(1, 4)))]
    fed = {each.pool for each in prefill}
    decode = []
    for at in range(draw(st.integers(0, 4))):
        pool = draw(st.sampled_from(pools))
        decode.append(one(decoder, at, queues, pool=pool, whole=pool not in fed or draw(st.booleans())))
    least = 0 if decode else 1
    unified = [one(target, 50 + at, pool=draw(st.sampled_from(pools))) for at in range(draw(st.integers(least, 2)))]
    return split(draw(st.permutations(decode + unified)), prefill)


@st.composite
def split_requests(draw: st.DrawFn, fleet: Fleet) -> Request:
    """As `requests`, with partners; a home that generated alone in its pool can lend."""
    assert fleet.prefill is not None
    request = draw(requests(fleet))
    ids = st.sampled_from([each.id for each in everyone(fleet)] + [1001])
    request.holdings = draw(st.dictionaries(ids, st.integers(0, 250_000), max_size=8))
    tokens = request.tokens or 0
    if request.session is not None:
        request.partner = draw(st.none() | st.sampled_from([each.id for each in fleet.prefill.targets] + [1002]))
        request.away = request.home == 1001 and draw(st.booleans())
    home = next((each for each in fleet.targets if each.id == request.home), None)
    one_pool = len({each.pool for each in everyone(fleet)}) == 1
    if home is not None and home.role is Role.DECODE and one_pool:
        request.lent = draw(st.just(0) | st.integers(0, tokens))
    for each in fleet.prefill.targets:
        if held := min(request.holdings.get(each.id, 0), tokens):
            request.restored = {**request.restored, each.id: (draw(st.integers(0, held)), 0, 0)}
    return request


@st.composite
def split_asked(draw: st.DrawFn, **options: Any) -> tuple[Fleet, Request]:
    fleet = draw(split_fleets(**options))
    return fleet, draw(split_requests(fleet))
