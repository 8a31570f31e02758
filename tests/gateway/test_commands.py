"""``warmroute explain``, ``workers``, ``sessions``, ``tenants`` as processes, in front of gateways at work."""

from __future__ import annotations

import json
import os
import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.cli import main
from gateway.config import Config, LimitsConfig, Secret, TenantConfig, WorkerConfig
from gateway.run import Running
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import ok
from tests.gateway.talk import admin, chat, once, request, settled
from tests.gateway.terminal import front, run, terminal
from tests.gateway.test_doctor_online import RULES, quick, report, sessions
from tests.gateway.test_events import exact, talking

TOKEN = "adm1n-token"
PROMPT = "Warm routes are kept warm by those who walk them. " * 80
HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/]\u202etxt.exe\u009b31m"
LISTS = ("workers", "sessions", "tenants")


def at(running: Running, *arguments: str) -> tuple[str, ...]:
    """Arguments that name its control plane."""
    return *arguments, "--admin", f"http://127.0.0.1:{running.admin.port}"


def secured(config: Config) -> None:
    config.admin.token = Secret(TOKEN)


def harmless(text: str) -> bool:
    """Nothing in it is obeyed by a terminal."""
    return all(each.isprintable() or each == "\n" for each in text)


async def ask(running: Running, session: str, text: str = PROMPT, *lines: str, **fields: Any) -> str:
    body = chat(max_tokens=4, messages=[{"role": "user", "content": text}], **fields)
    answer = await once(running.port, request(body, f"x-session-id: {session}", *lines))
    assert answer.status == 200
    await settled(running)
    return answer.one("x-warmroute-worker")


@pytest.fixture
def body(tmp_path: Path) -> str:
    """A request that was asked before, and goes on."""
    told = chat(messages=[{"role": "user", "content": PROMPT + "And so on. "}])
    (tmp_path / "request.json").write_text(json.dumps(told))
    return str(tmp_path / "request.json")


# -- explain ------------------------------------------------------------------------------------------------------------


async def test_it_is_told_where_a_request_would_go_and_why(gateway: Begin, engine: StartEngine, body: str) -> None:
    running = await gateway(await engine(), await engine(), await engine(), policy="cache_aware")
    home = await ask(running, "mine")
    told = await run(*at(running, "explain", "-f", body, "--header", "X-Session-ID: mine"))
    assert (told.status, told.err) == (0, "")
    assert f"It would go to {home}: its session is at home there" in told.out
    assert "(cache_aware/home)" in told.out
    assert " ms less than the next, 127.0.0.1:" in told.out
    assert f"held by {home}: " in told.out and "Seen before: " in told.out
    assert "1 turn, last used " in told.out
    assert f"Its home is {home} (placed there by: load)." in told.out
    assert "Its return: back after about " in told.out
    assert "The doctor found no break in it." in told.out
    assert "Belief predicted (3 targets): what was sent there is taken to be there" in told.out
    start = next(at for at, row in enumerate(told.rows) if row[:2] == ["candidate", "total ms"])
    first, second, third = told.rows[start + 1 : start + 4]
    assert first[:2] == ["->", home]
    assert {second[0], third[0]} == {row["name"] for row in await names(running)} - {home}
    assert float(first[2]) < float(second[1]) <= float(third[1])


async def names(running: Running) -> list[Any]:
    return [target for worker in (await admin(running, "/workers"))["workers"] for target in worker["targets"]]


async def test_for_scripts_it_is_what_the_dry_run_answers(gateway: Begin, engine: StartEngine, body: str) -> None:
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    home = await ask(running, "mine")
    command = at(running, "explain", "-f", "-", "--json", "--header", "x-session-id: mine")
    with open(body, "rb") as file:  # noqa: ASYNC230
        told = await run(*command, stdin=file.read())
    route = told.json()
    assert (told.status, route["target"]) == (0, home)
    assert {"decision", "reason", "pair", "session", "candidates"} <= route.keys()
    assert route["mode"] == "text"
    assert 500 < route["best_tokens"] <= route["seen_tokens"] < route["prompt_tokens"]
    for row in route["candidates"]:
        assert (row["rung"], row["rung_reason"]) == ("predicted", "start")


