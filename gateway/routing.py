"""From a request that was read to a choice of target: session, prompt, index, policy. Sends nothing.

`Routing.ask` gathers what the tenant's policy needs and nothing else; `Routing.choose` asks the policy; `Routing.commit`
makes the choice true (counter, home, index, pin) and `Routing.settle` learns from the end. A dry run stops before commit.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from gateway.dialects import Reading, Usage
from gateway.engines.events import namespace
from gateway.errors import BadRequest, NotFound, NoWorker
from gateway.fleet import Fleet
from gateway.metrics import Metrics
from gateway.prompt import Prompt, Thinking, thinking_of
from gateway.sessions import Session, Sessions
from gateway.tenants import Tenant
from gateway.workers import Target
from kv_index.checkpoints import Checkpoints, Rule
from kv_index.index import DOUBTED, PrefixIndex, Report
from kv_index.pages import EMPTY, PAGE_TOKENS, SYMBOL, TEXT_PAGE, Pages, chain, names, paginate
from kv_index.radix import Node
from kv_index.sequels import Sequels
from policies.base import Choice, Fleet as View, Policy, Request

log = logging.getLogger("warmroute")

PREFIX_PAGES = 4
"""Pages of a prompt's start that `prefix_hash` hashes: about a kilobyte."""

BYTES_PER_TOKEN = 4.0
"""Prior of text bytes a token, until usage reports teach better."""

LEARNING = 0.05

LAG = 0.25
"""Seconds after an answer within which events of its last tokens may be on their way."""


@dataclass(slots=True, eq=False)
class Model:
    """What the gateway knows of one model."""

    name: str
    policy: Policy
    thinking: Thinking = Thinking.STRIP
    rule: Rule | None = None
    """Where its engines can resume a prompt, if not anywhere."""
    fine: bool = False
    """Whether some of its engines cache in blocks smaller than a page of ours."""
    adapter: str | None = None
    """Its name, if it is an adapter: engines tell it in their events."""
    by_ids: float = 0.0
    """The share of its prompts that are routed by token ids."""
    fitted: float = 0.0
    """The same when capacities were last told to the index."""
    told: bool = False
    """Whether it was said that its engines' events are of no use without token ids."""
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
        "exact",
        "found",
        "ids",
        "model",
        "namespace",
        "new_session",
        "page",
        "pages",
        "pin",
        "policy",
        "predicted",
        "prompt",
        "reading",
        "request",
        "returns",
        "routed",
        "salt",
        "scope",
        "session",
        "shadow",
        "size",
        "start",
        "stored",
        "tenant",
        "turn",
        "used",
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
        self.page = 0.0
        """Tokens in one of its pages."""
        self.ids: bytes | None = None
        """Token ids of the prompt, little-endian u32 each; ``None`` in text mode. Empty again once the answer has begun and
        nothing more can be learned with them."""
        self.returns = False
        """The answer may tell the ids that were generated."""
        self.start = 0
        """Where the chain of its ids begins: adapter and salt."""
        self.salt: str | None = None
        """The cache salt that its engine will see."""
        self.exact: Mapping[int, int] = {}
        """target id -> what its events say that it holds."""
        self.routed = 0
        """What routing alone would have predicted of the chosen target."""
        self.shadow: int | None = None
        """What events alone would have predicted of it; ``None`` where they are not asked."""
        self.stored: int | None = None
        """Blocks that the chosen target's events had told of before; ``None`` where they are not asked."""
        self.used: float | None = None
        """When the session's last prompt was sent to the chosen target; ``None`` if that was elsewhere."""
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
    thinking: dict[str, Thinking] = field(default_factory=dict)
    """Model -> what its template does with thinking; models that are not in it: by their name."""
    rules: dict[str, Rule | None] = field(default_factory=dict)
    """Hybrid models -> where their engines can resume a prompt; ``None``: by the engine's kind."""
    anywhere: frozenset[str] = frozenset()
    """Models that can be resumed anywhere, whatever their engine says."""
    restore: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """Model -> seconds to bring back one token from host, disk, shared store."""
    by_ids: frozenset[str] = frozenset()
    """Models whose prompts are routed by token ids."""
    most_models: int = 1024


