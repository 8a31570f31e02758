"""Sessions that are ended, moved, forged, crowded out, forgotten and orphaned at the worst moments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given, settings, strategies as st

from gateway.config import Config, TenantConfig, WorkerConfig
from gateway.config_reader import Secret
from gateway.run import Running
from gateway.sessions import Session
from gateway.sticky import LENGTH, Sticky
from load_tests.engine import Engine
from tests.gateway.conftest import Begin, StartEngine
from tests.gateway.talk import Raw, Response, admin, chat, once, request, settled, tell, until

WORDS = "words that take their place in a prompt "


def body(size: int = 1, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": WORDS * size}], **{"max_tokens": 1, **fields})


def named(name: str, *lines: str, **fields: Any) -> bytes:
    return request(body(**fields), f"x-session-id: {name}", *lines)


def ending(name: str, *lines: str) -> bytes:
    return request(None, *lines, method="DELETE", path=f"/v1/sessions/{name}")


def streamed(name: str, tokens: int, *lines: str) -> bytes:
    return named(name, *lines, stream=True, max_tokens=tokens, ignore_eos=True)


def tenants(config: Config) -> None:
    config.tenants = [TenantConfig("a", [Secret("key-a")]), TenantConfig("b", [Secret("key-b")])]


A, B = "authorization: Bearer key-a", "authorization: Bearer key-b"


async def ok(running: Running, data: bytes) -> Response:
    answer = await once(running.port, data)
    assert answer.status == 200, answer.body
    return answer


async def fleet(gateway: Begin, engine: StartEngine, count: int = 2, **options: Any) -> tuple[Running, list[Engine]]:
    change = options.pop("change", None)
    options.setdefault("time_scale", 0.0)
    engines = [await engine(**options) for _ in range(count)]
    return await gateway(*engines, policy="cache_aware", change=change), engines


def session_of(running: Running, name: str, tenant: str = "anonymous") -> Session | None:
    return running.sessions.named(name.encode(), tenant, "sim")


def homes(running: Running) -> int:
    return sum(target.homes for target in running.fleet.targets.values())


def home_of(running: Running, name: str) -> str:
    session = session_of(running, name)
    assert session is not None and session.home is not None
    return running.fleet.targets[session.home].name


# -- DELETE /v1/sessions/{id} -------------------------------------------------------------------------------------------

ODD = [
    "with space", "a/b", "../../etc/passwd", "a%b", "%41", "100%", "q?x=1", "a#b", "a+b", "a;b=c", 'quo"te', "<script>",
    "tab-less", "ünïcödé", "日本語", "\U0001f600", "k" * 256, "0123456789abcdef0123456789abcdef", "\xa0", "-", ".", "..",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD, ids=range(len(ODD)))
async def test_a_session_of_any_name_is_ended_by_that_name_and_by_no_other(
    gateway: Begin, engine: StartEngine, name: str
) -> None:
    running, _ = await fleet(gateway, engine, 1)
    raw = name.encode()
    if len(raw) > 256:
        raw = raw[:256]
    head = b"x-session-id: " + raw
    await ok(running, request(body(), head))
    await ok(running, named("other"))
    assert len(running.sessions) == 2
    for wrong in (raw + b"x", raw[:-1] or b"y", raw.swapcase() if raw.swapcase() != raw else raw + b"y"):
        if wrong != b"other":
            assert (await once(running.port, ending(quote(wrong, safe="")))).status == 404
    # Every byte of it percent-encoded, as a careful client does.
    answer = await once(running.port, ending("".join(f"%{byte:02x}" for byte in raw)))
    assert answer.status == 200
    assert answer.json()["id"] == raw.decode("utf-8", "replace")
    assert (len(running.sessions), homes(running)) == (1, 1)
    assert session_of(running, "other") is not None


@pytest.mark.parametrize(
    "path",
    [
        "%",
        "%2",
        "%zz",
        "%%%",
        "a%00b",
        "%0d%0aX:%20y",
        "%c3%28",
        "%ff",
        "x" * 257,
        "%41" * 300,
        "a/b",
        "/",
        "?id=s",
        "#s",
    ],
)
async def test_what_names_no_session_is_not_found_and_ends_none(gateway: Begin, engine: StartEngine, path: str) -> None:
    running, _ = await fleet(gateway, engine, 1)
    await ok(running, named("s"))
    answer = await once(running.port, ending(path))
    assert answer.status == 404
    json.loads(answer.body)
    assert b"\r\nX: y" not in answer.body
    assert len(running.sessions) == 1


@pytest.mark.parametrize("size", [10_000, 200_000])
async def test_a_huge_name_is_refused(gateway: Begin, engine: StartEngine, size: int) -> None:
    running, _ = await fleet(gateway, engine, 1)
    async with await Raw.connect(running.port) as client:
        await client.send(ending("x" * size))
        assert 400 <= (await client.response()).status < 500
    await ok(running, named("s"))


async def test_of_two_tenants_sessions_of_one_name_only_its_own_is_ended(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine, 1, change=tenants)
    tokens = {}
    for key in (A, B):
        await ok(running, named("same", key))
        tokens[key] = (await ok(running, request(body(2), key))).one("x-warmroute-session")
    ids = {session.tenant: session.key.hex() for session in running.sessions.all() if session.source != "content"}
    for other in (tokens[A], ids["a"], ids["a"].upper()):
        assert (await once(running.port, ending(other, B))).status == 404
    assert len(running.sessions) == 4
    assert (await once(running.port, ending("same", B))).status == 200
    assert (await once(running.port, ending("same", B))).status == 404
    assert session_of(running, "same", "a") is not None
    assert session_of(running, "same", "b") is None
    assert (await once(running.port, ending(tokens[A], A))).status == 200
    assert (await once(running.port, ending(ids["a"].upper(), A))).status == 200
    assert [(session.tenant, session.source) for session in running.sessions.all()] == [("b", "content")]


async def test_a_name_ends_its_sessions_with_every_model(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine, 1, models=["sim", "other"])
    for model in ("sim", "other"):
        await ok(running, request({**body(), "model": model}, "x-session-id: s"))
    assert len(running.sessions) == 2
    assert (await once(running.port, ending("s"))).status == 200
    assert len(running.sessions) == 0


async def test_ended_twice_at_once_it_ends_once(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine, 1)
    await ok(running, named("s"))
    answers = await asyncio.gather(*(once(running.port, ending("s")) for _ in range(8)))
    assert sorted(answer.status for answer in answers) == [200] + [404] * 7
    assert (len(running.sessions), homes(running)) == (0, 0)


async def test_ended_while_it_streams_and_begun_again_the_new_one_stays(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.2) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        await client.send(streamed("s", 150))
        await client.head()
        assert (await once(running.port, ending("s"))).status == 200
        assert len(running.sessions) == 0
        await ok(running, named("s"))
        new = session_of(running, "s")
        assert new is not None
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
    await settled(running)
    assert session_of(running, "s") is new
    assert (new.running, new.turns, homes(running)) == (0, 1, 1)
    assert (await once(running.port, ending("s"))).status == 200
    await until(lambda: not sum(each.stats()["sessions"] for each in engines))


async def test_a_session_ends_with_its_sub_agents_that_have_no_name_of_their_own(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await fleet(gateway, engine)
    agent = ["x-claude-code-session-id: p", "x-claude-code-agent-id: c"]
    await ok(running, request(body(), agent[0]))
    await ok(running, request(body(), *agent))
    below = [agent[0], "x-claude-code-agent-id: d", "x-claude-code-parent-agent-id: c"]
    await ok(running, request(body(), *below))
    assert len(running.sessions) == 3
    assert (await once(running.port, ending("p"))).status == 200
    assert len(running.sessions) == 0
    # One with a name of its own goes on.
    await ok(running, request(body(), "x-session-id: p"))
    await ok(running, request(body(), "x-session-id: c", "x-parent-session-id: p"))
    assert (await once(running.port, ending("p"))).status == 200
    (child,) = running.sessions.all()
    _, told = await tell(running, "GET", f"/sessions/{child.key.hex()}")
    assert told["parent"] is not None


# -- x-session-final ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("x-session-final: 1", True),
        ("X-Session-Final: TRUE", True),
        ("X-SESSION-FINAL: Yes", True),
        ("x-session-final:   on   ", True),
        ("x-session-final: 0", False),
        ("x-session-final: false", False),
        ("x-session-final: no", False),
        ("x-session-final:", False),
        ("x-session-final: 11", False),
        ("x-session-final: true, true", False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_ends_the_session_with_its_answer(
    gateway: Begin, engine: StartEngine, line: str, ends: bool, stream: bool
) -> None:
    running, _ = await fleet(gateway, engine, 1)
    await ok(running, named("s"))
    await ok(running, named("s", line, stream=stream))
    await settled(running)
    assert (len(running.sessions), homes(running)) == ((0, 0) if ends else (1, 1))
    await ok(running, named("s"))
    assert len(running.sessions) == 1


@pytest.mark.parametrize("fault", ["error500", "error503", "queue_full", "reset"])
async def test_a_final_request_that_fails_leaves_its_session_for_another_try(
    gateway: Begin, engine: StartEngine, fault: Any
) -> None:
    running, engines = await fleet(gateway, engine)
    await ok(running, named("s"))
    home = home_of(running, "s")
    for each in engines:
        each.faults.add(fault, count=None)
    answer = await once(running.port, named("s", "x-session-final: 1"))
    assert answer.status >= 500
    assert session_of(running, "s") is not None
    for each in engines:
        each.faults.clear()
    await asyncio.sleep(0.3)
    again = await ok(running, named("s", "x-session-final: 1"))
    assert len(running.sessions) == 0
    assert (home, again.status) == (home, 200)


async def test_a_final_request_that_is_refused_leaves_its_session(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine, context_length=256)
    await ok(running, named("s"))
    answer = await once(running.port, request(body(100), "x-session-id: s", "x-session-final: 1"))
    assert answer.status == 400
    assert session_of(running, "s") is not None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_its_final_request_leaks_nothing(
    gateway: Begin, engine: StartEngine, stream: bool
) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.5) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        await client.send(named("s", "x-session-final: 1", stream=stream, max_tokens=2000, ignore_eos=True))
        await until(lambda: sum(each.stats()["running"] for each in engines) == 1)
        client.vanish()
    await settled(running)
    await until(lambda: not sum(each.stats()["running"] for each in engines))
    found = session_of(running, "s")
    assert found is None or found.running == 0
    # One that was never answered is nowhere at home.
    assert homes(running) == sum(session.home is not None for session in running.sessions.all())
    if found is not None:
        assert (await once(running.port, ending("s"))).status == 200
    await until(lambda: not sum(each.stats()["sessions"] for each in engines))


async def test_a_final_request_beside_another_of_its_session_harms_it_not(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine("sglang", session_refs=True, time_scale=0.3) for _ in range(2)]
    running = await gateway(*engines, policy="cache_aware")
    async with await Raw.connect(running.port) as client:
        await client.send(streamed("s", 150))
        await client.head()
        await ok(running, named("s", "x-session-final: 1"))
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
        assert b'"error"' not in data
    await settled(running)
    assert (len(running.sessions), homes(running)) == (0, 0)
    await until(lambda: not sum(each.stats()["sessions"] for each in engines))


# -- POST /sessions/{id}/move -------------------------------------------------------------------------------------------


async def post(running: Running, path: str, data: bytes) -> tuple[int, Any]:
    """The admin port, with a body that need not be JSON."""
    url = f"http://127.0.0.1:{running.admin.port}{path}"
    async with aiohttp.ClientSession() as http, http.post(url, data=data) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"\xff\xfe", "JSON"),
        (b'{"to": 3}', "to"),
        (b'{"to": ["x"]}', "to"),
        (b'{"to": "nobody"}', "nobody"),
        (b'{"to": ""}', "target"),
        (b'{"to": "x", "force": true}', "to"),
        (b'{"target": "x"}', "to"),
        (b'{"to": "' + b"x" * 100_000 + b'"}', "x"),
    ],
)
async def test_a_move_that_is_not_understood_is_refused_and_says_why(
    gateway: Begin, engine: StartEngine, data: bytes, says: str
) -> None:
    running, _ = await fleet(gateway, engine)
    await ok(running, named("s"))
    session, before = session_of(running, "s"), home_of(running, "s")
    assert session is not None
    status, told = await post(running, f"/sessions/{session.key.hex()}/move", data)
    assert status == 400
    assert says in told["error"]["message"]
    assert home_of(running, "s") == before


@pytest.mark.parametrize("id_", ["00", "zz", "0" * 32, "s", "%00", "0" * 2_000])
async def test_a_session_that_is_not_known_cannot_be_moved(gateway: Begin, engine: StartEngine, id_: str) -> None:
    running, _ = await fleet(gateway, engine)
    await ok(running, named("s"))
    status, told = await post(running, f"/sessions/{id_}/move", b"{}")
    assert status in (400, 404)
    assert told["error"]["message"]
    assert homes(running) == 1


async def test_a_body_of_many_levels_is_refused_and_no_error_of_the_control_plane(
    gateway: Begin, engine: StartEngine
) -> None:
    """Every verb that takes a body: POST /workers, PATCH /workers/{id}, POST /sessions/{id}/move."""
    running, _ = await fleet(gateway, engine)
    await ok(running, named("s"))
    session = session_of(running, "s")
    assert session is not None
    worker = next(iter(running.fleet.workers))
    base = f"http://127.0.0.1:{running.admin.port}"
    seen = []
    async with aiohttp.ClientSession() as http:
        for method, path in (
            ("POST", f"/sessions/{session.key.hex()}/move"),
            ("POST", "/workers"),
            ("PATCH", f"/workers/{worker}"),
        ):
            async with http.request(method, base + path, data=b'{"to":' + b"[" * 100_000) as answer:
                seen.append((answer.status, answer.content_type))
    assert seen == [(400, "application/json")] * 3


async def move(running: Running, name: str, to: str | None) -> tuple[int, Any]:
    session = session_of(running, name)
    assert session is not None
    path = f"/sessions/{session.key.hex()}/move"
    return await tell(running, "POST", path, None if to is None else {"to": to})


async def migrations(running: Running) -> float:
    rows = (await admin(running, "/metrics")).splitlines()
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if "migrations_total{" in row)


async def test_targets_that_cannot_have_a_session_refuse_it(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(models=[model], time_scale=0.0) for model in ("sim", "sim", "sim", "other")]
    running = await gateway(*engines, policy="cache_aware")
    await ok(running, named("s"))
    home = home_of(running, "s")
    mine = [each for each in engines[:3] if not each.url.endswith(home)]
    drained, killed, other = [each.url.removeprefix("http://") for each in (*mine, engines[3])]
    assert (await tell(running, "POST", f"/workers/{drained}/drain"))[0] == 202
    await mine[1].kill()
    await until(lambda: running.fleet.workers[killed].state.value == "down")
    for to, says in ((other, "model"), (drained, "draining"), (killed, "down")):
        status, told = await move(running, "s", to)
        assert status == 400
        assert says in told["error"]["message"]
        assert home_of(running, "s") == home
    # Nobody is left that could have it instead.
    status, told = await move(running, "s", None)
    assert (status, home_of(running, "s")) == (503, home)
    assert await migrations(running) == 0
    # At home it stays where it is, which is no move.
    assert (await move(running, "s", home))[0] == 200
    assert await migrations(running) == 0


async def test_a_prefill_engine_is_nobody_s_home(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(role=role, time_scale=0.0) for role in ("prefill", "decode", "decode")]
    roles = ("prefill", "decode", "decode")
    workers = [WorkerConfig(each.url, role=role) for each, role in zip(engines, roles, strict=True)]
    running = await gateway(*workers, policy="cache_aware")
    await ok(running, named("s", max_tokens=4))
    home = home_of(running, "s")
    status, told = await move(running, "s", engines[0].url.removeprefix("http://"))
    assert (status, home_of(running, "s")) == (400, home)
    assert "prompts" in told["error"]["message"]
    to = next(each.url.removeprefix("http://") for each in engines[1:] if not each.url.endswith(home))
    assert (await move(running, "s", to))[0] == 200
    assert (await ok(running, named("s", max_tokens=4))).one("x-warmroute-worker") == to


async def test_a_move_while_its_turn_runs_lets_it_end_and_holds_for_the_next(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await fleet(gateway, engine, 3, time_scale=0.3)
    await ok(running, named("s"))
    names = [target.name for target in running.fleet.targets.values()]
    async with await Raw.connect(running.port) as client:
        await client.send(streamed("s", 120))
        head = await client.head()
        home = dict(head.fields)["x-warmroute-worker"]
        first, second = [name for name in names if name != home]
        for to in (first, second, first):
            status, told = await move(running, "s", to)
            assert (status, told["home"]) == (200, to)
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
        assert b'"error"' not in data
    for _ in range(3):
        assert (await ok(running, named("s"))).one("x-warmroute-worker") == first
    assert await migrations(running) == 3
    assert homes(running) == 1
    # Without a name the policy says where to, and it is not where it is.
    assert (await move(running, "s", None))[0] == 200
    assert home_of(running, "s") != first


async def test_a_session_removed_by_the_operator_while_it_streams(gateway: Begin, engine: StartEngine) -> None:
    running, _ = await fleet(gateway, engine, 2, time_scale=0.3)
    async with await Raw.connect(running.port) as client:
        await client.send(streamed("s", 100))
        await client.head()
        session = session_of(running, "s")
        assert session is not None
        assert (await tell(running, "DELETE", f"/sessions/{session.key.hex()}"))[0] == 200
        assert (await tell(running, "DELETE", f"/sessions/{session.key.hex()}"))[0] == 404
        assert (await tell(running, "POST", f"/sessions/{session.key.hex()}/move"))[0] == 404
        data = b""
        while b"[DONE]" not in data:
            data += await client.reader.readuntil(b"\n")
    assert (len(running.sessions), homes(running)) == (0, 0)


# -- tokens -------------------------------------------------------------------------------------------------------------

STICKY = Sticky(b"one secret")
SEALED = STICKY.seal(7, b"k" * 16, 99)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_made_up_token_says_anything(token: bytes) -> None:
    assert STICKY.open(7, token) is None


@given(st.integers(0, LENGTH - 1), st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_token_with_one_changed_byte_says_nothing(at: int, byte: int) -> None:
    forged = SEALED[:at] + bytes([byte]) + SEALED[at + 1 :]
    found = STICKY.open(7, forged)
    try:
        same = urlsafe_b64decode(forged + b"=") == urlsafe_b64decode(SEALED + b"=")
    except ValueError:
        same = False
    assert (found is not None) is same


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_token_says_what_was_sealed_to_its_tenant_and_its_gateways_only(key: bytes, home: int, tenant: int) -> None:
    token = STICKY.seal(tenant, key, home)
    assert len(token) == LENGTH
    assert STICKY.open(tenant, token) == (key, home)
    assert STICKY.open(tenant ^ 1, token) is None
    assert Sticky(b"another secret").open(tenant, token) is None
    assert Sticky(b"one secret").open(tenant, token) == (key, home)
    assert all(STICKY.open(tenant, token[:cut]) is None for cut in range(LENGTH))
    assert STICKY.open(tenant, token + b"=") is None


def test_tokens_show_nothing_of_what_they_say() -> None:
    tokens = [STICKY.seal(1, bytes([number]) * 16, 5) for number in range(64)]
    raw = [urlsafe_b64decode(token + b"=") for token in tokens]
    for at in range(32):
        assert len({each[at] for each in raw}) > 8, "no place is the same in all that share a home"
    assert not any(bytes([number]) * 4 in each for number, each in enumerate(raw) if number)


async def test_a_token_that_is_forged_foreign_or_cut_is_as_if_it_were_not_there(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await fleet(gateway, engine, 2, change=tenants)
    mine = await ok(running, request(body(3), A))
    token = mine.one("x-warmroute-session")
    foreign = Sticky(b"not ours").seal(0, b"k" * 16, 0).decode()
    flipped = token[:10] + ("A" if token[10] != "A" else "B") + token[11:]
    for key, bad in (
        (B, token), (A, foreign), (A, flipped), (A, token[:-1]), (A, token + "A"), (A, token.lower()), (A, ""),
        (A, "x" * 5000), (A, "\xff" * 43), (A, "=" * 43), (A, token[::-1]), (A, f'"{token}"'),
    ):  # fmt: skip
        before = len(running.sessions)
        answer = await ok(running, request(body(4 + before), key, f"x-warmroute-session: {bad}"))
        assert answer.one("x-warmroute-session-source") == "content"
        assert answer.one("x-warmroute-session") != token
        assert len(running.sessions) == before + 1
    good = await ok(running, request(body(99), A, f"X-Warmroute_Session: {token}"))
    assert good.one("x-warmroute-session-source") == "sticky"
    assert good.one("x-warmroute-worker") == mine.one("x-warmroute-worker")


@pytest.mark.parametrize("cookie", [True, False])
async def test_a_cookie_counts_only_where_cookies_are_told(gateway: Begin, engine: StartEngine, cookie: bool) -> None:
    def change(config: Config) -> None:
        config.sessions.cookie = cookie

    running, _ = await fleet(gateway, engine, 2, change=change)
    first = await ok(running, request(body(3)))
    token = first.one("x-warmroute-session")
    assert bool(first.all("set-cookie")) is cookie
    if cookie:
        told = first.one("set-cookie")
        assert told.startswith(f"x-warmroute-session={token};")
        assert "HttpOnly" in told
    second = await ok(running, request(body(9), f"cookie: a=b; x-warmroute-session={token}; c"))
    assert second.one("x-warmroute-session-source") == ("sticky" if cookie else "content")
    for bad in (f"x-warmroute-session{token}", f"y-x-warmroute-session={token}", "x-warmroute-session=", ";;=;"):
        answer = await ok(running, request(body(20), f"cookie: {bad}"))
        assert answer.one("x-warmroute-session-source") == "content"


async def test_a_token_goes_on_after_its_session_was_forgotten_and_leads_to_where_it_was(
    gateway: Begin, engine: StartEngine
) -> None:
    running, _ = await fleet(gateway, engine, 4)
    for number in range(8):
        first = await ok(running, request(body(3 + number)))
        token, worker = first.one("x-warmroute-session"), first.one("x-warmroute-worker")
        assert (await once(running.port, ending(token))).status == 200
        assert (await once(running.port, ending(token))).status == 404
        again = await ok(running, request(body(30 + number), f"x-warmroute-session: {token}"))
        assert again.one("x-warmroute-worker") == worker
    assert len(running.sessions) == homes(running) == 8


# -- engines that die ---------------------------------------------------------------------------------------------------

StartProcess = Callable[[], Awaitable[tuple[str, asyncio.subprocess.Process]]]


@pytest.fixture
async def process() -> AsyncIterator[StartProcess]:
    """Starts engines in processes of their own: the address and the process of each."""
    started: list[asyncio.subprocess.Process] = []

    async def begin() -> tuple[str, asyncio.subprocess.Process]:
        made = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "load_tests.engine",
            "--port",
            "0",
            "--time-scale",
            "0.3",
            stdout=asyncio.subprocess.PIPE,
        )
        started.append(made)
        assert made.stdout is not None
        line = (await asyncio.wait_for(made.stdout.readline(), 20)).decode()
        return "http://" + line.split("http://", 1)[1].split()[0].rstrip("/"), made

    yield begin
    for each in started:
        if each.returncode is None:
            each.kill()
        await each.wait()


async def test_an_engine_killed_in_the_middle_of_streams_loses_those_and_no_session(
    gateway: Begin, process: StartProcess
) -> None:
    engines = dict([await process() for _ in range(3)])
    running = await gateway(*engines, policy="cache_aware")
    names = [f"s{number}" for number in range(12)]
    for name in names:
        await ok(running, named(name))
    victim = home_of(running, "s0")
    there = [name for name in names if home_of(running, name) == victim]
    assert len(there) == 4
    clients = [await Raw.connect(running.port) for _ in there]
    for client, name in zip(clients, there, strict=True):
        await client.send(streamed(name, 5000))
        assert (await client.head()).status == 200
    os.kill(engines[f"http://{victim}"].pid, signal.SIGKILL)
    for client in clients:
        rest = await client.rest()
        assert b'"error"' in rest, "a client is told that its answer was cut"
        assert b"[DONE]" not in rest
        client.vanish()
    await settled(running)
    for _ in range(2):
        workers = {name: (await ok(running, named(name))).one("x-warmroute-worker") for name in names}
        assert victim not in workers.values()
    assert {name: home_of(running, name) for name in names} == workers
    assert homes(running) == len(running.sessions) == 12
    assert max(target.homes for target in running.fleet.targets.values()) <= 8
    assert all(session.running == 0 for session in running.sessions.all())


async def test_an_engine_that_starts_anew_has_no_sessions_at_home_until_they_come(
    gateway: Begin, engine: StartEngine
) -> None:
    running, engines = await fleet(gateway, engine, 2)
    names = [f"s{number}" for number in range(8)]
    for name in names:
        await ok(running, named(name))
    await engines[0].restart(0.5)
    target = next(t for t in running.fleet.targets.values() if t.worker.url == engines[0].url)
    await until(lambda: target.epoch > 0 and target.worker.state.value == "ready")
    assert target.homes == 0
    for name in names:
        await ok(running, named(name))
    assert homes(running) == len(running.sessions) == 8


# -- a full store, and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_ten_places_for_a_hundred_clients_are_ten(gateway: Begin, engine: StartEngine, dialect: str) -> None:
    def change(config: Config) -> None:
        config.sessions.max = 10

    options = {"session_refs": True} if dialect == "sglang" else {}
    engines = [await engine(dialect, time_scale=0.0, **options) for _ in range(3)]
    running = await gateway(*engines, policy="cache_aware", change=change)
    most = 0

    async def client(number: int) -> None:
        nonlocal most
        lines = {
            0: [f"x-session-id: {number}"],
            1: [],
            2: [f"x-claude-code-session-id: {number // 8}", f"x-claude-code-agent-id: {number}"],
            3: [f"x-session-id: {number}", f"x-parent-session-id: {number - 3}"],
        }[number % 4]
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number} " + WORDS * 8}]
        async with await Raw.connect(running.port) as connection:
            for turn in range(5):
                ends = ["x-session-final: 1"] if (number + turn) % 11 == 0 else []
                fields = {"messages": messages, "max_tokens": 2, "stream": turn % 2 == 1}
                answer = await connection.ask(request(chat(**fields), *lines, *ends))
                assert answer.status == 200
                most = max(most, len(running.sessions))
                messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": f"on {turn}"}]

    await asyncio.gather(*(client(number) for number in range(100)))
    await settled(running)
    assert most <= 10
    live = list(running.sessions.all())
    assert len(live) <= 10
    assert homes(running) == sum(session.home is not None for session in live)
    running.sessions.ends.check()
    assert len(running.sessions.ends) <= 6 * 10
    assert running.sessions.symbol_bytes == sum(len(session.pages.symbols) for session in live)
    assert f"warmroute_sessions_dropped {running.sessions.dropped}" in await admin(running, "/metrics")
    assert running.sessions.dropped > 80
    if dialect == "sglang":
        await until(lambda: sum(each.stats()["sessions"] for each in engines) <= len(live))
    for session in live:
        running.sessions.drop(session)
    assert (homes(running), running.sessions.symbol_bytes, len(running.sessions.ends)) == (0, 0, 0)


async def test_a_session_is_not_idle_while_a_request_of_it_runs(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.sessions.idle = 0.4

    running, _ = await fleet(gateway, engine, 2, time_scale=0.3, change=change)
    await ok(running, named("idle"))
    async with await Raw.connect(running.port) as client:
        await client.send(streamed("s", 9000))
        await client.head()
        session = session_of(running, "s")
        assert session is not None
        for _ in range(6):
            await asyncio.sleep(0.3)
            running.gateway.sweep()
            assert session.running == 1
            assert session_of(running, "s") is session
            assert not session.gone
        assert session_of(running, "idle") is None
        client.vanish()
    await settled(running)
    await until(lambda: session_of(running, "s") is None, 3)
    assert (len(running.sessions), homes(running), running.sessions.expired) == (0, 0, 2)


# -- many requests of one session at once -------------------------------------------------------------------------------


@pytest.mark.parametrize("named_by", ["name", "content", "token", "response"])
async def test_a_fan_out_of_one_session_stays_one_session_with_one_home(
    gateway: Begin, engine: StartEngine, named_by: str
) -> None:
    """It may spill to others; that moves nothing."""
    running, _ = await fleet(gateway, engine, 4, time_scale=0.2)
    start: list[dict[str, Any]] = [{"role": "user", "content": "Do these things at once. " * 40}]

    def asking(messages: list[dict[str, Any]], known: dict[str, str]) -> bytes:
        if named_by == "response":
            fields = {"model": "sim", "input": messages[-1]["content"], "max_output_tokens": 40, **known}
            return request(fields, path="/v1/responses")
        lines = ["x-session-id: fan"] if named_by == "name" else []
        lines += [f"x-warmroute-session: {known['token']}"] if named_by == "token" and known else []
        return request(chat(messages=messages, max_tokens=40, ignore_eos=True), *lines)

    first = await ok(running, asking(start, {}))
    home = first.one("x-warmroute-worker")
    known = {"previous_response_id": first.json()["id"]} if named_by == "response" else {}
    if named_by == "token":
        known = {"token": first.one("x-warmroute-session")}
    said = {"role": "assistant", "content": "I do."}
    branches = [[*start, said, {"role": "user", "content": f"thing {number} " * 30}] for number in range(8)]
    answers = await asyncio.gather(*(ok(running, asking(branch, known)) for branch in branches))
    workers = [answer.one("x-warmroute-worker") for answer in answers]
    await settled(running)
    if named_by == "response":
        assert set(workers) == {home}, "its state is there alone"
    assert [session.turns for session in running.sessions.all()] == [9]
    assert homes(running) == 1
    after = await ok(running, asking([*branches[7], said, {"role": "user", "content": "and now?"}], known))
    assert after.one("x-warmroute-worker") == home
    assert (len(running.sessions), homes(running)) == (1, 1)
