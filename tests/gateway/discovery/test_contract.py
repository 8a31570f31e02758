"""What every source owes, file by file of the folder."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.config import parse
from gateway.config_reader import ConfigError
from gateway.discovery import load, names
from gateway.discovery.base import BadOption, Source, Template
from tests.gateway.discovery.apiserver import PODS, POOLS, inference_pool, pod, serving
from tests.gateway.discovery.nameserver import naming
from tests.gateway.discovery.sources import watching

FOLDER = Path(__file__).parents[3] / "gateway/discovery"
KINDS = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem not in ("__init__", "base"))
A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


@dataclass
class World:
    """What a source asks: its options, and a second worker that comes."""

    options: dict[str, Any]
    grow: Callable[[], object]


@asynccontextmanager
async def file(folder: Path) -> AsyncIterator[World]:
    path = folder / "workers.json"
    path.write_text(json.dumps([{"url": A}]))
    yield World({"path": str(path), "every": 0.05}, lambda: path.write_text(json.dumps([{"url": A}, {"url": B}])))


@asynccontextmanager
async def dns(folder: Path) -> AsyncIterator[World]:
    async with naming() as server:
        server.says("A", "10.0.0.1")
        options = {
            "host": "engines.test.",
            "port": 8000,
            "nameservers": [server.address],
            "shortest": 0.05,
            "longest": 0.1,
        }
        yield World(options, lambda: server.says("A", "10.0.0.1", "10.0.0.2"))


@asynccontextmanager
async def kubernetes(folder: Path) -> AsyncIterator[World]:
    async with serving() as server:
        server.put(PODS, pod("one", "10.0.0.1"))
        options = {"selector": "app=vllm", "namespace": "llm", "api": server.url}
        yield World(options, lambda: server.put(PODS, pod("two", "10.0.0.2")))


@asynccontextmanager
async def pool(folder: Path) -> AsyncIterator[World]:
    async with serving() as server:
        server.put(POOLS, inference_pool("engines", 8000, app="vllm"))
        server.put(PODS, pod("one", "10.0.0.1"))
        options = {"pool": "engines", "namespace": "llm", "api": server.url}
        yield World(options, lambda: server.put(PODS, pod("two", "10.0.0.2")))


WORLDS = {"file": file, "dns": dns, "kubernetes": kubernetes, "inference_pool": pool}


def test_every_file_is_a_source_and_tried_here() -> None:
    assert set(KINDS) == set(WORLDS) <= set(names())


@pytest.mark.parametrize("kind", KINDS)
async def test_lists_are_complete_and_it_ends_when_it_is_cancelled(kind: str, tmp_path: Path) -> None:
    async with WORLDS[kind](tmp_path) as world:
        # Made and never watched, it leaves nothing open.
        assert isinstance(load(kind, world.options, Template()), Source)
        async with watching(kind, **world.options) as watched:
            await watched.until(A)
            world.grow()
            await watched.until(A, B)
            assert all(found.serving for found in watched.lists[-1])
        # Cancelled before it said anything, it ends as well: `watching` sees to that.
        async with watching(kind, **world.options):
            pass


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unknown_and_a_missing_option_are_named_at_the_start(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no option 'surprise'") as told:
        async with WORLDS[kind](tmp_path) as world:
            load(kind, {**world.options, "surprise": 1}, Template())
    assert told.value.option == "surprise"
    with pytest.raises(BadOption) as told:
        load(kind, {}, Template())
    assert told.value.option
    with pytest.raises(ConfigError, match=rf"line 1: discovery\[0\]\.{told.value.option}"):
        parse(f"discovery: {{source: {kind}}}")
    with pytest.raises(ConfigError, match=r"line 2: discovery\[0\]\.surprise"):
        parse(f"discovery:\n  - {{source: {kind}, surprise: 1}}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{source: fyle, path: a}", "discovery[0].source: no source is called 'fyle'; did you mean 'file'?"),
        ("{source: file, path: ''}", "discovery[0].path: path must be some text"),
        ("{source: file, path: a, every: soon}", "discovery[0].every: every must be a duration"),
        ("{source: file, path: a, worker: {url: 'http://a'}}", "discovery[0].worker.url: is what the source finds"),
        ("{source: file, path: a, worker: {role: both}}", "discovery[0].worker.role: 'both' is not one of"),
        (
            "{source: file, path: a, worker: {rolle: both}}",
            "discovery[0].worker.rolle: unknown key; did you mean 'role'?",
        ),
        ("{source: file, path: a, name: admin}", "discovery[0].name: 'admin' is the name of other workers"),
        (
            "[{source: file, path: a}, {source: file, path: b}]",
            "discovery[1].name: 'file' is the name of other workers",
        ),
        ("{source: dns, host: a}", "discovery[0].port: port is needed beside host, or record: srv"),
        ("{source: dns, host: a, port: 1, record: srv}", "discovery[0].port: service records have ports of their own"),
        ("{source: dns, host: a, port: 1, nameservers: ns}", "discovery[0].nameservers: nameservers must be addresses"),
        ("{source: dns, host: a, port: 70000}", "discovery[0].port: port must be a port from 1 to 65535"),
        ("{source: kubernetes, selector: a, service: b}", "discovery[0].service: one of selector (of pods), service"),
        ("{source: kubernetes, selector: a, api: b}", "discovery[0].api: api must be a URL"),
        ("{source: kubernetes, selector: a, context: b}", "discovery[0].context: context is one of a kubeconfig"),
        ("{source: kubernetes, selector: a, ca: b}", "discovery[0].ca: ca goes with api"),
        ("{source: kubernetes, selector: a, namespace: b, namespaces: [c]}", "discovery[0].namespace: namespace and"),
        ("{source: kubernetes, selector: a, scheme: ftp}", "discovery[0].scheme: scheme must be one of http, https"),
    ],
)
def test_what_is_wrong_is_told_with_key_and_cure(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"discovery: {text}")
    assert told in str(error.value)
