"""The live feed, and the lists beside it, over real sockets: what they tell, to how many, and when they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from hypothesis import given, strategies as st

from gateway import door, live
from gateway.config import Config, LimitsConfig, Secret, TenantConfig, WorkerConfig
from gateway.metrics import Counter
from gateway.run import Running
from gateway.verdict import verdict
from gateway.windows import Total, quantile
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import ok
from tests.gateway.talk import Raw, admin, chat, once, request, tell, until

SECONDS = 20.0
TOKEN = "adm1n-token"
BEARER = f"authorization: Bearer {TOKEN}"
PROMPT = "Warm routes are kept warm by those who walk them. " * 80
Event = dict[str, Any]


class Feed:
    """A watcher that keeps what it was told."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.tiles: dict[str, Any] = {}
        self.shown: list[Any] = []

    async def next(self) -> Event:
        """The next event."""
        data = b""
        async with asyncio.timeout(SECONDS):
            while not data.endswith(b"\n\n"):
                line = await self.answer.content.readline()
                assert line, "the feed ended"
                data += line
        assert data.startswith(b"data: ")
        told: Event = json.loads(data[6:])
        fleet = told["fleet"]
        if fleet["whole"]:
            self.tiles = {}
        self.tiles.update({tile["name"]: tile for tile in fleet["tiles"]})
        for name in fleet["gone"]:
            del self.tiles[name]
        self.shown += told["requests"]["shown"]
        return told

    async def until(self, wanted: Any) -> Event:
        """The first event of which ``wanted`` is true."""
        async with asyncio.timeout(SECONDS):
            while True:
                told = await self.next()
                if wanted(told):
                    return told


