"""Pods and endpoints as an API server tells them, with everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.config import WorkerTemplate
from gateway.kube import mirror
from tests.gateway.discovery.apiserver import (
    PODS,
    SLICES,
    ApiServer,
    endpoint,
    endpoint_slice,
    pod,
    serving,
)
from tests.gateway.discovery.sources import watching
from tests.gateway.talk import until


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with serving() as started:
        yield started


def pods(server: ApiServer, **more: Any) -> Any:
    told = {"selector": "app=vllm", "namespace": "llm", "api": server.url, **more}
    return watching("kubernetes", **told)


def a(number: int, port: int = 8000) -> str:
    return f"http://10.0.0.{number}:{port}"


# -- what is a worker --------------------------------------------------------------------------------------------------


async def test_pods_come_change_and_go(server: ApiServer) -> None:
    server.put(PODS, pod("one", "10.0.0.1"))
    server.put(PODS, pod("other", "10.0.0.9", labels={"app": "web"}))
    server.put(PODS, pod("elsewhere", "10.0.0.8", namespace="web"))
    async with pods(server) as watched:
        await watched.until(a(1))
        server.put(PODS, pod("two", None, ready=None))
        server.put(PODS, pod("two", "10.0.0.2", ready=False))
        await watched.until(a(1), a(2))
        assert watched.serving == [a(1)]
        server.put(PODS, pod("two", "10.0.0.2"))
        await until(lambda: watched.serving == [a(1), a(2)])
        server.put(PODS, pod("one", "10.0.0.1", ends=True))
        await until(lambda: watched.serving == [a(2)])
        assert watched.urls == [a(1), a(2)]
        server.delete(PODS, "one")
        await watched.until(a(2))
        # It does not match any more: for whoever watches, it is deleted.
        server.put(PODS, pod("two", "10.0.0.2", labels={"app": "web"}))
        await watched.until()
        assert watched.reasons == []


async def test_a_readiness_gate_keeps_a_pod_out(server: ApiServer) -> None:
    server.put(PODS, pod("one", gates={"example.com/warm": False}))
    async with pods(server) as watched:
        await watched.until(a(1))
        assert watched.serving == []
        server.put(PODS, pod("one", gates={"example.com/warm": True}))
        await until(lambda: watched.serving == [a(1)])


async def test_labels_and_annotations_say_what_a_pod_is(server: ApiServer) -> None:
    ports = [{"name": "api", "containerPort": 8000}, {"name": "metrics", "containerPort": 9000}]
    labels = {"warmroute.io/role": "decode", "warmroute.io/engine": "sglang"}
    annotations = {"warmroute.io/port": "api", "warmroute.io/models": "a, b", "warmroute.io/engine": "vllm"}
    server.put(PODS, pod("one", ports=ports, labels=labels, annotations=annotations))
    worker = WorkerTemplate(role="prefill", pool="rack", max_running=9)
    async with pods(server, worker=worker) as watched:
        await watched.until(a(1))
        (found,) = watched.lists[-1]
    assert (found.spec.role, found.spec.engine, found.spec.models) == ("decode", "vllm", ["a", "b"])
    assert (found.spec.pool, found.spec.max_running, found.identity) == ("rack", 9, "uid-of-one")


async def test_what_is_wrong_with_one_pod_costs_the_others_nothing(server: ApiServer) -> None:
    two = [{"name": "x", "containerPort": 1}, {"name": "y", "containerPort": 2}]
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2", ports=two))
    async with pods(server) as watched:
        lost = await watched.until_lost("unclear")
        assert "pod llm/two has 2 ports" in lost.message
        assert watched.urls == [a(1)]
        server.put(PODS, pod("two", "10.0.0.2", ports=two, annotations={"warmroute.io/port": "y"}))
        await watched.until(a(1), a(2, 2))
        assert not watched.contact.troubles
        # Nonsense on one that serves changes nothing but what is told of it.
        server.put(PODS, pod("one", labels={"warmroute.io/role": "both"}))
        await until(lambda: watched.contact.troubles)
        assert "pod llm/one.role: 'both' is not one of" in watched.lost[-1].message
        assert watched.urls == [a(1), a(2, 2)]


@pytest.mark.parametrize(("port", "url"), [(9000, a(1, 9000)), ("metrics", a(1, 9000)), (None, a(1, 8080))])
async def test_the_port_is_told_by_number_or_name_or_is_called_http(server: ApiServer, port: Any, url: str) -> None:
    ports = [{"name": "metrics", "containerPort": 9000}, {"name": "http", "containerPort": 8080}]
    server.put(PODS, pod("one", ports=ports))
    async with pods(server, port=port) as watched:
        await watched.until(url)


async def test_endpoints_of_a_service_with_their_conditions(server: ApiServer) -> None:
    server.put(
        SLICES,
        endpoint_slice(
            "engines-a",
            endpoint("10.0.0.1", "u1"),
            endpoint("10.0.0.2", "u2", ready=None),
            endpoint("10.0.0.3", "u3", ready=False, serving=False),
            endpoint("10.0.0.4", "u4", ready=False, serving=True, terminating=True),
            # A Service that publishes all of them calls those that end ready too.
            endpoint("10.0.0.5", "u5", ready=True, serving=True, terminating=True),
        ),
    )
    server.put(SLICES, endpoint_slice("web-a", endpoint("10.0.0.99"), service="web"))
    async with watching("kubernetes", service="engines", namespace="llm", api=server.url) as watched:
        await watched.until(*(a(number) for number in range(1, 6)))
        assert watched.serving == [a(1), a(2)]
        # While it moves to another slice it is in both.
        server.put(SLICES, endpoint_slice("engines-b", endpoint("10.0.0.3", "u3"), endpoint("10.0.0.6", "u6")))
        await until(lambda: watched.serving == [a(1), a(2), a(3), a(6)])
        server.put(SLICES, endpoint_slice("engines-a"))
        await watched.until(a(3), a(6))
        server.delete(SLICES, "engines-b")
        await watched.until()


async def test_a_pod_of_two_families_is_one_worker(server: ApiServer) -> None:
    server.put(SLICES, endpoint_slice("six", endpoint("fd00::1", "u1"), endpoint("fd00::2", "u2"), family="IPv6"))
    server.put(SLICES, endpoint_slice("four", endpoint("10.0.0.1", "u1")))
    async with watching("kubernetes", service="engines", namespace="llm", api=server.url) as watched:
        await watched.until(a(1), "http://[fd00::2]:8000")


async def test_several_services_by_label_and_several_namespaces(server: ApiServer) -> None:
    prefill = {"tier": "engine", "warmroute.io/role": "prefill"}
    server.put(SLICES, endpoint_slice("p-1", endpoint("10.0.0.1"), service="p", labels=prefill))
    server.put(
        SLICES, endpoint_slice("d-1", endpoint("10.0.0.2"), service="d", labels={"tier": "engine"}, namespace="b")
    )
    options = {"services": "tier=engine", "namespaces": ["llm", "b"], "api": server.url}
    async with watching("kubernetes", **options) as watched:
        await watched.until(a(1), a(2))
        assert [found.spec.role for found in watched.lists[-1]] == ["prefill", None]
    async with watching("kubernetes", **{**options, "namespaces": ["*"]}) as watched:
        await watched.until(a(1), a(2))
        assert server.asked[-1].namespace is None


async def test_no_list_is_complete_while_a_namespace_was_never_listed(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2", namespace="b"))
    server.trouble("list", times=3, status=500)
    async with pods(server, namespace=None, namespaces=["llm", "b"]) as watched:
        await watched.until(a(1), a(2))
        assert len(watched.lists) == 1


# -- lists -------------------------------------------------------------------------------------------------------------


async def test_long_lists_come_in_pages(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PAGE", 2)
    for number in range(1, 6):
        server.put(PODS, pod(f"pod-{number}", f"10.0.0.{number}"))
    async with pods(server) as watched:
        await watched.until(*(a(number) for number in range(1, 6)))
    assert server.count("list") == 3


async def test_a_page_whose_list_was_forgotten_has_all_listed_at_once(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PAGE", 2)
    for number in range(1, 6):
        server.put(PODS, pod(f"pod-{number}", f"10.0.0.{number}"))
    server.forget_pages = 1
    async with pods(server) as watched:
        await watched.until(*(a(number) for number in range(1, 6)))
        assert len(watched.lists) == 1
    assert [each.query.get("limit") for each in server.asked if each.verb == "list"] == ["2", "2", None]


async def test_a_server_that_is_away_or_fails_leaves_the_list(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    async with pods(server) as watched:
        await watched.until(a(1))
        await server.stop()
        await watched.until_lost("unreachable", 2)
        assert watched.urls == [a(1)]
        server.trouble("list", times=2, status=500)
        server.trouble("watch", times=2, status=503)
        server.compact()
        server.objects[PODS].clear()
        server.version += 50
        server.put(PODS, pod("two", "10.0.0.2"))
        server.compact()
        await server.start()
        await watched.until(a(2))
        assert [found.spec.url for some in watched.lists for found in some] == [a(1), a(2)]


async def test_a_server_that_asks_to_be_left_alone_is(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    server.trouble("list", status=429, headers={"Retry-After": "1"})
    async with pods(server) as watched:
        lost = await watched.until_lost("throttled")
        assert lost.again == 1.0
        assert server.count("list") == 1
        await watched.until(a(1))
        assert not watched.contact.troubles


async def test_what_is_not_allowed_names_the_verb(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    server.forbidden.add(("list", PODS))
    async with pods(server) as watched:
        lost = await watched.until_lost("forbidden")
        assert "may not list pods in namespace llm: grant the verb 'list' on pods" in lost.message
        server.forbidden = {("watch", PODS)}
        lost = await watched.until_lost("forbidden", server.count("list") + 1)
        await until(lambda: "may not watch pods in namespace llm" in watched.lost[-1].message)
        # What is listed is used all the same.
        await watched.until(a(1))


async def test_a_token_that_was_rotated_is_read_again(server: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    server.tokens = {"first"}
    server.put(PODS, pod("one"))
    async with pods(server, token_file=str(token)) as watched:
        await watched.until(a(1))
        server.tokens = {"second"}
        server.cut_watches()
        await watched.until_lost("unauthorized")
        token.write_text("second\n")
        server.put(PODS, pod("two", "10.0.0.2"))
        await watched.until(a(1), a(2))
    assert server.asked[-1].token == "second"


# -- watches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cleanly", [True, False])
async def test_a_watch_that_ends_goes_on_where_it_was(server: ApiServer, cleanly: bool) -> None:
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2"))
    async with pods(server) as watched:
        await watched.until(a(1), a(2))
        await until(lambda: server.watches)
        server.cut_watches(cleanly)
        server.delete(PODS, "one")
        await watched.until(a(2))
    assert server.count("list") == 1
    assert server.count("watch") >= 2
    assert ("unreachable" in watched.reasons) is not cleanly


@pytest.mark.parametrize("within", [True, False])
async def test_a_version_that_expired_has_all_listed_anew(server: ApiServer, within: bool) -> None:
    """A pod was deleted while the watch was broken off, and nobody can tell that any more."""
    server.gone_within = within
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2"))
    async with pods(server) as watched:
        await watched.until(a(1), a(2))
        await until(lambda: server.watches)
        server.delete(PODS, "one")
        server.touch()
        server.compact()
        if not within:
            server.cut_watches()
        await watched.until(a(2))
        assert server.count("list") == 2
        assert "expired" not in watched.reasons


async def test_bookmarks_keep_the_version_fresh(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    async with pods(server) as watched:
        await watched.until(a(1))
        await until(lambda: server.watches)
        assert server.asked[-1].query["allowWatchBookmarks"] == "true"
        server.version += 1000
        server.bookmark()
        await until(lambda: not any(watch.pending for watch in server.watches))
        server.compact()
        server.cut_watches(cleanly=True)
        await until(lambda: server.count("watch") == 2)
        assert server.asked[-1].query["resourceVersion"] == str(server.version)
        server.put(PODS, pod("two", "10.0.0.2"))
        await watched.until(a(1), a(2))
    assert server.count("list") == 1


async def test_a_silent_watch_is_ended_and_all_is_listed_anew(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "GRACE", 0.2)
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2"))
    async with pods(server, relist=1) as watched:
        await watched.until(a(1), a(2))
        await until(lambda: server.watches)
        server.muted = True
        server.delete(PODS, "one")
        await watched.until(a(2))
        assert "silent" in watched.reasons


async def test_what_a_watch_never_told_the_next_list_does(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    server.put(PODS, pod("two", "10.0.0.2"))
    async with pods(server, relist=1) as watched:
        await watched.until(a(1), a(2))
        del server.objects[PODS]["llm", "one"]
        await watched.until(a(2))
        assert watched.reasons == []


async def test_nonsense_of_a_watch_has_all_listed_anew(server: ApiServer) -> None:
    server.put(PODS, pod("one"))
    async with pods(server) as watched:
        await watched.until(a(1))
        nonsense: list[tuple[str, Any, str | None]] = [
            ("ADDED", {"metadata": 7}, "malformed"),
            ("ERROR", {"code": 500, "message": "etcd"}, "server_error"),
            ("NEW", {"metadata": {}}, None),
        ]
        for number, (kind, told, reason) in enumerate(nonsense, 1):
            await until(lambda number=number: server.count("watch") == number and server.watches)
            server.event(kind, told)
            if reason is not None:
                await watched.until_lost(reason)
        server.put(PODS, pod("two", "10.0.0.2"))
        await watched.until(a(1), a(2))


async def test_a_list_that_hangs_is_given_up(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.kube.api.ANSWER", 0.3)
    server.put(PODS, pod("one"))
    server.trouble("list", hang=True)
    async with pods(server) as watched:
        await watched.until_lost("silent")
        await watched.until(a(1))


# -- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_the_list_becomes_the_servers_truth(
    server: ApiServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random changes and faults; a list is never of pods that never were, and the last one is what there is."""
    monkeypatch.setattr(mirror, "PAGE", 3)
    monkeypatch.setattr(mirror, "GRACE", 0.2)
    random = Random(seed)
    server.put(PODS, pod("pod-1", "10.0.0.1"))

    def change() -> None:
        number = random.randint(1, 9)
        name, ip = f"pod-{number}", f"10.0.0.{number}"
        if ("llm", name) in server.objects[PODS] and random.random() < 0.4:
            server.delete(PODS, name)
        else:
            uid = f"{name}-{random.randint(0, 3)}"
            server.put(PODS, pod(name, ip, ready=random.random() < 0.8, ends=random.random() < 0.2, uid=uid))

    faults = [
        server.compact,
        server.touch,
        server.bookmark,
        server.cut_watches,
        lambda: server.cut_watches(cleanly=True),
        lambda: server.trouble("list", status=random.choice([429, 500, 503])),
        lambda: server.trouble("watch", status=random.choice([410, 429, 500])),
        lambda: server.trouble("list", seconds=0.1),
        lambda: setattr(server, "gone_within", not server.gone_within),
        lambda: setattr(server, "forget_pages", 1),
        lambda: setattr(server, "muted", not server.muted),
    ]
    async with pods(server, relist=1) as watched:
        await until(lambda: watched.lists)
        for _ in range(60):
            random.choice([change, change, *faults])()
            await asyncio.sleep(random.choice([0, 0, 0.01, 0.05]))
        server.muted = False
        server.troubles.clear()

        def truth() -> set[tuple[str, bool, str]]:
            told = set()
            for each in server.objects[PODS].values():
                meta, status = each["metadata"], each["status"]
                good = {"type": "Ready", "status": "True"} in status["conditions"] and "deletionTimestamp" not in meta
                told.add((f"http://{status['podIP']}:8000", good, meta["uid"]))
            return told

        def said() -> set[tuple[str, bool, str]]:
            return {(found.spec.url, found.serving, found.identity or "") for found in watched.lists[-1]}

        await until(lambda: said() == truth(), 30)
        assert len(watched.lists) > 1
