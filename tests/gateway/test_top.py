"""``warmroute top``: what one screen shows, and a process on a terminal that is left, loses its gateway and finds it again."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import msgspec
import pytest

from gateway import live
from gateway.config import Config, Secret, TenantConfig
from gateway.console import screen as drawing
from gateway.console.feed import Event
from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.scripted import Seen, ok
from tests.gateway.talk import admin, chat, once, request, until
from tests.gateway.terminal import Terminal, front, run, terminal

PROMPT = "Warm routes are kept warm by those who walk them. " * 80
TAKES, LEAVES = b"\x1b[?1049h", b"\x1b[?1049l"
"""The whole screen, and gives it back."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events come faster than an operator would like."""
    monkeypatch.setattr(live, "PERIOD", 0.1)


async def work(running: Running, count: int = 6, *lines: str) -> None:
    for turn in range(count):
        body = chat(max_tokens=4, stream=True, messages=[{"role": "user", "content": PROMPT + "and so on " * turn}])
        answer = await once(running.port, request(body, f"x-session-id: s{turn % 2}", *lines))
        assert answer.status == 200


def at(running: Running, *arguments: str) -> tuple[str, ...]:
    return "top", *arguments, "--admin", f"http://127.0.0.1:{running.admin.port}"


# -- one screen ---------------------------------------------------------------------------------------------------------