@asynccontextmanager
async def watching(running: Running, query: str = "", token: str | None = None) -> AsyncIterator[Feed]:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    # A line is a whole event.
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 22) as http,
        http.get(f"http://127.0.0.1:{running.admin.port}/live{query}", headers=headers) as answer,
    ):
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        yield Feed(answer)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events come faster than an operator would like."""
    monkeypatch.setattr(live, "PERIOD", 0.05)


def secured(config: Config) -> None:
    config.admin.token = Secret(TOKEN)


async def ask(running: Running, session: str, text: str = PROMPT, **fields: Any) -> None:
    body = chat(max_tokens=4, messages=[{"role": "user", "content": text}], **fields)
    answer = await once(running.port, request(body, f"x-session-id: {session}"))
    assert answer.status == 200


# -- what is told -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("often")
async def test_what_is_told_is_what_the_engines_count(gateway: Begin, engine: StartEngine) -> None:
    engines = [await engine(), await engine()]
    running = await gateway(*engines, policy="cache_aware")
    await ask(running, "before")
    async with watching(running) as feed:
        first = await feed.next()
        assert first["fleet"]["whole"]
        assert set(feed.tiles) == {f"127.0.0.1:{each.port}" for each in engines}
        assert first["hits"]["rate"] is None, "what was before anybody looked is of another time"
        before = [each.stats() for each in engines]
        for turn in range(6):
            await ask(running, f"s{turn % 2}", PROMPT + "and so on " * turn, stream=turn % 2 == 0)
        told = await feed.until(lambda told: told["requests"]["window"] == 6)
        after = [each.stats() for each in engines]
        moved = {
            name: sum(now[name] - then[name] for now, then in zip(after, before, strict=True))
            for name in ("prompt_tokens", "cached_tokens")
        }
        assert told["hits"]["prompt_tokens"] == moved["prompt_tokens"] > 0
        assert told["hits"]["cached_tokens"] == moved["cached_tokens"] > 0
        assert told["hits"]["rate"] == pytest.approx(moved["cached_tokens"] / moved["prompt_tokens"], abs=1e-3)
        assert told["hits"]["predicted"] <= told["hits"]["best"] <= told["hits"]["ceiling"] <= 1
        assert told["ttft"]["all"]["requests"] == 3
        assert sum(row["requests"] for row in told["ttft"]["by_hit"].values()) == 3
        assert sum(told["requests"]["reasons"].values()) == 6
        assert not told["fleet"]["whole"]
        assert {tile["homes"] for tile in feed.tiles.values()} >= {1}
        assert told["sessions"]["total"] == 3
        assert told["config"]["generation"] == 0
        (tenant,) = told["tenants"]
        assert (tenant["name"], tenant["requests"], tenant["failed"]) == ("anonymous", 6, 0)
        rows = feed.shown
        assert len(rows) == 6
        for row in rows:
            assert row["target"] in feed.tiles
            assert (row["outcome"], row["status"], row["policy"]) == ("ok", 200, "cache_aware")
            assert row["reason"]
            assert row["prompt_tokens"] > row["cached_tokens"] >= 0
            status, _ = await tell(running, "GET", f"/sessions/{row['session']}")
            assert status == 200


@pytest.mark.usefixtures("often")
async def test_tiles_are_told_again_only_when_they_change_and_when_they_go(
    gateway: Begin, engine: StartEngine, scripted: StartScripted
) -> None:
    quiet, busy = await scripted(), await engine()
    running = await gateway(quiet, busy)
    async with watching(running) as feed:
        await feed.next()
        assert len(feed.tiles) == 2
        name = quiet.url.removeprefix("http://")
        for _ in range(10):
            told = await feed.next()
            assert name not in [tile["name"] for tile in told["fleet"]["tiles"]]
        status, _ = await tell(running, "PATCH", f"/workers/{name}", {"state": "draining"})
        assert status == 200
        await feed.until(lambda told: feed.tiles[name]["state"] == "draining")
        await tell(running, "DELETE", f"/workers/{name}")
        told = await feed.until(lambda told: told["fleet"]["gone"])
        assert told["fleet"]["gone"] == [name]
        assert len(feed.tiles) == 1
        async with watching(running) as later:
            assert (await later.next())["fleet"]["whole"]
            assert later.tiles.keys() == feed.tiles.keys()


@pytest.mark.usefixtures("often")
async def test_holdings_are_told_by_groups_of_sessions_that_start_alike(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tiles.REGROUP", 0.0)
    running = await gateway(await engine(), await engine(), policy="cache_aware")
    for number in range(3):
        await ask(running, f"a{number}", "A" * 3000 + str(number))
        await ask(running, f"b{number}", "B" * 3000 + str(number))
    async with watching(running, "?events=1") as feed:
        told = await feed.next()
        assert [group["sessions"] for group in told["groups"]] == [3, 3]
        assert len({group["start"] for group in told["groups"]}) == 2
        held = {group["place"]: 0 for group in told["groups"]}
        for tile in feed.tiles.values():
            for place, tokens in tile["groups"]:
                held[place] += tokens
        assert held == {group["place"]: group["tokens"] for group in told["groups"]}
        assert "AAAA" not in json.dumps(told)
        assert await feed.answer.content.read() == b"", "it ends after as many as were asked for"


async def test_a_fleet_that_cannot_serve_is_called_so(gateway: Begin) -> None:
    running = await gateway(WorkerConfig("http://127.0.0.1:9"), ready=False)
    async with watching(running, "?events=1") as feed:
        told = await feed.next()
        assert told["verdict"]["level"] == "bad"
        assert told["verdict"]["lines"][0]["text"] == "None of 1 worker is ready"
        (tile,) = feed.tiles.values()
        assert (tile["name"], tile["state"]) == ("127.0.0.1:9", "joining")


def test_what_is_wrong_is_said_the_worst_first() -> None:
    well: Event = {
        "pressure": {"rung": "none"},
        "config": {"last_reload_ok": True},
        "queue": {"waiting": 0},
        "requests": {"window": 100, "failed": 0},
        "doctor": None,
        "hits": {"prompt_tokens": 10_000, "rate": 0.8, "predicted": 0.8, "best": 0.85, "ceiling": 0.9},
    }
    tile = {"name": "a", "worker": "a", "state": "ready", "rung": "exact"}
    assert verdict(well, [tile]) == {"level": "ok", "lines": []}

    def told(*tiles: Event, **parts: Any) -> tuple[str, str]:
        said = verdict({**well, **parts}, tiles or (tile,))
        return said["level"], said["lines"][0]["text"]

    down = {**tile, "name": "b", "worker": "b", "state": "down"}
    assert told(tile, down, queue={"waiting": 3}) == ("bad", "1 of 2 workers down")
    assert told(queue={"waiting": 3}) == ("warn", "3 requests waiting: every engine that could serve is full")
    assert told({**tile, "breaker_reason": "faults"})[0] == "warn"
    assert told({**tile, "rung": "none"})[1].startswith("a: holding less")
    assert told(pressure={"rung": "bulk"})[0] == "bad"
    assert told(config={"last_reload_ok": False})[0] == "warn"
    assert told(requests={"window": 100, "failed": 10}) == ("bad", "10 % of the requests of the last minute failed")
    hits = well["hits"]
    assert "lost to routing" in told(hits={**hits, "predicted": 0.5, "rate": 0.5, "best": 0.9})[1]
    assert "lost to eviction" in told(hits={**hits, "predicted": 0.5, "rate": 0.5, "best": 0.5})[1]
    assert "than was predicted" in told(hits={**hits, "rate": 0.6})[1]
    assert told(doctor={"share_of_hits_lost": 0.3, "worst": "a time"})[1] == "The doctor found: a time"


# -- who watches --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("often")
async def test_while_nobody_watches_nothing_is_kept(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine())
    await ask(running, "s")
    assert running.gateway.sample is None
    async with watching(running) as one, watching(running) as other:
        await one.next()
        await ask(running, "s")
        await one.until(lambda told: told["requests"]["ended"] == 1)
        await other.until(lambda told: told["requests"]["ended"] == 1)
        assert running.gateway.sample is not None
    await until(lambda: running.gateway.sample is None)
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "live"])
    await ask(running, "s")
    async with watching(running) as again:
        told = await again.next()
        assert told["requests"]["shown"] == []
        assert told["history"], "what earlier watchers saw is there for those who come later"


@pytest.mark.usefixtures("often")
async def test_only_so_many_watch_and_each_that_leaves_makes_room(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "WATCHERS", 2)
    running = await gateway(await engine(), change=secured)
    async with watching(running, token=TOKEN) as one:
        async with watching(running, token=TOKEN):
            answer = await once(running.admin.port, request(None, BEARER, path="/live", method="GET"))
            assert answer.status == 503
            assert int(answer.one("retry-after")) >= 1
            assert "2 watch already" in answer.json()["error"]["message"]
        for _ in range(400):
            answer = await once(running.admin.port, request(None, BEARER, path="/live?events=1", method="GET"))
            if answer.status == 200:
                break
            await asyncio.sleep(0.05)
        assert answer.status == 200
        await one.next()


async def test_one_that_does_not_read_is_cut_off_and_the_others_go_on(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD", 0.01)

    def change(config: Config) -> None:
        secured(config)
        # So that events are large.
        config.tenants = [TenantConfig(f"tenant-{n}-{'x' * 200}", keys=[Secret(f"key-{n}-of-it")]) for n in range(200)]

    running = await gateway(await engine(), change=change)
    async with watching(running, token=TOKEN) as feed:
        await feed.next()
        async with await Raw.connect(running.admin.port, receive_buffer=4096) as slow:
            await slow.send(request(None, BEARER, path="/live", method="GET"))
            assert (await slow.head()).status == 200
            await until(lambda: len(running.admin.live._watchers) == 2)
            async with asyncio.timeout(60):
                while len(running.admin.live._watchers) == 2:
                    await feed.next()
        for _ in range(3):
            await feed.next()


async def test_a_feed_is_no_request_that_hangs(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD", 0.1)
    monkeypatch.setattr(door, "WORKING", 1.0)
    running = await gateway(await engine())
    async with watching(running, "?events=40") as feed:
        for _ in range(40):
            await feed.next()
        assert await feed.answer.content.read() == b""


@pytest.mark.parametrize("reads", [True, False])
async def test_it_ends_with_the_gateway(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(live, "PERIOD", 0.05 if reads else 0.002)
    running = await gateway(await engine())
    async with watching(running) as feed:
        await feed.next()
        await asyncio.wait_for(running.admin.stop(), SECONDS)
        if reads:
            async with asyncio.timeout(SECONDS):
                # Events that were under way, and the proper end.
                while await feed.answer.content.readline():
                    pass
        assert running.gateway.sample is None
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "live"]


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "1.5", "100001", "9" * 30, "%D9%A3"])
async def test_how_many_events_must_be_a_number(gateway: Begin, engine: StartEngine, text: str) -> None:
    running = await gateway(await engine())
    status, body = await tell(running, "GET", f"/live?events={text}")
    assert status == 400
    assert "events" in body["error"]["message"]


async def test_all_but_the_files_of_the_page_needs_the_token(gateway: Begin, engine: StartEngine) -> None:
    running = await gateway(await engine(), change=secured)
    for path in ("/live", "/prefixes", "/tenants"):
        assert (await tell(running, "GET", path))[0] == 401
    async with watching(running, "?events=1", TOKEN) as feed:
        await feed.next()
    for path, kind in (("/", "text/html"), ("/ui/app.js", "text/javascript"), ("/ui/style.css", "text/css")):
        # A link to it may stand on any page.
        answer = await once(running.admin.port, request(None, "sec-fetch-site: cross-site", path=path, method="GET"))
        assert answer.status == 200
        assert answer.one("content-type").startswith(kind)
        policy = answer.one("content-security-policy")
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        tag = answer.one("etag")
        again = await once(running.admin.port, request(None, f"if-none-match: {tag}", path=path, method="GET"))
        assert (again.status, again.body) == (304, b"")
    for path in ("/ui/", "/ui/../admin.py", "/ui/%2e%2e%2fadmin.py", "/ui/nothing.js", "/ui/app.js/x"):
        assert (await once(running.admin.port, request(path=path, method="GET"))).status in (401, 404)


# -- the lists beside it ------------------------------------------------------------------------------------------------


async def test_the_hottest_prefixes_with_who_holds_them(
    gateway: Begin, engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.prefixes.KEPT", 0.0)

    def change(config: Config) -> None:
        config.tenants = [
            TenantConfig("open", keys=[Secret("key-of-open")]),
            TenantConfig("<b>closed", keys=[Secret("key-of-closed")], isolation="isolated"),
        ]
        config.isolation_key = Secret("0123456789abcdef" * 4)

    started = await engine()
    running = await gateway(started, change=change, policy="cache_aware")
    told = await admin(running, "/prefixes")
    assert (told["prefixes"], told["complete"]) == ([], True)
    for key, text in (("key-of-open", "A"), ("key-of-closed", "B")):
        for number in range(3):
            body = chat(max_tokens=1, messages=[{"role": "user", "content": text * 4000 + str(number) * 600}])
            answer = await once(running.port, request(body, f"authorization: Bearer {key}", f"x-session-id: {number}"))
            assert answer.status == 200
    told = await admin(running, "/prefixes")
    assert "AAAA" not in json.dumps(told)
    assert [row["tenant"] for row in sorted(told["prefixes"], key=lambda row: row["tenant"] or "")] == [
        None,
        "<b>closed",
    ]
    prompt = answer.json()["usage"]["prompt_tokens"]
    for row in told["prefixes"]:
        assert row["model"] == "sim"
        assert row["holders"] == [f"127.0.0.1:{started.port}"]
        assert (row["holders_total"], row["prompts"], row["prompts_complete"]) == (1, 3, True)
        assert 0.7 * prompt < row["tokens"] <= prompt
        assert row["children"] == []
    assert len({row["id"] for row in told["prefixes"]}) == 2
    again = await admin(running, "/prefixes")
    assert {row["id"] for row in again["prefixes"]} == {row["id"] for row in told["prefixes"]}
    await tell(running, "DELETE", f"/workers/127.0.0.1:{started.port}")
    assert (await admin(running, "/prefixes"))["prefixes"] == []


async def test_tenants_with_what_they_use_of_what_they_are_granted(gateway: Begin, scripted: StartScripted) -> None:
    held = asyncio.Event()

    async def hold(seen: Any) -> None:
        await held.wait()
        await seen.write(ok())

    def change(config: Config) -> None:
        config.tenants = [
            TenantConfig(
                "busy", keys=[Secret("key-of-busy")], limits=LimitsConfig(requests_per_minute=10, concurrency=1)
            ),
            TenantConfig(
                "idle", keys=[Secret("key-of-idle")], isolation="isolated", policy="least_load", priority="bulk"
            ),
        ]

    running = await gateway(await scripted(hold, hold), change=change)
    asked = [
        asyncio.create_task(once(running.port, request(chat(), "authorization: Bearer key-of-busy"))) for _ in range(2)
    ]
    await until(lambda: running.gateway.admission.held.requests == 1)
    text = json.dumps(told := (await admin(running, "/tenants"))["tenants"])
    assert "key-of" not in text
    busy, idle = told
    assert (busy["name"], busy["running"], busy["queued"]) == ("busy", 1, 1)
    assert busy["limits"] == {
        "requests_per_minute": {"granted": 10, "used": 2},
        "concurrency": {"granted": 1, "used": 1},
    }
    assert (idle["policy"], idle["priority"], idle["isolation"]) == ("least_load", "bulk", "isolated")
    assert (idle["running"], idle["queued"], idle["limits"]) == (0, 0, {})
    async with watching(running, "?events=1") as feed:
        event = await feed.next()
        assert event["queue"]["waiting"] == 1
        assert event["queue"]["by_priority"] == {"interactive": 1, "bulk": 0}
        assert event["requests"]["running"] == 1
        (row,) = [row for row in event["tenants"] if row["name"] == "busy"]
        assert (row["running"], row["queued"]) == (1, 1)
    held.set()
    assert [(await each).status for each in asked] == [200, 200]


# -- figures ------------------------------------------------------------------------------------------------------------


def test_a_total_does_not_fall_when_a_target_leaves() -> None:
    counter = Counter("tokens", "", ("target",))
    counter.add(("a",), 5)
    counter.add(("b",), 7)
    total = Total(counter)
    assert total.read() == 12
    counter.drop(0, "a")
    assert total.read() == 12
    counter.add(("a",), 2)
    counter.add(("b",), 1)
    assert total.read() == 15
    assert total.read() == 15


BOUNDS = (0.1, 0.2, 0.4, 0.8)


@given(st.lists(st.floats(0.0, 0.8), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    counts = [0.0] * (len(BOUNDS) + 1)
    for value in values:
        counts[next(at for at, bound in enumerate(BOUNDS) if value <= bound)] += 1
    found = quantile(BOUNDS, counts, share)
    true = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    lower = max((bound for bound in (0.0, *BOUNDS) if bound < true), default=0.0)
    upper = next(bound for bound in BOUNDS if true <= bound)
    assert lower <= found <= upper + 1e-9


def test_above_the_last_bound_a_quantile_is_that() -> None:
    assert quantile(BOUNDS, [0, 0, 0, 0, 3], 0.5) == 0.8
