"""From a request that was read to a choice of target: session, prompt, index, policy. Sends nothing.

`Routing.ask` gathers what the tenant's policy needs and nothing else; `Routing.choose` asks the policy; `Routing.commit`
makes the choice true (counter, home, index, pin) and `Routing.settle` learns from the end. A dry run stops before commit.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from gateway.dialects import Reading, Usage
from gateway.errors import BadRequest, NotFound, NoWorker
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.prompt import Prompt
from gateway.sessions import Session, Sessions
from gateway.tenants import Tenant
from gateway.workers import Target
from kv_index.pages import EMPTY, SYMBOL, TEXT_PAGE, Pages, paginate
from kv_index.radix import Node, RadixIndex
from policies.base import Choice, Fleet as View, Policy, Request

PREFIX_PAGES = 4
"""Pages of a prompt's start that `prefix_hash` hashes: about a kilobyte."""

BYTES_PER_TOKEN = 4.0
"""Prior of text bytes a token, until usage reports teach better."""

LEARNING = 0.05

DOUBTED = 256
"""Tokens below which a difference between belief and report says nothing."""
DOUBTS = 3
"""Reports in a row that find nothing where much was believed, after which a target is believed to hold nothing."""


@dataclass(slots=True, eq=False)
class Model:
    """What the gateway knows of one model."""

    name: str
    policy: Policy
    keeps_thinking: bool = False
    ordinal: int = 0
    bytes_per_token: float = BYTES_PER_TOKEN
    taught: int = 0
    label: str = ""
    """For metrics: its name, unless only a client says that it exists."""
    space: bytes = b""
    """Its part of a namespace."""

    def __post_init__(self) -> None:
        self.label = self.label or self.name
        self.space = self.name.encode("utf-8", "surrogatepass")


class Ask:
    """One request on its way to a choice, and what must be undone or learned at its end."""

    __slots__ = (
        "committed",
        "context",
        "depth",
        "end",
        "found",
        "model",
        "namespace",
        "new_session",
        "pages",
        "pin",
        "policy",
        "predicted",
        "prompt",
        "reading",
        "request",
        "scope",
        "session",
        "size",
        "tenant",
        "turn",
    )

    def __init__(self, tenant: Tenant, model: Model | None, policy: Policy, reading: Reading) -> None:
        self.tenant = tenant
        self.model = model
        self.policy = policy
        self.reading = reading
        self.session: Session | None = None
        self.new_session = False
        self.turn = 0
        self.found: str | None = None
        self.prompt: Prompt | None = None
        """``None`` again once the answer has begun."""
        self.size: int | None = None
        """Bytes of the prompt."""
        self.end: tuple[bytes, bool] | None = None
        """What its session will be found by, if by content; see `Sessions.end_of`."""
        self.pages: Pages = EMPTY
        self.depth: Mapping[int, int] = {}
        self.namespace = b""
        self.scope = 0
        self.request = Request()
        self.predicted: int | None = None
        """Tokens that the chosen target was predicted to hold; ``None`` when nothing was predicted."""
        self.context = 0
        self.pin: tuple[Node, int] | None = None
        self.committed = 0.0

    @property
    def model_name(self) -> str:
        """For metrics."""
        return self.model.label if self.model is not None else "any"


@dataclass(slots=True)
class Options:
    """How models are named and routed."""

    default: Callable[[], Policy]
    policies: dict[str, Policy] = field(default_factory=dict)
    """Model -> policy."""
    aliases: dict[str, str] = field(default_factory=dict)
    configured: frozenset[str] = frozenset()
    """Models that the configuration names: known even when nobody serves them."""
    thinking: dict[str, str] = field(default_factory=dict)
    """Model -> ``keep`` where its template keeps all thinking."""
    most_models: int = 1024


