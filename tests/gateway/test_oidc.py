"""Tokens of an identity provider, and certificates of clients: who gets in as whom, and who does not."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
import trustme
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from gateway import jwks
from gateway.config import JWT, Auth, Config, ConfigError, TenantConfig, parse
from gateway.jwks import BadKeySet, parse as parse_keys
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, once, request, until
from tests.gateway.test_tenants import ask, having, tenant
from tests.gateway.test_tls import CHAT, write

ISSUER, AUDIENCE = "https://idp.example", "warmroute"


class Issuer:
    """An identity provider: keys, a place where the public ones are, and tokens."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
            "ed": ed25519.Ed25519PrivateKey.generate(),
        }
        self.shown = set(self.keys)
        self.asked = 0
        self.status = 200
        self.more: list[Any] = []
        self.raw: bytes | None = None
        self.port = 0

    def jwks(self) -> bytes:
        names = {"rsa": "RS256", "ec": "ES256", "ed": "EdDSA"}
        found = []
        for kid in sorted(self.shown):
            algorithm = jwt.get_algorithm_by_name(names[kid.split("-")[0]])
            found.append({**json.loads(algorithm.to_jwk(self.keys[kid].public_key())), "kid": kid, "use": "sig"})
        return json.dumps({"keys": [*found, *self.more]}).encode()

    async def start(self) -> None:
        async def answer(_: web.Request) -> web.Response:
            self.asked += 1
            return web.Response(body=self.raw or self.jwks(), status=self.status, headers={"location": "/elsewhere"})

        application = web.Application()
        application.router.add_get("/{any:.*}", answer)
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    def token(self, kid: str = "rsa", algorithm: str | None = None, header: Any = None, **claims: Any) -> str:
        told = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 300, "tenant": "a", **claims}
        told = {name: value for name, value in told.items() if value is not None}
        algorithm = algorithm or {"rsa": "RS256", "ec": "ES256", "ed": "EdDSA"}[kid.split("-")[0]]
        return jwt.encode(told, self.keys[kid], algorithm, headers={"kid": kid, **(header or {})})

    def config(self, **changes: Any) -> JWT:
        return JWT(ISSUER, [AUDIENCE], changes.pop("jwks", f"http://127.0.0.1:{self.port}/keys"), **changes)


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    found = Issuer()
    await found.start()
    yield found
    await found.stop()


def believing(told: JWT, *tenants: TenantConfig, a_minute: int = 1000, **fields: Any) -> Any:
    found = tenants or (tenant("a"), tenant("b", claims=["team-b", "b2"]))
    return having(*found, auth=Auth(failures_per_minute=a_minute, jwt=told), **fields)


async def ready(running: Running) -> None:
    assert running.key_set is not None
    await until(lambda: running.key_set.keys)  # type: ignore[union-attr]


async def listing(running: Running, token: str) -> int:
    line = f"Authorization: Bearer {token}"
    return (await once(running.port, request(b"", line, path="/v1/models", method="GET"))).status


async def test_a_token_is_the_tenant_that_its_claim_names(gateway: Begin, engine: StartEngine, issuer: Issuer) -> None:
    running = await gateway(await engine(), change=believing(issuer.config()))
    await ready(running)
    for token, status, who in (
        (issuer.token(), 200, "a"),
        (issuer.token("ec", tenant="team-b"), 200, "b"),
        (issuer.token("ed", tenant=["other", "b2"]), 200, "b"),
        (issuer.token("rsa", "PS256"), 200, "a"),
        (issuer.token(aud=["x", AUDIENCE]), 200, "a"),
        (issuer.token(tenant="b"), 403, None),
        (issuer.token(tenant="nobody"), 403, None),
        (issuer.token(tenant=None), 403, None),
        (issuer.token(tenant={"a": 1}), 403, None),
        (issuer.token(tenant=["a", "b2"]), 403, None),
    ):
        answer = await ask(running, token)
        assert answer.status == status
        assert token not in answer.body.decode()
        if who is None:
            assert answer.json()["error"]["type"] == "permission_error"
    assert (await ask(running, None)).status == 401, "nobody is served without being somebody"
    text = await admin(running, "/metrics")
    assert "warmroute_jwks_keys 3.0" in text
    assert 'tenant="a"' in text and 'tenant="b"' in text


