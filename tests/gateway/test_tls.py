"""TLS on both sides: certificates of a throw-away authority."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from gateway import reload
from gateway.config import TLS, Config, WorkerConfig
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import until

CHAT = {"model": "sim", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


class TLSFront:
    """A TLS port that passes bytes on to a plain one, as an engine behind a TLS sidecar is reached."""

    def __init__(self, port: int, authority: trustme.CA) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(self.context)
        self.behind = port
        self.port = 0

    async def __aenter__(self) -> "TLSFront":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.behind)
        try:
            async with asyncio.timeout(30):
                await asyncio.wait(
                    [
                        asyncio.ensure_future(_pump(reader, far_writer)),
                        asyncio.ensure_future(_pump(far_reader, writer)),
                    ],
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            far_writer.close()
            writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (OSError, ssl.SSLError):
        pass


async def test_clients_speak_tls_with_the_configured_certificate(
    gateway: Begin, engine: StartEngine, authority: trustme.CA, tmp_path: Path
) -> None:
    told = write(authority.issue_cert("localhost"), tmp_path)

    def secure(config: Config) -> None:
        config.listen.tls = told

    running = await gateway(await engine(), change=secure)
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    async with httpx.AsyncClient(verify=trusted, timeout=20) as client:
        answer = await client.post(f"https://localhost:{running.port}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        async with client.stream(
            "POST", f"https://localhost:{running.port}/v1/chat/completions", json={**CHAT, "stream": True}
        ) as stream:
            text = "".join([piece async for piece in stream.aiter_text()])
        assert text.endswith("data: [DONE]\n\n")
    async with httpx.AsyncClient(timeout=20) as stranger:
        with pytest.raises(httpx.ConnectError):
            await stranger.get(f"https://localhost:{running.port}/healthz")


def write(certificate: trustme.LeafCert, folder: Path) -> TLS:
    certificate.private_key_pem.write_to_path(folder / "key")
    certificate.cert_chain_pems[0].write_to_path(folder / "crt")
    return TLS(str(folder / "crt"), str(folder / "key"))


async def serial(port: int, authority: trustme.CA, **changes: Any) -> int | str:
    """The number of the certificate that is shown; or why there is none."""
    client = ssl.create_default_context()
    authority.configure_trust(client)
    for name, value in changes.items():
        if name == "ciphers":
            client.set_ciphers(value)
        else:
            setattr(client, name, value)
    try:
        async with asyncio.timeout(20):
            _, writer = await asyncio.open_connection("localhost", port, ssl=client)
    except (ssl.SSLError, OSError) as error:
        return type(error).__name__
    found = writer.get_extra_info("ssl_object")
    number = int(found.getpeercert()["serialNumber"], 16)
    writer.transport.abort()
    return number


async def test_a_renewed_certificate_is_taken_without_a_restart_and_half_of_one_is_not(
    gateway: Begin, engine: StartEngine, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK", 0.05)
    monkeypatch.setattr(reload, "SETTLE", 0.05)
    old, new = authority.issue_cert("localhost"), authority.issue_cert("localhost")
    told = write(old, tmp_path)

    def secure(config: Config) -> None:
        config.listen.tls = told

    running = await gateway(await engine(), change=secure)
    before = await serial(running.port, authority)
    # Its key is not there yet: such a pair is of no use, and what was goes on.
    new.cert_chain_pems[0].write_to_path(tmp_path / "crt")
    await until(lambda: running.reloading.problems)
    assert running.reloading.problems[0].key == "listen.tls"
    assert await serial(running.port, authority) == before
    new.private_key_pem.write_to_path(tmp_path / "key")
    await until(lambda: running.reloading.generation == 1)
    assert isinstance(before, int)
    assert await serial(running.port, authority) not in (before, "SSLError")
    assert not running.reloading.problems


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_what_is_spoken_is_tls_1_2_or_later_with_forward_secrecy(
    gateway: Begin, engine: StartEngine, authority: trustme.CA, tmp_path: Path
) -> None:
    told = write(authority.issue_cert("localhost"), tmp_path)

    def secure(config: Config) -> None:
        config.listen.tls = told

    running = await gateway(await engine(), change=secure)
    version = ssl.TLSVersion
    old = {"minimum_version": version.TLSv1, "maximum_version": version.TLSv1_1, "ciphers": "ALL:@SECLEVEL=0"}
    assert isinstance(await serial(running.port, authority, **old), str)
    just = {"maximum_version": version.TLSv1_2}
    assert isinstance(await serial(running.port, authority, **just), int)
    for ciphers in ("AES128-GCM-SHA256", "ECDHE-ECDSA-AES128-SHA256:ECDHE-RSA-AES128-SHA256"):
        assert isinstance(await serial(running.port, authority, **just, ciphers=ciphers), str), ciphers


async def test_a_worker_s_certificate_is_verified_by_default_and_against_the_configured_authority(
    gateway: Begin, engine: StartEngine, authority: trustme.CA, tmp_path: Path
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca")
    started = await engine(time_scale=0.02)
    async with TLSFront(started.port, authority) as front:
        url = f"https://localhost:{front.port}"
        distrusting = await gateway(WorkerConfig(url), ready=False)
        trusting = await gateway(WorkerConfig(url, ca=str(tmp_path / "ca")))
        careless = await gateway(WorkerConfig(url, verify_tls=False))
        for running in (trusting, careless):
            async with httpx.AsyncClient(timeout=20) as client:
                answer = await client.post(f"http://127.0.0.1:{running.port}/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
        (worker,) = distrusting.fleet.workers.values()
        await until(lambda: worker.reason != "not read yet", 20)
        assert worker.state is State.JOINING
        async with httpx.AsyncClient(timeout=20) as client:
            answer = await client.post(f"http://127.0.0.1:{distrusting.port}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 503
