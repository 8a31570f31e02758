"""Recorded sessions of coding agents as causal traffic: each turn waits for the answer before it, then for the recorded think
time. Whoever answers slower is asked slower, as in life.

The form is one JSON object a line: ``id``, ``block_size``, ``tool_tokens``, ``system_tokens`` and ``chains``, of which
each is a conversation (the main one or a sub-agent's) with ``requests``; one has ``t`` (seconds from the session's start),
``in`` and ``out`` (tokens), ``think_time``, ``keep`` (leading blocks shared with the request before it) and ``new`` (ids of the
others as start, length, ...). Ids are local to a session; tools and system prompt are taken to be the same in all sessions
that have as many tokens of both, for one model.
"""

from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.mooncake import LARGEST, TraceError, object_in

COARSE = 8
"""Recorded blocks that are one of ours: long prompts are many blocks, and a hit loses less than one of them."""

FOR_EACH = 16
"""Sessions for each worker, of those recorded."""

LONGEST = 1 << 22
"""Blocks of the longest prompt."""

WINDOW = 3600.0
"""Seconds over which sessions begin; when they did was not recorded."""


def parse(lines: Iterable[str], name: str, workers: int, seed: int = 0) -> Traffic:
    """Some sessions of ``lines``, drawn by the seed. Raises `TraceError`."""
    random, naming = Random(seed), Naming()
    rows = [_row(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise TraceError("the trace has no session")
    sizes = sorted({row["block_size"] for _, row in rows})
    if len(sizes) > 1:
        raise TraceError(f"block_size must be the same in all lines, not {sizes[0]} and {sizes[-1]}")
    drawn = random.sample(rows, min(len(rows), FOR_EACH * workers))
    starts: dict[tuple[Any, ...], int] = {}
    chains: list[Chain] = []
    for place, (number, row) in enumerate(drawn):
        begin = random.uniform(0, WINDOW)
        try:
            chains += _session(row, place, begin, naming, starts)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else f"is not as it should be: {error}"
            raise TraceError(f"line {number}: chains: {what}") from None
    return Traffic(name, sizes[0] * COARSE, chains)


def _row(number: int, line: str) -> tuple[int, dict[str, Any]]:
    row = object_in(number, line)
    for field, kind in (
        ("id", str),
        ("block_size", int),
        ("tool_tokens", int),
        ("system_tokens", int),
        ("chains", list),
    ):
        # A bool is an int to Python.
        if not isinstance(row.get(field), kind) or isinstance(row[field], bool):
            raise TraceError(f"line {number}: {field} must be {kind.__name__}, not {row.get(field)!r:.40}")
    for field, least in (("block_size", 1), ("tool_tokens", 0), ("system_tokens", 0)):
        if not least <= row[field] < LARGEST:
            raise TraceError(
                f"line {number}: {field} must be at least {least}, not {row[field]!r:.40}, and below 2**53"
            )
    return number, row


def _session(
    row: dict[str, Any], place: int, begin: float, naming: Naming, starts: dict[tuple[Any, ...], int]
) -> Iterator[Chain]:
    size = row["block_size"]
    shared = (row["tool_tokens"] + row["system_tokens"]) // size
    for number, chain in enumerate(row["chains"]):
        if not chain["requests"]:
            continue
        group = (chain["requests"][0]["model"], row["tool_tokens"], row["system_tokens"])
        common = starts.setdefault(group, len(starts))
        turns: list[Turn] = []
        for asked, ids in _prompts(chain["requests"]):
            tokens = max(1, _whole(asked, "in"))
            # The last id of a full group names the group; what a group of sessions shares is named by that group.
            full = min(len(ids), tokens // size) // COARSE
            names = [
                ("shared", common, at) if (at + 1) * COARSE <= shared and not number else ("own", place, ids[end - 1])
                for at, end in enumerate(range(COARSE, full * COARSE + 1, COARSE))
            ]
            # One that was measured by two clocks may be a little less than nothing.
            waited = _seconds(asked, "think_time") if asked.get("think_time") is not None else 0.0
            turns.append(
                Turn(naming.chained(names), tokens, _whole(asked, "out"), (), max(0.0, waited) if turns else 0.0)
            )
        session = row["id"] if not number else f"{row['id']}/{number}"
        yield Chain(begin + max(0.0, _seconds(chain["requests"][0], "t")), tuple(turns), session)


def _prompts(requests: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Each request of a chain with all ids of its prompt."""
    ids: list[int] = []
    for asked in requests:
        new = asked["new"]
        ids = ids[: _whole(asked, "keep")]
        for each in new:
            if type(each) is not int or not 0 <= each < LARGEST:
                raise ValueError(f"new has {each!r:.40}: whole numbers of at least 0, below 2**53, are needed")
        for first, length in zip(new[::2], new[1::2], strict=True):
            if len(ids) + length > LONGEST:
                raise ValueError(f"new has a run of {length} blocks: a prompt may have {LONGEST} at most")
            ids.extend(range(first, first + length))
        yield asked, ids


def _whole(asked: dict[str, Any], field: str) -> int:
    value = asked[field]
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{field} is {value!r:.40}: a whole number of at least 0, below 2**53, is needed")
    return value


def _seconds(asked: dict[str, Any], field: str) -> float:
    value = asked[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        raise ValueError(f"{field} is {value!r:.40}: a finite number of seconds is needed")
    return float(value)
