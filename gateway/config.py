"""The one configuration file, typed; the only reader of the environment.

Every option is a field of a dataclass below, with its default and its meaning; nothing else is accepted.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml

from gateway.config_check import check, check_worker
from gateway.config_reader import (
    REST,
    SEVERAL,
    Bytes,
    ConfigError,
    Count,
    Problem,
    Reader,
    Seconds,
    Secret,
    is_null,
    masked,
)
from gateway.workers import EventSource, WorkerSpec, address
from policies.base import Policy, load as load_policy


@dataclass(slots=True)
class TLS:
    """Certificate and key files."""

    cert: str
    key: str
    client_ca: str | None = None
    """Authorities whose certificates clients may show to be a tenant."""
    client_required: bool = False
    """Whether clients without one are refused."""

    @property
    def files(self) -> list[str]:
        """What is read again when it changes."""
        return [self.cert, self.key]

    @property
    def authorities(self) -> list[str]:
        """What is read once: who was trusted cannot be distrusted while connections are made."""
        return [] if self.client_ca is None else [self.client_ca]


@dataclass(slots=True)
class Listen:
    """Where clients connect."""

    host: str = "0.0.0.0"
    port: int = 8080
    tls: TLS | None = None
    max_body: Bytes = 64 * 1024 * 1024
    max_connections: Count = 8_000
    idle: Seconds = 120.0
    head_timeout: Seconds = 30.0
    body_timeout: Seconds = 60.0
    comment_after: Seconds | None = None
    """While a client waits for a stream's first event: seconds between comments that keep its connection alive."""


@dataclass(slots=True)
class Admin:
    """The control plane."""

    host: str = "127.0.0.1"
    port: int = 8081
    token: Secret | None = None


@dataclass(slots=True)
class MetricsAddress:
    """An address for a scraper, without the rest of the control plane."""

    host: str = "127.0.0.1"
    port: int = 9464


@dataclass(slots=True)
class HealthAddress:
    """An address for liveness and readiness probes, answered by a thread of its own."""

    host: str = "0.0.0.0"
    port: int = 8082
    stalled: Seconds = 30.0
    """Without a turn of the event loop for so long, ``/healthz`` says that the process is to be restarted."""


@dataclass(slots=True)
class PressureConfig:
    """When the gateway itself is short of time or memory, it leaves out what can be left out, and at last refuses requests."""

    lag: Seconds = 0.05
    """By which its event loop may wake too late, on average over a second."""
    memory: Bytes | None = None
    """That the process may have; if not given: nine tenths of what its control group or machine has."""


@dataclass(slots=True)
class Restore:
    """What it takes to bring a thousand tokens' KV back to the device, until it is learned."""

    host: Seconds = 0.01
    disk: Seconds = 0.05
    shared: Seconds = 0.1


@dataclass(slots=True)
class EventsConfig:
    """Where a worker publishes its KV events, if it does not say so itself."""

    enabled: bool = True
    endpoint: str | None = None
    """Of its first rank; those of others follow by port."""
    replay: str | None = None
    topic: str = ""
    bind: bool = False
    """The engine connects to the endpoint, so that the gateway has to listen there."""
    poll: bool = False
    """TensorRT-LLM: ask for events, which takes them from whoever else asks."""


@dataclass(slots=True)
class ShadowConfig:
    """Another policy that is asked beside, and only compared."""

    policy: str
    share: float = 0.1
    """Of the requests."""


@dataclass(slots=True)
class RolloutConfig:
    """Another policy that routes a part of the sessions, each for good."""

    policy: str
    share: float
    """Of the sessions."""


@dataclass(slots=True)
class ModelConfig:
    """One model."""

    aliases: list[str] = field(default_factory=list)
    policy: str | None = None
    rollout: RolloutConfig | None = None
    shadow: ShadowConfig | None = None
    thinking: str = "auto"
    """Text mode: what the template does with thinking of earlier turns: auto (by the model's name),
    strip_before_last_user, keep, drop."""
    tokenizer: str | None = None
    """Token mode: a ``tokenizer.json``, or ``engine``: have the workers tokenise."""
    template: str | None = None
    """Token mode: the chat template, as a file of its own or in a ``tokenizer_config.json``."""
    reuse: str = "auto"
    """Where a cached prompt can be gone on from: any, checkpoints (hybrid models), auto: as the engine tells."""
    checkpoints: str = "auto"
    """Of hybrid models, where engines keep their state: auto (by the engine's kind), ends, boundary, every:N tokens."""
    restore: Restore = field(default_factory=lambda: Restore())
    kv_bytes: Bytes | None = None
    """Of one token's KV, to tell sizes of caches in bytes."""


