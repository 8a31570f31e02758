"""What is wrong with a configuration although every value is of its type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.config_reader import Problem
from gateway.config_tenants import check_secret, check_tenants, is_loopback
from gateway.dialects.fields import NAMING
from gateway.disagg import all_protocols
from gateway.discovery import load as load_source
from gateway.discovery.base import BadOption as BadSourceOption, Template
from gateway.engines import all_engines
from gateway.prompt import Thinking
from gateway.replicas.redis_url import place_of
from gateway.workers import GIVEN, WorkerSpec, address
from kv_index.checkpoints import Rule
from policies.base import BadOption, Role, UnknownPolicy, names as policy_names

if TYPE_CHECKING:
    from gateway.config import (
        Config,
        Disaggregation,
        EventsConfig,
        ModelConfig,
        Recording,
        RequestLogConfig,
        SessionsConfig,
        TenantConfig,
        TracingConfig,
        WorkerConfig,
    )

MOST_PROCESSES = 64
NAMELESS = frozenset(
    "authorization proxy-authorization x-api-key cookie forwarded x-forwarded-for x-real-ip "
    "x-request-id traceparent tracestate".split()
)
"""Headers that never name a session."""


def check(config: Config, lines: Mapping[str, int] | None = None) -> list[Problem]:
    """What is wrong although every value is of its type."""
    at = lines or {}
    found: list[Problem] = []

    def wrong(key: str, message: str) -> None:
        place = key
        while place and place not in at:
            # What is not written itself is told where it would stand.
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        found.append(Problem(at.get(place), key, message))

    _check_policies(config, wrong)
    _check_workers(config, wrong)
    _check_discovery(config, wrong)
    check_tenants(config, wrong)
    _check_admission(config, wrong)
    _check_numbers(config, wrong)
    ports = {"listen.port": config.listen.port, "admin.port": config.admin.port}
    if config.metrics is not None:
        ports["metrics.port"] = config.metrics.port
    if config.health is not None:
        ports["health.port"] = config.health.port
        if config.health.stalled < 1:
            wrong("health.stalled", "must be at least 1s: a busy process is not a dead one")
    if config.pressure.memory is not None and config.pressure.memory <= 0:
        wrong("pressure.memory", "must be more than 0")
    if config.pressure.lag <= 0:
        wrong("pressure.lag", "must be more than 0")
    for where, port in ports.items():
        if not 0 <= port <= 65535:
            wrong(where, f"{port} is not a port: 1 to 65535, or 0 for any free one")
    check_secret("admin.token", config.admin.token, wrong)
    if not is_loopback(config.admin.host) and not config.admin.token:
        wrong("admin.host", "the admin port listens beyond loopback: set admin.token, or host 127.0.0.1")
    if not 0 < config.doctor.rate <= 1000:
        wrong("doctor.rate", "must be more than 0, at most 1000 examinations a second")
    if not 0 < config.doctor.share <= 1:
        wrong("doctor.share", "is a share of the sessions: more than 0, at most 1; enabled: false examines none")
    if config.doctor.memory <= 0:
        wrong("doctor.memory", "must be more than 0; enabled: false examines nothing")
    if not 0 <= config.warming.starts <= 64:
        wrong("warming.starts", "must be from 0 (none) to 64")
    if config.warming.seconds <= 0:
        wrong("warming.seconds", "must be more than 0; starts: 0 warms nothing")
    if not 1 <= config.retries.attempts <= 10:
        wrong("retries.attempts", "must be from 1 (no retry) to 10")
    if not 0 <= config.retries.budget <= 1:
        wrong("retries.budget", "is a share of the traffic: from 0 to 1")
    aliases: dict[str, str] = {}
    for name, model in config.models.items():
        _check_model(f"models.{name}", model, wrong)
        for alias in model.aliases:
            if alias in config.models or aliases.setdefault(alias, name) != name:
                wrong(f"models.{name}.aliases", f"{alias!r} already names a model")
    for header in config.sessions.headers:
        if header.lower().replace("_", "-") in NAMELESS:
            wrong(
                "sessions.headers", f"{header!r} cannot name a session: it tells a credential, an address or a request"
            )
    for name in config.sessions.fields:
        if name not in NAMING:
            wrong("sessions.fields", f"{name!r} is not one of {', '.join(NAMING)}")
    check_secret("sessions.token_key", config.sessions.token_key, wrong)
    _check_stores(config.sessions, wrong)
    if config.sessions.cookie and not config.sessions.token:
        wrong("sessions.cookie", "there is no cookie without a token: set sessions.token to true, or leave cookie out")
    _check_disaggregation(config.disaggregation, wrong)
    if config.disaggregation.bidirectional and not any(model.tokenizer for model in config.models.values()):
        wrong(
            "disaggregation.bidirectional",
            "needs token mode, or nothing is ever handed back: give models.<name>.tokenizer and .template",
        )
    _check_replicas(config, wrong)
    if config.request_log is not None:
        _check_request_log(config.request_log, wrong)
    if config.tracing is not None:
        _check_tracing(config.tracing, wrong)
    if config.recording is not None:
        _check_recording(config.recording, wrong)
    for path in config.passthrough:
        if not path.startswith("/"):
            wrong("passthrough", f"{path!r} is not a path: it must begin with /")
    return found


def _check_stores(sessions: SessionsConfig, wrong: Any) -> None:
    if sessions.redis is None:
        return
    if sessions.state is not None:
        wrong("sessions.redis", "homes are kept in one place: take sessions.state or sessions.redis out")
    url = urlsplit(str(sessions.redis))
    try:
        bad = url.scheme not in ("redis", "rediss", "unix") or url.port == 0
    except ValueError:
        bad = True
    if bad or not (url.path if url.scheme == "unix" else url.hostname):
        # What it is may have a password in it.
        wrong("sessions.redis", "is no URL of a Redis: redis://host:port/db, rediss:// for TLS, or unix:///path")


def _check_replicas(config: Config, wrong: Any) -> None:
    told = config.replicas
    if not 1 <= told.processes <= MOST_PROCESSES:
        wrong("replicas.processes", f"must be from 1 to {MOST_PROCESSES}: there is no use in more than processors")
    if told.redis is not None:
        try:
            place_of(str(told.redis))
        except ValueError as error:
            wrong("replicas.redis", str(error))
    if not re.fullmatch(r"[\w.-]{1,100}", told.scope):
        wrong("replicas.scope", "is a name of up to 100 letters, digits, dots, dashes and underscores")
    if told.processes == 1 and told.redis is None:
        return
    if config.sessions.streaming:
        wrong(
            "sessions.streaming",
            "one gateway alone knows the sessions that clients opened: take it out, or replicas.processes and .redis",
        )
    for place, worker in enumerate(config.workers):
        if worker.events.bind or worker.events.poll:
            wrong(
                f"workers[{place}].events",
                "these events go to one gateway alone: take bind and poll out, or replicas.processes and .redis",
            )


def _check_request_log(wanted: RequestLogConfig, wrong: Any) -> None:
    if not wanted.file or "\0" in wanted.file:
        wrong("request_log.file", f"{wanted.file!r} is no name of a file; '-' is standard output")
    if wanted.format not in ("json", "text"):
        wrong("request_log.format", f"{wanted.format!r} is neither json nor text")
    if wanted.max <= 0:
        wrong("request_log.max", "must be more than 0")
    if wanted.keep < 1:
        wrong("request_log.keep", "must be 1 or more: what is rotated has to go somewhere")


def _check_tracing(tracing: TracingConfig, wrong: Any) -> None:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", tracing.endpoint):
        wrong("tracing.endpoint", f"{tracing.endpoint!r} is no URL such as http://collector:4318/v1/traces")
    if not 0 <= tracing.share <= 1:
        wrong("tracing.share", "is a share of the requests: from 0 (only those whose client traces) to 1")
    if find_spec("opentelemetry") is None:
        wrong("tracing", "needs what is not installed: pip install 'warmroute[tracing]'")


def _check_recording(recording: Recording, wrong: Any) -> None:
    if not recording.file:
        wrong("recording.file", "is empty: name the file to write")
    elif "\0" in recording.file:
        wrong("recording.file", f"{recording.file!r} is no name of a file: take the NUL character out")
    if recording.max <= 0:
        wrong("recording.max", "must be more than 0")
    if not 0 < recording.share <= 1:
        wrong(
            "recording.share",
            "is a share of the sessions: more than 0, at most 1; leave recording out to record nothing",
        )


def _check_model(key: str, model: ModelConfig, wrong: Any) -> None:
    for option, known in (
        ("thinking", ("auto", *Thinking)),
        ("reuse", ("auto", "any", "checkpoints")),
    ):
        value = getattr(model, option)
        if value not in known:
            wrong(f"{key}.{option}", f"{value!r} is not one of {', '.join(known)}")
    if model.checkpoints != "auto":
        try:
            Rule.of(model.checkpoints)
        except ValueError as error:
            wrong(f"{key}.checkpoints", f"{error}, auto")
        if model.reuse == "any":
            wrong(f"{key}.checkpoints", "has no meaning beside reuse: any: take one of them out")
    for option in ("host", "disk", "shared"):
        if getattr(model.restore, option) < 0:
            wrong(f"{key}.restore.{option}", "must not be negative")
    _check_tokens(key, model, wrong)


def _check_tokens(key: str, model: ModelConfig, wrong: Any) -> None:
    if model.template is not None and model.tokenizer in (None, "engine"):
        wrong(f"{key}.template", "is of use beside a tokenizer's file only")
    for option, path in (("tokenizer", model.tokenizer), ("template", model.template)):
        if path is not None and (path != "engine" or option == "template") and not Path(path).is_file():
            wrong(f"{key}.{option}", f"there is no file {path!r}")
    if model.tokenizer not in (None, "engine"):
        lacking = [name for name in ("tokenizers", "jinja2") if find_spec(name) is None]
        if lacking:
            wrong(f"{key}.tokenizer", f"needs {' and '.join(lacking)}: pip install 'warmroute[tokens]'")


def _check_events(key: str, events: EventsConfig, wrong: Any) -> None:
    for option in ("endpoint", "replay"):
        told = getattr(events, option)
        if told is not None and not _ENDPOINT.fullmatch(told):
            wrong(f"{key}.{option}", f"{told!r} is not an endpoint: tcp://host:port or ipc://path is needed")
    if events.endpoint is None and (events.replay is not None or events.bind or events.topic):
        wrong(f"{key}.endpoint", "is needed beside what is told of it")
    if not events.enabled and (events.endpoint is not None or events.poll):
        wrong(f"{key}.enabled", "contradicts what is told beside it: take one of them out")
    if events.poll and events.endpoint is not None:
        wrong(f"{key}.poll", "is for engines that do not publish: take poll or endpoint out")
    if events.endpoint is not None and "*" in events.endpoint and not events.bind:
        wrong(f"{key}.endpoint", "a wildcard cannot be connected to: name the worker's host")


_ENDPOINT = re.compile(r"tcp://[^/\s]+:[0-9]{1,5}|ipc://\S+")


def _check_policies(config: Config, wrong: Any) -> None:
    used = {"policy": config.policy}
    told = [(f"models.{name}", model) for name, model in config.models.items()]
    told += [(f"tenants[{at}]", tenant) for at, tenant in enumerate(config.tenants)]  # type: ignore[misc]
    for key, each in told:
        if each.policy:
            used[f"{key}.policy"] = each.policy
        _check_parts(key, each, config, used, wrong)
    for at, tenant in enumerate(config.tenants):
        used.update({f"tenants[{at}].policies.{model}": policy for model, policy in tenant.policies.items()})
    for name, options in config.policies.items():
        if not isinstance(options, dict) or "name" not in options:
            wrong(f"policies.{name}", f"needs a 'name': one of {', '.join(policy_names())}")
        else:
            used.setdefault(f"policies.{name}", name)
    for key, name in used.items():
        named = name in config.policies
        if named and key != f"policies.{name}":
            continue  # it is told where it is written
        try:
            config.make_policy(name)
        except UnknownPolicy:
            known = policy_names() if named else [*config.policies, *policy_names()]
            given = str(config.policies[name].get("name", name)) if named else name
            near = difflib.get_close_matches(given, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
            wrong(f"{key}.name" if named else key, f"no policy is called {given!r}; {hint}")
        except BadOption as error:
            wrong(f"{key}.{error.option}" if error.option else key, str(error))


def _check_parts(key: str, told: ModelConfig | TenantConfig, config: Config, used: dict[str, str], wrong: Any) -> None:
    """Other policies for a part of what is asked."""
    for name, part in (("rollout", told.rollout), ("shadow", told.shadow)):
        if part is None:
            continue
        used[f"{key}.{name}.policy"] = part.policy
        if not 0 <= part.share <= 1:
            wrong(f"{key}.{name}.share", "is a share: from 0 to 1")
        if told.policy is None and key.startswith("tenants") and any(model.policy for model in config.models.values()):
            wrong(
                f"{key}.{name}", "beside which policy? Name the tenant's policy too: models have policies of their own"
            )


def _check_admission(config: Config, wrong: Any) -> None:
    told = config.admission
    if not told.priorities:
        wrong("admission.priorities", "is empty: name one level at least, or leave it out")
    for name, level in told.priorities.items():
        key = f"admission.priorities.{name}"
        if not _NAME.fullmatch(name):
            wrong(key, "a priority's name has letters, digits, - and _ only: requests name it in a header")
        if not 0 <= level.share < 1:
            wrong(f"{key}.share", "is a share of what is computed: from 0 to less than 1")
        for option in ("deadline", "queue", "bytes"):
            value = getattr(level, option)
            if value is not None and value <= 0:
                wrong(f"{key}.{option}", "must be more than 0")
    if sum(level.share for level in list(told.priorities.values())[1:]) >= 1:
        wrong(
            "admission.priorities", "the shares of all but the first come to 1 or more: nothing is left for the first"
        )
    for option in ("queue", "bytes", "deadline", "tenant_queue", "tenant_bytes"):
        value = getattr(told, option)
        if value is not None and value <= 0:
            wrong(f"admission.{option}", "must be more than 0")
    for number, tenant in enumerate(config.tenants):
        key = f"tenants[{number}]"
        if tenant.priority is not None and tenant.priority not in told.priorities:
            known = ", ".join(told.priorities)
            wrong(f"{key}.priority", f"{tenant.priority!r} is not one of admission.priorities: {known}")
        if not 0.01 <= tenant.weight <= 100:
            wrong(f"{key}.weight", "must be from 0.01 to 100")
        for each in fields(tenant.limits):
            value = getattr(tenant.limits, each.name)
            if value is not None and value <= 0:
                wrong(f"{key}.limits.{each.name}", "must be more than 0; leave it out for no limit")


_NAME = re.compile("[A-Za-z0-9_-]{1,64}")


def _check_numbers(config: Config, wrong: Any) -> None:
    """What must be more than nothing: a pause of 0 would never rest, a limit of 0 would let nothing through."""
    for section in ("listen", "sessions", "index", "timeouts", "probes"):
        part = getattr(config, section)
        for each in fields(part):
            value = getattr(part, each.name)
            if each.name == "port" or isinstance(value, bool):
                continue
            if isinstance(value, int | float) and value <= 0:
                wrong(f"{section}.{each.name}", "must be more than 0")


def _check_workers(config: Config, wrong: Any) -> None:

    seen: set[str] = set()
    for number, worker in enumerate(config.workers):
        key = f"workers[{number}]"
        where = worker.url.rstrip("/")
        if where in seen:
            wrong(f"{key}.url", "this worker is listed twice")
        seen.add(where)
        for problem in check_worker(worker, key):
            wrong(problem.key, problem.message)


def check_worker(worker: WorkerConfig, key: str, found: bool = False) -> list[Problem]:
    """What is wrong with one worker; ``found``: it is what is said of all that a source finds, which have their own urls."""
    problems: list[Problem] = []

    def wrong(at: str, message: str) -> None:
        problems.append(Problem(None, at, message))

    try:
        WorkerSpec("http://found" if found else worker.url)
    except ValueError as error:
        wrong(f"{key}.url", str(error))
    if found and worker.url:
        wrong(f"{key}.url", "is what the source finds: take it out")
    check_secret(f"{key}.api_key", worker.api_key, wrong)
    if worker.engine is not None and worker.engine not in all_engines():
        wrong(f"{key}.engine", f"{worker.engine!r} is not one of {', '.join(all_engines())}")
    for option in ("kv_tokens", "max_running"):
        value = getattr(worker, option)
        if value is not None and value <= 0:
            wrong(f"{key}.{option}", "must be more than 0")
    _check_events(f"{key}.events", worker.events, wrong)
    _check_pairing(key, worker, wrong)
    return problems


def _check_discovery(config: Config, wrong: Any) -> None:
    known: set[str] = set()
    for number, told in enumerate(config.discovery):
        key = f"discovery[{number}]"
        name = told.name or told.source
        if not _NAME.fullmatch(name):
            wrong(f"{key}.name", "has letters, digits, - and _ only, at most 64")
        if name in known or name in GIVEN:
            wrong(f"{key}.name", f"{name!r} is the name of other workers: give this source another one")
        known.add(name)
        for problem in check_worker(told.worker, f"{key}.worker", found=True):
            wrong(problem.key, problem.message)
        try:
            load_source(told.source, told.options, Template(told.worker))
        except BadSourceOption as error:
            wrong(f"{key}.{error.option or 'source'}", str(error))


def _check_pairing(key: str, worker: WorkerConfig, wrong: Any) -> None:
    if worker.role is not None and worker.role not in tuple(Role):
        wrong(f"{key}.role", f"{worker.role!r} is not one of {', '.join(Role)}")
    if worker.protocol is not None and worker.protocol not in all_protocols():
        wrong(f"{key}.protocol", f"{worker.protocol!r} is not one of {', '.join(all_protocols())}")
    for option in ("bootstrap", "kv_source"):
        told = getattr(worker, option)
        if told is None:
            continue
        try:
            address(told)
        except ValueError as error:
            wrong(f"{key}.{option}", f"{error}: name the host and port that other workers connect to")


def _check_disaggregation(told: Disaggregation, wrong: Any) -> None:
    known = ("auto", *all_protocols())
    if told.protocol not in known:
        wrong("disaggregation.protocol", f"{told.protocol!r} is not one of {', '.join(known)}")
    for option in ("lease", "keep"):
        if getattr(told, option) <= 0:
            wrong(f"disaggregation.{option}", "must be more than 0")
