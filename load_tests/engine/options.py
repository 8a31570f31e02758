"""What one simulated engine is told at start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from load_tests.engine.hybrid import interval_of
from load_tests.engine.physics import Rates

Dialect = Literal["vllm", "sglang", "llamacpp", "openai", "tensorrt_llm"]
Role = Literal["unified", "prefill", "decode"]
EventFormat = Literal["map", "positional"]
EventHashes = Literal["int", "bytes"]
OffloadEvents = Literal["placeholder", "full"]
ConnectorName = Literal["", "none", "nixl", "mooncake", "shared", "p2p", "bootstrap", "transceiver"]
LoadFailure = Literal["fail", "recompute"]
LateReads = Literal["fail", "blocks"]
Eviction = Literal["lru", "priority"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
ROLES: tuple[Role, ...] = get_args(Role)
EVENT_FORMATS: tuple[EventFormat, ...] = get_args(EventFormat)
EVENT_HASHES: tuple[EventHashes, ...] = get_args(EventHashes)
CONNECTORS: tuple[ConnectorName, ...] = get_args(ConnectorName)
LOAD_FAILURES: tuple[LoadFailure, ...] = get_args(LoadFailure)
LATE_READS: tuple[LateReads, ...] = get_args(LateReads)
# The first is that of a role.
CONNECTORS_OF: dict[Dialect, tuple[ConnectorName, ...]] = {
    "vllm": ("nixl", "mooncake", "shared", "p2p"),
    "sglang": ("bootstrap",),
    "tensorrt_llm": ("transceiver",),
}
# Tokens of a block or page where nothing is said.
BLOCKS: dict[Dialect, int] = {"vllm": 16, "openai": 16, "tensorrt_llm": 32, "sglang": 1, "llamacpp": 1}
OFFLOAD_EVENTS: tuple[OffloadEvents, ...] = get_args(OffloadEvents)


class OptionError(ValueError):
    """An option that no engine can be started with; the message names it."""


@dataclass(kw_only=True)
class EngineOptions:
    """One engine. Sizes are in tokens, times in seconds.

    block_size 0 takes the dialect's own: 16 for vllm and openai, 32 for tensorrt_llm, 1 for sglang and llamacpp.
    context_length 0 takes the smaller of 32768 and the KV. max_queued None is unbounded, as real engines are by default.
    time_scale multiplies every duration: 0.1 is ten times faster, 0 does not wait at all. keep_alive is how long an idle
    connection is kept, in real seconds; 5 is what vLLM and SGLang give theirs. usage_details False leaves cached
    tokens out of usage, as engines do without --enable-prompt-tokens-details or --enable-cache-report.

    tokenizer is the path of a Hugging Face tokenizer.json, template that of a jinja2 chat template: with them the engine
    counts, caches and publishes a real model's tokens. Both need the extra ``tokens``.

    host_tokens and disk_tokens are room below the device: what is evicted goes there, and a hit there is copied back at
    rates.host and rates.disk seconds a token. offload_events "full" describes such blocks in vllm's events; the
    default "placeholder", as vLLM's own, has their hashes only. SGLang always describes them.

    hybrid "boundary", "ends" or "every:N" serves a model with recurrent layers, whose hits end where a state was kept
    (see hybrid.py); hybrid_states is how many are kept. In vllm's events it has three mamba groups before attention.

    ranks: data-parallel ranks behind the one port, each with its own cache of kv_tokens, queue and batch.

    events or an events_port publishes KV events, of vllm and sglang; port 0 with events takes a free one. Rank r
    publishes on events_port + r. events_replay True has a replay endpoint on a free port as well, a number has it on
    that port, likewise plus r; False has none. buffer_steps is how many batches can be replayed, topic the first
    frame. Block hashes depend on hash_seed: two seeds give one block two hashes. event_format "positional" is the
    array form of older vLLM builds, with their replay without topic frame; event_hashes "bytes" has whole digests
    instead of 64-bit numbers. Both are vllm's only. short_pages, sglang's only, tells of the last page of a finished
    sequence when it is not full as well: an event whose block_size is less than the page, which no hit ever reaches.

    connector exchanges KV with other engines: vllm's "nixl", "mooncake", "shared" and "p2p", sglang's "bootstrap",
    tensorrt_llm's "transceiver"; "" is the first of the dialect where the role is not unified, and none otherwise. Its
    side channel or bootstrap server listens on side_port (0: a free one). engine_id "" is another with every start.
    Kept KV is given back after lease, or blocks_ttl on a decode engine with ``bidirectional``; both are in real seconds,
    whatever time_scale is, as those who count them have clocks of their own. load_failure is what happens to a request
    whose KV does not come. late_reads is what nixl gives to who comes after the lease: "fail" nothing, "blocks", as real
    ones do, whatever is in the blocks by then. shared_dir is the folder that engines with connector shared have in
    common; "" is the memory of their process.

    In real seconds as well: a prefill engine of sglang waits bootstrap_timeout for the decode engine, that waits
    waiting_timeout for the KV, and asks every ``heartbeat`` whether the other is alive, twice. decode_radix lets
    sglang's decode engine keep a prefix cache.

    session_refs is sglang's --enable-session-radix-cache, as far as it can be seen from outside: sessions are referenced from
    the first request that names them until they are closed, and what none refers to is evicted first. streaming_sessions is
    its --enable-streaming-session, eviction its --radix-eviction-policy.
    """

    port: int = 0
    host: str = "127.0.0.1"
    dialect: Dialect = "vllm"
    role: Role = "unified"
    models: list[str] = field(default_factory=lambda: ["sim"])
    loras: list[str] = field(default_factory=list)
    kv_tokens: int = 131_072
    block_size: int = 0
    max_running: int = 64
    chunk_tokens: int = 2048
    max_queued: int | None = None
    context_length: int = 0
    api_key: str | None = None
    time_scale: float = 1.0
    usage_details: bool = True
    prefix_cache: bool = True
    metrics: bool = True
    seed: int = 0
    keep_alive: float = 5.0
    rates: Rates = field(default_factory=Rates)
    tokenizer: str = ""
    template: str = ""
    host_tokens: int = 0
    disk_tokens: int = 0
    offload_events: OffloadEvents = "placeholder"
    hybrid: str = ""
    hybrid_states: int = 256
    ranks: int = 1
    events: bool = False
    events_port: int | None = None
    events_replay: bool | int | None = True
    buffer_steps: int = 10_000
    topic: str = ""
    hash_seed: int = 0
    event_format: EventFormat = "map"
    event_hashes: EventHashes = "int"
    short_pages: bool = False
    connector: ConnectorName = ""
    engine_id: str = ""
    side_port: int = 0
    bidirectional: bool = False
    lease: float = 30.0
    blocks_ttl: float = 480.0
    load_failure: LoadFailure = "fail"
    late_reads: LateReads = "fail"
    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    heartbeat: float = 5.0
    decode_radix: bool = False
    shared_dir: str = ""
    session_refs: bool = False
    eviction: Eviction = "lru"
    streaming_sessions: bool = False

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise OptionError(f"dialect must be one of {', '.join(DIALECTS)}, not {self.dialect!r}")
        if self.role not in ROLES:
            raise OptionError(f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        if not self.models:
            raise OptionError("at least one model is needed")
        self.block_size = self.block_size or BLOCKS[self.dialect]
        for name in (
            "kv_tokens",
            "block_size",
            "max_running",
            "chunk_tokens",
            "ranks",
            "buffer_steps",
            "hybrid_states",
        ):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1")
        if not 0 <= self.port <= 65535:
            raise OptionError("port must be between 0 and 65535")
        for name in ("time_scale", "keep_alive", "host_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must not be negative")
        if self.max_queued is not None and self.max_queued < 0:
            raise OptionError("max_queued must not be negative")
        for name in ("tokenizer", "template"):
            if getattr(self, name) and not Path(getattr(self, name)).is_file():
                raise OptionError(f"{name} {getattr(self, name)} is no file")
        self._check_events()
        self._check_connector()
        if self.eviction not in EVICTIONS:
            raise OptionError(f"eviction must be one of {', '.join(EVICTIONS)}, not {self.eviction!r}")
        if self.dialect != "sglang" and (self.session_refs or self.streaming_sessions or self.eviction != "lru"):
            raise OptionError(f"{self.dialect} has no sessions, and evicts the least recently used")
        if (self.host_tokens or self.disk_tokens) and self.dialect == "llamacpp":
            raise OptionError("llamacpp has no tiers below the device")
        if self.hybrid:
            try:
                interval = interval_of(self.hybrid)
            except ValueError as error:
                raise OptionError(str(error)) from None
            if interval % self.block_size:
                raise OptionError(f"hybrid {self.hybrid} must be a multiple of the block of {self.block_size}")
        room = self.num_blocks * self.block_size
        if self.dialect == "llamacpp":
            room //= self.max_running
        self.context_length = self.context_length or min(32_768, room)
        if not 2 <= self.context_length <= room:
            raise OptionError(f"context_length {self.context_length} does not fit the KV of {room} tokens")

    def _check_connector(self) -> None:
        if self.connector not in CONNECTORS:
            raise OptionError(f"connector must be one of {', '.join(CONNECTORS[1:])}, not {self.connector!r}")
        usable = CONNECTORS_OF.get(self.dialect, ())
        if not self.connector:
            self.connector = usable[0] if usable and self.role != "unified" else "none"
        if self.connector != "none" and self.connector not in usable:
            raise OptionError(f"{self.dialect} has no connector {self.connector}")
        if self.connector == "bootstrap" and self.role == "unified":
            raise OptionError("connector bootstrap needs the role prefill or decode")
        if self.load_failure not in LOAD_FAILURES:
            raise OptionError(f"load_failure must be one of {', '.join(LOAD_FAILURES)}, not {self.load_failure!r}")
        if self.late_reads not in LATE_READS:
            raise OptionError(f"late_reads must be one of {', '.join(LATE_READS)}, not {self.late_reads!r}")
        if not 0 <= self.side_port <= 65535:
            raise OptionError("side_port must be between 0 and 65535")
        for name in ("lease", "blocks_ttl", "bootstrap_timeout", "waiting_timeout", "heartbeat"):
            if getattr(self, name) <= 0:
                raise OptionError(f"{name} must be more than 0")

    def _check_events(self) -> None:
        if self.event_format not in EVENT_FORMATS:
            raise OptionError(f"event_format must be one of {', '.join(EVENT_FORMATS)}, not {self.event_format!r}")
        if self.event_hashes not in EVENT_HASHES:
            raise OptionError(f"event_hashes must be one of {', '.join(EVENT_HASHES)}, not {self.event_hashes!r}")
        if self.offload_events not in OFFLOAD_EVENTS:
            raise OptionError(f"offload_events must be one of {', '.join(OFFLOAD_EVENTS)}")
        if self.ranks > 1 and self.dialect not in ("vllm", "sglang"):
            raise OptionError(f"{self.dialect} has no data-parallel ranks")
        if not self.publishes:
            return
        if self.dialect not in ("vllm", "sglang"):
            raise OptionError(f"{self.dialect} publishes no KV events")
        for name, first in (("events_port", self.events_port), ("events_replay", self.replay_port)):
            if not 0 <= (first or 0) <= 65536 - self.ranks:
                raise OptionError(f"{name} must be between 0 and {65536 - self.ranks}")

    @property
    def publishes(self) -> bool:
        """Whether KV events are published."""
        return self.events or bool(self.events_port)

    @property
    def replay_port(self) -> int | None:
        """The first port of replay, 0 for a free one; None where there is none."""
        if isinstance(self.events_replay, bool):
            return 0 if self.events_replay else None
        return self.events_replay

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // self.block_size
