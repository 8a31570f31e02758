"""``warmroute doctor FILE`` on real files: what people read, what programs read, and lines that are no requests."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.doctor_command import LONGEST, BadLine, Examined, request_in
from tests.gateway.doctor_corpus import pairs

AGENT = "You are an agent for code. Read first, then write, and test what you wrote."


def asked(second: int, *said: str, model: str = "m") -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": "system", "content": f"Now: 2026-11-30 09:00:{second:02}. {AGENT}"}]
    messages += [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    return {"model": model, "messages": messages}


def session(name: str, first: int) -> list[dict[str, Any]]:
    return [
        {"tenant": "x", "session": name, "time": first, "body": asked(first, "Fix it.")},
        {"tenant": "x", "session": name, "time": first + 1, "body": asked(first + 1, "Fix it.", "Done.", "Thanks.")},
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps(each) for name, first in (("a", 10), ("b", 20)) for each in session(name, first)]
    lines.insert(2, "no request")
    lines.insert(3, "")
    lines.append('{"model": "m"}')
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(lines))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", *arguments])
    return status, capsys.readouterr().out


def test_what_people_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, str(file))
    assert status == 0
    assert "4 requests, 2 sessions; 4 examined, 3 breaks" in out
    assert "1. tenant x loses about" in out
    assert "% of its hits at character 5 of the system prompt: a time or date; move it to the end" in out
    assert "2 breaks in 2 sessions, about" in out
    assert (
        "sessions of tenant x share about 6 tokens instead of 25: a time or date at character 5 of the system prompt"
        in out
    )
    assert "not read: 2 lines" in out
    assert "line 3: it is no JSON object" in out and "write one request a line" in out
    assert "line 7: it has no messages, input, prompt or text; give the body of a request" in out
    assert AGENT[:9] not in out


def test_what_programs_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = run(capsys, str(file), "--json")
    told = json.loads(out)
    assert status == 0
    assert {"findings", "examined", "skipped", "share", "tenants"} <= told.keys()
    assert (told["requests"], told["sessions"], told["bad_lines"], len(told["problems"])) == (4, 2, 2, 2)
    lineage, between = told["findings"]
    assert (lineage["cause"], lineage["between"], lineage["breaks"]) == ("time", False, 2)
    assert (between["cause"], between["between"], between["breaks"]) == ("time", True, 1)
    assert (
        lineage["place"]
        == between["place"]
        == {"part": "system", "offset": 5, "text": "character 5 of the system prompt"}
    )
    assert lineage["example"] is None and lineage["estimated"]


def test_examples_only_when_asked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(capsys, str(file), "--examples")
    assert f"before 'Now: 2026-11-30 09:00:20. {AGENT}'"[:50] in out


def test_gzip_standard_input_and_a_limit(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plain = run(capsys, str(file), "--json")
    zipped = file.with_suffix(".gz")
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    assert run(capsys, str(zipped), "--json") == (0, plain)
    for path in (file, zipped):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.FileIO(path))))
        assert run(capsys, "-", "--json") == (0, plain)
    status, out = run(capsys, str(file), "--json", "--limit", "2")
    assert (status, json.loads(out)["requests"]) == (0, 2)


def test_nothing_found_and_nothing_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    path.write_text(json.dumps(asked(1, "hello")))
    status, out = run(capsys, str(path))
    assert status == 0 and "nothing found" in out and "1 request, 1 session; 1 examined, 0 breaks" in out
    path.write_text("")
    assert run(capsys, str(path))[0] == 1
    assert main(["doctor", str(tmp_path / "absent")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    path.write_bytes(b"\x1f\x8b nonsense")
    assert main(["doctor", str(path)]) == 2


def test_options_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    path.write_text("{}")
    assert main(["doctor", str(path), "--template", "t"]) == 2
    assert "--template needs --tokenizer FILE too" in capsys.readouterr().err
    assert main(["doctor", str(path), "--tokenizer", str(path)]) == 2
    assert "is no tokenizer" in capsys.readouterr().err


def test_sessions_are_found_by_headers_fields_and_content() -> None:
    examined = Examined()

    def line(body: dict[str, Any], **more: Any) -> None:
        examined.line(1, json.dumps({"body": body, **more} if more else body).encode())

    line(asked(1, "hi"), headers={"X-Session-ID": "one"})
    line(asked(1, "hi", "ho", "hu"), headers={"x-session-id": "one"})
    line({**asked(1, "hi"), "prompt_cache_key": "two"})
    line({**asked(1, "hi", "ho", "hu"), "prompt_cache_key": "two"})
    line(asked(1, "by content"))
    line(asked(1, "by content", "yes", "and on"))
    line(asked(1, "by content", "yes", "and on", "on", "and on"))
    assert len(examined.sessions) == 3 and examined.bad == 0
    line(asked(1, "hi"), headers={"x-session-id": "one"}, tenant="other")
    assert len(examined.sessions) == 4
    assert examined.report()["breaks"]["examined"] == 0


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, b"/v1/chat/completions"),
        ({"messages": [], "system": "s"}, b"/v1/messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, b"/v1/messages"),
        ({"messages": [], "tools": [{"name": "a", "input_schema": {}}]}, b"/v1/messages"),
        ({"input": "a"}, b"/v1/responses"),
        ({"prompt": "a"}, b"/v1/completions"),
        ({"text": "a"}, b"/generate"),
        ({"body": {"messages": []}, "url": "https://host:1/v1/messages?beta=true"}, b"/v1/messages"),
        ({"body": '{"messages": []}', "path": "/v1/messages?x"}, b"/v1/messages"),
    ],
)
def test_bodies_tell_their_path(body: dict[str, Any], path: bytes) -> None:
    assert request_in(json.dumps(body).encode()).path == path


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        (b"[]", "write one request a line"),
        (b"{", "write one request a line"),
        (b'{"body": 3}', "give the request's JSON as it was sent"),
        (b'{"body": {"messages": []}, "path": 3}', "path must be a string"),
        (b'{"body": {"messages": []}, "tenant": []}', "tenant must be a string"),
        (b'{"body": {"messages": []}, "session": true}', "session must be a string"),
        (b'{"body": {"messages": []}, "time": "now"}', "time must be a number"),
        (b'{"body": {"messages": []}, "headers": {"a": 1}}', "headers must be an object of strings"),
        (b'{"body": {"model": "m"}}', "give the body of a request"),
        (b"x" * LONGEST, "leave such requests out"),
    ],
)
def test_bad_lines_name_the_field_and_the_cure(line: bytes, cure: str) -> None:
    with pytest.raises(BadLine, match=cure):
        request_in(line)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"body": {"input": "x"}, "path": "/v1/embeddings"}, "leave such requests out"),
        ({"body": {"input": "x"}, "path": "/v2/none"}, "use one of /generate, /v1/chat/completions"),
        ({"messages": [], "model": 5}, "model must be a string"),
    ],
)
def test_requests_that_no_prompt_is_in_are_counted_and_lose_nothing_else(body: dict[str, Any], told: str) -> None:
    examined = Examined()
    good = json.dumps(asked(1, "hello")).encode()
    for number, line in enumerate((good, json.dumps(body).encode(), good), 1):
        examined.line(number, line)
    assert (examined.requests, examined.bad) == (2, 1)
    assert examined.problems[0].startswith("line 2: ") and told in examined.problems[0]


def test_all_dialects_of_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "corpus"
    paths = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
    lines = []
    for kind, where in paths.items():
        for number, pair in enumerate(pairs("tools_reordered", kind, 5, seed=9)):
            lines += [
                json.dumps({"path": where, "tenant": kind, "session": str(number), "body": json.loads(body)})
                for body in pair
            ]
    path.write_text("\n".join(lines))
    told = json.loads(run(capsys, str(path), "--json")[1])
    assert {(each["tenant"], each["cause"]) for each in told["findings"]} == {
        (kind, "tools_reordered") for kind in paths
    }
    for each in told["findings"]:
        assert each["canonical_gain_tokens"] == each["tokens_lost"] > 0
