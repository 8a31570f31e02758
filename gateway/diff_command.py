"""``warmroute diff``: what another configuration would change, and what of that takes a restart. Secrets are never shown."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import httpx

from gateway import config as configuration
from gateway.config_diff import Change, Hidden, compare, tree, with_fingerprints

SECONDS = 10.0
SALT = b"compared here"


class Unreachable(Exception):
    """The gateway that runs could not be asked."""


def run(before: str | None, after: str, admin: str | None, token: str | None, as_json: bool) -> int:
    """Compare the file ``after`` with the file ``before``, or with what the gateway at ``admin`` has in force.

    The exit status: 0 for no change, 1 for some, 2 if they could not be compared. Raises `ConfigError`.
    """
    wanted = configuration.read(after)
    if before is not None:
        changes = list(compare(tree(configuration.read(before), SALT), tree(wanted, SALT)))
    else:
        assert admin is not None
        try:
            salt, running = _running(admin.rstrip("/"), token)
        except Unreachable as error:
            print(f"warmroute diff: {error}", file=sys.stderr)
            return 2
        changes = list(compare(running, tree(wanted, salt, 2)))
    if as_json:
        print(json.dumps({"changes": [change.told() for change in changes]}))
    else:
        _show(changes)
    return 1 if changes else 0


def _running(admin: str, token: str | None) -> tuple[bytes, Any]:
    """The salt of its fingerprints, and what a gateway has in force."""
    # Its lines of requests are of no use beside the differences.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(headers=headers, timeout=SECONDS, trust_env=False) as http:
            answers = [http.get(f"{admin}{path}") for path in ("/config", "/config/fingerprints")]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{admin} does not answer: {type(error).__name__}") from None
    for answer in answers:
        if answer.status_code in (401, 403):
            raise Unreachable(f"{admin} refuses: name the variable that has its token with --token-env NAME")
        if answer.status_code != 200:
            raise Unreachable(f"{admin} answers {answer.status_code}: is it the gateway's admin port?")
    try:
        config, told = (answer.json() for answer in answers)
        return bytes.fromhex(told["salt"]), with_fingerprints(config, dict(told["fingerprints"]))
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{admin} answers something else: is it the gateway's admin port?") from None


def _show(changes: list[Change]) -> None:
    for change in changes:
        print(f"{change.key}: {_what(change)}{'  (needs a restart)' if change.restart else ''}")
    restarts = sum(change.restart for change in changes)
    if not changes:
        print("no change")
    elif restarts:
        print(f"{len(changes)} changes, of which {restarts} need a restart")


def _what(change: Change) -> str:
    if _secret(change.before) or _secret(change.after):
        one, other = change.before, change.after
        return "added" if one is None else "taken out" if other is None else "changed"
    if isinstance(change.before or change.after, dict):
        return "added" if change.before is None else "taken out" if change.after is None else "changed"
    return f"{_short(change.before)} -> {_short(change.after)}"


def _secret(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_secret, value.values()))
    if isinstance(value, list):
        return any(map(_secret, value))
    return isinstance(value, Hidden)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
