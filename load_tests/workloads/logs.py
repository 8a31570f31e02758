"""Readers of message logs: agents' logs, logs of OpenAI chat requests, and OpenTelemetry spans of model calls.

* Agents' logs: JSON lines with ``input`` and ``output`` (text), ``timestamp`` and ``session_id``.
* OpenAI logs: JSON lines that are a chat-completions request, or have one under ``body`` or ``request``; beside it
  ``timestamp`` or ``created``, ``session_id`` (or the request's ``prompt_cache_key``) and the answer under ``response``, or
  ``usage`` alone.
* Spans: one JSON document with ``spans``, those with ``gen_ai.input.messages`` among their attributes.

A time is a number of seconds, milliseconds, microseconds or nanoseconds since 1970, told apart by its size, or ISO 8601 (UTC
where it tells no zone); smaller numbers are seconds. Everything else may be missing.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from load_tests.workloads.chains import Traffic
from load_tests.workloads.messages import Logged, rendered, traffic
from load_tests.workloads.mooncake import LARGEST, TraceError, object_in

SESSIONS = ("exgentic.session.id", "gen_ai.conversation.id", "session.id")
"""Attributes that tell a span's session, before its trace does."""

LATEST = 1e19
"""Nanoseconds since 1970 that no log has reached."""


def agent_logs(lines: Iterable[str], name: str) -> Traffic:
    """Of agents' logs. Raises `TraceError`."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = object_in(number, line)
        for field in ("input", "output"):
            if not isinstance(row.get(field), str):
                raise TraceError(f"line {number}: {field} must be text, not {row.get(field)!r:.40}")
        output = max(1, len(row["output"].encode("utf-8", "replace")) // 4)
        at = _time(f"line {number}: timestamp", row.get("timestamp"))
        session = _name(f"line {number}: session_id", row.get("session_id"))
        found.append(Logged(row["input"], at=at, output=output, session=session))
    return _traffic(name, found)


def chat_logs(lines: Iterable[str], name: str) -> Traffic:
    """Of OpenAI chat requests. Raises `TraceError`."""
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_chat(f"line {number}: ", object_in(number, line)))
    return _traffic(name, found)


def spans(text: str, name: str) -> Traffic:
    """Of OpenTelemetry spans. Raises `TraceError`."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"not JSON: {error}") from None
    rows = document.get("spans") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise TraceError("spans must be a list")
    found = []
    for number, row in enumerate(rows, 1):
        attributes = row.get("attributes") if isinstance(row, dict) else None
        if not isinstance(attributes, dict):
            raise TraceError(f"span {number}: attributes must be an object")
        if "gen_ai.input.messages" in attributes:
            found.append(_span(f"span {number}: ", row, attributes))
    return _traffic(name, found)


def _traffic(name: str, found: list[Logged]) -> Traffic:
    if not found:
        raise TraceError("the trace has no request")
    return traffic(name, found)


def request_in(row: dict[str, Any]) -> dict[str, Any] | None:
    """The chat request of one line; ``None`` if it has none."""
    for each in (row, row.get("body"), row.get("request")):
        if isinstance(each, dict) and "messages" in each:
            return each
    return None


def _chat(where: str, row: dict[str, Any]) -> Logged:
    asked = request_in(row)
    messages = None if asked is None else asked["messages"]
    if asked is None or not isinstance(messages, list) or not messages:
        raise TraceError(f"{where}messages must be a list with a message, here or under body or request")
    response = row.get("response")
    response = response if isinstance(response, dict) else {}
    # A batch's answer stands one level deeper.
    answer = response["body"] if isinstance(response.get("body"), dict) else response
    usage = row.get("usage") if row.get("usage") is not None else answer.get("usage")
    if usage is not None and not isinstance(usage, dict):
        raise TraceError(f"{where}usage must be an object, not {usage!r:.40}")
    tokens, output = (
        _count(f"{where}usage.{key}", (usage or {}).get(key)) for key in ("prompt_tokens", "completion_tokens")
    )
    field = "timestamp" if row.get("timestamp") is not None else "created"
    given = (row.get("session_id"), asked.get("session_id"), row.get("prompt_cache_key"), asked.get("prompt_cache_key"))
    session = next((each for each in given if each is not None), None)
    return Logged(
        rendered(messages, asked.get("tools")),
        _answer(answer),
        _time(where + field, row.get(field)),
        tokens=tokens or None,
        output=output,
        session=_name(f"{where}session_id", session),
        model=str(asked.get("model") or ""),
    )


def _answer(response: dict[str, Any]) -> str | None:
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return rendered([message]) if isinstance(message, dict) else None


def _span(where: str, row: dict[str, Any], attributes: dict[str, Any]) -> Logged:
    messages = _messages(f"{where}gen_ai.input.messages", attributes["gen_ai.input.messages"])
    if not messages:
        raise TraceError(f"{where}gen_ai.input.messages must be a list with a message")
    said, text = attributes.get("gen_ai.output.messages"), attributes.get("gen_ai.output.text")
    answer: str | None = None
    if said is not None:
        answer = rendered(_messages(f"{where}gen_ai.output.messages", said))
    elif isinstance(text, str):
        answer = rendered([{"role": "assistant", "content": text}])
    counts = []
    for kinds in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        fields = [f"gen_ai.usage.{kind}" for kind in kinds]
        field = next((each for each in fields if attributes.get(each) is not None), fields[0])
        counts.append(_count(where + field, attributes.get(field)))
    session = next((attributes[key] for key in SESSIONS if attributes.get(key) is not None), row.get("trace_id"))
    return Logged(
        rendered(messages, attributes.get("gen_ai.tool.definitions")),
        answer,
        _time(f"{where}start_time", row.get("start_time")),
        _time(f"{where}end_time", row.get("end_time")),
        counts[0] or None,
        counts[1],
        _name(f"{where}session", session),
        str(attributes.get("gen_ai.request.model") or ""),
    )


def _messages(where: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(value, list):
        raise TraceError(f"{where} must be a list, not {type(value).__name__}")
    return value


def _time(where: str, value: Any) -> float | None:
    """Seconds since 1970."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise TraceError(f"{where} is {value!r:.40}: a number or ISO 8601 is needed") from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LATEST:
        raise TraceError(f"{where} is {value!r:.40}: a number from 0 on or ISO 8601 is needed")
    for size, scale in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if value >= size:
            return value / scale
    return float(value)


def _count(where: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < LARGEST):
        raise TraceError(f"{where} is {value!r:.40}: a whole number of at least 0 is needed, below 2**53")
    return value


def _name(where: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TraceError(f"{where} must be a string or a number, not {value!r:.40}")
    return str(value)