async def test_the_evidence_tells_what_was_seen_and_is_held_no_more(gateway: Begin, engine: StartEngine) -> None:
    """The ceiling is what anybody ever had; a policy that asks the index nothing has no evidence."""
    engines = [await engine(), await engine()]
    running = await gateway(*engines, policy="cache_aware")
    home = await ask(running, "mine")
    other = next(row["name"] for row in await names(running) if row["name"] != home)
    running.index.emptied(running.fleet.workers[home].targets[0].id)
    told = json.dumps(chat(messages=[{"role": "user", "content": PROMPT}])).encode()
    route = (await run(*at(running, "explain", "-f", "-", "--json"), stdin=told)).json()
    assert route["best_tokens"] == 0 and route["seen_tokens"] > 500
    shown = await run(*at(running, "explain", "-f", "-"), stdin=told)
    assert "held by nobody." in shown.out
    assert other in shown.out
    plain = await gateway(*engines, policy="round_robin")
    route = (await run(*at(plain, "explain", "-f", "-", "--json"), stdin=told)).json()
    assert (route["mode"], route["best_tokens"], route["seen_tokens"]) == (None, None, None)
    shown = await run(*at(plain, "explain", "-f", "-"), stdin=told)
    assert "the policy does not need it" in shown.out and "It belongs to no session." in shown.out


async def test_what_events_tell_is_believed_of_prompts_of_ids_alone(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(events=True), await engine(events=True)]
    running = await gateway(*engines, policy="cache_aware")
    ids = list(range(1, 600))
    async with talking(running, *engines) as talk:
        asked = await talk.ask(ids, "mine")
        await exact(running)
    body = json.dumps({"model": "sim", "prompt": ids}).encode()
    command = at(running, "explain", "-f", "-", "--path", "/v1/completions", "--header", "x-session-id: mine")
    route = (await run(*command, "--json", stdin=body)).json()
    rungs = {row["target"]: (row["rung"], row["rung_reason"]) for row in route["candidates"]}
    assert (route["mode"], rungs[asked.worker]) == ("ids", ("exact", "events"))
    told = await run(*command, stdin=body)
    assert f"Model sim, 599 prompt tokens. Seen before: {route['seen_tokens']} " in told.out
    assert f"held by {asked.worker}: {route['best_tokens']} " in told.out
    assert (
        f"Belief exact ({asked.worker}): its own events tell what it holds; events tell all that it holds." in told.out
    )
    text = json.dumps(chat(messages=[{"role": "user", "content": PROMPT}])).encode()
    told = await run(*at(running, "explain", "-f", "-"), stdin=text)
    assert "This prompt is routed by its text, which events cannot be compared with" in told.out


async def test_of_a_pair_it_is_told_who_computes_the_prompt(gateway: Begin, engine: StartEngine, body: str) -> None:
    workers = [WorkerConfig((await engine(role=role)).url, role=role) for role in ("prefill", "decode", "decode")]
    running = await gateway(*workers, policy="cache_aware")
    prefill = workers[0].url.removeprefix("http://")
    told = await run(*at(running, "explain", "-f", body, "--header", "x-session-id: mine"))
    route = (await run(*at(running, "explain", "-f", body, "--header", "x-session-id: mine", "--json"))).json()
    pairs = [row for row in route["candidates"] if row["prefill"] is not None]
    assert {row["prefill"] for row in pairs} == {prefill} and {row["prefill_rung"] for row in pairs} == {"predicted"}
    start = next(at for at, row in enumerate(told.rows) if row[:3] == ["candidate", "prompt by", "total ms"])
    computing = [row[2] if row[0] == "->" else row[1] for row in told.rows[start + 1 : start + 5]]
    assert told.status == 0 and sorted(map(prefill.__eq__, computing)) == [False, False, True, True]
    assert prefill in told.out


async def test_breaks_of_the_session_are_told(gateway: Begin, engine: StartEngine, body: str) -> None:
    running = await gateway(await engine(), policy="cache_aware", change=quick)
    await sessions(running, True, 1)
    await report(running)
    (found,) = (await run(*at(running, "sessions", "--json"))).json()["sessions"]
    told = await run(*at(running, "explain", "-f", body, "--header", "x-session-id: None0"))
    one = await run(*at(running, "sessions", found["id"]))
    for shown in (told.out, one.out):
        assert f"Session {found['id']}" in shown or f"session      {found['id']}" in shown
        assert f"Its prompt broke at character {len(RULES) + 6} of the system prompt: a time or date: " in shown
        assert " tokens lost." in shown


