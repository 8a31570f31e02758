"""SGLang's disaggregation: both engines are given one request at once, and meet in a room.

The prefill engine does not compute before the decode engine has come and has memory. It then sends, and answers when it
has sent: one token, whatever was asked for. Whoever leaves a room tells the other only if they have met, and a prefill
engine's request that is aborted tells nobody: the other side waits until its own time is over.
(SGLang 0.5.23, disaggregation/prefill.py, decode.py and common/conn.py.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from load_tests.engine.disagg.connector import JSON
from load_tests.engine.errors import ApiError
from load_tests.engine.replies import Reply

DEFAULT_PORT = 8998
RETRACTED = "Retracted under decode memory pressure without a KV backup. Retry later."
ABORTED = "Aborted by AbortReq."


class Key(NamedTuple):
    """A room on one rank of a prefill engine; ``copy`` tells apart the sequences of one request in one room."""

    rank: int
    room: int
    copy: int


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where one sequence is to meet its other half, as the request's body says."""

    host: str
    port: int
    room: int
    copy: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def invitations(body: JSON, name: str, count: int) -> list[Invitation]:
    """One for each of ``count`` sequences: a number counts on from room to room, a list is repeated.

    Raises ApiError 400 where there is no room, or the fields are of no use.
    """
    rooms = _spread(body.get("bootstrap_room"), count, "bootstrap_room", counts=True)
    hosts = _spread(body.get("bootstrap_host"), count, "bootstrap_host")
    ports = _spread(body.get("bootstrap_port"), count, "bootstrap_port")
    seen: Counter[int] = Counter()
    found: list[Invitation] = []
    for host, port, room in zip(hosts, ports, rooms, strict=True):
        if room is None:
            text = f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={name!r}"
            raise ApiError(400, text)
        if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room < 2**63:
            raise ApiError(400, f"bootstrap_room must be an integer from 0 to 2^63 - 1, got {room!r}")
        if not isinstance(port, int | None) or not isinstance(host, str | None):
            raise ApiError(400, "bootstrap_host must be a string and bootstrap_port an integer")
        found.append(Invitation(host or "", DEFAULT_PORT if port is None else port, room, seen[room]))
        seen[room] += 1
    return found


def _spread(value: object, count: int, name: str, *, counts: bool = False) -> Sequence[object]:
    if not isinstance(value, list):
        steps = isinstance(value, int) and counts
        return [value + place if steps and isinstance(value, int) else value for place in range(count)]
    if not value or count % len(value):
        raise ApiError(400, f"The length of {name} should be equal to the batch size.")
    # Choices of one prompt are neighbours here.
    each = count // len(value)
    return [item for item in value for _ in range(each)]


def first_token(reply: Reply) -> Reply:
    """What a prefill engine says of a reply: its first token, whatever was asked for."""
    if not reply.tokens:
        return reply
    part = reply.parts[0]
    shown = part.text if part.kind == "text" else ""
    finish = reply.finish if len(reply.tokens) == 1 else "length"
    again = reply.again
    return replace(
        reply,
        tokens=reply.tokens[:1],
        parts=reply.parts[:1],
        text=shown,
        content=shown,
        finish=finish,
        stop_reason=None,
        calls=[],
        reasoning=part.text if part.kind == "reasoning" else "",
        again=None if again is None else lambda seen: first_token(again(seen)),
    )


def failure(what: str, label: str, name: str, room: int, reason: str) -> ApiError:
    """An end in the words of a scheduler; ``label`` is what its source calls the request."""
    text = f"{what} failed for request rank=0 {label}.rid={name!r} {label}.bootstrap_room={room}"
    text += f" with exception KVTransferError(bootstrap_room={room}): {reason}"
    return ApiError(500, text, kind="InternalServerError")
