"""The prompt's logprobs in SGLang's ``/generate``: the prefill engine has them, the client asked the decode engine for them."""

from typing import Any

import msgspec

from gateway.http.sse import payload, spans

FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")

_any = msgspec.json.Decoder()


def prompt_logprobs(answer: bytes, streamed: bool) -> list[dict[str, Any]]:
    """Of each answer in a prefill engine's, the fields that tell of the prompt; empty if it tells of none."""
    last = answer
    if streamed:
        found = [data for data in _payloads(answer) if data.startswith(b"{")]
        if not found:
            return []
        last = found[-1]
    return [
        {name: meta[name] for name in FIELDS if isinstance(meta.get(name), list)} for meta in _metas(_decoded(last))
    ]


def merged(answer: bytes, first: list[dict[str, Any]]) -> bytes:
    """A decode engine's answer, or one event's payload, with ``first`` before what it says of the prompt itself."""
    told = _decoded(answer)
    metas = _metas(told)
    if not metas or not first:
        return answer
    for meta, before in zip(metas, first if len(first) == len(metas) else first[:1] * len(metas), strict=True):
        for name, values in before.items():
            own = meta.get(name)
            meta[name] = values + (own if isinstance(own, list) else [])
    return msgspec.json.encode(told)


def merged_events(data: bytes, first: list[dict[str, Any]]) -> bytes:
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


def _metas(told: Any) -> list[dict[str, Any]]:
    rows = told if isinstance(told, list) else [told]
    metas = [row.get("meta_info") if isinstance(row, dict) else None for row in rows]
    return [meta for meta in metas if isinstance(meta, dict)] if all(isinstance(meta, dict) for meta in metas) else []
