"""The other ways of vLLM: Mooncake, a shared store, and peers that take from each other; and engines as processes."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from load_tests.engine import Engine, EngineOptions
from load_tests.engine.disagg.shared import MEMORY
from load_tests.engine.options import OptionError
from tests.load_tests.engine.conftest import Start
from tests.load_tests.engine.pairs import CHAT, PREFILL, STORY, chat, nothing_left, pair, text, told, until, user
from tests.load_tests.engine.talk import cached

ASK = [user(STORY)]


async def said(http: aiohttp.ClientSession, url: str, **fields: Any) -> tuple[int, Any]:
    async with http.post(url + CHAT, json={"model": "sim", "messages": ASK, **fields}) as answer:
        return answer.status, await answer.json()


async def right(start: Start, http: aiohttp.ClientSession) -> str:
    return text(await chat(http, await start(), ASK))


async def transfer(http: aiohttp.ClientSession, p: Engine, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of both sides, with the engine's id from its bootstrap server."""
    base = f"http://127.0.0.1:{p.side_port}"
    async with http.get(base + "/query") as answer:
        known = await answer.json()
    ours: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    theirs = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name}
    return ours, {**theirs, "remote_bootstrap_addr": base, "remote_engine_id": known["0"]["engine_id"]}


@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
async def test_mooncake_in_either_order(start: Start, http: aiohttp.ClientSession, first: str) -> None:
    p, d = await pair(start, connector="mooncake")
    ours, theirs = await transfer(http, p, "xfer-1")
    assert theirs["remote_engine_id"] == p.engine_id

    async def prefilled() -> tuple[int, Any]:
        return await said(http, p.url, max_tokens=1, kv_transfer_params=ours)

    async def decoded() -> tuple[int, Any]:
        return await said(http, d.url, kv_transfer_params=theirs)

    if first == "prefill":
        one = await prefilled()
        assert told(p)["pinned_blocks"] > 0
        other = await decoded()
    elif first == "decode":
        waiting = asyncio.ensure_future(decoded())
        await until(lambda: told(d)["receiving"] == 1 and told(p)["rooms"] == 1)
        one, other = await prefilled(), await waiting
    else:
        one, other = await asyncio.gather(prefilled(), decoded())
    assert (one[0], other[0]) == (200, 200)
    assert one[1]["kv_transfer_params"] is None
    assert text(other[1]) == await right(start, http)
    assert d.stats()["computed_tokens"] == 0
    await nothing_left(p, d)
    async with http.get(p.url + "/metrics") as answer:
        assert "vllm:mooncake_xfer_time_seconds_count" in await answer.text()


async def test_mooncake_that_fails(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, connector="mooncake", blocks_ttl=0.2)
    ours, theirs = await transfer(http, p, "xfer-2")
    assert (await said(http, d.url, kv_transfer_params={**theirs, "remote_engine_id": "ghost"}))[0] == 500
    assert (await said(http, d.url, kv_transfer_params=theirs))[0] == 500
    await said(http, p.url, max_tokens=1, kv_transfer_params=ours)
    await until(lambda: told(p)["leases_expired"] == 1)
    await nothing_left(p, d)
    # What ended by itself is not kept: nobody can come for it.
    await said(http, p.url, kv_transfer_params=ours)
    assert told(p)["pinned_blocks"] == 0
    d.faults.add("queue_full")
    await said(http, p.url, max_tokens=1, kv_transfer_params=ours)
    assert (await said(http, d.url, kv_transfer_params=theirs))[0] == 503
    await nothing_left(p, d)
    assert told(p)["leases_expired"] == 1


async def test_mooncake_and_a_client_that_leaves(start: Start) -> None:
    p, d = await pair(start, connector="mooncake", blocks_ttl=0.5)
    async with aiohttp.ClientSession() as http:
        ours, theirs = await transfer(http, p, "xfer-3")
        async with aiohttp.ClientSession() as other:
            leaving = asyncio.ensure_future(said(other, d.url, kv_transfer_params=theirs))
            await until(lambda: told(d)["receiving"] == 1)
            leaving.cancel()
        await until(lambda: told(d)["aborts"] == 1)
        await said(http, p.url, max_tokens=1, kv_transfer_params=ours)
        await nothing_left(p, d)
        assert told(p)["leases_expired"] == 0


