"""More than can be served, over HTTP: what holds on any machine, however long its seconds are."""

from __future__ import annotations

import json

from load_tests.overload import overload


async def test_nobody_hangs_refusals_are_polite_and_interactive_is_spared() -> None:
    found = await overload(3.0, 12.0, calibrate=5.0)
    told = json.dumps(found.told(), indent=2)
    # Whoever hung, an impolite refusal, an interactive request that was shed, requests in flight at the end.
    assert found.problems == [], told
    together = found.together
    assert len(together.answers["bulk"]) > 2 * len(together.answers["interactive"]) > 0, told
    assert together.refused("bulk"), "it was no overload"
    assert all(answer.status in (200, 429) for answers in together.answers.values() for answer in answers)
    assert all(answer.status == 200 for answer in found.alone.answers["interactive"])
    assert together.tenants.keys() == {"desk", "batch"}, told