class Routing:
    """See the module's head. Times are seconds on the loop's clock."""

    def __init__(
        self, fleet: Fleet, sessions: Sessions, index: PrefixIndex, metrics: Metrics, options: Options
    ) -> None:
        self.fleet = fleet
        self.sessions = sessions
        self.index = index
        self.metrics = metrics
        self.options = options
        self.models: dict[str, Model] = {}
        self.checkpoints = Checkpoints()
        self.sequels = Sequels()
        self._default = options.default()

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
            thinking = options.thinking.get(name) or thinking_of(name)
            policy = options.policies.get(name) or self._default
            # An engine that lists no models takes any name: such names are a client's, and no label.
            label = name if self._known(name) else "unlisted"
            by_ids = float(name in options.by_ids)
            model = self.models[name] = Model(name, policy, thinking, by_ids=by_ids, fitted=by_ids, label=label)
            self._describe(model)
        return model

    def _describe(self, model: Model) -> None:
        """What its workers say of it."""
        model.rule = self._rule_of(model.name)
        sizes = [worker.facts.block_size for worker in self.fleet.serving(model.name)]
        model.fine = any(size is not None and size < PAGE_TOKENS for size in sizes)
        listed = [served for worker in self.fleet.serving(model.name) for served in worker.facts.models]
        model.adapter = model.name if any(s.name == model.name and s.parent is not None for s in listed) else None

    def _rule_of(self, name: str) -> Rule | None:
        """Where engines can resume a prompt, if its model is hybrid."""
        options, workers = self.options, self.fleet.serving(name)
        if name not in options.rules and (name in options.anywhere or not any(w.facts.hybrid for w in workers)):
            return None
        by_kind = Rule(boundary=True) if {worker.facts.engine for worker in workers} <= {"vllm"} else Rule(ends=True)
        return options.rules.get(name) or by_kind

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
        ids: bytes | None = None,
        salt: Callable[[Ask], str] | None = None,
        dry: bool = False,
    ) -> Ask:
        """Gather what the policy needs. Makes the session if it is new, unless ``dry``; changes nothing else.

        ``ids``: token ids of the prompt, where the gateway made them. ``salt`` makes the cache salt of isolated tenants.
        """
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
            ask.prompt = reading.make_prompt(model.thinking)
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
            if ids is None and reading.ids is not None:
                ids = reading.ids()
            if ids is None:
                self._match(ask, ask.prompt, model)
            else:
                ask.ids = ids
                if salt is not None and tenant.isolated:
                    ask.salt = salt(ask)
                elif reading.salt is not None:
                    ask.salt = reading.salt()
                self._match_ids(ask, ids, model, now)
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
        if model.by_ids:
            self._share(model, 0.0)
        ask.pages = pages = paginate(prompt.text, session.pages if session is not None else None)
        symbols = pages.symbols
        if len(symbols) >= PREFIX_PAGES * SYMBOL:
            request.prefix = xxh3_64_intdigest(symbols[: PREFIX_PAGES * SYMBOL])
        ask.depth = depth = self.index.radix.match(ask.namespace, symbols).depths
        tokens = size / model.bytes_per_token
        if session is not None and session.prompt_tokens is not None and size >= session.prompt_bytes:
            tokens = session.prompt_tokens + (size - session.prompt_bytes) / model.bytes_per_token
        count = request.tokens = max(1, int(tokens))
        scale = ask.page = TEXT_PAGE * count / (size or 1)
        if depth:
            most = count - 1
            # Many hold the same shared start: as few conversions as there are depths.
            counts = {pages: min(int(pages * scale), most) for pages in set(depth.values())}
            if len(counts) == 1:
                holdings = dict.fromkeys(depth, counts.popitem()[1])
            else:
                holdings = {target: counts[pages] for target, pages in depth.items()}
            if self.index.low:
                for target in [target for target in self.index.low if target in holdings]:
                    if not self.index.believed(target, request.home):
                        del holdings[target]
            if model.rule is not None:
                along = prefixes_of_text(symbols)
                holdings = self.checkpoints.usable(along, holdings, page=scale)
            if session is not None and session.tail_target is not None:
                self._open_tail(session, symbols, depth, holdings, most, model.rule)
            request.holdings = holdings

    def _match_ids(self, ask: Ask, ids: bytes, model: Model, now: float) -> None:
        """The same by token ids: exact counts, exact where events tell, true to the engines' blocks."""
        session, request = ask.session, ask.request
        ask.start = namespace(model.adapter, ask.salt)
        ask.page = float(PAGE_TOKENS)
        ask.namespace += b"\x00ids"
        ask.pages = pages = chain(ids, ask.start, session.pages if session is not None else None)
        symbols = pages.symbols
        if len(symbols) >= PREFIX_PAGES * SYMBOL:
            request.prefix = xxh3_64_intdigest(symbols[: PREFIX_PAGES * SYMBOL])
        count = request.tokens = max(1, len(ids) // 4)
        self._share(model, 1.0)
        found = self.index.match(ask.namespace, symbols, ids, ask.start, request.home, events=not ask.reading.apart)
        ask.depth, ask.exact = found.depths, found.exact
        held = found.tokens
        if model.fine:
            self._to_the_token(ask, held, names(symbols), ids)
        if model.rule is not None and held:
            # What events tell of all groups of a hybrid model's caches is usable as it is.
            blocks = self.index.blocks
            told = {target: found.exact[target] for target in held if target in found.exact and blocks.grouped(target)}
            held = {**self.checkpoints.usable(names(symbols), held, ids), **told}
        if session is not None and session.tail_target is not None:
            at = self.index.trust.get(session.tail_target)
            # What events do not tell by then is not there.
            late = at is not None and at.stored < session.awaits and now - session.ended < LAG
            if at is None or not at.exact or late:
                self._open_tail(session, symbols, found.depths, held, count - 1, model.rule)
        request.restored = found.restored
        request.holdings = {target: self._usable(target, tokens, count) for target, tokens in held.items()}

    def _share(self, model: Model, ids: float) -> None:
        """Pages of ids hold fewer tokens than pages of text: how many a cache has depends on which there are."""
        model.by_ids += 0.02 * (ids - model.by_ids)
        if abs(model.by_ids - model.fitted) > 0.1:
            model.fitted = model.by_ids
            self.fit_capacities()

    def _to_the_token(self, ask: Ask, held: dict[int, int], along: Sequence[int], ids: bytes) -> None:
        """Where pages are known and engines cache token by token."""
        behind: dict[int, int] = {}
        for target, tokens in held.items():
            if tokens % PAGE_TOKENS or ask.exact.get(target, 0) >= tokens:
                continue
            pages = tokens // PAGE_TOKENS
            if pages not in behind:
                behind[pages] = self.sequels.beyond(along, pages, ids, ask.start)
            held[target] = tokens + behind[pages]

    def _usable(self, target: int, held: int, count: int) -> int:
        """Never the last token, and whole blocks of that engine."""
        at = self.fleet.targets.get(target)
        block = (at.worker.facts.block_size if at is not None else None) or 1
        return min(held, count - 1) // block * block

    def _open_tail(
        self,
        session: Session,
        symbols: bytes,
        depth: Mapping[int, int],
        holdings: dict[int, int],
        most: int,
        rule: Rule | None,
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
            tail = session.prompt_tokens + session.tail_tokens
            if rule is not None:
                tail = rule.resumed(session.prompt_tokens, session.tail_tokens)
            if tail and self.index.believed(at, at):
                holdings[at] = max(holdings.get(at, 0), min(tail, most))

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
            self._note(ask, target)
            if model.fine and ask.ids is not None:
                self.sequels.put(names(ask.pages.symbols), ask.ids, ask.start)
            place = self.index.sent(ask.namespace, ask.pages.symbols, target.id, now, ask.ids is not None)
            if session is not None:
                session.sent, session.sent_to = now, target.id
            ask.committed = now
            ask.pin = (place, target.id)

    def _note(self, ask: Ask, target: Target) -> None:
        """What else could have been predicted of ``target``: the answer will tell who was right."""
        session, id_ = ask.session, target.id
        assert ask.predicted is not None
        ask.routed = max(ask.predicted, int(ask.depth.get(id_, 0) * ask.page))
        trust = self.index.trust.get(id_)
        if trust is not None and trust.fed:
            if ask.ids is None:
                self._tell_useless(ask.model)
            elif not ask.reading.apart:
                ask.stored = trust.stored
                ask.shadow = self._usable(id_, ask.exact.get(id_, 0), ask.request.tokens or 1)
                ask.routed = int(ask.depth.get(id_, 0) * ask.page)
        ask.used = session.sent if session is not None and session.sent_to == id_ else None

    def _tell_useless(self, model: Model | None) -> None:
        if model is not None and not model.told and model.name not in self.options.by_ids:
            model.told = True
            log.warning(
                "engines of %s publish KV events, but its prompts are routed by text, which events cannot be compared "
                "with: what their caches hold stays predicted (cure: models.%s.tokenizer and .template)",
                model.name,
                model.name,
            )

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
        reading = ask.reading
        reading.ids = reading.salt = None
        if ask.ids is not None and not ask.returns and (ask.model is None or ask.model.rule is None):
            ask.ids = b""
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
            self.index.undone(ask.namespace, ask.pages.symbols, at, place, ask.depth.get(at, 0), ask.committed)
        if session is not None and session.home == target.id and ask.request.home != target.id:
            self.sessions.unbind(session)
            if ask.request.home is not None:
                self.sessions.bind(session, ask.request.home)

    # -- learning ---------------------------------------------------------------------------------------------------

    def settle(self, ask: Ask, target: Target, usage: Usage | None, now: float, said: bytes | None = None) -> None:
        """The request was answered; ``usage`` is what the engine reported, if it did, and ``said`` the answer's token ids."""
        session, model = ask.session, ask.model
        if ask.pin is not None:
            place, at = ask.pin
            self.index.landed(ask.namespace, ask.pages.symbols, at, place, ask.committed, now)
            ask.pin = None
        if session is not None:
            session.running = max(0, session.running - 1)
            session.turns += 1
        size = ask.size
        if model is None or size is None:
            return
        if usage is not None and usage.cached is not None and ask.predicted is not None and usage.prompt:
            self._report(ask, target, ask.predicted, usage.cached, usage.prompt, now)
        if usage is not None and usage.prompt and size >= TEXT_PAGE and ask.ids is None:
            self._teach(model, size / usage.prompt)
        if model.rule is not None:
            self._checkpoint(ask, target, model.rule, usage)
        if session is None:
            return
        if ask.end is not None:
            self.sessions.remember_content(session, ask.end)
        if said is not None and ask.ids:
            ask.pages = self._said(ask, target, ask.ids + said[:-4], now)
        self.sessions.keep_pages(session, ask.pages)
        session.prompt_bytes = size
        session.prompt_tokens = usage.prompt if usage is not None else None
        if session.prompt_tokens is None and ask.ids is not None:
            session.prompt_tokens = ask.request.tokens
        # Of the last token that was sampled nothing was computed.
        session.tail_tokens = max(0, (usage.completion or 0) - 1) if usage is not None else 0
        session.tail_target = target.id
        session.ended = now
        session.awaits = ask.stored + _blocks(usage, target) if ask.stored is not None else 0

    def _said(self, ask: Ask, target: Target, ids: bytes, now: float) -> Pages:
        """What was generated is known to the token: it is held, and no open tail."""
        pages = chain(ids, ask.start, ask.pages)
        self.index.radix.insert(ask.namespace, pages.symbols, target.id, now)
        if ask.model is not None and ask.model.fine:
            self.sequels.put(names(pages.symbols), ids, ask.start)
        return pages

    def _report(self, ask: Ask, target: Target, predicted: int, cached: int, prompt: int, now: float) -> None:
        """Have what is believed of ``target`` corrected by what it found in its cache."""
        trust = self.index.trust.get(target.id)
        if trust is not None and -DOUBTED <= predicted - cached <= DOUBTED and trust.quiet:
            return
        session = ask.session
        told = Report(
            predicted,
            cached,
            prompt,
            ask.routed,
            ask.shadow,
            session is not None and ask.request.home == target.id,
            ask.used,
            ask.page or float(PAGE_TOKENS),
            target.worker.facts.block_size or PAGE_TOKENS,
        )
        self.index.report(target.id, told, now)

    def _checkpoint(self, ask: Ask, target: Target, rule: Rule, usage: Usage | None) -> None:
        """Its engine kept states along this prompt."""
        count = usage.prompt if usage is not None and usage.prompt else ask.request.tokens
        if count is None:
            return
        along = names(ask.pages.symbols) if ask.ids is not None else prefixes_of_text(ask.pages.symbols)
        page = float(PAGE_TOKENS) if ask.ids is not None else TEXT_PAGE * count / (ask.size or 1)
        for tokens in rule.positions(count, target.worker.facts.block_size or PAGE_TOKENS, ask.routed):
            self.checkpoints.put(target.id, along, tokens, ask.ids or b"", page)

    def _teach(self, model: Model, ratio: float) -> None:
        """Bytes a token, as one request shows it; capacities follow."""
        if not 0.5 <= ratio <= 64:
            return
        model.taught += 1
        weight = max(LEARNING, 1.0 / model.taught)
        model.bytes_per_token += weight * (ratio - model.bytes_per_token)
        if model.taught & (model.taught - 1) == 0 or model.taught % 256 == 0:
            self.fit_capacities()

    def described(self) -> None:
        """What is known of the workers changed."""
        for model in self.models.values():
            self._describe(model)
        for worker in self.fleet.workers.values():
            told = self.options.restore.get(worker.facts.models[0].name) if worker.facts.models else None
            for target in worker.targets:
                if told is not None and not target.calibration.restores:
                    target.rates.restore = told
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
        share = known.fitted if known is not None else 0.0
        page = share * PAGE_TOKENS + (1 - share) * TEXT_PAGE / ratio
        self.index.set_size(target.id, None if tokens is None else int(tokens / page))

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
                    "holding_tokens": _by_tier(row.holding, ask.request.restored.get(row.target.id)),
                    "running": row.target.running,
                    "homes": row.target.homes,
                }
                for row in rows
            ],
        }

    def _name(self, target: int | None) -> str | None:
        found = None if target is None else self.fleet.targets.get(target)
        return None if found is None else found.name


def _blocks(usage: Usage | None, target: Target) -> int:
    """Blocks that ``target`` stores for a request with that usage."""
    if usage is None or usage.prompt is None:
        return 0
    size = target.worker.facts.block_size or PAGE_TOKENS
    return (usage.prompt + (usage.completion or 0) - 1) // size - (usage.cached or 0) // size


def _by_tier(tokens: int, restored: tuple[int, int, int] | None) -> dict[str, int]:
    if restored is None:
        return {"device": tokens}
    host, disk, shared = restored
    return {"device": max(0, tokens - sum(restored)), "host": host, "disk": disk, "shared": shared}


def prefixes_of_text(symbols: bytes) -> list[int]:
    """Names of the prefixes of a prompt of text: its symbols say nothing of what stands before them."""
    found, before = [], 0
    for at in range(0, len(symbols), SYMBOL):
        before = xxh3_64_intdigest(symbols[at : at + SYMBOL], before)
        found.append(before)
    return found


def draw_of(request_id: bytes) -> int:
    """64 bits from a request's id."""
    return xxh3_64_intdigest(request_id)
