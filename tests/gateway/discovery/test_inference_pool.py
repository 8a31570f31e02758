"""InferencePools, of both versions: the object says which pods and ports, and may change, vanish or make no sense."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.discovery import load
from gateway.discovery.base import Contact, Lost, Template
from tests.gateway.discovery.apiserver import OLD_POOLS, PODS, POOLS, ApiServer, inference_pool, pod, serving
from tests.gateway.discovery.sources import watching
from tests.gateway.talk import until


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with serving() as started:
        yield started


def of(server: ApiServer, **more: Any) -> Any:
    return watching("inference_pool", **{"pool": "engines", "namespace": "llm", "api": server.url, **more})


def a(number: int, port: int = 8000) -> str:
    return f"http://10.0.0.{number}:{port}"


async def test_a_pool_with_several_ports_has_a_worker_at_each(server: ApiServer) -> None:
    server.put(POOLS, inference_pool("engines", 8000, 8001, app="vllm"))
    server.put(POOLS, inference_pool("others", 9000, app="web"))
    server.put(PODS, pod("one"))
    async with of(server) as watched:
        await watched.until(a(1), a(1, 8001))
        server.put(PODS, pod("one", ready=False))
        await until(lambda: watched.serving == [])
        server.delete(PODS, "one")
        await watched.until()


async def test_the_older_version_is_asked_for_where_there_is_no_other(server: ApiServer) -> None:
    del server.objects[POOLS]
    server.objects[OLD_POOLS] = {}
    server.put(OLD_POOLS, inference_pool("engines", 8000, older=True, app="vllm"))
    server.put(PODS, pod("one"))
    async with of(server) as watched:
        await watched.until(a(1))


async def test_a_cluster_without_pools_is_told(server: ApiServer) -> None:
    del server.objects[POOLS]
    source = load("inference_pool", {"pool": "engines", "namespace": "llm", "api": server.url}, Template())
    source.contact = Contact()
    with pytest.raises(Lost, match="there are no inferencepools of"):
        await anext(aiter(source.watch()))


async def test_a_pool_that_changes_makes_no_sense_or_vanishes(server: ApiServer) -> None:
    server.put(PODS, pod("one", "10.0.0.1", labels={"pool": "a"}))
    server.put(PODS, pod("two", "10.0.0.2", labels={"pool": "b"}))
    async with of(server) as watched:
        lost = await watched.until_lost("no_pool")
        assert "no InferencePool called 'engines'" in lost.message
        assert watched.lists == []
        server.put(POOLS, inference_pool("engines", 8000, pool="a"))
        await watched.until(a(1))
        server.put(POOLS, inference_pool("engines", 9000, pool="b"))
        await watched.until(a(2, 9000))
        assert not watched.contact.troubles
        server.put(POOLS, inference_pool("engines", 9000))
        await watched.until_lost("unclear")
        assert watched.urls == [a(2, 9000)]
        # The pods that were meant are followed still.
        server.put(PODS, pod("three", "10.0.0.3", labels={"pool": "b"}))
        await watched.until(a(2, 9000), a(3, 9000))
        server.delete(POOLS, "engines")
        await watched.until()
        server.put(POOLS, inference_pool("engines", 8000, pool="a"))
        await watched.until(a(1))
        assert not watched.contact.troubles
