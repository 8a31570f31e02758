"""What is wrong with tenants, and with what tells who they are, although every value is of its type."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.canonical import STEPS
from gateway.credentials import SALTS, BadKey, Keyring, parse, read_keys

if TYPE_CHECKING:
    from gateway.config import JWT, Config, TenantConfig

ANONYMOUS = "anonymous"
"""Name of whoever comes without a credential, where that is allowed."""
ASYMMETRIC = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Algorithms by which tokens may be signed: those of public keys."""


def is_loopback(host: str) -> bool:
    """Whether it is this machine, and no other."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        if tenant.name == ANONYMOUS:
            wrong(f"{key}.name", f"{ANONYMOUS!r} is who comes without a key: take another name")
        by_token = config.auth.jwt is not None and tenant.claims != []
        if not (tenant.keys or tenant.key_files or tenant.subjects or by_token):
            wrong(f"{key}.keys", f"tenant {tenant.name!r} has no key: nobody could ever be it")
        if tenant.isolation not in ("shared", "isolated"):
            wrong(f"{key}.isolation", f"{tenant.isolation!r} is neither shared nor isolated")
        for step in tenant.canonical:
            if step not in STEPS:
                wrong(f"{key}.canonical", f"{step!r} is not one of {', '.join(STEPS)}")
        _check_aliases(key, tenant, config, wrong)
    _check_keys(config, wrong)
    _check_claims(config, wrong)
    _check_subjects(config, wrong)
    if config.auth.jwt is not None:
        _check_jwt(config.auth.jwt, wrong)
        if not config.tenants:
            wrong("auth.jwt", "there is no tenant that a token could name: list some under tenants")


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


def _check_claims(config: Config, wrong: Any) -> None:
    seen: set[str] = set()
    for number, tenant in enumerate(config.tenants):
        at = f"tenants[{number}].claims"
        if tenant.claims is not None and config.auth.jwt is None:
            wrong(at, "there are no tokens that could say so: configure auth.jwt, or take this out")
        if config.auth.jwt is None:
            continue
        for value in [tenant.name] if tenant.claims is None else tenant.claims:
            if value in seen:
                wrong(at, f"{value!r} names another tenant already")
            seen.add(value)


def _check_subjects(config: Config, wrong: Any) -> None:
    tls = config.listen.tls
    if tls is not None and tls.client_required and tls.client_ca is None:
        wrong("listen.tls.client_required", "needs client_ca: the authorities whose certificates are taken")
    if tls is not None and tls.client_ca is not None and not Path(tls.client_ca).is_file():
        wrong("listen.tls.client_ca", f"there is no file {tls.client_ca!r}")
    seen: set[str] = set()
    for number, tenant in enumerate(config.tenants):
        at = f"tenants[{number}].subjects"
        if tenant.subjects and (tls is None or tls.client_ca is None):
            wrong(at, "no certificate is ever asked for: give listen.tls.client_ca, or take this out")
        for subject in tenant.subjects:
            if subject in seen:
                wrong(at, f"{subject!r} names another tenant already")
            seen.add(subject)


def _check_jwt(told: JWT, wrong: Any) -> None:
    for name in ("jwt", "cryptography"):
        if find_spec(name) is None:
            wrong("auth.jwt", "needs PyJWT with cryptography: pip install 'warmroute[jwt]'")
            break
    for name in ("issuer", "claim"):
        if not getattr(told, name):
            wrong(f"auth.jwt.{name}", "is empty")
    if not told.audience:
        wrong("auth.jwt.audience", "is empty: a token for anybody is a token for nobody")
    if not told.algorithms:
        wrong("auth.jwt.algorithms", f"is empty: name some of {', '.join(ASYMMETRIC)}")
    for name in told.algorithms:
        if name not in ASYMMETRIC:
            why = "whoever can check such a token can make one" if name.startswith("HS") else "it is not taken"
            wrong("auth.jwt.algorithms", f"{name!r}: {why}; there are {', '.join(ASYMMETRIC)}")
    if not 0 <= told.leeway <= 300:
        wrong("auth.jwt.leeway", "must be from 0 to 5m")
    if told.refresh < 10:
        wrong("auth.jwt.refresh", "must be at least 10s")
    _check_place(told.jwks, wrong)


def _check_place(place: str, wrong: Any) -> None:
    """Where keys come from decides who is believed: over a network only TLS can tell."""
    url = urlsplit(place)
    if url.scheme not in ("http", "https"):
        if not Path(place).is_file():
            wrong("auth.jwt.jwks", f"there is no file {place!r}, and it is no https:// URL")
        return
    if url.username is not None or url.password is not None or not url.hostname:
        wrong("auth.jwt.jwks", "must be a URL like https://issuer/keys, without a user or a password")
    elif url.scheme == "http" and not is_loopback(url.hostname):
        wrong("auth.jwt.jwks", "must be https:// beyond this machine: else anybody on the way could issue tokens")
