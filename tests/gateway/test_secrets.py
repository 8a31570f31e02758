"""No secret is ever shown: not in logs, metrics, errors, answers of either port, nor in what objects say of themselves."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.credentials import hashed
from gateway.run import Running
from gateway.source import Source
from tests.gateway.conftest import StartScripted
from tests.gateway.talk import chat, once, request, until
from tests.gateway.test_oidc import AUDIENCE, ISSUER, Issuer

SECRETS = {
    "clear": "s3cret-clear-key",
    "hashed": "s3cret-hashed-key-of-somebody",
    "filed": "s3cret-filed-key",
    "admin": "s3cret-admin-token",
    "engine": "s3cret-engine-key",
    "redis": "s3cret-redis-password",
    "isolation": "s3cret-isolation-key",
    "sealing": "s3cret-token-key",
    "wrong": "s3cret-of-another-service",
}


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    found = Issuer()
    await found.start()
    yield found
    await found.stop()


def says(worker: str, issuer: Issuer, keys: Path, **changes: Any) -> str:
    told: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0, "token": SECRETS["admin"]},
        "auth": {"jwt": {"issuer": ISSUER, "audience": [AUDIENCE], "jwks": f"http://127.0.0.1:{issuer.port}/keys"}},
        "workers": [{"url": worker, "engine": "generic", "api_key": SECRETS["engine"]}],
        "tenants": [
            {"name": "a", "keys": [SECRETS["clear"], hashed(SECRETS["hashed"], b"salt")], "isolation": "isolated"},
            {"name": "b", "key_files": [str(keys)]},
        ],
        # Nobody listens there: it is tried, and what is said of that must not hold the password.
        "sessions": {"redis": f"redis://:{SECRETS['redis']}@127.0.0.1:9/0", "token_key": SECRETS["sealing"]},
        "isolation_key": SECRETS["isolation"],
        "probes": {"join": 0.1, "health": 0.1},
        "drain": 0,
        "drain_limit": "1s",
    }
    return yaml.safe_dump({**told, **changes})


async def test_no_secret_is_in_anything_that_is_told(
    scripted: StartScripted, issuer: Issuer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys, file = tmp_path / "keys", tmp_path / "warmroute.yaml"
    keys.write_text(SECRETS["filed"])
    worker = await scripted()
    file.write_text(says(worker.url, issuer, keys))
    source = Source(str(file))
    running = Running(source.load(), source)
    await running.start()
    told: list[str] = []
    tokens = [
        issuer.token(),
        issuer.token(tenant="nobody"),
        issuer.token(exp=1),
        Issuer().token(),
        issuer.token(nbf=9e9),
    ]
    try:
        await until(lambda: all(each.targets for each in running.fleet.workers.values()))
        await until(lambda: running.key_set is not None and running.key_set.keys)
        told += await _clients(running, tokens)
        told += await _operators(running)
        for broken in (
            says(worker.url, issuer, keys, polcy=SECRETS["wrong"]),
            says(worker.url, issuer, keys, tenants=[{"name": "a", "keys": [SECRETS["clear"]] * 2}]),
            says(worker.url, issuer, keys, tenants=[{"name": "a", "keys": [f"blake2b:{SECRETS['wrong']}"]}]),
            says(worker.url, issuer, keys, workers=[{"url": f"http://u:{SECRETS['wrong']}@h:1"}]),
            says(worker.url, issuer, keys, sessions={"redis": f"http://:{SECRETS['wrong']}@h"}),
            says(worker.url, issuer, keys, admin={"token": f"{SECRETS['wrong']}\n"}),
            f"admin: {{token: {SECRETS['wrong']}, tok",
        ):
            file.write_text(broken)
            told += await _operators(running)
        keys.write_text(f"{SECRETS['filed']} {SECRETS['wrong']}\n")
        file.write_text(says(worker.url, issuer, keys))
        told += await _operators(running)
    finally:
        await running.stop(0)
    told += [repr(vars(running)), repr(vars(running.gateway.tenants)), repr(running.config), str(running.config)]
    told += [repr(each.spec) for each in running.fleet.workers.values()]
    told += [f"{record.getMessage()} {record.args!r} {record.exc_text}" for record in caplog.records]
    assert len(told) > 60
    for name, secret in [*SECRETS.items(), *((f"token {number}", token) for number, token in enumerate(tokens))]:
        for text in told:
            assert secret not in text, f"{name}: {text[:2000]}"
        # A part of a token opens nothing, but tells whose it is; its signature is what makes it good.
        if name.startswith("token"):
            assert not any(secret.split(".")[2] in text for text in told)


async def _clients(running: Running, tokens: list[str]) -> list[str]:
    """What clients are told, whatever they send as a credential."""
    found = []
    for credential in [*SECRETS.values(), *tokens, *(token[:-3] for token in tokens)]:
        for line in (f"Authorization: Bearer {credential}", f"x-api-key: {credential}", f"Authorization: {credential}"):
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/models", "/nowhere"):
                method = "GET" if path.endswith("models") else "POST"
                answer = await once(running.port, request(chat(max_tokens=1), line, path=path, method=method))
                found.append(f"{answer.status} {answer.fields} {answer.body.decode()}")
    return found


async def _operators(running: Running) -> list[str]:
    """What the control plane tells, with the token and without."""
    found = []
    url = f"http://127.0.0.1:{running.admin.port}"
    good, wrong = {"authorization": f"Bearer {SECRETS['admin']}"}, {"authorization": f"Bearer {SECRETS['wrong']}"}
    paths = "/config /config/fingerprints /healthz /metrics /workers /sessions /readyz /doctor /openapi.json".split()
    calls = [("POST", "/config/reload"), *(("GET", path) for path in paths)]
    async with aiohttp.ClientSession() as http:
        for headers in (good, wrong, {}):
            for method, path in calls:
                async with http.request(method, f"{url}{path}", headers=headers) as answer:
                    found.append(f"{answer.status} {answer.headers} {await answer.text()}")
        tenant = {**good, "x-warmroute-tenant-key": SECRETS["wrong"]}
        async with http.post(f"{url}/route", headers=tenant, data=json.dumps(chat())) as answer:
            found.append(await answer.text())
        for where in ("ftp://h", "http://127.0.0.1:9"):
            body = {"url": where, "api_key": SECRETS["wrong"]}
            async with http.post(f"{url}/workers", headers=good, json=body) as answer:
                found.append(await answer.text())
    return found
