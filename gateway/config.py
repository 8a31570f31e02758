"""The one configuration file, typed; the only reader of the environment.

Every option is a field of a dataclass below, with its default and its meaning; nothing else is accepted. The file is read
into YAML's own node tree first, so that whatever is wrong is told with its line, the nearest known key and the cure.
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from gateway.engines import all_engines
from policies.base import BadOption, Policy, UnknownPolicy, load as load_policy, names as policy_names

Seconds = Annotated[float, "duration"]
"""Written ``500ms``, ``30s``, ``5m``, ``1h``, or a number of seconds."""
Bytes = Annotated[int, "size"]
"""Written ``64k``, ``64M``, ``1G``, or a number."""
Count = Annotated[int, "count"]
"""Written ``200k``, ``2M``, or a number."""


class Secret(str):
    """A string that never shows itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


class Problem(NamedTuple):
    """One thing that is wrong."""

    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, not only the first."""

    def __init__(self, problems: list[Problem], source: str = "") -> None:
        self.problems = problems
        head = f"{source}: " if source else ""
        super().__init__("\n".join(f"{head}{problem}" for problem in problems))


@dataclass(slots=True)
class TLS:
    """Certificate and key files."""

    cert: str
    key: str


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
class ModelConfig:
    """One model."""

    aliases: list[str] = field(default_factory=list)
    policy: str | None = None
    thinking: str = "auto"
    """Text mode: whether the template keeps thinking of earlier turns: auto, strip_before_last_user, keep."""


@dataclass(slots=True)
class WorkerConfig:
    """One worker; what is left out is detected."""

    url: str
    engine: str | None = None
    role: str | None = None
    models: list[str] | None = None
    api_key: Secret | None = None
    kv_tokens: Count | None = None
    verify_tls: bool = True
    ca: str | None = None


@dataclass(slots=True)
class TenantConfig:
    """One tenant."""

    name: str
    keys: list[Secret] = field(default_factory=list)
    policy: str | None = None
    models: list[str] | None = None
    isolation: str = "shared"
    show_routing: bool = True


@dataclass(slots=True)
class SessionsConfig:
    """The session store."""

    idle: Seconds = 1800.0
    max: Count = 200_000
    headers: list[str] = field(default_factory=list)


@dataclass(slots=True)
class IndexConfig:
    """The prefix index."""

    max_bytes: Bytes = 512 * 1024 * 1024


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
class Config:
    """The whole file."""

    listen: Listen = field(default_factory=Listen)
    admin: Admin = field(default_factory=Admin)
    metrics: MetricsAddress | None = None
    policy: str = "cache_aware"
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Named sets of options: ``{name: policy, option: value, ...}``."""
    models: dict[str, ModelConfig] = field(default_factory=dict)
    workers: list[WorkerConfig] = field(default_factory=list)
    tenants: list[TenantConfig] = field(default_factory=list)
    anonymous: bool = False
    """Whether requests without a key are served although there are tenants."""
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    retries: Retries = field(default_factory=Retries)
    timeouts: Timeouts = field(default_factory=Timeouts)
    probes: Probes = field(default_factory=Probes)
    passthrough: list[str] = field(default_factory=list)
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


NAMELESS = frozenset(
    "authorization proxy-authorization x-api-key cookie forwarded x-forwarded-for x-real-ip "
    "x-request-id traceparent tracestate".split()
)
"""Headers that never name a session."""

T = TypeVar("T")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?\Z")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMG])?\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


