"""bench.json, and the table that holds the budgets beside what was reached."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_tests.bench.contenders import OBSERVED, OURS
from load_tests.bench.data_plane import SCENARIOS, STREAM, Key
from load_tests.bench.processes import cores

SIZES = [name for name in SCENARIOS if name != STREAM]
FLAGSHIP = "cache_aware"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    name = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cpu": name or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gateway_alone_on_its_core": len(set(cores())) == 2,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def document(figures: Mapping[Key, float], index: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """The whole of bench.json. Proxy figures are CPU microseconds a request."""
    made: dict[str, Any] = {"proxy": {}, "stream": {}, "index": dict(index), "machine": machine(), "many_targets": {}}
    for (name, policy, targets, scenario), value in figures.items():
        if targets > 2:
            few = figures.get((name, policy, 2, scenario))
            row = {
                "targets": targets,
                "cpu_us_per_request": value,
                "at_2": few,
                "ratio": round(value / few, 3) if few else None,
            }
            made["many_targets"].setdefault(policy, {})[scenario] = row
            continue
        place = made if name == OURS else made.setdefault(name, {"proxy": {}, "stream": {}})
        if scenario != STREAM:
            place["proxy"].setdefault(policy, {})[scenario] = value
        else:
            place["stream"].setdefault("policies", {})[policy] = value
            if "cpu_us_per_event" not in place["stream"] or policy == FLAGSHIP:
                place["stream"]["cpu_us_per_event"] = value
    if memory:
        made["memory"] = dict(memory)
    return made


@dataclass(frozen=True, slots=True)
class Budget:
    """One line of the closing table."""

    what: str
    bound: float | None
    """``None``: it is relative to a peer that was not measured."""
    reached: float | None
    unit: str
    beside: str = ""
    """What the bound comes from."""

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.reached is None or self.bound is None:
            return "not measured"
        return "met" if self.reached <= self.bound else "missed"


def budgets(made: Mapping[str, Any]) -> list[Budget]:
    """Every budget with what was reached."""
    ours = made["proxy"].get(FLAGSHIP, {})
    peer = made.get("sglang-router", {}).get("proxy", {})
    nginx = made.get("nginx", {}).get("stream", {}).get("cpu_us_per_event")
    lines = []
    for size in SIZES:
        plain, aware = peer.get("round_robin", {}).get(size), peer.get(FLAGSHIP, {}).get(size)
        lines.append(Budget(f"request, {size}", plain, ours.get(size), "us CPU", "sglang-router round_robin"))
        if size != "1k":
            bound = None if aware is None else round(0.6 * aware, 1)
            lines.append(Budget(f"request, {size}", bound, ours.get(size), "us CPU", "0.6 x sglang-router cache_aware"))
    bound = None if nginx is None else round(1.3 * nginx, 1)
    lines.append(Budget("streamed event", bound, made["stream"].get("cpu_us_per_event"), "us CPU", "1.3 x nginx"))
    for scenario, row in made["many_targets"].get(FLAGSHIP, {}).items():
        lines.append(Budget(f"request, {scenario}, {row['targets']} targets : 2", 1.3, row["ratio"], "x"))
    watched = made.get(OBSERVED, {}).get("proxy", {}).get(FLAGSHIP, {})
    for size in SIZES:
        bound = None if size not in ours else round(1.1 * ours[size], 1)
        lines.append(Budget(f"request, {size}, logged and traced", bound, watched.get(size), "us CPU", "1.1 x without"))
    targets, size_of = made["index"].get("targets", {}), made["index"].get("bytes_per_token", {})
    few, many = targets.get("64", {}), targets.get("1024", {})
    lines += [
        Budget("match + insert, 100 KB, 64 targets", 60, few.get("match_insert_us"), "us"),
        Budget("match + insert, 100 KB, 1,024 targets", 120, many.get("match_insert_us"), "us"),
        Budget("decision + index, 64 targets", 100, few.get("decision_and_index_us"), "us"),
        Budget("index, one holder", 1.5, size_of.get("1"), "bytes/token"),
        Budget("index, 64 holders", 2.5, size_of.get("64"), "bytes/token"),
        Budget("memory after 20,000 x 20 KB", 60, made.get("memory", {}).get("growth_mb"), "MB", "with --memory"),
    ]
    return lines + _event_budgets(made["index"])


def _event_budgets(index: Mapping[str, Any]) -> list[Budget]:
    """Those of KV events and of token ids."""
    ours, peer = index.get("events", {}).get("warmroute", {}), index.get("events", {}).get("dynamo", {})
    whole, apply = peer.get("pipeline_us_per_block"), peer.get("apply_us_per_block")
    beside = "Dynamo's RadixTree from Python"
    lines = [
        Budget("KV events, apply ready hashes", apply, ours.get("apply_us_per_block"), "us a block", beside),
        Budget(
            "KV events, decode + hash + apply",
            None if whole is None else round(whole / 0.3, 2),
            ours.get("pipeline_us_per_block"),
            "us a block",
            f"{beside} / 0.3",
        ),
    ]
    for targets in ("1", "64"):
        size = peer.get("bytes_per_block", {}).get(targets)
        bound = None if size is None else round(2 * size, 1)
        reached = ours.get("bytes_per_block", {}).get(targets)
        lines.append(Budget(f"block, held by {targets}", bound, reached, "bytes", f"2 x {beside}"))
    for shape, row in ours.get("match", {}).items():
        for kind in ("hit_us", "miss_us"):
            bound = peer.get("match", {}).get(shape, {}).get(kind)
            what = f"match, {shape.replace('x', ' targets, ')} blocks, {kind[:-3]}"
            lines.append(Budget(what, bound, row[kind], "us", beside))
    lines.append(
        Budget("tokenise a turn of 2 KB behind 100 KB", 1500, index.get("tokens", {}).get("next_turn_us"), "us CPU")
    )
    return lines


def show(console: Console, made: Mapping[str, Any]) -> None:
    """Both tables."""
    table = Table(title="CPU of the gateway process, microseconds a request (streams: an event)")
    for column in ("gateway", "policy", *SIZES, "event"):
        table.add_column(column, justify="left" if column in ("gateway", "policy") else "right")
    places = {
        OURS: made,
        **{name: place for name, place in made.items() if isinstance(place, dict) and "proxy" in place},
    }
    for name, place in places.items():
        for policy, row in sorted(place["proxy"].items()):
            event = place["stream"].get("policies", {}).get(policy)
            table.add_row(name, policy, *(_number(row.get(size)) for size in SIZES), _number(event))
    console.print(table)
    table = Table(title="Budgets")
    for column in ("what", "budget", "reached", "unit", "beside", "verdict"):
        table.add_column(column, justify="right" if column in ("budget", "reached") else "left")
    colours = {"met": "green", "missed": "red", "not measured": "dim"}
    for line in budgets(made):
        colour = colours[line.verdict]
        verdict = f"[{colour}]{line.verdict}[/{colour}]"
        table.add_row(line.what, _number(line.bound), _number(line.reached), line.unit, line.beside, verdict)
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"
