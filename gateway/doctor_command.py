"""``warmroute doctor FILE``: requests of a file, examined as those that pass the gateway are."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import IO, Any, NamedTuple, cast

import msgspec
from msgspec import Raw
from rich.console import Console
from rich.markup import escape
from xxhash import xxh3_64_intdigest

from gateway.content import end_of
from gateway.dialects import Dialect, Reading, Route, all_dialects
from gateway.doctor import Doctor, Note
from gateway.errors import BadRequest
from gateway.examining import Measure
from gateway.naming import Found
from gateway.prompt import thinking_of
from gateway.sessions import Session, Sessions

MEMORY = 1024 * 1024 * 1024
"""Bytes of bodies that are kept; if a file has more, the doctor samples its sessions."""
LONGEST = 64 * 1024 * 1024
"""Bytes of a line."""
NAMED = 20
"""Lines that are told why they were not read; all are counted."""
_members = msgspec.json.Decoder(dict[str, Raw])


class BadLine(Exception):
    """This line is no request; says why and what to do."""


class Request(NamedTuple):
    """One line."""

    path: bytes
    body: bytes
    tenant: str
    headers: dict[bytes, bytes]
    session: str | None
    time: float | None


def run(
    file: str,
    *,
    as_json: bool = False,
    examples: bool = False,
    limit: int | None = None,
    tokenizer: str | None = None,
    template: str | None = None,
) -> int:
    """Examine ``file`` (``-``: standard input) and print what was found; 1 if it has no request, 2 if it cannot be read.

    Raises `ValueError` for a tokenizer or a template that is none.
    """
    examined = Examined(examples, _measure(tokenizer, template))
    try:
        with _opened(file) as lines:
            for number, line in _lines(lines):
                if limit is not None and examined.requests >= limit:
                    break
                examined.line(number, line)
    except (OSError, EOFError) as error:
        print(f"warmroute doctor: {file} cannot be read: {error}", file=sys.stderr)
        return 2
    report = examined.report()
    if as_json:
        print(json.dumps(report))
    else:
        show(report, Console(highlight=False, soft_wrap=True))
    return 0 if examined.requests else 1


def _measure(tokenizer: str | None, template: str | None) -> Measure | None:
    if tokenizer is None:
        if template is not None:
            raise ValueError("--template needs --tokenizer FILE too")
        return None
    try:
        from gateway.measuring import Tokens
    except ImportError:
        raise ValueError("--tokenizer needs the extra: pip install 'warmroute[tokens]'") from None
    return Tokens(tokenizer, template)


@contextmanager
def _opened(file: str) -> Iterator[IO[bytes]]:
    """The file, unpacked if it is gzipped."""
    with sys.stdin.buffer if file == "-" else open(file, "rb") as raw:
        # Standard input has no way back.
        buffered = cast(BufferedReader, raw)
        zipped = buffered.peek(2)[:2] == b"\x1f\x8b"
        yield cast(IO[bytes], gzip.GzipFile(fileobj=buffered)) if zipped else buffered


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1 on, line); of a line that is too long its beginning."""
    number = 0
    while line := file.readline(LONGEST):
        number += 1
        rest = line
        while not rest.endswith(b"\n") and len(rest) == LONGEST:
            rest = file.readline(LONGEST)
        yield number, line.strip()


class Examined:
    """What the lines of a file tell. Sessions are found as the gateway finds them."""

    def __init__(self, examples: bool = False, measure: Measure | None = None) -> None:
        self.doctor = Doctor(memory=MEMORY, examples=examples, measure=measure, ideal=True)
        self.sessions = Sessions()
        self.requests = 0
        self.bad = 0
        self.problems: list[str] = []
        dialects = all_dialects()
        self._routes: dict[bytes, tuple[Dialect, Route]] = {
            path: (dialect, route) for dialect in dialects.values() for path, route in dialect.routes.items()
        }

    def line(self, number: int, line: bytes) -> None:
        """Examine one line; one that is no request is counted and told."""
        if not line:
            return
        try:
            self._request(request_in(line))
        except (BadLine, BadRequest) as error:
            self.bad += 1
            if len(self.problems) < NAMED:
                self.problems.append(f"line {number}: {error}")
            return
        self.requests += 1

    def _request(self, request: Request) -> None:
        found = self._routes.get(request.path)
        if found is None:
            known = ", ".join(sorted(path.decode() for path, (_, route) in self._routes.items() if route.generates))
            raise BadLine(f"path {request.path.decode()!r} generates nothing; use one of {known}")
        dialect, route = found
        if not route.generates:
            raise BadLine(f"path {request.path.decode()!r} generates nothing; leave such requests out")
        reading = dialect.read(route, request.body)
        model = reading.model or ""
        now = float(self.requests) if request.time is None else request.time
        session = self._session(request, reading, model, now)
        if session is None:
            self.doctor.skipped["no session"] += 1
            return
        note = Note(
            request.tenant,
            model,
            session.hash,
            route.kind,
            request.body,
            thinking_of(model),
            None,
            None,
            None,
            None,
            session.turns == 0,
            now,
        )
        session.turns += 1
        self.doctor.seen(note)
        self.doctor.examine()

    def _session(self, request: Request, reading: Reading, model: str, now: float) -> Session | None:
        sessions, tenant = self.sessions, request.tenant
        named = sessions.name(request.headers, reading)
        if request.session is not None:
            named = Found("given", request.session.encode("utf-8", "replace"))
        if named is not None:
            return sessions.find(named, tenant, model, now)
        if reading.make_prompt is None:
            return None
        prompt = reading.make_prompt(thinking_of(model))
        scope = xxh3_64_intdigest(b"\x00".join((tenant.encode(), model.encode("utf-8", "replace"), reading.namespace)))
        session = sessions.by_content(prompt, scope, tenant, model, now)
        said = end_of(prompt, scope)
        if session is not None and said is not None:
            sessions.remember_content(session, said)
        return session

    def report(self) -> dict[str, Any]:
        """The doctor's report, and what became of the lines."""
        lines = {"requests": self.requests, "sessions": len(self.sessions), "bad_lines": self.bad}
        return {**self.doctor.report(), **lines, "problems": self.problems}


