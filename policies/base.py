"""What a policy sees and what it returns; finding a policy by name.

A policy keeps no state and changes nothing: the gateway commits its choice (counter, home, charge), a dry run does not.
It never names a URL or an HTTP status. Anything in a file of this package (or behind an entry point of the group
``warmroute.policies``) that has a ``name`` and the two methods of `Policy` is one; its options are its constructor's
keyword arguments.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol, runtime_checkable

from xxhash import xxh3_64_intdigest


class Role(StrEnum):
    """What an engine does of a request."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)
class Rates:
    """What things cost on one kind of engine; learned online by the gateway, these are the priors.

    Prefilling ``u`` tokens after a context of ``c`` takes ``base + token*u + attention*u*(c + u/2)`` seconds.
    """

    base: float = 0.02
    """Seconds a request costs whatever its length."""
    token: float = 1e-4
    """Seconds for each uncached prompt token."""
    attention: float = 1e-9
    """Seconds for each uncached token and each token before it."""
    decode: float = 1e-4
    """Seconds by which one running decode lengthens one step of the others."""
    restore: tuple[float, float, float] = (1e-5, 5e-5, 1e-4)
    """Seconds to bring one token's KV back to the device from host memory, disk, a shared store."""
    handshake: float = 0.01
    """Seconds that a transfer of KV from another engine takes whatever its size."""
    transfer: float = 5e-6
    """Seconds to bring one token's KV from another engine."""

    def prefill(self, uncached: float, context: float) -> float:
        """Seconds to prefill ``uncached`` tokens behind ``context`` tokens."""
        return self.base + uncached * (self.token + self.attention * (context + 0.5 * uncached))

    def moved(self, tokens: float) -> float:
        """Seconds to bring ``tokens`` tokens' KV from another engine; nothing to bring costs nothing."""
        return self.handshake + tokens * self.transfer if tokens > 0 else 0.0


@dataclass(slots=True, eq=False)
class Target:
    """One target as policies see it. The gateway keeps the numbers current; policies only read."""

    id: int
    """Dense small integer; keys holdings."""
    name: str
    """Stable across restarts and replicas; breaks ties."""
    rates: Rates = field(default_factory=Rates)
    wait: float = 0.0
    """Seconds of prefill work in front of a new request, what is at work counted whole."""
    head: float = 0.0
    """Of those, the seconds of what is at work."""
    since: float = 0.0
    """When that began."""
    running: int = 0
    """Requests in flight that this gateway sent."""
    foreign: float = 0.0
    """Requests in flight that others sent, as the engine reports; decays with the report's age."""
    busy: float = 0.0
    """Requests that generate now: ours that have begun to answer, and the foreign ones."""
    homes: int = 0
    """Live sessions bound to it."""
    role: Role = Role.UNIFIED
    whole: bool = True
    """Whether it can serve a request from its prompt to its end; `Role.UNIFIED` always does."""
    pool: str = ""
    """Engines of one pool can hand KV to each other."""
    room: int | None = None
    """Tokens that its KV cache holds; ``None``: not known."""
    active: float = 0.0
    """Tokens of requests in flight: their prompts, and what they are expected to generate."""
    haste: float = 1.0
    """How long answers take to begin, as a part of what was expected: less than 1 where rates that were not learned yet, or
    prompts that an engine computes together, made work look longer than it is."""
    most_running: int | None = None
    """Requests that it runs at one time, the others wait; ``None``: not known."""
    share: float = 1.0
    """Slow start: the part of its fair share that it may take now, in (0, 1]."""
    seed: int = 0
    """64-bit hash of the name; filled in when 0."""

    def __post_init__(self) -> None:
        if not self.seed:
            self.seed = xxh3_64_intdigest(self.name.encode())

    def waits(self, now: float) -> float:
        """Seconds of prefill work that are left in front of a request at ``now``."""
        passed = now - self.since
        return self.wait - (passed if passed < self.head else self.head)

    @property
    def load(self) -> float:
        """Requests in flight, scaled up while it starts slowly."""
        return (self.running + self.foreign) / self.share


