"""Where the API server is, and by what one is let in: a pod's service account, a kubeconfig, or both said directly.

Tokens are read from their files whenever one is needed: the kubelet replaces them before they expire.
"""

from __future__ import annotations

import base64
import binascii
import os
import ssl
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from gateway.config import maybe_variable
from gateway.discovery.base import BadOption, Lost, text
from gateway.source import Stat, stat_of

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(slots=True)
class Access:
    """One way in."""

    url: str
    token_file: str | None = None
    token_text: str | None = None
    ca_file: str | None = None
    ca_data: str | None = None
    verify: bool = True
    server_name: str | None = None
    client: tuple[str, str] | None = None
    """Certificate and key, in PEM."""
    namespace: str | None = None
    """The one that is its own."""

    def token(self) -> str | None:
        """As it is now; ``None``: there is none. Raises `Lost`."""
        if self.token_file is None:
            return self.token_text
        return _read(self.token_file).strip()

    def tls(self) -> ssl.SSLContext | None:
        """``None``: in clear. Raises `Lost`."""
        if urlsplit(self.url).scheme != "https":
            return None
        stat = None if self.ca_file is None else stat_of(self.ca_file)
        try:
            return _context(self.ca_file, stat, self.ca_data, self.verify, self.client)
        except (OSError, ValueError) as error:
            raise Lost("access", f"the API server's authority or our certificate cannot be used: {error}") from None


@lru_cache(maxsize=16)
def _context(
    ca: str | None, stat: Stat | None, data: str | None, verify: bool, client: tuple[str, str] | None
) -> ssl.SSLContext:
    """``stat``: of the file ``ca``, which is read anew when it changed."""
    context = ssl.create_default_context(cafile=ca, cadata=data)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if client is not None:
        # The library takes files only; nobody else may read these, and they are gone at once.
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("\n".join(client))
            file.flush()
            context.load_cert_chain(file.name)
    return context


class Reach:
    """The options by which a source is told where the API server is. Raises `BadOption`."""

    def __init__(self, kubeconfig: Any, context: Any, api: Any, token_file: Any, ca: Any) -> None:
        self.kubeconfig = None if kubeconfig is None else text("kubeconfig", kubeconfig)
        self.context = None if context is None else text("context", context)
        self.api = None if api is None else text("api", api).rstrip("/")
        self.token_file = None if token_file is None else text("token_file", token_file)
        self.ca = None if ca is None else text("ca", ca)
        if self.api is not None and self.kubeconfig is not None:
            raise BadOption("api and kubeconfig both say where the API server is: take one of them out", "api")
        if self.context is not None and self.kubeconfig is None:
            raise BadOption("context is one of a kubeconfig: name that too", "context")
        for option in ("token_file", "ca"):
            if getattr(self, option) is not None and self.api is None:
                raise BadOption(f"{option} goes with api: a pod and a kubeconfig have their own", option)
        if self.api is not None and not (urlsplit(self.api).scheme in ("http", "https") and urlsplit(self.api).netloc):
            raise BadOption(f"api must be a URL such as https://10.96.0.1, not {self.api!r}", "api")

    def access(self) -> Access:
        """Read what there is. Raises `Lost`."""
        if self.api is not None:
            return Access(self.api, token_file=self.token_file, ca_file=self.ca)
        return in_pod() if self.kubeconfig is None else of_kubeconfig(self.kubeconfig, self.context)


def in_pod() -> Access:
    """By the service account of the pod that this runs in. Raises `Lost`."""
    host, port = maybe_variable("KUBERNETES_SERVICE_HOST"), maybe_variable("KUBERNETES_SERVICE_PORT") or "443"
    if host is None:
        raise Lost("access", "this is no pod of a cluster (KUBERNETES_SERVICE_HOST is not set): set kubeconfig or api")
    if not (ACCOUNT / "token").exists():
        raise Lost("access", "the pod has no service account's token: set automountServiceAccountToken to true")
    host = f"[{host}]" if ":" in host else host
    namespace = _read(ACCOUNT / "namespace").strip() if (ACCOUNT / "namespace").exists() else None
    return Access(
        f"https://{host}:{port}",
        token_file=str(ACCOUNT / "token"),
        ca_file=str(ACCOUNT / "ca.crt"),
        namespace=namespace,
    )


def of_kubeconfig(path: str, context: str | None = None) -> Access:
    """By a context of a kubeconfig: a token or a client certificate. Raises `Lost`."""
    try:
        told = yaml.safe_load(_read(path))
        chosen = _named(told, "contexts", "context", context or told["current-context"])
        cluster = _named(told, "clusters", "cluster", chosen["cluster"])
        user = _named(told, "users", "user", chosen["user"]) if chosen.get("user") else {}
        url = str(cluster["server"]).rstrip("/")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise Lost("access", f"{path} is no kubeconfig: {type(error).__name__} {error}") from None
    for plugin in ("exec", "auth-provider"):
        if user.get(plugin) is not None:
            raise Lost("access", f"{path}: {plugin} is not supported: give the user a token or a client certificate")
    folder = os.path.dirname(os.path.abspath(path))
    ca_data = cluster.get("certificate-authority-data")
    certificate, key = (_pem(path, folder, user, name) for name in ("client-certificate", "client-key"))
    return Access(
        url,
        token_file=_beside(folder, user.get("tokenFile")),
        token_text=user.get("token"),
        ca_file=None if ca_data else _beside(folder, cluster.get("certificate-authority")),
        ca_data=_decoded(path, "certificate-authority-data", ca_data) if ca_data else None,
        verify=not cluster.get("insecure-skip-tls-verify", False),
        server_name=cluster.get("tls-server-name"),
        client=(certificate, key) if certificate and key else None,
        namespace=chosen.get("namespace"),
    )


def _named(told: Any, kind: str, inner: str, name: str) -> dict[str, Any]:
    for each in told[kind]:
        if each.get("name") == name:
            return dict(each[inner] or {})
    raise KeyError(f"{kind}: none is called {name!r}")


def _beside(folder: str, path: str | None) -> str | None:
    return None if not path else os.path.join(folder, path)


def _pem(path: str, folder: str, user: dict[str, Any], name: str) -> str | None:
    data = user.get(f"{name}-data")
    if data:
        return _decoded(path, f"{name}-data", data)
    file = _beside(folder, user.get(name))
    return None if file is None else _read(file)


def _decoded(path: str, key: str, data: Any) -> str:
    try:
        return base64.b64decode(str(data), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise Lost("access", f"{path}: {key} is not base64 of a PEM file") from None


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Lost("access", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
