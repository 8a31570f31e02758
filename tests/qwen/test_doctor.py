"""The doctor with the real tokenizer and chat template: its figures are those of the session that is known to the token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.doctor import Note
from gateway.measuring import Tokens, clause
from gateway.prompt import Thinking
from tests.qwen import Files
from tests.qwen.session import REQUESTS, body, strangers


def examined(
    path: Path, lines: list[dict[str, Any]], qwen: Files, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["doctor", str(path), "--json", "--tokenizer", qwen.tokenizer, "--template", qwen.template]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_a_time_at_the_start_of_the_system_prompt(
    qwen: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"tenant": "x", "body": each} for each in strangers("start")]
    told = examined(tmp_path / "start", lines, qwen, capsys)
    (finding,) = told["findings"]
    # At the end it is shared as far as both times agree: more than without it.
    assert finding["text"] == (
        "sessions of tenant x share 418 tokens instead of 486: a time or date at character 5 of the system prompt; "
        "at its end they would share 502"
    )
    assert (finding["tokens_lost"], finding["estimated"], finding["between"]) == (68, False, True)
    assert finding["share_of_hits_lost"] == 68 / 486


def test_the_same_time_at_its_end_costs_what_it_says(
    qwen: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"tenant": "x", "body": each} for each in strangers("end")]
    told = examined(tmp_path / "end", lines, qwen, capsys)
    assert told["findings"] == []
    assert examined(tmp_path / "none", [{"body": each} for each in strangers()], qwen, capsys)["findings"] == []


def test_the_session_of_four_requests(qwen: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"tenant": "x", "session": "one", "body": body(number)} for number in REQUESTS]
    told = examined(tmp_path / "session", lines, qwen, capsys)
    (finding,) = told["findings"]
    assert finding["cause"] == "thinking_stripped" and not finding["estimated"]
    # Of the 898 tokens of the third prompt, the 824 of the fourth could have been found, and 504 were.
    assert finding["tokens_lost"] == 824 - 504
    assert told["tenants"]["x"]["qwen3.5"]["tokens_cached"] == 506 + 773 + 504
    assert finding["text"].startswith(f"tenant x loses {100 * 320 / (320 + 1783):.0f} % of its hits at the thinking of")


def test_tools_in_another_order_cost_what_canonical_ones_save(
    qwen: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = body(2)
    turned["tools"] = turned["tools"][::-1]
    lines = [{"tenant": "x", "session": "one", "body": each} for each in (body(1), turned)]
    (finding,) = examined(tmp_path / "tools", lines, qwen, capsys)["findings"]
    assert finding["cause"] == "tools_reordered" and not finding["estimated"]
    assert 400 < finding["tokens_lost"] < 506 and finding["canonical_gain_tokens"] == finding["tokens_lost"]


def test_prompts_that_cannot_be_rendered_are_estimated(
    qwen: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    system = "Now: 09:00:0{}. You help people with whatever they ask, and you do so in few words."
    lines = [
        {"body": {"system": system.format(at), "messages": [{"role": "user", "content": "hi"}]}} for at in range(2)
    ]
    (finding,) = examined(tmp_path / "messages", lines, qwen, capsys)["findings"]
    assert finding["cause"] == "time" and finding["estimated"]


def test_token_ids_of_texts_and_bodies_that_have_none(qwen: Files) -> None:
    tokens = Tokens(qwen.tokenizer, None)
    assert tokens.ids("chat", json.dumps(body(1)).encode()) is None
    assert tokens.ids("chat", b"no") is None
    told = [
        Note("x", "m", 1, "completions", b'{"prompt": "%s"}' % text, Thinking.STRIP, None, None, None, None, False, 0.0)
        for text in (b"one two three", b"one two four")
    ]
    assert tokens.lineage(*told) == (2, 3, 3)


def test_clauses() -> None:
    text = "One. It is 9:30.5 now! 现在：三点。End\nlast"
    found = [text[slice(*clause(text, at))] for at in (0, 8, 24, 30, 34)]
    assert found == ["One. ", "It is 9:30.5 now! ", "现在：三点。", "End\n", "last"]