def forged(issuer: Issuer) -> dict[str, str]:
    """Tokens that are not good, by what is wrong with them."""
    good = issuer.token()
    head, body, signature = good.split(".")
    stranger = Issuer()
    public = (
        issuer.keys["rsa"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )

    def coded(value: Any) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    def by_hand(header: dict[str, Any], secret: bytes | None) -> str:
        start = f"{coded(header)}.{body}"
        made = b"" if secret is None else hmac.new(secret, start.encode(), hashlib.sha256).digest()
        return f"{start}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}"

    return {
        "expired": issuer.token(exp=time.time() - 100),
        "too early": issuer.token(nbf=time.time() + 100),
        "issuer": issuer.token(iss="https://evil.example"),
        "no issuer": issuer.token(iss=None),
        "audience": issuer.token(aud="other"),
        "no audience": issuer.token(aud=None),
        "never ends": issuer.token(exp=None),
        "another's key": stranger.token(),
        "payload": f"{head}.{coded({'tenant': 'a', 'iss': ISSUER, 'aud': AUDIENCE, 'exp': time.time() + 300})}.{signature}",
        "signature": f"{head}.{body}.{signature[:-4]}AAAA",
        "no signature": f"{head}.{body}.",
        "none": by_hand({"alg": "none", "kid": "rsa"}, None),
        "None": by_hand({"alg": "None", "kid": "rsa"}, None),
        "hmac with the public key": by_hand({"alg": "HS256", "kid": "rsa"}, public),
        "hmac with nothing": by_hand({"alg": "HS256", "kid": "rsa"}, b""),
        "no algorithm": by_hand({"kid": "rsa"}, b""),
        "a list for an algorithm": by_hand({"alg": ["RS256"], "kid": "rsa"}, b""),
        "unknown kid": issuer.token(header={"kid": "elsewhere"}),
        "no kid": jwt.encode({"tenant": "a"}, issuer.keys["rsa"], "RS256"),
        "kid of another kind": issuer.token(header={"kid": "ec"}),
        "kid that is no text": by_hand({"alg": "RS256", "kid": {"$ne": 1}}, b""),
        "path in kid": issuer.token(header={"kid": "../../dev/null"}),
        "extensions": issuer.token(header={"crit": ["x"], "x": 1}),
        "key of its own": stranger.token(header={"jwk": json.loads(stranger.jwks())["keys"][0]}),
        "no json": "eyJub3QganNvbg.e30.AAAA",
        "long": issuer.token(junk="x" * 20_000),
        "not a token": "eyJ.x.y",
    }


async def test_what_is_not_good_is_401_without_a_word_of_it(
    gateway: Begin, engine: StartEngine, issuer: Issuer
) -> None:
    started = await engine()
    running = await gateway(started, change=believing(issuer.config(), anonymous=True))
    await ready(running)
    for what, token in forged(issuer).items():
        answer = await ask(running, token)
        assert answer.status == 401, what
        assert token not in answer.body.decode(), what
    assert started.stats()["requests"] == 0
    assert (await ask(running, issuer.token())).status == 200
    assert 'warmroute_auth_failures_total{reason="token"}' in await admin(running, "/metrics")


async def test_nothing_that_a_token_says_has_anything_fetched(
    gateway: Begin, engine: StartEngine, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Issuer()
    await elsewhere.start()
    try:
        running = await gateway(await engine(), change=believing(issuer.config()))
        await ready(running)
        assert issuer.asked == 1
        url = f"http://127.0.0.1:{elsewhere.port}/keys"
        for header in ({"jku": url}, {"x5u": url}, {"kid": url}, {"jku": url, "kid": "other"}):
            assert await listing(running, elsewhere.token(header=header)) == 401
        await until(lambda: issuer.asked == 2)
        for number in range(20):
            assert await listing(running, issuer.token(header={"kid": f"k{number}"})) == 401
        assert issuer.asked == 2, "unknown keys have the set read again once a minute"
        assert elsewhere.asked == 0
    finally:
        await elsewhere.stop()


async def test_a_new_key_is_found_and_a_key_that_is_gone_ends_what_it_signed(
    gateway: Begin, engine: StartEngine, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "ASKED", 0.0)
    running = await gateway(await engine(), change=believing(issuer.config()))
    await ready(running)
    old = issuer.token()
    async with await Raw.connect(running.port) as client:
        told = request(chat(max_tokens=1), f"Authorization: Bearer {old}")
        assert (await client.ask(told)).status == 200
        issuer.keys["rsa-2"] = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        issuer.shown = {"rsa-2"}
        assert await listing(running, issuer.token("rsa-2")) == 401
        await until(lambda: [key.kid for key in running.key_set.keys] == ["rsa-2"])  # type: ignore[union-attr]
        assert await listing(running, issuer.token("rsa-2")) == 200
        assert (await client.ask(told)).status == 401, "on a connection that knew it, too"


async def test_a_token_ends_in_the_midst_of_a_connection(gateway: Begin, engine: StartEngine, issuer: Issuer) -> None:
    running = await gateway(await engine(), change=believing(issuer.config(leeway=0.0)))
    await ready(running)
    told = request(chat(max_tokens=1), f"Authorization: Bearer {issuer.token(exp=int(time.time()) + 4)}")
    async with await Raw.connect(running.port) as client:
        assert (await client.ask(told)).status == 200
        statuses = [200]
        while statuses[-1] == 200 and len(statuses) < 1000:
            statuses.append((await client.ask(told)).status)
            await asyncio.sleep(0.05)
        assert statuses[-1] == 401


async def test_the_last_keys_stay_while_their_place_fails(
    gateway: Begin,
    engine: StartEngine,
    issuer: Issuer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(jwks, "ASKED", 0.0)
    running = await gateway(await engine(), change=believing(issuer.config()))
    await ready(running)
    answers: list[tuple[int, bytes | None]] = [
        (500, None),
        (302, None),
        (200, b"no json"),
        (200, b"[]"),
        (200, b'{"keys": []}'),
        (200, b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}'),
        (200, b'{"keys": [' + b" " * jwks.LARGEST + b"]}"),
        (200, json.dumps({"keys": [{"kty": "EC"}] * 101}).encode()),
    ]
    for number, (issuer.status, issuer.raw) in enumerate(answers, 2):
        assert await listing(running, issuer.token(header={"kid": f"new{number}"})) == 401
        await until(lambda number=number: issuer.asked == number)  # type: ignore[misc]
        assert await listing(running, issuer.token(jti=str(number))) == 200
    await until(lambda: len([line for line in caplog.messages if "known stay" in line]) >= 7)
    assert 'warmroute_jwks_reads_total{outcome="failed"}' in await admin(running, "/metrics")


async def test_until_keys_are_known_tokens_are_503_and_keys_work(
    gateway: Begin, engine: StartEngine, issuer: Issuer
) -> None:
    issuer.status = 500
    running = await gateway(await engine(), change=believing(issuer.config(), tenant("a", "ka")))
    await until(lambda: issuer.asked)
    answer = await ask(running, issuer.token())
    assert answer.status == 503
    assert answer.one("retry-after")
    assert (await ask(running, "ka")).status == 200
    issuer.status = 200


async def test_keys_of_a_file_are_followed(
    gateway: Begin, engine: StartEngine, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "AGAIN", 0.05)
    path = tmp_path / "jwks.json"
    issuer.shown = {"ec"}
    path.write_bytes(issuer.jwks())
    running = await gateway(await engine(), change=believing(issuer.config(jwks=str(path))))
    await ready(running)
    assert [await listing(running, issuer.token(kid)) for kid in ("ec", "ed")] == [200, 401]
    issuer.shown = {"ed"}
    path.write_bytes(issuer.jwks())
    await until(lambda: [key.kid for key in running.key_set.keys] == ["ed"])  # type: ignore[union-attr]
    assert [await listing(running, issuer.token(kid)) for kid in ("ec", "ed")] == [401, 200]


@pytest.mark.parametrize(
    ("claim", "claims"),
    [
        ("org.team", {"org": {"team": "a"}}),
        ("https://example.com/tenant", {"https://example.com/tenant": "a"}),
        ("groups", {"groups": ["x", "a", 1, None]}),
    ],
)
async def test_the_claim_may_be_a_path(
    gateway: Begin, engine: StartEngine, issuer: Issuer, claim: str, claims: dict[str, Any]
) -> None:
    running = await gateway(await engine(), change=believing(issuer.config(claim=claim)))
    await ready(running)
    assert await listing(running, issuer.token(tenant=None, **claims)) == 200
    assert await listing(running, issuer.token(tenant="a")) == 403


async def test_forged_tokens_are_guesses_and_expired_ones_are_not(
    gateway: Begin, engine: StartEngine, issuer: Issuer
) -> None:
    running = await gateway(await engine(), change=believing(issuer.config(), a_minute=3))
    await ready(running)
    for number in range(6):
        assert await listing(running, issuer.token(exp=time.time() - 100, jti=str(number))) == 401
    stranger = Issuer()
    assert [await listing(running, stranger.token(jti=str(number))) for number in range(5)] == [401, 401, 401, 429, 429]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithms": ["HS256"]}, "whoever can check such a token can make one"),
        ({"algorithms": ["none"]}, "it is not taken"),
        ({"algorithms": []}, "is empty"),
        ({"audience": []}, "a token for nobody"),
        ({"jwks": "http://idp.example/keys"}, "must be https"),
        ({"jwks": "https://u:p@idp.example/keys"}, "without a user"),
        ({"jwks": "/no/such/file"}, "there is no file"),
        ({"leeway": "1h"}, "from 0 to 5m"),
        ({"refresh": "1s"}, "at least 10s"),
        ({"issuerr": "x"}, "did you mean 'issuer'"),
        ({"claim": ""}, "is empty"),
    ],
)
def test_what_is_wrong_with_the_configuration_of_tokens_is_told(change: dict[str, Any], words: str) -> None:
    told = {"issuer": ISSUER, "audience": [AUDIENCE], "jwks": "https://idp.example/keys"}
    parse(json.dumps({"auth": {"jwt": told}, "tenants": [{"name": "a"}]}))
    with pytest.raises(ConfigError, match=words):
        parse(json.dumps({"auth": {"jwt": {**told, **change}}, "tenants": [{"name": "a"}]}))


def test_claims_and_tenants_belong_together() -> None:
    told = {"issuer": ISSUER, "audience": [AUDIENCE], "jwks": "https://idp.example/keys"}
    for says, words in (
        ({"tenants": [{"name": "a", "keys": ["k"], "claims": ["x"]}]}, "configure auth.jwt"),
        ({"auth": {"jwt": told}}, "no tenant that a token could name"),
        ({"auth": {"jwt": told}, "tenants": [{"name": "a"}, {"name": "b", "claims": ["a"]}]}, "another tenant already"),
        ({"tenants": [{"name": "a", "subjects": ["x"]}]}, "no certificate is ever asked for"),
        (
            {"listen": {"tls": {"cert": "c", "key": "k", "client_required": True}}},
            "needs client_ca",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(json.dumps(says))


def test_secret_and_short_keys_are_left_out() -> None:
    short = jwt.get_algorithm_by_name("RS256").to_jwk(
        rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    )
    private = jwt.get_algorithm_by_name("ES256").to_jwk(ec.generate_private_key(ec.SECP256R1()))
    (kept,) = parse_keys(b'{"keys": [%b, %b, {"kty": "oct", "k": "x"}]}' % (short.encode(), private.encode()))
    assert kept.kind == "EC"
    assert "d" not in kept.told
    with pytest.raises(BadKeySet):
        parse_keys(b'{"keys": [%b]}' % short.encode())


# -- certificates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("required", [False, True])
async def test_a_client_s_certificate_is_the_tenant_that_it_names(
    gateway: Begin, engine: StartEngine, tmp_path: Path, required: bool
) -> None:
    servers, clients, strangers = trustme.CA(), trustme.CA(), trustme.CA()
    told = write(servers.issue_cert("localhost"), tmp_path)
    clients.cert_pem.write_to_path(tmp_path / "ca")
    told.client_ca, told.client_required = str(tmp_path / "ca"), required

    def change(config: Config) -> None:
        having(
            tenant("a", "ka", subjects=["agent.internal"]),
            tenant("b", subjects=["Batch Jobs", "other.internal"]),
        )(config)
        config.listen.tls = told

    running = await gateway(await engine(), change=change)
    url = f"https://localhost:{running.port}/v1/chat/completions"

    async def status(certificate: trustme.LeafCert | None, **headers: str) -> int:
        context = ssl.create_default_context()
        servers.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        async with httpx.AsyncClient(verify=context, timeout=20, headers=headers) as http:
            try:
                return (await http.post(url, json={**CHAT, "max_tokens": 1})).status_code
            except httpx.TransportError:
                return 0

    refused = 0 if required else 401
    assert await status(clients.issue_cert("agent.internal")) == 200
    assert await status(clients.issue_cert("nobody.internal", common_name="Batch Jobs")) == 200
    assert await status(clients.issue_cert("unknown.internal")) == 401
    assert await status(clients.issue_cert("agent.internal.evil")) == 401
    assert await status(clients.issue_cert("agent.internal", "other.internal")) == 403
    assert await status(strangers.issue_cert("agent.internal")) == 0
    assert await status(None) == refused
    assert await status(None, authorization="Bearer ka") == (0 if required else 200)
    assert await status(clients.issue_cert("agent.internal"), authorization="Bearer wrong") == 401
    text = await admin(running, "/metrics")
    assert 'tenant="a"' in text
    assert 'tenant="b"' in text
