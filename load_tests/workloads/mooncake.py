"""Reader of traces in Mooncake's form: one JSON object a line, prompts as ids of blocks.

A line has ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one id for each block
of prompt tokens, the last may be partial) and optionally ``session_id`` and ``block_size`` (tokens of a block, 512 where it is
not told, the same in all lines). Two prompts share a prefix exactly as far as their ids agree. The text is not in such a trace.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK = 512
"""Tokens of one block, where a trace does not tell."""


LARGEST = 1 << 53
"""What a number of a trace has to be below: a float tells whole numbers apart up to here."""


class TraceError(ValueError):
    """A line that is not as it should be; the message names line and field."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    at: float
    """Seconds after the trace's first request."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str | None = None
    block: int = BLOCK
    """Tokens of one block."""


def read(path: str | Path, limit: int | None = None) -> list[TracedRequest]:
    """The first ``limit`` requests of a file, in order of time. Raises `OSError` and `TraceError`."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        return parse(lines, limit)


def parse(lines: Iterable[str], limit: int | None = None) -> list[TracedRequest]:
    """The first ``limit`` requests of ``lines``, in order of time; empty lines are passed over. Raises `TraceError`."""
    found: list[tuple[int, TracedRequest]] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) >= limit:
            break
        if line.strip():
            found.append(_request(number, line))
    if not found:
        raise TraceError("the trace has no request")
    sizes = sorted({request.block for _, request in found})
    if len(sizes) > 1:
        raise TraceError(f"block_size must be the same in all lines, not {sizes[0]} and {sizes[-1]}")
    found.sort(key=lambda each: each[0])
    first = found[0][0]
    return [replace(request, at=(at - first) / 1e3) for at, request in found]


def object_in(number: int, line: str) -> dict[str, Any]:
    """A line that is a JSON object. Raises `TraceError`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"line {number}: an object is needed, not {type(row).__name__}")
    return row


def _request(number: int, line: str) -> tuple[int, TracedRequest]:
    """Timestamp in milliseconds and request of one line."""
    row = object_in(number, line)
    at = _number(number, row, "timestamp", 0)
    size = _number(number, row, "input_length", 1)
    made = _number(number, row, "output_length", 0)
    block = _number(number, row, "block_size", 1) if row.get("block_size") is not None else BLOCK
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers")
    if len(blocks) != -(-size // block):
        raise TraceError(
            f"line {number}: hash_ids has {len(blocks)} blocks of {block} tokens, which does not fit input_length {size}"
        )
    session = row.get("session_id")
    if session is not None and not isinstance(session, str | int):
        raise TraceError(f"line {number}: session_id must be a string or a number")
    return at, TracedRequest(0.0, size, made, tuple(blocks), None if session is None else str(session), block)


def _number(number: int, row: dict[str, Any], field: str, least: int) -> int:
    value = row.get(field)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value < LARGEST:
        what = "is missing" if field not in row else f"is {value!r:.40}"
        raise TraceError(f"line {number}: {field} {what}: a whole number of at least {least} is needed, below 2**53")
    return value