class Routing:
    """See the module's head. Times are seconds on the loop's clock."""

    def __init__(self, fleet: Fleet, sessions: Sessions, index: RadixIndex, metrics: Metrics, options: Options) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.metrics = metrics
        self.options = options
        self.models: dict[str, Model] = {}
        self._default = options.default()
        self._doubting: set[int] = set()
        """Targets whose reports have long contradicted what is believed of them."""

    # -- asking -----------------------------------------------------------------------------------------------------

    def model(self, name: str | None) -> Model | None:
        """The model that a request names (aliases resolved); ``None`` if it may go to any worker.

        Raises `NotFound` for a name that no worker serves and no configuration knows.
        """
        options = self.options
        if name is None:
            served = {model.name for worker in self.fleet.workers.values() for model in worker.facts.models}
            if len(served) != 1:
                if served:
                    raise BadRequest("model is missing: several are served here", param="model")
                return None
            (name,) = served
        name = options.aliases.get(name, name)
        model = self.models.get(name)
        if model is not None and (self.fleet.view(name) is not None or self._known(name)):
            return model
        if not self._known(name) and not self.fleet.serving(name):
            raise NotFound(f"the model {name!r} does not exist here", param="model")
        if model is None:
            if len(self.models) >= options.most_models:
                self.models.pop(next(iter(self.models)))
            keeps = options.thinking.get(name) == "keep"
            policy = options.policies.get(name) or self._default
            # An engine that lists no models takes any name: such names are a client's, and no label.
            label = name if self._known(name) else "unlisted"
            model = self.models[name] = Model(name, policy, keeps, label=label)
        return model

    def _known(self, name: str) -> bool:
        return name in self.options.configured or name in self.fleet.known_models

    def ask(
        self,
        tenant: Tenant,
        reading: Reading,
        named: Mapping[bytes, bytes],
        draw: int,
        now: float,
        *,
        memo: dict[object, object] | None = None,
        dry: bool = False,
    ) -> Ask:
        """Gather what the policy needs. Makes the session if it is new, unless ``dry``; changes nothing else."""
        if reading.model is not None:
            # Before it is looked for: what a tenant may not use it is not told of either.
            tenant.check_model(reading.model)
        model = None if reading.opaque and reading.model is None else self.model(reading.model)
        if tenant.models is not None:
            self._check_model(tenant, reading, model)
        policy = tenant.policy or (model.policy if model is not None else self._default)
        ask = Ask(tenant, model, policy, reading)
        request = ask.request
        request.draw = draw
        if model is None:
            return ask
        request.ordinal = model.ordinal
        if reading.make_prompt is None or not (policy.needs_prefix or policy.needs_session):
            return ask
        ask.namespace = b"\x00".join((model.space, tenant.space, reading.namespace))
        if policy.needs_session:
            found = self.sessions.name(named, reading, memo)
            if found is not None:
                ask.session = self.sessions.find(found, tenant.name, model.name, now, dry)
                ask.found = found.source
        if policy.needs_prefix or ask.session is None:
            ask.prompt = reading.make_prompt(model.keeps_thinking)
            ask.size = len(ask.prompt.text)
            if ask.session is None and policy.needs_session:
                ask.scope = xxh3_64_intdigest(ask.namespace, tenant.seed)
                ask.session = self.sessions.by_content(ask.prompt, ask.scope, tenant.name, model.name, now, dry)
                ask.found = None if ask.session is None else "content"
        session = ask.session
        if session is not None:
            ask.new_session = session.turns == 0 and session.running == 0
            ask.turn = session.turns + 1
            request.session = session.hash
            request.home = session.home
            request.siblings = session.running
        if policy.needs_prefix and ask.prompt is not None:
            self._match(ask, ask.prompt, model)
        return ask

    def _check_model(self, tenant: Tenant, reading: Reading, model: Model | None) -> None:
        """Raises `Forbidden` if the tenant may not use what this request would use, whatever its body shows of that."""
        allowed = tenant.models or frozenset()
        real = {self.options.aliases.get(name, name) for name in allowed}
        if reading.opaque and reading.previous is None:
            # What the worker will read in the body is not known: everything that it might is to be allowed.
            names = {served.name for worker in self.fleet.workers.values() for served in worker.facts.models}
        else:
            names = {model.name} if model is not None else set()
        for name in names:
            if name not in allowed and name not in real:
                tenant.check_model(name)

    def _match(self, ask: Ask, prompt: Prompt, model: Model) -> None:
        session, request = ask.session, ask.request
        size = len(prompt.text)
        ask.pages = pages = paginate(prompt.text, session.pages if session is not None else None)
        symbols = pages.symbols
        if len(symbols) >= PREFIX_PAGES * SYMBOL:
            request.prefix = xxh3_64_intdigest(symbols[: PREFIX_PAGES * SYMBOL])
        ask.depth = depth = self.index.match(ask.namespace, symbols).depths
        tokens = size / model.bytes_per_token
        if session is not None and session.prompt_tokens is not None and size >= session.prompt_bytes:
            tokens = session.prompt_tokens + (size - session.prompt_bytes) / model.bytes_per_token
        count = request.tokens = max(1, int(tokens))
        if depth:
            scale = TEXT_PAGE * count / size
            most = count - 1
            # Many hold the same shared start: as few conversions as there are depths.
            counts = {pages: min(int(pages * scale), most) for pages in set(depth.values())}
            if len(counts) == 1:
                holdings = dict.fromkeys(depth, counts.popitem()[1])
            else:
                holdings = {target: counts[pages] for target, pages in depth.items()}
            for doubted in self._doubting:
                holdings.pop(doubted, None)
            if session is not None and session.tail_target is not None:
                self._open_tail(session, symbols, depth, holdings, most)
            request.holdings = holdings

    def _open_tail(
        self, session: Session, symbols: bytes, depth: Mapping[int, int], holdings: dict[int, int], most: int
    ) -> None:
        """Count what was generated after the session's last prompt, where this one goes on from there."""
        at = session.tail_target
        before = session.pages.symbols
        if (
            at is not None
            and session.prompt_tokens is not None
            and len(symbols) > len(before)
            and depth.get(at, 0) * SYMBOL >= len(before) > 0
            and symbols.startswith(before)
        ):
            holdings[at] = max(holdings[at], min(session.prompt_tokens + session.tail_tokens, most))

    # -- choosing ---------------------------------------------------------------------------------------------------

    def view(self, ask: Ask, tried: Collection[int], now: float) -> View:
        """The candidates. Raises `NoWorker`."""
        name = ask.model.name if ask.model is not None else None
        view = self.fleet.view(name, tried)
        if view is None:
            what = f"no worker that serves {name!r} can be used now" if name else "no worker can be used now"
            raise NoWorker(what, retry_after=self.fleet.retry_after(name, now))
        return view

    def choose(self, ask: Ask, tried: Collection[int], now: float) -> Choice:
        """What the policy says. Raises `NoWorker`; changes nothing."""
        self.fleet.settle_estimates(now)
        view = self.view(ask, tried, now)
        home = ask.request.home
        ask.request.away = home is not None and home not in view.positions and self.fleet.rests(home, now)
        return ask.policy.choose(ask.request, view, now)

    def commit(self, ask: Ask, target: Target, choice: Choice, now: float) -> None:
        """The request is about to be sent to ``target``."""
        model, session, request = ask.model, ask.session, ask.request
        if model is None:
            return
        model.ordinal += 1
        if session is not None:
            self._bind(ask, session, target, choice)
        if request.tokens is not None:
            held = request.holdings.get(target.id, 0)
            ask.predicted = ask.context = min(held, request.tokens)
            place = self.index.insert(ask.namespace, ask.pages.symbols, target.id, now)
            self.index.pin(place, target.id)
            ask.committed = now
            ask.pin = (place, target.id)

    def _bind(self, ask: Ask, session: Session, target: Target, choice: Choice) -> None:
        before = session.home
        session.running += 1
        if before is None or choice.moves_home:
            self.sessions.bind(session, target.id)
        if before == target.id:
            outcome = "hit"
        elif before is None:
            outcome = "new" if ask.new_session else "lost"
        else:
            outcome = "moved" if choice.moves_home else "spilled"
        self.metrics.sessions.add((ask.tenant.name, ask.model_name, outcome, choice.reason))

    def begun(self, ask: Ask) -> None:
        """The answer begins: what was needed to choose again may go, and only what is learned at the end stays."""
        prompt = ask.prompt
        if prompt is not None:
            if ask.found == "content":
                ask.end = self.sessions.end_of(prompt, ask.scope)
            ask.prompt = None
        ask.reading.make_prompt = None

    def undo(self, ask: Ask, target: Target) -> None:
        """The request did not run on ``target`` after all: believe what was believed before."""
        session = ask.session
        if session is not None:
            session.running = max(0, session.running - 1)
        if ask.pin is not None:
            place, at = ask.pin
            ask.pin = None
            self.index.unpin(place, at)
            self.index.forget(ask.namespace, ask.pages.symbols, at, ask.depth.get(at, 0), ask.committed)
        if session is not None and session.home == target.id and ask.request.home != target.id:
            self.sessions.unbind(session)
            if ask.request.home is not None:
                self.sessions.bind(session, ask.request.home)

    # -- learning ---------------------------------------------------------------------------------------------------

    def settle(self, ask: Ask, target: Target, usage: Usage | None) -> None:
        """The request was answered; ``usage`` is what the engine reported, if it did."""
        session, model = ask.session, ask.model
        if ask.pin is not None:
            self.index.unpin(*ask.pin)
            ask.pin = None
        if session is not None:
            session.running = max(0, session.running - 1)
            session.turns += 1
        size = ask.size
        if model is None or size is None:
            return
        if usage is not None and usage.cached is not None and ask.predicted is not None and usage.prompt:
            self._believe(target, ask.predicted, usage.cached, usage.prompt)
        if usage is not None and usage.prompt and size >= TEXT_PAGE:
            self._teach(model, size / usage.prompt)
        if session is None:
            return
        if ask.end is not None:
            self.sessions.remember_content(session, ask.end)
        self.sessions.keep_pages(session, ask.pages)
        session.prompt_bytes = size
        session.prompt_tokens = usage.prompt if usage is not None else None
        session.tail_tokens = (usage.completion or 0) if usage is not None else 0
        session.tail_target = target.id

    def _believe(self, target: Target, predicted: int, cached: int, prompt: int) -> None:
        """Correct what is believed of ``target`` by what it found in its cache.

        Nothing found where much was believed, several times in a row: its cache was emptied, or is off; all of it is
        forgotten, and nothing is predicted there until it finds something again. Some missing: its cache is smaller than
        it seems (or shared with others): the oldest beliefs go.
        """
        if predicted >= DOUBTED and cached < 0.1 * predicted:
            target.doubts += 1
            if target.doubts == DOUBTS:
                self.index.clear(target.id)
                self._doubting.add(target.id)
                return
        elif cached:
            target.doubts = 0
            self._doubting.discard(target.id)
        if predicted - cached > max(DOUBTED, 0.05 * prompt):
            target.trusted_size = max(0.2, target.trusted_size * 0.97)
            self._fit(target)
        elif target.trusted_size < 1.0 and predicted >= DOUBTED:
            target.trusted_size = min(1.0, target.trusted_size * 1.002)

    def _teach(self, model: Model, ratio: float) -> None:
        """Bytes a token, as one request shows it; capacities follow."""
        if not 0.5 <= ratio <= 64:
            return
        model.taught += 1
        weight = max(LEARNING, 1.0 / model.taught)
        model.bytes_per_token += weight * (ratio - model.bytes_per_token)
        if model.taught & (model.taught - 1) == 0 or model.taught % 256 == 0:
            self.fit_capacities()

    def fit_capacities(self) -> None:
        """Tell the index how many pages each engine's cache is."""
        for worker in self.fleet.workers.values():
            for target in worker.targets:
                self._fit(target)

    def _fit(self, target: Target) -> None:
        facts = target.worker.facts
        known = self.models.get(facts.models[0].name) if facts.models else None
        ratio = known.bytes_per_token if known is not None else BYTES_PER_TOKEN
        tokens = facts.kv_tokens
        pages = None if tokens is None else int(tokens * target.trusted_size * ratio / TEXT_PAGE)
        if self.index.capacity(target.id) != pages:
            self.index.set_capacity(target.id, pages)

    # -- the dry run ------------------------------------------------------------------------------------------------

    def explain(self, ask: Ask, now: float, pinned: Choice | None = None) -> dict[str, object]:
        """What would be chosen and why; changes nothing. ``pinned``: the choice that is not the policy's to make."""
        view = self.view(ask, (), now)
        choice = pinned or self.choose(ask, (), now)
        rows = ask.policy.explain(ask.request, view, now)
        session = ask.session
        return {
            "decision": ask.policy.name,
            "reason": choice.reason,
            "target": choice.target.name,
            "pair": None,
            "model": ask.model_name,
            "prompt_tokens": ask.request.tokens,
            "session": None
            if session is None
            else {
                "id": session.key.hex(),
                "source": ask.found,
                "home": self._name(session.home),
                "turns": session.turns,
                "running": session.running,
            },
            "candidates": [
                {
                    "target": row.target.name,
                    "total_ms": None if row.terms is None else round(row.terms.total * 1e3, 3),
                    "terms": None
                    if row.terms is None
                    else {name: round(value * 1e3, 3) for name, value in row.terms._asdict().items()},
                    "holding_tokens": {"device": row.holding},
                    "running": row.target.running,
                    "homes": row.target.homes,
                }
                for row in rows
            ],
        }

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name


def draw_of(request_id: bytes) -> int:
    """64 bits from a request's id."""
    return xxh3_64_intdigest(request_id)
