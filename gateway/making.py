"""Parts of a gateway, made of what its configuration says."""

from __future__ import annotations

import logging
import resource
from dataclasses import asdict
from hashlib import blake2b

from gateway.admission import Options as Queueing
from gateway.app import Gateway
from gateway.asks import Options
from gateway.config import Config, ModelConfig, TenantConfig
from gateway.config_reader import ConfigError, Problem
from gateway.config_tenants import ANONYMOUS
from gateway.credentials import BadKey, read_keys
from gateway.doctor import Doctor
from gateway.guesses import Guesses
from gateway.http.limits import Inward, Outward
from gateway.jwks import KeySet
from gateway.meters import Limits as TenantLimits
from gateway.metrics import Metrics
from gateway.oidc import Tokens
from gateway.pressure import Limits, allowed
from gateway.prompt import Thinking
from gateway.replicas.shared import shared_secret
from gateway.seat import Seat
from gateway.stores import FileStore, RedisStore, Store, Unsaved
from gateway.tenants import Known, Tenant, Tenants
from gateway.trials import Part, Policies
from kv_index.checkpoints import Rule
from policies.admission import Bounds, Priority

log = logging.getLogger("warmroute")


def _connections(wanted: int) -> int:
    """As many client connections as the descriptor limit allows beside as many to workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = 2 * wanted + 256
    if soft < need:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard) if hard >= 0 else need, hard))
        except (ValueError, OSError):
            pass
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < need:
        allowed = max(64, (soft - 256) // 2)
        log.warning(
            "the descriptor limit %d allows %d client connections, not %d: raise ulimit -n", soft, allowed, wanted
        )
        return allowed
    return wanted


def make_limits(config: Config) -> tuple[Inward, Outward]:
    """Bounds of the data plane, towards clients and towards workers."""
    inward = Inward(
        body=config.listen.max_body,
        connections=_connections(config.listen.max_connections),
        idle_seconds=config.listen.idle,
        head_seconds=config.listen.head_timeout,
        body_seconds=config.listen.body_timeout,
        comment_seconds=config.listen.comment_after,
    )
    outward = Outward(
        connect_seconds=config.timeouts.connect,
        first_byte_seconds=config.timeouts.first_byte,
        idle_seconds=config.timeouts.idle,
    )
    return inward, outward


def make_doctor(config: Config, gateway: Gateway) -> Doctor | None:
    told, metrics = config.doctor, gateway.metrics
    if not told.enabled:
        return None

    def counted(tenant: str, cause: str, tokens: int) -> None:
        if tenant not in gateway.routing.tenants:
            # It is not configured any more, and has no series.
            return
        metrics.breaks.add((tenant, cause))
        metrics.break_tokens.add((tenant, cause), tokens)

    return Doctor(
        memory=told.memory,
        rate=told.rate,
        share=told.share,
        examples=told.examples,
        shows=lambda tenant: gateway.tenants.shows_content(tenant),
        counted=counted,
    )


def make_store(config: Config, seat: Seat | None = None) -> Store | None:
    """Where sessions are kept over a restart, if anywhere. Raises `ConfigError` for a URL that is none of Redis'."""
    if config.sessions.redis is not None:
        try:
            return RedisStore(str(config.sessions.redis), config.sessions.idle)
        except ValueError:
            # What it is may have a password in it.
            problem = Problem(None, "sessions.redis", "is no URL of a Redis: redis://host:port/db")
            raise ConfigError([problem]) from None
    path = config.sessions.state
    if path is None:
        return None
    return FileStore(path if seat is None else seat.own(path))


def make_secret(config: Config, store: Store | None, common: str | None = None) -> bytes | None:
    """What session tokens are sealed with; ``common``: what several gateways have in common, if nothing else is
    said; ``None``: a random one. Raises `ConfigError` for a state file that is none."""
    kept = None
    if isinstance(store, FileStore):
        try:
            kept = store.secret_of()
        except Unsaved as error:
            raise ConfigError([Problem(None, "sessions.state", str(error))]) from None
    told = config.sessions.token_key or config.isolation_key or common
    return kept if told is None else str(told).encode()


def make_common(config: Config, seat: Seat | None) -> str | None:
    """What several gateways make tokens and salts with, if the configuration says nothing; ``None``: there is but one."""
    redis = config.replicas.redis
    needed = config.sessions.token_key is None or config.isolation_key is None
    if redis is not None and needed:
        try:
            found = shared_secret(str(redis), config.replicas.scope)
        except ValueError as error:
            raise ConfigError([Problem(None, "replicas.redis", str(error))]) from None
        if found is not None:
            return found
    return None if seat is None else seat.secret


