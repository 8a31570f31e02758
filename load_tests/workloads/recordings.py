"""Recordings of a gateway (`recording` in its configuration) as causal traffic.

The first line says what the file is. Each further line is a request: ``timestamp`` (milliseconds, when it came),
``duration_ms``, ``status``, ``outcome`` (optional),
``session_id``, ``input_length`` and ``output_length`` (tokens; null where the engine did not say),
and its prompt: ``pages`` (how many, the last one in part), ``page`` (``text``: so many bytes; ``ids``: sixteen token ids),
``hash_ids`` (of whole pages, each of which names all pages before it).

A page of text holds a fractional number of tokens, here what it held on average. Of one session, a request that came after an
answer follows on it, and thinks as long as then; requests that overlapped are chains of their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.mooncake import LARGEST, TraceError, object_in
from load_tests.workloads.traces import named

MARK = "warmroute_recording"
"""Field of the first line; its value is the form's version."""
FORM = 1

ID_TOKENS = 16
"""Tokens of a page of token ids."""

SLACK = 0.002
"""Seconds by which a request may seem to have come before the answer that it follows: times are told in milliseconds."""

REFUSED = 400
"""Status from which on an engine computed nothing."""


@dataclass(slots=True)
class _Request:
    """One line; seconds."""

    at: float
    ended: float
    session: str | None
    tokens: int | None
    output: int | None
    pages: float
    by_ids: bool
    ids: Sequence[int]
    left: bool
    """Its client did not wait for the end."""
    blocks: tuple[int, ...] = ()


def parse(lines: Iterable[str], name: str) -> Traffic:
    """All requests of ``lines`` whose answer began, those that a client left included: what a line does not tell of them is
    taken to be as it is on average. Raises `TraceError`."""
    requests = sorted(_requests(lines), key=lambda each: each.at)
    if not requests:
        raise TraceError("the recording has no request that was answered")
    size = _size(requests)
    block = max(1, round(size))
    outputs = [each.output for each in requests if each.output is not None]
    if not outputs:
        if all(each.left for each in requests):
            raise TraceError("no line tells output_length: every client left before its answer had ended")
        raise TraceError(
            "no line tells output_length: the engines reported no usage, or are of a kind that is not asked for it in streams"
        )
    usual = max(1, round(fmean(outputs)))
    naming, first = Naming(), requests[0].at
    for each in requests:
        if each.tokens is None:
            each.tokens = max(1, round(each.pages * (ID_TOKENS if each.by_ids else size)))
        each.output = usual if each.output is None else each.output
        each.blocks = naming.chained(_blocks(each, block))
        each.at, each.ended = each.at - first, each.ended - first
    sessions = named([each.blocks for each in requests], requests)
    by_session: dict[str, list[_Request]] = {}
    for session, each in zip(sessions, requests, strict=True):
        by_session.setdefault(session, []).append(each)
    chains = [_chain(turns, session, block) for session, members in by_session.items() for turns in _followed(members)]
    return Traffic(name, block, chains)


def _requests(lines: Iterable[str]) -> Iterable[_Request]:
    numbered = iter(enumerate(lines, 1))
    for number, line in numbered:
        if line.strip():
            form = object_in(number, line).get(MARK)
            if form != FORM:
                raise TraceError(f"line {number}: {MARK} is {form!r}: recordings of form {FORM} are read here")
            break
    for number, line in numbered:
        # A gateway may still be writing the last one.
        if line.strip() and line.endswith("\n"):
            row = object_in(number, line)
            if _number(number, row, "status") < REFUSED:
                yield _request(number, row)


