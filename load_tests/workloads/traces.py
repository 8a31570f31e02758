"""Traces of requests as traffic: open arrivals, with sessions where they are told or can be inferred."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from load_tests.workloads.chains import Chain, Naming, Traffic, Turn
from load_tests.workloads.mooncake import parse

TICK = 3.0
"""Seconds of one tick of Mooncake's published traces: their requests stand on ticks, and come at any time within."""
ROUNDED = 0.005
"""Seconds by which some of them miss their tick."""


def mooncake(path: str | Path, limit: int | None = None, seed: int = 0) -> Traffic:
    """The requests of a file in Mooncake's form, each at its own time. Raises `OSError` and `TraceError`."""
    with Path(path).open(encoding="utf-8-sig", errors="replace") as lines:
        return mooncake_of(lines, Path(path).name, limit, seed)


def mooncake_of(lines: Iterable[str], name: str, limit: int | None = None, seed: int = 0) -> Traffic:
    """The same of ``lines``. Raises `TraceError`."""
    requests = parse(lines, limit)
    begins = [round(request.at / TICK) * TICK for request in requests]
    ticked = len(requests) > 1 and all(
        abs(request.at - begin) <= ROUNDED for request, begin in zip(requests, begins, strict=True)
    )
    random, naming, block = Random(seed), Naming(), requests[0].block
    at = [begin + random.random() * TICK for begin in begins] if ticked else [request.at for request in requests]
    timed = sorted(zip(at, requests, strict=True), key=lambda each: each[0])
    prompts = [naming.chained(request.blocks[: request.input_tokens // block]) for _, request in timed]
    sessions = named(prompts, [request for _, request in timed])
    chains = [
        Chain(at, (Turn(blocks, request.input_tokens, request.output_tokens),), session)
        for (at, request), blocks, session in zip(timed, prompts, sessions, strict=True)
    ]
    return Traffic(name, block, chains)


class Told(Protocol):
    """A request that may tell its session."""

    @property
    def session(self) -> str | None:
        """``None`` where it does not."""


def named(prompts: Sequence[tuple[int, ...]], requests: Sequence[Told]) -> list[str]:
    """Each request's session: its own, or else that of the latest prompt all of whose full blocks it begins with.

    This is how a gateway finds sessions by content: what goes on from the *whole* of an earlier prompt belongs to it. A
    single block does not tell, for whole fleets share it.
    """
    ends: dict[int, str] = {}
    found = []
    for number, (blocks, request) in enumerate(zip(prompts, requests, strict=True)):
        session = request.session
        if session is None:
            session = next((ends[block] for block in reversed(blocks[1:]) if block in ends), f"inferred-{number}")
            if len(blocks) > 1:
                ends[blocks[-1]] = session
        found.append(session)
    return found
