"""TLS towards clients."""

from __future__ import annotations

import ssl
from hashlib import blake2b
from pathlib import Path

from gateway.config import TLS
from gateway.config_reader import ConfigError, Problem

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:!aNULL:!eNULL"
"""Of TLS 1.2: forward secrecy and authenticated encryption only, as all of TLS 1.3 has."""


def context(told: TLS) -> ssl.SSLContext:
    """What the listener speaks. Raises `ConfigError` for files that cannot be used."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers(CIPHERS)
    _load(made, told)
    if told.client_ca is not None:
        try:
            made.load_verify_locations(told.client_ca)
        except (OSError, ssl.SSLError):
            problem = Problem(None, "listen.tls.client_ca", f"{told.client_ca} has no certificates that can be used")
            raise ConfigError([problem]) from None
        made.verify_mode = ssl.CERT_REQUIRED if told.client_required else ssl.CERT_OPTIONAL
    return made


def renew(made: ssl.SSLContext, told: TLS) -> None:
    """Take what the files hold now, for handshakes from here on. Raises `ConfigError`, and then nothing changed."""
    # Of a certificate without its key a context would keep the half that fits.
    context(told)
    _load(made, told)


def digest(files: list[str]) -> bytes | None:
    """Of what files hold; ``None`` where there are none, or one cannot be read."""
    try:
        return blake2b(b"".join([Path(path).read_bytes() for path in files])).digest() if files else None
    except OSError:
        return None


def _load(made: ssl.SSLContext, told: TLS) -> None:
    try:
        made.load_cert_chain(told.cert, told.key, password="")
    except (OSError, ssl.SSLError) as error:
        what = error.strerror or error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError([Problem(None, "listen.tls", f"{told.cert} and {told.key} cannot be used: {what}")]) from None
