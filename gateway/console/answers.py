"""What of the control plane's answers is shown, as types: keys that are not here are not looked at."""

from __future__ import annotations

from msgspec import Struct


class Belief(Struct):
    """Why holdings of a target are believed."""

    rung: str
    reason: str
    cache_share: float


class Target(Struct):
    """Of a worker."""

    name: str
    running: int
    wait_seconds: float
    homes: int
    breaker: str
    holding_pages: int
    belief: Belief
    capacity_pages: int | None = None
    queue: int | None = None
    kv_usage: float | None = None
    breaker_reason: str | None = None
    returns: str | None = None


class Lack(Struct):
    """What an engine does not offer."""

    what: str
    costs: str
    cure: str


class Drain(Struct):
    """How far one is."""

    sessions: int
    moved: int
    ended: int
    left: int
    running: int
    seconds: float
    done: bool
    stuck: str | None = None


class Worker(Struct):
    """One of ``/workers``."""

    id: str
    url: str
    state: str
    reason: str
    engine: str
    role: str
    models: list[str]
    running: int
    connections: int
    idle_connections: int
    targets: list[Target]
    lacks: list[Lack]
    version: str | None = None
    protocol: str | None = None
    pool: str | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    context_length: int | None = None
    drain: Drain | None = None


class Workers(Struct):
    """``/workers``."""

    workers: list[Worker]


class SessionRow(Struct):
    """One of ``/sessions``."""

    id: str
    source: str
    tenant: str
    model: str
    turns: int
    running: int
    idle_seconds: float
    home: str | None = None
    prompt_tokens: int | None = None


class Place(Struct):
    """Where a prompt broke."""

    text: str


class Break(Struct):
    """From the prompt before."""

    cause: str
    place: Place
    tokens_lost: int
    estimated: bool = False


class Returns(Struct):
    """When a session is expected back."""

    says: str


class Hit(Struct):
    """Of one request."""

    prompt_tokens: int
    cached_tokens: int | None = None


class Session(SessionRow, kw_only=True):
    """``/sessions/{id}``."""

    children: list[str]
    children_total: int
    told: list[str]
    holdings: dict[str, int]
    hits: list[Hit]
    breaks: list[Break] | None
    why: str | None = None
    partner: str | None = None
    parent: str | None = None
    tool: str | None = None
    hit_rate: float | None = None
    returns: Returns | None = None


class Limit(Struct):
    """Of a tenant."""

    granted: float
    used: float


class Tenant(Struct):
    """One of ``/tenants``."""

    name: str
    priority: str
    weight: float
    isolation: str
    limits: dict[str, Limit]
    running: int
    queued: int
    policy: str | None = None
    models: list[str] | None = None


class Tenants(Struct):
    """``/tenants``."""

    tenants: list[Tenant]


class Candidate(Struct):
    """Of a dry run."""

    target: str
    holding_tokens: dict[str, int]
    running: int
    homes: int
    rung: str
    rung_reason: str
    total_ms: float | None = None
    terms: dict[str, float] | None = None
    prefill: str | None = None
    prefill_holding_tokens: dict[str, int] | None = None
    prefill_rung: str | None = None
    prefill_rung_reason: str | None = None

    @property
    def computes(self) -> str:
        """Who would compute the prompt."""
        return self.prefill or self.target

    @property
    def belief(self) -> tuple[str, str]:
        """The rung of that one, and why."""
        return self.prefill_rung or self.rung, self.prefill_rung_reason or self.rung_reason

    @property
    def holds(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return sum((self.prefill_holding_tokens or self.holding_tokens).values())


class Pair(Struct):
    """Who computes the prompt, and who generates."""

    prefill: str
    decode: str
    kv_from: str | None = None


class Story(Struct):
    """Of the session of a dry run."""

    id: str
    source: str | None
    turns: int
    running: int
    home: str | None = None
    why: str | None = None
    partner: str | None = None
    idle_seconds: float | None = None
    returns: Returns | None = None
    breaks: list[Break] | None = None


class Shadow(Struct):
    """What another policy would do."""

    policy: str
    target: str
    agrees: bool
    saves_ms: float


class Route(Struct):
    """``POST /route``."""

    decision: str
    reason: str
    target: str
    model: str
    candidates: list[Candidate]
    mode: str | None
    best_tokens: int | None
    seen_tokens: int | None
    prompt_tokens: int | None = None
    pair: Pair | None = None
    session: Story | None = None
    shadow: Shadow | None = None
