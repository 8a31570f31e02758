"""Asking the control plane of a gateway, with a sentence for whatever comes of it."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import TypeVar

import httpx
import msgspec

SECONDS = 10.0
"""Until it answers, and between two parts of an answer."""
WHOLE = 60.0
"""Seconds for an answer in all."""
LARGEST = 256 * 1024 * 1024
"""Bytes of an answer."""
UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

Answer = TypeVar("Answer")


class Unanswered(Exception):
    """There is no answer of a gateway's; says why, and the cure."""


class Denied(Unanswered):
    """The admin token is missing, or not that of the gateway."""


class Refused(Exception):
    """The gateway says no; says why."""


class _Told(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    error: _Told


class Admin:
    """One gateway's control plane at ``url``; ``token`` is its admin token, if it wants one. Raises `Unanswered`."""

    def __init__(self, url: str, token: str | None) -> None:
        # Its lines of requests are of no use beside what is asked for.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self.url = _checked(url)
        self._token = None if token is None else header("the admin token", token)

    @property
    def options(self) -> dict[str, object]:
        """Of an httpx client. Certificates are those that the system trusts; no proxy stands before a control plane."""
        headers = {} if self._token is None else {b"authorization": b"Bearer " + self._token}
        return {
            "headers": headers,
            "timeout": SECONDS,
            "trust_env": False,
            "verify": ssl.create_default_context(),
        }

    def get(self, path: str, named: bool = False) -> bytes:
        """The body of an answer; ``named``: it is of something that may not exist. Raises `Unanswered`, `Refused`."""
        status, body = self._ask("GET", path)
        if status == 404 and not named:
            raise Unanswered(f"{self.url} has no {path}: it is no gateway's admin port, or one of an older version")
        return self.judged(status, body)

    def route(self, path: str, body: bytes, headers: Mapping[bytes, bytes]) -> bytes:
        """What ``POST /route`` answers to ``body``, as if it were for ``path``. Raises `Unanswered`, `Refused`."""
        status, told = self._ask("POST", "/route", body, headers, {"path": path})
        if status == 401 and self._ask("GET", "/openapi.json")[0] == 200:
            # Whoever asks is known: the tenant's key is not.
            raise Refused(f"{_message(told) or 'the key is refused'} (--key KEY is a tenant's)")
        return self.judged(status, told)

    def judged(self, status: int, body: bytes) -> bytes:
        """The body of a good answer. Raises `Unanswered`, `Refused`."""
        if status == 200:
            return body
        said = _message(body)
        if status == 401:
            had = "refuses the admin token: set" if self._token is not None else "needs the admin token: set"
            raise Denied(f"{self.url} {had} WARMROUTE_ADMIN_TOKEN to what its admin.token says, or give --token")
        if said is None:
            raise Unanswered(f"{self.url} answers status {status}: is it the gateway's admin port?")
        raise Refused(said)

    def read(self, body: bytes, kind: type[Answer]) -> Answer:
        """An answer as what it is expected to be. Raises `Unanswered`."""
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as error:
            raise Unanswered(
                f"{self.url} answers something else than is known here ({error}): it is no gateway's admin port, or one of "
                "another version; use the command of the gateway's version"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise Unanswered(f"{self.url} does not answer in JSON: is it the gateway's admin port?") from None

    def why(self, error: Exception) -> str:
        """What an error of httpx means."""
        said = str(error) or type(error).__name__
        if isinstance(error, httpx.TimeoutException):
            return f"{self.url} did not answer in {SECONDS:.0f} s: is it the gateway's admin port?"
        if UNTRUSTED in said:
            return (
                f"{self.url} has a certificate that is not trusted here ({said}): add its authority to the system's, or name "
                "it in SSL_CERT_FILE"
            )
        if isinstance(error, httpx.ConnectError):
            return (
                f"no gateway answers at {self.url} ({said}): start it with 'warmroute serve', or name its admin port with "
                "--admin URL"
            )
        return f"{self.url} does not answer as a gateway does ({said}): is it the admin port?"

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[bytes, bytes] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        found, until = bytearray(), monotonic() + WHOLE
        try:
            with (
                httpx.Client(**self.options) as http,  # type: ignore[arg-type]
                http.stream(method, self.url + path, content=body, headers=headers, params=query) as answer,
            ):
                for piece in answer.iter_bytes():
                    found += piece
                    if len(found) > LARGEST or monotonic() > until:
                        raise Unanswered(f"{self.url} does not come to an end: is it the gateway's admin port?")
                return answer.status_code, bytes(found)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise Unanswered(self.why(error)) from None


def header(what: str, value: str) -> bytes:
    """A header's value. Raises `Unanswered` for what cannot be sent."""
    value = value.strip()
    if any((each < " " and each != "\t") or each == "\x7f" for each in value):
        raise Unanswered(f"{what} has control characters in it, which no header can have: take them out")
    return value.encode("utf-8", "surrogateescape")


def _checked(url: str) -> str:
    whole = url if "://" in url else f"http://{url}"
    try:
        read = httpx.URL(whole)
        bad = read.scheme not in ("http", "https") or not read.host or bool(read.query or read.fragment)
        bad = bad or (read.port is not None and not 0 < read.port < 65536)
    except (httpx.InvalidURL, UnicodeError, ValueError):
        bad = True
    if bad:
        raise Unanswered(f"--admin needs the URL of a gateway's admin port, like http://127.0.0.1:8081, not {url!r}")
    if read.userinfo:
        raise Unanswered("--admin takes no name and password: give the admin token with WARMROUTE_ADMIN_TOKEN")
    return whole.rstrip("/")


def _message(body: bytes) -> str | None:
    """What an answer says that says no; ``None``: it is not a gateway's."""
    try:
        return msgspec.json.decode(body, type=_Error).error.message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
