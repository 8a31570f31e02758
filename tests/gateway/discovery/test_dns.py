"""Names that lead to workers, as a real name server tells them: addresses, service records, lives, failures and nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import dns.rcode
import pytest

from gateway.discovery import dns as source
from tests.gateway.discovery.nameserver import NameServer, naming
from tests.gateway.discovery.sources import watching
from tests.gateway.talk import until

A, B, SIX = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    async with naming() as started:
        yield started


def of(server: NameServer, **more: Any) -> Any:
    told = {"host": "engines.test.", "port": 8000, "nameservers": [server.address], "shortest": 0.05, "grace": 0.3}
    return watching("dns", **{**told, "longest": 0.1, **more})


async def test_addresses_of_both_families_are_followed(server: NameServer) -> None:
    server.says("A", "10.0.0.1")
    async with of(server) as watched:
        await watched.until(A)
        server.says("A", "10.0.0.2", "10.0.0.1")
        await watched.until(A, B)
        server.says("AAAA", "fd00::1")
        server.says("A", "10.0.0.2")
        await watched.until(B, SIX)
        assert watched.reasons == []
    async with of(server, family=4) as watched:
        await watched.until(B)


async def test_service_records_have_ports_and_only_the_best_priority_counts(server: NameServer) -> None:
    server.says("SRV", "10 5 8001 one.test.", "10 5 8002 two.test.", "20 5 8003 spare.test.", name="_llm._tcp.test.")
    async with of(server, host="_llm._tcp.test.", port=None, record="srv") as watched:
        await watched.until("http://one.test:8001", "http://two.test:8002")
        server.says("SRV", "20 5 8003 spare.test.", name="_llm._tcp.test.")
        await watched.until("http://spare.test:8003")


@pytest.mark.parametrize("failure", ["SERVFAIL", "REFUSED"])
async def test_a_server_that_fails_says_nothing(server: NameServer, failure: str) -> None:
    server.says("A", "10.0.0.1")
    async with of(server, grace=0) as watched:
        await watched.until(A)
        server.failure = dns.rcode.from_text(failure)
        await watched.until_lost("server_error", 2)
        assert watched.urls == [A] and watched.contact.troubles
        server.failure = None
        server.says("A", "10.0.0.2")
        await watched.until(B)
        await until(lambda: not watched.contact.troubles)
        assert len(watched.lists) == 2


async def test_a_server_that_is_silent_says_nothing(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PATIENCE", 0.3)
    server.says("A", "10.0.0.1")
    async with of(server, grace=0, family=4) as watched:
        await watched.until(A)
        server.silent = True
        await watched.until_lost("timeout")
        assert watched.urls == [A]
        server.silent = False
        server.says("A", "10.0.0.2")
        await watched.until(B)


@pytest.mark.parametrize("vanishes", [True, False])
async def test_that_there_is_nothing_is_believed_when_it_lasts(server: NameServer, vanishes: bool) -> None:
    """The name is gone, or has no records; for a moment, then for good."""
    server.says("A", "10.0.0.1")

    def nothing() -> None:
        if vanishes:
            server.records.clear()
        else:
            server.says("A")

    async with of(server, grace=1) as watched:
        await watched.until(A)
        nothing()
        await watched.until_lost("empty")
        server.says("A", "10.0.0.1")
        await until(lambda: not watched.contact.troubles)
        assert [found.spec.url for some in watched.lists for found in some] == [A]
        nothing()
        await watched.until()
        assert not watched.contact.troubles


async def test_a_name_that_never_was_is_told_and_waited_for(server: NameServer) -> None:
    async with of(server, grace=600) as watched:
        lost = await watched.until_lost("empty", 2)
        assert "engines.test." in lost.message
        assert watched.lists == []
        server.says("A", "10.0.0.1")
        await watched.until(A)
        assert not watched.contact.troubles


async def test_records_are_asked_for_again_when_their_life_is_over_within_bounds(server: NameServer) -> None:
    server.says("A", "10.0.0.1")
    server.ttl = 3600
    async with of(server, family=4, longest=600) as watched:
        await watched.until(A)
    asked = len(server.asked)
    assert asked == 1
    async with of(server, family=4, longest=0.1) as watched:
        await until(lambda: len(server.asked) > asked + 4)
    server.ttl = 0
    async with of(server, family=4, shortest=600, longest=600) as watched:
        await watched.until(A)
        assert len(watched.lists) == 1