@dataclass(slots=True)
class WorkerConfig:
    """One worker; what is left out is detected."""

    url: str
    engine: str | None = None
    role: str | None = None
    models: list[str] | None = None
    api_key: Secret | None = None
    kv_tokens: Count | None = None
    max_running: Count | None = None
    """Requests that each of its ranks runs at one time; more would wait there."""
    verify_tls: bool = True
    ca: str | None = None
    events: EventsConfig = field(default_factory=EventsConfig)
    protocol: str | None = None
    """How it hands over KV, if that is not what ``disaggregation.protocol`` says."""
    pool: str | None = None
    """Workers of one pool can hand KV to each other; by default those of one protocol."""
    bootstrap: str | None = None
    """host:port of its bootstrap server, as its partners reach it (SGLang, Mooncake)."""
    kv_source: str | None = None
    """host:port at which its peers can fetch KV that it holds (vLLM's OffloadingConnector with its P2P tier)."""
    shared_store: bool | None = None
    """Whether what it computes is written to a store that its pool shares."""
    slots: bool = False
    """llama.cpp: name each session's slot (``id_slot``). By itself a server gives such a slot to a like one: what was in it
    comes back from the prompt cache in host memory, if there is one, unless both share more than half (then it is not kept).
    Not for more sessions at once than slots."""
    retention: bool = False
    """TensorRT-LLM: whether its server takes ``kv_cache_retention_config`` with requests (the stock one does not)."""

    def spec(self, protocol: str | None = None) -> WorkerSpec:
        """For the fleet; ``protocol``: that of workers that name none. Raises `ValueError` for a bad url or address."""
        renamed = ("events", "protocol", "bootstrap", "kv_source", "shared_store")
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in renamed}
        told["protocol"] = self.protocol or protocol
        told["bootstrap"] = None if self.bootstrap is None else address(self.bootstrap)
        told["source"] = None if self.kv_source is None else address(self.kv_source)
        told["stores"] = self.shared_store
        events = self.events
        source = None
        if events.endpoint is not None or events.poll:
            source = EventSource(events.endpoint or "", events.replay, events.topic, events.bind, events.poll)
        return WorkerSpec(**told, events=source, listens=events.enabled)


@dataclass(slots=True)
class WorkerTemplate(WorkerConfig):
    """What is said of all workers that one source finds; ``url`` is what it finds."""

    url: str = ""


@dataclass(slots=True)
class DiscoveryConfig:
    """One source of workers, beside those of ``workers``."""

    source: str
    """file, dns, kubernetes, inference_pool."""
    name: str | None = None
    """What it is called in metrics and in ``GET /workers``; if not given: as its kind."""
    worker: WorkerTemplate = field(default_factory=WorkerTemplate)
    """What is said of all its workers, where it does not say otherwise of one."""
    options: dict[str, Any] = field(default_factory=dict, metadata=REST)
    """Of its kind: written beside these keys."""


@dataclass(slots=True)
class Disaggregation:
    """Prefill and decode on different workers."""

    protocol: str = "auto"
    """How KV is handed over: auto (by the engine), nixl, sglang, mooncake, shared, tensorrt_llm."""
    lease: Seconds = 25.0
    """How long a prefill worker's KV may wait for a decode worker: less than the engines' own lease."""
    bidirectional: bool = False
    """Have decode workers hand the KV of a session's last turn back to prefill workers (vLLM's ``bidirectional_kv_xfer``).
    Needs token mode; answers of such sessions tell their token ids."""
    keep: Seconds = 450.0
    """How long KV that a decode worker offers is believed to be there: less than its ``decoder_kv_blocks_ttl``."""

    @property
    def named(self) -> str | None:
        """The protocol of workers that name none; ``None``: as their engine says."""
        return None if self.protocol == "auto" else self.protocol


@dataclass(slots=True)
class LimitsConfig:
    """What a tenant is granted; what is left out is not limited."""

    requests_per_minute: Count | None = None
    prompt_tokens_per_minute: Count | None = None
    computed_tokens_per_minute: Count | None = None
    """Of prompts, those that no cache had."""
    concurrency: Count | None = None
    """Requests at one time; more wait."""