def request_in(line: bytes) -> Request:
    """A bare body, or ``{"body": {...}, "path" or "url", "headers", "tenant", "time", "session"}``. Raises `BadLine`."""
    if len(line) >= LONGEST:
        raise BadLine(f"it is longer than {LONGEST >> 20} MiB; leave such requests out")
    try:
        members = _members.decode(line)
    except (ValueError, UnicodeError, RecursionError) as error:
        raise BadLine(f"it is no JSON object ({error}); write one request a line") from None
    body = members.get("body")
    if body is None:
        return Request(path_of(members), line, "default", {}, None, None)
    told = {name: _value(raw) for name, raw in members.items() if name != "body"}
    raw = bytes(body)
    if raw[:1] == b'"':
        raw = str(_value(body)).encode("utf-8", "surrogatepass")
    try:
        inner = _members.decode(raw)
    except (ValueError, UnicodeError, RecursionError):
        raise BadLine("body must be an object; give the request's JSON as it was sent") from None
    path = told.get("path", told.get("url"))
    if path is not None and not isinstance(path, str):
        raise BadLine("path must be a string, like /v1/chat/completions")
    return Request(
        path_of(inner) if path is None else _plain(path),
        raw,
        _string(told, "tenant") or "default",
        _headers(told.get("headers")),
        _string(told, "session"),
        _time(told.get("time")),
    )


def _value(raw: Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (ValueError, UnicodeError, RecursionError) as error:
        raise BadLine(f"it is no JSON object ({error}); write one request a line") from None


def _string(told: dict[str, Any], name: str) -> str | None:
    value = told.get(name)
    if value is None:
        return None
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise BadLine(f"{name} must be a string that is not empty; leave it out if there is none")
    return str(value)


def _time(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise BadLine("time must be a number of seconds; leave it out if there is none")
    return float(value)


def _headers(value: Any) -> dict[bytes, bytes]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadLine('headers must be an object of strings, like {"x-session-id": "a"}')
    return {name.lower().encode("utf-8", "replace"): each.encode("utf-8", "replace") for name, each in value.items()}


def _plain(path: str) -> bytes:
    """A path or a URL without host and query."""
    rest = path.partition("://")[2]
    if rest:
        path = "/" + rest.partition("/")[2]
    return path.partition("?")[0].encode("utf-8", "replace")


def path_of(members: dict[str, Raw]) -> bytes:
    """The path that takes such a body. Raises `BadLine`."""
    if "messages" in members:
        blocks = (b'"tool_use"', b'"tool_result"', b'"cache_control"', b'"input_schema"')
        text = bytes(members["messages"]) + bytes(members.get("tools", b""))
        if "system" in members or "anthropic_version" in members or any(mark in text for mark in blocks):
            return b"/v1/messages"
        return b"/v1/chat/completions"
    for name, path in (("input", b"/v1/responses"), ("prompt", b"/v1/completions")):
        if name in members:
            return path
    if "text" in members or "input_ids" in members:
        return b"/generate"
    raise BadLine("it has no messages, input, prompt or text; give the body of a request, alone or as body")


def show(report: dict[str, Any], console: Console) -> None:
    """For people."""
    breaks = report["breaks"]
    console.print(
        f"{_number(report['requests'], 'request')}, {_number(report['sessions'], 'session')}; "
        f"{report['examined']:,} examined, {_number(breaks['examined'], 'break')}"
    )
    if report["skipped"]:
        why = ", ".join(f"{count:,} {reason}" for reason, count in sorted(report["skipped_by"].items()))
        console.print(f"not examined: {report['skipped']:,} ({why})")
    if not report["findings"]:
        console.print("nothing found: every prompt that was examined goes on where the one before it ended")
    for number, finding in enumerate(report["findings"], 1):
        console.print(f"\n[bold]{number}.[/] {escape(finding['text'])}")
        about = "about " if finding["estimated"] else ""
        lost = f"{about}{finding['tokens_lost']:,} tokens lost"
        told = f"{_number(finding['breaks'], 'break')} in {_number(finding['sessions'], 'session')}, {lost}"
        if finding["canonical_gain_tokens"]:
            told += f"; canonical prompts would save {about}{finding['canonical_gain_tokens']:,} of them"
        console.print(f"   {told}")
        if finding["example"]:
            for name in ("before", "after"):
                console.print(f"   {name:6} {escape(repr(finding['example'][name]))}")
    if report["bad_lines"]:
        console.print(f"\nnot read: {_number(report['bad_lines'], 'line')}")
        for problem in report["problems"]:
            console.print(f"   {escape(problem)}")


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