async def test_it_is_made_for_a_tenant_and_a_path(gateway: Begin, engine: StartEngine, tmp_path: Path) -> None:
    def change(config: Config) -> None:
        secured(config)
        config.tenants = [
            TenantConfig("a", [Secret("ka")], policy="random"),
            TenantConfig("b", [Secret("kb")], models=["other"]),
        ]

    running = await gateway(await engine(), change=change)
    file = tmp_path / "r"
    file.write_text(json.dumps({"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}))
    command = at(running, "explain", "-f", str(file), "--path", "/v1/messages", "--token", TOKEN)
    told = await run(*command, "--key", "ka")
    assert told.status == 0 and "by lot (random/draw)" in told.out
    for key, words in (("kb", "sim"), ("kc", "--key")):
        refused = await run(*command, "--key", key)
        assert (refused.status, refused.out, refused.err.count("\n")) == (1, "", 1)
        assert words in refused.err
    nowhere = await run(*at(running, "explain", "-f", str(file), "--path", "/nowhere", "--key", "ka", "--token", TOKEN))
    assert nowhere.status == 1 and "/nowhere is not a path" in nowhere.err


# -- lists --------------------------------------------------------------------------------------------------------------


async def test_workers_are_listed_those_first_that_somebody_should_look_at(
    gateway: Begin, engine: StartEngine, scripted: StartScripted
) -> None:
    good, unknown = await engine(kv_tokens=131_072), await scripted()
    running = await gateway(good, unknown, "http://127.0.0.1:1", ready=False)
    await once(running.port, request(chat(max_tokens=1)))
    await settled(running)
    told = await run(*at(running, "workers"))
    head, *rows = [row for row in told.rows if row[0] in ("worker", *running.fleet.workers)]
    assert head[:8] == ["worker", "state", "in flight", "queue", "wait", "kv use", "kv tokens", "homes"]
    assert rows[0][:2] == ["127.0.0.1:1", "joining"]
    by_name = {row[0]: dict(zip(head, row, strict=False)) for row in rows}
    known = by_name[f"127.0.0.1:{good.port}"]
    assert (known["state"], known["in flight"], known["kv tokens"], known["models"]) == ("ready", "0", "131k", "sim")
    dark = by_name[f"127.0.0.1:{unknown.port}"]
    assert (dark["queue"], dark["kv use"], dark["kv tokens"]) == ("-", "-", "-"), "what is not known is no zero"
    assert "127.0.0.1:1 joining: " in told.out
    assert (await run(*at(running, "workers", "--json"))).json()["workers"][0].keys() >= {"id", "state", "targets"}
    one = await run(*at(running, "workers", f"127.0.0.1:{unknown.port}"))
    assert one.status == 0 and "kv cache     -\n" in one.out and "missing: it " in one.out and "cure: " in one.out
    assert (await run(*at(running, "workers", "127.0.0.1:1", "--json"))).json()["state"] == "joining"


async def test_sessions_are_searched_and_one_is_shown(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.tenants = [TenantConfig("a", [Secret("ka")]), TenantConfig("b", [Secret("kb")])]

    running = await gateway(await engine(), await engine(), change=change, policy="cache_aware")
    for at_ in range(4):
        tenant = "ab"[at_ % 2]
        await ask(running, f"s{at_}", f"{at_} {PROMPT}", f"authorization: Bearer k{tenant}")
    told = (await run(*at(running, "sessions", "--json"))).json()
    assert (told["total"], len(told["sessions"])) == (4, 4)
    first = told["sessions"][0]
    for flags, wanted in (
        (("--tenant", "a"), [row["id"] for row in told["sessions"] if row["tenant"] == "a"]),
        (("--home", first["home"]), [row["id"] for row in told["sessions"] if row["home"] == first["home"]]),
        (("--search", first["id"][4:20].upper()), [first["id"]]),
        (("--tenant", "b", "--limit", "1"), [row["id"] for row in told["sessions"] if row["tenant"] == "b"][:1]),
        (("--search", "nowhere"), []),
    ):
        found = (await run(*at(running, "sessions", *flags, "--json"))).json()
        assert ([row["id"] for row in found["sessions"]], found["total"]) == (wanted, 4), flags
        shown = await run(*at(running, "sessions", *flags))
        assert all(id_ in shown.out for id_ in wanted), flags
    assert "no session is like that" in shown.out
    one = await run(*at(running, "sessions", first["id"]))
    assert f"home         {first['home']} (placed there by: " in one.out
    assert f"tenant       {first['tenant']}\n" in one.out and "held at" in one.out and "last prompt  " in one.out
    none = await run(*at(running, "sessions", "00" * 16))
    assert (none.status, none.out) == (1, "") and "no session is called" in none.err


async def test_tenants_are_listed_with_what_they_use_of_their_limits(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        limits = LimitsConfig(requests_per_minute=600, computed_tokens_per_minute=2_000_000)
        config.tenants = [TenantConfig("a", [Secret("ka")], limits=limits, weight=2), TenantConfig("b", [Secret("kb")])]

    running = await gateway(await engine(), change=change)
    await ask(running, "s", PROMPT, "authorization: Bearer ka")
    told = await run(*at(running, "tenants"))
    head, *rows = told.rows
    a, b = (dict(zip(head, row, strict=True)) for row in rows)
    assert (a["tenant"], a["weight"], a["requests/min"]) == ("a", "2", "1 of 600")
    assert a["computed tokens/min"].endswith(" of 2M")
    assert (b["tenant"], b["requests/min"], b["policy"]) == ("b", "-", "the model's")
    assert [row["name"] for row in (await run(*at(running, "tenants", "--json"))).json()["tenants"]] == ["a", "b"]


async def test_what_is_empty_says_so(gateway: Begin) -> None:
    running = await gateway()
    for name, words in (("workers", "no workers: "), ("sessions", "no sessions")):
        told = await run(*at(running, name))
        assert told.status == 0 and told.out.startswith(words)


async def test_names_that_are_markup_or_commands_of_a_terminal_are_shown_as_what_they_are(
    gateway: Begin, scripted: StartScripted
) -> None:
    """A worker that lists no models takes whatever name a client makes up."""

    def change(config: Config) -> None:
        config.tenants = [TenantConfig(f"t{HOSTILE}", [Secret("ka")])]

    running = await gateway(await scripted(ok(), models=()), change=change, policy="cache_aware")
    tool = {"role": "tool", "tool_call_id": "1", "name": HOSTILE, "content": "x"}
    body = {"model": HOSTILE, "messages": [{"role": "user", "content": PROMPT}, tool]}
    answer = await once(running.port, request(body, "x-session-id: s", "authorization: Bearer ka"))
    assert answer.status == 200
    await settled(running)
    (row,) = (await admin(running, "/sessions"))["sessions"]
    assert (row["model"], row["tenant"]) == (HOSTILE, f"t{HOSTILE}")
    sent = json.dumps(body).encode()
    for arguments in (
        ("workers",),
        ("sessions",),
        ("sessions", row["id"]),
        ("tenants",),
        ("explain", "-f", "-", "--key", "ka", "--header", "x-session-id: s"),
        ("top", "--once"),
    ):
        told = await run(*at(running, *arguments), stdin=sent)
        assert told.status == 0, told
        assert harmless(told.out), arguments
        if arguments[0] in ("sessions", "tenants"):
            assert "\\x1b]0;owned\\x07\\x1b[2J[bold red]x[/]\\u202etxt.exe\\x9b31m" in told.out
    refused = await run(*at(running, "workers", f"w{HOSTILE}"))
    assert refused.status == 1 and harmless(refused.err)
    # What scripts read is as it was, and the same JSON where somebody looks at it.
    assert (await run(*at(running, "tenants", "--json"))).json()["tenants"][0]["name"] == f"t{HOSTILE}"
    async with terminal(*at(running, "tenants", "--json")) as shown:
        assert await shown.ended() == 0
        text = shown.text.replace("\r\n", "")
        assert harmless(text) and json.loads(text)["tenants"][0]["name"] == f"t{HOSTILE}"


async def test_tables_keep_names_whole_and_have_colours_on_a_terminal_only(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    await ask(running, "s")
    (session,) = running.sessions.recent(1)
    assert "\x1b" not in (await run(*at(running, "sessions"))).out
    for width in (100, 40):
        async with terminal(*at(running, "sessions"), width=width) as shown:
            assert await shown.ended() == 0
            assert b"\x1b[1m" in shown.written
            assert session.key.hex() in shown.text and "127.0.0.1:" in shown.text
            assert ("found by" in shown.text) == (width > 100), "what does not fit is left out whole"


# -- what goes wrong ----------------------------------------------------------------------------------------------------


async def test_errors_are_one_line_with_the_cure(
    gateway: Begin, engine: StartEngine, scripted: StartScripted, tmp_path: Path, body: str
) -> None:
    running = await gateway(await engine(), change=secured)
    url = f"http://127.0.0.1:{running.admin.port}"
    other = await scripted(*[ok(b'{"workers":[{"id":7}]}')] * 2, ok(b"<html>"), ok(b"no", status=b"500 Oops"))
    (tmp_path / "broken").write_text('{"model": ')
    (tmp_path / "list").write_text("[]")
    for arguments, words in (
        (("workers", "--admin", "http://127.0.0.1:1"), "start it with 'warmroute serve'"),
        (("workers", "--admin", "127.0.0.1:1"), "no gateway answers at http://127.0.0.1:1"),
        (("workers", "--admin", "ftp://x"), "--admin needs the URL"),
        (("workers", "--admin", "http://me:secret@127.0.0.1:1"), "no name and password"),
        (("workers", "--admin", url), "needs the admin token: set WARMROUTE_ADMIN_TOKEN"),
        (("top", "--once", "--admin", url), "needs the admin token: set WARMROUTE_ADMIN_TOKEN"),
        (("top", "--once", "--admin", "http://127.0.0.1:1"), "start it with 'warmroute serve'"),
        (("top", "--admin", url), "needs a terminal"),
        (("tenants", "--admin", url, "--token", "wrong"), "refuses the admin token"),
        (("tenants", "--admin", url, "--token", "a\nb"), "control characters"),
        (("workers", "--admin", f"http://127.0.0.1:{running.port}"), "it is no gateway's admin port"),
        (("workers", "--admin", other.url), "another version"),
        (("workers", "--json", "--admin", other.url), "$.workers[0].id"),
        (("workers", "--admin", other.url), "does not answer in JSON"),
        (("workers", "--admin", other.url), "answers status 500"),
        (("explain", "-f", str(tmp_path / "none")), "none cannot be read"),
        (("explain", "-f", str(tmp_path)), "cannot be read"),
        (("explain", "-f", str(tmp_path / "broken")), "broken is no JSON object"),
        (("explain", "-f", str(tmp_path / "list")), "give the body of a request"),
        (("explain", "-f", body, "--header", "no colon"), "--header needs NAME: VALUE"),
        (("explain", "-f", body, "--header", "Authorization: Bearer x"), "with --key"),
    ):
        told = await run(*arguments)
        assert (told.status, told.out) == (2, ""), (arguments, told)
        (line,) = told.err.splitlines()
        assert line.startswith(f"warmroute {arguments[0]}: ") and words in line, line
        assert "secret" not in line
    good = await run("workers", "--admin", url, WARMROUTE_ADMIN_TOKEN=TOKEN)
    assert (good.status, good.err) == (0, "")


async def test_a_certificate_that_the_system_trusts_is_trusted(
    gateway: Begin, engine: StartEngine, tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    running = await gateway(await engine())
    async with front(running.admin.port, context) as door:
        url = f"https://127.0.0.1:{door.port}"
        told = await run("workers", "--admin", url, SSL_CERT_FILE=str(tmp_path / "ca.pem"))
        assert told.status == 0 and "ready" in told.out
        told = await run("workers", "--admin", url)
        assert told.status == 2 and "not trusted here" in told.err and "SSL_CERT_FILE" in told.err


async def test_a_reader_that_has_enough_is_no_error(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    for more in ((), ("--json",)):
        reads, writes = os.pipe()
        os.close(reads)
        try:
            told = await run(*at(running, "workers", *more), out=writes)
        finally:
            os.close(writes)
        assert (told.status, told.err) == (0, "")


def test_all_of_them_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in ("explain", "top", *LISTS))