@pytest.mark.parametrize("where", ["memory", "folder"])
async def test_a_shared_store_is_found_unasked(
    start: Start, http: aiohttp.ClientSession, where: str, tmp_path: Path
) -> None:
    MEMORY.clear()
    options = {"shared_dir": str(tmp_path)} if where == "folder" else {}
    one, other = await start(connector="shared", **options), await start(connector="shared", **options)
    first = await chat(http, one, ASK)
    prompt = first["usage"]["prompt_tokens"]
    second = await chat(http, other, ASK)
    assert cached(second) == (prompt - 1) // 16 * 16
    assert text(second) == text(first) == await right(start, http)
    history = [*ASK, {"role": "assistant", "content": text(first)}, user("And then?")]
    third = await chat(http, other, history)
    assert cached(third) > prompt
    assert cached(await chat(http, other, ASK, cache_salt="elsewhere")) == 0
    apart = await start(connector="shared", block_size=32, **options)
    assert cached(await chat(http, apart, ASK)) == 0
    assert other.stats()["computed_tokens"] < third["usage"]["prompt_tokens"] + prompt
    await nothing_left(one, other, apart)
    fresh = await start(connector="shared", **options)
    fresh.faults.add("transfer_fail")
    assert (await said(http, fresh.url))[0] == 500
    assert text(await chat(http, fresh, ASK)) == text(first)
    MEMORY.clear()


async def test_peers_take_what_another_has(start: Start, http: aiohttp.ClientSession) -> None:
    one, other = await start(connector="p2p"), await start(connector="p2p")
    first = await chat(http, one, ASK)
    where = {"kv_request_id": "r1", "remote_host": "127.0.0.1", "remote_port": one.side_port}
    second = await chat(http, other, ASK, kv_transfer_params={"remote_kv_source": where})
    prompt = first["usage"]["prompt_tokens"]
    assert cached(second) == (prompt - 1) // 16 * 16
    assert text(second) == text(first)
    assert told(one)["transfers_out"]["tokens"] == told(other)["transfers_in"]["tokens"] == cached(second)
    for bad in ({**where, "remote_port": 9}, {"kv_request_id": "r2"}):
        fresh = await start(connector="p2p")
        alone = await chat(http, fresh, ASK, kv_transfer_params={"remote_kv_source": bad})
        assert (cached(alone), text(alone)) == (0, text(first))
    seeded = await start(connector="p2p", hash_seed=3)
    assert cached(await chat(http, seeded, ASK, kv_transfer_params={"remote_kv_source": where})) == 0
    await nothing_left(one, other)


async def test_peers_as_prefill_and_decode(start: Start, http: aiohttp.ClientSession) -> None:
    p, d = await pair(start, connector="p2p", lease=0.3)
    where = {"kv_request_id": "r1", "remote_host": "127.0.0.1", "remote_port": p.side_port}
    params = {"remote_decoder": {"kv_request_id": "r1"}}, {"remote_prefiller": where}
    one, other = await asyncio.gather(
        said(http, p.url, max_tokens=1, kv_transfer_params=params[0]), said(http, d.url, kv_transfer_params=params[1])
    )
    assert (one[0], other[0]) == (200, 200)
    assert text(other[1]) == await right(start, http)
    assert 0 < d.stats()["computed_tokens"] <= 16
    await nothing_left(p, d)
    assert (await said(http, d.url, cache_salt="x", kv_transfer_params=params[1]))[0] == 500
    await said(http, p.url, max_tokens=1, kv_transfer_params=params[0])
    await until(lambda: told(p)["leases_expired"] == 1)
    await nothing_left(p, d)


def test_options_that_do_not_fit() -> None:
    for options in (
        {"connector": "bootstrap"},
        {"connector": "nixl", "dialect": "sglang"},
        {"connector": "bootstrap", "dialect": "sglang"},
        {"connector": "shared", "dialect": "llamacpp"},
        {"connector": "post"},
        {"connector": "nixl", "lease": 0},
        {"connector": "nixl", "load_failure": "ignore"},
        {"connector": "nixl", "side_port": 70_000},
    ):
        with pytest.raises(OptionError):
            EngineOptions(**options)  # type: ignore[arg-type]


async def begin(*flags: str) -> tuple[asyncio.subprocess.Process, str, int | None]:
    """An engine as a process: its URL and the port of its side channel."""
    command = [sys.executable, "-m", "load_tests.engine", "--time-scale", "0.02", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    url = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().split()[-1]
    if "decode" in flags and "sglang" in flags:
        return process, url, None
    line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
    found = re.search(r":(\d+)$", line.strip())
    assert found, line
    return process, url, int(found[1])


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_engines_as_processes(start: Start, http: aiohttp.ClientSession, dialect: str) -> None:
    p, first, port = await begin("--dialect", dialect, "--role", "prefill")
    d, second, _ = await begin("--dialect", dialect, "--role", "decode", "--waiting-timeout", "20")
    try:
        if dialect == "vllm":
            _, answer = await said(http, first, max_tokens=1, kv_transfer_params=PREFILL)
            status, answer = await said(http, second, kv_transfer_params=answer["kv_transfer_params"])
        else:
            room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 5}
            _, (status, answer) = await asyncio.gather(said(http, first, **room), said(http, second, **room))
        assert status == 200
        alone = await start(dialect)
        assert text(answer) == text(await chat(http, alone, ASK))
        async with http.get(second + "/sim/stats") as stats:
            shared = (await stats.json())["disaggregation"]
        assert shared["transfers_in"]["count"] == 1
    finally:
        for process in (p, d):
            process.terminate()
            await asyncio.wait_for(process.wait(), 20)
