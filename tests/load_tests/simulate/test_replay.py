"""``warmroute replay``: what it prints, and what it says of bad input."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import stdev
from typing import Any

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
    "pair_share",
    "tpot_mean_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "session_p50_s",
    "session_p90_s",
    "imbalance",
    "moved_sessions",
    "goodput",
    "cost_per_session",
    "cost_per_request",
    "requests_again",
    "preemptions",
    "ttft_by_turn",
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
    for row in result["policies"].values():
        assert set(row) == FIGURES
        assert row["requests"] == 5
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
    row = json.loads(first)["policies"]["cache_aware"]
    assert row["requests"] == 60
    assert (row["session_p50_s"] is None) == (name in ("documents", "load"))


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
        (["nothing.jsonl"], "generators: agents, causal, chat, chat_5k, code_30k, documents, "),
        (["load", "--policy", "best"], "--policy: no policy is called 'best'; there are: "),
        (["load", "--policy", ","], "--policy names no policy"),
        (["load", "--kv-tokens", "100"], "--kv-tokens: kv_tokens must be at least one block of 128 tokens, not 100"),
        (["load", "--kv-tokens", "10"], "--kv-tokens: kv_tokens must be at least one block of 16 tokens, not 10"),
        (["load", "--kv-tokens", "1000"], "--kv-tokens 1000 is too small"),
        (["."], "TRACE .: Is a directory"),
        (["load", "--policy", "best"], "to compare with: always_local, always_pair, dynamo_cost, "),
        (["load", "--pd", "2:3", "--workers", "4"], "--pd 2:3 makes 5 engines, not --workers 4; leave --workers out"),
        (["load", "--pd", "2:3", "--held"], "leave --held or --pd out"),
        (["load", "--event-lag", "1"], "--event-lag tells how late events are; add --events"),
        (["load", "--silent", "1"], "--silent tells how many engines publish no events; add --events"),
        (["load", "--events", "--silent", "9"], "--silent 9 is more than the 8 engines there are; give at most 8"),
        (["load", "--held", "--no-session"], "leave --held or --no-session out"),
        (["load", "--html", "/nowhere/page.html"], "--html /nowhere/page.html cannot be written: No such file"),
        (["load", "--html", "/"], "--html / cannot be written: Is a directory"),
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


COUNTS = ["--workers", "--kv-tokens", "--limit", "--host-tokens", "--gateways", "--seeds", "--silent"]


@pytest.mark.parametrize("option", COUNTS)
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_numbers_are_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(option, value, capsys) == f"a whole number of at least 1 is needed, not '{value}'"


@pytest.mark.parametrize(
    ("option", "value", "cure"),
    [
        ("--pd", "3", "P:D is needed, whole numbers of at least 1, like 2:6, not '3'"),
        ("--pd", "0:3", "P:D is needed, whole numbers of at least 1, like 2:6, not '0:3'"),
        ("--pd", "2:3:4", "P:D is needed, whole numbers of at least 1, like 2:6, not '2:3:4'"),
        ("--slo", "fast", "milliseconds above 0 are needed, TTFT or TTFT:TPOT, like 500:40, not 'fast'"),
        ("--slo", "500:0", "milliseconds above 0 are needed, TTFT or TTFT:TPOT, like 500:40, not '500:0'"),
        ("--slo", "500:", "milliseconds above 0 are needed, TTFT or TTFT:TPOT, like 500:40, not '500:'"),
        ("--gpu-hour", "0", "a number above 0 is needed, not '0'"),
        ("--gpu-hour", "nan", "a number above 0 is needed, not 'nan'"),
        ("--poll", "inf", "a number above 0 is needed, not 'inf'"),
        ("--event-lag", "-1", "a number of at least 0 is needed, not '-1'"),
        ("--reuse", "every:0", "any, ends, boundary or every:N is needed, not 'every:0'"),
        ("--engine", "huge", "invalid choice: 'huge' (choose from"),
    ],
)
def test_other_values_are_checked(option: str, value: str, cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(option, value, capsys).startswith(cure)


def refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a value of an option."""
    with pytest.raises(SystemExit) as caught:
        main(["replay", "load", f"{option}={value}"])
    assert caught.value.code == 2
    return capsys.readouterr().err.partition(f"argument {option}: ")[2].strip()


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Of the last policy."""
    assert main(["replay", *arguments, "--json"]) == 0
    rows: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)["policies"]
    return list(rows.values())[-1]


TIGHT = ("documents", "--limit", "400", "--policy", "cache_aware", "--workers", "3", "--kv-tokens", "150000")
AGENTS = ("agents", "--limit", "300", "--policy", "cache_aware", "--workers", "4")


@pytest.mark.parametrize(
    "options",
    [
        ("--engine", "large"),
        ("--reuse", "every:4096"),
        ("--no-session",),
        ("--gateways", "3"),
        ("--kv-tokens", "150000", "--held"),
    ],
)
def test_each_option_changes_what_is_simulated(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    plain = figures(capsys, *AGENTS, *(options[:2] if "--held" in options else ()))
    assert figures(capsys, *AGENTS, *options) != plain


def test_any_reuse_is_no_restriction(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures(capsys, *AGENTS, "--reuse", "any") == figures(capsys, *AGENTS)


def test_a_large_engine_is_slower_and_costs_eight_times_as_much_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    traffic = ("load", "--limit", "40", "--policy", "round_robin", "--workers", "2", "--gpu-hour", "2")
    medium, large = figures(capsys, *traffic), figures(capsys, *traffic, "--engine", "large")
    assert large["ttft_mean_ms"] > 3 * medium["ttft_mean_ms"]
    assert large["cost_per_request"] > 8 * medium["cost_per_request"]


def test_host_memory_keeps_what_the_device_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    held = figures(capsys, *TIGHT, "--host-tokens", "2000000")["token_hit_rate"]
    assert held > figures(capsys, *TIGHT)["token_hit_rate"]


def test_late_events_and_silent_engines_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    told = figures(capsys, *TIGHT, "--events")
    assert told != figures(capsys, *TIGHT)
    for options in (("--event-lag", "30"), ("--silent", "2")):
        assert figures(capsys, *TIGHT, "--events", *options) != told, options


def test_reports_tell_a_gateway_of_the_others_load_as_often_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    shared = (*TIGHT, "--gateways", "4")
    assert figures(capsys, *shared, "--poll", "600") != figures(capsys, *shared, "--poll", "0.1")


def test_prefill_apart_from_decode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["replay", "chat_5k", "--limit", "300", "--policy", "cache_aware", "--pd", "2:3", "--workers", "5"]
    assert main(command) == 0
    assert "5 simulated workers (2 prefill, 3 decode) of 500,000 KV tokens" in capsys.readouterr().out
    row = figures(capsys, *command[1:])
    assert 0.5 < row["token_hit_rate"] <= row["ceiling"] + 0.01
    assert 0.0 < row["pair_share"] < 1.0, "some turns are worth a transfer, and some are not"
    command[command.index("cache_aware")] = "always_pair"
    always = figures(capsys, *command[1:])
    assert always["pair_share"] == 1.0
    # Of two engines none can have more than twice the mean; with those that generate it could.
    assert always["imbalance"] <= 2.0


def test_goodput_and_costs_are_told_where_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plain = figures(capsys, *AGENTS)
    assert plain["goodput"] is plain["cost_per_session"] is plain["cost_per_request"] is None
    asked = figures(capsys, *AGENTS, "--slo", "500:40", "--gpu-hour", "2.5")
    assert 0 < asked["goodput"] < 1
    assert asked["cost_per_session"] > asked["cost_per_request"] > 0
    assert figures(capsys, *AGENTS, "--slo", "1e9")["goodput"] == 1.0


def test_seeds_are_a_mean_with_its_deviation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    single = [figures(capsys, *AGENTS, "--seed", seed) for seed in ("5", "6", "7")]
    found = figures(capsys, *AGENTS, "--seed", "5", "--seeds", "3")
    assert set(found) == FIGURES | {"spread"}
    rates = [each["token_hit_rate"] for each in single]
    assert found["token_hit_rate"] == pytest.approx(sum(rates) / 3, abs=1e-5)
    assert found["spread"]["token_hit_rate"] == pytest.approx(stdev(rates), abs=1e-5)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["replay", *AGENTS, "--seeds", "2"]) == 0
    said = capsys.readouterr()
    assert "mean ± deviation of 2 seeds" in said.out
    assert "cache_aware (seed 1)" in said.err


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_figure_is_cut_in_a_narrow_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = "sglang_cache_aware,round_robin,cache_aware"
    command = ["replay", "agents", "--limit", "100", "--slo", "500", "--gpu-hour", "2"]
    assert main([*command, "--policy", names]) == 0
    said = capsys.readouterr().out
    assert max(len(line) for line in said.splitlines()) <= width
    assert "…" not in said
    shown: dict[str, list[str]] = {}
    for line in said.splitlines():
        words = line.split()
        if words and words[0] in names.split(","):
            shown.setdefault(words[0], []).extend(words[1:])
    row = figures(capsys, *command[1:], "--policy", "round_robin")
    assert {len(cells) for cells in shown.values()} == {14}
    assert shown["round_robin"][0] == f"{row['token_hit_rate']:.1%}"
    assert shown["round_robin"][-1] == str(row["moved_sessions"])


def test_the_page_is_written_and_only_then_is_anything_there(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["replay", str(trace), "--policy", "best", "--html", str(page)]) == 2
    assert not page.exists()
    assert main(["replay", str(trace), "--policy", "random", "--html", str(page), "--kv-tokens", "600"]) == 2
    assert not page.exists()
    assert main(["replay", str(trace), "--policy", "random", "--html", str(page), "--json"]) == 0
    assert page.read_text().startswith("<!doctype html>")
    said = capsys.readouterr()
    assert json.loads(said.out)["policies"]["random"]["requests"] == 5


def test_a_page_that_cannot_be_written_stops_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "load", "--html", str(tmp_path / "none" / "page.html")]) == 2
    said = capsys.readouterr()
    assert "name a file in a folder that exists" in said.err
    assert "round_robin" not in said.err + said.out


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
