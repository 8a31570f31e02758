"""What differs between two configurations, and what of that a running gateway cannot take.

A configuration is compared as a tree of plain data. Lists of things that have a name (tenants, workers) are compared by that
name, so that one that was taken out does not make all behind it look changed. Of a secret the tree has a fingerprint only,
salted by whoever made the tree. Where a fingerprint leaves the process it is of 16 bits: they tell a change, but are too few to
tell the secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from gateway.config_reader import Secret

Path = tuple[str, ...]

NAMED = {"tenants": "name", "workers": "url"}
"""Lists whose members have a name -> the key that holds it."""

LIVE: frozenset[Path] = frozenset(
    tuple(key.split("."))
    for key in (
        "admin.token admission anonymous auth disaggregation.keep disaggregation.lease disaggregation.protocol discovery "
        "doctor.examples doctor.memory doctor.rate doctor.share drain drain_limit index.max_bytes listen.body_timeout "
        "listen.comment_after listen.head_timeout listen.idle listen.max_body listen.max_connections models passthrough "
        "policies policy pressure probes retries sessions.cookie sessions.fields sessions.headers sessions.idle "
        "sessions.labels sessions.max sessions.token "
        "tenants timeouts warming workers"
    ).split()
)
"""Keys that a running gateway takes, with all that is below them."""
FIXED: frozenset[Path] = frozenset(
    {("admission", "priorities"), ("auth", "jwt"), ("models", "*", "tokenizer"), ("models", "*", "template")}
)
"""... but for these."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hidden:
    """A secret in a tree."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs; ``before`` or ``after`` is ``None`` where there is none."""

    path: Path
    before: Any
    after: Any

    @property
    def key(self) -> str:
        """As people write it."""
        return key_of(self.path)

    @property
    def restart(self) -> bool:
        """Whether it takes a restart to be followed."""
        return not live(self.path)

    def told(self) -> dict[str, Any]:
        """For JSON: secrets are said to be changed, no more."""
        return {
            "key": self.key,
            "before": hidden(self.before),
            "after": hidden(self.after),
            "needs_restart": self.restart,
        }


def live(path: Path) -> bool:
    """Whether a running gateway takes a change there."""
    if any(_fits(each, path) for each in FIXED):
        return False
    return any(path[: len(each)] == each for each in LIVE)


def _fits(pattern: Path, path: Path) -> bool:
    return len(path) >= len(pattern) and all(part in ("*", at) for part, at in zip(pattern, path, strict=False))


def key_of(path: Path) -> str:
    """``tenants[research].keys``."""
    text = path[0] if path else ""
    for part in path[1:]:
        text += f"[{part}]" if text in NAMED else f".{part}"
    return text


def tree(value: Any, salt: bytes, size: int = 16) -> Any:
    """A configuration as plain data, secrets as `Hidden`, by fingerprints of ``size`` bytes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: tree(getattr(value, each.name), salt, size) for each in fields(value)}
    if isinstance(value, Secret):
        return Hidden(blake2b(value.encode(), key=salt, digest_size=size).hexdigest())
    if isinstance(value, dict):
        return {key: tree(item, salt, size) for key, item in value.items()}
    if isinstance(value, list):
        return [tree(item, salt, size) for item in value]
    return value


def hidden(value: Any) -> Any:
    """A tree for people."""
    if isinstance(value, Hidden):
        return "***"
    if isinstance(value, dict):
        return {key: hidden(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hidden(item) for item in value]
    return value


def fingerprints(value: Any, path: str = "") -> dict[str, str]:
    """Where a tree has secrets -> their fingerprints."""
    found: dict[str, str] = {}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        at = f"{path}/{key}"
        if isinstance(item, Hidden):
            found[at] = item.fingerprint
        else:
            found |= fingerprints(item, at)
    return found


def with_fingerprints(value: Any, told: dict[str, str], path: str = "") -> Any:
    """The tree whose secrets were shown as ``***``."""
    if path in told:
        return Hidden(told[path])
    if isinstance(value, dict):
        return {key: with_fingerprints(item, told, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [with_fingerprints(item, told, f"{path}/{at}") for at, item in enumerate(value)]
    return value


def compare(before: Any, after: Any, path: Path = ()) -> Iterator[Change]:
    """What differs between two trees."""
    if path and len(path) == 1 and path[0] in NAMED:
        before, after = _by_name(before, NAMED[path[0]]), _by_name(after, NAMED[path[0]])
    if not (isinstance(before, dict) and isinstance(after, dict)):
        if before != after:
            yield Change(path, before, after)
        return
    for key in {**before, **after}:
        yield from compare(before.get(key), after.get(key), (*path, str(key)))


def _by_name(members: Any, key: str) -> dict[str, Any]:
    return {str(member.get(key)): member for member in members or ()}


def effective(before: T, after: T, path: Path = ()) -> T:
    """``after`` as far as a gateway that runs ``before`` can follow."""
    if is_dataclass(before) and not isinstance(before, type) and type(before) is type(after):
        parts = {each.name: getattr(before, each.name) for each in fields(before)}
        new = {name: effective(old, getattr(after, name), (*path, name)) for name, old in parts.items()}
        return replace(before, **new)
    if not live(path):
        return before
    if isinstance(after, dict) and path == ("models",):
        assert isinstance(before, dict)
        known = {name: before.get(name) or type(model)() for name, model in after.items()}
        return {name: effective(known[name], model, (*path, name)) for name, model in after.items()}  # type: ignore[return-value]
    return after
