"""``python -m load_tests.soak``: see the package's head."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence

import uvloop

from load_tests.places import PlaceError
from load_tests.soak.plan import Plan
from load_tests.soak.soaking import Soaked, soak


def show(soaked: Soaked) -> None:
    """For people."""
    told = soaked.told()
    for name, value in told.items():
        if name == "problems":
            continue
        if isinstance(value, dict):
            print(f"{name.replace('_', ' ')}: {'none' if not value else ''}")
            for key, count in value.items():
                print(f"    {count:>8g}  {key}")
        else:
            print(f"{name.replace('_', ' ')}: {value}")
    for problem in soaked.problems:
        print(f"PROBLEM: {problem}")
    print("not as it should be" if soaked.problems else "good")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all was as it should be, 1 if not, 2 if it could not be run, 130 if it was broken off."""
    parser = argparse.ArgumentParser(prog="python -m load_tests.soak", description="A long run with faults.")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M")
    parser.add_argument("--engines", type=int, default=6, metavar="N", help="3 or more")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(arguments)
    if options.engines < 3:
        parser.error("--engines must be at least 3: one is listed, one joins, one may be harmed")
    if not 0 < options.minutes <= 24 * 60:
        parser.error("--minutes must be more than 0, at most a day")
    # As Ctrl-C does: what was started is ended in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = Plan(options.minutes * 60, engines=options.engines, seed=options.seed)
    try:
        soaked = uvloop.run(soak(plan))
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    if options.json:
        print(json.dumps(soaked.told(), indent=2))
    else:
        show(soaked)
    return 1 if soaked.problems else 0


if __name__ == "__main__":
    sys.exit(main())
