"""The prompt's logprobs in SGLang's ``/generate``: the prefill engine has them, the client asked the decode engine for them."""

from typing import Any

import msgspec

from gateway.http.sse import payload, spans

FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

Logprobs = dict[int, dict[str, Any]]
"""Number of an answer -> its fields that tell of the prompt."""

_any = msgspec.json.Decoder()


def prompt_logprobs(answer: bytes, streamed: bool) -> Logprobs:
    """Of each answer in a prefill engine's, the fields that tell of the prompt; empty if it tells of none."""
    found: Logprobs = {}
    for told in _payloads(answer) if streamed else [answer]:
        for number, meta in _metas(_decoded(told)):
            fields = {name: meta[name] for name in FIELDS if isinstance(meta.get(name), list)}
            if fields:
                found[number] = fields
    return found


def merged(answer: bytes, first: Logprobs) -> bytes:
    """A decode engine's answer, or one event's payload, with ``first`` before what it says of the prompt itself."""
    told = _decoded(answer)
    changed = False
    for number, meta in _metas(told):
        for name, values in first.get(number, {}).items():
            own = meta.get(name)
            meta[name] = values + (own if isinstance(own, list) else [])
            changed = True
    return msgspec.json.encode(told) if changed else answer


def merged_events(data: bytes, first: Logprobs) -> bytes:
    """The same for whole events of a stream; what follows the last of them stays as it is."""
    parts, past = [], 0
    for start, end, past in spans(data):
        event = data[start:end]
        body = payload(event)[1]
        parts.append(b"data: " + merged(body, first) if body.startswith(b"{") else event)
        parts.append(data[end:past])
    return b"".join(parts) + data[past:]


def _payloads(answer: bytes) -> list[bytes]:
    return [payload(answer[start:end])[1] for start, end, _ in spans(answer)]


def _decoded(body: bytes) -> Any:
    try:
        return _any.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _metas(told: Any) -> list[tuple[int, dict[str, Any]]]:
    """Number and ``meta_info`` of each answer: its place in a list, its ``index`` in a stream of several."""
    rows = told if isinstance(told, list) else [told]
    found = []
    for place, row in enumerate(rows):
        meta = row.get("meta_info") if isinstance(row, dict) else None
        if isinstance(meta, dict):
            index = row.get("index")
            found.append((index if isinstance(index, int) and len(rows) == 1 else place, meta))
    return found
