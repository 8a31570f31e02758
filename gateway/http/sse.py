"""Where an event of a server-sent stream ends. Nothing here parses events: the relay must not pay for that."""

import re
from collections.abc import Callable, Iterator

_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n")
_END = re.compile(b"|".join(_ENDS))


def boundary(data: bytes) -> int:
    """Offset just after the last complete event in ``data``; 0 if there is none."""
    if data.endswith(b"\n\n"):
        return len(data)
    best = 0
    for end in _ENDS:
        at = data.rfind(end)
        if at >= 0:
            best = max(best, at + len(end))
    return best


def spans(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Where every complete event in ``data`` begins, ends, and where the blank line that ends it is over."""
    at = 0
    # In one pass: looking for each kind of end by itself would read all the rest for those that are not there, each time.
    for end in _END.finditer(data):
        yield at, end.start(), end.end()
        at = end.end()


def events(data: bytes) -> Iterator[bytes]:
    """Every complete event in ``data``, without the blank line that ends it."""
    return (data[start:end] for start, end, _ in spans(data))


def first_event(data: bytes, opens: Callable[[bytes], bool] | None = None) -> bytes | None:
    """The first complete event that is not only a comment, as it stands; ``None`` if there is none yet. ``opens``: events to
    be passed over too."""
    for event in events(data):
        said = any(line and not line.startswith(b":") for line in event.splitlines())
        if said and not (opens is not None and opens(event)):
            return event
    return None


def payload(event: bytes) -> tuple[bytes, bytes]:
    """(event name, joined data) of one event; either may be empty."""
    name, data = b"", []
    for line in event.splitlines():
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return name, b"\n".join(data)
