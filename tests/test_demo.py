"""``warmroute demo``, whole, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def test_the_demo_compares_three_policies_and_the_flagship_wins():
    ran = subprocess.run(
        [BIN / "warmroute", "demo", "--seconds", "4", "--json"], capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    policies = json.loads(ran.stdout)["policies"]
    assert list(policies) == ["round_robin", "least_load", "cache_aware"]
    for row in policies.values():
        assert row["errors"] == 0
        assert row["ttft_p99_ms"] >= row["ttft_p50_ms"] > 0
    ours, plain = policies["cache_aware"], policies["round_robin"]
    assert {row["requests"] for row in policies.values()} == {ours["requests"]}
    assert ours["token_hit_rate"] >= 1.3 * plain["token_hit_rate"]
    assert ours["ttft_p50_ms"] < plain["ttft_p50_ms"]
    assert ours["imbalance"] < 1.3