def _request(number: int, row: dict[str, Any]) -> _Request:
    at = _number(number, row, "timestamp") / 1e3
    session, ids = row.get("session_id"), row.get("hash_ids")
    if session is not None and not isinstance(session, str):
        raise TraceError(f"line {number}: session_id must be a string or null")
    if not isinstance(ids, list) or not all(type(id_) is int for id_ in ids):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers")
    if row.get("page") not in ("text", "ids"):
        raise TraceError(f"line {number}: page must be text or ids, not {row.get('page')!r:.40}")
    pages = _number(number, row, "pages")
    if len(ids) != int(pages):
        raise TraceError(f"line {number}: hash_ids has {len(ids)} ids, which does not fit {pages:g} pages")
    sizes = [
        _number(number, row, key) if row.get(key) is not None else None for key in ("input_length", "output_length")
    ]
    tokens, output = [None if size is None else int(size) for size in sizes]
    if tokens is not None:
        tokens = max(1, tokens)
    return _Request(
        at,
        at + _number(number, row, "duration_ms") / 1e3,
        session,
        tokens,
        output,
        pages,
        row["page"] == "ids",
        ids,
        row.get("outcome") == "client_gone",
    )


def _number(number: int, row: dict[str, Any], field: str) -> float:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < LARGEST:
        what = "is missing" if field not in row else f"is {value!r:.40}"
        raise TraceError(f"line {number}: {field} {what}: a number of at least 0 is needed, below 2**53")
    return float(value)


def _size(requests: Sequence[_Request]) -> float:
    """Tokens of a block: of a page of text, or of one of token ids where there is no text."""
    told = [each for each in requests if not each.by_ids and each.tokens is not None and each.pages]
    if told:
        return max(sum(each.tokens or 0 for each in told) / sum(each.pages for each in told), 1.0)
    if all(each.by_ids for each in requests):
        return float(ID_TOKENS)
    raise TraceError("no line tells input_length, so nothing tells what a page holds: engines have to report usage")


def _blocks(request: _Request, block: int) -> Sequence[int]:
    """Ids of its full blocks. An id names all before it, so that of smaller pages the last of a block will do."""
    assert request.tokens is not None
    full = request.tokens // block
    if not request.by_ids:
        return request.ids[:full]
    ends = [(place + 1) * block // ID_TOKENS for place in range(full)]
    return [request.ids[end - 1] for end in ends if 0 < end <= len(request.ids)]


def _followed(requests: Sequence[_Request]) -> list[list[_Request]]:
    """A session's requests, in order of time, as chains: each goes on from the one that had ended by then with which it shares
    most, and from the latest of those."""
    chains: list[list[_Request]] = []
    for each in requests:
        free = [chain for chain in chains if chain[-1].ended <= each.at + SLACK]
        if free:
            best = max(free, key=lambda chain: (_shared(chain[-1].blocks, each.blocks), chain[-1].ended))
            best.append(each)
        else:
            chains.append([each])
    return chains


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading blocks that are the same; an id names all before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _chain(requests: Sequence[_Request], session: str, block: int) -> Chain:
    turns = []
    for place, each in enumerate(requests):
        assert each.tokens is not None
        assert each.output is not None
        after: tuple[int, ...] = ()
        if place + 1 < len(requests):
            after = _answer(each, requests[place + 1], block)
        think = max(0.0, each.at - requests[place - 1].ended) if place else 0.0
        turns.append(Turn(each.blocks, each.tokens, each.output, after, think))
    return Chain(requests[0].at, tuple(turns), session)


def _answer(request: _Request, following: _Request, block: int) -> tuple[int, ...]:
    """Blocks of the next prompt that the answer fills, if that prompt carries it: it goes on from the whole of this one, and is
    longer by at least the answer. One whose thinking was dropped is not."""
    assert request.tokens is not None
    assert request.output is not None
    assert following.tokens is not None
    full = len(request.blocks)
    whole = full == request.tokens // block and _shared(request.blocks, following.blocks) == full
    if not whole or following.tokens < request.tokens + request.output:
        return ()
    # Of the last token that was sampled nothing was computed.
    return following.blocks[full : max(full, (request.tokens + request.output - 1) // block)]
