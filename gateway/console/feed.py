"""What of the live feed's events is shown, as types: keys that are not here are not looked at."""

from __future__ import annotations

from msgspec import Struct, field


class Tile(Struct):
    """A target as the feed tells it, or a worker that has none yet."""

    name: str
    state: str
    reason: str = ""
    running: int = 0
    queue: int | None = None
    wait_ms: float | None = None
    kv_usage: float | None = None
    homes: int | None = None
    rung: str | None = None
    rung_reason: str = ""
    breaker: str | None = None
    breaker_reason: str | None = None
    crowded: str | None = None


class Tiles(Struct):
    """What of the fleet changed."""

    whole: bool
    tiles: list[Tile]
    gone: list[str]


class Hits(Struct):
    """Of the window, in shares of the prompts' tokens."""

    prompt_tokens: int
    rate: float | None = None
    predicted: float | None = None
    best: float | None = None
    ceiling: float | None = None


class Quantiles(Struct):
    """Milliseconds."""

    p50: float
    p99: float


class First(Struct):
    """Times of first tokens."""

    all: Quantiles | None = None


class Requests(Struct):
    """Of the window, and that run."""

    window: int
    failed: int
    running: int


class Queue(Struct):
    """What waits in the gateway."""

    waiting: int
    bytes: int
    preparing: int


class Pressure(Struct):
    """The gateway's own."""

    rung: str
    lag_ms: float
    memory_bytes: int | None = None


class Line(Struct):
    """Of the verdict."""

    level: str
    text: str


class Verdict(Struct):
    """Whether the fleet is well."""

    level: str
    lines: list[Line]


class Busy(Struct):
    """What a tenant did in the window, and does."""

    name: str
    requests: int
    failed: int
    refused: int
    running: int
    queued: int


class Generation(Struct):
    """Of the configuration."""

    generation: int


class Kept(Struct):
    """Sessions."""

    total: int


class Event(Struct):
    """One of ``/live``."""

    time: float
    window_seconds: float
    fleet: Tiles
    hits: Hits
    ttft: First
    requests: Requests
    sessions: Kept
    queue: Queue
    pressure: Pressure
    verdict: Verdict
    config: Generation
    tenants: list[Busy] = field(default_factory=list)