async def test_one_screen_tells_what_the_fleet_does(gateway: Begin, engine: StartEngine) -> None:
    def change(config: Config) -> None:
        config.tenants = [TenantConfig("research", [Secret("ka")])]

    engines = [await engine(), await engine()]
    running = await gateway(*engines, "http://127.0.0.1:1", change=change, policy="cache_aware", ready=False)
    up = [worker for worker in running.fleet.workers.values() if not worker.id.endswith(":1")]
    await until(lambda: all(worker.state is State.READY for worker in up))
    told = asyncio.create_task(run(*at(running, "--once")))
    await asyncio.sleep(0)
    while not told.done():
        await work(running, 1, "authorization: Bearer ka")
    shown = await told
    assert (shown.status, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert 10 < len(lines) <= 25 and all(len(line) <= 80 for line in lines)
    text = shown.out
    assert f"http://127.0.0.1:{running.admin.port}" in lines[0]
    assert "! 1 of 3 workers not joined yet" in text
    for words in (
        " prompt tokens; predicted ",
        "lost    to routing ",
        " ended, ",
        " failed, ",
        "token p50 ",
        ", p99 ",
        " waiting (",
    ):
        assert words in text, words
    assert " preparing; pressure none" in text
    table = text[text.index("target ") :].splitlines()
    assert table[1].split()[:4] == ["127.0.0.1:1", "joining", "0", "-"], (
        "the worst is first, and what is not known no zero"
    )
    assert {line.split()[0] for line in table[2:4]} == {f"127.0.0.1:{each.port}" for each in engines}
    (tenant,) = [line for line in table if line.startswith("research ")]
    assert tenant.split()[1].endswith("/s")


async def feed(running: Running) -> dict[str, Any]:
    """The first event of a watcher."""
    data: str = await admin(running, "/live?events=1")
    return dict(json.loads(data.removeprefix("data: ")))


def read(event: dict[str, Any]) -> Event:
    return msgspec.convert(event, Event)


def drawn(event: dict[str, Any], width: int = 80, height: int = 24, **parts: Any) -> list[str]:
    seen = drawing.Seen("http://127.0.0.1:8081", **parts)
    seen.take(read(event))
    lines = drawing.screen(seen, width, height).plain.split("\n")
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    return lines


async def test_what_was_lost_adds_up_and_what_is_not_known_is_told_so(gateway: Begin, engine: StartEngine) -> None:
    event = await feed(await gateway(await engine()))
    text = "\n".join(drawn(event))
    assert "cached  - of 0 prompt tokens; predicted -, at most -" in text
    assert "lost    to routing -, to eviction -; never seen before -" in text
    assert "token p50 -, p99 -" in text and "- ended, - failed" in text
    event["hits"].update(prompt_tokens=1_234_567, rate=0.6, predicted=0.6, best=0.7, ceiling=0.9)
    event["window_seconds"] = 60.0
    event["requests"].update(window=600, failed=6)
    event["ttft"]["all"] = {"requests": 9, "p50": 12.0, "p90": 100.0, "p99": 1530.0}
    lines = drawn(event)
    text = "\n".join(lines)
    assert "cached  60.0 % of 1.23M prompt tokens; predicted 60.0 %, at most 90.0 %" in text
    assert "lost    to routing 10.0 %, to eviction 20.0 %; never seen before 10.0 %" in text
    assert "10.0/s ended, 0.1/s failed" in text and "token p50 12 ms, p99 1.5 s" in text
    (bar,) = [line for line in lines if line.startswith("[")]
    counts = [bar.count(mark) for mark in "#re."]
    assert counts == [47, 8, 15, 8] and len(bar) == 80


async def test_of_many_targets_the_worst_are_shown_and_the_rest_is_counted(gateway: Begin, engine: StartEngine) -> None:
    event = await feed(await gateway(await engine()))
    (tile,) = event["fleet"]["tiles"]
    long = "vllm-decode-{:03}.vllm-decode-headless.inference.svc.cluster.local:8000"
    fleet = [{**tile, "name": long.format(n), "wait_ms": n} for n in range(500)]
    fleet[7].update(state="down", reason="it refused the connection")
    fleet[8].update(breaker="open", breaker_reason="faults")
    fleet[9].update(rung="none", rung_reason="finds_nothing")
    event["fleet"]["tiles"] = fleet
    for width, height in ((80, 24), (132, 50), (40, 10), (200, 600)):
        lines = drawn(event, width, height)
        table = lines[next(n for n, line in enumerate(lines) if line.startswith("target ")) + 1 :]
        worst = [line.split()[0] for line in table[:4]]
        if height > 10:
            numbers = [name.partition(".")[0][-3:] if width > 132 else name for name in worst]
            assert width <= 132 or numbers == ["007", "008", "009", "499"]
            assert all(name.startswith("vllm-dec") and name.endswith(":8000") for name in worst), "both ends are kept"
        if height < 500:
            (rest,) = [line for line in table if line.startswith("... and ")]
            shown = sum(line.startswith("vllm") for line in table)
            assert rest == f"... and {500 - shown} more of 500"
    assert any("breaker open: faults" in line for line in lines) and any("finds_nothing" in line for line in lines)


async def test_targets_that_go_are_gone_and_a_gateway_that_starts_anew_begins_anew(
    gateway: Begin, engine: StartEngine
) -> None:
    event = await feed(await gateway(await engine()))
    (tile,) = event["fleet"]["tiles"]
    seen = drawing.Seen("http://127.0.0.1:8081")
    seen.take(read({**event, "fleet": {"whole": True, "tiles": [tile, {**tile, "name": "b:1"}], "gone": []}}))
    seen.take(read({**event, "fleet": {"whole": False, "tiles": [{**tile, "name": "c:1"}], "gone": ["b:1"]}}))
    assert set(seen.tiles) == {tile["name"], "c:1"}
    seen.take(read({**event, "fleet": {"whole": True, "tiles": [{**tile, "name": "d:1"}], "gone": []}}))
    assert set(seen.tiles) == {"d:1"}


async def test_a_gateway_that_breaks_off_is_an_error_in_one_line(
    gateway: Begin, engine: StartEngine, scripted: StartScripted
) -> None:
    event = await feed(await gateway(await engine()))
    event["window_seconds"] = 0.0
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999999\r\n\r\n"

    async def break_off(seen: Seen) -> None:
        await seen.write(head + b"data: %b\n\n" % json.dumps(event).encode())
        seen.writer.close()

    cut = await scripted(break_off, ok(b"data: {}\n\n"), ok(b"hello"), ok(b"no", status=b"502 No"))
    for words in ("does not answer as a gateway does", "another version", "has no live feed", "answers status 502"):
        shown = await run("top", "--once", "--admin", cut.url)
        assert (shown.status, shown.out) == (2, "") and shown.err.count("\n") == 1
        assert shown.err.startswith("warmroute top: ") and words in shown.err


# -- on a terminal ------------------------------------------------------------------------------------------------------


async def left(shown: Terminal) -> None:
    """It ended well, and gave the terminal back as it was."""
    assert await shown.ended() == 0
    assert bytes(shown.written).count(TAKES) == 1
    assert bytes(shown.written).rstrip().endswith((LEAVES, b"\x1b[?25h"))
    assert LEAVES in shown.written and b"\x1b[?25h" in shown.written
    assert "Traceback" not in shown.text
    assert shown.echoes, "keys show again"


@pytest.mark.parametrize("way", ["interrupt", "terminate", "q"])
async def test_it_is_left_cleanly(gateway: Begin, engine: StartEngine, way: str) -> None:
    running = await gateway(await engine(), policy="cache_aware")
    async with terminal(*at(running)) as shown:
        await shown.shows("all is well")
        await work(running, 2)
        await shown.shows("sessions 2")
        assert not shown.echoes
        if way == "q":
            shown.press(b"q")
        else:
            shown.process.send_signal(signal.SIGINT if way == "interrupt" else signal.SIGTERM)
        await left(shown)


async def test_ctrl_c_is_pressed(gateway: Begin, engine: StartEngine) -> None:
    """As a key, which the terminal makes a signal of."""
    running = await gateway(await engine())
    async with terminal(*at(running), owned=True) as shown:
        await shown.shows("all is well")
        shown.press(b"\x03")
        await left(shown)


async def test_it_says_when_the_gateway_is_gone_and_comes_back_with_it(gateway: Begin, engine: StartEngine) -> None:
    one, other = await engine(), await engine()
    first, second = await gateway(one), await gateway(other)
    async with front(first.admin.port) as door, terminal("top", "--admin", f"http://127.0.0.1:{door.port}") as shown:
        await shown.shows(f"127.0.0.1:{one.port}")
        door.hang_up()
        await shown.shows(": coming back; as of ")
        shown.forget()
        door.to = second.admin.port
        await shown.shows(f"127.0.0.1:{other.port}")
        assert shown.process.returncode is None
        shown.process.send_signal(signal.SIGINT)
        assert await shown.ended() == 0


async def test_it_leaves_when_its_token_does_not_fit_any_more(gateway: Begin, engine: StartEngine) -> None:
    def secured(config: Config) -> None:
        config.admin.token = Secret("adm1n-token")

    first, second = await gateway(await engine()), await gateway(await engine(), change=secured)
    async with front(first.admin.port) as door, terminal("top", "--admin", f"http://127.0.0.1:{door.port}") as shown:
        await shown.shows("all is well")
        door.hang_up()
        door.to = second.admin.port
        assert await shown.ended() == 2
        assert "needs the admin token" in shown.text.split("\x1b")[-1] and LEAVES in shown.written
