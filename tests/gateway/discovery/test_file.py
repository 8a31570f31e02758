"""Workers that a file lists: written, replaced, broken, missing, led to by a link."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gateway.config import WorkerTemplate
from gateway.config_reader import Secret
from tests.gateway.discovery.sources import watching

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


def replace(path: Path, text: str) -> None:
    """As careful programs write: beside it, then renamed."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_yaml_and_json_are_read_and_what_one_says_wins_over_what_is_said_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_B", "secret-b")
    file = tmp_path / "workers.yaml"
    file.write_text(f'- {{url: "{A}"}}\n- {{url: "{B}", role: decode, api_key: "${{KEY_OF_B}}"}}\n')
    worker = WorkerTemplate(role="prefill", api_key=Secret("of-all"), bootstrap="{host}:8998")
    async with watching("file", worker, path=str(file), every=0.05) as watched:
        await watched.until(A, B)
        first, second = (found.spec for found in watched.lists[-1])
        assert (first.role, first.api_key, first.bootstrap) == ("prefill", "of-all", ("10.0.0.1", 8998))
        assert (second.role, second.api_key, second.bootstrap) == ("decode", "secret-b", ("10.0.0.2", 8998))
        replace(file, json.dumps([{"url": B}]))
        await watched.until(B)


@pytest.mark.parametrize(
    "text",
    ["", "[", "workers: []", '[{"url": "http://10.0.0.1:8000"', "[{url: ftp://a}]", "[{url: 'http://a', rolle: x}]"],
)
async def test_what_cannot_be_used_leaves_the_list_and_is_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"[{{url: '{A}'}}]")
    async with watching("file", path=str(file), every=0.05) as watched:
        await watched.until(A)
        file.write_text(text)
        lost = await watched.until_lost("malformed")
        assert str(file) in lost.message
        assert watched.urls == [A] and watched.contact.troubles
        file.write_text(f"[{{url: '{B}'}}]")
        await watched.until(B)
        assert not watched.contact.troubles


async def test_a_list_of_none_is_said_by_brackets_only(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"[{{url: '{A}'}}]")
    async with watching("file", path=str(file), every=0.05) as watched:
        await watched.until(A)
        file.unlink()
        await watched.until_lost("unreadable", 2)
        assert watched.urls == [A]
        file.write_text("[]")
        await watched.until()


async def test_a_link_that_is_turned_is_followed(tmp_path: Path) -> None:
    """As ConfigMaps are updated: the folder's content changes by one rename of a link."""
    for name, url in (("one", A), ("two", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workers.yaml").write_text(f"[{{url: '{url}'}}]")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "workers.yaml").symlink_to("..data/workers.yaml")
    async with watching("file", path=str(tmp_path / "workers.yaml"), every=0.05) as watched:
        await watched.until(A)
        (tmp_path / "..new").symlink_to("two")
        os.replace(tmp_path / "..new", tmp_path / "..data")
        await watched.until(B)


async def test_a_problem_tells_its_line_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIDDEN", "hunter2hunter2")
    file = tmp_path / "workers.yaml"
    file.write_text(f"- {{url: '{A}'}}\n- {{url: '{B}', engine: '${{HIDDEN}}'}}\n")
    async with watching("file", path=str(file), every=0.05) as watched:
        lost = await watched.until_lost("malformed")
    assert "line 2: [1].engine" in lost.message
    assert "hunter2" not in lost.message
    assert watched.lists == []
