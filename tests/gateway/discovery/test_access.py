"""By what an API server is asked: a kubeconfig's token or certificate, a pod's service account, TLS that is checked."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web

from gateway.discovery.base import Lost
from gateway.kube import access
from gateway.kube.access import in_pod, of_kubeconfig
from tests.gateway.discovery.sources import watching

LIST = {"metadata": {"resourceVersion": "1"}, "items": []}


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> str:
    told = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "llm"}},
            {"name": "there", "context": {"cluster": "c", "user": "u", "namespace": "other"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path = folder / "config"
    path.write_text(json.dumps(told))
    return str(path)


def packed(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_certificate_of_a_kubeconfig_opens_a_checked_connection(tmp_path: Path, inline: bool) -> None:
    authority = trustme.CA()
    served, client = authority.issue_cert("127.0.0.1"), authority.issue_cert("gateway@example.com")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response(LIST)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    certificate, key = client.cert_chain_pems[0].bytes(), client.private_key_pem.bytes()
    ca = authority.cert_pem.bytes()
    for name, data in (("crt", certificate), ("key", key), ("ca", ca)):
        (tmp_path / name).write_bytes(data)
    if inline:
        user = {"client-certificate-data": packed(certificate), "client-key-data": packed(key)}
        path = kubeconfig(tmp_path, user, server=url, **{"certificate-authority-data": packed(ca)})
    else:
        user = {"client-certificate": "crt", "client-key": "key"}
        path = kubeconfig(tmp_path, user, server=url, **{"certificate-authority": "ca"})
    try:
        async with watching("kubernetes", selector="a=b", kubeconfig=path) as watched:
            await watched.until()
        assert asked[0] == "/api/v1/namespaces/llm/pods"
        # Whoever cannot be trusted is told nothing.
        stranger = kubeconfig(tmp_path, user, server=url)
        async with watching("kubernetes", selector="a=b", kubeconfig=stranger) as watched:
            lost = await watched.until_lost("unreachable")
            assert "certificate" in lost.message.lower()
    finally:
        await runner.cleanup()


def test_contexts_tokens_and_their_files(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of a file\n")
    by_file = of_kubeconfig(kubeconfig(tmp_path, {"tokenFile": "token"}, server="http://a:1/"), "there")
    assert (by_file.url, by_file.namespace, by_file.token()) == ("http://a:1", "other", "of a file")
    said = of_kubeconfig(kubeconfig(tmp_path, {"token": "said"}, server="https://a", **{"tls-server-name": "b"}))
    assert (said.token(), said.server_name, said.verify) == ("said", "b", True)


@pytest.mark.parametrize(
    ("user", "cluster", "told"),
    [
        ({"exec": {"command": "aws"}}, {"server": "https://a"}, "exec is not supported: give the user a token"),
        ({"client-key-data": "%"}, {"server": "https://a"}, "client-key-data is not base64"),
        ({"token": "a"}, {}, "is no kubeconfig: KeyError 'server'"),
    ],
)
def test_what_cannot_be_used_names_the_cure(tmp_path: Path, user: Any, cluster: Any, told: str) -> None:
    with pytest.raises(Lost, match=told):
        of_kubeconfig(kubeconfig(tmp_path, user, **cluster))
    with pytest.raises(Lost, match="none is called 'nowhere'"):
        of_kubeconfig(kubeconfig(tmp_path, {}, server="https://a"), "nowhere")


def test_a_pods_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(Lost, match="this is no pod of a cluster"):
        in_pod()
    monkeypatch.setattr(access, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(Lost, match="set automountServiceAccountToken to true"):
        in_pod()
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("llm\n")
    found = in_pod()
    assert (found.url, found.namespace, found.token()) == ("https://[fd00::1]:6443", "llm", "first")
    (tmp_path / "token").write_text("second")
    assert found.token() == "second"
    with pytest.raises(Lost, match="authority or our certificate cannot be used"):
        found.tls()
