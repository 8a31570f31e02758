"""The simulation against the same traffic over HTTP."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.bench.contenders import Contender, ours
from load_tests.simulate.fleet import BadTraffic
from load_tests.witness import ROUTER, Setting, contenders, main, over_http, simulated
from load_tests.workloads.catalogue import find

WORKERS, REQUESTS = 2, 60
SPEED = 30.0


def setting() -> Setting:
    """Little room: some of what is shared must go."""
    return Setting.of(find("tools", workers=WORKERS, limit=REQUESTS), WORKERS, 40_000, SPEED)


async def agrees(contender: Contender, policy: str, folder: Path) -> None:
    same = setting()
    expected = simulated(same, policy)
    found = await over_http(same, contender, folder, 60.0)
    assert (found.requests, found.failed) == (REQUESTS, 0) == (expected.requests, expected.failed)
    assert found.hit_rate is not None and expected.hit_rate is not None
    assert 0.2 < expected.hit_rate < 1.0
    # Real time: a busy machine changes the order of what comes close together.
    assert found.hit_rate == pytest.approx(expected.hit_rate, abs=0.1)


@pytest.mark.parametrize("policy", ["cache_aware"])
async def test_our_gateway_is_as_simulated(policy: str, tmp_path: Path) -> None:
    await agrees(ours(policy, WORKERS), policy, tmp_path)


async def test_the_router_of_sglang_is_as_simulated(tmp_path: Path) -> None:
    found, missing = contenders(WORKERS, [])
    if missing:
        pytest.skip(f"not run: WARMROUTE_PEERS names no folder with {ROUTER}")
    (router,) = found
    await agrees(router, "sglang_cache_aware", tmp_path)


def test_both_see_the_same_seconds() -> None:
    slow = Setting.of(find("tools", workers=WORKERS, limit=REQUESTS), WORKERS, 40_000, 1.0)
    fast = setting()
    assert all(not turn.after for chain in fast.traffic.chains for turn in chain.turns)
    assert fast.options.rates == slow.options.rates.scaled(1 / SPEED)
    for one, other in zip(slow.traffic.chains, fast.traffic.chains, strict=True):
        assert other.at == pytest.approx(one.at / SPEED)
        assert [turn.blocks for turn in one.turns] == [turn.blocks for turn in other.turns]
    few = replace(fast, workers=1)
    assert simulated(few, "round_robin").imbalance == 1.0


def test_what_fits_no_engine_is_told() -> None:
    with pytest.raises(BadTraffic, match="--kv-tokens"):
        Setting.of(find("tools", workers=WORKERS, limit=REQUESTS), WORKERS, 4_000, SPEED)


def test_a_peer_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMROUTE_PEERS", str(tmp_path))
    assert main(["tools", "--policy", "", "--limit", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["not_run"]) == ([], [ROUTER])


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["no-such-trace"], "generators"),
        (["tools", "--policy", "no_such_policy"], "no_such_policy"),
        (["tools", "--kv-tokens", "500"], "--kv-tokens"),
    ],
)
def test_bad_arguments_tell_the_cure(arguments: list[str], cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert cure in capsys.readouterr().err
