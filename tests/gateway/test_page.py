"""The page in a real browser, in front of a gateway at work: Debian's Chromium, driven by Playwright.

Pictures go to the folder that the environment's WARMROUTE_SCREENSHOTS names, or to the test's own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from gateway.config import Config, LimitsConfig, Secret, TenantConfig, WorkerConfig
from gateway.run import Running
from load_tests.client import Client, Results
from load_tests.workloads.agents import agent_sessions
from tests.conftest import Require
from tests.gateway.conftest import Begin, StartEngine, StartScripted, start_gateway
from tests.gateway.scripted import ok
from tests.gateway.talk import chat, once, request, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECONDS = 30_000
TOKEN = "adm1n-token"
PHONE = {"width": 360, "height": 740}
MARKUP = "<img/src=x/onerror=document.title='broken'>"

Open = Callable[..., Awaitable[Page]]
expect.set_options(timeout=SECONDS)


@pytest.fixture
async def browser(require: Require) -> AsyncIterator[Browser]:
    require("chromium", CHROMIUM is not None, "apt-get install chromium")
    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Open]:
    """Opens the page of a gateway; at the end nothing may have been complained about on the console."""
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    async def begin(running: Running, **options: Any) -> Page:
        allowed = options.pop("allowed", "nothing")
        options.setdefault("viewport", {"width": 1440, "height": 900})
        context = await browser.new_context(**options)
        contexts.append(context)
        opened = await context.new_page()
        opened.set_default_timeout(SECONDS)
        opened.on(
            "console",
            lambda told: (
                complaints.append(told.text) if told.type in ("error", "warning") and allowed not in told.text else None
            ),
        )
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        await opened.goto(f"http://127.0.0.1:{running.admin.port}/")
        return opened

    yield begin
    for context in contexts:
        await context.close()
    assert complaints == []


async def picture(page: Page, folder: Path, name: str) -> None:
    named = os.environ.get("WARMROUTE_SCREENSHOTS")
    folder = Path(named) if named else folder
    # What sticks to the top of the window is to be at the top of the picture.
    await page.evaluate("scrollTo(0, 0)")
    await page.screenshot(path=folder / f"{name}.png", full_page=True)


async def fits(page: Page) -> None:
    """Nobody has to scroll sideways."""
    wide, window = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= window


async def at_work(running: Running, seed: int = 0) -> None:
    """Eight agents ask it until they are done."""
    told = agent_sessions(sessions=8, turns=4, seed=seed, think=0.05, spread=0.5, shared_tokens=600)
    async with Client(f"http://127.0.0.1:{running.port}", "sim") as client:
        results = await client.run(told, Results())
    assert results.errors == []


def secured(config: Config) -> None:
    config.admin.token = Secret(TOKEN)


# -- what is seen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_shows_the_fleet_at_work(
    gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path, scheme: str
) -> None:
    engines = [await engine(kv_tokens=60_000, seed=n) for n in range(4)]
    running = await gateway(*engines, policy="cache_aware")
    seen = await page(running, color_scheme=scheme)
    await expect(seen.locator("#feed")).to_have_attribute("data-state", "live")
    await expect(seen.locator("#verdict-word")).to_have_text("The fleet is well")
    await expect(seen.locator("#tiles button")).to_have_count(4)
    await asyncio.gather(*(at_work(running, seed) for seed in range(3)))
    figures = seen.locator("#figures > div")
    await expect(figures.nth(0)).to_contain_text("that could be")
    await expect(figures.nth(0).locator("dd").first).not_to_have_text("–")
    await expect(figures.nth(5).locator("dd").first).to_have_text("4/4")
    stats = [each.stats() for each in engines]
    share = sum(each["cached_tokens"] for each in stats) / sum(each["prompt_tokens"] for each in stats)
    for _ in range(300):
        told = await figures.nth(0).locator("dd").first.inner_text()
        if abs(int(told.removesuffix(" %")) - share * 100) <= 1:
            break
        await asyncio.sleep(0.1)
    assert int(told.removesuffix(" %")) == pytest.approx(share * 100, abs=1)
    for name in engines:
        await expect(seen.locator(f'#tiles button[data-name="127.0.0.1:{name.port}"]')).to_contain_text("in flight")
    await expect(seen.locator("#requests-table tbody tr").first).to_contain_text("127.0.0.1")
    await expect(seen.locator("#cache-chart path.area")).not_to_have_count(0)
    await expect(seen.locator("#cache-why")).to_contain_text("new")
    await expect(seen.locator("#ttft-table tbody tr").last).to_contain_text("all requests")
    await expect(seen.locator("#reasons")).to_contain_text("home")
    await seen.locator("#sessions").scroll_into_view_if_needed()
    await expect(seen.locator("#sessions-table tbody tr")).to_have_count(24)
    await seen.locator("#prefixes").scroll_into_view_if_needed()
    await expect(seen.locator("#prefixes-tree")).to_contain_text("prompts go on")
    await seen.locator("#tenants").scroll_into_view_if_needed()
    await expect(seen.locator("#tenants-table")).to_contain_text("anonymous")
    await expect(seen.locator("#doctor-list")).to_contain_text("examined")
    await expect(seen.locator("#config-told")).to_contain_text("as it was started")
    back = await seen.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(back.split("(")[1].split(",")[0]) < 64) == (scheme == "dark")
    await fits(seen)
    await picture(seen, tmp_path, f"page-{scheme}")


async def test_the_switch_wins_over_the_system_and_is_kept(gateway: Begin, engine: StartEngine, page: Open) -> None:
    seen = await page(await gateway(await engine()), color_scheme="light")
    switch, root = seen.locator("#theme"), seen.locator("html")
    await switch.click()
    await expect(root).to_have_attribute("data-theme", "dark")
    await seen.reload()
    await expect(root).to_have_attribute("data-theme", "dark")
    await switch.press("Enter")
    await expect(root).to_have_attribute("data-theme", "light")
    await switch.press("Enter")
    await expect(switch).to_have_text("Theme: auto")
    assert await root.get_attribute("data-theme") is None


async def test_it_is_readable_on_a_phone(gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path) -> None:
    running = await gateway(
        await engine(), await engine(), WorkerConfig("http://127.0.0.1:9"), policy="cache_aware", ready=False
    )
    await until(lambda: sum(1 for _ in running.fleet.ready()) == 2)
    seen = await page(running, viewport=PHONE, color_scheme="light")
    await at_work(running)
    await expect(seen.locator("#requests-table tbody tr").first).to_be_visible()
    await seen.locator("#route-form button").click()
    await expect(seen.locator("#route-answer table")).to_be_visible()
    await seen.locator("#sessions").scroll_into_view_if_needed()
    await expect(seen.locator("#sessions-table tbody tr").first).to_be_visible()
    await fits(seen)
    await picture(seen, tmp_path, "page-phone")
    await seen.locator("#tiles button").first.click()
    await expect(seen.locator("#detail")).to_be_visible()
    await fits(seen)


async def test_five_hundred_workers(gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path) -> None:
    silent = [WorkerConfig(f"http://127.0.0.1:9/{number}", engine="generic") for number in range(499)]
    started = await engine()
    running = await gateway(started, *silent, ready=False, policy="cache_aware")
    await until(lambda: sum(1 for _ in running.fleet.ready()) == 1)
    seen = await page(running)
    tiles = seen.locator("#tiles button")
    await expect(tiles).to_have_count(500)
    await expect(seen.locator("#figures > div").nth(5)).to_contain_text("1/500")
    await expect(seen.locator("#tiles")).to_have_attribute("data-size", "tiny")
    # What does not change is not touched.
    await seen.evaluate(
        """() => {
            window.touched = new Set();
            new MutationObserver((all) => all.forEach((each) => {
                const node = each.target.nodeType === 1 ? each.target : each.target.parentElement;
                window.touched.add(node.closest("button")?.dataset.name);
            })).observe(document.getElementById("tiles"),
                        {subtree: true, childList: true, characterData: true, attributes: true});
        }"""
    )
    name = f"127.0.0.1:{started.port}"
    for number in range(3):
        await once(running.port, request(chat(max_tokens=4), f"x-session-id: {number}"))
    await expect(seen.locator(f'#tiles button[data-name="{name}"] .homes .number')).to_have_text("3")
    assert await seen.evaluate("[...window.touched]") == [name]
    await seen.fill("#fleet-filter", "127.0.0.1:9/49")
    await expect(seen.locator("#tiles button:visible")).to_have_count(10)
    await seen.fill("#fleet-filter", "ready")
    await expect(seen.locator("#tiles button:visible")).to_have_count(1)
    await seen.fill("#fleet-filter", "")
    # One stop for the Tab key, arrows from there.
    await seen.locator("#fleet-filter").focus()
    await seen.keyboard.press("Tab")
    await expect(tiles.nth(0)).to_be_focused()
    await seen.keyboard.press("ArrowRight")
    await expect(tiles.nth(1)).to_be_focused()
    await expect(seen.locator("#tile-told")).to_contain_text("joining")
    await seen.keyboard.press("ArrowDown")
    await seen.keyboard.press("End")
    await expect(tiles.nth(499)).to_be_focused()
    await seen.keyboard.press("Tab")
    await expect(tiles.nth(0)).not_to_be_focused()
    await fits(seen)
    await picture(seen, tmp_path, "page-500")


# -- who may see it -----------------------------------------------------------------------------------------------------


async def test_the_token_is_asked_for_once_and_kept_in_the_tab(
    gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path
) -> None:
    running = await gateway(await engine(), change=secured)
    seen = await page(running, allowed="401")
    await expect(seen.locator("#ask")).to_be_visible()
    await expect(seen.locator("#tiles button")).to_have_count(0)
    await picture(seen, tmp_path, "page-token")
    await seen.fill("#ask-token", "wrong")
    await seen.keyboard.press("Enter")
    await expect(seen.locator("#ask-why")).to_contain_text("refused")
    await seen.fill("#ask-token", TOKEN)
    await seen.keyboard.press("Enter")
    await expect(seen.locator("#tiles button")).to_have_count(1)
    await expect(seen.locator("#ask")).to_be_hidden()
    assert TOKEN not in await seen.content()
    assert TOKEN not in seen.url
    assert await seen.evaluate("Object.values(localStorage)") == []
    await seen.reload()
    await expect(seen.locator("#tiles button")).to_have_count(1)
    await expect(seen.locator("#ask")).to_be_hidden()
    await seen.click("#forget")
    await expect(seen.locator("#ask")).to_be_visible()


async def test_after_a_restart_it_goes_on_by_itself(engine: StartEngine, page: Open) -> None:
    started = await engine()
    running = await start_gateway(started)
    port = running.admin.port
    seen = await page(running, allowed="ERR_")
    await expect(seen.locator("#feed")).to_have_attribute("data-state", "live")
    await running.stop()
    await expect(seen.locator("#feed")).to_have_attribute("data-state", "lost")

    def same(config: Config) -> None:
        config.admin.port = port

    again = await start_gateway(started, change=same)
    try:
        await expect(seen.locator("#feed")).to_have_attribute("data-state", "live")
        await expect(seen.locator("#tiles button")).to_have_count(1)
    finally:
        await again.stop()


# -- what is done with it -----------------------------------------------------------------------------------------------


async def test_sessions_are_searched_and_told_by_the_keyboard(
    gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path
) -> None:
    def change(config: Config) -> None:
        config.tenants = [TenantConfig(name, keys=[Secret(f"key-of-{name}")]) for name in ("red", "blue")]

    running = await gateway(await engine(), change=change, policy="cache_aware")
    for tenant, text in (("red", "r" * 3000), ("red", "r" * 3000 + "more" * 300), ("blue", "b" * 3000)):
        body = chat(max_tokens=4, messages=[{"role": "user", "content": text}])
        answer = await once(running.port, request(body, f"authorization: Bearer key-of-{tenant}", "x-session-id: s"))
        assert answer.status == 200
    seen = await page(running)
    rows = seen.locator("#sessions-table tbody tr")
    await seen.keyboard.press("/")
    await expect(seen.locator("#sessions-search")).to_be_focused()
    await expect(rows).to_have_count(2)
    await seen.keyboard.type("red")
    await expect(rows).to_have_count(1)
    await expect(seen.locator("#sessions-count")).to_contain_text("1 match")
    session = next(each for each in running.sessions.recent(2) if each.tenant == "red").key.hex()
    await seen.fill("#sessions-search", session[:6])
    await expect(rows).to_have_count(1)
    await seen.fill("#sessions-search", session)
    await expect(rows).to_have_count(1)
    link = rows.locator("button.link")
    await link.focus()
    outline = await link.evaluate("(node) => getComputedStyle(node).outlineStyle")
    assert outline == "solid"
    await seen.keyboard.press("Enter")
    detail = seen.locator("#detail")
    await expect(detail).to_contain_text(session)
    await expect(detail).to_contain_text("red · sim")
    await expect(detail.locator("table").first.locator("tbody tr")).to_have_count(2)
    await picture(seen, tmp_path, "page-session")
    await seen.keyboard.press("Escape")
    await expect(detail).to_be_hidden()
    await seen.fill("#sessions-search", "/")
    await expect(seen.locator("#sessions-search")).to_have_value("/")


async def test_a_dry_run_tells_every_candidate_in_milliseconds(
    gateway: Begin, engine: StartEngine, page: Open, tmp_path: Path
) -> None:
    engines = [await engine(), await engine(), await engine()]
    running = await gateway(*engines, policy="cache_aware")
    body = chat(max_tokens=4, messages=[{"role": "user", "content": "x" * 4000}])
    answer = await once(running.port, request(body, "x-session-id: s"))
    home = answer.one("x-warmroute-worker")
    seen = await page(running, allowed="404")
    await expect(seen.locator("#route-body")).not_to_have_value("")
    await seen.fill("#route-body", '{"model": "sim", "messages": [{"role": "user", "content": "' + "x" * 4000 + '"}]}')
    await seen.fill("#route-session", "s")
    await seen.click("#route-form button")
    told = seen.locator("#route-answer")
    await expect(told.locator("tbody tr")).to_have_count(3)
    await expect(told.locator("tr.chosen")).to_contain_text(home)
    await expect(told.locator("p")).to_contain_text("because of: home")
    await expect(told.locator("thead")).to_contain_text("prefill")
    await picture(seen, tmp_path, "page-route")
    assert len(running.sessions) == 1, "nothing is changed by it"
    await seen.fill("#route-body", '{"model": "nobody"}')
    page_of_error = seen.locator("#route-answer .error")
    await seen.evaluate("document.getElementById('route-answer').replaceChildren()")
    async with seen.expect_response("**/route?*") as answered:
        await seen.click("#route-form button")
    assert (await answered.value).status in (400, 404)
    await expect(page_of_error).to_contain_text("nobody")


async def test_whatever_names_contain_is_text(
    gateway: Begin, engine: StartEngine, scripted: StartScripted, page: Open, tmp_path: Path
) -> None:
    reply = b'{"choices": [{"message": {"content": "ok"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}'
    worker = await scripted(ok(reply), models=("sim", f"model{MARKUP}"))

    def change(config: Config) -> None:
        config.tenants = [
            TenantConfig(f"tenant{MARKUP}", keys=[Secret("key-of-it")], limits=LimitsConfig(requests_per_minute=100))
        ]

    bad = WorkerConfig(f"http://127.0.0.1:9/{MARKUP}", engine="generic")
    running = await gateway(worker, bad, change=change, policy="session", ready=False)
    await until(lambda: sum(1 for _ in running.fleet.ready()) == 1)
    seen = await page(running, allowed="503")
    await expect(seen.locator("#tiles button")).to_have_count(2)
    for number in range(3):
        body = chat(model=f"model{MARKUP}", messages=[{"role": "user", "content": MARKUP * 40}], user=MARKUP)
        fields = ("authorization: Bearer key-of-it", f"x-session-id: {MARKUP}{number}", f"x-request-id: {MARKUP}")
        answer = await once(running.port, request(body, *fields))
        assert answer.status == 200
    await expect(seen.locator("#tiles")).to_contain_text(MARKUP)
    flow = seen.locator("#requests-table tbody tr").first
    await expect(flow).to_contain_text(f"tenant{MARKUP} · model{MARKUP}")
    await expect(flow.locator("button")).to_have_attribute("title", f"request {MARKUP}")
    await seen.locator("#sessions").scroll_into_view_if_needed()
    await expect(seen.locator("#sessions-table")).to_contain_text(f"tenant{MARKUP}")
    await seen.locator("#sessions-table button").first.click()
    await expect(seen.locator("#detail")).to_contain_text(f"tenant{MARKUP}")
    await seen.keyboard.press("Escape")
    await seen.locator("#tenants").scroll_into_view_if_needed()
    await expect(seen.locator("#tenants-table")).to_contain_text(f"tenant{MARKUP}")
    await expect(seen.locator("#tenants-table")).to_contain_text("of 100 requests/min")
    await expect(seen.locator("#detail")).to_be_hidden()
    await seen.locator("#tiles button", has_text=MARKUP).click()
    await expect(seen.locator("#detail-told")).to_contain_text("could not connect")
    await expect(seen.locator("#detail-title")).to_contain_text(MARKUP)
    await seen.keyboard.press("Escape")
    await expect(seen.locator("#detail")).to_be_hidden()
    await seen.fill("#route-key", "key-of-it")
    await seen.fill("#route-body", f'{{"model": "{MARKUP}", "messages": []}}')
    async with seen.expect_response("**/route?*"):
        await seen.click("#route-form button")
    await expect(seen.locator("#route-answer")).to_contain_text(MARKUP)
    assert await seen.title() == "Warmroute"
    assert await seen.locator("img:not([src='/ui/icon.svg'])").count() == 0
    assert await seen.locator("script").count() == 1
    await fits(seen)
    await picture(seen, tmp_path, "page-markup")
