"""A gateway in front of pods: simulated engines that an API server tells of, and what requests see when pods come and go."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config, DiscoveryConfig
from gateway.run import Running
from gateway.workers import State
from tests.gateway.conftest import Begin, StartEngine, StartScripted
from tests.gateway.discovery.apiserver import PODS, POOLS, ApiServer, inference_pool, pod, serving
from tests.gateway.talk import admin, chat, once, request, until


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with serving() as started:
        yield started


def of(server: ApiServer, kind: str = "kubernetes", **options: Any) -> Any:
    told = {"selector": "app=vllm"} if kind == "kubernetes" else {"pool": "engines"}

    def change(config: Config) -> None:
        options.setdefault("relist", 30)
        config.discovery = [DiscoveryConfig(kind, options={**told, "namespace": "llm", "api": server.url, **options})]

    return change


def runs(server: ApiServer, name: str, worker: Any, **more: Any) -> None:
    """``worker`` is a pod of that name."""
    server.put(PODS, pod(name, "127.0.0.1", worker.port, **more))


def states(running: Running) -> dict[str, State]:
    return {worker.url: worker.state for worker in running.fleet.workers.values()}


async def ready(running: Running, *workers: Any) -> None:
    await until(lambda: states(running) == {worker.url: State.READY for worker in workers}, 20)


async def ask(running: Running, times: int = 6) -> list[str]:
    """Who answered."""
    found = []
    for _ in range(times):
        answer = await once(running.port, request(chat(max_tokens=2)))
        assert answer.status == 200, answer.body
        found.append(answer.one("x-warmroute-worker"))
    return found


def name(worker: Any) -> str:
    return str(worker.url.removeprefix("http://"))


async def test_pods_come_terminate_and_go(gateway: Begin, engine: StartEngine, server: ApiServer) -> None:
    one, two = await engine(), await engine()
    runs(server, "one", one)
    running = await gateway(change=of(server))
    await ready(running, one)
    runs(server, "two", two, ready=False)
    await until(lambda: server.watches)
    assert set(await ask(running)) == {name(one)}
    runs(server, "two", two)
    await ready(running, one, two)
    assert set(await ask(running)) == {name(one), name(two)}
    # It terminates: nothing new, though it serves still.
    runs(server, "one", one, ends=True)
    await until(lambda: states(running)[one.url] is State.DRAINING)
    assert set(await ask(running)) == {name(two)}
    server.delete(PODS, "one")
    await ready(running, two)
    (row,) = (await admin(running, "/workers"))["workers"]
    assert (row["source"], row["id"]) == ("kubernetes", name(two))


async def test_a_pod_that_is_not_ready_for_a_while_is_the_same_worker_afterwards(
    gateway: Begin, engine: StartEngine, server: ApiServer
) -> None:
    one, two = await engine(), await engine()
    runs(server, "one", one)
    runs(server, "two", two)
    running = await gateway(change=of(server))
    await ready(running, one, two)
    worker = running.fleet.workers[name(one)]
    runs(server, "one", one, ready=False)
    await until(lambda: worker.state is State.DRAINING)
    assert worker.reason == "kubernetes says that it is not ready, or ends"
    assert set(await ask(running)) == {name(two)}
    runs(server, "one", one)
    await ready(running, one, two)
    assert running.fleet.workers[name(one)] is worker


@pytest.mark.parametrize("within", [True, False])
async def test_a_pod_deleted_during_a_dropped_watch_gets_nothing_after_the_next_list(
    gateway: Begin, scripted: StartScripted, server: ApiServer, within: bool
) -> None:
    """Its engine lives on and answers, so that only the list tells that it is to get nothing."""
    server.gone_within = within
    gone, stays = await scripted(), await scripted()
    runs(server, "gone", gone)
    runs(server, "stays", stays)
    running = await gateway(change=of(server))
    await ready(running, gone, stays)
    lists = server.count("list")
    await until(lambda: server.watches)
    server.cut_watches()
    server.delete(PODS, "gone")
    server.touch()
    server.compact()
    await until(lambda: server.count("list") == lists + 1)
    await until(lambda: states(running).get(gone.url) is not State.READY)
    before = len(gone.seen)
    assert set(await ask(running, 12)) == {name(stays)}
    assert len(gone.seen) == before
    await ready(running, stays)


async def test_a_pod_deleted_while_nobody_tells_gets_nothing_after_its_first_refused_connection(
    gateway: Begin, scripted: StartScripted, server: ApiServer
) -> None:
    """The API server is away, and probes are too seldom to help."""
    gone, stays = await scripted(), await scripted()
    runs(server, "gone", gone)
    runs(server, "stays", stays)

    def change(config: Config) -> None:
        of(server)(config)
        config.probes.health = 600.0

    running = await gateway(change=change)
    await ready(running, gone, stays)
    await server.stop()
    await gone.stop()
    assert set(await ask(running, 12)) == {name(stays)}
    rows = [line for line in (await admin(running, "/metrics")).splitlines() if "worker_faults_total{" in line]
    refused = [float(row.rsplit(" ", 1)[1]) for row in rows if 'fault="refused"' in row or "refused" in row]
    assert refused == [1.0]
    assert states(running)[gone.url] is State.DOWN
    # The list that was known is what there is: the one that answers serves on.
    assert running.discovered.following[0].workers is not None
    assert len(running.discovered.following[0].workers) == 2


async def test_an_api_server_that_is_away_empties_nothing(
    gateway: Begin, engine: StartEngine, server: ApiServer
) -> None:
    one = await engine()
    runs(server, "one", one)
    running = await gateway(change=of(server))
    await ready(running, one)
    await server.stop()
    await until(lambda: running.discovered.following[0].contact.troubles)
    running.discovered.follow()
    assert set(await ask(running)) == {name(one)}
    text = await admin(running, "/metrics")
    assert 'warmroute_discovery_up{source="kubernetes"} 0' in text
    await server.start()
    await until(lambda: running.discovered.following[0].up)
    assert states(running) == {one.url: State.READY}


async def test_a_source_that_cannot_be_asked_at_first_is_asked_again(
    gateway: Begin, engine: StartEngine, server: ApiServer, tmp_path: Path
) -> None:
    """The gateway starts, and serves what it has, before its kubeconfig is there."""
    fixed, found = await engine(), await engine()
    runs(server, "found", found)
    path = tmp_path / "kubeconfig"
    running = await gateway(fixed, change=of(server, api=None, kubeconfig=str(path)))
    await until(lambda: running.discovered.following[0].contact.troubles)
    assert set(await ask(running)) == {name(fixed)}
    text = await admin(running, "/metrics")
    assert 'warmroute_discovery_errors_total{reason="access",source="kubernetes"}' in text
    assert "warmroute_discovery_list_age_seconds{" not in text
    told = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c"}}],
        "clusters": [{"name": "c", "cluster": {"server": server.url}}],
    }
    path.write_text(json.dumps(told))
    await ready(running, fixed, found)
    assert running.discovered.following[0].up


async def test_another_pod_at_the_same_address_has_nothing_of_what_its_forerunner_held(
    gateway: Begin, scripted: StartScripted, server: ApiServer
) -> None:
    one, two = await scripted(), await scripted()
    runs(server, "one", one)
    runs(server, "two", two)
    running = await gateway(change=of(server), policy="cache_aware")
    await ready(running, one, two)
    messages = [{"role": "user", "content": "a long story " * 400}]
    answer = await once(running.port, request(chat(messages=messages)))
    holder = answer.one("x-warmroute-worker")
    worker = running.fleet.workers[holder]
    assert running.index.radix.pages(worker.targets[0].id) > 0
    reused = one if name(one) == holder else two
    # The same address and port, another pod, without a moment between them.
    server.delete(PODS, "one" if reused is one else "two")
    runs(server, "next", reused)
    await until(lambda: running.fleet.workers.get(holder) not in (None, worker))
    await ready(running, one, two)
    fresh = running.fleet.workers[holder]
    assert [running.index.radix.pages(target.id) for target in fresh.targets] == [0]
    assert fresh.identity == "uid-of-next"


async def test_the_pods_of_an_inference_pool_are_followed_as_the_pool_says(
    gateway: Begin, engine: StartEngine, server: ApiServer
) -> None:
    one, two = await engine(), await engine()
    runs(server, "one", one, labels={"pool": "a"})
    runs(server, "two", two, labels={"pool": "b"})
    server.put(POOLS, inference_pool("engines", one.port, pool="a"))
    running = await gateway(change=of(server, "inference_pool"))
    await ready(running, one)
    server.put(POOLS, inference_pool("engines", two.port, pool="b"))
    await ready(running, two)
    assert set(await ask(running)) == {name(two)}