@dataclass(slots=True)
class PriorityConfig:
    """One level of the queue; those that are listed first go first."""

    share: float = 0.1
    """Of what is computed, reserved for it while levels before it have requests waiting."""
    deadline: Seconds | None = None
    """How long its requests wait at most; if not given: ``admission.deadline``."""
    queue: Count | None = None
    """How many of them wait at most; if not given: as many as wait in all. Those of more priority take the places of others."""
    bytes: Bytes | None = None
    """Of their bodies, at most; if not given: as many as wait in all."""


def _priorities() -> dict[str, PriorityConfig]:
    return {"interactive": PriorityConfig(), "bulk": PriorityConfig(deadline=600.0)}


@dataclass(slots=True)
class AdmissionConfig:
    """The queue in front of the fleet, in which requests wait while everybody who could serve them is full."""

    ahead: Seconds = 0.05
    """A target with more than this much prefill in front is full."""
    queue: Count = 5_000
    """Requests that wait, at most."""
    bytes: Bytes = 1024 * 1024 * 1024
    """Of their bodies, at most."""
    tenant_queue: Count | None = None
    """Requests of one tenant that wait, at most; if not given: half of ``queue``, where there are tenants."""
    tenant_bytes: Bytes | None = None
    """Of one tenant's bodies, at most; if not given: half of ``bytes``."""
    deadline: Seconds = 60.0
    """How long a request waits at most, unless its priority or its ``x-request-timeout`` says otherwise."""
    hold: Seconds = 0.0
    """How long a request waits for a worker where its model has none now but workers that may serve it; 0: not at all."""
    priorities: dict[str, PriorityConfig] = field(default_factory=_priorities)
    """Levels by name, the first first."""


@dataclass(slots=True)
class JWT:
    """Tokens of an identity provider."""

    issuer: str
    """As the tokens say it (``iss``)."""
    audience: list[str]
    """Of which a token is to name one (``aud``)."""
    jwks: str
    """Where the issuer's public keys are: a URL, or a file."""
    claim: str = "tenant"
    """What names the tenant; with dots, a path."""
    algorithms: list[str] = field(default_factory=lambda: ["RS256", "PS256", "ES256", "ES384", "EdDSA"])
    leeway: Seconds = 30.0
    """By which clocks may differ."""
    refresh: Seconds = 600.0
    """Between two readings of the keys."""


@dataclass(slots=True)
class Auth:
    """How credentials are looked at."""

    failures_per_minute: int = 60
    """Unknown credentials from one address, after which others that were not good lately are refused unseen; 0: no limit."""
    jwt: JWT | None = None


@dataclass(slots=True)
class TenantConfig:
    """One tenant."""

    name: str
    keys: list[Secret] = field(default_factory=list)
    """In clear, or as ``warmroute key`` hashes them."""
    key_files: list[str] = field(default_factory=list)
    """Files of more of them, one a line; read again when they change."""
    claims: list[str] | None = None
    """Values of ``auth.jwt.claim`` that are it; its name, if not given."""
    subjects: list[str] = field(default_factory=list)
    """Of client certificates that are it: a URI or DNS name of them, or their common name."""
    policy: str | None = None
    policies: dict[str, str] = field(default_factory=dict)
    """Model -> policy, where it is not ``policy``."""
    rollout: RolloutConfig | None = None
    shadow: ShadowConfig | None = None
    models: list[str] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of its own -> models."""
    log_content: bool = False
    """Whether ``doctor.examples`` may show its prompts."""
    isolation: str = "shared"
    priority: str | None = None
    """One of ``admission.priorities``; if not given: the first."""
    weight: float = 1.0
    """How many times as much as another tenant of its priority it may have when there is not enough for all."""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    show_routing: bool = True
    hide_addresses: bool = False
    """Whether addresses of workers are taken out of what engines say of errors. Where it was routed is told apart from that:
    see ``show_routing``."""
    canonical: list[str] = field(default_factory=list)
    """How its prompts' starts are brought into one form, so that they are shared: tools (sorted, and the keys in their
    schemas), json (numbers and whitespace in tools), volatile (lines that are known to change)."""


@dataclass(slots=True)
class SessionsConfig:
    """The session store."""

    idle: Seconds = 1800.0
    max: Count = 200_000
    headers: list[str] = field(default_factory=list)
    """Headers of your own that name a session; they come first."""
    fields: list[str] = field(default_factory=list)
    """Fields of the body that name one, of: user, safety_identifier, metadata.user_id. One busy user is one hot engine."""
    token: bool = True
    """Whether clients that name no session are given a token (``x-warmroute-session``) by which they can."""
    cookie: bool = False
    """Whether the token is set as a cookie too, and read from it."""
    token_key: Secret | None = None
    """What tokens are sealed with: the same for all replicas, and over restarts. If not given: ``isolation_key``, or what the
    state file keeps, or a random one."""
    labels: bool = False
    """Whether vLLM engines are told of sessions, by which they label their KV events (for other readers of those)."""
    streaming: bool = False
    """Whether clients may open sessions on SGLang engines (``/open_session``), which keep their KV there between turns."""
    state: str | None = None
    """A file that keeps the homes of sessions over a restart."""
    redis: Secret | None = None
    """The same in Redis, for several gateways: redis://host:port/db."""


