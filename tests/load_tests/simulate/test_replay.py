"""``warmroute replay``: what it prints, and what it says of bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.cli import main

FIGURES = {
    "requests",
    "token_hit_rate",
    "ceiling",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "session_p50_s",
    "imbalance",
    "moved_sessions",
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations of which the second turns go on from the first, and a request of its own."""
    rows = [(0, [0, 1, 2]), (0, [0, 5, 6, 7]), (30_000, [0, 1, 8, 9]), (30_000, [0, 5, 6, 10, 11]), (60_000, [0, 20])]
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for at, blocks in rows:
            size = len(blocks) * 512 - 100
            print(
                json.dumps({"timestamp": at, "input_length": size, "output_length": 20, "hash_ids": blocks}), file=file
            )
    return path


def test_json_has_exactly_the_figures_of_each_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--workers", "2", "--policy", "round_robin,cache_aware", "--json"]) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert said.out.count("\n") == 1
    assert list(result) == ["policies"]
    assert list(result["policies"]) == ["round_robin", "cache_aware"]
    for figures in result["policies"].values():
        assert set(figures) == FIGURES
        assert figures["requests"] == 5
    # Hits: one block of the fifth, and what the second turns share with the first.
    assert result["policies"]["cache_aware"]["ceiling"] == pytest.approx(7 * 512 / (18 * 512 - 500), abs=1e-4)


def test_the_table_names_policies_and_progress_goes_to_stderr(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["replay", str(trace), "--workers", "2", "--policy", "least_load, least_load ,random"]) == 0
    said = capsys.readouterr()
    lines = [line.split() for line in said.out.splitlines()]
    assert [line[0] for line in lines if line and line[0] in ("least_load", "random")] == ["least_load", "random"]
    assert "2 simulated workers" in said.out
    assert "5/5" in said.err


@pytest.mark.parametrize("name", ["agents", "documents", "load", "universal"])
def test_generators_by_name_with_a_limit_and_a_seed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(seed: str) -> str:
        command = [
            "replay",
            name,
            "--workers",
            "3",
            "--policy",
            "cache_aware",
            "--limit",
            "60",
            "--json",
            "--seed",
            seed,
        ]
        assert main(command) == 0
        return capsys.readouterr().out

    first = printed("1")
    assert first == printed("1")
    assert first != printed("2")
    figures = json.loads(first)["policies"]["cache_aware"]
    assert figures["requests"] == 60
    assert (figures["session_p50_s"] is None) == (name in ("documents", "load"))


def test_traces_are_looked_for_in_their_folder(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_TRACES", str(trace.parent))
    assert main(["replay", "trace.jsonl", "--policy", "random", "--json", "--limit", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["policies"]["random"]["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "TRACE 'nothing.jsonl' is no file"),
        (["nothing.jsonl"], "generators: agents, causal, chat, documents, "),
        (["load", "--policy", "best"], "--policy: no policy is called 'best'; there are: "),
        (["load", "--policy", ","], "--policy names no policy"),
        (["load", "--kv-tokens", "100"], "kv_tokens must be at least one block of 128 tokens, not 100"),
        (["load", "--kv-tokens", "1000"], "--kv-tokens 1000 is too small"),
        (["."], "TRACE .: Is a directory"),
    ],
)
def test_errors_name_the_field_and_the_cure(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_broken_line_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    assert main(["replay", str(trace)]) == 2
    assert "line 6: hash_ids has 1 blocks" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--workers", "--kv-tokens", "--limit"])
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_numbers_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", "load", f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: a whole number of at least 1 is needed, not '{value}'" in capsys.readouterr().err


def test_the_published_trace(capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.environ.get("WARMROUTE_TRACES")
    if not folder or not (Path(folder) / "mooncake/conversation_trace.jsonl").exists():
        pytest.skip("not run: WARMROUTE_TRACES names no folder with mooncake/conversation_trace.jsonl")
    command = ["replay", "mooncake/conversation_trace.jsonl", "--workers", "16", "--policy", "round_robin,cache_aware"]
    assert main([*command, "--kv-tokens", "3000000", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    assert rows["cache_aware"]["ceiling"] == pytest.approx(0.374, abs=0.002)
    assert rows["cache_aware"]["token_hit_rate"] > 3 * rows["round_robin"]["token_hit_rate"]
    assert rows["cache_aware"]["imbalance"] < 1.2