def make_tenants(
    config: Config, metrics: Metrics | None = None, before: Tenants | None = None, key_set: KeySet | None = None
) -> Tenants:
    """Tenants with their policies and keys; of those ``before`` them only what they saw of credentials stays.

    ``key_set``: that of tokens' issuer. Raises `ConfigError` for keys that are none.
    """
    claims: dict[str, Tenant] = {}
    subjects: dict[str, Tenant] = {}
    pairs: list[tuple[str, Tenant]] = []
    filed: list[bytes] = []
    for number, each in enumerate(config.tenants):
        tenant = Tenant(
            each.name,
            policies=_policies(config, each.policy, each),
            by_model={
                name: Policies(config.make_policy(policy), *_parts(config, each))
                for name, policy in each.policies.items()
            },
            models=frozenset(each.models) if each.models is not None else None,
            aliases=dict(each.aliases),
            shows_routing=each.show_routing,
            hides_addresses=each.hide_addresses,
            isolated=each.isolation == "isolated",
            canonical=frozenset(each.canonical),
            priority=each.priority,
            weight=each.weight,
            limits=TenantLimits(**asdict(each.limits)),
            log_content=each.log_content,
        )
        pairs += [(str(key), tenant) for key in each.keys]
        claims |= dict.fromkeys([each.name] if each.claims is None else each.claims, tenant)
        subjects |= dict.fromkeys(each.subjects, tenant)
        try:
            found = [str(key) for path in each.key_files for key in read_keys(path)]
            pairs += [(key, tenant) for key in found]
            filed += [each.name.encode(), *map(str.encode, found)]
        except BadKey as error:
            raise ConfigError([Problem(None, f"tenants[{number}].key_files", str(error))]) from None
    return Tenants(
        pairs,
        Tenant(ANONYMOUS, log_content=not config.tenants) if config.anonymous or not config.tenants else None,
        keyed=bool(config.tenants),
        tokens=None if key_set is None else _tokens(config, key_set),
        claims=claims if key_set is not None else None,
        subjects=subjects,
        guesses=Guesses[Known](config.auth.failures_per_minute) if before is None else before.guesses,
        filed=blake2b(b"\n".join(filed)).digest(),
        counted=(lambda reason: None) if metrics is None else lambda reason: metrics.auth_failures.add((reason,)),
    )


def _tokens(config: Config, keys: KeySet) -> Tokens:
    told = config.auth.jwt
    assert told is not None
    return Tokens(
        keys,
        issuer=told.issuer,
        audience=told.audience,
        claim=told.claim,
        algorithms=told.algorithms,
        leeway=told.leeway,
    )


def make_queueing(config: Config) -> Queueing:
    """The queue in front of the fleet."""
    told = config.admission
    unbounded = 1 << 62
    priorities = tuple(
        Priority(
            name,
            level.share,
            level.deadline or told.deadline,
            level.queue or unbounded,
            level.bytes or unbounded,
        )
        for name, level in told.priorities.items()
    )
    # Where there are several, none of them fills it.
    part = 2 if config.tenants else 1
    bounds = Bounds(
        told.queue,
        told.bytes,
        told.tenant_queue or max(1, told.queue // part),
        told.tenant_bytes or max(1, told.bytes // part),
    )
    return Queueing(told.ahead, told.hold, bounds, priorities)


def _policies(config: Config, policy: str | None, told: TenantConfig | ModelConfig) -> Policies | None:
    """How a tenant or a model is routed; ``None``: it says nothing of that."""
    if policy is None and told.rollout is None and told.shadow is None:
        return None
    return Policies(config.make_policy(policy or config.policy), *_parts(config, told))


def _parts(config: Config, told: TenantConfig | ModelConfig) -> tuple[Part | None, Part | None]:
    rollout, shadow = told.rollout, told.shadow
    return (
        None if rollout is None else Part(config.make_policy(rollout.policy), rollout.share),
        None if shadow is None else Part(config.make_policy(shadow.policy), shadow.share),
    )


def make_pressure(config: Config) -> Limits:
    """When the gateway itself is short of time or memory."""
    return Limits(config.pressure.lag, config.pressure.memory or allowed())


def make_options(config: Config) -> Options:
    """How models are named and routed."""
    return Options(
        default=lambda: Policies(config.make_policy(config.policy)),
        policies={
            name: policies
            for name, model in config.models.items()
            if (policies := _policies(config, model.policy, model)) is not None
        },
        aliases={alias: name for name, model in config.models.items() for alias in model.aliases},
        configured=frozenset(config.models),
        thinking={name: Thinking(model.thinking) for name, model in config.models.items() if model.thinking != "auto"},
        hybrid=frozenset(name for name, model in config.models.items() if model.reuse == "checkpoints"),
        rules={
            name: Rule.of(model.checkpoints) for name, model in config.models.items() if model.checkpoints != "auto"
        },
        anywhere=frozenset(name for name, model in config.models.items() if model.reuse == "any"),
        by_ids=frozenset(name for name, model in config.models.items() if model.tokenizer is not None),
        kv_bytes={name: model.kv_bytes for name, model in config.models.items() if model.kv_bytes},
        restore={
            name: (model.restore.host / 1e3, model.restore.disk / 1e3, model.restore.shared / 1e3)
            for name, model in config.models.items()
        },
    )
