"""Keys as they are stored, and what becomes of those who guess them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.config import Auth, Config, ConfigError, ModelConfig, Secret, TenantConfig, parse
from gateway.credentials import BadKey, Keyring, hashed, new_key, parse as parse_key, read_keys
from gateway.errors import GuessedTooOften
from gateway.guesses import ADDRESSES, Guesses, network
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, admin, chat, once, request
from tests.gateway.test_tenants import ask, having, series, tenant

KEY = "wr-0123456789abcdefghijklmnop"


# -- stored forms -------------------------------------------------------------------------------------------------------


def test_a_stored_hash_is_salted_and_opens_with_its_key_alone() -> None:
    one, other = hashed(KEY), hashed(KEY)
    assert one != other
    assert KEY not in one
    ring = Keyring([(one, "a"), (hashed("x" * 20), "b"), ("clear", "c")])
    assert [ring.find(key) for key in (KEY.encode(), b"x" * 20, b"clear", b"clea", one.encode(), b"")] == [
        "a",
        "b",
        "c",
        None,
        None,
        None,
    ]
    shared = Keyring([(hashed(new_key(), bytes(16)), number) for number in range(50)])
    assert (len(shared), shared.salts) == (50, 1)


@pytest.mark.parametrize("text", ["blake2b:", "blake2b:00", "blake2b:zz:00", "blake2b:00:00", f"blake2b::{'0' * 64}"])
def test_what_only_looks_like_a_hash_is_refused(text: str) -> None:
    with pytest.raises(BadKey):
        parse_key(text)
    with pytest.raises(ConfigError, match="tenants\\[0\\]"):
        parse(json.dumps({"tenants": [{"name": "a", "keys": [text]}]}))


def test_a_file_of_keys_says_what_is_wrong_with_it_but_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# who\n\n{hashed(KEY)}\n  plain-key-of-somebody  \n")
    assert [str(key).startswith("blake2b:") for key in read_keys(str(path))] == [True, False]
    for text, words in (
        ("two words-secret\n", "line 1"),
        ("ok\nblake2b:s3cret\n", "line 2"),
        ("a\0b-secret", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as found:
            parse(json.dumps({"tenants": [{"name": "a", "key_files": [str(path)]}]}))
        assert "key_files" in str(found.value)
        assert words in str(found.value)
        assert "s3cret" not in str(found.value)
        assert "-secret" not in str(found.value)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(json.dumps({"tenants": [{"name": "a", "key_files": [str(path)]}]}))


def test_one_key_is_one_tenant_s_in_whatever_form(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(KEY)
    for first, second in (
        ({"keys": [KEY]}, {"key_files": [str(path)]}),
        ({"keys": [KEY]}, {"keys": [hashed(KEY)]}),
        ({"keys": [hashed(KEY, b"s")]}, {"keys": [hashed(KEY, b"s")]}),
    ):
        with pytest.raises(ConfigError, match="used twice"):
            parse(json.dumps({"tenants": [{"name": "a", **first}, {"name": "b", **second}]}))
    with pytest.raises(ConfigError, match="nobody could ever be it"):
        parse("tenants: [{name: a}]")
    with pytest.raises(ConfigError, match="--salt"):
        parse(json.dumps({"tenants": [{"name": "a", "keys": [hashed(new_key()) for _ in range(1001)]}]}))


def test_the_command_makes_a_key_and_the_line_that_stores_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["key"]) == 0
    key, *_, line = capsys.readouterr().out.split()
    assert Keyring([(line, "a")]).find(key.encode()) == "a"
    monkeypatch.setattr(sys, "stdin", _Text(key + "\n"))
    assert main(["key", "--hash", "--salt", "00ff"]) == 0
    again = capsys.readouterr().out.strip()
    assert again.startswith("blake2b:00ff:")
    assert Keyring([(again, "a")]).find(key.encode()) == "a"
    monkeypatch.setattr(sys, "stdin", _Text("hunter2"))
    assert main(["key", "--hash"]) == 2
    told = capsys.readouterr()
    assert "at least 20" in told.err
    assert "hunter2" not in told.err + told.out
    assert main(["key", "--salt", "xyz"]) == 2


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def read(self) -> str:
        return self.text


# -- at the port --------------------------------------------------------------------------------------------------------


async def test_hashes_and_files_of_keys_open_the_gateway(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# rotated\n{hashed('second-' + KEY)}\nthird-{KEY}\n")
    running = await gateway(await engine(), change=having(tenant("a", hashed(KEY)), tenant("b", key_files=[str(path)])))
    for key, status in ((KEY, 200), (f"second-{KEY}", 200), (f"third-{KEY}", 200), (f"fourth-{KEY}", 401)):
        assert (await ask(running, key)).status == status, key
    assert (await ask(running, hashed(KEY))).status == 401, "the hash is no key"
    rows = {each["tenant"] for each in await series(running, "warmroute_requests")}
    assert rows == {"a", "b"}


async def test_a_connection_may_change_its_key(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=having(tenant("a", "ka"), tenant("b", "kb")))
    async with await Raw.connect(running.port) as client:
        for key, status in (("ka", 200), ("ka", 200), ("kb", 200), ("kc", 401), ("kc", 401), ("ka", 200)):
            answer = await client.ask(request(chat(max_tokens=1), f"Authorization: Bearer {key}"))
            assert answer.status == status
    assert {"reason": "unknown"} in await series(running, "warmroute_auth_failures")


def limited(*tenants: TenantConfig, a_minute: int = 5, **fields: Any) -> Callable[[Config], None]:
    return having(*tenants, auth=Auth(failures_per_minute=a_minute), **fields)


async def test_who_guesses_is_refused_unseen_and_a_good_neighbour_is_not(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=limited(tenant("a", "good"), tenant("b", "late")))
    assert (await ask(running, "good")).status == 200
    for number in range(5):
        assert (await ask(running, f"guess{number}")).status == 401
    for path in ("/v1/chat/completions", "/v1/messages"):
        refused = await ask(running, "guess-more", path=path)
        assert refused.status == 429
        assert 1 <= int(refused.one("retry-after")) <= 60
        assert refused.json()["error"]["type"] == "rate_limit_error"
    listing = await once(running.port, request(b"", "x-api-key: guess", path="/v1/models", method="GET"))
    assert listing.status == 429
    assert (await ask(running, "late")).status == 429, "not even a good key is looked at, if it was never seen"
    assert (await ask(running, None)).status == 401, "who brings none guesses nothing"
    assert (await ask(running, "good")).status == 200, "what was good lately passes on a connection of its own"
    text = await admin(running, "/metrics")
    assert 'warmroute_auth_failures_total{reason="limited"} 4.0' in text
    assert 'warmroute_auth_failures_total{reason="unknown"} 5.0' in text
    assert 'warmroute_auth_failures_total{reason="missing"} 1.0' in text


async def test_without_a_limit_every_guess_is_looked_at(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=limited(tenant("a", "good"), a_minute=0))
    for number in range(100):
        assert (
            await once(running.port, request(b"", f"x-api-key: g{number}", path="/v1/models", method="GET"))
        ).status == 401
    assert (await ask(running, "good")).status == 200


async def test_anonymous_is_nobody_s_way_round_a_wrong_key(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=limited(tenant("a", hashed(KEY)), a_minute=2, anonymous=True))
    assert (await ask(running, None)).status == 200
    assert [(await ask(running, f"guess{number}")).status for number in range(3)] == [401, 401, 429]
    assert (await ask(running, None)).status == 200


# -- pure ---------------------------------------------------------------------------------------------------------------


def test_guesses_fade_within_a_minute_and_each_address_has_its_own() -> None:
    now = [0.0]
    guesses = Guesses[str](6, lambda: now[0])
    for number in range(6):
        guesses.check("10.0.0.1")
        guesses.failed("10.0.0.1", guesses.digest(b"%d" % number))
    with pytest.raises(GuessedTooOften) as found:
        guesses.check("10.0.0.1")
    assert found.value.retry_after == pytest.approx(10.0)
    guesses.check("10.0.0.2")
    now[0] = 10.0
    guesses.check("10.0.0.1")
    now[0] = 60.0
    for _ in range(6):
        guesses.check("10.0.0.1")
        guesses.failed("10.0.0.1", b"x")


def test_what_is_remembered_of_addresses_and_credentials_is_bounded() -> None:
    guesses = Guesses[int](1)
    for number in range(ADDRESSES + 500):
        guesses.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", b"%d" % number)
        guesses.passed(b"good%d" % number, number)
    assert len(guesses._levels) == len(guesses._good) == ADDRESSES
    assert guesses.good(b"good0") is None
    assert guesses.good(b"good%d" % (ADDRESSES + 499)) == ADDRESSES + 499


def test_a_customer_s_whole_network_of_ipv6_is_one_guesser() -> None:
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::9") != network("2001:db8:1:3::1")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"
    assert network("fe80::1%eth0") == "fe80::"
    assert network("") == ""


# -- names of one's own, and content ------------------------------------------------------------------------------------


async def test_a_tenant_s_own_names_reach_its_models(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        having(
            tenant("a", "ka", aliases={"fast": "small", "best": "nick"}),
            tenant("b", "kb", aliases={"fast": "large"}, models=["large", "fast"]),
            tenant("c", "kc", aliases={"mine": "large"}, models=["mine"]),
        )(config)
        config.models = {"large": ModelConfig(aliases=["nick"])}

    small, large = await engine(models=["small"]), await engine(models=["large"])
    running = await gateway(small, large, change=change)
    for key, model, status, served in (
        ("ka", "fast", 200, "small"),
        ("ka", "best", 200, "large"),
        ("kb", "fast", 200, "large"),
        ("kb", "best", 403, None),
        ("kc", "mine", 200, "large"),
        ("kc", "large", 403, None),
        ("kc", "fast", 403, None),
    ):
        answer = await ask(running, key, model=model)
        assert answer.status == status, (key, model)
        if served:
            assert answer.json()["model"] == served
    listed = {}
    for key in ("ka", "kb", "kc"):
        answer = await once(running.port, request(b"", f"x-api-key: {key}", path="/v1/models", method="GET"))
        listed[key] = {each["id"]: each.get("root") for each in answer.json()["data"]}
    assert set(listed["ka"]) == {"small", "large", "nick", "fast", "best"}
    assert listed["ka"]["best"] == "large"
    assert set(listed["kb"]) == {"large", "fast"}
    assert set(listed["kc"]) == {"mine"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: {m: {}}\ntenants: [{name: a, keys: [k], aliases: {m: n}}]", "a model's own name"),
        ("tenants: [{name: a, keys: [k], aliases: {x: y, y: z}}]", "is an alias itself"),
        ("tenants: [{name: a, key: [k]}]", "did you mean 'keys'"),
        ("tenants: [{name: a, keyfiles: [k]}]", "did you mean 'key_files'"),
        ("auth: {failures_per_minute: -1}", "0 for no limit"),
        ("auth: {failures: 1}", "known here: failures_per_minute"),
    ],
)
def test_what_is_wrong_with_tenants_is_told(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text)


async def test_content_is_shown_of_tenants_that_allow_it_alone(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        having(tenant("open", "ko", log_content=True), tenant("closed", "kc"))(config)
        config.doctor.examples = True
        config.doctor.rate = 1000

    running = await gateway(await engine(), change=change, policy="cache_aware")
    for key in ("ko", "kc"):
        for turn in ("it is 10:15:00 now", "it is 10:16:30 now"):
            start = [{"role": "system", "content": turn + " and this stays as it is. " * 60}]
            said = await ask(running, key, f"x-session-id: {key}", messages=[*start, {"role": "user", "content": "hi"}])
            assert said.status == 200
    found = await _findings(running, {"open", "closed"})
    assert {name: example is not None for name, example in found.items()} == {"open": True, "closed": False}


async def _findings(running: Running, names: set[str]) -> dict[str, Any]:
    for _ in range(1500):
        report = await admin(running, "/doctor")
        found = {each["tenant"]: each["example"] for each in report["findings"]}
        if names <= set(found):
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


def test_a_secret_is_a_secret_after_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    assert KEY not in repr(read_keys(str(tmp_path / "keys")))
    assert KEY not in repr(TenantConfig("a", [Secret(KEY)]))