@dataclass(slots=True)
class Request:
    """One request as policies see it."""

    draw: int = 0
    """64 random bits from the request's id: randomness that can be replayed."""
    ordinal: int = 0
    """How many requests were committed before this one."""
    tokens: int | None = None
    """Prompt tokens, estimated; ``None`` when the prompt is opaque."""
    holdings: Mapping[int, int] = field(default_factory=dict)
    """target id -> leading prompt tokens that it is believed to hold, usable ones only; absent is none."""
    session: int | None = None
    """64-bit hash of the session's key; ``None`` without a session."""
    home: int | None = None
    """target id of the session's home, whether or not it is among the candidates; ``None`` without a session."""
    away: bool = False
    """The home serves but asked for a pause: no reason to move the session."""
    queued: float = 0.0
    """Seconds of prefill that wait for the home before they are sent there, and would be in front of this request."""
    siblings: int = 0
    """Other requests of the same session that run now."""
    prefix: int | None = None
    """64-bit hash of the prompt's start; ``None`` when shorter than that."""
    crowd: float = 0.0
    """Requests a second that a second of prefill on one target delays (`policies.demand`)."""
    turns: float = 4.0
    """Requests of an ordinary session."""
    restored: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    """target id -> how many of its holding must first be brought back from host, disk, a shared store; absent is none."""
    fetched: Mapping[int, int] = field(default_factory=dict)
    """target id -> how many of its holding it must first fetch from the home, which keeps them; absent is none."""
    partner: int | None = None
    """target id of the prefill engine that the session is bound to, where its home is a pair."""
    lent: int = 0
    """Leading prompt tokens whose KV the home can hand back to a prefill engine."""

    @property
    def key(self) -> int:
        """What ties break by: the same for all requests that should stay together."""
        return self.session if self.session is not None else self.draw


class Fleet:
    """The targets that may take the request now: never empty, in a stable order.

    The gateway makes one when the set changes and keeps it while it does not.
    """

    __slots__ = ("odd", "positions", "prefill", "rates", "targets", "uniform")

    def __init__(self, targets: Sequence[Target], prefill: "Fleet | None" = None) -> None:
        self.targets = tuple(targets)
        self.prefill = prefill
        """Prefill engines that may compute its prompt for one of ``targets``; ``None``: there are none."""
        self.positions = {target.id: at for at, target in enumerate(self.targets)}
        """target id -> its place in ``targets``."""
        ((shared, _),) = Counter(id(target.rates) for target in targets).most_common(1)
        self.rates = next(target.rates for target in targets if id(target.rates) == shared)
        """Those that most of them share."""
        self.odd = [at for at, target in enumerate(targets) if target.rates is not self.rates or target.share != 1.0]
        """Places of those that have others, or start slowly: lets a policy price most of them at once."""
        self.uniform = not self.odd
        """Whether there are none."""


class Terms(NamedTuple):
    """Cost of one candidate, in seconds."""

    wait: float = 0.0
    prefill: float = 0.0
    interference: float = 0.0
    placement: float = 0.0
    restore: float = 0.0
    delay: float = 0.0
    """What later requests wait longer for it, and what a policy's thrift adds."""
    transfer: float = 0.0
    """Until KV that another engine holds has come."""
    memory: float = 0.0
    """Until there is room for its KV."""

    @property
    def total(self) -> float:
        """Seconds in all."""
        return sum(self)


class Choice(NamedTuple):
    """What a policy decided."""

    target: Target
    reason: str
    """One of a small fixed set of words for each policy: a metric label."""
    moves_home: bool = True
    """Whether a session that has a home elsewhere is bound to this target from now on."""
    terms: Terms | None = None
    runner_up: Target | None = None
    runner_up_terms: Terms | None = None
    prefill: Target | None = None
    """Who computes the prompt, if that is not ``target``."""
    source: Target | None = None
    """Who hands over KV that it holds of the prompt."""


class Candidate(NamedTuple):
    """One row of an explanation."""

    target: Target
    terms: Terms | None
    holding: int
    prefill: Target | None = None
    """Who would compute the prompt, if that is not ``target``."""


@runtime_checkable
class Policy(Protocol):
    """A way to choose."""

    name: str
    needs_prefix: bool
    """Whether it reads ``request.holdings`` or ``request.prefix``; the gateway skips that work otherwise."""
    needs_session: bool
    """Whether it reads ``request.session`` or ``request.home``."""

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """The target to use; ``now`` in seconds."""
        ...

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """Every candidate with what speaks for and against it, the chosen one first."""
        ...


class ByLoad:
    """Base of policies that price nothing: explains itself by load alone."""

    needs_prefix = False
    needs_session = False

    def choose(self, request: Request, fleet: Fleet, now: float) -> Choice:
        """The target to use."""
        raise NotImplementedError

    def explain(self, request: Request, fleet: Fleet, now: float) -> list[Candidate]:
        """The chosen one, then the others, least loaded first; no cost terms."""
        chosen = self.choose(request, fleet, now).target
        ranked = sorted(fleet.targets, key=lambda target: (target is not chosen, target.load))
        return [Candidate(target, None, request.holdings.get(target.id, 0)) for target in ranked]


