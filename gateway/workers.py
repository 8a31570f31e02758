"""Workers and targets: what they are, what is known of them, what is in flight on them.

A worker is ``joining`` until its engine was read, ``ready`` while probes and traffic agree that it serves, ``draining``
when it shall get nothing new, ``down`` when it does not answer. Who may be used, and the accounting, is `gateway.fleet`.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.breaker import Breaker
from gateway.disagg import BOOTSTRAP_PORT, protocol_of
from gateway.http.limits import Outward
from gateway.http.outbox import Outbox
from gateway.http.upstream import Pool
from gateway.slots import Slots
from policies.base import Role
from policies.calibrate import Calibration
from policies.charged import Charged
from policies.outliers import Record
from policies.returns import Gaps, Inflow

UNTOLD = 20
"""Answers whose usage leaves cached tokens out, after which the engine is said not to report them."""

CONFIGURED, ADDED, LEASED = GIVEN = ("config", "admin", "lease")
"""Where workers come from that no source found: the configuration, the admin port, and there with a lease."""

_BLANK = re.compile(r"[\x00-\x20\x7f]")


class State(StrEnum):
    """States of a worker."""

    JOINING = "joining"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(slots=True)
class ServedModel:
    """One model as a worker lists it."""

    name: str
    parent: str | None = None
    """The base model, if this is an adapter."""
    max_length: int | None = None
    listing: dict[str, Any] = field(default_factory=dict)
    """The worker's own entry of ``/v1/models``."""


@dataclass(slots=True)
class EventSource:
    """Where one rank publishes its KV events."""

    endpoint: str
    replay: str | None = None
    """Where batches that were missed can be asked for."""
    topic: str = ""
    bind: bool = False
    """The engine connects to us there, and not we to it."""
    poll: bool = False
    """They are not published but asked for (TensorRT-LLM), which takes them from whoever else asks."""


@dataclass(slots=True)
class Facts:
    """What an engine says of itself; ``None`` where it does not."""

    engine: str = "generic"
    version: str | None = None
    models: list[ServedModel] = field(default_factory=list)
    role: str | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    context_length: int | None = None
    ranks: int = 1
    max_running: int | None = None
    started: float | None = None
    """The engine's start, Unix seconds: a change is a restart."""
    events: list[EventSource] = field(default_factory=list)
    """Where each rank publishes its KV events; empty: nowhere."""
    hybrid: bool = False
    """Whether it keeps recurrent state, so that prompts can be resumed at checkpoints only."""
    injects_usage: bool = False
    """Whether it takes ``stream_options``."""
    protocol: str | None = None
    """How it hands over KV, if it says so."""
    bootstrap_port: int | None = None
    """Where other engines learn how to reach its KV."""
    keeps: bool = True
    """Whether what it computed or got stays for later requests: SGLang's decode engines keep nothing by default."""
    stores: bool = False
    """Whether what it computes is written to a store that the engines of its pool share."""
    refers: bool = False
    """Whether it keeps a reference of each session that requests name, until it is told of the session's end."""
    retains: bool = False
    """Whether it keeps longer what requests of a higher priority left, and does nothing else by it."""
    streams: bool = False
    """Whether sessions can be opened on it that keep their KV between turns."""
    slots: int | None = None
    """Sequences that its cache holds, of which a request may name one."""
    missing: list[str] = field(default_factory=list)
    """Codes of `engines.audit`: what the engine does not offer."""


@dataclass(slots=True)
class Load:
    """One report of one rank's load; ``None`` where the engine does not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    taken: float = 0.0
    """When, on the gateway's clock."""


