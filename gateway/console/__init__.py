"""Commands that ask a running gateway's control plane: ``explain``, ``workers``, ``sessions``, ``tenants``, ``top``.

Each prints for people, or with ``--json`` what the control plane answered. Whatever goes wrong is one line on standard error,
with the cure. The exit status is 0, or 1 for an answer that says no, or 2 where there is no answer: no gateway, no file,
another token, another version.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway import config as configuration

if TYPE_CHECKING:
    from gateway.console.client import Admin

ADMIN = "http://127.0.0.1:8081"
TOKEN = "WARMROUTE_ADMIN_TOKEN"
Run = Callable[["Admin", argparse.Namespace], None]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add these commands to those there are."""
    _add_explain(commands)
    one = _command(commands, "workers", _workers, "show all workers of a running gateway, or one in full")
    one.add_argument("id", metavar="ID", nargs="?", help="this one")
    one = _command(commands, "sessions", _sessions, "show the sessions of a running gateway, or one in full")
    one.add_argument("id", metavar="ID", nargs="?", help="this one")
    one.add_argument("--tenant", metavar="NAME", help="only those of this tenant")
    one.add_argument(
        "--home", metavar="TARGET", help="only those at home on this target, or on any rank of this worker"
    )
    one.add_argument("--search", metavar="TEXT", help="only those with this in id, tenant, model, home or source")
    one.add_argument(
        "--limit", type=_limit, default=100, metavar="N", help="at most so many, the last used first (default 100)"
    )
    _command(commands, "tenants", _tenants, "show the tenants of a running gateway, with their limits")
    top = _command(commands, "top", _top, "watch the fleet of a running gateway", json=False)
    top.add_argument("--once", action="store_true", help="print one screen and end")


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = _command(
        commands, "explain", _explain, "tell where a request would go, and why; nothing is sent or changed"
    )
    explain.add_argument("-f", "--file", required=True, metavar="FILE", help="the request's body (-: standard input)")
    explain.add_argument(
        "--path",
        default="/v1/chat/completions",
        metavar="PATH",
        help="where it would be sent (default /v1/chat/completions)",
    )
    explain.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="one of its headers, like 'x-session-id: mine'; may be repeated",
    )
    explain.add_argument("--key", metavar="KEY", help="the key of its tenant")
    explain.add_argument(
        "--limit", type=_limit, default=20, metavar="N", help="show so many candidates, the cheapest (default 20)"
    )


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Run, what: str, json: bool = True
) -> argparse.ArgumentParser:
    one = commands.add_parser(name, help=what, description="Exit status: 1 for an answer that says no, 2 for none.")
    one.add_argument("--admin", default=ADMIN, metavar="URL", help=f"its admin port (default {ADMIN})")
    one.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"its admin token (better in {TOKEN}: others on this machine can read arguments)",
    )
    if json:
        one.add_argument("--json", action="store_true", help="print what the control plane answers")
    one.set_defaults(run=lambda options: _run(name, run, options))
    return one


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:5]) <= 1000 or len(text) > 4:
        raise argparse.ArgumentTypeError(f"a whole number from 1 to 1000 is needed, not {text!r}")
    return int(text)


def _run(name: str, run: Run, options: argparse.Namespace) -> int:
    from gateway.console.client import Admin, Refused, Unanswered
    from gateway.console.looks import sentence

    try:
        token = options.token or configuration.maybe_variable(TOKEN)
        run(Admin(options.admin, token), options)
        sys.stdout.flush()
    except (Refused, Unanswered) as error:
        print(f"warmroute {name}: {sentence(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, Refused) else 2
    except BrokenPipeError:
        # Whoever reads has enough; the interpreter is not to write what is left either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _explain(admin: Admin, options: argparse.Namespace) -> None:
    from gateway.console.explain import run

    run(admin, options.file, options.path, options.header, options.key, as_json=options.json, limit=options.limit)


def _workers(admin: Admin, options: argparse.Namespace) -> None:
    from gateway.console.lists import workers

    workers(admin, options.id, options.json)


def _sessions(admin: Admin, options: argparse.Namespace) -> None:
    from gateway.console.lists import Wanted, sessions

    wanted = Wanted(options.tenant, options.home, options.search, options.limit)
    sessions(admin, options.id, wanted, options.json)


def _tenants(admin: Admin, options: argparse.Namespace) -> None:
    from gateway.console.lists import tenants

    tenants(admin, options.json)


def _top(admin: Admin, options: argparse.Namespace) -> None:
    from gateway.console.top import run

    run(admin, options.once)