_MASK = (1 << 64) - 1


def affinities(key: int, targets: Iterable[Target]) -> list[int]:
    """Rendezvous scores of ``key`` on each of ``targets``: highest wins; of n targets one that leaves moves 1/n of the keys.

    Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998; the mixer is two rounds of xor-shift
    and multiplication.
    """
    first = [(key ^ target.seed) * 0x9E3779B97F4A7C15 & _MASK for target in targets]
    second = [(mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK for mixed in first]
    return [mixed ^ mixed >> 32 for mixed in second]


def rendezvous(key: int, targets: Sequence[Target]) -> Target:
    """The target of the highest of `affinities`."""
    scores = affinities(key, targets)
    return targets[scores.index(max(scores))]


def cheapest(costs: Sequence[float], targets: Sequence[Target], key: int) -> int:
    """Place of the least of ``costs``, one for each of ``targets``; ties go by `rendezvous` of ``key``."""
    least = min(costs)
    at = costs.index(least)
    if costs.count(least) == 1:
        return at
    tied = [at for at, cost in enumerate(costs) if cost == least]
    scores = affinities(key, [targets[at] for at in tied])
    return tied[scores.index(max(scores))]


class UnknownPolicy(ValueError):
    """No policy has that name."""


class BadOption(ValueError):
    """A policy's option is unknown, missing or of a bad value; ``option`` names it."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


def names() -> list[str]:
    """Names that `load` knows, sorted."""
    found = {module.name for module in iter_modules(import_module("policies").__path__)}
    found = {name for name in found if _in_module(name) is not None}
    found.update(point.name for point in entry_points(group="warmroute.policies"))
    return sorted(found)


def load(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make the policy ``name`` with ``options``.

    Raises `UnknownPolicy`, or `BadOption` when its constructor does not take them.
    """
    kind = _in_module(name) if name.isidentifier() else None
    if kind is None:
        points = [point for point in entry_points(group="warmroute.policies") if point.name == name]
        if not points:
            raise UnknownPolicy(f"no policy is called {name!r}; there are: {', '.join(names())}")
        kind = points[0].load()
    options = dict(options or {})
    parameters = _parameters(kind)
    for option in options:
        if option not in parameters:
            known = ", ".join(parameters) or "none"
            raise BadOption(f"policy {name} has no option {option!r}; its options: {known}", option)
    for parameter in parameters.values():
        if parameter.default is Parameter.empty and parameter.name not in options:
            raise BadOption(f"policy {name} needs the option {parameter.name!r}", parameter.name)
    policy = kind(**options)
    if not isinstance(policy, Policy):
        raise UnknownPolicy(f"{name} is not a policy: it lacks a name, a need or a method")
    return policy


@lru_cache(maxsize=64)
def _parameters(kind: Callable[..., Any]) -> Mapping[str, Parameter]:
    """What ``kind`` takes. Finding that out makes classes that only the garbage collector takes away again."""
    return signature(kind).parameters


def inner(policy: str, option: str, told: str | Mapping[str, Any] | None) -> Policy:
    """The other policy that ``option`` of ``policy`` names, by name or as a mapping with its options. Raises `BadOption`."""
    options = {"name": told} if isinstance(told, str) else dict(told) if isinstance(told, Mapping) else {}
    name = options.pop("name", None)
    if not isinstance(name, str) or name == policy:
        raise BadOption(f"{policy}.{option} must be the name of another policy, or a mapping with its name", option)
    try:
        return load(name, options)
    except UnknownPolicy as error:
        raise BadOption(f"{policy}.{option}: {error}", option) from None
    except BadOption as error:
        raise BadOption(str(error), f"{option}.{error.option}" if error.option else option) from None


def number(policy: str, option: str, value: Any, low: float, high: float) -> float:
    """``value`` as a float within [low, high]; raises `BadOption` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadOption(f"{policy}.{option} must be a number from {low:g} to {high:g}, not {value!r}", option)
    return float(value)


def _in_module(name: str) -> Any:
    if name in (
        "admission",
        "base",
        "calibrate",
        "charged",
        "cost",
        "demand",
        "outliers",
        "returns",
    ) or name.startswith("_"):
        return None
    try:
        module = import_module(f"policies.{name}")
    except ModuleNotFoundError:
        return None
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__ and getattr(value, "name", None) == name:
            return value
    return None
