"""Addresses in what engines say of their failures, hidden from tenants that are not to know where engines are.

An engine's error may quote its own host, its partner's or its bootstrap server's ("ConnectError: http://10.1.2.3:8998").
For a tenant with ``hide_addresses`` these become `WORD`: names and addresses of the workers that are known here; loopback,
private and link-local addresses; any other address that has a port; URLs of all these, up to their path. Only errors are
changed: bodies of answers of 400 and above, and error events of streams. What a model said is never touched.
"""

import re
from collections.abc import Iterable, Iterator
from ipaddress import ip_address

import msgspec

from gateway.http.sse import payload, spans
from gateway.workers import Worker

WORD = b"[worker]"

_URL = rb"(?:[A-Za-z][A-Za-z0-9+.-]{0,20}:(?:\\?/){2}(?:[^\s/@\"'<>\\]{0,200}@)?)?"
_V4 = rb"\d{1,3}(?:\.\d{1,3}){3}"
_V6 = rb"[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:(?<=:)" + _V4 + rb")?(?:%\w{1,16})?"
_PORT = rb"(?::\d{1,5})?"
_ADDRESS = re.compile(
    rb"(?<![\w.:])" + _URL + rb"(?:\[(?P<in>" + _V6 + rb")\]|(?P<v4>" + _V4 + rb")|(?P<v6>" + _V6 + rb"))"
    rb"(?P<port>" + _PORT + rb")(?![\w:]|\.\d)"
)


def hidden(data: bytes, workers: Iterable[Worker]) -> bytes:
    """``data`` without addresses; see the module's head."""
    names = _names(workers)
    if names is not None:
        data = names.sub(WORD, data)
    return _ADDRESS.sub(_replaced, data)


def hidden_in_events(data: bytes, workers: Iterable[Worker]) -> bytes:
    """Whole events, those that tell of errors without addresses; an event too large to be held comes in parts, unchanged."""
    if b"error" not in data:
        return data
    parts: list[bytes] = []
    past = 0
    for start, end, past in spans(data):
        event = data[start:past]
        parts.append(hidden(event, workers) if is_error(data[start:end]) else event)
    return b"".join(parts) + data[past:]


def is_error(event: bytes) -> bool:
    """Whether an event of any dialect tells of an error and of nothing that was generated."""
    name, data = payload(event)
    if name == b"error":
        return True
    if b'"error"' not in data:
        return False
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(body, dict):
        return False
    return body.get("error") is not None or "error" in (body.get("object"), body.get("type")) or _failed(body)


def _failed(body: dict[str, object]) -> bool:
    return body.get("type") in ("response.failed", "response.incomplete")


def _names(workers: Iterable[Worker]) -> re.Pattern[bytes] | None:
    """Hosts and authorities of all workers, with the URL that they may be part of."""
    found = sorted({re.escape(name.encode()) for worker in workers for name in _named(worker)}, key=len, reverse=True)
    if not found:
        return None
    return re.compile(rb"(?<![\w.-])" + _URL + rb"(?:" + b"|".join(found) + rb")" + _PORT + rb"(?![\w-]|\.\w)", re.I)


def _named(worker: Worker) -> Iterator[str]:
    yield worker.authority
    if "." in worker.host:
        # A host of one word may be any word.
        yield worker.host


def _replaced(found: re.Match[bytes]) -> bytes:
    text = found["in"] or found["v6"] or b".".join(b"%d" % int(each) for each in found["v4"].split(b"."))
    try:
        address = ip_address(text.decode().partition("%")[0])
    except ValueError:
        return found[0]
    if text == b"::":
        # Two colons in a text are two colons.
        return WORD if found["in"] else found[0]
    inner = address.is_private or address.is_loopback or address.is_link_local
    return WORD if inner or found["port"] or found["in"] else found[0]
