"""What is wrong with tenants, and with what tells who they are, although every value is of its type."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.canonical import STEPS
from gateway.credentials import SALTS, BadKey, Keyring, parse, read_keys

if TYPE_CHECKING:
    from gateway.config import Config, TenantConfig


def check_secret(key: str, secret: str | None, wrong: Any) -> None:
    """Secrets out of files like to end with a line break, and variables to be set to nothing."""
    if secret is None:
        return
    if not secret:
        wrong(key, "is empty: leave the key out, or give it a value")
    elif not secret.isprintable() or secret != secret.strip():
        wrong(key, "holds a line break, a control character, or blanks at its ends: take them out")


def check_tenants(config: Config, wrong: Any) -> None:
    """Names, keys, models, and what there is of each."""
    if config.auth.failures_per_minute < 0:
        wrong("auth.failures_per_minute", "must be at least 1, or 0 for no limit")
    names: set[str] = set()
    for number, tenant in enumerate(config.tenants):
        key = f"tenants[{number}]"
        if tenant.name in names:
            wrong(f"{key}.name", f"two tenants are called {tenant.name!r}")
        names.add(tenant.name)
        if not tenant.name:
            wrong(f"{key}.name", "a tenant needs a name")
        if not (tenant.keys or tenant.key_files):
            wrong(f"{key}.keys", f"tenant {tenant.name!r} has no key: nobody could ever be it")
        if tenant.isolation not in ("shared", "isolated"):
            wrong(f"{key}.isolation", f"{tenant.isolation!r} is neither shared nor isolated")
        for step in tenant.canonical:
            if step not in STEPS:
                wrong(f"{key}.canonical", f"{step!r} is not one of {', '.join(STEPS)}")
        _check_aliases(key, tenant, config, wrong)
    _check_keys(config, wrong)


def _check_aliases(key: str, tenant: TenantConfig, config: Config, wrong: Any) -> None:
    for alias, model in tenant.aliases.items():
        if alias in config.models:
            wrong(f"{key}.aliases.{alias}", f"{alias!r} is a model's own name: take another")
        elif model in tenant.aliases:
            wrong(f"{key}.aliases.{alias}", f"{model!r} is an alias itself: name its model")


def _check_keys(config: Config, wrong: Any) -> None:
    """Each of one form, and nobody else's too."""
    seen: dict[str, str] = {}
    for number, tenant in enumerate(config.tenants):
        at = f"tenants[{number}]"
        given = []
        for secret in tenant.keys:
            check_secret(f"{at}.keys", secret, wrong)
            try:
                parse(secret)
                given.append((f"{at}.keys", secret))
            except BadKey as error:
                wrong(f"{at}.keys", str(error))
        for path in tenant.key_files:
            try:
                given += [(f"{at}.key_files", secret) for secret in read_keys(path)]
            except BadKey as error:
                wrong(f"{at}.key_files", str(error))
        for where, secret in given:
            if secret in seen:
                wrong(where, "this key is used twice")
            seen[str(secret)] = where
    _check_hashes(seen, wrong)


def _check_hashes(given: dict[str, str], wrong: Any) -> None:
    """Stored hashes beside keys in clear: the same key may hide in both."""
    hashes = {text: where for text, where in given.items() if _parses(text)}
    ring = Keyring(hashes.items())
    if ring.salts > SALTS:
        wrong("tenants", f"there are {ring.salts} salts, more than {SALTS}: hash keys with --salt, to share one")
        return
    for text, where in given.items():
        if text not in hashes and ring.find(text.encode()) is not None:
            wrong(where, "this key is used twice: its hash is here too")


def _parses(text: str) -> bool:
    try:
        return parse(text) is not None
    except BadKey:
        return False
