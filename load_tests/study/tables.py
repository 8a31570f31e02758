"""``python -m load_tests.study.tables study.json``: the report of a study's runs, as Markdown."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from load_tests.study.ablation import WITHOUT
from load_tests.study.runs import CASES, CONDITIONS, CURVES, MODES, POLICIES, THRIFT, grouped

Rows = Mapping[str, Mapping[str, Any]]
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _figure(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    def shown(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        return "" if value is None else form.format(value)

    return shown


def _ttft(row: Mapping[str, Any]) -> str:
    """The mean over seeds, and how far seeds lie apart."""
    spread = (row.get("spread") or {}).get("ttft_mean_ms")
    mean = f"{row['ttft_mean_ms']:,.0f}" if row["ttft_mean_ms"] >= 1000 else f"{row['ttft_mean_ms']:.1f}"
    return mean if spread is None else f"{mean} ± {spread / row['ttft_mean_ms']:.0%}"


COLUMNS: tuple[Column, ...] = (
    ("hits", _figure("token_hit_rate", "{:.1%}")),
    ("TTFT mean, ms", _ttft),
    ("p50", _figure("ttft_p50_ms", "{:,.0f}")),
    ("p99", _figure("ttft_p99_ms", "{:,.0f}")),
    ("TPOT p50", _figure("tpot_p50_ms", "{:.1f}")),
    ("session p50, s", _figure("session_p50_s", "{:,.1f}")),
    ("imbalance", _figure("imbalance", "{:.2f}")),
    ("moved", _figure("moved_sessions", "{:,.0f}")),
    ("cost a session", _figure("cost_per_session", "{:.4f}")),
)


def table(rows: Rows, order: Sequence[str], columns: Sequence[Column] = COLUMNS, first: str = "policy") -> list[str]:
    """Lines of one table."""
    lines = [f"| {first} | " + " | ".join(title for title, _ in columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name in order:
        if name in rows:
            shown = f"**{name}**" if name in ("cache_aware", "all of it") else name
            lines.append(f"| {shown} | " + " | ".join(cell(rows[name]) for _, cell in columns) + " |")
    return lines


def policies(runs: list[dict[str, Any]]) -> list[str]:
    """One table a workload."""
    found = grouped(runs, "policies")
    lines: list[str] = []
    for case, of in CASES.items():
        if case in found:
            ceiling = next(iter(found[case].values()))["ceiling"]
            size = f"{of.workers} engines of {of.kv_tokens:,} KV tokens"
            lines += [f"### {case}", "", f"`{of.trace}`, {size}; ceiling {ceiling:.1%}.", ""]
            lines += [*table(found[case], POLICIES), ""]
    return lines


def ablation(runs: list[dict[str, Any]]) -> list[str]:
    """TTFT without each ingredient, in percent of that with all."""
    found = grouped(runs, "ablation")
    cases = [case for case in CASES if case in found]
    lines = ["| without | " + " | ".join(cases) + " |", "| --- |" + " ---: |" * len(cases)]
    whole = {case: found[case]["all of it"] for case in cases}
    cells = [f"{whole[case]['ttft_mean_ms']:,.1f} ms, {whole[case]['token_hit_rate']:.1%}" for case in cases]
    lines.append("| **all of it** | " + " | ".join(cells) + " |")
    for name in list(WITHOUT)[1:]:
        cells = []
        for case in cases:
            row = found[case][name]
            slower = row["ttft_mean_ms"] / whole[case]["ttft_mean_ms"] - 1
            points = 100 * (row["token_hit_rate"] - whole[case]["token_hit_rate"])
            cells.append(f"{slower:+.0%}, {points:+.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def thrift(runs: list[dict[str, Any]]) -> list[str]:
    """Hit rate against TTFT, beside the best of the others."""
    found = grouped(runs, "thrift")
    lines: list[str] = []
    for case in CURVES:
        if case in found:
            lines += [f"### {case}", ""]
            order = [f"{value:g}" for value in THRIFT]
            lines += [*table(found[case], order, COLUMNS[:4] + COLUMNS[6:8], "thrift"), ""]
    return lines


def conditions(runs: list[dict[str, Any]]) -> list[str]:
    """What is left of the lead over the least wait."""
    lines: list[str] = []
    for case, rows in grouped(runs, "conditions").items():
        lines += [f"### {case}", ""]
        lines += ["| conditions | hits | TTFT mean, ms | of least wait | imbalance | computed by the first engine |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        for label in CONDITIONS:
            ours, base = rows[f"{label}|cache_aware"], rows[f"{label}|least_wait"]
            share = ours["first_share"]
            lines.append(
                f"| {label} | {ours['token_hit_rate']:.1%} | {_ttft(ours)} | "
                f"{ours['ttft_mean_ms'] / base['ttft_mean_ms']:.0%} | {ours['imbalance']:.2f} | "
                f"{'' if share is None else f'{share:.2f}'} |"
            )
        lines.append("")
    return lines


def modes(runs: list[dict[str, Any]]) -> list[str]:
    """How a rollout's client talks."""
    found = grouped(runs, "modes").get("rollouts", {})
    return [*table(found, list(MODES), first="rollouts"), ""]


PARTS = {"policies": policies, "ablation": ablation, "thrift": thrift, "conditions": conditions, "modes": modes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the parts named, or all. Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or not Path(given[0]).exists():
        print(
            "usage: python -m load_tests.study.tables STUDY.json [PART ...]; make one with python -m load_tests.study",
            file=sys.stderr,
        )
        return 2
    runs = json.loads(Path(given[0]).read_text())
    for part in given[1:] or PARTS:
        print("\n".join(PARTS[part](runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
