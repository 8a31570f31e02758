"""Bounds of the data plane; every one has a default that is right for most."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Inward:
    """What a client may ask of us. Sizes in bytes, times in seconds."""

    head: int = 64 * 1024
    """Request line and fields together."""
    fields: int = 100
    body: int = 64 * 1024 * 1024
    head_seconds: float = 30.0
    """From the first byte of a head to its end; also from connecting to the first byte."""
    body_seconds: float = 60.0
    """Between two pieces of a body."""
    body_rate: float = 1024.0
    """Bytes a second that a body must reach on average once ``body_seconds`` have passed."""
    idle_seconds: float = 120.0
    """Between two requests on one connection."""
    stalled_seconds: float = 300.0
    """A client that reads nothing for so long is let go."""
    connections: int = 8_000
    pipelined: int = 1024 * 1024
    """Bytes read ahead while a request is being answered; a client that sends more is let go."""
    bodies: int = 1024 * 1024 * 1024
    """Bytes of all bodies that are held at one time."""
    comment_seconds: float | None = None
    """How long a client waits for a stream before it is sent a comment, and then between comments; ``None``: it is not."""
    linger_seconds: float = 2.0
    """After refusing a body: how long what still comes is read and dropped, so that the client sees the answer."""


@dataclass(frozen=True, slots=True)
class Outward:
    """What we grant a worker. Times in seconds."""

    connect_seconds: float = 5.0
    first_byte_seconds: float = 900.0
    """From the request sent to the first byte of the answer: long prefills and queues are legitimate."""
    idle_seconds: float = 300.0
    """Between two pieces of an answer."""
    connections: int = 4096
    """To one worker."""
    keep_idle: int = 512
    """Idle connections kept for one worker."""
    keep_seconds: float = 60.0
    """How long an idle connection is kept."""
    head: int = 1024 * 1024
    """Bytes that may come before an answer's head is complete; first pieces of its body may be among them."""
    held: int = 64 * 1024
    """Bytes of an unfinished event that are held back before they are passed on all the same."""
    error_body: int = 256 * 1024
    """Bytes of an error answer that are kept while another worker is tried."""