@dataclass(slots=True)
class WarmingConfig:
    """Engines that start with an empty cache are sent the starts that many sessions share."""

    starts: int = 8
    """For each engine; 0 sends none."""
    seconds: Seconds = 30.0
    """How long that may take."""


@dataclass(slots=True)
class DoctorConfig:
    """Examines why prompts are not found in caches (``GET /doctor``), after their answers, within bounds."""

    enabled: bool = True
    memory: Bytes = 8 * 1024 * 1024
    """Of bodies that are kept to be compared: of as many sessions as fit."""
    rate: float = 10.0
    """Examinations a second, at most."""
    share: float = 1.0
    """Of the sessions, at most."""
    examples: bool = False
    """Whether findings show some characters of prompts around the break: content in reports."""


@dataclass(slots=True)
class IndexConfig:
    """The prefix index."""

    max_bytes: Bytes = 512 * 1024 * 1024
    """Of each of its two parts: what was routed, and what KV events told."""


@dataclass(slots=True)
class Retries:
    """Attempts before the first content byte."""

    attempts: int = 3
    budget: float = 0.1
    """Retries as a share of the traffic."""


@dataclass(slots=True)
class Timeouts:
    """What a worker is granted; there is no limit on the whole of an answer."""

    connect: Seconds = 5.0
    first_byte: Seconds = 900.0
    idle: Seconds = 300.0


@dataclass(slots=True)
class Probes:
    """How workers are watched."""

    health: Seconds = 5.0
    load: Seconds = 2.0
    join: Seconds = 1.0


@dataclass(slots=True)
class Recording:
    """What was asked, for `warmroute replay`: sizes, times and hashed pages, no text."""

    file: str
    max: Bytes = 1024 * 1024 * 1024
    """Of a file."""
    share: float = 1.0
    """Of the sessions."""
    keep: Count = 0
    """Full files that stay while another is begun; 0: it ends with the first."""


@dataclass(slots=True)
class RequestLogConfig:
    """One line for each request, without a word of it."""

    file: str = "-"
    """``-``: standard output."""
    format: str = "json"
    """Or ``text``: ``key=value``."""
    max: Bytes = 100 * 1024 * 1024
    """Of a file, then it is rotated."""
    keep: Count = 5
    """Old files that stay."""


@dataclass(slots=True)
class TracingConfig:
    """Where traces go, by OTLP over HTTP. Needs the extra ``warmroute[tracing]``."""

    endpoint: str
    """The collector's URL for traces, as ``http://collector:4318/v1/traces``."""
    share: float = 0.01
    """Of the requests that bring no ``traceparent``."""
    trust: bool = True
    """Whether those that do are traced as it says; if not, they are traced by the same share, as a part of its trace."""
    service: str = "warmroute"


@dataclass(slots=True)
class ReplicasConfig:
    """Several gateways as one: processes on this host, and gateways on others."""

    processes: Count = 1
    """On this host, each of which takes a part of the connections."""
    redis: Secret | None = None
    """Where gateways on several hosts tell each other what they do: redis://host:port/db, rediss:// with TLS,
    redis+sentinel://host:port,host:port/name, redis+cluster://host:port."""
    scope: str = "default"
    """Gateways of one scope, in one Redis, are replicas of each other."""


