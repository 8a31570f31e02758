"""A prefill engine that dies twice before its KV is fetched is not the decode engine's fault, which then serves alone."""

from __future__ import annotations

import pytest

from tests.real_engines.vllm.test_disaggregated_faults import (
    Between,
    after,
    between,
    pairs_again,
    restarted,
    served_by,
)

__all__ = ["between"]
pytestmark = pytest.mark.engines


async def test_a_prefill_engine_that_dies_twice(between: Between) -> None:
    pd, gate = await between("fail")
    await pairs_again(pd)
    for _ in range(2):
        body, answer = await after(pd, gate, pd.p.kill, False)
        assert answer.lasted < 15
        right = await pd.right(body, engine=pd.d)
        assert (answer.status, answer.error, answer.text) == (200, None, right.text)
        await served_by(pd, pd.d)
        assert "decode" not in await pd.blamed()
        await restarted(pd, pd.p)