@dataclass(slots=True)
class WorkerSpec:
    """A worker as configured; ``None`` means: detect."""

    url: str
    engine: str | None = None
    role: str | None = None
    models: list[str] | None = None
    api_key: str | None = None
    kv_tokens: int | None = None
    max_running: int | None = None
    """Requests that each of its ranks runs at one time."""
    verify_tls: bool = True
    ca: str | None = None
    events: EventSource | None = None
    """Where its first rank publishes; ``None``: as its engine says."""
    listens: bool = True
    """Whether its KV events are listened to."""
    protocol: str | None = None
    """How it hands over KV."""
    pool: str | None = None
    """Engines that can hand KV to each other."""
    bootstrap: tuple[str, int] | None = None
    """Host and port of its bootstrap server, as its partners reach it."""
    source: tuple[str, int] | None = None
    """Host and port at which its peers can fetch KV that it holds."""
    stores: bool | None = None
    """Whether what it computes is written to a store that the engines of its pool share."""
    retention: bool = False
    """Whether it takes ``kv_cache_retention_config`` (TensorRT-LLM)."""
    slots: bool = False
    """Whether its sessions are told which of its slots is theirs (llama.cpp)."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username is not None or parts.password is not None:
            raise ValueError("a worker's url takes no user and no password: give the key as api_key")
        if parts.scheme not in ("http", "https") or not parts.hostname or _BLANK.search(self.url):
            raise ValueError(f"a worker's url must look like http://host:port, not {self.url!r}")
        if parts.query or parts.fragment:
            raise ValueError(f"a worker's url takes no query and no fragment: {self.url!r}")
        try:
            parts.port  # noqa: B018
        except ValueError:
            raise ValueError(f"a worker's url needs a port from 1 to 65535: {self.url!r}") from None
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError("a worker's api_key holds a line break or a control character")


def address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises `ValueError` for anything else."""
    parts = urlsplit(f"//{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or port is None or _BLANK.search(text) or parts.path or parts.username is not None:
        raise ValueError(f"{text!r} is not host:port")
    return parts.hostname, port


def id_of(url: str) -> str:
    """What a worker at ``url`` is called."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.hostname or ''}:{port}{parts.path.rstrip('/')}"


class Target(Charged):
    """One (worker, rank) with what only the gateway knows of it."""

    __slots__ = (
        "beside",
        "breaker",
        "calibration",
        "epoch",
        "failed_pairs",
        "gaps",
        "homes_beside",
        "inflow",
        "load_report",
        "paused_firmly",
        "paused_until",
        "rank",
        "record",
        "reported",
        "slots",
        "worker",
    )

    def __init__(self, id: int, worker: Worker, rank: int) -> None:
        super().__init__(id, worker.id if rank == 0 else f"{worker.id}#{rank}")
        self.worker = worker
        self.rank = rank
        self.breaker = Breaker()
        self.calibration = Calibration()
        self.record = Record()
        """How it did of late, to be compared with its peers."""
        self.paused_firmly = False
        self.paused_until = 0.0
        """It asked for a pause (Retry-After)."""
        self.load_report: Load | None = None
        self.epoch = 0
        """Counts its engine's starts: what was promised in one is void in the next."""
        self.inflow = Inflow()
        self.gaps = Gaps()
        """Until sessions came back here."""
        self.slots: Slots | None = None
        """What its slots hold, where requests can name one."""
        self.failed_pairs = 0
        """How often handing over KV failed, with whomever, since it last worked."""
        self.reported = (0.0, 0.0)
        """Requests that are not ours, and seconds of prefill that those of them put in front that wait: as the engine says."""
        self.beside = (0.0, 0.0)
        """The same as other gateways say."""
        self.homes_beside = 0
        """Of `homes`, those that other gateways say they have."""

    def ours(self, now: float) -> float:
        """Seconds of prefill that we put in front, and that are left."""
        return self.waits(now) - self.queued

    def others(self) -> None:
        """What is not ours: of what the engine reports and what other gateways say, which are the same, the larger."""
        foreign = max(self.reported[0], self.beside[0])
        self.busy += foreign - self.foreign
        self.foreign, self.queued = foreign, max(self.reported[1], self.beside[1])
        self.recount()


class Charge:
    """One request in flight on one target."""

    __slots__ = (
        "active",
        "alone",
        "context",
        "ended",
        "expected",
        "prefilled",
        "seconds",
        "target",
        "trial",
        "uncached",
    )

    def __init__(
        self,
        target: Target,
        seconds: float,
        uncached: float,
        context: float,
        trial: bool,
        active: float,
        expected: float,
    ) -> None:
        self.target = target
        self.expected = expected
        """Seconds after which its answer was to begin, when it was sent."""
        self.seconds = seconds
        self.uncached = uncached
        self.context = context
        self.alone = False
        """Nothing else was on the target from its sending to its first byte: what that took is its own."""
        self.prefilled = False
        self.ended = False
        self.trial = trial
        self.active = active
        """Tokens that it holds of the target's KV cache, with what it is expected to generate."""


class Worker:
    """One engine process behind one URL."""

    def __init__(self, spec: WorkerSpec, limits: Outward, outbox: Outbox | None = None) -> None:
        self.spec = spec
        parts = urlsplit(spec.url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = tls_of(spec)
        self.base = parts.path.rstrip("/").encode()
        self.id = id_of(spec.url)
        self.authority = (f"[{self.host}]" if ":" in self.host else self.host) + f":{self.port}"
        self.state = State.JOINING
        self.reason = "not read yet"
        """Why it is in this state, for people."""
        self.facts = Facts(engine=spec.engine or "generic")
        self.targets: list[Target] = []
        self.pool = Pool(self.host, self.port, tls=self.tls, limits=limits, outbox=outbox)
        self.origin = CONFIGURED
        """Who said that it is there: one of `GIVEN`, or the name of a source."""
        self.identity: str | None = None
        """Who is at its address, if its source tells."""
        self.lingers = False
        """It drains, and sessions at home there go on there until they are moved."""
        self.failures = 0
        """Probes and connections that failed in a row."""
        self.silenced = False
        """It is down because of its probes, not because it refuses connections."""
        self.falls = 0.0
        """How often it went down of late."""
        self.fell = 0.0
        """When it last did."""
        self.successes = 0
        self.answered = 0
        """Requests that it answered as it should."""
        self.ready_since: float | None = None
        self.engine_ids: list[str] = []
        """Of its ranks' processes, where a protocol names them."""
        self.untold = 0
        """Answers in a row whose usage left cached tokens out."""
        self.observed: list[str] = []
        """Codes of `engines.audit` that traffic showed."""

    def respec(self, spec: WorkerSpec) -> None:
        """It is configured otherwise, at the same address: what is read of the engine has to be read again."""
        before, self.spec = self.spec, spec
        secured = (spec.url, spec.ca, spec.verify_tls)
        if (before.url, before.ca, before.verify_tls) != secured:
            self.tls = self.pool.tls = tls_of(spec)
        if before.kv_tokens is not None and spec.kv_tokens is None:
            self.facts.kv_tokens = None
        # Idle connections are of the old credentials' time.
        self.pool.close_idle()

    def told_cached(self, told: bool) -> None:
        """An answer with usage came, with or without cached tokens: engines do not say otherwise that they leave them out."""
        if told:
            if self.untold:
                self.untold = 0
                self.observe("usage_details", False)
        elif self.untold < UNTOLD:
            self.untold += 1
            if self.untold == UNTOLD:
                self.observe("usage_details", True)

    def observe(self, code: str, lacks: bool) -> None:
        """Traffic shows that it lacks ``code`` of `engines.audit`, or that it does not."""
        if lacks and code not in self.observed:
            self.observed.append(code)
        elif not lacks and code in self.observed:
            self.observed.remove(code)

    @property
    def role(self) -> Role:
        """As configured, else as the engine says."""
        return Role(self.spec.role or self.facts.role or "unified")

    @property
    def protocol(self) -> str | None:
        """How it hands over KV: as configured, else as the engine says."""
        told = self.spec.protocol or self.facts.protocol
        return told or (None if self.role is Role.UNIFIED else protocol_of(self.facts.engine))

    @property
    def pool_name(self) -> str:
        """Engines of the same can hand KV to each other."""
        return self.spec.pool or self.protocol or ""

    @property
    def whole(self) -> bool:
        """Whether it can serve a request from its prompt to its end. SGLang's engines of one role cannot."""
        return self.role is Role.UNIFIED or self.protocol != "sglang"

    @property
    def bootstrap(self) -> tuple[str, int] | None:
        """Host and port of its bootstrap server."""
        if self.spec.bootstrap is not None:
            return self.spec.bootstrap
        port = self.facts.bootstrap_port or (BOOTSTRAP_PORT if self.protocol == "mooncake" else None)
        return None if port is None else (self.host, port)

    @property
    def stores(self) -> bool:
        """Whether what it computes is within reach of its pool."""
        return self.facts.stores if self.spec.stores is None else self.spec.stores

    @property
    def url(self) -> str:
        """As configured."""
        return self.spec.url

    @property
    def running(self) -> int:
        """Our requests in flight."""
        return sum(target.running for target in self.targets)


def tls_of(spec: WorkerSpec) -> ssl.SSLContext | None:
    """How it is spoken to; ``None``: in clear. Raises `OSError` for authorities that cannot be read."""
    if urlsplit(spec.url).scheme != "https":
        return None
    stat = None if spec.ca is None else Path(spec.ca).stat()
    return _context(spec.ca, spec.verify_tls, None if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@lru_cache(maxsize=64)
def _context(ca: str | None, verify: bool, stat: tuple[int, int, int] | None) -> ssl.SSLContext:
    """Reading the system's authorities takes longer than all else about a worker: what many share is read once. ``stat``: of
    the file ``ca``, which is read anew when it changed."""
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