@dataclass(slots=True)
class Config:
    """The whole file."""

    listen: Listen = field(default_factory=Listen)
    admin: Admin = field(default_factory=Admin)
    metrics: MetricsAddress | None = None
    health: HealthAddress | None = None
    pressure: PressureConfig = field(default_factory=PressureConfig)
    policy: str = "cache_aware"
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named sets of options: ``{name: policy, option: value, ...}``."""
    models: dict[str, ModelConfig] = field(default_factory=dict)
    workers: list[WorkerConfig] = field(default_factory=list)
    discovery: Annotated[list[DiscoveryConfig], SEVERAL] = field(default_factory=list)
    """Where further workers are found: one source, or a list of them."""
    tenants: list[TenantConfig] = field(default_factory=list)
    auth: Auth = field(default_factory=Auth)
    anonymous: bool = False
    """Whether requests without a key are served although there are tenants."""
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    warming: WarmingConfig = field(default_factory=WarmingConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    retries: Retries = field(default_factory=Retries)
    timeouts: Timeouts = field(default_factory=Timeouts)
    probes: Probes = field(default_factory=Probes)
    recording: Recording | None = None
    request_log: RequestLogConfig | None = None
    tracing: TracingConfig | None = None
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    passthrough: list[str] = field(default_factory=list)
    isolation_key: Secret | None = None
    """What isolated tenants' cache salts are made with: the same for all replicas, and over restarts. Random if not given."""
    drain: Seconds = 5.0
    """Between readiness going off and connections being refused at shutdown."""
    drain_limit: Seconds = 600.0
    """How long running requests may take to end at shutdown."""

    def make_policy(self, name: str) -> Policy:
        """The policy called ``name`` here: one of ``policies``, or a policy's own name.

        Raises `UnknownPolicy` or `BadOption`.
        """
        options = dict(self.policies.get(name, {}))
        kind = options.pop("name", name)
        fallback = options.get("fallback")
        if isinstance(fallback, str) and fallback in self.policies:
            options["fallback"] = {"name": fallback, **self.policies[fallback]}
        return load_policy(str(kind), options)


def parse(
    text: str, environment: Mapping[str, str] | None = None, source: str = "", filled: dict[str, str] | None = None
) -> Config:
    """A configuration out of YAML. Raises `ConfigError` with all problems found.

    ``filled`` gets what variables held that were read: their values are told in no message.
    """
    reader = Reader(os.environ if environment is None else environment)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        message = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError([Problem(line, "", f"not YAML: {message}")], source) from None
    try:
        config = Config() if node is None or is_null(node) else reader.build(Config, node, "")
    except RecursionError:
        raise ConfigError([Problem(None, "", "an alias contains itself, or the nesting is too deep")], source) from None
    problems = reader.problems
    if config is not None and not problems:
        problems = check(config, reader.lines)
    if filled is not None:
        filled.update(reader.filled)
    if problems or config is None:
        raise ConfigError(masked(problems, reader.filled), source)
    return config


def read(path: str, environment: Mapping[str, str] | None = None) -> Config:
    """A configuration out of a file. Raises `ConfigError`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(None, "", f"{path} cannot be read: {error}")]) from None
    return parse(text, environment, path)


def parse_workers(text: str, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """What a list of workers says of each: keys of `WorkerConfig` and their values, ``url`` always. Raises `ConfigError`."""
    reader = Reader(os.environ if environment is None else environment)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError([Problem(mark and mark.line + 1, "", "neither YAML nor JSON, or not all of it")]) from None
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError([Problem(None, "", "a list of workers is needed here: [{url: ...}], or [] for none")])
    told: list[dict[str, Any]] = []
    for number, each in enumerate(node.value):
        worker = reader.build(WorkerConfig, each, f"[{number}]")
        if worker is not None:
            problems = check_worker(worker, f"[{number}]")
            reader.problems += [problem._replace(line=each.start_mark.line + 1) for problem in problems]
            told.append({str(key.value): getattr(worker, str(key.value)) for key, _ in each.value})
    if reader.problems:
        raise ConfigError(masked(reader.problems, reader.filled))
    return told


def variable(name: str) -> str:
    """A variable of the environment. Raises `ConfigError` if it is not set."""
    found = os.environ.get(name)
    if not found:
        raise ConfigError([Problem(None, "", f"the environment has no {name}: set it, or name another variable")])
    return found


def maybe_variable(name: str) -> str | None:
    """A variable of the environment, if it is set to something."""
    return os.environ.get(name) or None


def environment() -> Mapping[str, str]:
    """All of it, to be handed on to processes that are started."""
    return os.environ


def shown(value: Any) -> Any:
    """A configuration as plain data for people, secrets hidden."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: shown(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shown(item) for item in value]
    return value
