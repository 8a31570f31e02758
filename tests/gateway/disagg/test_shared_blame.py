"""Errors of a decode engine with a shared store are its own."""

from __future__ import annotations

from tests.gateway.disagg.kinds import BeginKind, kind_of_pair
from tests.gateway.disagg.rig import name, story

__all__ = ["kind_of_pair"]


async def test_an_error_is_the_decode_engine_s(kind_of_pair: BeginKind) -> None:
    r = await kind_of_pair("shared", 2, 2, policy="round_robin")
    r.d.faults.add("error500", count=None)
    for number in range(2):
        await r.check(story(number))
    assert await r.blamed() == {name(r.d)}