class _Reader:
    """Walks the node tree, collecting problems and the line of every key."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {}

    def wrong(self, node: yaml.Node, key: str, message: str) -> None:
        self.problems.append(Problem(node.start_mark.line + 1, key, message))

    def build(self, kind: type[T], node: yaml.Node, path: str) -> T | None:
        """A dataclass out of a mapping; ``None`` after a problem."""
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, path, "a mapping of keys to values is needed here")
            return None
        hints = get_type_hints(kind, include_extras=True)
        known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        before = len(self.problems)
        for key_node, value_node in node.value:
            key = str(key_node.value)
            at = f"{path}.{key}" if path else key
            self.lines[at] = key_node.start_mark.line + 1
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known here: {', '.join(known)}"
                self.wrong(key_node, at, f"unknown key{hint}")
            elif key in values:
                self.wrong(key_node, at, "this key appears twice")
            else:
                values[key] = self.value(hints[key], value_node, at)
        for each in fields(kind):  # type: ignore[arg-type]
            if each.default is MISSING and each.default_factory is MISSING and each.name not in values:
                self.wrong(node, path, f"{each.name!r} is missing")
        if len(self.problems) > before:
            return None
        return kind(**values)

    def value(self, hint: Any, node: yaml.Node, path: str) -> Any:
        """A value of type ``hint``; ``None`` after a problem."""
        if get_origin(hint) in (Union, UnionType):
            options = [option for option in get_args(hint) if option is not NoneType]
            if _is_null(node) and NoneType in get_args(hint):
                return None
            return self.value(options[0], node, path)
        if get_origin(hint) is Annotated:
            return self.measure(get_args(hint)[1], node, path)
        if isinstance(hint, type) and is_dataclass(hint):
            return self.build(hint, node, path)
        if get_origin(hint) is list:
            if not isinstance(node, yaml.SequenceNode):
                self.wrong(node, path, "a list is needed here: [a, b]")
                return None
            (inner,) = get_args(hint)
            return [self.value(inner, item, f"{path}[{at}]") for at, item in enumerate(node.value)]
        if get_origin(hint) is dict:
            return self.mapping(get_args(hint)[1], node, path)
        if hint is Any:
            return self.plain(node, path)
        return self.scalar(hint, node, path)

    def mapping(self, inner: Any, node: yaml.Node, path: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, path, "a mapping of names to values is needed here")
            return {}
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            self.lines[f"{path}.{key}"] = key_node.start_mark.line + 1
            if key in found:
                self.wrong(key_node, f"{path}.{key}", "this key appears twice")
            found[key] = self.value(inner, value_node, f"{path}.{key}")
        return found

    def plain(self, node: yaml.Node, path: str) -> Any:
        """Whatever YAML says, with variables filled in."""
        if isinstance(node, yaml.MappingNode):
            return self.mapping(Any, node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, f"{path}[{at}]") for at, item in enumerate(node.value)]
        text = self.expand(node, path)
        if not isinstance(node, yaml.ScalarNode) or node.style is not None:
            return text
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text

    def expand(self, node: yaml.Node, path: str) -> str:
        """A scalar's text with ``${NAME}`` replaced."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, path, "one value is needed here, not a list or a mapping")
            return ""

        def fill(match: re.Match[str]) -> str:
            value = self.environment.get(match[1])
            if value is None:
                self.wrong(node, path, f"the environment has no {match[1]}: set it, or write the value here")
                return ""
            return value

        return _VARIABLE.sub(fill, str(node.value))

    def measure(self, unit: str, node: yaml.Node, path: str) -> float | int | None:
        text = self.expand(node, path)
        if unit == "duration":
            match = _DURATION.match(text)
            if match is None:
                self.wrong(node, path, f"{text!r} is not a duration: write 500ms, 30s, 5m or 1h")
                return None
            return float(match[1]) * _UNITS[match[2]]
        match = _SIZE.match(text)
        if match is None:
            what = "size: write 64k, 64M or 1G" if unit == "size" else "count: write 5000, 200k or 2M"
            self.wrong(node, path, f"{text!r} is not a {what}")
            return None
        base = 1024 if unit == "size" else 1000
        return int(float(match[1]) * base ** " kMG".index(match[2] or " "))

    def scalar(self, kind: Any, node: yaml.Node, path: str) -> Any:
        text = self.expand(node, path)
        if kind is bool:
            if text.lower() in ("true", "yes", "on"):
                return True
            if text.lower() in ("false", "no", "off"):
                return False
            self.wrong(node, path, f"{text!r} is neither true nor false")
            return None
        if _is_null(node):
            self.wrong(node, path, "a value is missing")
            return None
        try:
            return kind(text)
        except ValueError:
            self.wrong(node, path, f"{text!r} is not {'a whole number' if kind is int else 'a number'}")
            return None


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def parse(text: str, environment: Mapping[str, str] | None = None, source: str = "") -> Config:
    """A configuration out of YAML. Raises `ConfigError` with all problems found."""
    reader = _Reader(os.environ if environment is None else environment)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        message = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError([Problem(line, "", f"not YAML: {message}")], source) from None
    try:
        config = Config() if node is None or _is_null(node) else reader.build(Config, node, "")
    except RecursionError:
        raise ConfigError([Problem(None, "", "an alias contains itself, or the nesting is too deep")], source) from None
    problems = reader.problems
    if config is not None and not problems:
        problems = check(config, reader.lines)
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def read(path: str, environment: Mapping[str, str] | None = None) -> Config:
    """A configuration out of a file. Raises `ConfigError`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(None, "", f"{path} cannot be read: {error}")]) from None
    return parse(text, environment, path)


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
    _check_tenants(config, wrong)
    _check_numbers(config, wrong)
    ports = {"listen.port": config.listen.port, "admin.port": config.admin.port}
    if config.metrics is not None:
        ports["metrics.port"] = config.metrics.port
    for where, port in ports.items():
        if not 0 <= port <= 65535:
            wrong(where, f"{port} is not a port: 1 to 65535, or 0 for any free one")
    _check_secret("admin.token", config.admin.token, wrong)
    if not _loopback(config.admin.host) and not config.admin.token:
        wrong("admin.host", "the admin port listens beyond loopback: set admin.token, or host 127.0.0.1")
    if not 1 <= config.retries.attempts <= 10:
        wrong("retries.attempts", "must be from 1 (no retry) to 10")
    if not 0 <= config.retries.budget <= 1:
        wrong("retries.budget", "is a share of the traffic: from 0 to 1")
    aliases: dict[str, str] = {}
    for name, model in config.models.items():
        if model.thinking not in ("auto", "strip_before_last_user", "keep"):
            wrong(f"models.{name}.thinking", f"{model.thinking!r} is not one of auto, strip_before_last_user, keep")
        for alias in model.aliases:
            if alias in config.models or aliases.setdefault(alias, name) != name:
                wrong(f"models.{name}.aliases", f"{alias!r} already names a model")
    for header in config.sessions.headers:
        if header.lower().replace("_", "-") in NAMELESS:
            wrong(
                "sessions.headers", f"{header!r} cannot name a session: it tells a credential, an address or a request"
            )
    for path in config.passthrough:
        if not path.startswith("/"):
            wrong("passthrough", f"{path!r} is not a path: it must begin with /")
    return found


def _check_policies(config: Config, wrong: Any) -> None:
    used = {"policy": config.policy}
    used.update({f"models.{name}.policy": model.policy for name, model in config.models.items() if model.policy})
    used.update({f"tenants[{at}].policy": tenant.policy for at, tenant in enumerate(config.tenants) if tenant.policy})
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


def _check_numbers(config: Config, wrong: Any) -> None:
    """What must be more than nothing: a pause of 0 would never rest, a limit of 0 would let nothing through."""
    for section in ("listen", "sessions", "index", "timeouts", "probes"):
        part = getattr(config, section)
        for each in fields(part):
            value = getattr(part, each.name)
            if each.name != "port" and isinstance(value, int | float) and value <= 0:
                wrong(f"{section}.{each.name}", "must be more than 0")
    for number, worker in enumerate(config.workers):
        if worker.kv_tokens is not None and worker.kv_tokens <= 0:
            wrong(f"workers[{number}].kv_tokens", "must be more than 0")


def _check_secret(key: str, secret: str | None, wrong: Any) -> None:
    """Secrets out of files like to end with a line break, and variables to be set to nothing."""
    if secret is None:
        return
    if not secret:
        wrong(key, "is empty: leave the key out, or give it a value")
    elif not secret.isprintable() or secret != secret.strip():
        wrong(key, "holds a line break, a control character, or blanks at its ends: take them out")


def _check_workers(config: Config, wrong: Any) -> None:
    from gateway.fleet import WorkerSpec

    seen: set[str] = set()
    for number, worker in enumerate(config.workers):
        key = f"workers[{number}]"
        try:
            WorkerSpec(worker.url)
        except ValueError as error:
            wrong(f"{key}.url", str(error))
        address = worker.url.rstrip("/")
        if address in seen:
            wrong(f"{key}.url", "this worker is listed twice")
        seen.add(address)
        _check_secret(f"{key}.api_key", worker.api_key, wrong)
        if worker.engine is not None and worker.engine not in all_engines():
            wrong(f"{key}.engine", f"{worker.engine!r} is not one of {', '.join(all_engines())}")
        if worker.role not in (None, "unified"):
            wrong(f"{key}.role", f"{worker.role!r} cannot be served: only 'unified' workers can")


def _check_tenants(config: Config, wrong: Any) -> None:
    names: set[str] = set()
    keys: set[str] = set()
    for number, tenant in enumerate(config.tenants):
        key = f"tenants[{number}]"
        if tenant.name in names:
            wrong(f"{key}.name", f"two tenants are called {tenant.name!r}")
        names.add(tenant.name)
        if not tenant.name:
            wrong(f"{key}.name", "a tenant needs a name")
        if not tenant.keys:
            wrong(f"{key}.keys", f"tenant {tenant.name!r} has no key: nobody could ever be it")
        for secret in tenant.keys:
            _check_secret(f"{key}.keys", secret, wrong)
            if secret in keys:
                wrong(f"{key}.keys", "this key is used twice")
            keys.add(secret)
        if tenant.isolation not in ("shared", "isolated"):
            wrong(f"{key}.isolation", f"{tenant.isolation!r} is neither shared nor isolated")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
