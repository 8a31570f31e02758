"""``python -m load_tests.bench``: everything, into bench.json and two tables."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from load_tests.bench.contenders import POLICIES, ours, peers
from load_tests.bench.data_plane import BenchError, DataPlane
from load_tests.bench.processes import cores, start
from load_tests.bench.report import document, show

MANY_TARGETS = 64
TOKENIZER = Path(".venv/qwen3.5/tokenizer.json")
"""Where ``make`` puts a real one of 150,000 words and more, if it can be had."""


def _alone(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """One of the micro-benchmarks, in a process of its own on the gateway's core. Raises `BenchError`."""
    log = folder / f"{name}.json"
    started = start([sys.executable, "-m", f"load_tests.bench.{name}", *arguments], cores()[0], log)
    try:
        status = started.process.wait(240)
    except subprocess.TimeoutExpired:
        raise BenchError(f"the benchmark of {name} did not end") from None
    finally:
        started.stop()
    if status != 0:
        raise BenchError(f"the benchmark of {name} failed: {log.read_text()[-500:]}")
    found: dict[str, Any] = json.loads(log.read_text())
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.bench",
        description="CPU of the gateway beside its peers, and of the prefix index. Peers: nginx on the PATH, and virtual "
        "environments below the folder that WARMROUTE_PEERS names.",
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="interleaved rounds; medians count")
    parser.add_argument("--memory", action="store_true", help="also the growth over 20,000 distinct prompts of 20 KB")
    parser.add_argument("--no-peers", action="store_true", help="measure Warmroute alone")
    parser.add_argument("--output", default="bench.json", metavar="FILE", help="default bench.json")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything of our own was measured."""
    options = _parser().parse_args(arguments)
    # So that what was started is ended when this process is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(width=None if sys.stdout.isatty() else 120)
    contenders = [ours(policy, targets) for policy in POLICIES for targets in (2, MANY_TARGETS)]
    contenders.append(ours("cache_aware", observed=True))
    if not options.no_peers:
        contenders += peers()
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as name:
        folder = Path(name)
        try:
            index = _alone(folder, "index") | {"events": _alone(folder, "events")}
            if TOKENIZER.is_file():
                index["tokens"] = _alone(folder, "tokens", str(TOKENIZER))
            with DataPlane(folder, MANY_TARGETS) as plane:
                figures = plane.rounds(
                    contenders, max(1, options.rounds), lambda line: console.print(line, highlight=False)
                )
                memory = plane.memory(ours("cache_aware")) if options.memory else {}
        except BenchError as error:
            print(error, file=sys.stderr)
            return 1
    made = document(figures, index, memory)
    Path(options.output).write_text(json.dumps(made, indent=2) + "\n")
    show(console, made)
    console.print(f"written to {options.output}")
    return 0 if set(POLICIES) <= made["proxy"].keys() else 1


if __name__ == "__main__":
    sys.exit(main())
